//! What user space needs of a device: its entry in `infiniband_verbs`, and device files with the right numbers.

use super::attributes::Attributes;
use crate::policy::rdma::rules::{DeviceNode, RdmaRules};
use crate::policy::rdma::seen::{Attr, Verbs};
use crate::policy::rdma::selector::parse_pci;
use crate::probe::tree::{MAX_ATTRIBUTE_BYTES, Tree, is_absence};
use rustix::fs::{FileType, OFlags, major, minor};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::fmt;
use std::io;
use std::path::Path;

/// What is found where the kernel has its device files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFiles {
    /// The kernel's own.
    Real,
    /// A trace's: plain files that hold [`DeviceStandIn`] as text, since not everybody may make device files.
    StandIns,
}

/// A device file as a trace has it: `231:192`, or `231:192 EPERM` if it could not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStandIn {
    /// Its numbers.
    pub major: u32,
    /// Its numbers.
    pub minor: u32,
    /// Why it could not be opened, by the name of the error.
    pub refused: Option<String>,
}

impl DeviceStandIn {
    /// Reads it again.
    pub fn parse(text: &str) -> Option<Self> {
        let (number, refused) = match text.split_once(' ') {
            Some((number, refused)) => (number, Some(refused.to_owned())),
            None => (text, None),
        };
        let (major, minor) = number.split_once(':')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()?, refused })
    }
}

impl fmt::Display for DeviceStandIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)?;
        self.refused.as_ref().map_or(Ok(()), |refused| write!(f, " {refused}"))
    }
}

/// Looks for what the rules ask for. `connects` is false for devices that have no connection manager.
pub(super) fn look(
    sysfs: &mut Attributes,
    dev: (&Path, DeviceFiles),
    rules: &RdmaRules,
    device: &str,
    connects: bool,
) -> Verbs {
    let mut worst = Verbs::Usable;
    for node in &rules.device_nodes {
        let verbs = match node {
            DeviceNode::Uverbs => uverbs(sysfs, dev, device),
            DeviceNode::RdmaCm if connects => rdma_cm(sysfs, dev),
            DeviceNode::RdmaCm => Verbs::Usable,
        };
        match (&worst, &verbs) {
            (_, Verbs::Missing(_)) => return verbs,
            (Verbs::Usable, _) => worst = verbs,
            (Verbs::NotOurs(_) | Verbs::Unknown(_) | Verbs::Missing(_), _) => {}
        }
    }
    worst
}

fn uverbs(sysfs: &mut Attributes, dev: (&Path, DeviceFiles), device: &str) -> Verbs {
    let name = match entry(sysfs, device) {
        Ok(Some(name)) => name,
        Ok(None) if sysfs.has(&["class/infiniband_verbs"]) => {
            return Verbs::Missing(format!("infiniband_verbs has no entry of {device}"));
        }
        Ok(None) => {
            return Verbs::Missing("there is no infiniband_verbs: the module ib_uverbs is not loaded".to_owned());
        }
        Err(error) => return Verbs::Unknown(format!("cannot read infiniband_verbs: {}", io::Error::from(error))),
    };
    let number = sysfs.text(&["class/infiniband_verbs", &name, "dev"]);
    node(dev, &name, &number, Open::Try)
}

/// The device's `uverbsN`. Where the device has a folder for it, nobody else's entries are opened.
fn entry(sysfs: &mut Attributes, device: &str) -> Result<Option<String>, Errno> {
    let own = sysfs.list(&["class/infiniband", device, "device/infiniband_verbs"]);
    if let [one] = own.as_slice() {
        return Ok(Some(one.clone()));
    }
    let names = match sysfs.listed(&["class/infiniband_verbs"]) {
        Ok(names) => names,
        Err(error) if is_absence(error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let address = |sysfs: &mut Attributes, class: &str, name: &str| {
        sysfs.link(&[class, name]).and_then(|path| path.rsplit('/').find_map(parse_pci))
    };
    let here = address(sysfs, "class/infiniband", device);
    let mut trouble = None;
    for name in names.iter().filter(|name| name.starts_with("uverbs")) {
        let there = address(sysfs, "class/infiniband_verbs", name);
        if there.is_some() && here.is_some() && there != here {
            continue;
        }
        match sysfs.text(&["class/infiniband_verbs", name, "ibdev"]) {
            Attr::Known(ibdev) if ibdev == device => return Ok(Some(name.clone())),
            Attr::Unreadable => trouble = Some(Errno::IO),
            Attr::Known(_) | Attr::Absent => {}
        }
    }
    trouble.map_or(Ok(None), Err)
}

fn rdma_cm(sysfs: &mut Attributes, dev: (&Path, DeviceFiles)) -> Verbs {
    let number = sysfs.text(&["class/misc/rdma_cm/dev"]);
    // Opening it would make a context.
    node(dev, "rdma_cm", &number, Open::Leave)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Try,
    Leave,
}

/// Whether `<dev>/infiniband/<name>` is the kernel's device of this number, and can be opened.
fn node((dev, files): (&Path, DeviceFiles), name: &str, number: &Attr<String>, open: Open) -> Verbs {
    let shown = dev.join("infiniband").join(name);
    let shown = shown.display();
    let tree = match Tree::open(dev) {
        Ok(tree) => tree,
        Err(error) if is_absence(error) => return Verbs::Missing(format!("there is no {}", dev.display())),
        Err(error) => return Verbs::Unknown(format!("{}: {}", dev.display(), io::Error::from(error))),
    };
    let path = format!("infiniband/{name}");
    let stat = match tree.stat(&path) {
        Ok(stat) => stat,
        Err(error) if is_absence(error) => return Verbs::Missing(format!("there is no {shown}")),
        Err(error) => return Verbs::Unknown(format!("{shown}: {}", io::Error::from(error))),
    };
    let (has, stand_in) = match (files, FileType::from_raw_mode(stat.st_mode)) {
        (DeviceFiles::Real, FileType::CharacterDevice) => ((major(stat.st_rdev), minor(stat.st_rdev)), None),
        (DeviceFiles::StandIns, FileType::RegularFile) => match stand_in(&tree, &path) {
            Some(stand_in) => ((stand_in.major, stand_in.minor), Some(stand_in)),
            None => return Verbs::Missing(format!("{shown} is no character device")),
        },
        (DeviceFiles::Real | DeviceFiles::StandIns, _) => {
            return Verbs::Missing(format!("{shown} is no character device"));
        }
    };
    let has = format!("{}:{}", has.0, has.1);
    if let Attr::Known(wanted) = number
        && *wanted != has
    {
        return Verbs::Missing(format!("{shown} is device {has}, not {wanted}"));
    }
    if open == Open::Leave {
        return Verbs::Usable;
    }
    if let Some(stand_in) = stand_in {
        return match stand_in.refused.as_deref() {
            None => Verbs::Usable,
            Some("EACCES" | "EPERM") => Verbs::NotOurs(format!("{shown} is there, but not for us to open")),
            Some("ENXIO" | "ENODEV") => Verbs::Missing(format!("{shown} leads to no device of the kernel's")),
            Some(other) => Verbs::Unknown(format!("{shown}: {other}")),
        };
    }
    match tree.lookup(&path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY) {
        Ok(_closed_at_once) => Verbs::Usable,
        Err(error) => match error {
            Errno::ACCESS if geteuid().is_root() => Verbs::Missing(format!("{shown} cannot be opened even by root")),
            // A container without this device in its list, or another user: who uses it may well be allowed.
            Errno::ACCESS | Errno::PERM => Verbs::NotOurs(format!("{shown} is there, but not for us to open")),
            Errno::NXIO | Errno::NODEV => Verbs::Missing(format!("{shown} leads to no device of the kernel's")),
            other => Verbs::Unknown(format!("{shown}: {}", io::Error::from(other))),
        },
    }
}

fn stand_in(tree: &Tree, path: &str) -> Option<DeviceStandIn> {
    let mut buffer = [0; MAX_ATTRIBUTE_BYTES];
    DeviceStandIn::parse(tree.read(path, &mut buffer).ok()?)
}
