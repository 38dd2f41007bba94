//! Trees as drivers make them, for what no virtual machine has. Shapes from the kernel's sources and ABI documents.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

/// A host's `/sys`, `/dev` and `/proc` in a temporary folder.
pub(super) struct Host {
    folder: tempfile::TempDir,
}

/// One port.
#[derive(Clone, Copy)]
pub(super) struct Link {
    pub(super) layer: &'static str,
    pub(super) state: &'static str,
    pub(super) phys: &'static str,
    pub(super) rate: &'static str,
    /// The interface in the table of addresses.
    pub(super) netdev: Option<&'static str>,
}

/// An InfiniBand port as it should be.
pub(super) const INFINIBAND: Link =
    Link { layer: "InfiniBand", state: "4: ACTIVE", phys: "5: LinkUp", rate: "400 Gb/sec (4X NDR)", netdev: None };

/// An Ethernet port as it should be.
pub(super) const fn roce(netdev: &'static str) -> Link {
    Link { layer: "Ethernet", rate: "100 Gb/sec (4X EDR)", netdev: Some(netdev), ..INFINIBAND }
}

/// The interfaces of a dual-port card.
const CARD_NETDEVS: [&str; 2] = ["ens3f0np0", "ens3f1np1"];

/// The numbers of `/dev/null`: the kernel opens it for us.
const NULL: (u32, u32) = (1, 3);

impl Host {
    pub(super) fn new() -> Self {
        let host = Self { folder: tempfile::tempdir().unwrap() };
        for folder in ["sys/class/infiniband", "sys/class/infiniband_verbs", "sys/class/net", "dev/infiniband", "proc"]
        {
            fs::create_dir_all(host.at(folder)).unwrap();
        }
        host.write("sys/class/net/bonding_masters", "bond0\n");
        host.character_device("rdma_cm");
        host.write("sys/class/misc/rdma_cm/dev", "1:3\n");
        host
    }

    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(super) fn remove(&self, path: &str) {
        let path = self.at(path);
        if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    pub(super) fn link(&self, target: &str, path: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    /// A pipe that nobody writes: a read that waited would wait for ever.
    pub(super) fn fifo(&self, path: &str) {
        let path = self.at(path);
        drop(fs::remove_file(&path));
        rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::from(0o600)).unwrap();
    }

    /// Whether device files can be made here at all; tests of what needs them skip otherwise.
    pub(super) fn has_device_files(&self) -> bool {
        fs::File::open(self.at("dev/infiniband/rdma_cm")).is_ok()
    }

    pub(super) fn character_device(&self, name: &str) {
        let number = rustix::fs::makedev(NULL.0, NULL.1);
        let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::from(0o666));
        let made = rustix::fs::mknodat(rustix::fs::CWD, self.at(&format!("dev/infiniband/{name}")), kind, mode, number);
        // Not allowed in every container: `has_device_files` tells.
        assert!(made.is_ok() || made == Err(rustix::io::Errno::PERM), "{made:?}");
    }

    /// An interface in its own folder, and in the class.
    pub(super) fn netdev(&self, folder: &str, name: &str, up: bool) {
        let of = format!("sys/{folder}/net/{name}");
        let (flags, state, carrier) = if up { ("0x1003", "up", "1") } else { ("0x1002", "down", "0") };
        for (file, text) in
            [("flags", flags), ("operstate", state), ("carrier", carrier), ("dev_port", "0"), ("dev_id", "0x0")]
        {
            self.write(&format!("{of}/{file}"), &format!("{text}\n"));
        }
        drop(fs::remove_file(self.at(&format!("sys/class/net/{name}"))));
        self.link(&format!("../../{folder}/net/{name}"), &format!("sys/class/net/{name}"));
    }

    /// A device on PCI, with its entry for verbs, and a link in each class. Gives the PCI folder, from `sys/` on.
    pub(super) fn pci_device(&self, name: &str, number: u8, links: &[Link]) -> String {
        let pci = format!("devices/pci0000:00/0000:{number:02x}:00.0");
        let of = format!("{pci}/infiniband/{name}");
        self.link(&format!("../../../0000:{number:02x}:00.0"), &format!("sys/{of}/device"));
        self.device(&of, name, number, links);
        let verbs = format!("uverbs{number}");
        self.write(&format!("sys/{pci}/infiniband_verbs/{verbs}/ibdev"), &format!("{name}\n"));
        self.write(&format!("sys/{pci}/infiniband_verbs/{verbs}/dev"), "1:3\n");
        self.link(&format!("../../{pci}/infiniband_verbs/{verbs}"), &format!("sys/class/infiniband_verbs/{verbs}"));
        self.character_device(&verbs);
        pci
    }

    /// A dual-port card at `0000:03:00`, as its driver makes it: a function, a driver, an interface and an RDMA device each.
    pub(super) fn dual_port_card() -> Self {
        let host = Self::new();
        for function in 0..2_u8 {
            let pci = format!("devices/pci0000:00/0000:03:00.{function}");
            let netdev = CARD_NETDEVS[usize::from(function)];
            host.netdev(&pci, netdev, true);
            host.link("../../../bus/pci/drivers/mlx5_core", &format!("sys/{pci}/driver"));
            host.link(&format!("../../../{pci}"), &format!("sys/bus/pci/devices/0000:03:00.{function}"));
            host.card_device(function, &format!("mlx5_{function}"), netdev);
        }
        host
    }

    /// The RDMA device of one function of that card; those of one function have one GUID.
    pub(super) fn card_device(&self, function: u8, name: &str, netdev: &'static str) {
        let pci = format!("devices/pci0000:00/0000:03:00.{function}");
        let of = format!("{pci}/infiniband/{name}");
        self.link(&format!("../../../0000:03:00.{function}"), &format!("sys/{of}/device"));
        self.device(&of, name, function + 1, &[roce(netdev)]);
        let verbs = format!("uverbs{function}");
        self.write(&format!("sys/{pci}/infiniband_verbs/{verbs}/ibdev"), &format!("{name}\n"));
        self.write(&format!("sys/{pci}/infiniband_verbs/{verbs}/dev"), "1:3\n");
        self.link(&format!("../../{pci}/infiniband_verbs/{verbs}"), &format!("sys/class/infiniband_verbs/{verbs}"));
        self.character_device(&verbs);
    }

    /// The function keeps its driver and its interface, and loses its RDMA device.
    pub(super) fn remove_card_device(&self, function: u8, name: &str) {
        let pci = format!("sys/devices/pci0000:00/0000:03:00.{function}");
        self.remove(&format!("{pci}/infiniband"));
        self.remove(&format!("{pci}/infiniband_verbs"));
        self.remove(&format!("sys/class/infiniband/{name}"));
        self.remove(&format!("sys/class/infiniband_verbs/uverbs{function}"));
        drop(fs::remove_file(self.at(&format!("dev/infiniband/uverbs{function}"))));
    }

    /// Both interfaces of the card become members of `bond0`, and the driver makes one RDMA device of two, named `name`.
    pub(super) fn form_lag(&self, name: &str) {
        self.netdev("devices/virtual", "bond0", true);
        self.write("sys/devices/virtual/net/bond0/bonding/mode", "802.3ad 4\n");
        for function in 0..2_u8 {
            let netdev = CARD_NETDEVS[usize::from(function)];
            let pci = format!("devices/pci0000:00/0000:03:00.{function}");
            self.link("../../../../virtual/net/bond0", &format!("sys/{pci}/net/{netdev}/master"));
            self.link(
                &format!("../../../{pci}/net/{netdev}"),
                &format!("sys/devices/virtual/net/bond0/lower_{netdev}"),
            );
            self.remove_card_device(function, &format!("mlx5_{function}"));
        }
        self.card_device(0, name, "bond0");
    }

    /// The way back.
    pub(super) fn dissolve_lag(&self, name: &str) {
        self.remove_card_device(0, name);
        for function in 0..2_u8 {
            let netdev = CARD_NETDEVS[usize::from(function)];
            self.remove(&format!("sys/devices/pci0000:00/0000:03:00.{function}/net/{netdev}/master"));
            self.card_device(function, &format!("mlx5_{function}"), netdev);
        }
        self.remove("sys/class/net/bond0");
        self.remove("sys/devices/virtual/net/bond0");
    }

    /// Soft-RoCE: no PCI, no `device`, a parent in words.
    pub(super) fn soft_device(&self, name: &str, number: u8, parent: &'static str) {
        let of = format!("devices/virtual/infiniband/{name}");
        self.device(&of, name, number, &[roce(parent)]);
        self.write(&format!("sys/{of}/parent"), &format!("{parent}\n"));
        let verbs = format!("uverbs{number}");
        self.write(&format!("sys/class/infiniband_verbs/{verbs}/ibdev"), &format!("{name}\n"));
        self.write(&format!("sys/class/infiniband_verbs/{verbs}/dev"), "1:3\n");
        self.character_device(&verbs);
    }

    fn device(&self, of: &str, name: &str, number: u8, links: &[Link]) {
        let guid = format!("0c42:a103:001d:{number:04x}");
        for (file, text) in [
            ("node_type", "1: CA"),
            ("node_guid", guid.as_str()),
            ("sys_image_guid", guid.as_str()),
            ("fw_ver", "28.41.1000"),
            ("hca_type", "MT4129"),
            ("board_id", "MT_0000000838"),
        ] {
            self.write(&format!("sys/{of}/{file}"), &format!("{text}\n"));
        }
        for (at, link) in links.iter().enumerate() {
            let port = format!("sys/{of}/ports/{}", at + 1);
            for (file, text) in [
                ("state", link.state),
                ("phys_state", link.phys),
                ("link_layer", link.layer),
                ("rate", link.rate),
                ("lid", "0x2b"),
                ("sm_lid", "0x1"),
                ("counters/symbol_error", "0"),
            ] {
                self.write(&format!("{port}/{file}"), &format!("{text}\n"));
            }
            self.gids(&port, &guid, link);
        }
        self.link(&format!("../../{of}"), &format!("sys/class/infiniband/{name}"));
    }

    fn gids(&self, port: &str, guid: &str, link: &Link) {
        let zero = "0000:0000:0000:0000:0000:0000:0000:0000\n";
        let local = format!("fe80:0000:0000:0000:{guid}\n");
        let mapped = "0000:0000:0000:0000:0000:ffff:0a09:0001\n";
        let entries: &[(&str, &str)] = match link.layer {
            "InfiniBand" => &[(&local, "IB/RoCE v1"), (zero, "")],
            "Ethernet" => {
                &[(&local, "IB/RoCE v1"), (&local, "RoCE v2"), (mapped, "IB/RoCE v1"), (mapped, "RoCE v2"), (zero, "")]
            }
            _ => &[(&local, "")],
        };
        for (at, (gid, kind)) in entries.iter().enumerate() {
            self.write(&format!("{port}/gids/{at}"), gid);
            fs::create_dir_all(self.at(&format!("{port}/gid_attrs/types"))).unwrap();
            // The kernel answers EINVAL for an empty slot, which no plain file can.
            if !kind.is_empty() {
                self.write(&format!("{port}/gid_attrs/types/{at}"), &format!("{kind}\n"));
            }
            if let Some(netdev) = link.netdev
                && !kind.is_empty()
            {
                self.write(&format!("{port}/gid_attrs/ndevs/{at}"), &format!("{netdev}\n"));
            }
        }
    }

    /// `rails` InfiniBand devices, one port each.
    pub(super) fn rails(rails: u8) -> Self {
        let host = Self::new();
        for number in 0..rails {
            host.pci_device(&format!("mlx5_{number}"), number + 1, &[INFINIBAND]);
        }
        host
    }

    /// Where a port's attribute lies, by its class.
    pub(super) fn port(&self, device: &str, port: u32, attribute: &str) -> String {
        format!("sys/class/infiniband/{device}/ports/{port}/{attribute}")
    }
}
