//! What health does: from the verdict, the volumes in use and the operator's word to the fence and the registration.

use super::admission::{Admission, AdmissionPolicy, Evidence};
use super::fence_override::{Forced, Override};
use super::outcome::Health;
use super::volumes::InUse;
use std::time::{Duration, Instant};

/// `--on-unhealthy`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// Tells, and does nothing.
    Observe,
    /// Refuses new work.
    Fence,
    /// Withdraws the driver at once, volumes or not.
    Deregister,
    /// Refuses new work, and withdraws the driver once its volumes are out.
    FenceThenDeregister,
}

impl Reaction {
    /// All, in the order of the help text.
    pub const ALL: [Self; 4] = [Self::Observe, Self::Fence, Self::Deregister, Self::FenceThenDeregister];

    /// Its name on the command line, in status and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Fence => "fence",
            Self::Deregister => "deregister",
            Self::FenceThenDeregister => "fence-then-deregister",
        }
    }

    /// Whether it needs the proxy.
    pub fn fences(self) -> bool {
        match self {
            Self::Observe | Self::Deregister => false,
            Self::Fence | Self::FenceThenDeregister => true,
        }
    }
}

/// The reaction and its waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// What unhealthy does.
    pub reaction: Reaction,
    /// Unhealthy without a break for this long, before a driver without volumes is withdrawn.
    pub deregister_after: Duration,
    /// Unhealthy for this long, before it is withdrawn with volumes. `None`: never.
    pub drain_timeout: Option<Duration>,
}

/// What is known when the question is asked.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// The verdict and what speaks for it.
    pub evidence: Evidence,
    /// Since when the verdict holds.
    pub since: Instant,
    /// Whether volumes are here.
    pub in_use: InUse,
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// New work is refused.
    pub fenced: bool,
    /// Whether the kubelet may see the driver.
    pub admission: Admission,
    /// When the answer may change by time alone; never in the past.
    pub next: Option<Instant>,
}

/// Decides about fence and registration.
#[derive(Debug)]
pub struct ReactionPolicy {
    rules: Rules,
    admission: AdmissionPolicy,
    forced: Option<Override>,
    /// The kubelet was allowed to see the driver in this run, so it may have it.
    shown: bool,
    /// Withdrawn for the outage that is going on.
    withdrawn: bool,
    /// An operator held the fence down when this was asked last.
    was_off: bool,
    /// When that ended: what happened before gave volumes no time to get out.
    counted_from: Option<Instant>,
}

impl ReactionPolicy {
    /// `grace` bounds the wait for a verdict after `started`.
    pub fn new(rules: Rules, started: Instant, grace: Duration) -> Self {
        Self {
            rules,
            admission: AdmissionPolicy::new(started, grace),
            forced: None,
            shown: false,
            withdrawn: false,
            was_off: false,
            counted_from: None,
        }
    }

    /// Takes an operator's word, or takes it back.
    pub fn force(&mut self, forced: Option<Override>) {
        self.forced = forced;
    }

    /// The operator's word, as long as it holds.
    pub fn forced(&self, now: Instant) -> Option<&Override> {
        self.forced.as_ref().filter(|forced| forced.until > now)
    }

    /// The answer for these facts.
    pub fn decide(&mut self, facts: Facts, now: Instant) -> Decision {
        if self.forced.as_ref().is_some_and(|forced| forced.until <= now) {
            self.forced = None;
        }
        let off = self.forced.as_ref().is_some_and(|forced| forced.forced == Forced::Off);
        if off || self.was_off {
            self.counted_from = Some(now);
        }
        self.was_off = off;
        let mut decision = self.by_health(facts, now);
        if off {
            // It is shown now, and volumes may come: the next withdrawal is another one.
            self.withdrawn = false;
        }
        if let Some(forced) = &self.forced {
            match forced.forced {
                Forced::Off => decision = Decision { fenced: false, admission: Admission::Show, next: None },
                Forced::On => decision.fenced = true,
            }
            decision.next = decision.next.into_iter().chain([forced.until]).min();
        }
        self.shown |= decision.admission == Admission::Show;
        decision
    }

    fn by_health(&mut self, facts: Facts, now: Instant) -> Decision {
        // Asked in any case, so that it knows what went before when an override ends.
        let admission = self.admission.decide(facts.evidence, now);
        let unhealthy = facts.evidence.health == Health::Unhealthy;
        let fenced = unhealthy && self.rules.reaction.fences();
        let (admission, wake) = match (self.rules.reaction, admission) {
            (Reaction::Observe, _) => (Admission::Show, None),
            (Reaction::Fence, Admission::Withhold) => (Admission::Show, None),
            (Reaction::FenceThenDeregister, Admission::Withhold) if unhealthy => self.let_out(facts, now),
            // The outage is over, and a new failure waits for its confirmation: all stays as it is.
            (Reaction::FenceThenDeregister, Admission::Withhold) if !self.withdrawn => (Admission::Show, None),
            (Reaction::Deregister | Reaction::FenceThenDeregister, Admission::Withhold) => (Admission::Withhold, None),
            (Reaction::Fence | Reaction::Deregister | Reaction::FenceThenDeregister, admission) => {
                (admission, self.admission.deadline(now))
            }
        };
        if !unhealthy && admission == Admission::Show {
            self.withdrawn = false;
        }
        Decision { fenced, admission, next: wake.filter(|at| *at > now) }
    }

    /// Withdraws once the volumes are out, or there is no more time for that. A driver that was never shown and has no volumes
    /// is not shown at all; once withdrawn it stays so until the outage is over.
    fn let_out(&mut self, facts: Facts, now: Instant) -> (Admission, Option<Instant>) {
        let patience = if self.shown { self.rules.deregister_after } else { Duration::ZERO };
        let since = self.counted_from.map_or(facts.since, |from| from.max(facts.since));
        let empty_from = (facts.in_use == InUse::No).then(|| since + patience);
        let drained_from = self.rules.drain_timeout.map(|timeout| since + timeout.max(self.rules.deregister_after));
        let from = empty_from.into_iter().chain(drained_from).min();
        self.withdrawn |= from.is_some_and(|from| from <= now);
        if self.withdrawn { (Admission::Withhold, None) } else { (Admission::Show, from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::fence_override::Order;
    use crate::policy::some_instant;
    use proptest::prelude::*;

    const AFTER: Duration = Duration::from_secs(15);
    const GRACE: Duration = Duration::from_secs(10);

    fn rules(reaction: Reaction) -> Rules {
        Rules { reaction, deregister_after: AFTER, drain_timeout: None }
    }

    fn facts(health: Health, since: Instant, in_use: InUse) -> Facts {
        Facts { evidence: Evidence { health, all_heard: true, suspect: false }, since, in_use }
    }

    /// Shown while healthy.
    fn running(rules: Rules, start: Instant) -> ReactionPolicy {
        let mut policy = ReactionPolicy::new(rules, start, GRACE);
        let first = policy.decide(facts(Health::Healthy, start, InUse::No), start);
        assert_eq!(first, Decision { fenced: false, admission: Admission::Show, next: None });
        policy
    }

    #[test]
    fn each_reaction_does_what_its_name_says() {
        let start = some_instant();
        for (reaction, fenced, admission) in [
            (Reaction::Observe, false, Admission::Show),
            (Reaction::Fence, true, Admission::Show),
            (Reaction::Deregister, false, Admission::Withhold),
            (Reaction::FenceThenDeregister, true, Admission::Show),
        ] {
            let mut policy = running(rules(reaction), start);
            let decision = policy.decide(facts(Health::Unhealthy, start, InUse::No), start);
            assert_eq!((decision.fenced, decision.admission), (fenced, admission), "{reaction:?}");
            assert_eq!(decision.next.is_some(), reaction == Reaction::FenceThenDeregister);
            let decision = policy.decide(facts(Health::Healthy, start, InUse::No), start);
            assert_eq!((decision.fenced, decision.admission), (false, Admission::Show), "{reaction:?}");
        }
    }

    #[test]
    fn withdrawn_once_the_volumes_are_out_and_shown_again_with_the_recovery() {
        let start = some_instant();
        let mut policy = running(rules(Reaction::FenceThenDeregister), start);
        let later = start + 100 * AFTER;
        for in_use in [InUse::Yes(1), InUse::Unknown] {
            let decision = policy.decide(facts(Health::Unhealthy, start, in_use), later);
            assert_eq!(decision, Decision { fenced: true, admission: Admission::Show, next: None }, "{in_use:?}");
        }
        let out = policy.decide(facts(Health::Unhealthy, start, InUse::No), later);
        assert_eq!(out.admission, Admission::Withhold);
        let again = policy.decide(facts(Health::Unhealthy, start, InUse::Unknown), later);
        assert_eq!(again.admission, Admission::Withhold, "no going back and forth within an outage");
        assert_eq!(policy.decide(facts(Health::Healthy, later, InUse::No), later).admission, Admission::Show);
        let next = policy.decide(facts(Health::Unhealthy, later, InUse::Yes(1)), later + 2 * AFTER);
        assert_eq!(next.admission, Admission::Show, "the next outage begins anew");
    }

    #[test]
    fn a_failure_that_waits_for_its_confirmation_after_a_recovery_changes_nothing() {
        let start = some_instant();
        for (in_use, admission) in [(InUse::Yes(1), Admission::Show), (InUse::No, Admission::Withhold)] {
            let mut policy = running(rules(Reaction::FenceThenDeregister), start);
            let later = start + AFTER;
            assert_eq!(policy.decide(facts(Health::Unhealthy, start, in_use), later).admission, admission);
            let mut suspect = facts(Health::Healthy, later, in_use);
            suspect.evidence.suspect = true;
            assert_eq!(policy.decide(suspect, later).admission, admission);
            assert_eq!(policy.decide(facts(Health::Healthy, later, in_use), later).admission, Admission::Show);
        }
    }

    #[test]
    fn the_end_of_an_override_lets_volumes_out_first() {
        let start = some_instant();
        for withdrawn_before in [true, false] {
            let mut policy = running(rules(Reaction::FenceThenDeregister), start);
            let sick = |in_use| facts(Health::Unhealthy, start, in_use);
            let mut now = start + 10 * AFTER;
            if withdrawn_before {
                assert_eq!(policy.decide(sick(InUse::No), now).admission, Admission::Withhold);
            }
            policy.force(Some(Override::new(Forced::Off, AFTER, "x", Order::default(), now).unwrap()));
            assert_eq!(policy.decide(sick(InUse::No), now).admission, Admission::Show);
            now += AFTER;
            let ended = policy.decide(sick(InUse::Yes(1)), now);
            assert_eq!((ended.fenced, ended.admission), (true, Admission::Show), "a volume came meanwhile");
            let later = policy.decide(sick(InUse::No), now + AFTER - Duration::from_millis(1));
            assert_eq!((later.admission, later.next), (Admission::Show, Some(now + AFTER)), "the fence is new");
            assert_eq!(policy.decide(sick(InUse::No), now + AFTER).admission, Admission::Withhold);
        }
    }

    #[test]
    fn a_drain_timeout_ends_the_wait_for_volumes() {
        let start = some_instant();
        let drain = Duration::from_secs(600);
        let limited = Rules { drain_timeout: Some(drain), ..rules(Reaction::FenceThenDeregister) };
        let mut policy = running(limited, start);
        let before =
            policy.decide(facts(Health::Unhealthy, start, InUse::Yes(3)), start + drain - Duration::from_millis(1));
        assert_eq!((before.admission, before.next), (Admission::Show, Some(start + drain)));
        let after = policy.decide(facts(Health::Unhealthy, start, InUse::Yes(3)), start + drain);
        assert_eq!((after.admission, after.next), (Admission::Withhold, None));
    }

    #[test]
    fn a_port_dead_at_boot_is_not_shown_and_one_dead_at_our_restart_is_as_long_as_volumes_may_be_here() {
        let start = some_instant();
        let at_start = |in_use| {
            let mut policy = ReactionPolicy::new(rules(Reaction::FenceThenDeregister), start, GRACE);
            policy.decide(facts(Health::Unhealthy, start, in_use), start)
        };
        assert_eq!(at_start(InUse::No).admission, Admission::Withhold);
        for in_use in [InUse::Yes(1), InUse::Unknown] {
            assert_eq!(at_start(in_use), Decision { fenced: true, admission: Admission::Show, next: None });
        }
    }

    #[test]
    fn all_but_observe_wait_for_the_first_rounds() {
        let start = some_instant();
        for reaction in Reaction::ALL {
            let mut policy = ReactionPolicy::new(rules(reaction), start, GRACE);
            let mut unheard = facts(Health::Unknown, start, InUse::Unknown);
            unheard.evidence.all_heard = false;
            let decision = policy.decide(unheard, start);
            let (admission, next) = match reaction {
                Reaction::Observe => (Admission::Show, None),
                Reaction::Fence | Reaction::Deregister | Reaction::FenceThenDeregister => {
                    (Admission::Wait, Some(start + GRACE))
                }
            };
            assert_eq!(decision, Decision { fenced: false, admission, next }, "{reaction:?}");
            assert_eq!(policy.decide(unheard, start + GRACE).admission, Admission::Show);
        }
    }

    #[test]
    fn an_override_rules_until_it_expires() {
        let start = some_instant();
        let hour = Duration::from_secs(3600);
        for reaction in Reaction::ALL {
            let mut policy = running(rules(reaction), start);
            let sick = facts(Health::Unhealthy, start, InUse::No);
            let without = policy.decide(sick, start + AFTER);
            policy.force(Some(Override::new(Forced::Off, hour, "drill", Order::default(), start).unwrap()));
            let off = policy.decide(sick, start + AFTER);
            assert_eq!(off, Decision { fenced: false, admission: Admission::Show, next: Some(start + hour) });
            assert_eq!(policy.forced(start).map(|forced| forced.reason.as_str()), Some("drill"));
            assert_eq!(policy.forced(start + hour), None);
            let expired = policy.decide(sick, start + hour);
            // A withdrawal begins anew, since volumes may have come.
            let again = match reaction {
                Reaction::FenceThenDeregister => {
                    Decision { admission: Admission::Show, next: Some(start + hour + AFTER), ..without }
                }
                Reaction::Observe | Reaction::Fence | Reaction::Deregister => without,
            };
            assert_eq!(expired, again, "{reaction:?}");

            let well = facts(Health::Healthy, start, InUse::No);
            policy.force(Some(Override::new(Forced::On, hour, "maintenance", Order::default(), start).unwrap()));
            let on = policy.decide(well, start + 2 * AFTER);
            assert_eq!(on, Decision { fenced: true, admission: Admission::Show, next: Some(start + hour) });
            policy.force(None);
            assert!(!policy.decide(well, start + 2 * AFTER).fenced);
        }
    }

    proptest! {
        /// Rounds of (seconds passed, unhealthy, volumes in use).
        #[test]
        fn withdrawal_is_never_too_early_and_never_too_late(
            rounds in proptest::collection::vec((0_u64..20, any::<bool>(), 0_u8..3), 1..60),
            drain in proptest::option::of(15_u64..60),
        ) {
            let start = some_instant();
            let drain = drain.map(Duration::from_secs);
            let mut policy = running(Rules { drain_timeout: drain, ..rules(Reaction::FenceThenDeregister) }, start);
            let (mut now, mut since, mut before) = (start, start, Health::Healthy);
            let (mut wake, mut withdrawn): (Option<Instant>, bool) = (None, false);
            for (seconds, sick, use_) in rounds {
                let health = if sick { Health::Unhealthy } else { Health::Healthy };
                let in_use = [InUse::No, InUse::Yes(1), InUse::Unknown][usize::from(use_)];
                now += Duration::from_secs(seconds);
                if health != before {
                    (since, before) = (now, health);
                    withdrawn = false;
                }
                let decision = policy.decide(facts(health, since, in_use), now);
                let sick_for = now - since;
                let due = sick && (in_use == InUse::No && sick_for >= AFTER || drain.is_some_and(|drain| sick_for >= drain));
                withdrawn |= due;
                prop_assert_eq!(decision.fenced, sick, "fenced at once, and at once no more");
                prop_assert_eq!(decision.admission == Admission::Withhold, withdrawn);
                // A wake-up is never later than the moment that changes something, with all else as it is.
                let moment = [(in_use == InUse::No).then_some(since + AFTER), drain.map(|drain| since + drain)];
                let moment = moment.into_iter().flatten().min().filter(|_| sick && !withdrawn);
                prop_assert_eq!(decision.next, moment);
                prop_assert!(decision.next.is_none_or(|at| at > now));
                wake = decision.next.or(wake);
            }
            prop_assert!(wake.is_none_or(|at| at > start));
        }
    }
}
