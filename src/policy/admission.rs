//! Whether the registration socket may be shown, given the verdict.

use super::outcome::Health;
use std::time::{Duration, Instant};

/// What is known when the question is asked.
#[derive(Debug, Clone, Copy)]
pub struct Evidence {
    /// The verdict.
    pub health: Health,
    /// Every probe has said something since our start.
    pub all_heard: bool,
    /// Some probe's last word is a failure that is not decided yet.
    pub suspect: bool,
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Nothing is decided yet: leave things as they are.
    Wait,
    /// Show the socket.
    Show,
    /// Withdraw it.
    Withhold,
}

/// Decides whether the kubelet may see the driver.
///
/// At the start the first rounds decide: nothing is shown before every probe has spoken or the grace has passed, nor while
/// a failure waits for its confirmation (it would be withdrawn a moment later). Once shown, only Unhealthy withdraws it.
#[derive(Debug)]
pub struct AdmissionPolicy {
    started: Instant,
    grace: Duration,
    last: Admission,
}

impl AdmissionPolicy {
    /// `grace` bounds the wait for a verdict after `started`.
    pub fn new(started: Instant, grace: Duration) -> Self {
        Self { started, grace, last: Admission::Wait }
    }

    /// The answer for this evidence.
    pub fn decide(&mut self, evidence: Evidence, now: Instant) -> Admission {
        let grace_over = now >= self.started + self.grace;
        self.last = match (evidence.health, self.last) {
            (Health::Unhealthy, _) => Admission::Withhold,
            (Health::Healthy | Health::Unknown, Admission::Show) => Admission::Show,
            (Health::Healthy | Health::Unknown, Admission::Wait | Admission::Withhold) if evidence.suspect => self.last,
            (Health::Healthy, Admission::Wait | Admission::Withhold) if evidence.all_heard || grace_over => {
                Admission::Show
            }
            // Unknown follows Withhold only when a reload dropped the probe that was failing.
            (Health::Unknown, Admission::Wait | Admission::Withhold) if grace_over => Admission::Show,
            (Health::Healthy | Health::Unknown, Admission::Wait | Admission::Withhold) => self.last,
        };
        self.last
    }

    /// When the answer may change by time alone; never in the past.
    pub fn deadline(&self, now: Instant) -> Option<Instant> {
        (self.last == Admission::Wait).then_some(self.started + self.grace).filter(|at| *at > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;

    const GRACE: Duration = Duration::from_secs(10);

    fn evidence(health: Health) -> Evidence {
        Evidence { health, all_heard: true, suspect: false }
    }

    #[test]
    fn healthy_first_rounds_show_at_once() {
        let start = some_instant();
        assert_eq!(AdmissionPolicy::new(start, GRACE).decide(evidence(Health::Healthy), start), Admission::Show);
    }

    #[test]
    fn a_held_verdict_waits_for_the_first_rounds() {
        let start = some_instant();
        let mut admission = AdmissionPolicy::new(start, GRACE);
        let unheard = Evidence { all_heard: false, ..evidence(Health::Healthy) };
        assert_eq!(admission.decide(unheard, start), Admission::Wait);
        assert_eq!(admission.decide(unheard, start + GRACE), Admission::Show, "but never longer than the grace");
    }

    #[test]
    fn unknown_shows_after_the_grace_and_not_before() {
        let start = some_instant();
        let mut admission = AdmissionPolicy::new(start, GRACE);
        assert_eq!(
            admission.decide(evidence(Health::Unknown), start + GRACE - Duration::from_millis(1)),
            Admission::Wait
        );
        assert_eq!(admission.deadline(start), Some(start + GRACE));
        assert_eq!(admission.decide(evidence(Health::Unknown), start + GRACE), Admission::Show);
        assert_eq!(admission.deadline(start), None);
    }

    #[test]
    fn an_undecided_failure_at_the_start_is_not_shown_even_after_the_grace() {
        let start = some_instant();
        let mut admission = AdmissionPolicy::new(start, GRACE);
        for health in [Health::Unknown, Health::Healthy] {
            let suspect = Evidence { suspect: true, ..evidence(health) };
            assert_eq!(admission.decide(suspect, start + 2 * GRACE), Admission::Wait);
            assert_eq!(admission.deadline(start + 2 * GRACE), None, "nothing to wait for by the clock");
        }
        assert_eq!(admission.decide(evidence(Health::Unhealthy), start + 3 * GRACE), Admission::Withhold);
    }

    #[test]
    fn once_shown_only_unhealthy_withdraws() {
        let start = some_instant();
        let mut admission = AdmissionPolicy::new(start, GRACE);
        admission.decide(evidence(Health::Healthy), start);
        for health in [Health::Healthy, Health::Unknown] {
            let suspect = Evidence { suspect: true, all_heard: false, health };
            assert_eq!(admission.decide(suspect, start), Admission::Show);
        }
        assert_eq!(admission.decide(evidence(Health::Unhealthy), start), Admission::Withhold);
        assert_eq!(admission.decide(evidence(Health::Healthy), start), Admission::Show);
    }
}
