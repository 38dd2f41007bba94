//! What the kernel says of NVMe controllers, under `<sysfs-root>/class/nvme`, and the SMART log of one. All of it may block.

use super::admin::{AdminError, smart_log};
use crate::policy::nvme::{Smart, State};
use crate::policy::nvme_selector::{Identity, Selector};
use crate::policy::outcome::Reason;
use crate::policy::rdma::selector::parse_pci;
use crate::policy::smart::SmartLog;
use crate::probe::attribute::{attribute, names};
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, major, minor, openat};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Controllers that are looked at; no machine has more.
const MAX_CONTROLLERS: usize = 512;

/// Namespaces of one controller that are shown.
const MAX_NAMESPACES: usize = 64;

/// The controllers that are there.
#[derive(Debug, PartialEq, Eq)]
pub struct Listed {
    /// Those that the settings select.
    pub selected: Vec<Identity>,
    /// Words of the settings that name one which is not there.
    pub absent: Vec<String>,
}

/// The controllers under `sysfs`, as the settings select them; no word is every controller. One that is excluded by its name is not read
/// at all.
///
/// # Errors
/// Why it is not known what is there.
pub fn list(sysfs: &Path, devices: &[Selector], exclude: &[Selector]) -> Result<Listed, Reason> {
    let folder = sysfs.join("class/nvme");
    let unread = |path: &Path, error: io::Error| {
        Reason::new("SysfsUnreadable", format!("cannot read {}: {error}", path.display()))
    };
    let found = match names(&folder) {
        Ok(found) => found,
        // Without the driver there is no such class; without its parent there is no sysfs.
        Err(error) if error.kind() == io::ErrorKind::NotFound => match names(&sysfs.join("class")) {
            Ok(_) => Vec::new(),
            Err(error) => return Err(unread(&sysfs.join("class"), error)),
        },
        Err(error) => return Err(unread(&folder, error)),
    };
    let mut all_known = true;
    let mut there = Vec::new();
    let controllers = found.into_iter().filter(|name| is_controller(name)).take(MAX_CONTROLLERS);
    for name in controllers.filter(|name| !exclude.iter().any(|selector| selector.selects_name(name))) {
        let (identity, whole) = identity(&folder.join(&name), name);
        all_known &= whole;
        if !exclude.iter().any(|selector| selector.selects(&identity)) {
            there.push(identity);
        }
    }
    // One whose serial number cannot be read may be the one that is missed.
    let missed =
        |selector: &&Selector| selector.names_one() && all_known && !there.iter().any(|one| selector.selects(one));
    let absent = devices.iter().filter(missed).map(ToString::to_string).collect();
    let selected = |one: &Identity| devices.is_empty() || devices.iter().any(|selector| selector.selects(one));
    there.retain(selected);
    Ok(Listed { selected: there, absent })
}

fn is_controller(name: &str) -> bool {
    name.strip_prefix("nvme")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What tells the controller from others, and whether all of that could be read.
fn identity(folder: &Path, name: String) -> (Identity, bool) {
    let mut whole = true;
    let mut read = |attribute_name: &str| match attribute(&folder.join(attribute_name)) {
        Ok(value) => value,
        Err(error) => {
            whole &= error.kind() == io::ErrorKind::NotFound;
            String::new()
        }
    };
    let (serial, subsysnqn, address) = (read("serial"), read("subsysnqn"), read("address"));
    // The link to the PCI device holds where the address is not to be read, too.
    let device = std::fs::read_link(folder.join("device")).ok();
    let device = device.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()).and_then(parse_pci);
    let pci = device.or_else(|| parse_pci(&address)).unwrap_or_default();
    let traddr = address.split(',').find_map(|part| part.strip_prefix("traddr=")).unwrap_or_default().to_owned();
    (Identity { name, serial, pci, traddr, subsysnqn }, whole)
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
    let folder = sysfs.join("class/nvme").join(name);
    let state = match attribute(&folder.join("state")) {
        Ok(word) => Ok(State::parse(&word)),
        Err(error) => Err(Reason::new("StateUnreadable", format!("its state cannot be read: {error}"))),
    };
    let keys = ["state", "transport", "address", "serial", "model", "firmware_rev", "subsysnqn", "cntlid"];
    let value = |key: &'static str| Some((key, attribute(&folder.join(key)).ok().filter(|value| !value.is_empty())?));
    let shown = keys.into_iter().filter_map(value).collect();
    let is_namespace = |entry: &String| {
        let rest = entry.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with('n') || rest.starts_with('c') && rest.contains('n'))
    };
    let entries = names(&folder).unwrap_or_default().into_iter().filter(is_namespace).take(MAX_NAMESPACES);
    let namespaces = entries.map(|entry| {
        let ana = attribute(&folder.join(&entry).join("ana_state")).ok();
        (entry, ana)
    });
    Controller { state, shown, namespaces: namespaces.collect() }
}

/// Asks the drive for its SMART log.
pub fn smart(sysfs: &Path, dev: &Path, name: &str) -> Smart {
    let path = dev.join(name);
    match open(sysfs, &path, name) {
        Ok(controller) => match smart_log(controller) {
            Ok(page) => match SmartLog::parse(&page[..]) {
                Ok(log) => Smart::Log(log),
                Err(implausible) => {
                    let message = format!("the SMART log of {name} says nothing: {implausible}");
                    Smart::Unread(Reason::new("SmartImplausible", message))
                }
            },
            Err(error) => refused(&path, error),
        },
        Err(error) => refused(&path, AdminError::System(error)),
    }
}

/// The controller's device file, if it is that.
fn open(sysfs: &Path, path: &PathBuf, name: &str) -> Result<std::os::fd::OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
    let file = openat(CWD, path, flags, Mode::empty())?;
    let stat = fstat(&file)?;
    let numbers = attribute(&sysfs.join("class/nvme").join(name).join("dev")).unwrap_or_default();
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    // No command may go to another device that has got the name.
    if !is_device || numbers != format!("{}:{}", major(stat.st_rdev), minor(stat.st_rdev)) {
        return Err(Errno::NOTTY);
    }
    Ok(file)
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
