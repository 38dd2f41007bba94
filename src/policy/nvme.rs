//! NVMe controllers: what each one's state means, how long it may last, and which must be there.

use super::devices::{Good, add_up};
use super::group::Require;
use super::outcome::{Outcome, Reason, Severity};
use super::round::Silence;
use super::smart::{SmartLimits, SmartLog, SmartPolicy};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Controllers that are kept in mind; a name that comes and goes is not remembered for ever.
const MAX_KNOWN: usize = 1024;

/// A controller's state, by the kernel's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Works.
    Live,
    /// Not set up yet.
    New,
    /// Being reset.
    Resetting,
    /// Being connected, after a reset or a loss.
    Connecting,
    /// Being removed, with or without its outstanding work.
    Deleting,
    /// Given up.
    Dead,
    /// A word that is not known.
    Other(String),
}

impl State {
    /// Reads the kernel's word.
    pub fn parse(word: &str) -> Self {
        match word {
            "live" => Self::Live,
            "new" => Self::New,
            "resetting" => Self::Resetting,
            "connecting" | "reconnecting" => Self::Connecting,
            "deleting" | "deleting (no IO)" => Self::Deleting,
            "dead" => Self::Dead,
            other => Self::Other(other.to_owned()),
        }
    }
}

/// What was read of a controller's SMART log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Smart {
    /// Nobody asked, or the controller's state does not allow to.
    NotAsked,
    /// The page.
    Log(SmartLog),
    /// It could not be read or makes no sense, for now.
    Unread(Reason),
    /// It cannot be read at all: a right, a device file, or the command is missing.
    NotPermitted(Reason),
    /// No answer in time.
    Silent(Silence),
}

/// What was read of one controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Its state, or why it is not known.
    pub state: Result<State, Reason>,
    /// Its SMART log.
    pub smart: Smart,
    /// No namespace is reachable by it, in the kernel's words.
    pub unreachable: Option<String>,
}

/// Where a controller is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In this machine, at this PCI address.
    Slot(String),
    /// Across a fabric: somebody connects it, and may disconnect it.
    Fabric,
    /// It cannot be told.
    Unknown,
}

/// A controller, and what was read of it, if it answered in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Looked {
    /// Its name now.
    pub name: String,
    /// Where it is.
    pub place: Place,
    /// What was read.
    pub seen: Result<Seen, Silence>,
}

/// What is asked of the controllers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeRule {
    /// How many must work.
    pub require: Require,
    /// How long a controller may be anything but live before it fails.
    pub grace: Duration,
    /// For SMART.
    pub smart: SmartLimits,
    /// How long one look may take.
    pub timeout: Duration,
}

/// Judges the controllers.
#[derive(Debug)]
pub struct NvmePolicy {
    rule: NvmeRule,
    known: BTreeMap<String, Known>,
}

/// What is remembered of a controller.
#[derive(Debug, Default)]
struct Known {
    /// As it was last.
    place: Good,
    /// Whether that was across a fabric.
    far: bool,
    /// Was it ever live?
    good: bool,
    /// Whether anything but its removal kept it from being live since it last was.
    ailing: bool,
    /// Since when it has not been live, without a break.
    away_since: Option<Instant>,
    smart: SmartPolicy,
    /// Whether the last word of its SMART log was a failure; `None` before the first.
    smart_failed: Option<bool>,
}

impl NvmePolicy {
    /// Nothing was seen yet but `good`, which was live before.
    pub fn new(rule: NvmeRule, good: BTreeMap<String, Good>) -> Self {
        let known = good.into_iter().take(MAX_KNOWN);
        let known = known.map(|(lasting, place)| (lasting, Known { place, good: true, ..Known::default() })).collect();
        Self { rule, known }
    }

    /// Those that were live once and are to be missed by the next run, too, by what stays of each when its name changes. A fabric's may
    /// be disconnected while nobody looks.
    pub fn good(&self) -> impl Iterator<Item = (&String, &Good)> + Clone {
        self.known.iter().filter(|(_, known)| known.good && !known.far).map(|(lasting, known)| (lasting, &known.place))
    }

    /// The outcome, and that of each controller.
    ///
    /// `seen` holds those that are there and selected, by what stays of each when its name changes. `absent` are those that the settings name and
    /// that are not there. Without `whole`, some could not be told apart, and none counts as gone.
    pub fn judge(
        &mut self,
        seen: &BTreeMap<String, Looked>,
        absent: &[String],
        whole: bool,
        now: Instant,
    ) -> (Outcome, Vec<(String, Outcome)>) {
        let mut outcomes: Vec<(String, Outcome)> = Vec::new();
        for (lasting, looked) in seen {
            if self.known.len() >= MAX_KNOWN && !self.known.contains_key(lasting) {
                self.known.retain(|_, known| known.good);
            }
            let known = self.known.entry(lasting.clone()).or_default();
            known.is_at(&looked.name, &looked.place);
            let outcome = match &looked.seen {
                Err(silence) => silence.outcome(self.rule.timeout),
                Ok(seen) => known.judge(seen, &self.rule, now),
            };
            outcomes.push((looked.name.clone(), outcome));
        }
        let gone =
            |name: &str, why: &str| (name.to_owned(), Outcome::Failure(Reason::new("DeviceGone", why), Severity::Soft));
        outcomes.extend(absent.iter().map(|name| gone(name, "is named in the settings and not there")));
        if whole {
            self.known.retain(|lasting, known| seen.contains_key(lasting) || known.good && !known.has_left(seen));
            let lost = self
                .known
                .iter_mut()
                .filter(|(lasting, known)| !seen.contains_key(*lasting) && !absent.contains(&known.place.name));
            outcomes.extend(lost.map(|(_, known)| {
                known.away_since.get_or_insert(now);
                gone(&known.place.name, "was live and is gone")
            }));
        }
        let devices: Vec<(&str, &Outcome)> = outcomes.iter().map(|(name, outcome)| (name.as_str(), outcome)).collect();
        let none = Reason::new("NoController", "there is no NVMe controller that the settings select");
        (add_up(&devices, self.rule.require, none), outcomes)
    }
}

impl Known {
    fn is_at(&mut self, name: &str, place: &Place) {
        name.clone_into(&mut self.place.name);
        match place {
            Place::Slot(pci) => (self.place.pci, self.far) = (Some(pci.clone()), false),
            Place::Fabric => (self.place.pci, self.far) = (None, true),
            Place::Unknown => {}
        }
    }

    /// Whether one that is not there is nobody's loss: another sits in its slot, or it was well until somebody disconnected it.
    fn has_left(&self, there: &BTreeMap<String, Looked>) -> bool {
        let sits_there = |pci| there.values().any(|looked| matches!(&looked.place, Place::Slot(slot) if slot == pci));
        self.place.pci.as_ref().is_some_and(sits_there) || self.far && !self.ailing
    }

    fn judge(&mut self, seen: &Seen, rule: &NvmeRule, now: Instant) -> Outcome {
        let state = match &seen.state {
            Ok(state) => self.state(state, rule, now),
            Err(reason) => return Outcome::Unknown(reason.clone()),
        };
        if !matches!(state, Outcome::Success) {
            return state;
        }
        let smart = self.smart(&seen.smart, rule, now);
        match (smart, &seen.unreachable) {
            (Outcome::Success, Some(state)) => {
                let message = format!("live, but its namespaces are {state}");
                Outcome::Warning(Reason::new("PathLost", message))
            }
            (smart, _) => smart,
        }
    }

    fn state(&mut self, state: &State, rule: &NvmeRule, now: Instant) -> Outcome {
        if *state == State::Live {
            (self.good, self.ailing, self.away_since) = (true, false, None);
            return Outcome::Success;
        }
        self.ailing |= *state != State::Deleting;
        let since = *self.away_since.get_or_insert(now);
        let waited = now.saturating_duration_since(since);
        let (code, word) = match state {
            State::Dead => {
                return Outcome::Failure(Reason::new("ControllerDead", "the kernel has given it up"), Severity::Hard);
            }
            State::Other(word) => {
                let message = format!("its state is {word:?}, which is not known here");
                return Outcome::Unknown(Reason::new("UnknownState", message));
            }
            State::Live | State::New => ("NotReady", "new"),
            State::Resetting => ("Resetting", "resetting"),
            State::Connecting => ("Connecting", "connecting"),
            State::Deleting => ("Deleting", "being removed"),
        };
        if waited < rule.grace {
            Outcome::Warning(Reason::new(code, format!("{word}; a failure once that lasts {:?}", rule.grace)))
        } else {
            Outcome::Failure(Reason::new(code, format!("{word} for {} s", waited.as_secs())), Severity::Hard)
        }
    }

    /// What is not known now never takes back what the drive said before: only a page that says better does.
    fn smart(&mut self, smart: &Smart, rule: &NvmeRule, now: Instant) -> Outcome {
        match smart {
            Smart::NotAsked => Outcome::Success,
            Smart::Log(log) => {
                let outcome = self.smart.judge(log, &rule.smart, now);
                self.smart_failed = Some(matches!(outcome, Outcome::Failure(..)));
                outcome
            }
            Smart::NotPermitted(reason) if self.smart_failed != Some(true) => Outcome::Warning(reason.clone()),
            Smart::NotPermitted(reason) | Smart::Unread(reason) => Outcome::Unknown(reason.clone()),
            Smart::Silent(silence) => silence.outcome(rule.timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn rule(require: Require, smart: SmartLimits) -> NvmeRule {
        NvmeRule { require, grace: 60 * SECOND, smart, timeout: 3 * SECOND }
    }

    fn policy(require: Require) -> NvmePolicy {
        let smart = SmartLimits::default();
        NvmePolicy::new(rule(require, smart), BTreeMap::new())
    }

    fn seen(state: &str) -> Result<Seen, Silence> {
        Ok(Seen { state: Ok(State::parse(state)), smart: Smart::NotAsked, unreachable: None })
    }

    fn with_smart(smart: Smart) -> Result<Seen, Silence> {
        Ok(Seen { state: Ok(State::Live), smart, unreachable: None })
    }

    fn named(outcome: &Outcome) -> (&'static str, &'static str) {
        (outcome.name(), outcome.reason().map_or("", |reason| reason.code))
    }

    fn there<const N: usize>(controllers: [(&str, Result<Seen, Silence>); N]) -> BTreeMap<String, Looked> {
        let looked = |(name, seen): (&str, _)| {
            (format!("id of {name}"), Looked { name: name.to_owned(), place: Place::Unknown, seen })
        };
        controllers.into_iter().map(looked).collect()
    }

    /// One controller over time, a second a round.
    fn over_time(rounds: impl IntoIterator<Item = Result<Seen, Silence>>) -> Vec<(&'static str, &'static str)> {
        let (mut policy, start) = (policy(Require::All), some_instant());
        let rounds = rounds.into_iter().enumerate().map(|(second, seen)| {
            let now = start + u32::try_from(second).unwrap() * SECOND;
            named(&policy.judge(&there([("nvme0", seen)]), &[], true, now).0)
        });
        rounds.collect()
    }

    #[test]
    fn each_state_of_the_kernel_means_one_thing() {
        for (state, first, after_the_grace) in [
            ("live", ("success", ""), ("success", "")),
            ("new", ("warning", "NotReady"), ("failure", "NotReady")),
            ("resetting", ("warning", "Resetting"), ("failure", "Resetting")),
            ("connecting", ("warning", "Connecting"), ("failure", "Connecting")),
            ("deleting", ("warning", "Deleting"), ("failure", "Deleting")),
            ("deleting (no IO)", ("warning", "Deleting"), ("failure", "Deleting")),
            ("dead", ("failure", "ControllerDead"), ("failure", "ControllerDead")),
            ("unknown state", ("unknown", "UnknownState"), ("unknown", "UnknownState")),
            ("", ("unknown", "UnknownState"), ("unknown", "UnknownState")),
        ] {
            let said = over_time((0..61).map(|_| seen(state)));
            assert_eq!((said[0], said[59].0, said[60]), (first, first.0, after_the_grace), "{state}");
        }
    }

    #[test]
    fn the_grace_runs_over_all_states_that_are_not_live_and_ends_with_live() {
        let states = ["resetting", "connecting"].iter().cycle().take(61).map(|state| seen(state));
        assert_eq!(over_time(states).last(), Some(&("failure", "Resetting")));
        let states = (0..200).map(|second| seen(if second % 50 == 0 { "live" } else { "connecting" }));
        assert!(over_time(states).iter().all(|said| said.0 != "failure"));
        let back = (0..70).map(|_| seen("dead")).chain([seen("live")]);
        assert_eq!(over_time(back).last(), Some(&("success", "")));
    }

    fn silent(rounds: u32) -> Result<Seen, Silence> {
        Err(Silence::TimeOuts(rounds))
    }

    #[test]
    fn silence_is_unknown_twice_and_then_a_soft_failure() {
        let said = over_time([seen("live"), silent(1), silent(2), silent(3), seen("live"), silent(1)]);
        assert_eq!(
            said.iter().map(|said| said.0).collect::<Vec<_>>(),
            ["success", "unknown", "unknown", "failure", "success", "unknown"]
        );
    }

    #[test]
    fn what_was_live_or_is_named_is_missed_and_nothing_else_is() {
        let (mut policy, now) = (policy(Require::All), some_instant());
        let both = there([("nvme0", seen("live")), ("nvme1", seen("connecting"))]);
        assert_eq!(named(&policy.judge(&both, &[], true, now).0), ("warning", "Connecting"));
        let only = |name: &str| there([(name, seen("live"))]);
        assert_eq!(named(&policy.judge(&only("nvme0"), &[], true, now).0), ("success", ""), "nvme1 was never good");
        let (outcome, each) = policy.judge(&only("nvme2"), &[], true, now);
        assert!(
            matches!(&outcome, Outcome::Failure(reason, Severity::Soft) if reason.code == "DeviceGone"),
            "{each:?}"
        );
        assert_eq!(named(&policy.judge(&both, &["PHX1".to_owned()], true, now).0).0, "failure");
        assert_eq!(named(&policy.judge(&only("nvme2"), &[], false, now).0), ("success", ""), "unread is no absence");
    }

    #[test]
    fn a_controller_that_comes_back_under_another_name_is_not_missed() {
        let (mut policy, now) = (policy(Require::All), some_instant());
        policy.judge(&there([("nvme0", seen("live"))]), &[], true, now);
        assert_eq!(policy.judge(&BTreeMap::new(), &[], true, now).0.name(), "failure");
        let renamed = Looked { name: "nvme3".into(), place: Place::Unknown, seen: seen("live") };
        let (outcome, each) = policy.judge(&BTreeMap::from([("id of nvme0".into(), renamed)]), &[], true, now);
        assert_eq!((outcome, each.len()), (Outcome::Success, 1));
    }

    fn placed<const N: usize>(controllers: [(&str, Place, &str); N]) -> BTreeMap<String, Looked> {
        let looked = |(id, place, state): (&str, Place, &str)| {
            (id.to_owned(), Looked { name: format!("nvme-{id}"), place, seen: seen(state) })
        };
        controllers.into_iter().map(looked).collect()
    }

    #[test]
    fn a_drive_in_whose_slot_another_sits_is_not_missed_and_one_that_moved_is_the_same() {
        let (mut policy, now) = (policy(Require::All), some_instant());
        let slot = |address: &str| Place::Slot(address.to_owned());
        let (one, other) = (("a", slot("0000:01:00.0"), "live"), ("b", slot("0000:02:00.0"), "live"));
        let mut judged = |there| named(&policy.judge(&there, &[], true, now).0);
        assert_eq!(judged(placed([one.clone(), other.clone()])), ("success", ""));
        assert_eq!(judged(placed([other.clone()])), ("failure", "DeviceGone"), "pulled");
        let new = ("c", slot("0000:01:00.0"), "live");
        assert_eq!(judged(placed([new.clone(), other])), ("success", ""), "replaced");
        let moved = ("b", slot("0000:03:00.0"), "live");
        assert_eq!(judged(placed([new, moved.clone()])), ("success", ""), "moved");
        assert_eq!(judged(placed([moved])), ("failure", "DeviceGone"), "the new one is missed, too");
    }

    #[test]
    fn a_fabrics_controller_that_is_disconnected_is_not_missed_and_one_that_is_lost_is() {
        let local = || ("local", Place::Slot("0000:01:00.0".to_owned()), "live");
        for (states, after) in [
            (&["live"][..], ("success", "")),
            (&["live", "deleting (no IO)"], ("success", "")),
            (&["live", "connecting", "live"], ("success", "")),
            (&["live", "connecting"], ("failure", "DeviceGone")),
            (&["live", "resetting", "deleting"], ("failure", "DeviceGone")),
            (&["live", "dead"], ("failure", "DeviceGone")),
        ] {
            let (mut policy, now) = (policy(Require::All), some_instant());
            for state in states {
                policy.judge(&placed([local(), ("far", Place::Fabric, state)]), &[], true, now);
            }
            assert_eq!(named(&policy.judge(&placed([local()]), &[], true, now).0), after, "{states:?}");
            assert!(
                policy.good().all(|(lasting, _)| lasting != "far"),
                "the next run misses only what this machine has"
            );
            let named_one = policy.judge(&placed([local()]), &["far".to_owned()], true, now).0;
            assert_eq!(named(&named_one), ("failure", "DeviceGone"), "one that is named must be there");
        }
    }

    #[test]
    fn one_that_was_live_before_is_missed_from_the_start_and_one_that_was_replaced_is_not() {
        let now = some_instant();
        let at = |pci: &str| Good { name: "nvme0".into(), pci: Some(pci.to_owned()) };
        let good = BTreeMap::from([("old".to_owned(), at("0000:01:00.0"))]);
        let mut policy = NvmePolicy::new(rule(Require::All, SmartLimits::default()), good.clone());
        assert!(policy.good().eq(good.iter()));
        let there = |pci: &str| Looked { name: "nvme1".into(), place: Place::Slot(pci.to_owned()), seen: seen("live") };
        let elsewhere = BTreeMap::from([("new".to_owned(), there("0000:02:00.0"))]);
        assert_eq!(named(&policy.judge(&elsewhere, &[], true, now).0), ("failure", "DeviceGone"));
        let in_its_place = BTreeMap::from([("new".to_owned(), there("0000:01:00.0"))]);
        assert_eq!(named(&policy.judge(&in_its_place, &[], false, now).0), ("success", ""), "unread is no absence");
        assert!(policy.good().any(|(lasting, _)| lasting == "old"));
        assert_eq!(named(&policy.judge(&in_its_place, &[], true, now).0), ("success", ""));
        assert_eq!(policy.good().map(|(lasting, _)| lasting.as_str()).collect::<Vec<_>>(), ["new"]);
    }

    #[test]
    fn no_controller_at_all_is_a_failure_and_one_of_two_can_be_enough() {
        let now = some_instant();
        assert_eq!(named(&policy(Require::Any).judge(&BTreeMap::new(), &[], true, now).0), ("failure", "NoController"));
        let paths = there([("nvme0", seen("live")), ("nvme1", seen("dead"))]);
        assert_eq!(named(&policy(Require::Any).judge(&paths, &[], true, now).0), ("warning", "ControllerDead"));
        assert_eq!(named(&policy(Require::All).judge(&paths, &[], true, now).0), ("failure", "ControllerDead"));
    }

    #[test]
    fn what_is_not_known_of_smart_neither_condemns_nor_heals() {
        let page = |spare, bits| {
            let log = SmartLog {
                critical_warning: bits,
                temperature: 300,
                spare,
                spare_threshold: 10,
                percentage_used: 1,
                media_errors: 0,
            };
            with_smart(Smart::Log(log))
        };
        let (good, read_only) = (page(100, 0), page(100, 8));
        let unread = || with_smart(Smart::Unread(Reason::new("SmartImplausible", "")));
        let refused = || with_smart(Smart::NotPermitted(Reason::new("SmartNotPermitted", "")));
        let names =
            |rounds: Vec<Result<Seen, Silence>>| over_time(rounds).into_iter().map(|said| said.0).collect::<Vec<_>>();
        assert_eq!(names(vec![refused(), refused()]), ["warning", "warning"], "the state is known, and good");
        assert_eq!(names(vec![unread(), good.clone()]), ["unknown", "success"]);
        assert_eq!(
            names(vec![read_only.clone(), unread(), refused(), good]),
            ["failure", "unknown", "unknown", "success"]
        );
        let silent = |rounds| with_smart(Smart::Silent(Silence::TimeOuts(rounds)));
        assert_eq!(names(vec![silent(1), silent(2), silent(3)]), ["unknown", "unknown", "failure"]);
    }

    #[test]
    fn a_live_controller_without_a_path_to_its_namespaces_warns() {
        let seen = Seen { state: Ok(State::Live), smart: Smart::NotAsked, unreachable: Some("inaccessible".into()) };
        assert_eq!(over_time([Ok(seen)]), [("warning", "PathLost")]);
    }

    proptest! {
        #[test]
        fn no_word_but_the_kernels_gives_a_verdict(word in "\\PC{0,30}", rounds in 1_usize..100) {
            prop_assume!(!matches!(State::parse(&word), State::Live | State::New | State::Resetting | State::Connecting | State::Deleting | State::Dead));
            for said in over_time((0..rounds).map(|_| seen(&word))) {
                prop_assert_eq!(said, ("unknown", "UnknownState"));
            }
        }
    }
}
