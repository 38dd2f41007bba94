//! When a probe runs: by its period, at once on an event, and again soon after a hard failure.

use super::outcome::{Outcome, Severity};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// Events closer than this are one round, so that a storm of them costs little.
const EVENT_GAP: Duration = Duration::from_millis(10);

/// A round that begins this much later than planned was on time: timers and other work take their moment.
const ON_TIME: Duration = Duration::from_millis(20);

/// When a probe runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    /// From the start of one round to the start of the next.
    pub period: Duration,
    /// How long one run may take.
    pub timeout: Duration,
    /// A hard failure is looked at again after this.
    pub confirm_interval: Duration,
    /// Failures in a row that decide; beyond them nothing needs confirming.
    pub failure_threshold: NonZeroU32,
}

/// The times of one probe's rounds, which never overlap.
#[derive(Debug)]
pub struct Pace {
    schedule: Schedule,
    next: Instant,
    confirm_at: Option<Instant>,
    events_from: Instant,
    hard_failures: u32,
}

impl Pace {
    /// The first round is due at `now`.
    pub fn new(schedule: Schedule, now: Instant) -> Self {
        Self { schedule, next: now, confirm_at: None, events_from: now, hard_failures: 0 }
    }

    /// When the next round is due, if no event comes before.
    pub fn due(&self) -> Instant {
        self.confirm_at.map_or(self.next, |at| at.min(self.next))
    }

    /// An event begins no round before this.
    pub fn events_from(&self) -> Instant {
        self.events_from
    }

    /// A round ran, planned for a time or begun by an event.
    pub fn ran(&mut self, planned: Option<Instant>, started: Instant, ended: Instant) {
        if self.confirm_at.is_some_and(|at| at <= started) {
            self.confirm_at = None;
        }
        let on_time = |planned: &Instant| started.saturating_duration_since(*planned) <= ON_TIME;
        // From the moment that was planned, so that probes of one period go on waking us at one time.
        self.next = planned.filter(on_time).unwrap_or(started) + self.schedule.period;
        self.events_from = ended + EVENT_GAP;
    }

    /// That round does not count, so the next one follows at once.
    pub fn again(&mut self) {
        self.next = self.events_from;
    }

    /// What that round said.
    pub fn said(&mut self, outcome: Option<&Outcome>, started: Instant) {
        match outcome {
            Some(Outcome::Failure(_, Severity::Hard)) => {
                self.hard_failures = self.hard_failures.saturating_add(1);
                if self.hard_failures < self.schedule.failure_threshold.get() {
                    self.confirm_at = Some(started + self.schedule.confirm_interval);
                }
            }
            Some(Outcome::Success | Outcome::Warning(_) | Outcome::Failure(_, Severity::Soft)) => {
                self.hard_failures = 0
            }
            Some(Outcome::Unknown(_)) | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::outcome::Reason;
    use crate::policy::some_instant;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_hard_failure_is_looked_at_again_until_it_is_decided_and_periods_keep_their_beat() {
        let start = some_instant();
        let failure_threshold = NonZeroU32::new(3).unwrap();
        let mut pace = Pace::new(
            Schedule { period: 10 * SECOND, timeout: SECOND, confirm_interval: SECOND, failure_threshold },
            start,
        );
        let failure = Outcome::Failure(Reason::new("PortDown", ""), Severity::Hard);
        let mut rounds = Vec::new();
        for _ in 0..5 {
            let due = pace.due();
            rounds.push((due - start).as_secs());
            pace.ran(Some(due), due, due + SECOND / 2);
            pace.said(Some(&failure), due);
        }
        assert_eq!(rounds, [0, 1, 2, 12, 22]);
        let event = pace.events_from() + SECOND;
        pace.ran(None, event, event);
        pace.said(Some(&Outcome::Success), event);
        assert_eq!(pace.due(), event + 10 * SECOND);
        pace.again();
        assert_eq!(pace.due(), event + EVENT_GAP);
    }
}
