//! What the kernel says of NVMe controllers, under `<sysfs-root>/class/nvme`, and the SMART log of one. All of it may block.

use super::admin::{AdminError, smart_log};
use crate::policy::nvme::{Smart, State};
use crate::policy::nvme_selector::{Identity, Selector};
use crate::policy::outcome::Reason;
use crate::policy::rdma::selector::parse_pci;
use crate::policy::smart::{PAGE_BYTES, SmartLog};
use crate::probe::attribute::{attribute, link_name};
use crate::probe::tree::Tree;
use rustix::fs::{FileType, OFlags, Stat, fstat, major, minor};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Controllers that are looked at; no machine has more.
const MAX_CONTROLLERS: usize = 512;

/// Namespaces of one controller that are shown.
const MAX_NAMESPACES: usize = 64;

/// The kernel's folder of them.
const CLASS: &str = "class/nvme";

/// The controllers that are there.
#[derive(Debug, PartialEq, Eq)]
pub struct Listed {
    /// Those that the settings select, each with what stays when names change.
    pub selected: Vec<(Identity, Option<String>)>,
    /// Words of the settings that name one which is not there.
    pub absent: Vec<String>,
    /// Whether all of it could be read: one whose serial number cannot be read may be the one that is missed.
    pub whole: bool,
}

/// The controllers under `sysfs`, as the settings select them; no word is every controller. One that is excluded by its name is not read
/// at all.
///
/// # Errors
/// Why it is not known what is there.
pub fn list(sysfs: &Path, devices: &[Selector], exclude: &[Selector]) -> Result<Listed, Reason> {
    let unread = |path: &str, error: Errno| {
        let path = sysfs.join(path);
        Reason::new("SysfsUnreadable", format!("cannot read {}: {error}", path.display()))
    };
    let tree = Tree::open(sysfs).map_err(|error| unread("", error))?;
    let found = match tree.list(CLASS) {
        // Without the driver there is no such class; without its parent there is no sysfs.
        Err(Errno::NOENT) => tree.list("class").map(|_| Vec::new()).map_err(|error| unread("class", error))?,
        found => found.map_err(|error| unread(CLASS, error))?,
    };
    let mut whole = true;
    let mut there = Vec::new();
    let controllers = found.into_iter().filter(|name| is_controller(name)).take(MAX_CONTROLLERS);
    for name in controllers.filter(|name| !exclude.iter().any(|selector| selector.selects_name(name))) {
        let (identity, lasting) = identity(&tree, name);
        whole &= lasting.is_some();
        if !exclude.iter().any(|selector| selector.selects(&identity)) {
            there.push((identity, lasting));
        }
    }
    let missed =
        |selector: &&Selector| selector.names_one() && whole && !there.iter().any(|(one, _)| selector.selects(one));
    let absent = devices.iter().filter(missed).map(ToString::to_string).collect();
    there.retain(|(one, _)| devices.is_empty() || devices.iter().any(|selector| selector.selects(one)));
    Ok(Listed { selected: there, absent, whole })
}

fn is_controller(name: &str) -> bool {
    name.strip_prefix("nvme")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What tells the controller from others, and what of that stays when it comes back under another name; `None` if that could not be read.
fn identity(tree: &Tree, name: String) -> (Identity, Option<String>) {
    let mut whole = true;
    let mut read = |key: &str| match attribute(tree, &format!("{CLASS}/{name}/{key}")) {
        Ok(value) => value,
        Err(error) => {
            whole &= error == Errno::NOENT;
            String::new()
        }
    };
    let (serial, subsysnqn, address, number) = (read("serial"), read("subsysnqn"), read("address"), read("cntlid"));
    // The link to the PCI device holds where the address is not to be read, too.
    let device = link_name(tree, &format!("{CLASS}/{name}/device"));
    let device = device.as_deref().and_then(parse_pci);
    let pci = device.or_else(|| parse_pci(&address)).unwrap_or_default();
    let traddr = address.split(',').find_map(|part| part.strip_prefix("traddr=")).unwrap_or_default().to_owned();
    // A fabric's controller gets a new number each time it is connected, a drive keeps that of each of its ports.
    let path = if pci.is_empty() { &traddr } else { &number };
    let lasting = match (serial.as_str(), subsysnqn.as_str()) {
        ("", "") => name.clone(),
        _ => format!("{subsysnqn} {serial} {path}"),
    };
    (Identity { name, serial, pci, traddr, subsysnqn }, whole.then_some(lasting))
}

/// What the kernel says of one controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// Its state, or why that is not known.
    pub state: Result<State, Reason>,
    /// What is shown of it, by its name in sysfs.
    pub shown: BTreeMap<&'static str, String>,
    /// Its namespaces, and how they are reached by it.
    pub namespaces: BTreeMap<String, Option<String>>,
}

impl Controller {
    /// What keeps every namespace from being reached by this controller, if something does.
    pub fn unreachable(&self) -> Option<String> {
        let lost = |state: &Option<String>| matches!(state.as_deref(), Some("inaccessible" | "persistent-loss"));
        let all_lost = !self.namespaces.is_empty() && self.namespaces.values().all(lost);
        self.namespaces.values().next().filter(|_| all_lost).cloned().flatten()
    }
}

/// Reads one controller.
pub fn controller(sysfs: &Path, name: &str) -> Controller {
    let unread = |error: Errno| Reason::new("StateUnreadable", format!("its state cannot be read: {error}"));
    let tree = match Tree::open(sysfs) {
        Ok(tree) => tree,
        Err(error) => {
            return Controller { state: Err(unread(error)), shown: BTreeMap::new(), namespaces: BTreeMap::new() };
        }
    };
    let read = |key: &str| attribute(&tree, &format!("{CLASS}/{name}/{key}"));
    let state = read("state").map(|word| State::parse(&word)).map_err(unread);
    let keys = ["state", "transport", "address", "serial", "model", "firmware_rev", "subsysnqn", "cntlid"];
    let value = |key: &'static str| Some((key, read(key).ok().filter(|value| !value.is_empty())?));
    let shown = keys.into_iter().filter_map(value).collect();
    let is_namespace = |entry: &String| {
        let rest = entry.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with('n') || rest.starts_with('c') && rest.contains('n'))
    };
    let entries = tree.list(&format!("{CLASS}/{name}")).unwrap_or_default();
    let entries = entries.into_iter().filter(is_namespace).take(MAX_NAMESPACES);
    let namespaces = entries.map(|entry| {
        let ana = read(&format!("{entry}/ana_state")).ok();
        (entry, ana)
    });
    Controller { state, shown, namespaces: namespaces.collect() }
}

/// Asks the drive for its SMART log.
pub fn smart(sysfs: &Path, dev: &Path, name: &str) -> Smart {
    understood(page(sysfs, dev, name), &dev.join(name), name)
}

/// The SMART log that a trace has in the device file's place; behind its end are zeros.
pub fn recorded_smart(dev: &Path, name: &str) -> Smart {
    let mut page = Box::new([0; PAGE_BYTES]);
    let read = Tree::open(dev).and_then(|tree| tree.read_bytes(name, page.as_mut_slice()));
    understood(read.map(|_| page).map_err(AdminError::System), &dev.join(name), name)
}

/// Of the drive's SMART log what is judged, for a trace; the rest is zeros, and those at its end are left out.
///
/// # Errors
/// When the kernel or the drive refuses.
pub fn smart_to_record(sysfs: &Path, dev: &Path, name: &str) -> Result<Vec<u8>, Errno> {
    let page = page(sysfs, dev, name).map_err(|error| match error {
        AdminError::System(error) => error,
        AdminError::Refused(_) => Errno::IO,
    })?;
    let mut judged = SmartLog::judged(&page);
    judged.truncate(judged.iter().rposition(|byte| *byte != 0).map_or(1, |last| last + 1));
    Ok(judged)
}

fn page(sysfs: &Path, dev: &Path, name: &str) -> Result<Box<[u8; PAGE_BYTES]>, AdminError> {
    smart_log(open(sysfs, dev, name).map_err(AdminError::System)?)
}

fn understood(page: Result<Box<[u8; PAGE_BYTES]>, AdminError>, path: &Path, name: &str) -> Smart {
    match page {
        Ok(page) => match SmartLog::parse(&page[..]) {
            Ok(log) => Smart::Log(log),
            Err(implausible) => {
                let message = format!("the SMART log of {name} says nothing: {implausible}");
                Smart::Unread(Reason::new("SmartImplausible", message))
            }
        },
        Err(error) => refused(path, error),
    }
}

/// The controller's device file, if it is that: no command may go to another device that has got the name.
fn open(sysfs: &Path, dev: &Path, name: &str) -> Result<OwnedFd, Errno> {
    let numbers = attribute(&Tree::open(sysfs)?, &format!("{CLASS}/{name}/dev")).unwrap_or_default();
    let is_it = |stat: &Stat| {
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        is_device && numbers == format!("{}:{}", major(stat.st_rdev), minor(stat.st_rdev))
    };
    let tree = Tree::open(dev)?;
    // Some devices act on being opened, so it is looked at first, and again once it is open.
    if !is_it(&tree.stat(name)?) {
        return Err(Errno::NOTTY);
    }
    let file = tree.lookup(name, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW)?;
    if is_it(&fstat(&file)?) { Ok(file) } else { Err(Errno::NOTTY) }
}

fn refused(path: &Path, error: AdminError) -> Smart {
    let path = path.display();
    match error {
        AdminError::System(Errno::ACCESS | Errno::PERM) => Smart::NotPermitted(Reason::new(
            "SmartNotPermitted",
            format!(
                "the SMART log takes CAP_SYS_ADMIN and a container that may open {path}; without them only the state is known"
            ),
        )),
        AdminError::System(Errno::NOENT | Errno::NOTDIR) => Smart::NotPermitted(Reason::new(
            "SmartNoDevice",
            format!("{path} does not exist: mount the host's /dev there"),
        )),
        AdminError::System(Errno::NOTTY) => {
            Smart::NotPermitted(Reason::new("SmartNoDevice", format!("{path} is not this controller's device file")))
        }
        error @ (AdminError::System(_) | AdminError::Refused(_)) => {
            Smart::Unread(Reason::new("SmartUnread", format!("the SMART log cannot be read from {path}: {error}")))
        }
    }
}
