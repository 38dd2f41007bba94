//! NVIDIA's Xid messages, by their numbers.
//!
//! Those who watch GPUs do not agree on them. Fatal here is what lists of fatal numbers agree on and no list calls an error of
//! the application; ignored is what a list calls one and no other calls fatal; the rest warns. 63 tells of a repair that worked
//! (a row or page is put out of use at the next reset), so it warns, though lists have it.

use super::kernel_log::{Class, LogRule};
use super::line_pattern::LinePattern;
use std::collections::BTreeMap;
use std::time::Duration;

/// A fault is remembered for this long after its last line.
pub const HOLDS: Duration = Duration::from_secs(2 * 3600);

/// Double-bit ECC error, internal microcontroller halt, failed page retirement, NVLink, off the bus, and the GPU's own
/// processor (GSP) that does not answer.
const FATAL: [u32; 7] = [48, 62, 64, 74, 79, 119, 120];

/// Exceptions and faults of the program that runs on the GPU, and channels torn down with it.
const IGNORE: [u32; 4] = [13, 31, 43, 45];

/// What stands before the number, in old drivers and new ones: `NVRM: Xid (PCI:0000:05:00): 79,`.
const XID: &str = "NVRM: Xid ({device}): ";

/// What a number means; one that is not listed warns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XidTable {
    classes: BTreeMap<u32, Class>,
}

impl Default for XidTable {
    fn default() -> Self {
        let fatal = FATAL.into_iter().map(|number| (number, Class::Fatal));
        let ignore = IGNORE.into_iter().map(|number| (number, Class::Ignore));
        Self { classes: fatal.chain(ignore).collect() }
    }
}

impl XidTable {
    /// Puts a number into another class.
    pub fn set(&mut self, number: u32, class: Class) {
        self.classes.insert(number, class);
    }

    /// What `number` means.
    pub fn class(&self, number: u32) -> Class {
        self.classes.get(&number).copied().unwrap_or(Class::Warn)
    }

    /// As rules for the kernel log.
    pub fn rules(&self, holds: Option<Duration>) -> Vec<LogRule> {
        let rule = |name: String, text: &str, class| {
            Some(LogRule { name, pattern: LinePattern::new(text).ok()?, class, holds, until: None })
        };
        let listed = self
            .classes
            .iter()
            .filter_map(|(number, class)| rule(format!("xid-{number}"), &format!("{XID}{number},"), *class));
        listed.chain(rule("xid".to_owned(), XID, Class::Warn)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::kernel_log::{KernelLogPolicy, Message};
    use crate::policy::some_instant;

    fn held(table: &XidTable, text: &str) -> Option<(String, Class, Option<String>)> {
        let now = some_instant();
        let mut policy = KernelLogPolicy::new(table.rules(Some(HOLDS)));
        policy.read(Message { age: Duration::ZERO, history: false, text }, now);
        policy.held(now).first().cloned().map(|held| (held.rule, held.class, held.device))
    }

    #[test]
    fn a_number_decides_and_the_next_one_up_is_another() {
        let table = XidTable::default();
        let seen = |line: &str| held(&table, line).map(|(rule, class, _)| (rule, class));
        let xid = |number| format!("NVRM: Xid (PCI:0000:05:00): {number}, pid=1234, name=python, GPU has fallen off");
        assert_eq!(seen(&xid(79)), Some(("xid-79".into(), Class::Fatal)));
        assert_eq!(seen(&xid(7)), Some(("xid".into(), Class::Warn)));
        assert_eq!(seen(&xid(790)), Some(("xid".into(), Class::Warn)));
        assert_eq!(seen(&xid(63)), Some(("xid".into(), Class::Warn)));
        assert_eq!(seen(&xid(31)), None);
        // Numbers on which lists contradict each other.
        for number in [68, 109] {
            assert_eq!(table.class(number), Class::Warn);
        }
    }

    #[test]
    fn the_gpu_is_named_in_old_and_new_lines() {
        for (line, gpu) in [
            ("NVRM: Xid (PCI:0000:0f:00): 119, pid=<unknown>, Timeout waiting for RPC", "PCI:0000:0f:00"),
            ("NVRM: Xid (0000:03:00): 48, An uncorrectable double bit error", "0000:03:00"),
        ] {
            assert_eq!(held(&XidTable::default(), line).unwrap().2.unwrap(), gpu);
        }
    }

    #[test]
    fn the_operator_has_the_last_word() {
        let mut table = XidTable::default();
        table.set(79, Class::Ignore);
        table.set(13, Class::Fatal);
        assert_eq!(held(&table, "NVRM: Xid (PCI:0000:05:00): 79, x"), None);
        assert_eq!(held(&table, "NVRM: Xid (PCI:0000:05:00): 13, x").unwrap().1, Class::Fatal);
    }
}
