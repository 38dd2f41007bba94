//! Which words of rounds that an event has started count: one that only repeats the last proves nothing by coming soon.

use super::outcome::{Outcome, Severity};
use std::time::{Duration, Instant};

/// What starts rounds between the periods, and what that is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Events {
    /// Something new to read: every such round counts.
    News,
    /// "Look again", several times for one event: the same word counts again only after a while.
    LookAgain,
}

/// How long after a word that counted another of its kind counts, in a round that only looked again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spacing {
    /// After a failure: a hard one is confirmed after this. After a success, too, so that both are as quick.
    pub confirm_interval: Duration,
    /// A soft failure, and silence, wait for the period.
    pub period: Duration,
}

/// The words of one probe that counted.
#[derive(Debug)]
pub struct Repeats {
    spacing: Spacing,
    good: Option<Instant>,
    bad: Option<Instant>,
    silent: Option<Instant>,
}

impl Repeats {
    /// Nothing was said yet.
    pub fn new(spacing: Spacing) -> Self {
        Self { spacing, good: None, bad: None, silent: None }
    }

    /// The round begun at `now` is one that counts, and said this.
    pub fn counted(&mut self, outcome: &Outcome, now: Instant) {
        match outcome {
            Outcome::Success | Outcome::Warning(_) => (self.good, self.bad, self.silent) = (Some(now), None, None),
            Outcome::Failure(..) => (self.good, self.bad, self.silent) = (None, Some(now), None),
            Outcome::Unknown(_) => self.silent = None,
        }
    }

    /// Whether this word counts, said in a round begun at `now` that only looked again.
    pub fn counts(&self, outcome: &Outcome, now: Instant) -> bool {
        let (before, spacing) = match outcome {
            Outcome::Success | Outcome::Warning(_) => (self.good, self.spacing.confirm_interval),
            Outcome::Failure(_, Severity::Hard) => (self.bad, self.spacing.confirm_interval),
            Outcome::Failure(_, Severity::Soft) => (self.bad, self.spacing.period),
            // It makes no row, so it needs no guard.
            Outcome::Unknown(_) => (None, Duration::ZERO),
        };
        before.is_none_or(|before| now >= before + spacing)
    }

    /// Whether silence counts, in a round begun at `now` that only looked again.
    pub fn silence_counts(&self, now: Instant) -> bool {
        self.silent.is_none_or(|before| now >= before + self.spacing.period)
    }

    /// The round begun at `now` gave no answer, and that counts.
    pub fn silent(&mut self, now: Instant) {
        self.silent = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::outcome::Reason;
    use crate::policy::some_instant;

    const MS: Duration = Duration::from_millis(1);

    fn hard() -> Outcome {
        Outcome::Failure(Reason::new("PortDown", ""), Severity::Hard)
    }

    fn soft() -> Outcome {
        Outcome::Failure(Reason::new("DeviceGone", ""), Severity::Soft)
    }

    fn unknown() -> Outcome {
        Outcome::Unknown(Reason::new("NotVisible", ""))
    }

    /// Which of the words count, said in rounds at these milliseconds that all only looked again.
    fn counted(confirm_interval: Duration, words: &[(u32, Outcome)]) -> Vec<u32> {
        let start = some_instant();
        let mut repeats = Repeats::new(Spacing { confirm_interval, period: 2000 * MS });
        let mut counted = Vec::new();
        for (at, outcome) in words {
            let now = start + *at * MS;
            if repeats.counts(outcome, now) {
                repeats.counted(outcome, now);
                counted.push(*at);
            }
        }
        counted
    }

    #[test]
    fn looks_of_one_event_are_one_failure_until_the_confirm_interval_has_passed() {
        let words = [0, 50, 200, 999, 1000, 1001].map(|at| (at, hard()));
        assert_eq!(counted(1000 * MS, &words), [0, 1000]);
    }

    #[test]
    fn without_a_confirm_interval_they_confirm_each_other() {
        let words = [0, 50, 200].map(|at| (at, hard()));
        assert_eq!(counted(Duration::ZERO, &words), [0, 50, 200]);
    }

    #[test]
    fn a_soft_failure_waits_for_its_period_whatever_failed_before() {
        let words = [(0, hard()), (50, soft()), (1000, soft()), (2000, soft())];
        assert_eq!(counted(1000 * MS, &words), [0, 2000]);
        assert_eq!(counted(Duration::ZERO, &words), [0, 2000]);
    }

    #[test]
    fn a_word_that_differs_counts_at_once_and_unknown_changes_nothing() {
        let words = [(0, hard()), (50, Outcome::Success), (60, hard()), (70, unknown()), (80, hard())];
        assert_eq!(counted(1000 * MS, &words), [0, 50, 60, 70]);
    }

    #[test]
    fn recovery_is_no_hastier_than_failure() {
        let words = [0, 50, 200, 1000].map(|at| (at, Outcome::Success));
        assert_eq!(counted(1000 * MS, &words), [0, 1000]);
    }

    #[test]
    fn silence_counts_once_a_period() {
        let start = some_instant();
        let mut repeats = Repeats::new(Spacing { confirm_interval: 1000 * MS, period: 2000 * MS });
        assert!(repeats.silence_counts(start));
        repeats.silent(start);
        assert!(!repeats.silence_counts(start + 1999 * MS));
        assert!(repeats.silence_counts(start + 2000 * MS));
        repeats.counted(&Outcome::Success, start + MS);
        assert!(repeats.silence_counts(start + 2 * MS), "an answer ends the row");
    }
}
