//! Gives one probe its rounds: by its period, at once on an event, and again soon after a hard failure.

use super::Probe;
use super::lane::Abandoned;
use super::observed::Observed;
use crate::policy::outcome::Outcome;
use crate::policy::pace::Pace;
pub use crate::policy::pace::Schedule;
use crate::policy::repeats::{Events, Repeats, Spacing};
use crate::policy::round::{Rounds, Timing, no_thread};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// What one round said.
#[derive(Debug)]
pub struct Report {
    /// Which runner's probe.
    pub runner: RunnerId,
    /// Its word; `None` when it saw nothing that counts again.
    pub outcome: Option<Outcome>,
    /// What it saw beside that, if it says so and the round counts.
    pub observed: Option<Arc<Observed>>,
    /// When the round ended.
    pub at: Instant,
    /// How long it took.
    pub took: Duration,
    /// When the next one is due, if no event comes before.
    pub next: Instant,
}

/// Tells runners apart, those of earlier settings included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunnerId(pub u64);

/// Runs `probe` until `stop`; rounds never overlap.
pub async fn run_rounds<P: Probe>(
    runner: RunnerId,
    mut probe: P,
    schedule: Schedule,
    reports: mpsc::Sender<Report>,
    stop: CancellationToken,
) {
    let mut rounds = Rounds::new(schedule.timeout);
    let mut repeats = Repeats::new(Spacing { confirm_interval: schedule.confirm_interval, period: schedule.period });
    let mut pace = Pace::new(schedule, Instant::now().into_std());
    loop {
        let due = Instant::from_std(pace.due());
        let events_from = Instant::from_std(pace.events_from());
        let planned = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep_until(due) => Some(due),
            // The gap after the event: a probe without events must not wake us for it. An event that is overtaken by the
            // period has its round.
            () = async { probe.changed().await; sleep_until(events_from).await } => None,
        };
        let started = Instant::now();
        let looks_again = planned.is_none() && P::EVENTS == Events::LookAgain;
        let late = planned.map_or(Duration::ZERO, |planned| started - planned);
        let seen = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            seen = probe.look(schedule.timeout) => seen,
        };
        let ended = Instant::now();
        pace.ran(planned.map(Instant::into_std), started.into_std(), ended.into_std());
        let stopped = rounds.stopped(Timing { late, took: ended - started });
        let (outcome, observed) = match (stopped, seen) {
            (Some(stopped), _) => {
                // It says nothing, so it is not judged.
                pace.again();
                (Some(stopped), None)
            }
            (None, Ok(seen)) => {
                rounds.answered();
                let word = probe.judge(seen, started.into_std());
                let word = word.filter(|word| !looks_again || repeats.counts(word, started.into_std()));
                (word.inspect(|word| repeats.counted(word, started.into_std())), probe.observed())
            }
            // Nobody was asked, so nobody was silent.
            (None, Err(Abandoned::NoThread(why))) => {
                let word = no_thread(why);
                repeats.counted(&word, started.into_std());
                (Some(word), None)
            }
            (None, Err(Abandoned::Late)) => {
                let counts = !looks_again || repeats.silence_counts(started.into_std());
                let word = counts.then(|| {
                    repeats.silent(started.into_std());
                    rounds.abandoned()
                });
                (word, None)
            }
        };
        pace.said(outcome.as_ref(), started.into_std());
        let report =
            Report { runner, outcome, observed, at: ended, took: ended - started, next: Instant::from_std(pace.due()) };
        if reports.send(report).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::outcome::Reason;
    use crate::policy::outcome::Severity;
    use std::num::NonZeroU32;
    use std::sync::{Arc, Mutex};
    use tokio::sync::Notify;

    /// Notes when it ran; says what it is told to.
    struct Script {
        runs: Arc<Mutex<Vec<Instant>>>,
        says: Outcome,
        event: Arc<Notify>,
        takes: Duration,
    }

    impl Probe for Script {
        type Seen = Outcome;

        async fn look(&mut self, timeout: Duration) -> Result<Outcome, Abandoned> {
            self.runs.lock().unwrap().push(Instant::now());
            match tokio::time::timeout(timeout, tokio::time::sleep(self.takes)).await {
                Ok(()) => Ok(self.says.clone()),
                Err(_) => Err(Abandoned::Late),
            }
        }

        fn judge(&mut self, seen: Outcome, _now: std::time::Instant) -> Option<Outcome> {
            Some(seen)
        }

        async fn changed(&mut self) {
            self.event.notified().await;
        }
    }

    /// Nothing can be looked at.
    struct Threadless;

    impl Probe for Threadless {
        type Seen = Outcome;

        async fn look(&mut self, _timeout: Duration) -> Result<Outcome, Abandoned> {
            Err(Abandoned::NoThread("the pids limit is reached"))
        }

        fn judge(&mut self, seen: Outcome, _now: std::time::Instant) -> Option<Outcome> {
            Some(seen)
        }

        async fn changed(&mut self) {
            std::future::pending().await
        }
    }

    struct LooksAgain(Script);

    impl Probe for LooksAgain {
        type Seen = Outcome;

        const EVENTS: Events = Events::LookAgain;

        async fn look(&mut self, timeout: Duration) -> Result<Outcome, Abandoned> {
            self.0.look(timeout).await
        }

        fn judge(&mut self, seen: Outcome, now: std::time::Instant) -> Option<Outcome> {
            self.0.judge(seen, now)
        }

        async fn changed(&mut self) {
            self.0.changed().await;
        }
    }

    fn schedule(failure_threshold: u32) -> Schedule {
        Schedule {
            period: Duration::from_secs(30),
            timeout: Duration::from_secs(3),
            confirm_interval: Duration::from_secs(1),
            failure_threshold: NonZeroU32::new(failure_threshold).unwrap(),
        }
    }

    struct Bed {
        runs: Arc<Mutex<Vec<Instant>>>,
        event: Arc<Notify>,
        stop: CancellationToken,
        reports: mpsc::Receiver<Report>,
        start: Instant,
    }

    impl Bed {
        fn start(says: Outcome, takes: Duration, failure_threshold: u32) -> Self {
            Self::run(says, takes, schedule(failure_threshold), |script| script)
        }

        /// With a probe whose events say "look again".
        fn looking_again(says: Outcome, schedule: Schedule) -> Self {
            Self::run(says, Duration::ZERO, schedule, LooksAgain)
        }

        fn run<P: Probe + 'static>(
            says: Outcome,
            takes: Duration,
            schedule: Schedule,
            probe: impl FnOnce(Script) -> P,
        ) -> Self {
            let (runs, event, stop) = (Arc::default(), Arc::new(Notify::new()), CancellationToken::new());
            let (sender, reports) = mpsc::channel(1000);
            let probe = probe(Script { runs: Arc::clone(&runs), says, event: Arc::clone(&event), takes });
            #[expect(clippy::disallowed_methods, reason = "a test's own task")]
            tokio::spawn(run_rounds(RunnerId(0), probe, schedule, sender, stop.clone()));
            Self { runs, event, stop, reports, start: Instant::now() }
        }

        /// An event, and another round for it.
        async fn event(&self) {
            self.event.notify_one();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }

        /// When there were words that count, in milliseconds.
        fn counted(&mut self) -> Vec<u128> {
            let reports = std::iter::from_fn(|| self.reports.try_recv().ok());
            let counted = reports.filter(|report| report.outcome.is_some());
            counted.map(|report| (report.at - self.start).as_millis()).collect()
        }

        fn seconds(&self) -> Vec<u64> {
            self.runs.lock().unwrap().iter().map(|at| (*at - self.start).as_secs()).collect()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn runs_at_once_and_then_once_a_period() {
        let bed = Bed::start(Outcome::Success, Duration::ZERO, 2);
        tokio::time::sleep(Duration::from_secs(95)).await;
        assert_eq!(bed.seconds(), [0, 30, 60, 90]);
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn first_hard_failure_is_confirmed_after_the_confirm_interval() {
        let failure = Outcome::Failure(Reason::new("PortDown", ""), Severity::Hard);
        let bed = Bed::start(failure, Duration::ZERO, 2);
        tokio::time::sleep(Duration::from_secs(62)).await;
        assert_eq!(bed.seconds(), [0, 1, 31, 61], "and the decided failure returns to the period");
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn soft_failure_waits_for_its_period() {
        let failure = Outcome::Failure(Reason::new("NotAnswering", ""), Severity::Soft);
        let bed = Bed::start(failure, Duration::ZERO, 2);
        tokio::time::sleep(Duration::from_secs(35)).await;
        assert_eq!(bed.seconds(), [0, 30]);
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_runs_at_once_and_a_storm_is_bounded() {
        let bed = Bed::start(Outcome::Success, Duration::ZERO, 2);
        tokio::time::sleep(Duration::from_secs(5)).await;
        bed.event.notify_one();
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(bed.seconds(), [0, 5]);
        for _ in 0..1_000 {
            bed.event.notify_one();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(bed.runs.lock().unwrap().len() < 110);
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_round_of_a_stopped_process_is_unknown_and_followed_by_one_that_counts() {
        let failure = Outcome::Failure(Reason::new("PortDown", ""), Severity::Soft);
        let mut bed = Bed::start(failure, Duration::ZERO, 2);
        assert_eq!(bed.reports.recv().await.unwrap().outcome.unwrap().name(), "failure");
        // The clock jumps over the next round without giving it a turn.
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!(bed.reports.recv().await.unwrap().outcome.unwrap().name(), "unknown");
        assert_eq!(bed.reports.recv().await.unwrap().outcome.unwrap().name(), "failure");
        assert_eq!(bed.seconds(), [0, 3600, 3600]);
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn rounds_keep_to_their_clock_and_begin_it_anew_after_a_late_one() {
        let mut bed = Bed::start(Outcome::Success, Duration::ZERO, 2);
        let mut next = Vec::new();
        // The clock jumps there without giving the round a turn before.
        for (woken, due) in [(0, 30_000), (30_005, 60_000), (60_019, 90_000), (90_900, 120_900), (120_900, 150_900)] {
            tokio::time::advance((bed.start + Duration::from_millis(woken)) - Instant::now()).await;
            let report = bed.reports.recv().await.unwrap();
            next.push(((report.next - bed.start).as_millis(), due));
        }
        assert!(next.iter().all(|(next, due)| next == due), "{next:?}");
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_probe_is_abandoned_each_time_and_never_overlaps() {
        let mut bed = Bed::start(Outcome::Success, Duration::from_secs(3600), 2);
        let mut said = Vec::new();
        for _ in 0..3 {
            said.push(bed.reports.recv().await.unwrap().outcome.unwrap().name());
        }
        assert_eq!(said, ["unknown", "unknown", "failure"]);
        assert_eq!(bed.seconds(), [0, 30, 60]);
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_gets_no_thread_is_unknown_for_as_long_as_that_lasts() {
        let mut bed = Bed::run(Outcome::Success, Duration::ZERO, schedule(2), |_| Threadless);
        for _ in 0..10 {
            let outcome = bed.reports.recv().await.unwrap().outcome.unwrap();
            assert!(matches!(&outcome, Outcome::Unknown(reason) if reason.code == "NoThread"), "{outcome:?}");
        }
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn looks_of_an_event_are_one_failure_that_is_confirmed_after_the_confirm_interval() {
        let failure = Outcome::Failure(Reason::new("PortDown", ""), Severity::Hard);
        let mut bed = Bed::looking_again(failure, schedule(2));
        for _ in 0..10 {
            bed.event().await;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(bed.counted(), [0, 1000]);
        assert!(bed.runs.lock().unwrap().len() > 10, "it did look");
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_confirm_interval_a_failure_is_confirmed_at_once() {
        let failure = Outcome::Failure(Reason::new("PortDown", ""), Severity::Hard);
        let mut bed = Bed::looking_again(failure, Schedule { confirm_interval: Duration::ZERO, ..schedule(2) });
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(bed.counted(), [0, 0]);
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_soft_failure_waits_for_its_period_through_any_number_of_events() {
        let failure = Outcome::Failure(Reason::new("DeviceGone", ""), Severity::Soft);
        let mut bed = Bed::looking_again(failure, schedule(2));
        let mut counted = Vec::new();
        for _ in 0..3_100 {
            bed.event().await;
            counted.extend(bed.counted());
        }
        assert!(
            matches!(counted[..], [0, second, third] if (30_000..30_040).contains(&second) && third >= 60_000),
            "{counted:?}"
        );
        bed.stop.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn events_do_not_hasten_the_verdict_on_a_silent_probe() {
        let mut bed = Bed::run(
            Outcome::Success,
            Duration::from_secs(3600),
            Schedule { timeout: Duration::from_millis(100), ..schedule(2) },
            LooksAgain,
        );
        for _ in 0..300 {
            bed.event().await;
        }
        assert_eq!(bed.counted().len(), 1);
        assert!(bed.runs.lock().unwrap().len() > 10, "it did look");
        bed.stop.cancel();
    }
}
