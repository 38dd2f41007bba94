//! What probes read on this host, at one moment. The same paths as theirs and no others, each value no longer than they take it.

mod gpu;
mod nvme;
mod rdma;

use super::entry::Entry;
use super::tree::Tree as Entries;
use crate::config::probes::ProbeKind;
use crate::probe::tree::{MAX_ATTRIBUTE_BYTES, Tree, is_absence};
use std::path::Path;

/// As in the kernel.
const MAX_LINKS: usize = 40;

/// Of a health file and of a table of routes.
const MAX_TEXT_BYTES: usize = 4096;

/// What a probe of this kind reads; nothing for those that a trace cannot hold. Blocks as long as the kernel does.
pub(super) fn take(kind: &ProbeKind) -> Entries {
    let mut entries = Entries::default();
    match kind {
        ProbeKind::Rdma(rdma) => rdma::take(rdma, &mut entries),
        ProbeKind::Nvme(nvme) => nvme::take(nvme, &mut entries),
        ProbeKind::Gpu(gpu) => gpu::take(gpu, &mut entries),
        ProbeKind::Kmsg(_) | ProbeKind::HealthFile { .. } | ProbeKind::Csi { .. } | ProbeKind::Exec { .. } => {}
    }
    entries
}

/// Looks at paths of one tree, and notes what is there under the paths that their links lead to.
struct Walk<'a> {
    tree: Tree,
    root: &'static str,
    entries: &'a mut Entries,
}

/// A folder or file behind all links, from the root of its tree on.
type Place = String;

impl<'a> Walk<'a> {
    /// `None` if there is no such tree.
    fn new(path: &Path, root: &'static str, entries: &'a mut Entries) -> Option<Self> {
        Some(Self { tree: Tree::open(path).ok()?, root, entries })
    }

    /// Follows `path` from `from`, and notes the links on the way.
    fn reach(&mut self, from: &str, path: &str) -> Option<Place> {
        let mut here = from.to_owned();
        let mut left: Vec<String> = steps(path);
        let mut links = 0;
        while let Some(step) = left.pop() {
            if step == ".." {
                here.truncate(here.rfind('/').unwrap_or_default());
                continue;
            }
            let next = join(&here, &step);
            match self.tree.link(&next) {
                Some(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return None;
                    }
                    if target.starts_with('/') {
                        here.clear();
                    }
                    left.extend(steps(&target));
                    self.note(&next, Entry::Link(target));
                }
                None => here = next,
            }
        }
        Some(here)
    }

    /// The folder at `path`, noted if it is one.
    fn folder(&mut self, from: &str, path: &str) -> Option<Place> {
        let place = self.reach(from, path)?;
        let is_folder = self.tree.exists(&join(&place, ".")) == Ok(true);
        if is_folder {
            self.note(&place, Entry::Folder);
        }
        is_folder.then_some(place)
    }

    /// The names in the folder at `path`.
    fn names(&mut self, from: &str, path: &str) -> Vec<String> {
        let Some(place) = self.reach(from, path) else { return Vec::new() };
        match self.tree.list(&place) {
            Ok(names) => {
                self.note(&place, Entry::Folder);
                names
            }
            Err(error) if is_absence(error) => Vec::new(),
            Err(error) => {
                self.note(&place, Entry::unreadable(error));
                Vec::new()
            }
        }
    }

    /// The value at `path`, noted; gives it as text.
    fn value(&mut self, from: &str, path: &str) -> Option<String> {
        self.value_up_to(from, path, MAX_ATTRIBUTE_BYTES)
    }

    fn value_up_to(&mut self, from: &str, path: &str, most: usize) -> Option<String> {
        let place = self.reach(from, path)?;
        let mut bytes = vec![0; most];
        match self.tree.read_bytes(&place, &mut bytes) {
            Ok(length) => {
                bytes.truncate(length);
                let text = String::from_utf8_lossy(&bytes).trim().to_owned();
                self.note(&place, Entry::Value(bytes));
                Some(text)
            }
            Err(error) => {
                if !is_absence(error) {
                    self.note(&place, Entry::unreadable(error));
                }
                None
            }
        }
    }

    fn values(&mut self, from: &str, names: &[&str]) {
        for name in names {
            self.value(from, name);
        }
    }

    /// The link at `path` itself, not followed.
    fn link(&mut self, from: &str, path: &str) -> Option<String> {
        let path = join(from, path);
        let target = self.tree.link(&path)?;
        self.note(&path, Entry::Link(target.clone()));
        Some(target)
    }

    fn note(&mut self, place: &str, entry: Entry) {
        let path = join(self.root, place);
        // A folder that is full already stays as it is; what cannot be told by a path of ours is left out.
        if !(entry == Entry::Folder && self.entries.at(&path).is_some()) {
            self.entries.change(&path, Some(&entry)).ok();
        }
    }
}

/// The last step first.
fn steps(path: &str) -> Vec<String> {
    path.split('/').rev().filter(|step| !matches!(*step, "" | ".")).map(str::to_owned).collect()
}

fn join(folder: &str, name: &str) -> String {
    match (folder, name) {
        ("", name) => name.to_owned(),
        (folder, "") => folder.to_owned(),
        (folder, name) => format!("{folder}/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::gpu::WrittenGpu;
    use crate::config::nvme::WrittenNvme;
    use crate::config::probes::{GpuSettings, HostTree, NvmeSettings, RdmaSettings};
    use crate::known_ports::KnownPorts;
    use crate::policy::outcome::Outcome;
    use crate::policy::rdma::rules::RdmaRules;
    use crate::policy::rdma::selector::Selector;
    use crate::probe::Probe;
    use crate::probe::gpu::Gpu;
    use crate::probe::nvme::Nvme;
    use crate::probe::observed::Observed;
    use crate::probe::rdma::Rdma;
    use crate::trace::Offset;
    use crate::trace::host::Host;
    use std::sync::Arc;
    use std::time::Duration;

    const TIMEOUT: Duration = Duration::from_secs(20);

    /// A made-up host: `PATH ENTRY` a line, as in a trace.
    fn host(lines: &str) -> Host {
        let host = Host::new().unwrap();
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (path, entry) = line.split_once(' ').unwrap();
            host.put(path, Some(&Entry::parse(entry).unwrap()), Offset(0)).unwrap();
        }
        host
    }

    /// A host of what was recorded of another one.
    fn copy(entries: &Entries) -> Host {
        let host = Host::new().unwrap();
        for (path, entry) in entries.entries() {
            host.put(path, Some(entry), Offset(0)).unwrap();
        }
        host
    }

    async fn said(mut probe: impl Probe) -> (Option<Outcome>, Option<Arc<Observed>>) {
        let seen = probe.look(TIMEOUT).await.unwrap();
        let outcome = probe.judge(seen, tokio::time::Instant::now().into_std());
        (outcome, probe.observed())
    }

    const HCAS: &str = r"
        sys/class/infiniband/mlx5_0 -> ../../devices/pci0/0000:41:00.0/infiniband/mlx5_0
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/device -> ../../../0000:41:00.0
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/node_guid = 0c42:a103:001d:d12a\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/node_type = 1: CA\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/state = 4: ACTIVE\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/phys_state = 5: LinkUp\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/link_layer = Ethernet\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/rate = 100 Gb/sec (4X EDR)\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/lid = 0x2b\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/sm_lid ! EINVAL
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/gids/0 = fe80:0000:0000:0000:0c42:a103:001d:d12a\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/gids/1 = 0000:0000:0000:0000:0000:0000:0000:0000\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/gids/2 = fe80:0000:0000:0000:0c42:a103:001d:d12a\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/gid_attrs/types/0 = IB/RoCE v1\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/gid_attrs/types/1 ! EINVAL
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/gid_attrs/types/2 = RoCE v2\n
        sys/devices/pci0/0000:41:00.0/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/2 = bond0\n
        sys/devices/pci0/0000:41:00.0/net/eth0/dev_port = 0\n
        sys/devices/pci0/0000:41:00.0/net/eth0/master -> ../../../../virtual/net/bond0
        sys/devices/pci0/0000:41:00.0/net/eth1/phys_port_name = pf0vf1\n
        sys/devices/pci0/0000:41:00.0/infiniband_verbs/uverbs0/dev = 231:192\n
        sys/devices/pci0/0000:41:00.0/infiniband_verbs/uverbs0/ibdev = mlx5_0\n
        sys/class/infiniband_verbs/uverbs0 -> ../../devices/pci0/0000:41:00.0/infiniband_verbs/uverbs0
        sys/devices/virtual/net/bond0/flags = 0x1003\n
        sys/devices/virtual/net/bond0/operstate = up\n
        sys/devices/virtual/net/bond0/bonding /
        sys/devices/virtual/net/bond0/lower_eth0 -> ../../../pci0/0000:41:00.0/net/eth0
        sys/devices/pci0/0000:41:00.0/net/eth0/operstate = up\n
        sys/class/net/bond0 -> ../../devices/virtual/net/bond0
        sys/class/net/eth0 -> ../../devices/pci0/0000:41:00.0/net/eth0
        sys/devices/virtual/infiniband/rxe0/parent = eth7\n
        sys/devices/virtual/infiniband/rxe0/node_guid = 0000:0000:0000:0001\n
        sys/devices/virtual/infiniband/rxe0/ports/1/state = 1: DOWN\n
        sys/devices/virtual/infiniband/rxe0/ports/1/phys_state ! EIO
        sys/devices/virtual/infiniband/rxe0/ports/1/link_layer = Ethernet\n
        sys/class/infiniband/rxe0 -> ../../devices/virtual/infiniband/rxe0
        sys/class/infiniband/gone -> ../../devices/gone
        sys/devices/virtual/net/eth7/flags = 0x1002\n
        sys/devices/virtual/net/eth7/operstate = down\n
        sys/class/net/eth7 -> ../../devices/virtual/net/eth7
        proc/1/net/route = Iface\tDestination\neth7\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n
    ";

    #[tokio::test]
    async fn an_rdma_probe_sees_in_the_recording_what_it_saw_on_the_host() {
        let from = host(HCAS);
        for (devices, exclude) in [
            (&[][..], &[][..]),
            (&["mlx5_*"], &[]),
            (&["0c42:a103:001d:d12a"], &[]),
            (&[], &["0000:0000:0000:0001"]),
            (&["0000:41:00.0"], &["rxe0"]),
        ] {
            let parse = |words: &[&str]| words.iter().map(|word| Selector::parse(word).unwrap()).collect();
            let settings = |host: HostTree| {
                // Device files cannot be made by everybody.
                let rules = RdmaRules {
                    devices: parse(devices),
                    exclude: parse(exclude),
                    device_nodes: Vec::new(),
                    details: true,
                    ..RdmaRules::default()
                };
                RdmaSettings { host, rules }
            };
            let recorded = take(&ProbeKind::Rdma(settings(from.tree())));
            let to = copy(&recorded);
            let probe = |host: &Host| Rdma::replayed(&settings(host.tree()), KnownPorts::in_memory());
            let (outcome, observed) = said(probe(&from)).await;
            assert!(!observed.as_ref().unwrap().is_empty());
            assert_eq!(said(probe(&to)).await, (outcome, observed), "{devices:?} {exclude:?}");
            let of_rxe = recorded.at("sys/devices/virtual/infiniband/rxe0/ports/1/state");
            assert_eq!(of_rxe.is_some(), devices.is_empty() && exclude.is_empty(), "what is not selected is not read");
        }
    }

    #[tokio::test]
    async fn an_nvme_probe_sees_in_the_recording_what_it_saw_on_the_host() {
        let from = host(
            r"
            sys/class/nvme/nvme0 -> ../../devices/pci0/0000:01:00.0/nvme/nvme0
            sys/devices/pci0/0000:01:00.0/nvme/nvme0/device -> ../../../0000:01:00.0
            sys/devices/pci0/0000:01:00.0/nvme/nvme0/state = live\n
            sys/devices/pci0/0000:01:00.0/nvme/nvme0/transport = pcie\n
            sys/devices/pci0/0000:01:00.0/nvme/nvme0/serial = PHX1\n
            sys/devices/pci0/0000:01:00.0/nvme/nvme0/model = Drive\n
            sys/devices/pci0/0000:01:00.0/nvme/nvme0/firmware_rev = 1.0\n
            sys/devices/pci0/0000:01:00.0/nvme/nvme0/nvme0n1 /
            sys/class/nvme/nvme1/state = connecting\n
            sys/class/nvme/nvme1/address = traddr=192.168.1.5,trsvcid=4420\n
            sys/class/nvme/nvme1/nvme1c1n1/ana_state = inaccessible\n
            sys/class/nvme/nvme2/state ! EIO
        ",
        );
        let settings = |host: &Host| NvmeSettings { ..WrittenNvme::default().settings(&host.tree(), TIMEOUT) };
        let to = copy(&take(&ProbeKind::Nvme(settings(&from))));
        let (outcome, observed) = said(Nvme::replayed(&settings(&from))).await;
        assert_eq!(observed.as_ref().unwrap().len(), 3);
        assert_eq!(said(Nvme::replayed(&settings(&to))).await, (outcome, observed));
    }

    #[tokio::test]
    async fn a_gpu_probe_sees_in_the_recording_what_it_saw_on_the_host() {
        let from = host(
            r"
            sys/bus/pci/devices/0000:17:00.0 -> ../../../devices/pci0/0000:17:00.0
            sys/devices/pci0/0000:17:00.0/vendor = 0x10de\n
            sys/devices/pci0/0000:17:00.0/class = 0x030200\n
            sys/devices/pci0/0000:17:00.0/config = \xff\xff\xff\xff
            sys/devices/pci0/0000:17:00.0/driver -> ../../../bus/pci/drivers/nvidia
            sys/bus/pci/devices/0000:18:00.0/vendor = 0x10de\n
            sys/bus/pci/devices/0000:18:00.0/class = 0x030200\n
            sys/bus/pci/devices/0000:18:00.0/power/runtime_status = suspended\n
            sys/bus/pci/devices/0000:19:00.0/vendor = 0x8086\n
            sys/bus/pci/devices/0000:19:00.0/class = 0x020000\n
        ",
        );
        let settings =
            |host: &Host| GpuSettings { tool: None, ..WrittenGpu::default().settings(&host.tree(), TIMEOUT) };
        let to = copy(&take(&ProbeKind::Gpu(settings(&from))));
        let (outcome, observed) = said(Gpu::replayed(&settings(&from))).await;
        assert_eq!(outcome.as_ref().unwrap().name(), "failure");
        assert_eq!(observed.as_ref().unwrap().len(), 2);
        assert_eq!(said(Gpu::replayed(&settings(&to))).await, (outcome, observed));
    }
}
