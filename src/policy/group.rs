//! How the verdicts of several probes add up: all of them, any, or a number.

use super::outcome::Health;
use super::probe_verdict::ProbeVerdict;
use std::num::NonZeroU32;
use std::time::Instant;

/// How many of several must pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Require {
    /// Every one, as outside of groups.
    All,
    /// One is enough.
    Any,
    /// At least this many.
    AtLeast(NonZeroU32),
}

/// Probes of which at least `require` must pass. A probe outside of groups is a group of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRule {
    /// The probes' numbers.
    pub members: Vec<usize>,
    /// How many must pass; at least one, at most all.
    pub require: usize,
}

impl GroupRule {
    /// The group's verdict: unhealthy once too few probes are left that are not.
    pub fn health(&self, probes: &[ProbeVerdict]) -> Health {
        self.judge(probes, |probe| probe.health() == Health::Unhealthy)
    }

    /// Whether the group would be unhealthy if every undecided failure were decided.
    pub fn suspect(&self, probes: &[ProbeVerdict]) -> bool {
        let undecided = self.members(probes).any(ProbeVerdict::suspect);
        undecided
            && self.judge(probes, |probe| probe.health() == Health::Unhealthy || probe.suspect()) == Health::Unhealthy
    }

    /// Since when enough of its probes have been good, the last word of each included.
    pub fn good_since(&self, probes: &[ProbeVerdict]) -> Option<Instant> {
        let healthy = self.members(probes).filter(|probe| probe.health() == Health::Healthy);
        let mut good: Vec<Instant> = healthy.filter_map(ProbeVerdict::good_since).collect();
        good.sort();
        good.get(self.require.checked_sub(1)?).copied()
    }

    /// The probe that speaks for an unhealthy group.
    pub fn culprit<'a>(&self, probes: &'a [ProbeVerdict]) -> Option<&'a ProbeVerdict> {
        self.members(probes).find(|probe| probe.health() == Health::Unhealthy)
    }

    fn judge(&self, probes: &[ProbeVerdict], bad: impl Fn(&ProbeVerdict) -> bool) -> Health {
        let bad = self.members(probes).filter(|probe| bad(probe)).count();
        let good = self.members(probes).filter(|probe| probe.health() == Health::Healthy).count();
        if self.members.len() < bad + self.require {
            Health::Unhealthy
        } else if good >= self.require {
            Health::Healthy
        } else {
            Health::Unknown
        }
    }

    fn members<'a>(&self, probes: &'a [ProbeVerdict]) -> impl Iterator<Item = &'a ProbeVerdict> {
        self.members.iter().filter_map(|member| probes.get(*member))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::outcome::{Outcome, Reason, Severity};
    use crate::policy::probe_verdict::{ProbeRule, Thresholds};
    use crate::policy::some_instant;
    use std::num::NonZeroU32;

    fn probes(words: &str) -> Vec<ProbeVerdict> {
        let two = NonZeroU32::new(2).unwrap();
        let now = some_instant();
        words
            .chars()
            .map(|word| {
                let rule = ProbeRule {
                    name: word.to_string(),
                    asks: String::new(),
                    thresholds: Thresholds { failure: two, success: two },
                };
                let mut probe = ProbeVerdict::new(rule);
                let failure = || Outcome::Failure(Reason::new("PortDown", ""), Severity::Hard);
                match word {
                    'g' => probe.observe(Outcome::Success, now),
                    'b' => (0..2).for_each(|_| probe.observe(failure(), now)),
                    's' => {
                        probe.observe(Outcome::Success, now);
                        probe.observe(failure(), now);
                    }
                    _ => {}
                }
                probe
            })
            .collect()
    }

    fn health(require: usize, words: &str) -> Health {
        GroupRule { members: (0..words.len()).collect(), require }.health(&probes(words))
    }

    #[test]
    fn all_any_and_a_number_must_pass() {
        for (require, words, verdict) in [
            (3, "ggg", Health::Healthy),
            (3, "ggb", Health::Unhealthy),
            (3, "gg?", Health::Unknown),
            (3, "gb?", Health::Unhealthy),
            (1, "bbg", Health::Healthy),
            (1, "bb?", Health::Unknown),
            (1, "bbb", Health::Unhealthy),
            (2, "ggb", Health::Healthy),
            (2, "gbb", Health::Unhealthy),
            (2, "g?b", Health::Unknown),
        ] {
            assert_eq!(health(require, words), verdict, "{require} of {words}");
        }
    }

    #[test]
    fn an_undecided_failure_matters_only_where_the_group_would_fall() {
        let suspect =
            |require, words: &str| GroupRule { members: (0..words.len()).collect(), require }.suspect(&probes(words));
        assert!(suspect(2, "gs") && suspect(1, "bs"));
        assert!(!suspect(1, "gs") && !suspect(2, "gb"), "decided, or of no consequence");
    }

    #[test]
    fn a_group_has_been_good_since_enough_of_its_probes_were() {
        let group = GroupRule { members: vec![0, 1, 2], require: 2 };
        assert!(group.good_since(&probes("ggb")).is_some());
        assert_eq!(group.good_since(&probes("gbb")), None);
        assert_eq!(group.good_since(&probes("gs?")), None, "the last word counts");
    }
}
