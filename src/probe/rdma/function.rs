//! PCI functions: where a device sits, and what became of one that has none any more.

use super::attributes::Attributes;
use crate::policy::rdma::merged::{Function, Seat};
use crate::policy::rdma::selector::parse_pci;

/// Where an RDMA device sits, by where the links lead; nothing is opened.
pub(super) fn of_device(sysfs: &mut Attributes, name: &str) -> Option<String> {
    let path = sysfs.link(&["class/infiniband", name]).or_else(|| sysfs.link(&["class/infiniband", name, "device"]))?;
    path.rsplit('/').find_map(parse_pci)
}

/// The function at `address`, at which none of `seats` is; `None` if it is gone itself.
pub(super) fn look(sysfs: &mut Attributes, address: &str, seats: &[Seat]) -> Option<Function> {
    if !sysfs.has(&["bus/pci/devices", address, "."]) {
        return None;
    }
    let bound = sysfs.links(&["bus/pci/devices", address, "driver"]);
    let mut bonded_with: Vec<String> = Vec::new();
    for netdev in sysfs.list(&["bus/pci/devices", address, "net"]) {
        let master = sysfs.link(&["bus/pci/devices", address, "net", &netdev, "master"]);
        let Some(bond) = master.as_deref().and_then(|path| path.rsplit('/').next()) else { continue };
        if !sysfs.has(&["class/net", bond, "bonding"]) {
            continue;
        }
        for entry in sysfs.list(&["class/net", bond]) {
            let member = entry.strip_prefix("lower_").and_then(|member| sysfs.link(&["class/net", member]));
            bonded_with.extend(member.as_deref().and_then(|path| path.rsplit('/').find_map(parse_pci)));
        }
    }
    bonded_with.retain(|other| other != address);
    // The class of verbs knows no network namespaces, that of devices does.
    let verbs = sysfs.list(&["bus/pci/devices", address, "infiniband_verbs"]);
    let mut names = verbs.iter().filter_map(|entry| {
        sysfs.text(&["bus/pci/devices", address, "infiniband_verbs", entry, "ibdev"]).known().cloned()
    });
    let unlisted = names.find(|name| !seats.iter().any(|seat| seat.name == *name));
    Some(Function { pci: address.to_owned(), bound, bonded_with, unlisted })
}
