//! Probes: one file each, and the runner that gives them their rounds.

pub mod exec;
pub mod health_file;
pub mod lane;
pub mod runner;

use crate::policy::outcome::Outcome;
use lane::Abandoned;
use std::future::Future;
use std::time::{Duration, Instant};

/// Something that can be asked how the hardware is.
pub trait Probe: Send {
    /// One run. `None`: nothing was seen that counts again.
    ///
    /// # Errors
    /// [`Abandoned`] when there was no answer within `timeout`.
    fn run(
        &mut self,
        now: Instant,
        timeout: Duration,
    ) -> impl Future<Output = Result<Option<Outcome>, Abandoned>> + Send;

    /// Waits for a reason to run before the period is over. Cancelling it loses nothing.
    fn changed(&mut self) -> impl Future<Output = ()> + Send;
}
