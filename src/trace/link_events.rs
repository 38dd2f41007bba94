//! What the kernel would have told of a recorded change: a link, an address or an RDMA device, as `rdma` probes hear of it
//! (`probe/link_events.rs`).

use crate::probe::attribute::attribute;
use crate::probe::tree::Tree;
use std::path::Path;

/// Whether a change of `path`, in a tree that lies at `root`, comes with a notification.
///
/// The state and the addresses of a port follow its network interface, if that is what is below; those of native InfiniBand change
/// without a word.
pub(super) fn tells(root: &Path, path: &str) -> bool {
    let Some(path) = path.strip_prefix("sys/") else { return false };
    if let Some(device) = path.strip_prefix("class/infiniband/") {
        return !device.contains('/');
    }
    let names: Vec<&str> = path.split('/').collect();
    match names.iter().position(|name| matches!(*name, "net" | "ports")) {
        Some(at) if names[at] == "net" => names.len() > at + 1,
        Some(at) if names.len() > at + 2 => {
            // What cannot be read is a pipe there, which the tree does not wait for.
            let layer = || {
                attribute(&Tree::open(&root.join("sys")).ok()?, &format!("{}/link_layer", names[..at + 2].join("/")))
                    .ok()
            };
            let follows = matches!(names[at + 2], "state" | "phys_state" | "gids" | "gid_attrs");
            follows && layer().is_some_and(|layer| layer == "Ethernet")
        }
        Some(_) | None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn links_addresses_and_devices_are_told_of_and_native_infiniband_is_not() {
        let root = tempfile::tempdir().unwrap();
        for (device, layer) in [("roce", "Ethernet\n"), ("ib", "InfiniBand\n")] {
            let port = root.path().join("sys/devices/pci0/infiniband").join(device).join("ports/1");
            fs::create_dir_all(&port).unwrap();
            fs::write(port.join("link_layer"), layer).unwrap();
        }
        for (path, told) in [
            ("sys/class/net/eth0", true),
            ("sys/devices/pci0/net/eth0/operstate", true),
            ("sys/class/infiniband/roce", true),
            ("sys/devices/pci0/infiniband/roce/ports/1/state", true),
            ("sys/devices/pci0/infiniband/roce/ports/1/phys_state", true),
            ("sys/devices/pci0/infiniband/roce/ports/1/gids/3", true),
            ("sys/devices/pci0/infiniband/roce/ports/1/gid_attrs/ndevs/3", true),
            ("sys/devices/pci0/infiniband/roce/ports/1/rate", false),
            ("sys/devices/pci0/infiniband/ib/ports/1/state", false),
            ("sys/devices/pci0/infiniband/ib/ports/1/gids/0", false),
            ("sys/devices/pci0/infiniband/gone/ports/1/state", false),
            ("sys/class/infiniband_verbs/uverbs0", false),
            ("sys/devices/pci0/nvme/nvme0/state", false),
            ("dev/infiniband/uverbs0", false),
            ("health/net/eth0", false),
            ("proc/1/net/route", false),
        ] {
            assert_eq!(tells(root.path(), path), told, "{path}");
        }
    }
}
