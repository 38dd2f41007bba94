//! GPUs: which are there, which answer on the bus, and what the tool and the kernel log say of each.

use super::devices::{Good, add_up};
use super::group::Require;
use super::kernel_log::{Class, Held};
use super::outcome::{Outcome, Reason, Severity};
use super::round::Silence;
use super::smart::{Level, Limits};
use super::smi::{Answer, Figure, Row};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// GPUs that are kept in mind.
const MAX_KNOWN: usize = 256;

/// A GPU as PCI has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnBus {
    /// Its configuration space is all ones: it has fallen off the bus. `None` when that was not to be read.
    pub answers: Option<bool>,
    /// The driver that has it.
    pub driver: Option<String>,
}

/// What the tool said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tool {
    /// It is not used.
    NotAsked,
    /// It cannot be run.
    NotRun(Reason),
    /// It did not end in time.
    Silent(Silence),
    /// Its answer.
    Said(Answer),
}

/// What is asked of the GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuRule {
    /// How many there are, if that is known.
    pub count: Option<usize>,
    /// How many must work.
    pub require: Require,
    /// Memory in use, in percent.
    pub memory_used: Limits<u8>,
    /// How long the tool may take.
    pub timeout: Duration,
}

/// What one look saw.
#[derive(Debug, Clone, Copy)]
pub struct Look<'a> {
    /// Those that are there and selected, by their address, and what was read of those that answered in time.
    pub on_bus: &'a BTreeMap<String, Result<OnBus, Silence>>,
    /// Addresses that the settings name and that are not there.
    pub absent: &'a [String],
    /// What the settings leave out.
    pub excluded: &'a BTreeSet<String>,
    /// Why what is there cannot be told for sure, if so: then nothing counts as gone.
    pub doubt: Option<&'a Reason>,
    /// What the tool said.
    pub tool: &'a Tool,
    /// Xid messages that hold.
    pub held: &'a [Held],
    /// Why the kernel log cannot be read, if it should be.
    pub log_unread: Option<&'a Reason>,
}

/// Judges the GPUs.
#[derive(Debug)]
pub struct GpuPolicy {
    rule: GpuRule,
    /// Those that were seen and had nothing wrong.
    good: BTreeMap<String, Good>,
}

impl GpuPolicy {
    /// Nothing was seen yet but `good`, by address.
    pub fn new(rule: GpuRule, good: BTreeMap<String, Good>) -> Self {
        Self { rule, good: good.into_iter().take(MAX_KNOWN).collect() }
    }

    /// Those that were good once and are to be missed, by address.
    pub fn good(&self) -> impl Iterator<Item = (&String, &Good)> + Clone {
        self.good.iter()
    }

    /// The outcome, and that of each GPU.
    pub fn judge(&mut self, look: Look<'_>) -> (Outcome, Vec<(String, Outcome)>) {
        let answer = if let Tool::Said(answer) = look.tool { Some(answer) } else { None };
        let mut each: BTreeMap<String, Outcome> = BTreeMap::new();
        for (address, on_bus) in look.on_bus {
            let outcome = match on_bus {
                Err(silence) => silence.outcome(self.rule.timeout),
                Ok(on_bus) => self.rule.gpu(address, on_bus, answer),
            };
            each.insert(address.clone(), outcome);
        }
        // What the tool alone knows of: this machine's bus may not be to be seen.
        let by_tool = answer.map(|answer| answer.rows.iter().map(|row| &row.pci)).into_iter().flatten();
        let complained = answer.map(|answer| answer.failed.iter().map(|(pci, _)| pci)).into_iter().flatten();
        for address in by_tool.chain(complained) {
            if !look.excluded.contains(address) && !each.contains_key(address) {
                each.insert(address.clone(), self.rule.gpu(address, &OnBus::default(), answer));
            }
        }
        for held in look.held {
            let named = held.device.as_deref().unwrap_or_default().trim_start_matches("PCI:");
            // Xid messages leave the function out.
            let is_it = |address: &&String| {
                !named.is_empty() && address.rsplit_once('.').is_some_and(|(card, _)| card == named)
            };
            let Some(address) = each.keys().find(is_it).cloned() else { continue };
            let told = Reason::new("Xid", format!("{}: {}", held.rule, held.text));
            let outcome = match held.class {
                Class::Fatal => Outcome::Failure(told, Severity::Hard),
                Class::Warn | Class::Ignore => Outcome::Warning(told),
            };
            each.entry(address).and_modify(|before| *before = worse(before.clone(), outcome));
        }
        let present = each.len();
        let gone = |why: &str| Outcome::Failure(Reason::new("DeviceGone", why), Severity::Soft);
        for address in look.absent {
            each.insert(address.clone(), gone("is named in the settings and not there"));
        }
        for address in self.good.keys().filter(|_| look.doubt.is_none()) {
            each.entry(address.clone()).or_insert_with(|| gone("was there and is gone"));
        }
        let good = each.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Success)).map(|(address, _)| address);
        let news = good.filter(|address| !self.good.contains_key(*address));
        let news: Vec<String> = news.take(MAX_KNOWN.saturating_sub(self.good.len())).cloned().collect();
        let place = |address: String| (address.clone(), Good { pci: Some(address.clone()), name: address });
        self.good.extend(news.into_iter().map(place));
        let devices: Vec<(&str, &Outcome)> =
            each.iter().map(|(address, outcome)| (address.as_str(), outcome)).collect();
        let none = || Reason::new("NoGpu", "there is no GPU that the settings select");
        let add_up = || add_up(&devices, self.rule.require, none());
        let outcome = match (self.rule.count, look.doubt) {
            (Some(0), None) if devices.is_empty() => Outcome::Success,
            (Some(_) | None, None) => worse(add_up(), self.count(present, answer, look.excluded)),
            (_, Some(doubt)) if devices.is_empty() => Outcome::Unknown(doubt.clone()),
            (_, Some(doubt)) => worse(add_up(), Outcome::Unknown(doubt.clone())),
        };
        let outcome = worse(outcome, self.tool(look.tool));
        let unread = look.log_unread.map_or(Outcome::Success, |reason| Outcome::Warning(reason.clone()));
        (worse(outcome, unread), each.into_iter().collect())
    }

    fn count(&self, present: usize, answer: Option<&Answer>, excluded: &BTreeSet<String>) -> Outcome {
        let Some(count) = self.rule.count else { return Outcome::Success };
        let counts = |pci: &&String| !excluded.contains(*pci);
        let listed = answer.filter(|answer| !answer.rows.is_empty()).map_or(present, |answer| {
            // It may complain of one that it lists.
            let named = answer.rows.iter().map(|row| &row.pci).chain(answer.failed.iter().map(|(pci, _)| pci));
            named.filter(counts).collect::<BTreeSet<_>>().len()
        });
        let seen = present.min(listed);
        if seen >= count {
            return Outcome::Success;
        }
        let message = format!("{seen} GPUs are there, {count} are expected");
        Outcome::Failure(Reason::new("TooFewGpus", message), Severity::Hard)
    }

    fn tool(&self, tool: &Tool) -> Outcome {
        let answer = match tool {
            Tool::NotAsked => return Outcome::Success,
            Tool::NotRun(reason) => return Outcome::Unknown(reason.clone()),
            Tool::Silent(silence) => return silence.outcome(self.rule.timeout),
            Tool::Said(answer) => answer,
        };
        let exit = answer.exit.map_or_else(|| "killed by a signal".to_owned(), |exit| format!("exit {exit}"));
        let words = answer.complaints.join("; ");
        let said = if words.is_empty() { exit } else { format!("{exit}: {words}") };
        if let Some(words) = answer.nothing_works() {
            return Outcome::Failure(Reason::new("ToolFailed", words), Severity::Soft);
        }
        if answer.no_devices() && self.rule.count != Some(0) {
            return Outcome::Failure(Reason::new("NoGpu", said), Severity::Soft);
        }
        let has_data = !answer.rows.is_empty() || !answer.failed.is_empty() || answer.no_devices();
        match (has_data, answer.exit) {
            (true, Some(0)) if answer.complaints.is_empty() || answer.no_devices() => Outcome::Success,
            (true, _) if answer.no_devices() => Outcome::Success,
            (true, _) => {
                Outcome::Warning(Reason::new("ToolDegraded", format!("the tool has data, and ends with {said}")))
            }
            (false, _) => Outcome::Unknown(Reason::new("ToolUnknown", format!("the tool gives no data: {said}"))),
        }
    }
}

impl GpuRule {
    fn gpu(&self, address: &str, on_bus: &OnBus, answer: Option<&Answer>) -> Outcome {
        let fail = |code, message: &str| Outcome::Failure(Reason::new(code, message), Severity::Hard);
        if on_bus.answers == Some(false) {
            return fail("OffTheBus", "does not answer on the bus: its configuration space is all ones");
        }
        let Some(answer) = answer else { return Outcome::Success };
        let complaint = answer.failed.iter().find(|(pci, _)| pci == address).map(|(_, complaint)| complaint);
        match (answer.rows.iter().find(|row| row.pci == address), complaint) {
            (None, None) => {}
            (None, Some(complaint)) => return fail("GpuFailed", complaint),
            (Some(row), None) => return self.row(row),
            // The tool reaches it, and has something to say of it, such as a corrupt info ROM.
            (Some(row), Some(complaint)) => {
                return worse(self.row(row), Outcome::Warning(Reason::new("ToolDegraded", complaint.as_str())));
            }
        }
        // Without the tool's driver it is somebody else's, and without any row the tool has said nothing of GPUs.
        if on_bus.driver.as_deref() == Some("nvidia") && !answer.rows.is_empty() {
            return Outcome::Warning(Reason::new("NotListed", "is on the bus, but the tool does not list it"));
        }
        Outcome::Success
    }

    fn row(&self, row: &Row) -> Outcome {
        let mut outcome = Outcome::Success;
        if let Some(action) = row.recovery_action.as_deref().filter(|action| *action != "None") {
            let reason = Reason::new("RecoveryNeeded", format!("the driver asks for: {action}"));
            outcome = worse(outcome, Outcome::Failure(reason, Severity::Hard));
        }
        for figure in [&row.memory_used, &row.memory_total, &row.temperature] {
            if let Figure::Trouble(words) = figure {
                let lost = words.contains("lost") || words.contains("requires reset");
                let reason = Reason::new("FigureMissing", format!("the tool says {words} instead of a figure"));
                let seen = if lost { Outcome::Failure(reason, Severity::Hard) } else { Outcome::Warning(reason) };
                outcome = worse(outcome, seen);
            }
        }
        if let (Figure::Number(used), Figure::Number(total @ 1..)) = (&row.memory_used, &row.memory_total) {
            let percent = u8::try_from(used.saturating_mul(100) / total).unwrap_or(u8::MAX);
            let reason =
                Reason::new("MemoryUsed", format!("{percent} % of the memory is in use, {used} of {total} MiB"));
            let seen = match self.memory_used.above(percent) {
                Level::Ignore => Outcome::Success,
                Level::Warn => Outcome::Warning(reason),
                Level::Fail => Outcome::Failure(reason, Severity::Hard),
            };
            outcome = worse(outcome, seen);
        }
        outcome
    }
}

/// The worse of two words about one thing: bad before unknown, unknown before good.
fn worse(one: Outcome, other: Outcome) -> Outcome {
    let rank = |outcome: &Outcome| match outcome {
        Outcome::Success => 0,
        Outcome::Warning(_) => 1,
        Outcome::Unknown(_) => 2,
        Outcome::Failure(_, Severity::Soft) => 3,
        Outcome::Failure(_, Severity::Hard) => 4,
    };
    if rank(&other) > rank(&one) { other } else { one }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "0, 00000000:17:00.0, GPU-a, 10, 100, 33\n1, 00000000:18:00.0, GPU-b, 10, 100, 33\n\
                        2, 00000000:65:00.0, GPU-c, 10, 100, 33\n3, 00000000:ab:00.0, GPU-d, 10, 100, 33\n";
    const BUS: [&str; 4] = ["0000:17:00.0", "0000:18:00.0", "0000:65:00.0", "0000:ab:00.0"];

    fn rule() -> GpuRule {
        GpuRule {
            count: None,
            require: Require::All,
            memory_used: Limits { warn: Some(90), fail: None },
            timeout: Duration::from_secs(3),
        }
    }

    fn bus(addresses: &[&str]) -> BTreeMap<String, Result<OnBus, Silence>> {
        let nvidia = OnBus { answers: Some(true), driver: Some("nvidia".into()) };
        addresses.iter().map(|address| ((*address).to_owned(), Ok(nvidia.clone()))).collect()
    }

    fn look<'a>(
        on_bus: &'a BTreeMap<String, Result<OnBus, Silence>>,
        tool: &'a Tool,
        none: &'a BTreeSet<String>,
    ) -> Look<'a> {
        Look { on_bus, absent: &[], excluded: none, doubt: None, tool, held: &[], log_unread: None }
    }

    fn said(stdout: &str, exit: i32) -> Tool {
        Tool::Said(Answer::parse(stdout, "", Some(exit)))
    }

    fn named(outcome: &Outcome) -> (&'static str, &'static str) {
        (outcome.name(), outcome.reason().map_or("", |reason| reason.code))
    }

    fn judged(rule: GpuRule, addresses: &[&str], tool: &Tool) -> (Outcome, Vec<(String, Outcome)>) {
        GpuPolicy::new(rule, BTreeMap::new()).judge(look(&bus(addresses), tool, &BTreeSet::new()))
    }

    #[test]
    fn one_dead_gpu_of_four_leaves_three_good_ones() {
        let stdout = GOOD.replace(
            "1, 00000000:18:00.0, GPU-b, 10, 100, 33",
            "Unable to determine the device handle for gpu 0000:18:00.0: Unknown Error",
        );
        let (outcome, each) = judged(rule(), &BUS, &said(&stdout, 0));
        assert_eq!(named(&outcome), ("failure", "GpuFailed"));
        assert_eq!(
            each.iter().map(|(_, outcome)| outcome.name()).collect::<Vec<_>>(),
            ["success", "failure", "success", "success"]
        );
        let any = GpuRule { require: Require::Any, ..rule() };
        assert_eq!(named(&judged(any, &BUS, &said(&stdout, 0)).0), ("warning", "GpuFailed"));
    }

    #[test]
    fn a_bad_exit_with_good_data_is_degraded_and_says_so() {
        let (outcome, each) = judged(rule(), &BUS, &said(GOOD, 14));
        assert_eq!(named(&outcome), ("warning", "ToolDegraded"));
        assert!(outcome.reason().unwrap().message.contains("exit 14"));
        assert!(each.iter().all(|(_, outcome)| *outcome == Outcome::Success));
    }

    #[test]
    fn a_complaint_of_a_gpu_that_the_tool_reaches_only_warns() {
        let stdout = format!("{GOOD}WARNING: infoROM is corrupted at gpu 0000:18:00.0\n");
        let (outcome, each) = judged(GpuRule { count: Some(4), ..rule() }, &BUS, &said(&stdout, 14));
        assert_eq!(outcome.name(), "warning", "{outcome:?}");
        let names: Vec<_> = each.iter().map(|(_, outcome)| outcome.name()).collect();
        assert_eq!(names, ["success", "warning", "success", "success"]);
        let three = stdout.lines().skip(1).collect::<Vec<_>>().join("\n");
        let (outcome, _) = judged(GpuRule { count: Some(4), ..rule() }, &BUS, &said(&three, 14));
        assert_eq!(named(&outcome), ("failure", "TooFewGpus"), "it is not counted twice");
    }

    #[test]
    fn what_is_absent_is_not_zero_and_words_are_not_silence() {
        for (cell, seen) in [
            ("[N/A]", ("success", "")),
            ("ERR!", ("warning", "FigureMissing")),
            ("[GPU is lost]", ("failure", "FigureMissing")),
        ] {
            let stdout = GOOD.replacen("33", cell, 1);
            assert_eq!(named(&judged(rule(), &BUS, &said(&stdout, 0)).0), seen, "{cell}");
        }
    }

    #[test]
    fn the_tools_failure_is_one_and_its_confusion_is_not() {
        let mismatch = "Failed to initialize NVML: Driver/library version mismatch\n";
        assert_eq!(named(&judged(rule(), &BUS, &said(mismatch, 18)).0), ("failure", "ToolFailed"));
        assert_eq!(named(&judged(rule(), &[], &said("No devices were found\n", 6)).0).0, "failure");
        assert_eq!(
            named(&judged(rule(), &BUS, &said("Field is not a valid field to query.\n", 2)).0),
            ("unknown", "ToolUnknown")
        );
        assert_eq!(named(&judged(rule(), &BUS, &said("", 0)).0), ("unknown", "ToolUnknown"));
    }

    #[test]
    fn a_gpu_that_needs_a_reset_fails_though_its_figures_look_normal() {
        let stdout = GOOD.replace("33\n", "33, None\n").replacen("33, None\n2", "33, Reset\n2", 1);
        let (outcome, each) = judged(rule(), &BUS, &said(&stdout, 0));
        assert_eq!(named(&outcome), ("failure", "RecoveryNeeded"));
        assert_eq!(
            each.iter()
                .filter(|(_, outcome)| outcome.name() == "failure")
                .map(|(address, _)| address.as_str())
                .collect::<Vec<_>>(),
            ["0000:18:00.0"]
        );
    }

    #[test]
    fn without_the_tool_nothing_is_said_of_it_and_a_missing_one_is_unknown() {
        assert_eq!(judged(rule(), &BUS, &Tool::NotAsked).0, Outcome::Success);
        let missing = Tool::NotRun(Reason::new("ToolMissing", ""));
        assert_eq!(named(&judged(rule(), &BUS, &missing).0), ("unknown", "ToolMissing"));
        let mut policy = GpuPolicy::new(rule(), BTreeMap::new());
        let (on_bus, none) = (bus(&BUS), BTreeSet::new());
        let silent = [1, 2, 3].map(|rounds| Tool::Silent(Silence::TimeOuts(rounds)));
        let names: Vec<_> = silent.iter().map(|tool| policy.judge(look(&on_bus, tool, &none)).0.name()).collect();
        assert_eq!(names, ["unknown", "unknown", "failure"]);
    }

    #[test]
    fn fewer_than_expected_is_a_failure_however_they_were_counted() {
        let four = || GpuRule { count: Some(4), ..rule() };
        let three = GOOD.lines().take(3).collect::<Vec<_>>().join("\n");
        assert_eq!(judged(four(), &BUS, &said(GOOD, 0)).0, Outcome::Success);
        assert_eq!(named(&judged(four(), &BUS[..3], &Tool::NotAsked).0), ("failure", "TooFewGpus"));
        assert_eq!(named(&judged(four(), &BUS[..3], &said(&three, 0)).0), ("failure", "TooFewGpus"));
        assert_eq!(named(&judged(four(), &BUS, &said(&three, 0)).0), ("failure", "TooFewGpus"));
        assert_eq!(named(&judged(rule(), &BUS, &said(&three, 0)).0), ("warning", "NotListed"), "no count, no failure");
        assert_eq!(named(&judged(rule(), &[], &Tool::NotAsked).0), ("failure", "NoGpu"));
        let no_gpus = GpuRule { count: Some(0), ..rule() };
        assert_eq!(judged(no_gpus, &[], &Tool::NotAsked).0, Outcome::Success);
    }

    #[test]
    fn a_gpu_off_the_bus_fails_and_one_that_vanishes_is_missed() {
        let none = BTreeSet::new();
        let mut policy = GpuPolicy::new(rule(), BTreeMap::new());
        let mut on_bus = bus(&BUS);
        assert_eq!(policy.judge(look(&on_bus, &Tool::NotAsked, &none)).0, Outcome::Success);
        on_bus.insert(BUS[0].into(), Ok(OnBus { answers: Some(false), driver: None }));
        assert_eq!(named(&policy.judge(look(&on_bus, &Tool::NotAsked, &none)).0), ("failure", "OffTheBus"));
        on_bus.remove(BUS[0]);
        let (outcome, _) = policy.judge(look(&on_bus, &Tool::NotAsked, &none));
        assert!(matches!(&outcome, Outcome::Failure(reason, Severity::Soft) if reason.code == "DeviceGone"));
        assert_eq!(policy.judge(look(&bus(&BUS), &Tool::NotAsked, &none)).0, Outcome::Success, "and comes back");
    }

    #[test]
    fn one_that_was_good_before_is_missed_from_the_start() {
        let (none, first) = (BTreeSet::new(), bus(&BUS));
        let mut before = GpuPolicy::new(rule(), BTreeMap::new());
        assert_eq!(before.judge(look(&first, &Tool::NotAsked, &none)).0, Outcome::Success);
        let good: BTreeMap<String, Good> = before.good().map(|(id, good)| (id.clone(), good.clone())).collect();
        assert_eq!(good.keys().collect::<Vec<_>>(), BUS);
        let (outcome, _) = GpuPolicy::new(rule(), good).judge(look(&bus(&BUS[1..]), &Tool::NotAsked, &none));
        assert_eq!(named(&outcome), ("failure", "DeviceGone"));
    }

    #[test]
    fn an_xid_belongs_to_its_gpu() {
        let held = |class| Held::for_test("xid-79", class, "PCI:0000:18:00");
        for (class, seen) in [(Class::Fatal, ("failure", "Xid")), (Class::Warn, ("warning", "Xid"))] {
            let (on_bus, none, held) = (bus(&BUS), BTreeSet::new(), [held(class)]);
            let (outcome, each) = GpuPolicy::new(rule(), BTreeMap::new())
                .judge(Look { held: &held, ..look(&on_bus, &Tool::NotAsked, &none) });
            assert_eq!(named(&outcome), seen);
            assert_eq!(each.iter().filter(|(_, outcome)| *outcome != Outcome::Success).count(), 1);
        }
    }

    #[test]
    fn memory_in_use_warns_from_its_limit_on() {
        let rule = || GpuRule { memory_used: Limits { warn: Some(90), fail: Some(99) }, ..rule() };
        for (used, name) in
            [("89", "success"), ("90", "warning"), ("98", "warning"), ("99", "failure"), ("4000000000", "failure")]
        {
            let stdout = GOOD.replacen("10, 100", &format!("{used}, 100"), 1);
            assert_eq!(judged(rule(), &BUS, &said(&stdout, 0)).0.name(), name, "{used}");
        }
    }
}
