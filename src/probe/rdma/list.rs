//! Which devices there are, and which of them are selected. Opens nothing of a device, but its GUID if a selector asks for it.

use super::attributes::Attributes;
use super::{function, netdev};
use crate::config::probes::RdmaSettings;
use crate::policy::rdma::merged::{Function, Seat};
use crate::policy::rdma::rules::RdmaRules;
use crate::policy::rdma::seen::Listing;
use crate::policy::rdma::selector::{Identity, Selector, parse_guid};
use crate::probe::tree::{Tree, is_absence};
use std::io;

/// A selected device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) pci: Option<String>,
}

/// What a look at the list gives.
#[derive(Debug)]
pub(super) struct Devices {
    pub(super) listing: Listing,
    pub(super) selected: Vec<Listed>,
    pub(super) default_route: Vec<String>,
    pub(super) functions: Vec<Function>,
    pub(super) seats: Vec<Seat>,
}

/// Whether the default route is looked up, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Routes {
    Look,
    Keep,
}

/// `known` are the PCI addresses of known-good ports: of those without a device it is looked up what became of them.
pub(super) fn look(settings: &RdmaSettings, routes: Routes, known: &[String]) -> Devices {
    let none = |listing| Devices {
        listing,
        selected: Vec::new(),
        default_route: Vec::new(),
        functions: Vec::new(),
        seats: Vec::new(),
    };
    let mut sysfs = match Tree::open(&settings.host.sysfs) {
        Ok(tree) => Attributes::new(tree),
        Err(error) => {
            let why = format!("{}: {}", settings.host.sysfs.display(), io::Error::from(error));
            return none(Listing::Unreadable(why));
        }
    };
    let mut names = match sysfs.listed(&["class/infiniband"]) {
        Ok(names) => names,
        // Without the driver there is no such class; without its parent there is no sysfs.
        Err(error) if is_absence(error) && sysfs.has(&["class", "."]) => return none(Listing::NoClass),
        Err(error) if is_absence(error) => {
            let why = format!("there is no {}/class: mount the host's /sys", settings.host.sysfs.display());
            return none(Listing::Unreadable(why));
        }
        Err(error) => {
            let why = format!("{}/class/infiniband: {}", settings.host.sysfs.display(), io::Error::from(error));
            return none(Listing::Unreadable(why));
        }
    };
    // Devices are folders, or links to them; a plain file is none.
    names.retain(|name| sysfs.links(&["class/infiniband", name]) || sysfs.has(&["class/infiniband", name, "."]));
    let listing = Listing::Devices(names.len());
    let mut seats: Vec<Seat> =
        names.into_iter().map(|name| Seat { pci: function::of_device(&mut sysfs, &name), name }).collect();
    let selected = seats.iter().filter_map(|seat| selected(&mut sysfs, &settings.rules, seat)).collect();
    let empty = known.iter().filter(|known| !seats.iter().any(|seat| seat.pci.as_ref() == Some(known)));
    let functions: Vec<Function> = empty.filter_map(|address| function::look(&mut sysfs, address, &seats)).collect();
    if functions.is_empty() {
        seats.clear();
    }
    let default_route = match (routes, Tree::open(&settings.host.proc)) {
        (Routes::Look, Ok(proc)) => netdev::of_default_route(&mut sysfs, &mut Attributes::new(proc)),
        (Routes::Look, Err(_)) | (Routes::Keep, _) => Vec::new(),
    };
    Devices { listing, selected, default_route, functions, seats }
}

fn selected(sysfs: &mut Attributes, rules: &RdmaRules, seat: &Seat) -> Option<Listed> {
    let Seat { name, pci } = seat;
    let unread = Identity { name, pci: pci.as_deref(), guid: None };
    let any = |selectors: &[Selector], identity: Identity<'_>| selectors.iter().any(|one| one.selects(identity));
    let has_guid = |selectors: &[Selector]| selectors.iter().any(|one| matches!(one, Selector::Guid(_)));
    if any(&rules.exclude, unread) {
        return None;
    }
    let known = rules.devices.is_empty() || any(&rules.devices, unread);
    if has_guid(&rules.exclude) || !known && has_guid(&rules.devices) {
        let guid = sysfs.parsed(&["class/infiniband", name, "node_guid"], parse_guid).known().copied();
        let identity = Identity { guid, ..unread };
        if any(&rules.exclude, identity) || !known && !any(&rules.devices, identity) {
            return None;
        }
    } else if !known {
        return None;
    }
    Some(Listed { name: name.clone(), pci: pci.clone() })
}
