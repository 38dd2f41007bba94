//! What the kernel log says about the hardware: each rule's lines hold for a while, or until the kernel tells of the recovery.

use super::line_pattern::LinePattern;
use super::outcome::{Outcome, Reason, Severity};
use std::time::{Duration, Instant};

/// Devices that are kept in mind at once; a log that names more is nobody's hardware.
const MAX_HELD: usize = 256;

/// What of a line is kept.
const MAX_LINE_CHARS: usize = 300;

/// What a matching line means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The hardware does not work.
    Fatal,
    /// Someone should look.
    Warn,
    /// Nothing; later rules do not see the line.
    Ignore,
}

/// One rule. The first one that matches a line decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRule {
    /// Unique; shown with what it found.
    pub name: String,
    /// What it looks for.
    pub pattern: LinePattern,
    /// What it means.
    pub class: Class,
    /// How long a line holds; `None` is until the recovery.
    pub holds: Option<Duration>,
    /// A line that ends what was found on the same device; on any, if one of the two names none.
    pub until: Option<LinePattern>,
}

/// From where on the log counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    /// From the start of the probe.
    Now,
    /// From the boot, as far as the kernel keeps it. Lines from before the start count only if they are fatal.
    Boot,
}

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// How long before `now` it was written.
    pub age: Duration,
    /// Whether it was there before the probe.
    pub history: bool,
    /// Its text.
    pub text: &'a str,
}

/// Something that a line told and that still holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The rule's name.
    pub rule: String,
    /// Its class: fatal or warn.
    pub class: Class,
    /// The device, if the rule names one.
    pub device: Option<String>,
    /// The last such line.
    pub text: String,
    /// How many there were.
    pub lines: u64,
    /// When the last one was written; `None` before anything the clock can tell.
    pub at: Option<Instant>,
    number: usize,
}

#[cfg(test)]
impl Held {
    pub(crate) fn for_test(rule: &str, class: Class, device: &str) -> Self {
        let device = Some(device.to_owned());
        Self { rule: rule.to_owned(), class, device, text: String::new(), lines: 1, at: None, number: 0 }
    }
}

/// Judges the log.
#[derive(Debug)]
pub struct KernelLogPolicy {
    rules: Vec<LogRule>,
    held: Vec<Held>,
}

impl KernelLogPolicy {
    /// Nothing was read yet.
    pub fn new(rules: Vec<LogRule>) -> Self {
        Self { rules, held: Vec::new() }
    }

    /// Whether a line means anything by some rule: the others need not be kept.
    pub fn concerns(&self, text: &str) -> bool {
        let ends = |rule: &LogRule| rule.until.as_ref().is_some_and(|until| until.find(text).is_some());
        self.rules.iter().any(|rule| rule.pattern.find(text).is_some() || ends(rule))
    }

    /// Takes in one message.
    pub fn read(&mut self, message: Message<'_>, now: Instant) {
        self.recover(message.text);
        let found = self.rules.iter().enumerate().find_map(|(number, rule)| {
            rule.pattern.find(message.text).map(|found| (number, rule, found.device.map(str::to_owned)))
        });
        let Some((number, rule, device)) = found else { return };
        let counts = match rule.class {
            Class::Ignore => false,
            Class::Warn => !message.history,
            Class::Fatal => true,
        };
        let at = now.checked_sub(message.age);
        if !counts || rule.holds.is_some_and(|holds| message.age >= holds) {
            return;
        }
        let text = message.text.chars().filter(|char| !char.is_control()).take(MAX_LINE_CHARS).collect();
        if let Some(held) = self.held.iter_mut().find(|held| held.number == number && held.device == device) {
            held.lines = held.lines.saturating_add(1);
            (held.text, held.at) = (text, at);
        } else if self.held.len() < MAX_HELD {
            let (rule, class) = (rule.name.clone(), rule.class);
            self.held.push(Held { rule, class, device, text, lines: 1, at, number });
        }
    }

    fn recover(&mut self, text: &str) {
        let rules = &self.rules;
        self.held.retain(|held| {
            let until = rules.get(held.number).and_then(|rule| rule.until.as_ref());
            let Some(found) = until.and_then(|until| until.find(text)) else { return true };
            match (&held.device, found.device) {
                (Some(device), Some(recovered)) => device != recovered,
                (None, _) | (_, None) => false,
            }
        });
    }

    /// What still holds at `now`.
    pub fn held(&mut self, now: Instant) -> &[Held] {
        let rules = &self.rules;
        self.held.retain(|held| match rules.get(held.number).and_then(|rule| rule.holds) {
            Some(holds) => held.at.is_some_and(|at| now.saturating_duration_since(at) < holds),
            None => true,
        });
        &self.held
    }

    /// The outcome of what holds. `unread` says why the log cannot be read now, if so: what held before still does.
    pub fn judge(&mut self, unread: Option<Reason>, now: Instant) -> Outcome {
        let held = self.held(now);
        let of = |class| held.iter().filter(move |held| held.class == class);
        if let Some(first) = of(Class::Fatal).next() {
            return Outcome::Failure(told("KernelLogFatal", first, of(Class::Fatal).count()), Severity::Hard);
        }
        match (unread, of(Class::Warn).next()) {
            (Some(reason), _) => Outcome::Unknown(reason),
            (None, Some(first)) => Outcome::Warning(told("KernelLogWarning", first, of(Class::Warn).count())),
            (None, None) => Outcome::Success,
        }
    }
}

fn told(code: &'static str, first: &Held, count: usize) -> Reason {
    let mut message = format!("{}: {}", first.rule, first.text);
    if first.lines > 1 {
        message += &format!(" ({} such lines)", first.lines);
    }
    if count > 1 {
        message += &format!(", and {} more", count - 1);
    }
    Reason::new(code, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;

    const MINUTE: Duration = Duration::from_secs(60);

    fn rule(name: &str, pattern: &str, class: Class) -> LogRule {
        let pattern = LinePattern::new(pattern).unwrap();
        LogRule { name: name.into(), pattern, class, holds: Some(10 * MINUTE), until: None }
    }

    fn line(text: &str) -> Message<'_> {
        Message { age: Duration::ZERO, history: false, text }
    }

    #[test]
    fn a_fatal_line_holds_for_its_time_and_no_longer() {
        let start = some_instant();
        let mut policy = KernelLogPolicy::new(vec![rule("dead", "nvme {device}: dead", Class::Fatal)]);
        assert_eq!(policy.judge(None, start), Outcome::Success);
        policy.read(line("nvme nvme0: dead"), start);
        let just_before = start + 10 * MINUTE - Duration::from_millis(1);
        assert!(
            matches!(policy.judge(None, just_before), Outcome::Failure(reason, Severity::Hard) if reason.message == "dead: nvme nvme0: dead")
        );
        assert_eq!(policy.judge(None, start + 10 * MINUTE), Outcome::Success);
    }

    #[test]
    fn a_repeated_line_is_told_once_and_holds_from_the_last() {
        let start = some_instant();
        let mut policy = KernelLogPolicy::new(vec![rule("slow", "slow", Class::Warn)]);
        for minute in 0..1_000 {
            policy.read(line("slow"), start + minute * MINUTE);
        }
        let now = start + 1_000 * MINUTE;
        assert_eq!(policy.held(now).len(), 1);
        assert!(
            matches!(policy.judge(None, now), Outcome::Warning(reason) if reason.message == "slow: slow (1000 such lines)")
        );
    }

    #[test]
    fn recovery_ends_it_on_its_own_device_only() {
        let start = some_instant();
        let until = Some(LinePattern::new("mlx5_core {device}*recovered").unwrap());
        let sick = LogRule { until, holds: None, ..rule("sick", "mlx5_core {device}*sick", Class::Fatal) };
        let mut policy = KernelLogPolicy::new(vec![sick]);
        for text in ["mlx5_core a: sick", "mlx5_core b: sick", "mlx5_core a: recovered"] {
            policy.read(line(text), start);
        }
        let later = start + 100_000 * MINUTE;
        let devices: Vec<_> = policy.held(later).iter().map(|held| held.device.clone().unwrap()).collect();
        assert_eq!(devices, ["b"], "and without a time it holds until the recovery");
        policy.read(line("mlx5_core b: recovered"), later);
        assert_eq!(policy.judge(None, later), Outcome::Success);
    }

    #[test]
    fn history_counts_only_if_fatal_and_young_enough() {
        let start = some_instant();
        let rules = vec![rule("bad", "bad", Class::Fatal), rule("odd", "odd", Class::Warn)];
        let old = |minutes, text| Message { age: minutes * MINUTE, history: true, text };
        let mut policy = KernelLogPolicy::new(rules);
        policy.read(old(1, "odd"), start);
        policy.read(old(11, "bad"), start);
        assert_eq!(policy.judge(None, start), Outcome::Success);
        policy.read(old(9, "bad"), start);
        assert_eq!(policy.judge(None, start).name(), "failure");
        assert_eq!(policy.judge(None, start + MINUTE), Outcome::Success, "its time began when it was written");
    }

    #[test]
    fn an_ignored_line_is_seen_by_no_later_rule() {
        let start = some_instant();
        let rules = vec![rule("noise", "bad but known", Class::Ignore), rule("bad", "bad", Class::Fatal)];
        let mut policy = KernelLogPolicy::new(rules);
        policy.read(line("bad but known"), start);
        assert_eq!(policy.judge(None, start), Outcome::Success);
    }

    #[test]
    fn an_unreadable_log_is_unknown_and_takes_back_nothing() {
        let start = some_instant();
        let unread = || Some(Reason::new("KernelLogUnreadable", ""));
        let mut policy = KernelLogPolicy::new(vec![rule("bad", "bad", Class::Fatal), rule("odd", "odd", Class::Warn)]);
        assert_eq!(policy.judge(unread(), start).name(), "unknown");
        policy.read(line("odd"), start);
        assert_eq!(policy.judge(unread(), start).name(), "unknown", "a warning would count as a success");
        policy.read(line("bad"), start);
        assert_eq!(policy.judge(unread(), start).name(), "failure");
    }

    #[test]
    fn a_flood_of_devices_is_bounded() {
        let start = some_instant();
        let mut policy = KernelLogPolicy::new(vec![rule("dead", "nvme {device}: dead", Class::Fatal)]);
        for number in 0..10_000 {
            policy.read(line(&format!("nvme nvme{number}: dead")), start);
        }
        assert_eq!(policy.held(start).len(), MAX_HELD);
    }
}
