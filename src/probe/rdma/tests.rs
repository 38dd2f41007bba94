//! Trees of drivers that no virtual machine has, and trees that are broken.

use super::fixture::{Host, INFINIBAND, Link, roce};
use super::*;
use crate::config::probes::HostTree;
use crate::policy::outcome::{Reason, Severity};
use crate::policy::rdma::gid::parse_gid;
use crate::policy::rdma::rules::{DeviceNode, Rate, RdmaRules};
use crate::policy::rdma::seen::Coded;
use crate::policy::rdma::selector::Selector;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

const LONG: Duration = Duration::from_secs(30);

pub(super) struct Bed {
    pub(super) host: Host,
    pub(super) probe: Rdma,
    now: Instant,
}

fn selectors(words: &[&str]) -> Vec<Selector> {
    words.iter().map(|word| Selector::parse(word).unwrap()).collect()
}

fn probe_of(host: &Host, mut rules: RdmaRules) -> Rdma {
    if !host.has_device_files() {
        rules.device_nodes = Vec::new();
    }
    let tree = HostTree { sysfs: host.at("sys"), dev: host.at("dev"), proc: host.at("proc") };
    Rdma::new(&RdmaSettings { host: tree, rules }, KnownPorts::in_memory())
}

impl Bed {
    pub(super) fn new(host: Host, rules: RdmaRules) -> Self {
        let probe = probe_of(&host, rules);
        Self { host, probe, now: crate::policy::some_instant() }
    }

    pub(super) fn all(host: Host) -> Self {
        Self::new(host, RdmaRules::default())
    }

    pub(super) async fn outcome(&mut self) -> Outcome {
        let seen = self.probe.look(LONG).await.unwrap();
        self.now += Duration::from_secs(1);
        self.probe.judge(seen, self.now).unwrap()
    }

    /// `failure PortDown hard`
    pub(super) async fn says(&mut self) -> String {
        let outcome = self.outcome().await;
        let severity = match &outcome {
            Outcome::Failure(_, Severity::Hard) => " hard",
            Outcome::Failure(_, Severity::Soft) => " soft",
            Outcome::Success | Outcome::Warning(_) | Outcome::Unknown(_) => "",
        };
        let code = outcome.reason().map_or(String::new(), |reason| format!(" {}", reason.code));
        format!("{}{code}{severity}", outcome.name())
    }

    pub(super) fn seen(&self, port: &str, key: &str) -> Value {
        let observed = self.probe.observed().unwrap();
        observed.get(port).unwrap_or_else(|| panic!("{port}: {observed:?}")).get(key).cloned().unwrap_or(Value::Null)
    }

    pub(super) fn set(&self, device: &str, attribute: &str, text: &str) {
        self.host.write(&self.host.port(device, 1, attribute), text);
    }
}

#[tokio::test]
async fn a_device_without_a_thread_is_unknown_and_never_a_failure() {
    let mut bed = Bed::all(Host::rails(2));
    assert_eq!(bed.says().await, "success");
    bed.probe.devices.get_mut("mlx5_1").unwrap().lose_its_thread();
    for _ in 0..5 {
        assert_eq!(bed.says().await, "unknown NoThread");
        assert_eq!(bed.seen("mlx5_0/1", "outcome"), json!("success"));
    }
}

#[tokio::test]
async fn each_driver_s_tree_is_read_and_its_ports_have_their_interfaces() {
    let host = Host::new();
    // InfiniBand with IPoIB, and one without any interface, renamed by udev.
    let pci = host.pci_device("mlx5_0", 1, &[INFINIBAND]);
    host.netdev(&pci, "ib0", true);
    host.pci_device("ibp26s0", 2, &[INFINIBAND]);
    // A RoCE bond: members in the folder, the bond in the table.
    let pci = host.pci_device("mlx5_bond_0", 3, &[roce("bond0")]);
    for member in ["ens1f0", "ens1f1"] {
        host.netdev(&pci, member, true);
        host.link("../../../../virtual/net/bond0", &format!("sys/{pci}/net/{member}/master"));
    }
    host.netdev("devices/virtual", "bond0", true);
    // Two ports of one function, told apart by dev_port; a kernel without gid_attrs.
    let ports = [roce("x"), roce("x")];
    let pci = host.pci_device("mlx4_0", 4, &ports);
    for (number, name) in ["eth2", "eth3"].into_iter().enumerate() {
        host.netdev(&pci, name, true);
        host.write(&format!("sys/{pci}/net/{name}/dev_port"), &format!("{number}\n"));
        host.remove(&format!("sys/{pci}/infiniband/mlx4_0/ports/{}/gid_attrs", number + 1));
    }
    // iWARP without names, counters and RoCE.
    let pci = host.pci_device("irdma0", 5, &[roce("eth4")]);
    host.netdev(&pci, "eth4", true);
    host.write(&format!("sys/{pci}/infiniband/irdma0/node_type"), "4: RNIC\n");
    for file in ["board_id", "hca_type", "ports/1/counters", "ports/1/gid_attrs"] {
        host.remove(&format!("sys/{pci}/infiniband/irdma0/{file}"));
    }
    // EFA: neither InfiniBand nor Ethernet.
    let pci = host.pci_device("rdmap0s6", 6, &[Link { layer: "Unknown", ..INFINIBAND }]);
    host.write(&format!("sys/{pci}/infiniband/rdmap0s6/node_type"), "7: unspecified\n");
    // MANA answers EINVAL for its rate; a folder answers EISDIR.
    let pci = host.pci_device("mana_0", 7, &[roce("eth5")]);
    host.netdev(&pci, "eth5", true);
    host.remove(&format!("sys/{pci}/infiniband/mana_0/ports/1/rate"));
    fs::create_dir(host.at(&format!("sys/{pci}/infiniband/mana_0/ports/1/rate"))).unwrap();
    // Omni-Path.
    let pci = host.pci_device("hfi1_0", 8, &[INFINIBAND]);
    host.remove(&format!("sys/{pci}/infiniband/hfi1_0/hca_type"));
    host.write(&format!("sys/{pci}/infiniband/hfi1_0/ports/1/counters/port_rcv_data"), "N/A (no PMA)\n");
    // Soft-RoCE.
    host.netdev("devices/virtual", "eth0", true);
    host.soft_device("rxe0", 9, "eth0");

    let mut bed = Bed::new(host, RdmaRules { details: true, ..RdmaRules::default() });
    assert_eq!(bed.says().await, "success", "{:#?}", bed.probe.observed());
    assert_eq!(bed.says().await, "success", "known good now");
    for (port, netdev) in [
        ("mlx5_0/1", json!("ib0")),
        ("ibp26s0/1", Value::Null),
        ("mlx5_bond_0/1", json!("bond0")),
        ("mlx4_0/1", json!("eth2")),
        ("mlx4_0/2", json!("eth3")),
        ("irdma0/1", json!("eth4")),
        ("rdmap0s6/1", Value::Null),
        ("mana_0/1", json!("eth5")),
        ("hfi1_0/1", Value::Null),
        ("rxe0/1", json!("eth0")),
    ] {
        assert_eq!((bed.seen(port, "outcome"), bed.seen(port, "netdev")), (json!("success"), netdev), "{port}");
        assert_eq!(bed.seen(port, "wanted"), json!("known-good"), "{port}");
    }
    assert_eq!(bed.probe.observed().unwrap().len(), 10);
    assert_eq!((bed.seen("mlx5_0/1", "rate"), bed.seen("mana_0/1", "rate")), (json!("400 Gb/s"), Value::Null));
    assert_eq!((bed.seen("mlx5_0/1", "lid"), bed.seen("mlx5_0/1", "smLid")), (json!("0x2b"), json!("0x1")));
    assert_eq!(bed.seen("mlx5_0/1", "pci"), json!("0000:01:00.0"));
    assert_eq!((bed.seen("mlx5_bond_0/1", "gidIndex"), bed.seen("mlx5_0/1", "gidIndex")), (json!(1), json!(0)));
}

#[tokio::test]
async fn a_bond_is_preferred_to_its_member_where_there_is_no_table() {
    let host = Host::new();
    let pci = host.pci_device("mlx5_bond_0", 3, &[roce("x")]);
    host.remove(&format!("sys/{pci}/infiniband/mlx5_bond_0/ports/1/gid_attrs"));
    host.netdev(&pci, "ens1f0", true);
    host.link("../../../../virtual/net/bond0", &format!("sys/{pci}/net/ens1f0/master"));
    host.netdev("devices/virtual", "bond0", true);
    host.write("sys/devices/virtual/net/bond0/bonding/mode", "802.3ad 4\n");
    let mut bed = Bed::all(host);
    assert_eq!(bed.says().await, "success");
    assert_eq!(bed.seen("mlx5_bond_0/1", "netdev"), json!("bond0"));
}

#[tokio::test]
async fn states_are_judged_by_both_machines_and_their_numbers() {
    let mut bed = Bed::all(Host::rails(1));
    for (state, phys, said) in [
        ("4: ACTIVE\n", "5: LinkUp\n", "success"),
        ("2: INIT\n", "5: LinkUp\n", "warning NoSubnetManager"),
        ("3: ARMED\n", "5: LinkUp\n", "warning NoSubnetManager"),
        ("4: ACTIVE\n", "3: Disabled\n", "failure AdminDown hard"),
        ("1: DOWN\n", "2: Polling\n", "failure PortDown hard"),
        ("4: ACTIVE\n", "6: LinkErrorRecovery\n", "failure PortDown hard"),
        ("5: ACTIVE_DEFER\n", "5: LinkUp\n", "failure PortDown hard"),
        ("4: ACTIVE\n", "0: <unknown>\n", "failure PortDown hard"),
        ("4: ACTIVE", "5: LinkUp   \n", "success"),
        ("  4: active  ", "5:LinkUp", "success"),
        ("Active\n", "5: LinkUp\n", "unknown PortUnreadable"),
    ] {
        bed.set("mlx5_0", "state", state);
        bed.set("mlx5_0", "phys_state", phys);
        assert_eq!(bed.says().await, said, "{state:?} {phys:?}");
    }
}

#[tokio::test]
async fn an_active_port_with_an_empty_table_of_addresses_fails() {
    let mut bed = Bed::all(Host::rails(1));
    assert_eq!(bed.says().await, "success");
    let zero = "0000:0000:0000:0000:0000:0000:0000:0000\n";
    bed.set("mlx5_0", "gids/0", zero);
    assert_eq!(bed.says().await, "failure NoUsableGid hard");

    let host = Host::new();
    let pci = host.pci_device("mlx5_0", 1, &[roce("eth2")]);
    host.netdev(&pci, "eth2", true);
    let mut bed = Bed::all(host);
    assert_eq!(bed.says().await, "success");
    bed.set("mlx5_0", "gids/0", zero);
    assert_eq!(bed.says().await, "success", "index 0 may be empty on Ethernet");
    for entry in 1..4 {
        bed.set("mlx5_0", &format!("gids/{entry}"), zero);
    }
    assert_eq!(bed.says().await, "failure NoUsableGid hard");
    // Far down a long table, behind a gap.
    bed.set("mlx5_0", "gids/200", "0000:0000:0000:0000:0000:ffff:0a09:0001\n");
    bed.set("mlx5_0", "gid_attrs/types/200", "RoCE v2\n");
    bed.set("mlx5_0", "gid_attrs/ndevs/200", "eth2\n");
    assert_eq!(bed.says().await, "success");
    assert_eq!(bed.seen("mlx5_0/1", "gidIndex"), json!(200));
}

/// As its table may have a thousand entries, and this is the round that should be quick.
#[tokio::test]
async fn the_addresses_of_a_port_that_is_not_active_are_not_read() {
    use inotify::{Inotify, WatchMask};
    let host = Host::new();
    let pci = host.pci_device("mlx5_0", 1, &[roce("eth2")]);
    host.netdev(&pci, "eth2", true);
    let gids = host.at(&host.port("mlx5_0", 1, "gids"));
    let mut bed = Bed::all(host);
    let mut inotify = Inotify::init().unwrap();
    inotify.watches().add(gids, WatchMask::OPEN).unwrap();
    let mut opened = || inotify.read_events(&mut [0; 65536]).is_ok_and(|events| events.count() > 0);
    assert_eq!(bed.says().await, "success");
    assert!(opened(), "the watch works");
    for (state, phys, said) in
        [("1: DOWN", "2: Polling", "failure PortDown hard"), ("2: INIT", "5: LinkUp", "warning NoSubnetManager")]
    {
        bed.set("mlx5_0", "state", state);
        bed.set("mlx5_0", "phys_state", phys);
        assert_eq!(bed.says().await, said);
        assert!(!opened(), "{state}");
    }
}

#[tokio::test]
async fn an_interface_that_is_down_or_elsewhere_is_told_apart() {
    let host = Host::new();
    let pci = host.pci_device("mlx5_0", 1, &[roce("eth2")]);
    host.netdev(&pci, "eth2", true);
    let mut bed = Bed::all(host);
    assert_eq!(bed.says().await, "success");
    bed.host.netdev(&pci, "eth2", false);
    assert_eq!(bed.says().await, "failure AdminDown hard");
    bed.host.remove("sys/class/net/eth2");
    bed.host.remove(&format!("sys/{pci}/net/eth2"));
    assert_eq!(bed.says().await, "unknown NotVisible");
}

#[tokio::test]
async fn what_user_space_needs_is_looked_for() {
    let mut bed = Bed::all(Host::rails(2));
    if !bed.host.has_device_files() {
        // Not in this container.
        return;
    }
    assert_eq!(bed.says().await, "success");
    let uverbs = "dev/infiniband/uverbs1";
    let at = bed.host.at(uverbs);
    bed.host.remove(uverbs);
    let outcome = bed.outcome().await;
    let Outcome::Failure(reason, Severity::Soft) = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason.code, "VerbsMissing");
    assert!(reason.message.contains(&at.display().to_string()), "{reason}");
    fs::write(&at, "").unwrap();
    assert_eq!(bed.says().await, "failure VerbsMissing soft", "a plain file is no device");
    bed.host.remove(uverbs);
    bed.host.character_device("uverbs1");
    assert_eq!(bed.says().await, "success");
    bed.host.write("sys/class/infiniband_verbs/uverbs1/dev", "231:192\n");
    let message = bed.outcome().await.reason().unwrap().message.clone();
    assert!(message.contains("is device 1:3, not 231:192"), "{message}");
    bed.host.write("sys/class/infiniband_verbs/uverbs1/dev", "1:3\n");
    // Root opens it all the same; anybody else is told, and nobody condemned.
    fs::set_permissions(&at, fs::Permissions::from_mode(0o0)).unwrap();
    assert_eq!(bed.says().await, "success");
    bed.host.remove("dev/infiniband/rdma_cm");
    assert_eq!(bed.says().await, "failure VerbsMissing soft");
    // issm and umad are nobody's business; a file system within the kernel needs no device file.
    bed.host.remove("dev/infiniband");
    let mut kernel = Bed::new(Host::rails(1), RdmaRules { device_nodes: vec![], ..RdmaRules::default() });
    kernel.host.remove("dev");
    kernel.host.remove("sys/class/infiniband_verbs");
    assert_eq!(kernel.says().await, "success");
    let rules = RdmaRules { device_nodes: vec![DeviceNode::Uverbs], ..RdmaRules::default() };
    let mut unloaded = Bed::new(Host::rails(1), rules);
    unloaded.host.remove("sys/class/infiniband_verbs");
    unloaded.host.remove("sys/devices/pci0000:00/0000:01:00.0/infiniband_verbs");
    let outcome = unloaded.outcome().await;
    assert!(outcome.reason().unwrap().message.contains("ib_uverbs is not loaded"), "{outcome:?}");
}

#[tokio::test]
async fn half_of_sys_is_told_and_none_of_it_is_one_failure() {
    let mut bed = Bed::all(Host::rails(1));
    bed.host.remove("sys/devices");
    let outcome = bed.outcome().await;
    let Outcome::Unknown(reason) = outcome else { panic!("{outcome:?}") };
    assert!(reason.message.contains("/sys/devices"), "{reason}");
    let mut none = Bed::all(Host::new());
    assert_eq!(none.says().await, "failure NoUsablePort hard");
    none.host.remove("sys/class/infiniband");
    assert_eq!(none.says().await, "failure NoUsablePort hard");
    none.host.remove("sys");
    assert_eq!(none.says().await, "unknown NotVisible");
}

#[tokio::test]
async fn a_virtual_function_is_seen_as_one() {
    let host = Host::rails(1);
    let pci = host.pci_device("mlx5_2", 9, &[Link { state: "1: DOWN", phys: "3: Disabled", ..roce("eth9") }]);
    host.link("../0000:01:00.0", &format!("sys/{pci}/physfn"));
    host.link("../0000:09:00.0", "sys/devices/pci0000:00/0000:01:00.0/virtfn0");
    let mut bed = Bed::all(host);
    assert_eq!(bed.says().await, "success");
    assert_eq!(
        (bed.seen("mlx5_2/1", "reason"), bed.seen("mlx5_2/1", "virtualFunction")),
        (json!("NotRequired"), json!(true))
    );
}

#[tokio::test]
async fn a_pods_own_routes_do_not_exempt_the_hosts_port_of_that_name() {
    const HEAD: &str = "Inter-|   Receive  |  Transmit\n face |bytes packets |bytes packets\n";
    for (interfaces, failed) in [("eth0 eth1 lo", false), ("lo eth0", true)] {
        let host = Host::new();
        let pci = host.pci_device("mlx5_0", 1, &[roce("eth0")]);
        host.netdev(&pci, "eth0", true);
        let pci = host.pci_device("mlx5_1", 2, &[roce("eth1")]);
        host.netdev(&pci, "eth1", true);
        let rows: String = interfaces.split(' ').map(|name| format!("{name:>6}: 0 0 0 0\n")).collect();
        host.write("proc/1/net/dev", &format!("{HEAD}{rows}"));
        host.write(
            "proc/1/net/route",
            "Iface\tDestination\neth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n",
        );
        let mut bed = Bed::all(host);
        assert_eq!(bed.says().await, "success");
        bed.set("mlx5_0", "state", "1: DOWN\n");
        bed.set("mlx5_0", "phys_state", "2: Polling\n");
        assert_eq!(bed.says().await == "failure PortDown hard", failed, "{interfaces}");
    }
}

#[tokio::test]
async fn the_default_route_is_found_through_what_lies_above_the_interface() {
    let host = Host::new();
    for (number, name) in [(1, "eth1"), (2, "eth2")] {
        let pci = host.pci_device(&format!("mlx5_{number}"), number, &[roce(name)]);
        host.netdev(&pci, name, true);
    }
    host.netdev("devices/virtual", "br0", true);
    host.link("../eth2", "sys/devices/virtual/net/br0/lower_eth2");
    host.write("proc/1/net/route", "Iface\tDestination\nbr0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n");
    let mut bed = Bed::all(host);
    assert_eq!((bed.says().await, bed.says().await), ("success".into(), "success".into()));
    assert_eq!((bed.seen("mlx5_1/1", "wanted"), bed.seen("mlx5_2/1", "wanted")), (json!("known-good"), json!("no")));
    bed.set("mlx5_2", "state", "1: DOWN\n");
    assert_eq!(bed.says().await, "success");
    bed.set("mlx5_1", "state", "1: DOWN\n");
    assert_eq!(bed.says().await, "failure PortDown hard");
}

#[tokio::test]
async fn selectors_choose_and_a_named_one_must_be_there() {
    let rules = |devices: &[&str], exclude: &[&str]| RdmaRules {
        devices: selectors(devices),
        exclude: selectors(exclude),
        ..RdmaRules::default()
    };
    for (devices, exclude, ports) in [
        (vec!["mlx5_0"], vec![], vec!["mlx5_0/1"]),
        (vec!["mlx5_*"], vec!["mlx5_0", "0000:03:00.0"], vec!["mlx5_1/1"]),
        (vec!["0c42:a103:001d:0002", "0000:03:00.0"], vec![], vec!["mlx5_1/1", "mlx5_2/1"]),
        (vec![], vec!["0c42:a103:001d:0002"], vec!["mlx5_0/1", "mlx5_2/1"]),
    ] {
        let mut bed = Bed::new(Host::rails(3), rules(&devices, &exclude));
        assert_eq!(bed.says().await, "success", "{devices:?} {exclude:?}");
        let seen: Vec<String> = bed.probe.observed().unwrap().keys().cloned().collect();
        assert_eq!(seen, ports, "{devices:?} {exclude:?}");
    }
    let mut missing = Bed::new(Host::rails(2), rules(&["mlx5_0", "mlx5_7"], &[]));
    assert_eq!(missing.says().await, "failure DeviceGone soft");
    let mut none = Bed::new(Host::rails(2), rules(&["mlx4_*"], &[]));
    assert_eq!(none.says().await, "failure NoUsablePort hard");
}

/// inotify sees every open.
#[tokio::test]
async fn nothing_of_an_excluded_device_is_opened() {
    use inotify::{Inotify, WatchMask};
    let watched = |host: &Host, number: u8, name: &str| {
        let mut inotify = Inotify::init().unwrap();
        let pci = host.at(&format!("sys/devices/pci0000:00/0000:{number:02x}:00.0"));
        let mut folders = vec![pci];
        while let Some(folder) = folders.pop() {
            inotify.watches().add(&folder, WatchMask::OPEN).unwrap();
            let entries = fs::read_dir(&folder).unwrap().map(Result::unwrap);
            folders.extend(entries.filter(|entry| entry.file_type().unwrap().is_dir()).map(|entry| entry.path()));
        }
        if host.has_device_files() {
            inotify.watches().add(host.at(&format!("dev/infiniband/{name}")), WatchMask::OPEN).unwrap();
        }
        // Our own walk has made some already.
        let mut buffer = [0; 65536];
        while inotify.read_events(&mut buffer).is_ok_and(|events| events.count() > 0) {}
        inotify
    };
    let opens = |inotify: &mut Inotify| {
        let mut buffer = [0; 65536];
        inotify.read_events(&mut buffer).map_or(0, |events| events.count())
    };
    for exclude in ["mlx5_1", "mlx5_[1]", "*_1", "0000:02:00.0"] {
        let Ok(selector) = Selector::parse(exclude) else { continue };
        let host = Host::rails(2);
        let (mut included, mut excluded) = (watched(&host, 1, "uverbs1"), watched(&host, 2, "uverbs2"));
        let mut bed = Bed::new(host, RdmaRules { exclude: vec![selector], details: true, ..RdmaRules::default() });
        assert_eq!(bed.says().await, "success");
        assert_eq!(bed.says().await, "success");
        assert!(opens(&mut included) > 0, "the watch works");
        assert_eq!(opens(&mut excluded), 0, "{exclude}");
    }
}

#[tokio::test]
async fn files_that_cannot_be_read_cost_one_thing_unknown_and_no_time() {
    let mut bed = Bed::all(Host::rails(2));
    assert_eq!(bed.says().await, "success");
    for attribute in ["state", "phys_state", "link_layer", "rate", "gids/0", "gid_attrs/types/0"] {
        let path = bed.host.port("mlx5_1", 1, attribute);
        let good = fs::read_to_string(bed.host.at(&path)).unwrap();
        let decides = matches!(attribute, "state" | "phys_state");
        let expected = if decides { "unknown PortUnreadable" } else { "success" };
        bed.host.fifo(&path);
        assert_eq!(bed.says().await, expected, "{attribute} is a pipe");
        bed.host.remove(&path);
        fs::create_dir(bed.host.at(&path)).unwrap();
        assert_eq!(bed.says().await, expected, "{attribute} is a folder");
        bed.host.remove(&path);
        let outside = bed.host.at("outside");
        fs::write(&outside, "1: DOWN\n").unwrap();
        bed.host.link(outside.to_str().unwrap(), &path);
        let absent = if attribute == "gids/0" { "failure NoUsableGid hard" } else { expected };
        assert_eq!(bed.says().await, absent, "{attribute} leads out of the tree");
        bed.host.remove(&path);
        bed.host.write(&path, &good);
    }
    for attribute in ["node_guid", "node_type", "fw_ver"] {
        let path = format!("sys/class/infiniband/mlx5_1/{attribute}");
        let good = fs::read_to_string(bed.host.at(&path)).unwrap();
        bed.host.fifo(&path);
        assert_eq!(bed.says().await, "success", "{attribute}");
        bed.host.remove(&path);
        bed.host.write(&path, &good);
    }
    assert_eq!(bed.says().await, "success");
}

#[tokio::test]
async fn an_address_whose_kind_is_no_text_is_unknown_and_not_missing() {
    let host = Host::new();
    let pci = host.pci_device("mlx5_0", 1, &[roce("eth2")]);
    host.netdev(&pci, "eth2", true);
    let mut bed = Bed::all(host);
    assert_eq!(bed.says().await, "success");
    for entry in fs::read_dir(bed.host.at(&bed.host.port("mlx5_0", 1, "gid_attrs/types"))).unwrap() {
        fs::write(entry.unwrap().path(), [0xff, 0xfe]).unwrap();
    }
    assert_eq!(bed.says().await, "success", "what cannot be read is not held against it");
}

/// What hides a file from a reader between two of its steps is a matter of luck; that nothing false comes of it is not.
#[test]
fn a_device_that_goes_and_comes_while_it_is_read_is_not_half_a_device() {
    const TIMES: usize = 150;
    let host = Host::new();
    let pci = host.pci_device("mlx5_0", 1, &[roce("eth2")]);
    host.netdev(&pci, "eth2", true);
    let folder = host.at(&format!("sys/{pci}/infiniband/mlx5_0"));
    let mut all = Vec::new();
    files(&folder, &mut all);
    // Each a folder of its own, as the kernel would make it.
    let (fresh, gone) = (host.at("fresh"), host.at("gone"));
    fs::create_dir(&gone).unwrap();
    for number in 0..TIMES {
        for file in &all {
            let copy = fresh.join(number.to_string()).join(file.strip_prefix(&folder).unwrap());
            fs::create_dir_all(copy.parent().unwrap()).unwrap();
            fs::copy(file, copy).unwrap();
        }
    }
    let tree = HostTree { sysfs: host.at("sys"), dev: host.at("dev"), proc: host.at("proc") };
    let rules = RdmaRules { device_nodes: Vec::new(), ..RdmaRules::default() };
    let listed = Listed { name: "mlx5_0".into(), pci: None };
    let swaps = std::thread::spawn(move || {
        for number in 0..TIMES {
            fs::rename(&folder, gone.join(number.to_string())).unwrap();
            fs::rename(fresh.join(number.to_string()), &folder).unwrap();
        }
    });
    while !swaps.is_finished() {
        let Answer::Device(device) = device::read(&tree, DeviceFiles::Real, &rules, &listed) else { continue };
        for port in device.ports.known().into_iter().flatten() {
            let outcome = crate::policy::rdma::port::judge(&device, port, &rules, Duration::ZERO);
            assert_eq!(outcome, Outcome::Success);
        }
    }
    swaps.join().unwrap();
}

#[tokio::test]
async fn a_root_without_any_class_is_no_sys_and_condemns_nothing() {
    let host = Host::rails(1);
    let mut bed = Bed::new(host, RdmaRules { devices: selectors(&["mlx5_0"]), ..RdmaRules::default() });
    assert_eq!(bed.says().await, "success");
    fs::rename(bed.host.at("sys/class"), bed.host.at("sys/elsewhere")).unwrap();
    assert_eq!(bed.says().await, "unknown NotVisible");
    fs::create_dir(bed.host.at("sys/class")).unwrap();
    assert_eq!(bed.says().await, "unknown DriverReload", "no driver is another thing");
}

#[tokio::test]
async fn a_device_that_hangs_costs_its_own_word_only() {
    let mut bed = Bed::all(Host::rails(2));
    assert_eq!(bed.says().await, "success");
    let release = bed.probe.devices.get_mut("mlx5_1").unwrap().hang().await;
    bed.set("mlx5_0", "state", "1: DOWN\n");
    let began = tokio::time::Instant::now();
    assert_eq!(bed.says().await, "failure PortDown hard");
    assert!(began.elapsed() < LONG / 2, "nobody waits for it again");
    assert_eq!(bed.seen("mlx5_1/1", "reason"), json!("NotAnswering"));
    bed.set("mlx5_0", "state", "4: ACTIVE\n");
    assert_eq!(bed.says().await, "unknown NotAnswering");
    bed.probe.devices.get_mut("mlx5_1").unwrap().be_silent(3);
    assert_eq!(bed.says().await, "failure NotAnswering soft");
    drop(release);
    while bed.probe.devices["mlx5_1"].is_busy() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(bed.says().await, "success");
}

#[tokio::test]
async fn good_ports_are_kept_over_boots() {
    let state = tempfile::tempdir().unwrap();
    let load = || KnownPorts::load(state.path(), "x.example.com").unwrap();
    let mut bed = Bed::all(Host::rails(2));
    bed.probe.known = load();
    for _ in 0..100 {
        assert_eq!(bed.says().await, "success");
        if load().lock().iter().count() == 2 {
            break;
        }
    }
    let mut next = Bed::all(Host::rails(2));
    next.probe.known = load();
    next.set("mlx5_1", "state", "1: DOWN\n");
    assert_eq!(next.says().await, "failure PortDown hard", "in its first round");
    next.host.remove("sys/class/infiniband/mlx5_1");
    assert_eq!(next.says().await, "failure DeviceGone soft");
}

#[tokio::test]
async fn a_slow_port_is_a_warning() {
    let mut bed = Bed::new(Host::rails(1), RdmaRules { min_rate: Rate::parse("400"), ..RdmaRules::default() });
    assert_eq!(bed.says().await, "success");
    bed.set("mlx5_0", "rate", "100 Gb/sec (1X NDR)\n");
    assert_eq!(bed.says().await, "warning Degraded");
    bed.set("mlx5_0", "rate", "N/A\n");
    assert_eq!(bed.says().await, "success");
}

/// Every file of the device, of its interface, and of the classes.
fn files(folder: &Path, all: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            files(&entry.path(), all);
        } else if kind.is_file() {
            all.push(entry.path());
        }
    }
}

/// A healthy device of each kind, made once.
static HOSTS: LazyLock<[Mutex<Host>; 2]> = LazyLock::new(|| {
    [INFINIBAND, roce("eth2")].map(|link| {
        let host = Host::new();
        let pci = host.pci_device("mlx5_0", 1, &[link]);
        host.netdev(&pci, "eth2", true);
        Mutex::new(host)
    })
});

/// What the probe says of a good port when one of its files has other content: `None`, or the failure.
fn said_of(host: &Host, path: &Path, bytes: &[u8]) -> Option<Reason> {
    let good = fs::read(path).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let outcome = runtime.block_on(async {
        let rules = RdmaRules { details: true, min_rate: Rate::parse("1"), ..RdmaRules::default() };
        let mut probe = probe_of(host, rules);
        let now = crate::policy::some_instant();
        let seen = probe.look(LONG).await.unwrap();
        assert_eq!(probe.judge(seen, now), Some(Outcome::Success));
        fs::write(path, bytes).unwrap();
        let seen = probe.look(LONG).await.unwrap();
        probe.judge(seen, now).unwrap()
    });
    fs::write(path, good).unwrap();
    if let Outcome::Failure(reason, _) = outcome { Some(reason) } else { None }
}

proptest! {
    #[test]
    fn no_content_of_any_file_hangs_panics_or_makes_a_failure_that_it_does_not_say(
        choice in any::<proptest::sample::Index>(),
        bytes in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..600),
            "[ -~\n]{0,40}".prop_map(String::into_bytes),
            "[0-9]{0,12}:? ?[A-Za-z]{0,8}\n?".prop_map(String::into_bytes),
        ],
        kind in 0_usize..2,
    ) {
        let host = HOSTS[kind].lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = Vec::new();
        files(&host.at("sys"), &mut all);
        all.sort();
        let path = choice.get(&all);
        let Some(reason) = said_of(&host, path, &bytes) else { return Ok(()) };
        // It may fail if the file really says so.
        let text = std::str::from_utf8(&bytes[..bytes.len().min(256)]);
        prop_assert!(text.is_ok(), "{}: {bytes:?}: {reason}", path.display());
        let text = text.unwrap_or_default().trim();
        let name = path.file_name().unwrap().to_str().unwrap();
        let said = match (path.parent().unwrap().file_name().unwrap().to_str().unwrap(), name) {
            (_, "state" | "phys_state") => Coded::parse(text).is_some(),
            ("gids", _) => parse_gid(text).is_some(),
            // Another link layer has other addresses.
            (_, "link_layer") => matches!(text, "InfiniBand" | "Ethernet"),
            ("types" | "ndevs", _) | (_, "flags" | "operstate" | "ibdev" | "dev") => true,
            _ => false,
        };
        prop_assert!(said, "{}: {bytes:?}: {reason}", path.display());
    }
}
