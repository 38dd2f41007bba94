//! The `rdma` probe: ports by what the kernel says of them, without any tool.
//!
//! Each round lists the devices on one lane and reads each selected device on a lane of its own: a driver that hangs costs its
//! device's word, and nobody else's.

mod attributes;
mod device;
mod figures;
mod function;
mod list;
mod netdev;
mod verbs;

#[cfg(test)]
mod cost;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod moved_tests;
#[cfg(test)]
mod tests;

use super::Probe;
use super::device_lane::DeviceLane;
use super::join::join_all;
use super::keeper::Keeper;
use super::lane::{Abandoned, Lane};
use super::link_events::LinkEvents;
use super::observed::Observed;
use crate::config::probes::{HostTree, RdmaSettings};
use crate::known_ports::KnownPorts;
use crate::policy::outcome::{Outcome, Reason};
use crate::policy::rdma::fabric::Fabric;
use crate::policy::rdma::rules::RdmaRules;
use crate::policy::rdma::seen::{Answer, Round, Verbs};
use crate::policy::rdma::worth::{PortWord, Wanted};
use crate::policy::repeats::Events;
use crate::probe::tree::Tree;
use attributes::Attributes;
use list::{Listed, Routes};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::info;
pub use verbs::{DeviceFiles, DeviceStandIn};

/// Routes change seldom, and a table may be long.
const ROUTES_PERIOD: Duration = Duration::from_secs(10);

/// The probe.
#[derive(Debug)]
pub struct Rdma {
    settings: Arc<RdmaSettings>,
    fabric: Fabric,
    known: KnownPorts,
    files: DeviceFiles,
    lane: Lane,
    devices: BTreeMap<String, DeviceLane>,
    events: LinkEvents,
    routes_at: Option<tokio::time::Instant>,
    keeper: Keeper,
    seen: Option<(Round, Arc<Observed>)>,
    /// Ports that were told to be part of a bond.
    merged: Vec<String>,
    /// Interfaces of ports, whose links are watched.
    netdevs: BTreeSet<String>,
}

impl Rdma {
    /// Reads the devices that `settings` selects. Ports that it finds good are noted in `known`.
    pub fn new(settings: &RdmaSettings, known: KnownPorts) -> Self {
        Self {
            settings: Arc::new(settings.clone()),
            fabric: Fabric::new(settings.rules.clone()),
            known,
            files: DeviceFiles::Real,
            lane: Lane::new("rdma"),
            devices: BTreeMap::new(),
            events: LinkEvents::new(&settings.host.sysfs),
            routes_at: None,
            keeper: Keeper::new("rdma-known"),
            seen: None,
            merged: Vec::new(),
            netdevs: BTreeSet::new(),
        }
    }

    /// Reads a trace's tree, which has plain files where there were device files.
    pub fn replayed(settings: &RdmaSettings, known: KnownPorts) -> Self {
        Self { files: DeviceFiles::StandIns, ..Self::new(settings, known) }
    }

    /// That a port has become part of a bond is told once, and once that it has not any more.
    fn tell_merged(&mut self, words: &[PortWord]) {
        let merged = |word: &&PortWord| word.wanted == Wanted::No && word.outcome.reason().is_some_and(is_merged);
        let now: Vec<String> = words.iter().filter(merged).map(ToString::to_string).collect();
        for word in words.iter().filter(merged) {
            let port = word.to_string();
            if !self.merged.contains(&port) {
                let why = word.outcome.reason().map_or("", |reason| reason.message.as_str());
                info!(port, why, "a port that was good is part of a bond now; no longer wanted by itself");
            }
        }
        for port in self.merged.iter().filter(|port| !now.contains(port)) {
            info!(port, "a port is no part of a bond any more; wanted by itself again");
        }
        self.merged = now;
    }

    /// Looks up which links the ports depend on, if that may have changed.
    async fn watch_links(&mut self, answers: &[Answer], links_changed: bool, limit: Duration) {
        let mut netdevs = BTreeSet::new();
        for answer in answers {
            match answer {
                Answer::Device(device) => {
                    let ports = device.ports.known().into_iter().flatten();
                    netdevs.extend(ports.filter_map(|port| Some(port.netdev.as_ref()?.name.clone())));
                }
                // It has those that it had.
                Answer::Dangling { .. } | Answer::Silent { .. } => netdevs.extend(self.netdevs.iter().cloned()),
            }
        }
        if !links_changed && netdevs == self.netdevs {
            return;
        }
        let (settings, names) = (Arc::clone(&self.settings), netdevs.clone());
        let job = move || Some(netdev::indices(&mut Attributes::new(Tree::open(&settings.host.sysfs).ok()?), &names));
        if let Ok(Some(links)) = self.lane.run(limit, job).await {
            self.events.watch(links);
            self.netdevs = netdevs;
        }
    }

    async fn read(&mut self, selected: Vec<Listed>, until: tokio::time::Instant, timeout: Duration) -> Vec<Answer> {
        // A device that is gone while it hangs keeps its thread: if it comes back, there shall not be two.
        self.devices.retain(|name, device| device.is_busy() || selected.iter().any(|one| one.name == *name));
        for one in &selected {
            if !self.devices.contains_key(&one.name) {
                self.devices.insert(one.name.clone(), DeviceLane::new(format!("rdma {}", one.name)));
            }
        }
        let (settings, files) = (&self.settings, self.files);
        let answers = self.devices.iter_mut().filter_map(|(name, device)| {
            let listed = selected.iter().find(|one| one.name == *name)?.clone();
            let (name, pci) = (listed.name.clone(), listed.pci.clone());
            let settings = Arc::clone(settings);
            let job = move || device::read(&settings.host, files, &settings.rules, &listed);
            Some(Box::pin(async move {
                let answer = device.ask(until, timeout, job).await;
                answer.unwrap_or_else(|silence| Answer::Silent { name, pci, silence })
            }))
        });
        join_all(answers.collect()).await
    }
}

fn is_merged(reason: &Reason) -> bool {
    reason.code == "Merged"
}

/// The names of the devices that `settings` selects. Blocks as long as the kernel does.
pub fn selected(settings: &RdmaSettings) -> Vec<String> {
    list::look(settings, Routes::Keep, &[]).selected.into_iter().map(|listed| listed.name).collect()
}

impl Probe for Rdma {
    type Seen = Round;

    const EVENTS: Events = Events::LookAgain;

    async fn look(&mut self, timeout: Duration) -> Result<Round, Abandoned> {
        self.events.listen();
        let links_changed = self.events.take_links_changed();
        let began = tokio::time::Instant::now();
        let routes = match self.routes_at {
            Some(at) if began - at < ROUTES_PERIOD => Routes::Keep,
            Some(_) | None => Routes::Look,
        };
        let settings = Arc::clone(&self.settings);
        let places = self.known.lock().functions();
        let mut listed = self.lane.run(timeout, move || list::look(&settings, routes, &places)).await?;
        if routes == Routes::Look {
            self.routes_at = Some(began);
        }
        let known = self.known.clone();
        self.keeper.keep(self.known.path(), move || known.save()).await;
        let answers = self.read(std::mem::take(&mut listed.selected), began + timeout, timeout).await;
        let left = (began + timeout).saturating_duration_since(tokio::time::Instant::now());
        self.watch_links(&answers, links_changed, left).await;
        let list::Devices { listing, default_route, functions, seats, .. } = listed;
        Ok(Round { listing, answers, default_route, functions, seats })
    }

    fn judge(&mut self, seen: Round, now: Instant) -> Option<Outcome> {
        let judgement = self.fabric.judge(&seen, &mut self.known.lock(), now);
        self.keeper.note(judgement.learned);
        self.tell_merged(&judgement.words);
        let same = |(round, _): &(Round, Arc<Observed>)| *round == seen;
        let observed = figures::observed(&seen, &judgement.words);
        // Who looks at it compares pointers; a word may change by time alone.
        match &self.seen {
            Some(before) if same(before) && *before.1 == observed => {}
            Some(_) | None => self.seen = Some((seen, Arc::new(observed))),
        }
        Some(judgement.outcome)
    }

    async fn changed(&mut self) {
        self.events.changed().await;
    }

    fn observed(&self) -> Option<Arc<Observed>> {
        self.seen.as_ref().map(|(_, observed)| Arc::clone(observed))
    }
}

/// What user space needs of `device`, as the probe judges it.
pub(crate) fn device_files(host: &HostTree, rules: &RdmaRules, device: &str) -> Verbs {
    match Tree::open(&host.sysfs) {
        Ok(sysfs) => {
            let mut sysfs = Attributes::new(sysfs);
            let ports = sysfs.list(&["class/infiniband", device, "ports"]);
            // As in a round: what has neither InfiniBand nor Ethernet below has no connection manager.
            let mut is_other = |port: &String| {
                let layer = sysfs.text(&["class/infiniband", device, "ports", port, "link_layer"]);
                layer.known().is_some_and(|layer| !matches!(layer.as_str(), "InfiniBand" | "Ethernet"))
            };
            let connects = ports.is_empty() || !ports.iter().all(&mut is_other);
            verbs::look(&mut sysfs, (&host.dev, DeviceFiles::Real), rules, device, connects)
        }
        Err(error) => Verbs::Unknown(format!("{}: {}", host.sysfs.display(), io::Error::from(error))),
    }
}
