//! Starts the parts, and stops them together.

mod health;
mod reload;
pub(crate) mod rules;

use crate::config::settings::{LivenessSettings, Reaction, Settings};
use crate::config::watched::Watched;
use crate::driver_name::{Unfit, discover};
use crate::http::{self, Diagnostics, LivenessEndpoints};
use crate::known_ports::KnownPorts;
use crate::liveness::{Asked, Liveness};
use crate::metrics::Metrics;
use crate::parts::Parts;
use crate::policy::admission::Admission;
use crate::policy::registration::RegistrationTimings;
use crate::registration::socket::{NameError, SocketPath};
use crate::registration::{self, Phase, RegistrationPart, Status};
use crate::state_file::StateFile;
use crate::status::server::Sources;
use crate::status::{self as status_socket};
use anyhow::{Context, anyhow};
use health::HealthPart;
use rules::asks;
use std::error::Error;
use std::path::Path;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

/// Connections in flight get this long after the registration socket is unlinked.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Runs until `stop`, or until a part fails.
///
/// # Errors
/// What made it impossible to begin or to go on, naming the flag or the path.
pub async fn run(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    let (status, statuses) = watch::channel(Status::waiting(Instant::now().into_std()));
    let parts = Parts::new(stop);
    let result = start(&settings, &parts, status, statuses).await;
    if result.is_err() {
        parts.stop().cancel();
    }
    let stopped = parts.stopped(STOP_GRACE).await;
    result?;
    stopped.map_err(|(part, error)| anyhow!(error).context(format!("the {part} failed")))
}

async fn start(
    settings: &Settings,
    parts: &Parts,
    status: watch::Sender<Status>,
    statuses: watch::Receiver<Status>,
) -> anyhow::Result<()> {
    let metrics = Metrics::new();
    match &settings.http {
        Some(address) => {
            let listener = address
                .listen()
                .with_context(|| format!("cannot listen on {address} (--http-endpoint or --health-port)"))?;
            info!(address = %address, "Starting HTTP server");
            let answers = Diagnostics::new(statuses, metrics.clone(), settings.timeout, settings.pprof);
            http::serve(listener, answers, parts).context("cannot serve HTTP")?;
        }
        None => info!("Skipping HTTP server because --http-endpoint and --health-port are not set"),
    }
    if let Some(liveness) = &settings.liveness {
        serve_liveness(liveness, &settings.driver_socket, &metrics, parts)?;
    }
    let Some((driver_name, socket)) = driver_name(settings, &metrics, parts.stop(), &status).await? else {
        return Ok(());
    };
    let (admission, view) = match &settings.health {
        Some(health) => {
            let watched =
                Watched { probes: health.probes.clone(), groups: health.groups.clone(), warnings: Vec::new() };
            let state = StateFile::new(&settings.state_folder, &driver_name, asks(&watched), &settings.proc_root);
            let known = known_ports(&settings.state_folder, &driver_name);
            let (changes, changed) = mpsc::channel(1);
            let told = HealthPart::start(health, (state, known), changed, metrics.clone(), parts);
            if let Some(source) = &settings.source {
                parts.spawn("settings", reload::run(source.clone(), watched, changes, parts.clone()));
            }
            (told.admission, Some(told.view))
        }
        // Nobody to ask: exactly the registrar that this replaces.
        None => (watch::channel(Admission::Show).1, None),
    };
    if let Some(view) = view {
        let path = settings
            .status_socket
            .clone()
            .unwrap_or_else(|| settings.state_folder.join(format!("{driver_name}{}", status_socket::server::SUFFIX)));
        status_socket::server::serve(&path, Sources { status: status.subscribe(), health: Some(view) }, parts);
    }
    if settings.health.as_ref().is_some_and(|health| health.reaction == Reaction::Deregister) {
        let name = Some(driver_name.clone());
        status.send_modify(|status| (status.phase, status.driver_name) = (Phase::WaitingForHealth, name));
    }
    let (part, calls) = RegistrationPart::new(
        registration::Settings {
            driver_socket: settings.driver_socket.clone(),
            driver_name,
            endpoint: settings.endpoint.clone(),
            socket,
            timings: RegistrationTimings::default(),
        },
        parts,
        status,
        metrics,
    );
    parts.spawn("registration", part.run(calls, admission));
    Ok(())
}

/// Which ports were good on this node before.
fn known_ports(folder: &Path, driver: &str) -> KnownPorts {
    KnownPorts::load(folder, driver).unwrap_or_else(|error| {
        warn!(error = &error as &dyn Error, "which ports were good before is lost; beginning afresh");
        KnownPorts::afresh(folder, driver)
    })
}

/// livenessprobe's duty, from before the driver is there: nothing that waits may come first.
fn serve_liveness(
    settings: &LivenessSettings,
    driver_socket: &Path,
    metrics: &Metrics,
    parts: &Parts,
) -> anyhow::Result<()> {
    let address = &settings.address;
    let listener = address.listen().with_context(|| format!("cannot listen on {address} (--liveness-endpoint)"))?;
    info!(address = %address, "Starting liveness server");
    let asked = Asked { driver_socket: driver_socket.to_owned(), timeout: settings.timeout, metrics: metrics.clone() };
    let answers = LivenessEndpoints {
        liveness: Some(Liveness::in_background(asked, settings.interval, parts)),
        metrics: Some(("/metrics".to_owned(), metrics.clone())),
    };
    http::serve(listener, answers, parts).context("cannot serve HTTP")
}

/// Waits for the driver until it gives a name that can be registered. `None` when stopped before.
async fn driver_name(
    settings: &Settings,
    metrics: &Metrics,
    stop: &CancellationToken,
    status: &watch::Sender<Status>,
) -> Result<Option<(String, SocketPath)>, NameError> {
    let fit = |name: String| match SocketPath::new(&settings.registration_folder, &name) {
        Ok(socket) => Ok((name, socket)),
        Err(error @ NameError::TooLong { .. }) => Err(Unfit::ForEver(error)),
        Err(error @ NameError::Unfit { .. }) => Err(Unfit::ForNow(error.to_string())),
    };
    let trouble = |text: String| {
        status.send_if_modified(|status| {
            let changed = status.trouble.as_ref() != Some(&text);
            status.trouble = Some(text);
            changed
        });
    };
    discover(&settings.driver_socket, settings.timeout, metrics, stop, fit, trouble).await
}
