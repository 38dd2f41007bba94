//! The verdict over all probes, and how long a recovery must last before it is believed.

use super::damping::{Damping, Hold};
use super::group::GroupRule;
use super::outcome::{Health, Outcome, Reason};
use super::probe_verdict::{ProbeRule, ProbeVerdict};
use std::{time::Duration, time::Instant};

/// A change of the verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The verdict before.
    pub from: Health,
    /// The verdict from now on.
    pub to: Health,
    /// The probe that decided it, and what it saw; `None` when all probes are well.
    pub cause: Option<(String, Reason)>,
}

/// The verdict of our previous run, to be held until evidence says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Past {
    /// The verdict over all probes.
    pub health: Health,
    /// Since when it held.
    pub since: Instant,
    /// Each probe's verdict, by its name.
    pub probes: Vec<(String, Health)>,
    /// When outages began, oldest first.
    pub falls: Vec<Instant>,
}

/// The verdict over all groups of probes: all groups must pass.
///
/// Unhealthy at once when a group is; healthy again once every group is *and* the hold has passed since the last of them
/// became good. Unknown outcomes hold everything. A probe in no group is told and has no say.
#[derive(Debug)]
pub struct HealthPolicy {
    probes: Vec<ProbeVerdict>,
    groups: Vec<GroupRule>,
    health: Health,
    since: Instant,
    damping: Damping,
    cause: Option<(String, Reason)>,
}

impl HealthPolicy {
    /// Nothing is known yet.
    pub fn new(probes: Vec<ProbeRule>, groups: Vec<GroupRule>, hold: Hold, now: Instant) -> Self {
        Self {
            probes: probes.into_iter().map(ProbeVerdict::new).collect(),
            groups,
            health: Health::Unknown,
            since: now,
            damping: Damping::new(hold),
            cause: None,
        }
    }

    /// Takes over the verdict of a previous run. Probes it did not know begin as unknown; those that are gone are dropped.
    pub fn restore(&mut self, past: &Past) {
        for probe in &mut self.probes {
            if let Some((_, health)) = past.probes.iter().find(|(name, _)| name == probe.name()) {
                probe.restore(*health);
            }
        }
        for &fall in &past.falls {
            self.damping.fell(fall);
        }
        self.health = past.health;
        self.since = past.since;
        if past.health == Health::Unhealthy {
            self.cause = Some((
                String::new(),
                Reason::new("HeldFromBefore", "unhealthy before this start; no probe has said otherwise yet"),
            ));
        }
    }

    /// Goes on with other probes, after a change of the settings. A probe whose rule is the same keeps its verdict; the
    /// verdicts of probes that are gone are dropped, and with them an outage that only they had seen.
    pub fn replace(&mut self, probes: Vec<ProbeRule>, groups: Vec<GroupRule>, now: Instant) -> Option<Change> {
        let mut before = std::mem::take(&mut self.probes);
        for rule in probes {
            let kept = before.iter().position(|probe| *probe.rule() == rule).map(|at| before.swap_remove(at));
            self.probes.push(kept.unwrap_or_else(|| ProbeVerdict::new(rule)));
        }
        self.groups = groups;
        self.settle(now)
    }

    /// Takes in one outcome of the probe numbered `probe`; returns the verdict's change, if any.
    pub fn observe(&mut self, probe: usize, outcome: Outcome, now: Instant) -> Option<Change> {
        self.probes.get_mut(probe)?.observe(outcome, now);
        self.settle(now)
    }

    /// Looks whether time alone changes the verdict: the hold may have passed.
    pub fn poll(&mut self, now: Instant) -> Option<Change> {
        self.settle(now)
    }

    /// When [`Self::poll`] is next worth calling; never in the past.
    pub fn deadline(&self, now: Instant) -> Option<Instant> {
        let only_the_hold_is_missing =
            self.health == Health::Unhealthy && self.groups().all(|health| health == Health::Healthy);
        if !only_the_hold_is_missing {
            return None;
        }
        self.release_at().filter(|at| *at > now)
    }

    /// The verdict.
    pub fn health(&self) -> Health {
        self.health
    }

    /// Since when it holds.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// The probe that made it unhealthy, and what it saw.
    pub fn cause(&self) -> Option<&(String, Reason)> {
        self.cause.as_ref()
    }

    /// Whether every probe that has a say has said something since the start, if only that it knows nothing.
    pub fn all_heard(&self) -> bool {
        let mut members = self.groups.iter().flat_map(|group| &group.members);
        members.all(|member| self.probes.get(*member).is_none_or(|probe| probe.last().is_some()))
    }

    /// Whether a failure that is not decided yet would make the verdict unhealthy.
    pub fn suspect(&self) -> bool {
        self.groups.iter().any(|group| group.suspect(&self.probes))
    }

    /// Each probe's verdict.
    pub fn probes(&self) -> impl Iterator<Item = &ProbeVerdict> {
        self.probes.iter()
    }

    /// What a later run needs to go on from here.
    pub fn past(&self) -> Past {
        Past {
            health: self.health,
            since: self.since,
            probes: self.probes.iter().map(|probe| (probe.name().to_owned(), probe.health())).collect(),
            falls: self.damping.falls().collect(),
        }
    }

    /// How long all must have been well before the current outage counts as over.
    pub fn hold(&self) -> Duration {
        self.damping.hold()
    }

    fn settle(&mut self, now: Instant) -> Option<Change> {
        let failing = self.groups.iter().find(|group| group.health(&self.probes) == Health::Unhealthy);
        let (to, cause) = match failing {
            Some(group) => (Health::Unhealthy, self.cause_of(group)),
            None if !self.groups().all(|health| health == Health::Healthy) => return None,
            None if self.health != Health::Unhealthy => (Health::Healthy, None),
            None if self.release_at().is_some_and(|at| at <= now) => (Health::Healthy, None),
            None => return None,
        };
        if to == self.health {
            // The culprit may have changed, or a verdict held from before gets its evidence.
            if cause.is_some() {
                self.cause = cause;
            }
            return None;
        }
        if to == Health::Unhealthy {
            self.damping.fell(now);
        }
        self.cause.clone_from(&cause);
        self.since = now;
        Some(Change { from: std::mem::replace(&mut self.health, to), to, cause })
    }

    fn groups(&self) -> impl Iterator<Item = Health> {
        self.groups.iter().map(|group| group.health(&self.probes))
    }

    /// A verdict restored from before has no reason of its own yet.
    fn cause_of(&self, group: &GroupRule) -> Option<(String, Reason)> {
        let culprit = group.culprit(&self.probes)?;
        Some((culprit.name().to_owned(), culprit.cause()?.clone()))
    }

    /// When the outage is over, if enough last words are good. With nobody left to say otherwise it is over now.
    fn release_at(&self) -> Option<Instant> {
        let Some(good_since) = self.groups.iter().map(|group| group.good_since(&self.probes)).max_by(later) else {
            return Some(self.since);
        };
        Some(good_since? + self.damping.hold())
    }
}

/// Not yet good is later than any moment.
fn later(one: &Option<Instant>, other: &Option<Instant>) -> std::cmp::Ordering {
    match (one, other) {
        (Some(one), Some(other)) => one.cmp(other),
        (one, other) => one.is_none().cmp(&other.is_none()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::outcome::Severity;
    use crate::policy::probe_verdict::Thresholds;
    use crate::policy::some_instant;
    use proptest::prelude::*;
    use std::num::NonZeroU32;

    const SECOND: Duration = Duration::from_secs(1);
    const HOLD: Hold =
        Hold { base: Duration::from_secs(30), max: Duration::from_secs(600), window: Duration::from_secs(600) };

    fn thresholds(failure: u32, success: u32) -> Thresholds {
        Thresholds { failure: NonZeroU32::new(failure).unwrap(), success: NonZeroU32::new(success).unwrap() }
    }

    fn rules(names: &[&str], failure: u32, success: u32) -> Vec<ProbeRule> {
        let rule = |name: &&str| ProbeRule {
            name: String::from(*name),
            asks: String::new(),
            thresholds: thresholds(failure, success),
        };
        names.iter().map(rule).collect()
    }

    /// Every probe must pass.
    fn each(count: usize) -> Vec<GroupRule> {
        (0..count).map(|member| GroupRule { members: vec![member], require: 1 }).collect()
    }

    fn policy(names: &[&str]) -> (HealthPolicy, Instant) {
        let now = some_instant();
        (HealthPolicy::new(rules(names, 2, 2), each(names.len()), HOLD, now), now)
    }

    fn failure() -> Outcome {
        Outcome::Failure(Reason::new("PortDown", "mlx5_0 port 1"), Severity::Hard)
    }

    fn unknown() -> Outcome {
        Outcome::Unknown(Reason::new("NotAnswering", ""))
    }

    fn to(change: Option<Change>) -> Option<Health> {
        change.map(|change| change.to)
    }

    #[test]
    fn second_failure_in_a_row_turns_unhealthy_and_names_the_probe() {
        let (mut policy, now) = policy(&["fabric"]);
        policy.observe(0, Outcome::Success, now);
        assert_eq!(policy.observe(0, failure(), now), None);
        let change = policy.observe(0, failure(), now).unwrap();
        assert_eq!((change.from, change.to), (Health::Healthy, Health::Unhealthy));
        assert_eq!(change.cause.unwrap(), ("fabric".into(), Reason::new("PortDown", "mlx5_0 port 1")));
    }

    #[test]
    fn one_success_between_failures_keeps_it_healthy_for_ever() {
        let (mut policy, now) = policy(&["fabric"]);
        policy.observe(0, Outcome::Success, now);
        for _ in 0..100 {
            assert_eq!(policy.observe(0, failure(), now), None);
            assert_eq!(policy.observe(0, Outcome::Success, now), None);
        }
    }

    #[test]
    fn unknown_neither_breaks_nor_makes_a_streak() {
        let (mut policy, now) = policy(&["fabric"]);
        policy.observe(0, Outcome::Success, now);
        policy.observe(0, failure(), now);
        for _ in 0..10 {
            assert_eq!(policy.observe(0, unknown(), now), None);
        }
        assert_eq!(to(policy.observe(0, failure(), now)), Some(Health::Unhealthy));
    }

    #[test]
    fn recovery_needs_the_successes_and_the_hold() {
        let (mut policy, start) = policy(&["fabric"]);
        policy.observe(0, failure(), start);
        policy.observe(0, failure(), start);
        assert_eq!(policy.observe(0, Outcome::Success, start + SECOND), None);
        assert_eq!(policy.observe(0, Outcome::Success, start + 11 * SECOND), None);
        assert_eq!(policy.deadline(start), Some(start + 31 * SECOND), "the hold runs from the first good round");
        assert_eq!(policy.poll(start + 30 * SECOND), None);
        assert_eq!(to(policy.poll(start + 31 * SECOND)), Some(Health::Healthy));
    }

    #[test]
    fn recovery_never_comes_from_silence() {
        let (mut policy, start) = policy(&["fabric"]);
        policy.observe(0, failure(), start);
        policy.observe(0, failure(), start);
        policy.observe(0, Outcome::Success, start);
        policy.observe(0, Outcome::Success, start);
        policy.observe(0, unknown(), start + SECOND);
        assert_eq!(policy.poll(start + 3600 * SECOND), None);
        assert_eq!(to(policy.observe(0, Outcome::Success, start + 3601 * SECOND)), Some(Health::Healthy));
    }

    #[test]
    fn one_probe_always_failing_beside_one_always_passing_stays_unhealthy() {
        let (mut policy, start) = policy(&["a", "b"]);
        let mut changes = Vec::new();
        for round in 0..60 {
            let now = start + round * 30 * SECOND;
            changes.extend(policy.observe(0, failure(), now));
            changes.extend(policy.observe(1, Outcome::Success, now));
            changes.extend(policy.poll(now));
        }
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0].cause.as_ref().unwrap().0, "a");
    }

    #[test]
    fn ten_outages_give_ten_verdicts_and_growing_holds() {
        let (mut policy, mut now) = policy(&["fabric"]);
        let mut holds = Vec::new();
        for _ in 0..10 {
            policy.observe(0, failure(), now);
            assert_eq!(to(policy.observe(0, failure(), now)), Some(Health::Unhealthy));
            holds.push(policy.hold().as_secs());
            policy.observe(0, Outcome::Success, now);
            policy.observe(0, Outcome::Success, now);
            now = policy.deadline(now).unwrap();
            assert_eq!(to(policy.poll(now)), Some(Health::Healthy));
        }
        assert_eq!(holds[..5], [30, 60, 120, 240, 480]);
    }

    #[test]
    fn first_word_decides_unless_it_is_a_failure() {
        let (mut policy, now) = policy(&["fabric"]);
        assert_eq!(to(policy.observe(0, Outcome::Success, now)), Some(Health::Healthy));
        let (mut policy, now) = self::policy(&["fabric"]);
        assert_eq!(policy.observe(0, failure(), now), None);
        assert!(policy.suspect());
        assert_eq!(policy.observe(0, Outcome::Success, now), None);
        assert_eq!(to(policy.observe(0, Outcome::Success, now)), Some(Health::Healthy));
    }

    #[test]
    fn verdict_of_the_previous_run_is_held_until_evidence_overturns_it() {
        let (mut before, start) = policy(&["fabric", "gone"]);
        before.observe(0, failure(), start);
        before.observe(0, failure(), start);
        let (mut after, _) = policy(&["fabric", "new"]);
        after.restore(&before.past());
        assert_eq!(after.health(), Health::Unhealthy);
        after.observe(0, unknown(), start);
        after.observe(1, Outcome::Success, start);
        assert_eq!(after.health(), Health::Unhealthy);
        after.observe(0, Outcome::Success, start);
        assert_eq!(after.poll(start + 3600 * SECOND), None, "one success is not two");
        after.observe(0, Outcome::Success, start);
        assert_eq!(to(after.poll(start + 29 * SECOND)), None);
        assert_eq!(to(after.poll(start + 30 * SECOND)), Some(Health::Healthy));
    }

    #[test]
    fn no_deadline_lies_in_the_past_or_waits_for_what_only_a_probe_can_bring() {
        let (mut policy, start) = policy(&["fabric"]);
        policy.observe(0, failure(), start);
        policy.observe(0, failure(), start);
        policy.observe(0, Outcome::Success, start);
        assert_eq!(policy.deadline(start + 3600 * SECOND), None, "one success is not two");
        policy.observe(0, Outcome::Success, start);
        assert_eq!(policy.deadline(start), Some(start + 30 * SECOND));
        assert_eq!(policy.deadline(start + 30 * SECOND), None);
    }

    #[test]
    fn restored_flaps_go_on_counting() {
        let (mut before, start) = policy(&["fabric"]);
        before.observe(0, failure(), start);
        before.observe(0, failure(), start);
        let (mut after, _) = policy(&["fabric"]);
        after.restore(&before.past());
        for outcome in [Outcome::Success, Outcome::Success] {
            after.observe(0, outcome, start);
        }
        after.poll(start + 30 * SECOND);
        after.observe(0, failure(), start + 40 * SECOND);
        after.observe(0, failure(), start + 40 * SECOND);
        assert_eq!(after.hold().as_secs(), 60);
    }

    #[test]
    fn one_rail_of_two_may_fail_where_any_is_enough() {
        let now = some_instant();
        let groups = vec![GroupRule { members: vec![0, 1], require: 1 }];
        let mut policy = HealthPolicy::new(rules(&["rail0", "rail1"], 2, 2), groups, HOLD, now);
        policy.observe(1, Outcome::Success, now);
        for _ in 0..5 {
            policy.observe(0, failure(), now);
        }
        assert_eq!(policy.health(), Health::Healthy);
        policy.observe(1, failure(), now);
        assert!(policy.suspect());
        let change = policy.observe(1, failure(), now).unwrap();
        assert_eq!((change.to, change.cause.unwrap().0.as_str()), (Health::Unhealthy, "rail0"));
        policy.observe(1, Outcome::Success, now);
        policy.observe(1, Outcome::Success, now);
        assert_eq!(to(policy.poll(now + 30 * SECOND)), Some(Health::Healthy), "one rail is enough to recover");
    }

    #[test]
    fn the_cause_is_the_probe_that_fails_now() {
        let (mut policy, now) = policy(&["a", "b"]);
        for probe in [0, 0, 1, 1] {
            policy.observe(probe, failure(), now);
        }
        assert_eq!(policy.cause().unwrap().0, "a");
        policy.observe(0, Outcome::Success, now);
        policy.observe(0, Outcome::Success, now);
        assert_eq!(policy.health(), Health::Unhealthy);
        assert_eq!(policy.cause().unwrap().0, "b");
    }

    #[test]
    fn a_probe_that_only_warns_has_no_say() {
        let now = some_instant();
        let mut policy = HealthPolicy::new(rules(&["fabric", "wear"], 2, 2), each(1), HOLD, now);
        policy.observe(0, Outcome::Success, now);
        assert!(policy.all_heard(), "nor is it waited for");
        for _ in 0..5 {
            assert_eq!(policy.observe(1, failure(), now), None);
        }
        assert_eq!(policy.health(), Health::Healthy);
    }

    #[test]
    fn other_settings_drop_the_verdicts_of_probes_that_are_gone_and_keep_the_rest() {
        let (mut policy, start) = policy(&["fabric", "disk"]);
        policy.observe(1, Outcome::Success, start);
        policy.observe(0, failure(), start);
        policy.observe(0, failure(), start);
        assert_eq!(policy.replace(rules(&["disk", "fabric"], 2, 2), each(2), start), None, "the same probes, moved");
        assert_eq!(policy.health(), Health::Unhealthy);
        assert_eq!(policy.replace(rules(&["disk"], 2, 2), each(1), start + SECOND), None, "the hold still runs");
        assert_eq!(to(policy.poll(start + 30 * SECOND)), Some(Health::Healthy));
        policy.observe(0, failure(), start + 31 * SECOND);
        policy.observe(0, failure(), start + 31 * SECOND);
        let none = policy.replace(Vec::new(), Vec::new(), start + 32 * SECOND);
        assert_eq!(to(none), Some(Health::Healthy), "with nobody left to complain");
    }

    proptest! {
        /// Never too early, never too late: the verdict turns unhealthy exactly when some probe has `failure` failures with
        /// no success between.
        #[test]
        fn turns_unhealthy_exactly_at_the_threshold(
            steps in proptest::collection::vec((0_usize..3, 0_u8..3), 1..200), failure_threshold in 1_u32..5
        ) {
            let now = some_instant();
            let probes = rules(&["0", "1", "2"], failure_threshold, 2);
            let never = Hold { base: Duration::from_secs(1 << 30), max: Duration::from_secs(1 << 30), window: SECOND };
            let mut policy = HealthPolicy::new(probes, each(3), never, now);
            let mut streaks = [0_u32; 3];
            let mut expected = false;
            for (probe, kind) in steps {
                let outcome = match kind { 0 => Outcome::Success, 1 => failure(), _ => unknown() };
                match kind { 0 => streaks[probe] = 0, 1 => streaks[probe] += 1, _ => {} }
                expected |= streaks[probe] >= failure_threshold;
                policy.observe(probe, outcome, now);
                prop_assert_eq!(policy.health() == Health::Unhealthy, expected);
            }
        }

        /// After an outage it is healthy again no earlier than the hold, and no later than the hold plus nothing once the good rounds are in.
        #[test]
        fn recovers_exactly_after_hold_and_successes(gap_ms in 31_u64..60_000, success in 1_u32..6) {
            let start = some_instant();
            let mut policy = HealthPolicy::new(rules(&["p"], 1, success), each(1), HOLD, start);
            policy.observe(0, failure(), start);
            let first_good = start + SECOND;
            let (mut recovered, mut before) = (None, start);
            for round in 0..1_000_u32 {
                let now = first_good + Duration::from_millis(gap_ms) * round;
                if let Some(at) = policy.deadline(before).filter(|at| *at <= now) {
                    recovered = to(policy.poll(at)).map(|_| at);
                    break;
                }
                if to(policy.observe(0, Outcome::Success, now)).is_some() {
                    recovered = Some(now);
                    break;
                }
                before = now;
            }
            let earliest = first_good + HOLD.base.max(Duration::from_millis(gap_ms) * (success - 1));
            prop_assert_eq!(recovered, Some(earliest));
        }
    }
}
