//! One device, read whole on its own lane: whatever hangs in here hangs alone.

use super::attributes::Attributes;
use super::list::Listed;
use super::netdev;
use super::verbs::{self, DeviceFiles};
use crate::config::probes::HostTree;
use crate::policy::rdma::gid::{EntryNetdev, GidEntry, GidFound, GidKind, GidSearch, parse_gid};
use crate::policy::rdma::port::STATE_ACTIVE;
use crate::policy::rdma::rules::{Rate, RdmaRules};
use crate::policy::rdma::seen::{Answer, Attr, Coded, Device, LinkLayer, Netdev, Port, Verbs, printable};
use crate::policy::rdma::selector::parse_guid;
use crate::probe::tree::Tree;

/// No table is longer.
const MAX_GIDS: u32 = 1024;

/// Reads the device. Blocks as long as its driver does.
pub(super) fn read(host: &HostTree, files: DeviceFiles, rules: &RdmaRules, listed: &Listed) -> Answer {
    let Ok(tree) = Tree::open(&host.sysfs) else { return dangling(listed) };
    let mut sysfs = Attributes::new(tree);
    let name = listed.name.as_str();
    let folder = ["class/infiniband", name, "."];
    let Some(inode) = sysfs.inode(&folder) else { return dangling(listed) };
    let node_type =
        sysfs.parsed(&["class/infiniband", name, "node_type"], Coded::parse).and_then(|code| Some(code.number));
    let guid = sysfs.parsed(&["class/infiniband", name, "node_guid"], parse_guid);
    let virtual_function = sysfs.links(&["class/infiniband", name, "device/physfn"]);
    let ports = ports(&mut sysfs, rules, name, &node_type);
    let verbs = match &ports {
        // Nothing can use it anyhow, and nobody is asked to say so twice.
        Attr::Known(ports) if ports.is_empty() => Verbs::Usable,
        Attr::Known(_) | Attr::Absent | Attr::Unreadable => {
            // What has neither InfiniBand nor Ethernet below has no connection manager.
            let connects = ports
                .known()
                .is_none_or(|ports| ports.iter().any(|port| port.link_layer.known() != Some(&LinkLayer::Other)));
            verbs::look(&mut sysfs, (&host.dev, files), rules, name, connects)
        }
    };
    // Of a device that went away meanwhile one half was read, and the other half would be missed.
    let ports = if sysfs.inode(&folder) == Some(inode) { ports } else { Attr::Unreadable };
    Answer::Device(Device {
        name: name.to_owned(),
        pci: listed.pci.clone(),
        guid,
        node_type,
        virtual_function,
        ports,
        verbs,
    })
}

fn dangling(listed: &Listed) -> Answer {
    Answer::Dangling { name: listed.name.clone(), pci: listed.pci.clone() }
}

fn ports(sysfs: &mut Attributes, rules: &RdmaRules, device: &str, node_type: &Attr<u32>) -> Attr<Vec<Port>> {
    let Ok(names) = sysfs.listed(&["class/infiniband", device, "ports"]) else { return Attr::Unreadable };
    let mut numbers: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).filter(|port| *port > 0).collect();
    numbers.sort_unstable();
    let chosen = |port: &u32| rules.ports.is_empty() || rules.ports.contains(port);
    Attr::Known(
        numbers.into_iter().filter(chosen).map(|number| port(sysfs, rules, device, node_type, number)).collect(),
    )
}

fn port(sysfs: &mut Attributes, rules: &RdmaRules, device: &str, node_type: &Attr<u32>, number: u32) -> Port {
    let text = number.to_string();
    let of = |attribute| ["class/infiniband", device, "ports", text.as_str(), attribute];
    let state = sysfs.parsed(&of("state"), Coded::parse);
    let phys = sysfs.parsed(&of("phys_state"), Coded::parse);
    let link_layer = sysfs.parsed(&of("link_layer"), LinkLayer::parse);
    let netdev = netdev::of_port(sysfs, device, number);
    // A port that is down has the same verdict without; and as no address is usable then, the search would go through a table
    // of up to a thousand entries, in the very rounds that should be quick.
    let active = !matches!(&state, Attr::Known(state) if state.number != STATE_ACTIVE);
    let gid =
        if active { gid(sysfs, device, &text, &link_layer, node_type, netdev.as_ref()) } else { GidFound::NotAsked };
    let wants_rate = rules.details || rules.min_rate.is_some();
    let rate = if wants_rate { sysfs.parsed(&of("rate"), Rate::parse) } else { Attr::Absent };
    let mut detail = |attribute| {
        if rules.details { sysfs.parsed(&of(attribute), |text| Some(printable(text))) } else { Attr::Absent }
    };
    let (lid, sm_lid) = (detail("lid"), detail("sm_lid"));
    Port { number, state, phys, link_layer, netdev, gid, rate, lid, sm_lid }
}

fn gid(
    sysfs: &mut Attributes,
    device: &str,
    port: &str,
    link_layer: &Attr<LinkLayer>,
    node_type: &Attr<u32>,
    own: Option<&Netdev>,
) -> GidFound {
    let folder = ["class/infiniband", device, "ports", port];
    let under = |rest: &'static str| [folder[0], folder[1], folder[2], folder[3], rest];
    let has_kinds = sysfs.has(&under("gid_attrs/types"));
    let mut search = GidSearch::new(link_layer, node_type, has_kinds);
    let most = search.entries(MAX_GIDS);
    let entry = |sysfs: &mut Attributes, search: &mut GidSearch, index: u32| {
        let index = index.to_string();
        let of = |rest: &'static str| [folder[0], folder[1], folder[2], folder[3], rest, index.as_str()];
        let kind = if search.needs_kinds() { sysfs.slot(&of("gid_attrs/types"), GidKind::parse) } else { Attr::Absent };
        let wanted = !search.needs_kinds() || kind != Attr::Known(GidKind::Other) && kind != Attr::Absent;
        let gid = if wanted { sysfs.parsed(&of("gids"), parse_gid) } else { Attr::Absent };
        let netdev = if wanted && search.needs_kinds() {
            sysfs.slot(&of("gid_attrs/ndevs"), |name| Some(name.to_owned()))
        } else {
            Attr::Absent
        };
        let netdev = netdev.and_then(|name| {
            let netdev = match own {
                Some(own) if own.name == name => own.clone(),
                Some(_) | None => netdev::state(sysfs, name),
            };
            let up = if netdev.admin_up == Attr::Known(false) { netdev.admin_up } else { netdev.running };
            Some(EntryNetdev { name: netdev.name, visible: netdev.visible, up })
        });
        search.take(&GidEntry { gid, kind, netdev })
    };
    // One after the other as long as they last: a list of hundreds is only made when none is usable.
    let mut index = 0;
    while index < most {
        if entry(sysfs, &mut search, index) {
            return GidFound::Usable(index);
        }
        let next = index.to_string();
        if !sysfs.has(&[folder[0], folder[1], folder[2], folder[3], "gids", &next]) {
            break;
        }
        index += 1;
    }
    if most > 1 {
        let listed = sysfs.list(&under("gids"));
        let mut left: Vec<u32> = listed.iter().filter_map(|name| name.parse().ok()).collect();
        left.retain(|left| *left > index && *left < most);
        left.sort_unstable();
        for index in left {
            if entry(sysfs, &mut search, index) {
                return GidFound::Usable(index);
            }
        }
    }
    search.nothing_usable()
}
