//! Waits for the driver to give its name, for as long as it takes.

use crate::grpc::connect::{CallError, chain};
use crate::grpc::driver;
use crate::metrics::Metrics;
use crate::policy::backoff::Backoff;
use crate::quiet::Quiet;
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Pauses between questions to a driver that is not there yet. A connect costs microseconds.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// What a deadline that is too short is doubled up to.
const MAX_DEADLINE: Duration = Duration::from_secs(30);

/// Why a name cannot be taken.
#[derive(Debug)]
pub enum Unfit<E> {
    /// The driver may be half up: ask again.
    ForNow(String),
    /// It never will be.
    ForEver(E),
}

/// Asks until the driver gives a name that `fit` takes, and returns what `fit` made of it; `None` when stopped before. Each
/// trouble goes to `trouble`, too; the log has it at a bounded rate.
///
/// # Errors
/// What [`Unfit::ForEver`] holds.
pub async fn discover<T, E>(
    driver_socket: &Path,
    first_deadline: Duration,
    metrics: &Metrics,
    stop: &CancellationToken,
    fit: impl Fn(String) -> Result<T, Unfit<E>>,
    trouble: impl Fn(String),
) -> Result<Option<T>, E> {
    info!(socket.path = %driver_socket.display(), "Calling CSI driver to discover driver name");
    let mut pauses = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
    let mut deadlines = Backoff::new(first_deadline, MAX_DEADLINE.max(first_deadline));
    let mut deadline = deadlines.pause();
    let mut quiet = Quiet::default();
    let began = Instant::now();
    loop {
        let asked_at = Instant::now();
        let asked = tokio::select! {
            () = stop.cancelled() => return Ok(None),
            asked = driver::plugin_name(driver_socket, deadline) => asked,
        };
        metrics.observe_call(driver::GET_PLUGIN_INFO, &asked, asked_at.elapsed());
        let text = match asked {
            Ok(name) => match fit(name.clone()) {
                Ok(fitting) => {
                    info!(driver.name = name, "CSI driver name");
                    metrics.set_driver_name(&name);
                    return Ok(Some(fitting));
                }
                Err(Unfit::ForEver(error)) => return Err(error),
                Err(Unfit::ForNow(text)) => text,
            },
            Err(error) => {
                if matches!(error, CallError::Deadline { .. }) {
                    deadline = deadlines.pause();
                }
                chain(&error)
            }
        };
        if quiet.begin_or_repeat(&text, Instant::now()) {
            warn!(
                socket.path = %driver_socket.display(),
                error = text,
                waited = ?began.elapsed(),
                "Still connecting: the driver does not give its name yet; asking again"
            );
        }
        trouble(text);
        tokio::select! {
            () = stop.cancelled() => return Ok(None),
            () = sleep(pauses.pause()) => {}
        }
    }
}
