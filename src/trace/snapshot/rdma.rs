//! What an `rdma` probe reads.

use super::super::entry::{Entry, error_name};
use super::super::tree::Tree as Entries;
use super::{MAX_TEXT_BYTES, Place, Walk, join};
use crate::config::probes::RdmaSettings;
use crate::policy::rdma::rules::DeviceNode;
use crate::policy::rdma::selector::Selector;
use crate::probe::rdma::{DeviceStandIn, selected};
use rustix::fs::{FileType, OFlags, major, minor};
use std::collections::BTreeSet;

const CLASS: &str = "class/infiniband";

/// Addresses of one port; the first usable one decides, and it is among the first.
const MAX_GIDS: usize = 64;

/// Interfaces below those of the ports and of the default route.
const MAX_NETDEVS: usize = 256;

/// An empty place of the table of addresses.
const NO_GID: &str = "0000:0000:0000:0000:0000:0000:0000:0000";

pub(super) fn take(settings: &RdmaSettings, entries: &mut Entries) {
    let (rules, host) = (&settings.rules, &settings.host);
    let selected = selected(settings);
    let by_guid = rules.devices.iter().chain(&rules.exclude).any(|selector| matches!(selector, Selector::Guid(_)));
    let mut netdevs = BTreeSet::new();
    let mut uverbs = BTreeSet::new();
    if let Some(mut walk) = Walk::new(&host.sysfs, "sys", entries) {
        for name in walk.names("", CLASS) {
            let Some(device) = walk.folder("", &join(CLASS, &name)) else { continue };
            // Of what is not selected the probe reads no more.
            if by_guid {
                walk.value(&device, "node_guid");
            }
            if selected.contains(&name) {
                of_device(&mut walk, &device, &mut netdevs, &mut uverbs);
            } else {
                walk.link(&device, "device");
            }
        }
        of_verbs(&mut walk, &mut uverbs, settings);
    }
    of_routes(settings, entries, &mut netdevs);
    of_netdevs(settings, entries, netdevs);
    if let Some(mut walk) = Walk::new(&host.dev, "dev", entries) {
        for name in uverbs {
            device_file(&mut walk, &name, Open::Try);
        }
        if rules.device_nodes.contains(&DeviceNode::RdmaCm) {
            device_file(&mut walk, "rdma_cm", Open::Leave);
        }
    }
}

fn of_device(walk: &mut Walk<'_>, device: &Place, netdevs: &mut BTreeSet<String>, uverbs: &mut BTreeSet<String>) {
    walk.values(device, &["node_type", "node_guid"]);
    netdevs.extend(walk.value(device, "parent"));
    if let Some(pci) = walk.folder(device, "device") {
        walk.link(&pci, "physfn");
        uverbs.extend(walk.names(&pci, "infiniband_verbs"));
        for name in uverbs.clone() {
            walk.folder(&pci, &join("infiniband_verbs", &name));
        }
        for name in walk.names(&pci, "net") {
            let Some(netdev) = walk.folder(&pci, &join("net", &name)) else { continue };
            walk.values(&netdev, &["phys_port_name", "dev_port", "dev_id"]);
            netdevs.extend(walk.link(&netdev, "master").and_then(|path| path.rsplit('/').next().map(str::to_owned)));
            netdevs.insert(name);
        }
    }
    for port in walk.names(device, "ports") {
        let Some(port) = walk.folder(device, &join("ports", &port)) else { continue };
        walk.values(&port, &["state", "phys_state", "link_layer", "rate", "lid", "sm_lid"]);
        let mut numbers: Vec<usize> = walk.names(&port, "gids").iter().filter_map(|name| name.parse().ok()).collect();
        numbers.sort_unstable();
        walk.names(&port, "gid_attrs/types");
        for number in numbers.into_iter().take(MAX_GIDS) {
            let gid = format!("gids/{number}");
            // The empty rest of the table says nothing.
            let is_empty = |gid: &Option<String>| gid.as_deref() == Some(NO_GID);
            if number > 0 && is_empty(&peek(walk, &port, &gid)) {
                continue;
            }
            walk.value(&port, &gid);
            walk.value(&port, &format!("gid_attrs/types/{number}"));
            netdevs.extend(walk.value(&port, &format!("gid_attrs/ndevs/{number}")));
        }
    }
}

fn peek(walk: &Walk<'_>, port: &str, path: &str) -> Option<String> {
    let mut buffer = [0; crate::probe::tree::MAX_ATTRIBUTE_BYTES];
    walk.tree.read(&join(port, path), &mut buffer).ok().map(|text| text.trim().to_owned())
}

/// Those that the devices have in their folders; all, where a device has no such folder.
fn of_verbs(walk: &mut Walk<'_>, uverbs: &mut BTreeSet<String>, settings: &RdmaSettings) {
    if !settings.rules.device_nodes.contains(&DeviceNode::Uverbs) {
        return uverbs.clear();
    }
    let all = walk.names("", "class/infiniband_verbs");
    let only_own = !uverbs.is_empty();
    for name in all.into_iter().filter(|name| name.starts_with("uverbs")) {
        if only_own && !uverbs.contains(&name) {
            continue;
        }
        if let Some(entry) = walk.folder("", &format!("class/infiniband_verbs/{name}")) {
            walk.values(&entry, &["ibdev", "dev"]);
            uverbs.insert(name);
        }
    }
    if settings.rules.device_nodes.contains(&DeviceNode::RdmaCm) {
        walk.value("", "class/misc/rdma_cm/dev");
    }
}

/// Tables of routes, as far as the defaults go.
fn of_routes(settings: &RdmaSettings, entries: &mut Entries, netdevs: &mut BTreeSet<String>) {
    let Some(mut walk) = Walk::new(&settings.host.proc, "proc", entries) else { return };
    for paths in [["1/net/route", "net/route"], ["1/net/ipv6_route", "net/ipv6_route"]] {
        let Some(text) = paths.into_iter().find_map(|path| walk.plain_text(path, is_default_route)) else { continue };
        let names = text.lines().flat_map(|line| [line.split_whitespace().next(), line.split_whitespace().next_back()]);
        netdevs.extend(names.flatten().map(str::to_owned));
    }
}

/// In either table: an address and a mask of zeros.
fn is_default_route(line: &str) -> bool {
    let columns: Vec<&str> = line.split_whitespace().collect();
    let v4 = columns.get(1) == Some(&"00000000") && columns.get(7) == Some(&"00000000");
    let v6 = columns.first().is_some_and(|address| address.len() == 32 && address.bytes().all(|byte| byte == b'0'))
        && columns.get(1) == Some(&"00");
    v4 || v6
}

fn of_netdevs(settings: &RdmaSettings, entries: &mut Entries, netdevs: BTreeSet<String>) {
    let Some(mut walk) = Walk::new(&settings.host.sysfs, "sys", entries) else { return };
    let is_name = |name: &String| !name.is_empty() && name.len() < 16 && !name.contains('/') && !name.starts_with('.');
    let mut left: Vec<String> = netdevs.into_iter().filter(is_name).collect();
    walk.folder("", "class/net");
    let mut seen = BTreeSet::new();
    while let Some(name) = left.pop() {
        if seen.len() == MAX_NETDEVS || !seen.insert(name.clone()) {
            continue;
        }
        let Some(netdev) = walk.folder("", &join("class/net", &name)) else { continue };
        walk.values(&netdev, &["flags", "operstate"]);
        walk.folder(&netdev, "bonding");
        for entry in walk.tree.list(&netdev).unwrap_or_default() {
            if let Some(lower) = entry.strip_prefix("lower_") {
                walk.link(&netdev, &entry);
                left.push(lower.to_owned());
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Try,
    Leave,
}

fn device_file(walk: &mut Walk<'_>, name: &str, open: Open) {
    let path = join("infiniband", name);
    let Ok(stat) = walk.tree.stat(&path) else { return };
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return walk.note(&path, Entry::Folder);
    }
    let refused = match open {
        Open::Leave => None,
        Open::Try => walk.tree.lookup(&path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY).err().map(error_name),
    };
    let device = DeviceStandIn { major: major(stat.st_rdev), minor: minor(stat.st_rdev), refused };
    walk.note(&path, Entry::Device(device));
}

impl Walk<'_> {
    /// The lines of a table that `wanted` picks, noted.
    fn plain_text(&mut self, path: &str, wanted: fn(&str) -> bool) -> Option<String> {
        let mut bytes = vec![0; 64 * 1024];
        let length = self.tree.read_bytes(path, &mut bytes).ok()?;
        let mut text = String::new();
        for line in String::from_utf8_lossy(&bytes[..length]).lines().filter(|line| wanted(line)) {
            if text.len() + line.len() < MAX_TEXT_BYTES {
                text += line;
                text.push('\n');
            }
        }
        let place = self.reach("", path)?;
        self.note(&place, Entry::Value(text.clone().into_bytes()));
        Some(text)
    }
}
