//! Which network interface belongs to a port, and how it is.

use crate::policy::rdma::seen::{Attr, Netdev};
use crate::probe::rdma::attributes::Attributes;
use std::collections::BTreeSet;

/// Interfaces are no part of the kernel's table beyond this entry; the first are those of the port itself.
const NAMED_WITHIN: u32 = 4;

/// About two thousand interfaces.
const MAX_INTERFACES_BYTES: usize = 256 * 1024;

/// How often it is looked whether the routes are of the same namespace.
const NAMESPACE_LOOKS: u32 = 3;

/// The lowest bit of an interface's flags: its administrator wants it up.
const IFF_UP: u32 = 1;

/// The interface of a port, without looking at names: by the port's addresses, by the device's folder, or by what a device of
/// software says.
pub(super) fn of_port(tree: &mut Attributes, device: &str, port: u32) -> Option<Netdev> {
    let name = by_addresses(tree, device, port)
        .or_else(|| by_folder(tree, device, port))
        .or_else(|| tree.text(&["class/infiniband", device, "parent"]).known().cloned())?;
    Some(state(tree, name))
}

/// How the interface is.
pub(super) fn state(tree: &mut Attributes, name: String) -> Netdev {
    let parts = ["class/net", name.as_str()];
    // A listed link may lead nowhere in a container that has half of /sys.
    let visible = tree.has(&parts) || tree.links(&parts) || !tree.has(&["class/net"]);
    let flags = tree.text(&["class/net", &name, "flags"]);
    let admin_up = flags.and_then(|text| {
        let bits = u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()?;
        Some(bits & IFF_UP != 0)
    });
    let running = match tree.text(&["class/net", &name, "operstate"]) {
        Attr::Known(word) => match word.as_str() {
            // What cannot tell its carrier does not deny it.
            "up" | "unknown" => Attr::Known(true),
            "down" | "lowerlayerdown" | "notpresent" | "testing" | "dormant" => Attr::Known(false),
            _ => Attr::Unreadable,
        },
        Attr::Absent | Attr::Unreadable => admin_up,
    };
    Netdev { name, visible, admin_up, running }
}

fn by_addresses(tree: &mut Attributes, device: &str, port: u32) -> Option<String> {
    let port = port.to_string();
    (0..NAMED_WITHIN).find_map(|entry| {
        let parts = ["class/infiniband", device, "ports", &port, "gid_attrs/ndevs", &entry.to_string()];
        tree.text(&parts).known().cloned().filter(|name| is_name(name))
    })
}

/// Of a function with several interfaces it is the one of this port's number; a member of a bond gives way to the bond.
fn by_folder(tree: &mut Attributes, device: &str, port: u32) -> Option<String> {
    let mut names = tree.list(&["class/infiniband", device, "device/net"]);
    if names.len() > 1 {
        // Those of virtual functions and subfunctions lie there, too.
        names.retain(|name| {
            let of = tree.text(&["class/infiniband", device, "device/net", name, "phys_port_name"]);
            !of.known().is_some_and(|of| of.contains("vf") || of.contains("sf"))
        });
    }
    let number = |tree: &mut Attributes, name: &str, attribute: &str| {
        let text = tree.text(&["class/infiniband", device, "device/net", name, attribute]);
        let text = text.known()?;
        match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        }
    };
    let mut name = names.first().cloned()?;
    if names.len() > 1 || port > 1 {
        // Old drivers number by dev_id, new ones by dev_port; the other is zero everywhere.
        let by = ["dev_port", "dev_id"]
            .into_iter()
            .find(|attribute| names.iter().any(|name| number(tree, name, attribute).is_some_and(|number| number > 0)));
        name = match by {
            Some(attribute) => names.iter().find(|name| number(tree, name, attribute) == Some(port - 1)).cloned()?,
            None if port == 1 => name,
            None => return None,
        };
    }
    let master = tree.link(&["class/infiniband", device, "device/net", &name, "master"]);
    let master = master.as_deref().and_then(|path| path.rsplit('/').next());
    match master {
        Some(master) if tree.has(&["class/net", master, "bonding"]) => Some(master.to_owned()),
        Some(_) | None => Some(name),
    }
}

/// The indices of the interfaces, of those above them (a bond, a VLAN, a bridge) and of those below.
///
/// Not of what else lies below those above: a bridge has the interfaces of all pods.
pub(super) fn indices(tree: &mut Attributes, names: &BTreeSet<String>) -> BTreeSet<u32> {
    let mut found: BTreeSet<String> = BTreeSet::new();
    for direction in ["upper_", "lower_"] {
        let mut ahead: Vec<String> = names.iter().cloned().collect();
        let mut seen: BTreeSet<String> = BTreeSet::new();
        while let Some(name) = ahead.pop() {
            let entries = tree.list(&["class/net", &name]);
            ahead.extend(entries.iter().filter_map(|entry| entry.strip_prefix(direction)).map(str::to_owned));
            ahead.retain(|name| !seen.contains(name));
            seen.insert(name);
        }
        found.extend(seen);
    }
    let index = |name: &String| tree.text(&["class/net", name, "ifindex"]).known().and_then(|text| text.parse().ok());
    found.iter().filter_map(index).collect()
}

/// As the kernel allows them.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() < 16 && !text.contains(['/', ':']) && !text.contains(char::is_whitespace)
}

/// Interfaces that a default route goes through, and those that lie under them; none if the routes are another network
/// namespace's than the interfaces of `sysfs`, as a pod's own `/proc` beside the host's `/sys` has them.
pub(super) fn of_default_route(sysfs: &mut Attributes, proc: &mut Attributes) -> Vec<String> {
    let mut names = Vec::new();
    // Pods come and go while it is looked at.
    if !(0..NAMESPACE_LOOKS).any(|_| is_one_namespace(sysfs, proc)) {
        return names;
    }
    let mut table = |parts: [&[&str]; 2], default: fn(&str) -> Option<&str>| {
        let bytes = parts.into_iter().find_map(|parts| proc.bytes(parts)).unwrap_or_default();
        for line in String::from_utf8_lossy(&bytes).lines() {
            if let Some(name) = default(line)
                && is_name(name)
                && !names.iter().any(|known| known == name)
            {
                names.push(name.to_owned());
            }
        }
    };
    table([&["1/net/route"], &["net/route"]], default_v4);
    table([&["1/net/ipv6_route"], &["net/ipv6_route"]], default_v6);
    // A bridge, a bond or a VLAN; the list grows while it is walked.
    let mut at = 0;
    while let Some(name) = names.get(at).cloned() {
        for entry in sysfs.list(&["class/net", &name]) {
            if let Some(lower) = entry.strip_prefix("lower_")
                && !names.iter().any(|known| known == lower)
            {
                names.push(lower.to_owned());
            }
        }
        at += 1;
    }
    names
}

/// Whether each interface of `sysfs` is in the table that stands beside the routes. Names that are in both alone prove nothing: every
/// pod has an `eth0`.
fn is_one_namespace(sysfs: &mut Attributes, proc: &mut Attributes) -> bool {
    let mut table = || {
        let bytes =
            [["1/net/dev"], ["net/dev"]].iter().find_map(|parts| proc.bytes_within(parts, MAX_INTERFACES_BYTES))?;
        let whole = bytes.len() < MAX_INTERFACES_BYTES;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let names = text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
        whole.then(|| names.collect::<BTreeSet<String>>())
    };
    // What comes meanwhile is in the second, and what goes in the first.
    let before = table();
    let listed = sysfs.list(&["class/net"]);
    // A trace has no such table, and no pod has so many interfaces that it is cut.
    let (Some(before), Some(after)) = (before, table()) else { return true };
    // A plain file, such as `bonding_masters`, is no interface.
    listed.iter().all(|name| before.contains(name) || after.contains(name) || !sysfs.links(&["class/net", name]))
}

/// `eth0 00000000 0102A8C0 0003 0 0 100 00000000 …`: interface, destination, gateway, flags, …, mask.
fn default_v4(line: &str) -> Option<&str> {
    let mut columns = line.split_whitespace();
    let name = columns.next()?;
    let destination = columns.next()?;
    let mask = columns.nth(5)?;
    (destination == "00000000" && mask == "00000000").then_some(name)
}

/// Destination, its prefix's length, …, and the interface last.
fn default_v6(line: &str) -> Option<&str> {
    let mut columns = line.split_whitespace();
    let destination = columns.next()?;
    let length = columns.next()?;
    let name = columns.next_back()?;
    let any = destination.bytes().all(|byte| byte == b'0') && length == "00";
    // The kernel's own entry for what has no route.
    (any && name != "lo").then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_routes_are_told_from_others() {
        assert_eq!(default_v4("eth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0"), Some("eth0"));
        assert_eq!(default_v4("eth1\t0002A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0"), None);
        assert_eq!(default_v4("Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask"), None);
        let zero = "0".repeat(32);
        assert_eq!(default_v6(&format!("{zero} 00 {zero} 00 fe80 00000400 1 0 00450003     eth0")), Some("eth0"));
        assert_eq!(default_v6(&format!("{zero} 00 {zero} 00 {zero} ffffffff 1 0 00200200       lo")), None);
        assert_eq!(default_v6(&format!("{zero} 40 {zero} 00 {zero} 00000100 1 0 00000001     eth0")), None);
    }
}
