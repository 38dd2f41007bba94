//! Rounds one after the other, with a made-up clock.

use super::*;
use crate::policy::group::Require;
use crate::policy::rdma::known::Place;
use crate::policy::rdma::port::tests::{device, port};
use crate::policy::rdma::seen::{LinkLayer, Netdev, Verbs};
use crate::policy::round::Silence;
use crate::policy::some_instant;
use std::num::NonZeroU32;

const SECOND: Duration = Duration::from_secs(1);

fn rules(devices: &[&str]) -> RdmaRules {
    let devices = devices.iter().map(|text| Selector::parse(text).unwrap()).collect();
    RdmaRules { devices, ..RdmaRules::default() }
}

fn up(name: &str, guid: u64) -> Answer {
    Answer::Device(device(name, guid, vec![port("4: ACTIVE", "5: LinkUp")]))
}

fn down(name: &str, guid: u64) -> Answer {
    Answer::Device(device(name, guid, vec![port("1: DOWN", "2: Polling")]))
}

fn silent(name: &str, guid: u64, rounds: u32) -> Answer {
    Answer::Silent { name: name.into(), pci: Some(format!("0000:{guid:02x}:00.0")), silence: Silence::TimeOuts(rounds) }
}

fn round(answers: Vec<Answer>) -> Round {
    Round { listing: Listing::Devices(answers.len()), answers, ..no_class() }
}

fn no_class() -> Round {
    Round {
        listing: Listing::NoClass,
        answers: Vec::new(),
        default_route: Vec::new(),
        functions: Vec::new(),
        seats: Vec::new(),
    }
}

struct Bed {
    fabric: Fabric,
    known: KnownGood,
    now: Instant,
}

impl Bed {
    fn new(rules: RdmaRules) -> Self {
        Self { fabric: Fabric::new(rules), known: KnownGood::default(), now: some_instant() }
    }

    fn judge(&mut self, round: &Round) -> Judgement {
        self.now += SECOND;
        self.fabric.judge(round, &mut self.known, self.now)
    }

    /// `failure PortDown hard`
    fn says(&mut self, round: &Round) -> String {
        let outcome = self.judge(round).outcome;
        let severity = match &outcome {
            Outcome::Failure(_, Severity::Hard) => " hard",
            Outcome::Failure(_, Severity::Soft) => " soft",
            Outcome::Success | Outcome::Warning(_) | Outcome::Unknown(_) => "",
        };
        let code = outcome.reason().map_or(String::new(), |reason| format!(" {}", reason.code));
        format!("{}{code}{severity}", outcome.name())
    }
}

#[test]
fn a_port_that_was_never_good_and_is_not_named_gives_no_verdict() {
    let mut bed = Bed::new(rules(&["mlx5_*"]));
    let both = round(vec![up("mlx5_0", 1), down("mlx5_1", 2)]);
    for _ in 0..5 {
        assert_eq!(bed.says(&both), "success");
    }
    let word = &bed.judge(&both).words[1];
    assert_eq!((word.wanted, word.outcome.name()), (Wanted::No, "failure"));
    // Once seen good it is wanted.
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)])), "success");
    assert_eq!(bed.says(&both), "failure PortDown hard");
}

#[test]
fn a_named_port_is_wanted_from_the_start() {
    for named in ["mlx5_1", "0000:0000:0000:0002", "0000:02:00.0"] {
        let mut bed = Bed::new(rules(&["mlx5_0", named]));
        assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), down("mlx5_1", 2)])), "failure PortDown hard", "{named}");
    }
}

#[test]
fn a_node_that_boots_with_its_only_port_dead_has_no_usable_port_and_recovers() {
    let mut bed = Bed::new(RdmaRules::default());
    assert_eq!(bed.says(&round(vec![down("mlx5_0", 1)])), "failure NoUsablePort hard");
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "success");
    assert_eq!(bed.says(&round(vec![down("mlx5_0", 1)])), "failure PortDown hard");
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "success");
}

#[test]
fn no_device_at_all_is_one_clear_failure() {
    let mut bed = Bed::new(RdmaRules::default());
    assert_eq!(bed.says(&no_class()), "failure NoUsablePort hard");
    assert_eq!(bed.says(&round(vec![])), "failure NoUsablePort hard");
    let mut named = Bed::new(rules(&["mlx5_0"]));
    assert_eq!(named.says(&no_class()), "failure DeviceGone soft");
}

#[test]
fn a_missing_subnet_manager_is_a_failure_after_a_minute_and_an_unread_state_does_not_start_it_again() {
    let mut bed = Bed::new(rules(&["mlx5_0"]));
    let init = round(vec![Answer::Device(device("mlx5_0", 1, vec![port("2: INIT", "5: LinkUp")]))]);
    let unread = round(vec![Answer::Device(device("mlx5_0", 1, vec![port("?", "5: LinkUp")]))]);
    assert_eq!(bed.says(&init), "warning NoSubnetManager");
    bed.now += 30 * SECOND;
    assert_eq!(bed.says(&unread), "unknown PortUnreadable");
    bed.now += 27 * SECOND;
    assert_eq!(bed.says(&init), "warning NoSubnetManager");
    assert_eq!(bed.says(&init), "failure NoSubnetManager hard");
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "success");
    assert_eq!(bed.says(&init), "warning NoSubnetManager", "and its time begins anew");
}

#[test]
fn a_port_that_waits_for_its_subnet_manager_is_not_known_good() {
    let mut bed = Bed::new(RdmaRules::default());
    bed.judge(&round(vec![Answer::Device(device("mlx5_0", 1, vec![port("2: INIT", "5: LinkUp")]))]));
    assert!(!bed.known.has(1, 1));
}

#[test]
fn one_known_good_device_gone_is_a_soft_failure_and_one_never_good_is_nothing() {
    let mut bed = Bed::new(rules(&["mlx5_*"]));
    bed.judge(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2), down("mlx5_2", 3)]));
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)])), "success");
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "failure DeviceGone soft");
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)])), "success");
}

#[test]
fn a_device_that_comes_back_under_another_name_is_the_same() {
    let mut bed = Bed::new(RdmaRules::default());
    bed.judge(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)]));
    assert_eq!(bed.says(&round(vec![up("ibp1s0", 1), up("ibp2s0", 2)])), "success");
    assert_eq!(bed.says(&round(vec![up("ibp1s0", 1), down("ibp2s0", 2)])), "failure PortDown hard");
}

#[test]
fn known_good_is_kept_over_boots_and_a_dead_port_is_then_seen_at_once() {
    let mut bed = Bed::new(RdmaRules::default());
    bed.known.insert(2, 1, Place { name: "mlx5_1".into(), pci: Some("0000:02:00.0".into()) });
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), down("mlx5_1", 2)])), "failure PortDown hard");
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "failure DeviceGone soft");
    let replaced = Answer::Device(Device { pci: Some("0000:02:00.0".into()), ..device("mlx5_1", 9, vec![]) });
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), replaced])), "success", "another card sits there now");
}

#[test]
fn what_is_excluded_is_not_missed() {
    let mut excluding = rules(&["mlx5_*"]);
    excluding.exclude = vec![Selector::parse("mlx5_1").unwrap()];
    let mut bed = Bed::new(excluding);
    bed.known.insert(2, 1, Place { name: "mlx5_1".into(), pci: None });
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "success");
}

#[test]
fn all_devices_gone_at_once_is_a_reload_for_five_minutes() {
    for gone in [no_class(), round(vec![])] {
        let mut bed = Bed::new(rules(&["mlx5_0"]));
        bed.judge(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)]));
        assert_eq!(bed.says(&gone), "unknown DriverReload");
        bed.now += 298 * SECOND;
        assert_eq!(bed.says(&gone), "unknown DriverReload");
        assert_eq!(bed.says(&gone), "failure DriverReload soft");
        assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)])), "success");
        assert_eq!(bed.says(&gone), "unknown DriverReload", "the next one has its own time");
    }
}

#[test]
fn devices_that_come_back_one_by_one_are_not_missed_until_the_reload_is_over() {
    let mut bed = Bed::new(RdmaRules::default());
    bed.judge(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)]));
    bed.judge(&no_class());
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "unknown DriverReload");
    assert_eq!(bed.says(&round(vec![down("mlx5_0", 1)])), "failure PortDown hard", "what is there is judged");
    bed.now += 300 * SECOND;
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "failure DeviceGone soft");
    bed.judge(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)]));
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "failure DeviceGone soft", "no reload any more");
}

#[test]
fn a_reload_at_boot_is_known_by_what_was_good_before() {
    let mut bed = Bed::new(RdmaRules::default());
    bed.known.insert(1, 1, Place { name: "mlx5_0".into(), pci: None });
    assert_eq!(bed.says(&no_class()), "unknown DriverReload");
}

#[test]
fn a_silent_device_costs_its_own_word_only_and_the_third_silence_is_a_failure() {
    let mut bed = Bed::new(RdmaRules::default());
    bed.judge(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)]));
    for (rounds, said) in [(1, "unknown NotAnswering"), (2, "unknown NotAnswering"), (3, "failure NotAnswering soft")] {
        assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), silent("mlx5_1", 2, rounds)])), said);
        assert_eq!(
            bed.says(&round(vec![down("mlx5_0", 1), silent("mlx5_1", 2, rounds)])),
            "failure PortDown hard",
            "the other is judged"
        );
    }
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)])), "success");
}

#[test]
fn a_silent_device_that_was_never_seen_may_be_the_one_that_is_missed() {
    let mut bed = Bed::new(RdmaRules::default());
    bed.known.insert(2, 1, Place { name: "mlx5_1".into(), pci: None });
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), silent("ibp2s0", 2, 1)])), "unknown PortUnreadable");
    let mut named = Bed::new(rules(&["0000:0000:0000:0002"]));
    assert_eq!(named.says(&round(vec![up("mlx5_0", 1), silent("mlx5_1", 2, 1)])), "unknown PortUnreadable");
}

#[test]
fn an_unread_guid_is_not_another_device() {
    let mut bed = Bed::new(RdmaRules::default());
    bed.judge(&round(vec![up("mlx5_0", 1), up("mlx5_1", 2)]));
    let unread = |answer: Answer| match answer {
        Answer::Device(device) => Answer::Device(Device { guid: Attr::Unreadable, ..device }),
        other @ (Answer::Dangling { .. } | Answer::Silent { .. }) => other,
    };
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), unread(up("mlx5_1", 2))])), "success");
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), unread(down("mlx5_1", 2))])), "failure PortDown hard");
}

#[test]
fn links_without_what_they_point_to_are_told_and_no_failure() {
    let dangling = Answer::Dangling { name: "mlx5_0".into(), pci: None };
    let mut bed = Bed::new(rules(&["mlx5_0"]));
    let judgement = bed.judge(&round(vec![dangling]));
    let Outcome::Unknown(reason) = judgement.outcome else { panic!("{judgement:?}") };
    assert_eq!(reason.code, "NotVisible");
    assert!(reason.message.contains("/sys/devices"), "{reason}");
}

#[test]
fn an_unassigned_virtual_function_is_not_required_unless_it_is_named() {
    let function = |answer: Answer| match answer {
        Answer::Device(device) => Answer::Device(Device { virtual_function: true, ..device }),
        other @ (Answer::Dangling { .. } | Answer::Silent { .. }) => other,
    };
    let both = round(vec![up("mlx5_0", 1), function(down("mlx5_2", 3))]);
    let mut bed = Bed::new(rules(&["mlx5_*"]));
    assert_eq!(bed.says(&both), "success");
    // Assigned and given back: still nobody's.
    assert_eq!(bed.says(&round(vec![up("mlx5_0", 1), function(up("mlx5_2", 3))])), "success");
    assert_eq!(bed.says(&both), "success");
    assert_eq!(Bed::new(rules(&["mlx5_0", "mlx5_2"])).says(&both), "failure PortDown hard");
    // It stands in for no physical port, but for itself where there is nothing else.
    assert_eq!(bed.says(&round(vec![down("mlx5_0", 1), function(up("mlx5_2", 3))])), "failure PortDown hard");
    let mut fresh = Bed::new(RdmaRules::default());
    assert_eq!(fresh.says(&round(vec![down("mlx5_0", 1), function(up("mlx5_2", 3))])), "failure NoUsablePort hard");
    assert_eq!(Bed::new(RdmaRules::default()).says(&round(vec![function(up("mlx5_2", 3))])), "success");
}

#[test]
fn the_interface_of_the_default_route_is_not_condemned_unless_named() {
    let ethernet = |name: &str, guid, state: &str, admin_up| {
        let netdev = Netdev {
            name: format!("eth{guid}"),
            visible: true,
            admin_up: Attr::Known(admin_up),
            running: Attr::Known(admin_up),
        };
        let port =
            Port { link_layer: Attr::Known(LinkLayer::Ethernet), netdev: Some(netdev), ..port(state, "5: LinkUp") };
        Answer::Device(device(name, guid, vec![port]))
    };
    let good = || vec![ethernet("mlx5_0", 0xa, "4: ACTIVE", true), ethernet("mlx5_1", 0xb, "4: ACTIVE", true)];
    let bad = || vec![ethernet("mlx5_0", 0xa, "4: ACTIVE", true), ethernet("mlx5_1", 0xb, "1: DOWN", false)];
    let mut bed = Bed::new(rules(&["mlx5_*"]));
    let routed = Round { default_route: vec!["eth11".into()], ..round(good()) };
    assert_eq!(bed.says(&routed), "success");
    // The route goes with the interface.
    assert_eq!(bed.says(&round(bad())), "success");
    let mut named = Bed::new(rules(&["mlx5_0", "mlx5_1"]));
    named.judge(&routed);
    assert_eq!(named.says(&round(bad())), "failure AdminDown hard");
    // A node whose only port carries everything cannot work without it.
    let mut only = Bed::new(RdmaRules::default());
    only.judge(&Round { default_route: vec!["eth11".into()], ..round(good().split_off(1)) });
    assert_eq!(only.says(&round(bad().split_off(1))), "failure NoUsablePort hard");
}

#[test]
fn chosen_ports_are_judged_and_a_named_one_must_exist() {
    let mut second = port("1: DOWN", "2: Polling");
    second.number = 2;
    let dual = round(vec![Answer::Device(device("mlx4_0", 1, vec![port("4: ACTIVE", "5: LinkUp"), second]))]);
    let chosen = |ports: &[u32]| RdmaRules { ports: ports.into(), ..rules(&["mlx4_0"]) };
    assert_eq!(Bed::new(chosen(&[1])).says(&dual), "success");
    assert_eq!(Bed::new(chosen(&[])).says(&dual), "failure PortDown hard", "a named device's ports are all named");
    assert_eq!(Bed::new(rules(&["mlx4_*"])).says(&dual), "success");
    assert_eq!(Bed::new(chosen(&[1, 3])).says(&dual), "failure DeviceGone soft");
}

#[test]
fn of_rails_any_or_a_number_may_be_enough() {
    let rails = |good: usize| {
        round(
            (0..4)
                .map(|at| {
                    if at < good {
                        up(&format!("mlx5_{at}"), at as u64 + 1)
                    } else {
                        down(&format!("mlx5_{at}"), at as u64 + 1)
                    }
                })
                .collect(),
        )
    };
    let three = Require::AtLeast(NonZeroU32::new(3).unwrap());
    for (require, good, said) in [
        (three, 4, "success"),
        (three, 3, "warning Degraded"),
        (three, 2, "failure PortDown hard"),
        (Require::Any, 1, "warning Degraded"),
        (Require::Any, 0, "failure PortDown hard"),
        (Require::All, 3, "failure PortDown hard"),
    ] {
        let mut bed = Bed::new(RdmaRules { require, ..rules(&["mlx5_*"]) });
        bed.judge(&rails(4));
        assert_eq!(bed.says(&rails(good)), said, "{require:?} {good}");
    }
    let mut fresh = Bed::new(RdmaRules { require: three, ..rules(&["mlx5_*"]) });
    assert_eq!(fresh.says(&rails(2)), "failure NoUsablePort hard", "a number is wanted from the start");
}

#[test]
fn ten_flaps_give_ten_verdicts() {
    let mut bed = Bed::new(RdmaRules::default());
    for _ in 0..10 {
        assert_eq!(bed.says(&round(vec![up("mlx5_0", 1)])), "success");
        assert_eq!(bed.says(&round(vec![down("mlx5_0", 1)])), "failure PortDown hard");
    }
}

#[test]
fn a_list_that_cannot_be_read_is_unknown() {
    let mut bed = Bed::new(rules(&["mlx5_0"]));
    bed.judge(&round(vec![up("mlx5_0", 1)]));
    let unreadable = Round { listing: Listing::Unreadable("EIO".into()), ..no_class() };
    assert_eq!(bed.says(&unreadable), "unknown NotVisible");
}

#[test]
fn missing_verbs_of_one_device_do_not_touch_the_other() {
    let lost = Answer::Device(Device {
        verbs: Verbs::Missing("no uverbs1".into()),
        ..device("mlx5_1", 2, vec![port("4: ACTIVE", "5: LinkUp")])
    });
    let mut bed = Bed::new(rules(&["mlx5_0", "mlx5_1"]));
    let judgement = bed.judge(&round(vec![up("mlx5_0", 1), lost]));
    assert_eq!(judgement.words.iter().map(|word| word.outcome.name()).collect::<Vec<_>>(), ["success", "failure"]);
    assert_eq!(judgement.outcome.reason().unwrap().code, "VerbsMissing");
}
