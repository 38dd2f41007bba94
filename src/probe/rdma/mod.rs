//! The `rdma` probe: ports by what the kernel says of them, without any tool.
//!
//! Each round lists the devices on one lane and reads each selected device on a lane of its own: a driver that hangs costs its
//! device's word, and nobody else's.

mod attributes;
mod device;
mod figures;
mod list;
mod netdev;
mod verbs;

#[cfg(test)]
mod cost;
#[cfg(test)]
mod fixture;
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
use crate::policy::outcome::Outcome;
use crate::policy::rdma::fabric::Fabric;
use crate::policy::rdma::rules::RdmaRules;
use crate::policy::rdma::seen::{Answer, Round, Verbs};
use crate::policy::repeats::Events;
use crate::probe::tree::Tree;
use attributes::Attributes;
use list::{Listed, Routes};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
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
        }
    }

    /// Reads a trace's tree, which has plain files where there were device files.
    pub fn replayed(settings: &RdmaSettings, known: KnownPorts) -> Self {
        Self { files: DeviceFiles::StandIns, ..Self::new(settings, known) }
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

/// The names of the devices that `settings` selects. Blocks as long as the kernel does.
pub fn selected(settings: &RdmaSettings) -> Vec<String> {
    list::look(settings, Routes::Keep).selected.into_iter().map(|listed| listed.name).collect()
}

impl Probe for Rdma {
    type Seen = Round;

    const EVENTS: Events = Events::LookAgain;

    async fn look(&mut self, timeout: Duration) -> Result<Round, Abandoned> {
        self.events.listen();
        let began = tokio::time::Instant::now();
        let routes = match self.routes_at {
            Some(at) if began - at < ROUTES_PERIOD => Routes::Keep,
            Some(_) | None => Routes::Look,
        };
        let settings = Arc::clone(&self.settings);
        let listed = self.lane.run(timeout, move || list::look(&settings, routes)).await?;
        if routes == Routes::Look {
            self.routes_at = Some(began);
        }
        let known = self.known.clone();
        self.keeper.keep(self.known.path(), move || known.save()).await;
        let answers = self.read(listed.selected, began + timeout, timeout).await;
        Ok(Round { listing: listed.listing, answers, default_route: listed.default_route })
    }

    fn judge(&mut self, seen: Round, now: Instant) -> Option<Outcome> {
        let judgement = self.fabric.judge(&seen, &mut self.known.lock(), now);
        self.keeper.note(judgement.learned);
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
