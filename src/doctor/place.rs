//! Where to look, what the settings say, and what this process itself may do.

use crate::config::probes::{HostTree, ProbeKind, ProbeSettings};
use crate::probe::tree::Tree;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::path::{Path, PathBuf};

/// Enough for any file that is read here; more is cut off.
const MAX_TEXT_BYTES: usize = 256 * 1024;

/// What the checks go by.
#[derive(Debug, Clone)]
pub struct Place {
    /// `--sysfs-root`, `--dev-root`, `--proc-root`.
    pub host: HostTree,
    /// `--etc-root`.
    pub etc: PathBuf,
    /// Whether that may be a container's own, because nobody said where the host's is.
    pub etc_is_doubtful: bool,
    /// What the settings say, if they are those of an agent.
    pub sockets: Option<Sockets>,
    /// The probes of the settings.
    pub probes: Vec<ProbeSettings>,
    /// This process.
    pub own: Own,
}

/// Where an agent with these settings keeps its sockets.
#[derive(Debug, Clone)]
pub struct Sockets {
    /// `--csi-address`
    pub driver: PathBuf,
    /// `--kubelet-registration-path`
    pub told: PathBuf,
    /// `--plugin-registration-path`
    pub registration_folder: PathBuf,
    /// Where state and status socket lie; `None` if there are none.
    pub state_folder: Option<PathBuf>,
}

/// What the kernel says of this process.
#[derive(Debug, Clone, Default)]
pub struct Own {
    /// Effective capabilities, a bit each.
    pub capabilities: Option<u64>,
    /// What is mounted where.
    pub mounts: Vec<Mounted>,
    /// The network namespace's name.
    pub network: Option<String>,
    /// Why netlink cannot be opened, if so.
    pub netlink_trouble: Option<String>,
    /// The security context, if there is one.
    pub context: Option<String>,
    /// Whether this is a container of a pod.
    pub in_pod: bool,
}

/// One line of `mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    /// The folder within its file system that is mounted.
    pub root: PathBuf,
    /// Where.
    pub at: PathBuf,
    /// `tmpfs`, `ext4`, …
    pub kind: String,
    /// Whether it cannot be written.
    pub read_only: bool,
}

impl Place {
    /// Whether a probe of this type is set.
    pub fn watches(&self, type_name: &str) -> bool {
        self.probes.iter().any(|probe| probe.kind.name() == type_name)
    }

    /// The health files of the settings.
    pub fn health_files(&self) -> impl Iterator<Item = &Path> {
        self.probes.iter().filter_map(|probe| match &probe.kind {
            ProbeKind::HealthFile { path, .. } => Some(path.as_path()),
            ProbeKind::Csi { .. }
            | ProbeKind::Exec { .. }
            | ProbeKind::Rdma(_)
            | ProbeKind::Nvme(_)
            | ProbeKind::Gpu(_)
            | ProbeKind::Kmsg(_) => None,
        })
    }
}

impl Own {
    /// Reads it from the process's own `/proc`.
    pub fn read() -> Self {
        let text = |path: &str| std::fs::read_to_string(path).ok();
        Self {
            capabilities: text("/proc/self/status").and_then(|status| capabilities(&status)),
            mounts: text("/proc/self/mountinfo").map(|table| mounts(&table)).unwrap_or_default(),
            network: std::fs::read_link("/proc/self/ns/net").ok().map(|link| link.display().to_string()),
            netlink_trouble: netlink().err().map(words),
            context: text("/proc/self/attr/current")
                .map(|context| context.trim_matches(['\0', '\n']).to_owned())
                .filter(|context| context.contains(':')),
            // The kubelet gives it to every container.
            in_pod: std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(),
        }
    }

    /// Whether it has the capability of this number; `None` if that cannot be told.
    pub fn has_capability(&self, number: u32) -> Option<bool> {
        self.capabilities.map(|set| set >> number & 1 == 1)
    }

    /// The mount that holds `path`.
    pub fn mount_of(&self, path: &Path) -> Option<&Mounted> {
        let holding = self.mounts.iter().filter(|mounted| path.starts_with(&mounted.at));
        // A later one lies over an earlier one.
        holding.max_by_key(|mounted| mounted.at.components().count())
    }
}

/// Opens what link events come by, as the probe does, and closes it.
fn netlink() -> Result<(), Errno> {
    socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None).map(drop)
}

fn capabilities(status: &str) -> Option<u64> {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

fn mounts(table: &str) -> Vec<Mounted> {
    let mounted = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let fields: Vec<&str> = left.split(' ').collect();
        let (root, at, options) = (fields.get(3)?, fields.get(4)?, fields.get(5)?);
        Some(Mounted {
            root: unescaped(root).into(),
            at: unescaped(at).into(),
            kind: right.split(' ').next()?.to_owned(),
            read_only: options.split(',').any(|option| option == "ro"),
        })
    };
    table.lines().filter_map(mounted).collect()
}

/// The kernel writes blanks as `\040`.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// A text file of a tree, as far as there is room.
///
/// # Errors
/// As [`Tree::read_bytes`].
pub(super) fn text(tree: &Tree, path: &str) -> Result<String, Errno> {
    let mut bytes = vec![0; MAX_TEXT_BYTES];
    let length = tree.read_bytes(path, &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

/// The operating system's words, with its number left out.
pub(super) fn words(error: Errno) -> String {
    let text = io::Error::from(error).to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_process_is_read() {
        assert_eq!(capabilities("Name:\tx\nCapEff:\t00000000a80425fb\n"), Some(0xa804_25fb));
        assert_eq!(capabilities("Name:\tx\n"), None);
        let own = Own {
            capabilities: Some(1 << 21),
            mounts: mounts(
                "1 0 0:1 / / rw,relatime - overlay overlay rw\n\
                 2 1 8:1 /lib/kubelet/plugins\\040x /csi ro,relatime shared:1 - ext4 /dev/sda1 rw\nrubbish\n",
            ),
            ..Own::default()
        };
        assert_eq!((own.has_capability(21), own.has_capability(34)), (Some(true), Some(false)));
        let mount = own.mount_of(Path::new("/csi/csi.sock")).unwrap();
        assert_eq!((mount.root.to_str(), mount.read_only), (Some("/lib/kubelet/plugins x"), true));
        assert_eq!(own.mount_of(Path::new("/csix")).unwrap().kind, "overlay");
        assert!(Own::read().capabilities.is_some() && Own::read().mount_of(Path::new("/")).is_some());
    }
}
