//! Starts the parts, and stops them together.

mod fence;
mod health;
mod overrides;
mod probes;
mod proxied;
mod reload;
pub(crate) mod rules;

use crate::config::proxy::ProxySettings;
use crate::config::settings::{Health, LivenessSettings, Settings};
use crate::config::watched::Watched;
use crate::driver_name::{Unfit, discover};
use crate::driver_ready::DriverReady;
use crate::http::{self, Diagnostics, LivenessEndpoints};
use crate::known_devices::KnownDevices;
use crate::known_ports::KnownPorts;
use crate::liveness::{Asked, Liveness};
use crate::metrics::Metrics;
use crate::override_file::OverrideFile;
use crate::parts::Parts;
use crate::policy::admission::Admission;
use crate::policy::fence_override::Forced;
use crate::policy::reaction::{Reaction, Rules};
use crate::policy::registration::RegistrationTimings;
use crate::policy::volumes::{Completeness, Gap, VolumeTable};
use crate::proxy::gate::{Gate, GateRules};
use crate::proxy::volumes::Volumes;
use crate::registration::socket::{NameError, SocketPath};
use crate::registration::{self, Phase, RegistrationPart, Status};
use crate::state_file::StateFile;
use crate::status::server::Sources;
use crate::status::{self as status_socket};
use anyhow::{Context, anyhow};
use health::{HealthPart, Heard, Kept};
use overrides::Overrides;
use probes::Known;
use proxied::{Proxied, Way};
use rules::asks;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

/// Connections in flight get this long after the registration socket is unlinked.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Calls in flight get this long to finish: a pod has 30 s by default before it is killed.
const CALL_GRACE: Duration = Duration::from_secs(20);

/// The last word on disk gets this long.
const RECORD_GRACE: Duration = Duration::from_secs(5);

/// What ends after the rest, one after the other: the proxy's socket, once the registration is withdrawn; its calls; what keeps a record
/// of them.
struct Late {
    refuse_calls: CancellationToken,
    calls: Parts,
    close_records: CancellationToken,
    records: Parts,
}

impl Late {
    fn new(parts: &Parts) -> Self {
        Self {
            refuse_calls: CancellationToken::new(),
            calls: parts.apart(),
            close_records: CancellationToken::new(),
            records: parts.apart(),
        }
    }

    async fn finish(self) {
        self.refuse_calls.cancel();
        if !self.calls.finished(CALL_GRACE).await {
            warn!("calls are still in flight after {CALL_GRACE:?}; they break now");
        }
        self.close_records.cancel();
        self.records.finished(RECORD_GRACE).await;
    }
}

/// Runs until `stop`, or until a part fails.
///
/// # Errors
/// What made it impossible to begin or to go on, naming the flag or the path.
pub async fn run(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    allow_descriptors();
    let (status, statuses) = watch::channel(Status::waiting(Instant::now().into_std()));
    let parts = Parts::new(stop);
    let late = Late::new(&parts);
    let result = start(&settings, &parts, &late, status, statuses).await;
    if result.is_err() {
        parts.stop().cancel();
    }
    let stopped = parts.stopped(STOP_GRACE).await;
    late.finish().await;
    result?;
    stopped.map_err(|(part, error)| anyhow!(error).context(format!("the {part} failed")))
}

/// As many descriptors as we may have, as Go programs do: each call of the kubelet's is a connection.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        debug!(error = &error as &dyn Error, "the limit of open files stays as it is");
    }
}

async fn start(
    settings: &Settings,
    parts: &Parts,
    late: &Late,
    status: watch::Sender<Status>,
    statuses: watch::Receiver<Status>,
) -> anyhow::Result<()> {
    let metrics = Metrics::new();
    let ready = DriverReady::new(metrics.clone());
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
        serve_liveness(liveness, &settings.driver_socket, &metrics, &ready, parts)?;
    }
    let Some((driver_name, socket)) = driver_name(settings, &metrics, parts.stop(), &status).await? else {
        return Ok(());
    };
    let node = proxied::Node {
        driver_name: &driver_name,
        driver_socket: &settings.driver_socket,
        endpoint: &settings.endpoint,
        state_folder: &settings.state_folder,
        proc_root: &settings.proc_root,
        timeout: settings.timeout,
    };
    let (proxied, bypass) = match proxied::choose(settings.proxy.as_ref(), &node).await? {
        Way::Through(proxied) => (Some(proxied), false),
        Way::Around => (None, false),
        Way::Bypass => (None, true),
    };
    metrics.set_bypass(bypass);
    let volumes = match &proxied {
        Some(proxied) => proxied.volumes.clone(),
        None => Volumes::new(VolumeTable::new(Completeness::Incomplete(Gap::NotFollowed))),
    };
    let endpoint = proxied.as_ref().map_or_else(|| settings.endpoint.clone(), |proxied| proxied.endpoint.clone());
    let topology = match (&settings.proxy, &proxied) {
        (Some(proxy), Some(_)) => proxy.topology.clone(),
        (Some(_) | None, _) => BTreeMap::new(),
    };
    let (orders, ordered) = mpsc::channel(1);
    let fence = if settings.health.is_some() || proxied.is_some() {
        let health = settings.health.clone().unwrap_or_else(Health::nobody);
        let rules = reaction_rules(settings, &health, proxied.is_some(), bypass);
        let watched = Watched { probes: health.probes.clone(), groups: health.groups.clone(), warnings: Vec::new() };
        let state = StateFile::new(&settings.state_folder, &driver_name, asks(&watched), &settings.proc_root);
        let (changes, changed) = mpsc::channel(1);
        let heard = Heard { changes: changed, volumes: volumes.clone(), orders: ordered };
        let known = known(settings, &driver_name);
        let word = OverrideFile::new(&settings.state_folder, &driver_name, &settings.proc_root);
        // Without a fence there is none to put up, and what is written waits for a run that has one.
        let forced = (proxied.is_some() || bypass).then(|| Overrides::load(&word, Instant::now())).flatten();
        let forced = forced.filter(|word| proxied.is_some() || word.forced == Forced::Off);
        let overrides = Overrides::new(proxied.is_some().then_some(word));
        let kept = Kept { state, known, overrides, forced };
        let told = HealthPart::start(&health, rules, kept, heard, metrics.clone(), ready, parts);
        if let Some(source) = &settings.source {
            parts.spawn("settings", reload::run(source.clone(), watched, changes, parts.clone()));
        }
        let path = settings
            .status_socket
            .clone()
            .unwrap_or_else(|| settings.state_folder.join(format!("{driver_name}{}", status_socket::server::SUFFIX)));
        let sources = Sources {
            status: status.subscribe(),
            health: Some(told.view.clone()),
            volumes: proxied.as_ref().map(|proxied| proxied.volumes.clone()),
            fence: told.fence.clone(),
            orders: proxied.is_some().then_some(orders),
            bypass,
        };
        let taken = path == settings.driver_socket
            || proxied::same_file(&path, &settings.driver_socket)
            || proxied.as_ref().is_some_and(|proxied| proxied::same_file(&path, proxied.proxy.path()));
        if taken {
            warn!(socket.path = %path.display(), "no status socket: --status-socket is the driver's socket, or the proxy's");
        } else {
            status_socket::server::serve(&path, sources, parts);
        }
        if rules.reaction != Reaction::Observe {
            let name = Some(driver_name.clone());
            status.send_modify(|status| (status.phase, status.driver_name) = (Phase::WaitingForHealth, name));
        }
        Some(told)
    } else {
        None
    };
    let admission = match &fence {
        Some(told) => told.admission.clone(),
        // Nobody to ask: exactly the registrar that this replaces.
        None => watch::channel(Admission::Show).1,
    };
    if let (Some(proxied), Some(told), Some(proxy)) = (proxied, fence, &settings.proxy) {
        let Proxied { proxy: listening, volumes, file, crashes, .. } = *proxied;
        let gate = Gate::new(&driver_name, gate_rules(proxy), told.fence, volumes.clone(), metrics.clone());
        listening.serve(gate, metrics.clone(), parts, &late.calls, late.refuse_calls.clone());
        let close = late.close_records.clone();
        let all = parts.clone();
        late.records.spawn("record of volumes", async move {
            volumes.keep(file, crashes, close, || all.has_failed()).await;
            Ok(())
        });
    }
    let (part, calls) = RegistrationPart::new(
        registration::Settings {
            driver_socket: settings.driver_socket.clone(),
            driver_name,
            endpoint,
            topology,
            socket,
            timings: RegistrationTimings::default(),
        },
        parts,
        status,
        metrics,
    );
    // First the kubelet is told, then its calls are refused.
    let then = late.refuse_calls.clone().drop_guard();
    parts.spawn("registration", async move {
        let _then = then;
        part.run(calls, admission).await
    });
    Ok(())
}

fn gate_rules(settings: &ProxySettings) -> GateRules {
    GateRules {
        refusal_code: settings.refusal_code,
        topology: settings.topology.clone(),
        // Zero would mean "no limit" to the kubelet.
        fence_max_volumes: settings.fence_max_volumes.then_some(1),
    }
}

/// What unhealthy does on the way that was chosen.
fn reaction_rules(settings: &Settings, health: &Health, proxied: bool, bypass: bool) -> Rules {
    let left_to_us = settings.proxy.as_ref().is_some_and(|proxy| proxy.reaction_is_default);
    let wanted = health.rules.reaction;
    // What needs no proxy goes on: a crash loop must not show a driver that was withdrawn.
    let reaction = if bypass && wanted.fences() {
        Reaction::Observe
    } else if left_to_us && !proxied && !bypass {
        Reaction::Deregister
    } else {
        wanted
    };
    Rules { reaction, ..health.rules }
}

/// What was good on this node before.
fn known(settings: &Settings, driver: &str) -> Known {
    let (folder, proc) = (&settings.state_folder, &settings.proc_root);
    let ports = KnownPorts::load(folder, driver).unwrap_or_else(|error| {
        warn!(error = &error as &dyn Error, "which ports were good before is lost; beginning afresh");
        KnownPorts::afresh(folder, driver)
    });
    let devices = KnownDevices::load(folder, driver, proc).unwrap_or_else(|error| {
        warn!(error = &error as &dyn Error, "which devices were good before is lost; beginning afresh");
        KnownDevices::afresh(folder, driver, proc)
    });
    Known { ports, devices }
}

/// livenessprobe's duty, from before the driver is there: nothing that waits may come first.
fn serve_liveness(
    settings: &LivenessSettings,
    driver_socket: &Path,
    metrics: &Metrics,
    ready: &DriverReady,
    parts: &Parts,
) -> anyhow::Result<()> {
    let address = &settings.address;
    let listener = address.listen().with_context(|| format!("cannot listen on {address} (--liveness-endpoint)"))?;
    info!(address = %address, "Starting liveness server");
    let asked = Asked { driver_socket: driver_socket.to_owned(), timeout: settings.timeout, ready: ready.clone() };
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
