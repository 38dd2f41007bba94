//! Ports that go somewhere else with everything well: into a bond and back, and into a pod's network namespace.

use super::fixture::Host;
use super::tests::Bed;
use crate::policy::rdma::rules::RdmaRules;
use crate::policy::rdma::selector::Selector;
use crate::probe::Probe;
use serde_json::json;

fn named(devices: &[&str]) -> RdmaRules {
    let devices = devices.iter().map(|text| Selector::parse(text).unwrap()).collect();
    RdmaRules { devices, ..RdmaRules::default() }
}

#[tokio::test]
async fn a_bond_is_formed_and_dissolved_without_a_failure() {
    // As the driver names it, and as udev does: by the function.
    for bond in ["mlx5_bond_0", "rocep3s0f0"] {
        let mut bed = Bed::all(Host::dual_port_card());
        assert_eq!(bed.says().await, "success");
        bed.host.form_lag(bond);
        for _ in 0..3 {
            assert_eq!(bed.says().await, "success", "{bond}: {:#?}", bed.probe.observed());
        }
        assert_eq!(bed.seen("mlx5_1/1", "reason"), json!("Merged"), "{bond}");
        assert_eq!(
            (bed.seen("mlx5_1/1", "wanted"), bed.seen(&format!("{bond}/1"), "wanted")),
            (json!("no"), json!("known-good"))
        );
        assert_eq!(bed.probe.merged, ["mlx5_1/1"], "told once");
        // The bond's port counts in their stead.
        bed.set(bond, "state", "1: DOWN\n");
        bed.set(bond, "phys_state", "2: Polling\n");
        assert_eq!(bed.says().await, "failure PortDown hard", "{bond}");
        bed.host.dissolve_lag(bond);
        for _ in 0..3 {
            assert_eq!(bed.says().await, "success", "{bond}: {:#?}", bed.probe.observed());
        }
        assert!(bed.probe.merged.is_empty());
        // And each is wanted by itself again.
        bed.host.remove_card_device(1, "mlx5_1");
        assert_eq!(bed.says().await, "failure DeviceGone soft", "{bond}");
    }
}

#[tokio::test]
async fn a_bond_that_was_known_first_is_dissolved_without_a_failure() {
    let host = Host::dual_port_card();
    host.form_lag("mlx5_bond_0");
    let mut bed = Bed::all(host);
    assert_eq!(bed.says().await, "success");
    bed.host.dissolve_lag("mlx5_bond_0");
    // A bond may have a GUID of its own.
    bed.host.write("sys/class/infiniband/mlx5_0/node_guid", "0c42:a103:001d:00ff\n");
    assert_eq!(bed.says().await, "success", "{:#?}", bed.probe.observed());
}

#[tokio::test]
async fn without_its_function_or_its_driver_a_port_is_gone_whatever_bonds_there_are() {
    for lost in ["sys/devices/pci0000:00/0000:03:00.1/driver", "sys/bus/pci/devices/0000:03:00.1"] {
        let mut bed = Bed::all(Host::dual_port_card());
        assert_eq!(bed.says().await, "success");
        bed.host.form_lag("mlx5_bond_0");
        bed.host.remove(lost);
        assert_eq!(bed.says().await, "failure DeviceGone soft", "{lost}");
    }
}

#[tokio::test]
async fn a_named_port_stays_wanted_and_is_said_to_be_merged() {
    let mut bed = Bed::new(Host::dual_port_card(), named(&["mlx5_1", "mlx5_*"]));
    assert_eq!(bed.says().await, "success");
    bed.host.form_lag("mlx5_bond_0");
    assert_eq!(bed.says().await, "failure DeviceGone soft");
    assert!(bed.seen("mlx5_1/1", "message").as_str().unwrap().contains("merged into mlx5_bond_0"));
}

#[tokio::test]
async fn a_bond_that_nobody_selects_leaves_its_ports_unknown() {
    let mut bed = Bed::new(Host::dual_port_card(), named(&["mlx5_?"]));
    assert_eq!(bed.says().await, "success");
    bed.host.form_lag("mlx5_bond_0");
    assert_eq!(bed.says().await, "unknown Merged");
    let mut any = Bed::new(Host::dual_port_card(), named(&["mlx5_?"]));
    any.host.form_lag("mlx5_bond_0");
    assert_eq!(any.says().await, "failure NoUsablePort hard", "what was never good is not unknown");
}

#[tokio::test]
async fn the_links_of_ports_are_watched_and_those_of_pods_on_the_same_bridge_are_not() {
    let host = Host::dual_port_card();
    host.form_lag("mlx5_bond_0");
    host.netdev("devices/virtual", "br0", true);
    host.netdev("devices/virtual", "veth1", true);
    host.link("../br0", "sys/devices/virtual/net/bond0/upper_br0");
    for lower in ["bond0", "veth1"] {
        host.link(&format!("../{lower}"), &format!("sys/devices/virtual/net/br0/lower_{lower}"));
    }
    for (index, name) in [(2, "ens3f0np0"), (3, "ens3f1np1"), (4, "bond0"), (5, "br0"), (6, "veth1")] {
        host.write(&format!("sys/class/net/{name}/ifindex"), &format!("{index}\n"));
    }
    let mut bed = Bed::all(host);
    assert_eq!(bed.says().await, "success");
    assert_eq!(bed.probe.events.watched(), Some(&[2, 3, 4, 5].into()));
}

#[tokio::test]
async fn a_device_in_another_network_namespace_is_not_visible_and_a_dead_one_is_gone() {
    let mut bed = Bed::all(Host::dual_port_card());
    assert_eq!(bed.says().await, "success");
    // The namespace hides the device; the class of verbs goes on showing its entry.
    bed.host.remove("sys/class/infiniband/mlx5_1");
    bed.host.remove("sys/devices/pci0000:00/0000:03:00.1/infiniband");
    assert_eq!(bed.says().await, "unknown NotVisible");
    bed.host.remove("sys/class/infiniband_verbs/uverbs1");
    bed.host.remove("sys/devices/pci0000:00/0000:03:00.1/infiniband_verbs");
    assert_eq!(bed.says().await, "failure DeviceGone soft");
}
