//! Probes: one file each, and the runner that gives them their rounds.

pub mod attribute;
pub mod csi;
mod device_lane;
pub mod exec;
pub mod gpu;
pub mod health_file;
pub mod join;
mod keeper;
pub mod kmsg;
pub mod lane;
pub mod link_events;
pub mod nvme;
pub mod observed;
pub mod rdma;
pub mod runner;
mod session;
pub mod tree;

use crate::policy::outcome::Outcome;
use crate::policy::repeats::Events;
use lane::Abandoned;
use observed::Observed;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Something that can be asked how the hardware is.
pub trait Probe: Send {
    /// What a look gives, before it is judged.
    type Seen: Send;

    /// What [`Self::changed`] is worth.
    const EVENTS: Events = Events::News;

    /// One look.
    ///
    /// # Errors
    /// [`Abandoned`] when there was no answer within `timeout`.
    fn look(&mut self, timeout: Duration) -> impl Future<Output = Result<Self::Seen, Abandoned>> + Send;

    /// What the look, begun at `now`, says; `None` if nothing that counts again. Never asked about a round that does not count.
    fn judge(&mut self, seen: Self::Seen, now: Instant) -> Option<Outcome>;

    /// Waits for a reason to run before the period is over. Cancelling it loses nothing.
    fn changed(&mut self) -> impl Future<Output = ()> + Send;

    /// What the last look saw, beside its outcome. Asked once a round, so a probe keeps it until it changes.
    fn observed(&self) -> Option<Arc<Observed>> {
        None
    }
}
