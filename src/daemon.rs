//! Starts the parts, and stops them together.

mod health;

use crate::config::settings::{Reaction, Settings};
use crate::config::watched::Watched;
use crate::grpc::connect::chain;
use crate::grpc::driver;
use crate::http::{self, Answers};
use crate::parts::Parts;
use crate::policy::admission::Admission;
use crate::policy::backoff::Backoff;
use crate::policy::registration::RegistrationTimings;
use crate::quiet::Quiet;
use crate::registration::socket::{NameError, SocketPath};
use crate::registration::{self, Phase, RegistrationPart, Status};
use crate::state_file::StateFile;
use crate::status::server::Sources;
use crate::status::{self as status_socket};
use anyhow::{Context, anyhow};
use health::{HealthPart, asks};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

/// Connections in flight get this long after the registration socket is unlinked.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Pauses between questions to a driver that is not there yet. A connect costs microseconds.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// What `--timeout` is doubled up to while the driver is too slow for it.
const MAX_NAME_DEADLINE: Duration = Duration::from_secs(30);

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
    match &settings.http {
        Some(address) => {
            let listener = address
                .listen()
                .with_context(|| format!("cannot listen on {address} (--http-endpoint or --health-port)"))?;
            info!(address = %address, "Starting HTTP server");
            http::serve(listener, Answers::new(statuses, settings.timeout, settings.pprof), parts)
                .context("cannot serve HTTP")?;
        }
        None => info!("Skipping HTTP server because --http-endpoint and --health-port are not set"),
    }
    let Some((driver_name, socket)) = driver_name(settings, parts.stop(), &status).await? else {
        return Ok(());
    };
    let (admission, view) = match &settings.health {
        Some(health) => {
            let watched =
                Watched { probes: health.probes.clone(), groups: health.groups.clone(), warnings: Vec::new() };
            let state = StateFile::new(&settings.state_folder, &driver_name, asks(&watched), &settings.proc_root);
            let (_changes, changed) = tokio::sync::mpsc::channel(1);
            let told = HealthPart::start(health, state, changed, parts);
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
    );
    parts.spawn("registration", part.run(calls, admission));
    Ok(())
}

/// Waits for the driver, for as long as it takes, until it gives a name that can be registered. `None` when stopped before.
async fn driver_name(
    settings: &Settings,
    stop: &CancellationToken,
    status: &watch::Sender<Status>,
) -> anyhow::Result<Option<(String, SocketPath)>> {
    info!(socket.path = %settings.driver_socket.display(), "Calling CSI driver to discover driver name");
    let mut pauses = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
    let mut deadlines = Backoff::new(settings.timeout, MAX_NAME_DEADLINE.max(settings.timeout));
    let mut deadline = deadlines.pause();
    let mut quiet = Quiet::default();
    let began = Instant::now();
    loop {
        let asked = tokio::select! {
            () = stop.cancelled() => return Ok(None),
            asked = driver::plugin_name(&settings.driver_socket, deadline) => asked,
        };
        let trouble = match asked {
            Ok(name) => match SocketPath::new(&settings.registration_folder, &name) {
                Ok(socket) => {
                    info!(driver.name = name, "CSI driver name");
                    return Ok(Some((name, socket)));
                }
                Err(error @ NameError::TooLong { .. }) => return Err(error.into()),
                Err(error @ NameError::Unfit { .. }) => error.to_string(),
            },
            Err(error) => {
                if matches!(error, crate::grpc::connect::CallError::Deadline { .. }) {
                    deadline = deadlines.pause();
                }
                chain(&error)
            }
        };
        if quiet.begin_or_repeat(&trouble, Instant::now()) {
            warn!(
                socket.path = %settings.driver_socket.display(),
                error = trouble,
                waited = ?began.elapsed(),
                "Still connecting: the driver does not give its name yet; asking again"
            );
        }
        status.send_if_modified(|status| {
            let changed = status.trouble.as_ref() != Some(&trouble);
            status.trouble = Some(trouble);
            changed
        });
        tokio::select! {
            () = stop.cancelled() => return Ok(None),
            () = tokio::time::sleep(pauses.pause()) => {}
        }
    }
}
