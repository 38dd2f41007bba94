//! What one round of a probe is worth: an answer, no answer in time, or a round in which our own clock stood still.

use super::outcome::{Outcome, Reason, Severity};
use std::time::Duration;

/// From this many rounds without an answer in a row, silence is a failure.
const UNANSWERED_IS_FAILURE: u32 = 3;

/// How a round ended.
#[derive(Debug)]
pub enum Answer {
    /// The probe answered; `None` when it saw nothing that counts again.
    Given(Option<Outcome>),
    /// The run was abandoned at its deadline, or an abandoned run still occupies the lane.
    Abandoned,
}

/// When a round ran.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// How much later than planned it began.
    pub late: Duration,
    /// How long it took.
    pub took: Duration,
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

    /// What the round says, if anything.
    ///
    /// A round that began or ended later than its timeout explains was stopped from outside (SIGSTOP, a frozen cgroup, a
    /// starved or suspended machine), so whatever it says about the hardware is not to be trusted.
    pub fn judge(&mut self, timing: Timing, answer: Answer) -> Option<Outcome> {
        if timing.late > self.timeout || timing.took > self.timeout.saturating_mul(2) {
            return Some(Outcome::Unknown(Reason::new(
                "ClockLate",
                format!(
                    "the probe ran {:.1?} late and took {:.1?}: this process was stopped or starved",
                    timing.late, timing.took
                ),
            )));
        }
        match answer {
            Answer::Given(outcome) => {
                self.unanswered = 0;
                outcome
            }
            Answer::Abandoned => {
                self.unanswered = self.unanswered.saturating_add(1);
                let reason = Reason::new(
                    "NotAnswering",
                    format!("no answer within {:?}, {} in a row", self.timeout, self.unanswered),
                );
                Some(if self.unanswered < UNANSWERED_IS_FAILURE {
                    Outcome::Unknown(reason)
                } else {
                    Outcome::Failure(reason, Severity::Soft)
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(3);
    const PROMPT: Timing = Timing {
        late: Duration::ZERO,
        took: Duration::from_millis(1),
    };
    const AT_DEADLINE: Timing = Timing {
        late: Duration::ZERO,
        took: TIMEOUT,
    };

    fn code(outcome: Option<Outcome>) -> (&'static str, &'static str) {
        let outcome = outcome.unwrap();
        (outcome.name(), outcome.reason().map_or("", |reason| reason.code))
    }

    #[test]
    fn silence_is_unknown_twice_and_a_failure_the_third_time() {
        let mut rounds = Rounds::new(TIMEOUT);
        assert_eq!(
            code(rounds.judge(AT_DEADLINE, Answer::Abandoned)),
            ("unknown", "NotAnswering")
        );
        assert_eq!(
            code(rounds.judge(AT_DEADLINE, Answer::Abandoned)),
            ("unknown", "NotAnswering")
        );
        assert_eq!(
            code(rounds.judge(AT_DEADLINE, Answer::Abandoned)),
            ("failure", "NotAnswering")
        );
    }

    #[test]
    fn an_answer_between_silences_starts_the_count_again() {
        let mut rounds = Rounds::new(TIMEOUT);
        for _ in 0..5 {
            rounds.judge(AT_DEADLINE, Answer::Abandoned);
            rounds.judge(AT_DEADLINE, Answer::Abandoned);
            assert_eq!(rounds.judge(PROMPT, Answer::Given(None)), None);
        }
        assert_eq!(code(rounds.judge(AT_DEADLINE, Answer::Abandoned)).0, "unknown");
    }

    #[test]
    fn a_round_of_a_stopped_process_says_nothing() {
        let failure = || Answer::Given(Some(Outcome::Failure(Reason::new("PortDown", ""), Severity::Hard)));
        let mut rounds = Rounds::new(TIMEOUT);
        let late = Timing {
            late: TIMEOUT + Duration::from_millis(1),
            took: Duration::ZERO,
        };
        assert_eq!(code(rounds.judge(late, failure())), ("unknown", "ClockLate"));
        let long = Timing {
            late: Duration::ZERO,
            took: TIMEOUT * 2 + Duration::from_millis(1),
        };
        assert_eq!(code(rounds.judge(long, failure())), ("unknown", "ClockLate"));
        assert_eq!(code(rounds.judge(PROMPT, failure())), ("failure", "PortDown"));
    }
}
