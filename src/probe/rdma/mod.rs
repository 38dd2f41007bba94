//! The `rdma` probe: ports by what the kernel says of them, without any tool.

use super::Probe;
use super::lane::{Abandoned, Lane};
use super::link_events::LinkEvents;
use super::observed::Observed;
use crate::config::probes::RdmaSettings;
use crate::policy::outcome::{Outcome, Reason};
use crate::policy::repeats::Events;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The probe.
#[derive(Debug)]
pub struct Rdma {
    settings: RdmaSettings,
    lane: Lane,
    events: LinkEvents,
    observed: Option<Arc<Observed>>,
}

impl Rdma {
    /// Reads the devices that `settings` selects.
    pub fn new(settings: &RdmaSettings) -> Self {
        let events = LinkEvents::new(&settings.host.sysfs);
        Self { settings: settings.clone(), lane: Lane::new("rdma"), events, observed: None }
    }
}

impl Probe for Rdma {
    type Seen = Vec<String>;

    const EVENTS: Events = Events::LookAgain;

    async fn look(&mut self, timeout: Duration) -> Result<Vec<String>, Abandoned> {
        self.events.listen();
        let folder = self.settings.host.sysfs.join("class/infiniband");
        let list = move || {
            let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        self.lane.run(timeout, list).await
    }

    fn judge(&mut self, seen: Vec<String>, _now: Instant) -> Option<Outcome> {
        self.observed = Some(Arc::new(seen.iter().map(|name| (name.clone(), json!("listed"))).collect()));
        Some(Outcome::Unknown(Reason::new("NotRead", format!("{} devices are listed", seen.len()))))
    }

    async fn changed(&mut self) {
        self.events.changed().await;
    }

    fn observed(&self) -> Option<Arc<Observed>> {
        self.observed.clone()
    }
}
