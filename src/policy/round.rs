//! What one round of a probe is worth: an answer, no answer in time, or a round in which our own clock stood still.

use super::outcome::{Outcome, Reason, Severity};
use std::time::Duration;

/// From this many rounds without an answer in a row, silence is a failure.
const UNANSWERED_IS_FAILURE: u32 = 3;

/// When a round ran.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// How much later than planned it began.
    pub late: Duration,
    /// How long it took.
    pub took: Duration,
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// For so many time-outs in a row.
    TimeOuts(u32),
    /// Nobody was asked: the system gave us no thread to ask with, for this reason.
    NoThread(&'static str),
}

impl Silence {
    /// What that says of whoever has `timeout` for each answer.
    pub fn outcome(self, timeout: Duration) -> Outcome {
        self.in_words(&format!("no answer within {timeout:?}"))
    }

    /// As [`Self::outcome`], in these words if it is one of time-outs.
    pub fn in_words(self, late: &str) -> Outcome {
        match self {
            Self::TimeOuts(count) => {
                let reason = Reason::new("NotAnswering", format!("{late}, {count} in a row"));
                if count < UNANSWERED_IS_FAILURE {
                    Outcome::Unknown(reason)
                } else {
                    Outcome::Failure(reason, Severity::Soft)
                }
            }
            Self::NoThread(why) => no_thread(why),
        }
    }
}

/// A look for which there was no thread. However often: that says nothing of the hardware.
pub fn no_thread(why: &str) -> Outcome {
    Outcome::Unknown(Reason::new("NoThread", format!("cannot start a thread to look with: {why}")))
}

/// Judges the rounds of one probe.
#[derive(Debug)]
pub struct Rounds {
    timeout: Duration,
    unanswered: u32,
}

impl Rounds {
    /// `timeout` bounds one run.
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, unanswered: 0 }
    }

    /// Why the round does not count, if it does not.
    ///
    /// A round that began or ended later than its timeout explains was stopped from outside (SIGSTOP, a frozen cgroup, a
    /// starved or suspended machine), so whatever it says about the hardware is not to be trusted.
    pub fn stopped(&self, timing: Timing) -> Option<Outcome> {
        let stopped = timing.late > self.timeout || timing.took > self.timeout.saturating_mul(2);
        stopped.then(|| {
            let message = format!(
                "the probe ran {:.1?} late and took {:.1?}: this process was stopped or starved",
                timing.late, timing.took
            );
            Outcome::Unknown(Reason::new("ClockLate", message))
        })
    }

    /// The probe answered in time.
    pub fn answered(&mut self) {
        self.unanswered = 0;
    }

    /// The run was abandoned at its deadline, or an abandoned run still occupies the lane.
    pub fn abandoned(&mut self) -> Outcome {
        self.unanswered = self.unanswered.saturating_add(1);
        Silence::TimeOuts(self.unanswered).outcome(self.timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(3);

    #[test]
    fn silence_is_unknown_twice_and_a_failure_the_third_time() {
        let mut rounds = Rounds::new(TIMEOUT);
        let said: Vec<_> = (0..3).map(|_| rounds.abandoned()).collect();
        assert_eq!(said.iter().map(Outcome::name).collect::<Vec<_>>(), ["unknown", "unknown", "failure"]);
        assert!(matches!(&said[2], Outcome::Failure(reason, Severity::Soft) if reason.code == "NotAnswering"));
    }

    #[test]
    fn what_there_was_no_thread_for_is_unknown_however_often_and_names_the_reason() {
        let said = Silence::NoThread("the pids limit").outcome(TIMEOUT);
        assert!(
            matches!(said, Outcome::Unknown(reason) if reason.code == "NoThread" && reason.message.contains("pids"))
        );
    }

    #[test]
    fn an_answer_between_silences_starts_the_count_again() {
        let mut rounds = Rounds::new(TIMEOUT);
        for _ in 0..5 {
            assert_eq!(rounds.abandoned().name(), "unknown");
            assert_eq!(rounds.abandoned().name(), "unknown");
            rounds.answered();
        }
    }

    #[test]
    fn a_round_of_a_stopped_process_says_nothing() {
        let rounds = Rounds::new(TIMEOUT);
        let timing = |late, took| Timing { late, took };
        let above = Duration::from_millis(1);
        for stopped in [timing(TIMEOUT + above, Duration::ZERO), timing(Duration::ZERO, TIMEOUT * 2 + above)] {
            assert!(matches!(rounds.stopped(stopped), Some(Outcome::Unknown(reason)) if reason.code == "ClockLate"));
        }
        assert_eq!(rounds.stopped(timing(TIMEOUT, TIMEOUT * 2)), None);
    }
}
