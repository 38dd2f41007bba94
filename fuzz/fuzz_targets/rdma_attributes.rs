//! What drivers write into sysfs: no text panics, and none that says nothing makes a port a failure.
#![no_main]

use csi_warden::policy::outcome::Outcome;
use csi_warden::policy::rdma::gid::{GidEntry, GidFound, GidKind, GidSearch, parse_gid};
use csi_warden::policy::rdma::port::judge;
use csi_warden::policy::rdma::rules::{Rate, RdmaRules};
use csi_warden::policy::rdma::seen::{Attr, Coded, Device, LinkLayer, Port, Verbs};
use csi_warden::policy::rdma::selector::{Selector, parse_guid, parse_pci};
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(selector) = Selector::parse(text) {
        // A PCI address may be written without its domain, a GUID in capitals.
        let shown = selector.to_string();
        assert_eq!(Selector::parse(&shown), Ok(selector));
    }
    drop((parse_guid(text), parse_pci(text)));
    if let Some(rate) = Rate::parse(text) {
        assert_eq!(Rate::parse(&rate.gigabits()), Some(rate));
    }
    let mut lines = text.split('\n');
    let mut next = || Attr::Known(lines.next().unwrap_or_default());
    let (state, phys) = (next().and_then(Coded::parse), next().and_then(Coded::parse));
    let (link_layer, node_type) =
        (next().and_then(LinkLayer::parse), next().and_then(Coded::parse).and_then(|code| Some(code.number)));
    let mut search = GidSearch::new(&link_layer, &node_type, true);
    let entry =
        GidEntry { gid: next().and_then(parse_gid), kind: next().and_then(GidKind::parse), netdev: Attr::Unreadable };
    let gid = if search.take(&entry) { GidFound::Usable(0) } else { search.nothing_usable() };
    let says_nothing =
        state.known().is_none() || phys.known().is_none() && state.known().is_some_and(|state| state.number == 4);
    let rate = next().and_then(Rate::parse);
    let port =
        Port { number: 1, state, phys, link_layer, netdev: None, gid, rate, lid: Attr::Absent, sm_lid: Attr::Absent };
    let device = Device {
        name: "mlx5_0".into(),
        pci: None,
        guid: Attr::Unreadable,
        node_type,
        virtual_function: false,
        ports: Attr::Unreadable,
        verbs: Verbs::Usable,
    };
    let outcome = judge(&device, &port, &RdmaRules::default(), Duration::ZERO);
    assert!(!says_nothing || matches!(outcome, Outcome::Unknown(_)), "{outcome:?}");
    if let Some(reason) = outcome.reason() {
        assert!(!reason.message.contains(char::is_control));
    }
});
