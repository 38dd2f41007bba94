//! What drives, the kernel log and nvidia-smi give us to read. Nothing panics, and what says nothing condemns nobody.
#![no_main]

use csi_warden::policy::kernel_log::{KernelLogPolicy, Message};
use csi_warden::policy::kernel_log_rules::built_in;
use csi_warden::policy::line_pattern::LinePattern;
use csi_warden::policy::nvme::State;
use csi_warden::policy::nvme_selector::Selector;
use csi_warden::policy::outcome::Outcome;
use csi_warden::policy::smart::{SmartLimits, SmartLog, SmartPolicy};
use csi_warden::policy::smi::Answer;
use csi_warden::policy::xid::XidTable;
use csi_warden::probe::kmsg::record::records;
use libfuzzer_sys::fuzz_target;
use std::time::{Duration, Instant};

fuzz_target!(|input: &[u8]| {
    let now = Instant::now();
    if let Ok(log) = SmartLog::parse(input) {
        let outcome = SmartPolicy::default().judge(&log, &SmartLimits::default(), now);
        let says_so = log.critical_warning & 0b1100 != 0 || log.spare < log.spare_threshold;
        assert!(says_so || !matches!(outcome, Outcome::Failure(..)), "{log:?}: {outcome:?}");
    }
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut rules = built_in();
    rules.extend(XidTable::default().rules(None));
    let mut policy = KernelLogPolicy::new(rules);
    for record in records(text) {
        let (concerns, before) = (policy.concerns(record.text), policy.held(now).len());
        policy.read(Message { age: Duration::ZERO, history: false, text: record.text }, now);
        assert!(concerns || policy.held(now).len() == before);
    }
    assert!(policy.held(now).iter().all(|held| !held.text.contains(char::is_control)));
    let (pattern, line) = text.split_once('\n').unwrap_or((text, ""));
    if let Ok(pattern) = LinePattern::new(pattern) {
        std::hint::black_box(pattern.find(line));
    }
    let answer = Answer::parse(text, text, Some(0));
    assert!(answer.rows.is_empty() || answer.nothing_works().is_none() && !answer.no_devices());
    if let Ok(selector) = Selector::parse(text) {
        assert_eq!(Selector::parse(&selector.to_string()), Ok(selector));
    }
    drop(State::parse(text));
});
