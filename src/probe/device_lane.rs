//! One device's lane: asked once at a time, and never waited for twice, so that a device that hangs does not make every round last
//! as long as it may.

use super::lane::{Abandoned, Lane};
use crate::policy::round::Silence;
use std::time::Duration;
use tokio::time::Instant;

/// A lane, and how long it has been silent.
#[derive(Debug)]
pub(super) struct DeviceLane {
    lane: Lane,
    patience: Patience,
}

/// Counts time-outs without an answer.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// Those in a row that were waited for.
    silent: u32,
    /// When was asked what has not been answered.
    asked: Option<Instant>,
}

impl DeviceLane {
    /// Its thread, named `name`, starts with the first job.
    pub(super) fn new(name: impl Into<String>) -> Self {
        Self { lane: Lane::new(name), patience: Patience::default() }
    }

    /// Whether a job is outstanding.
    pub(super) fn is_busy(&self) -> bool {
        self.lane.is_busy()
    }

    /// Runs `job`, and waits for it until `deadline`; not at all while one from before is outstanding. Such a one counts as one more
    /// time-out with each `timeout` that passes.
    ///
    /// # Errors
    /// Silence.
    pub(super) async fn ask<T: Send + 'static>(
        &mut self,
        deadline: Instant,
        timeout: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Silence> {
        if let Some(silence) = self.patience.still_waiting(self.lane.is_busy(), timeout) {
            return Err(silence);
        }
        let asked = self.patience.ask();
        let answer = self.lane.run(deadline.saturating_duration_since(asked), job).await;
        self.patience.heard(answer)
    }
}

impl Patience {
    /// How long what was asked before has been silent, if it still `is_busy`.
    pub(super) fn still_waiting(&self, is_busy: bool, timeout: Duration) -> Option<Silence> {
        let asked = self.asked.filter(|_| is_busy)?;
        let passed = (Instant::now() - asked).as_nanos() / timeout.as_nanos().max(1);
        // The first of them was waited for.
        let more = u32::try_from(passed).unwrap_or(u32::MAX).saturating_sub(1);
        Some(Silence::TimeOuts(self.silent.saturating_add(more)))
    }

    /// Something is asked now.
    pub(super) fn ask(&mut self) -> Instant {
        *self.asked.insert(Instant::now())
    }

    /// What came of it.
    pub(super) fn heard<T>(&mut self, answer: Result<T, Abandoned>) -> Result<T, Silence> {
        match answer {
            Ok(answer) => {
                self.silent = 0;
                Ok(answer)
            }
            Err(Abandoned::Late) => {
                self.silent = self.silent.saturating_add(1);
                Err(Silence::TimeOuts(self.silent))
            }
            // Nobody was asked.
            Err(Abandoned::NoThread(why)) => Err(Silence::NoThread(why)),
        }
    }
}

#[cfg(test)]
impl DeviceLane {
    /// Keeps the lane busy, and has been silent once for it, until the sender is dropped.
    pub(super) async fn hang(&mut self) -> std::sync::mpsc::Sender<()> {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let soon = Instant::now() + Duration::from_millis(10);
        assert!(self.ask(soon, Duration::from_secs(3600), move || held.recv().is_ok()).await.is_err());
        release
    }

    /// Takes its thread away; it gets no other.
    pub(super) fn lose_its_thread(&mut self) {
        self.lane = Lane::with_stack("test", super::lane::NO_STACK);
    }

    /// How often it has been silent.
    pub(super) fn be_silent(&mut self, rounds: u32) {
        self.patience.silent = rounds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_device_that_cannot_be_asked_for_want_of_a_thread_is_not_silent() {
        let mut lane = DeviceLane::new("test");
        lane.lose_its_thread();
        lane.be_silent(2);
        for _ in 0..3 {
            let answer = lane.ask(Instant::now() + LONG, LONG, || 7).await;
            assert!(matches!(answer, Err(Silence::NoThread(_))), "{answer:?}");
        }
        assert_eq!(lane.patience.silent, 2, "and says nothing of the row");
    }

    #[tokio::test]
    async fn a_busy_lane_is_not_waited_for_and_its_silence_counts_by_whole_timeouts() {
        let mut lane = DeviceLane::new("test");
        let release = lane.hang().await;
        let timeout = Duration::from_secs(3600);
        let now = Instant::now();
        for (hours, counted) in [(0, 1), (1, 1), (2, 2), (3, 3), (10, 10)] {
            lane.patience.asked = now.checked_sub(timeout * hours);
            if lane.patience.asked.is_none() {
                // The machine has not been up for so long.
                continue;
            }
            assert_eq!(lane.ask(now + timeout, timeout, || ()).await, Err(Silence::TimeOuts(counted)));
        }
        assert!(now.elapsed() < LONG, "it was waited for");
        drop(release);
        while lane.is_busy() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(lane.ask(now + timeout, timeout, || 7).await, Ok(7));
        drop(lane.hang().await);
        assert_eq!(lane.patience.silent, 1, "an answer ends the row");
    }
}
