//! `csi-warden livenessprobe`: every flag of the livenessprobe it replaces, and `--probe-interval`.

use super::go_flags::normalise;
use super::logging::LoggingFlags;
use super::{fail, usage};
use crate::config::go_duration::GoDuration;
use crate::config::listen::ListenAddress;
use crate::config::paths::driver_socket;
use crate::config::settings::address;
use crate::driver_name::{Unfit, discover};
use crate::driver_ready::DriverReady;
use crate::http::{self, LivenessEndpoints};
use crate::liveness::{Asked, Liveness};
use crate::metrics::Metrics;
use crate::parts::Parts;
use crate::{shutdown, telemetry};
use anyhow::{Context, anyhow, ensure};
use clap::{CommandFactory, FromArgMatches, Parser};
use std::convert::Infallible;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::info;

/// Connections in flight get this long at the end. They only ask how the driver is.
const STOP_GRACE: Duration = Duration::from_millis(500);

const HEALTHZ: &str = "/healthz";
const DEFAULT_PORT: &str = "9808";

/// Answers the kubelet's liveness probe of a CSI driver's container: asks the driver's own Identity.Probe.
///
/// Takes every flag of livenessprobe, in both dash styles, and takes its place. It listens once the driver has given its name, which
/// it waits for without end.
#[derive(Debug, Parser)]
#[command(name = "csi-warden livenessprobe", args_override_self = true, max_term_width = 110)]
pub struct LivenessprobeFlags {
    /// The driver's socket: a path, or unix:///path
    #[arg(long, value_name = "PATH", default_value = "/run/csi/socket")]
    csi_address: String,
    /// The driver's Probe must be answered within this, connecting included
    #[arg(long, value_name = "DURATION", default_value = "3s")]
    probe_timeout: GoDuration,
    /// Ask the driver this often and answer with its last word; 0: ask when asked
    #[arg(long, value_name = "DURATION", default_value = "0")]
    probe_interval: GoDuration,
    /// Listen address of /healthz and the metrics, such as :9808 or 127.0.0.1:9808; empty: see --health-port
    #[arg(long, value_name = "ADDR", default_value = "", hide_default_value = true, help_heading = "HTTP")]
    http_endpoint: String,
    /// Deprecated: port of /healthz, without metrics, when --http-endpoint is not set
    #[arg(long, value_name = "PORT", default_value = DEFAULT_PORT, help_heading = "HTTP")]
    health_port: String,
    /// Deprecated: listen address of the metrics, apart from /healthz
    #[arg(long, value_name = "ADDR", default_value = "", hide_default_value = true, help_heading = "HTTP")]
    metrics_address: String,
    /// Path of the metrics
    #[arg(long, value_name = "PATH", default_value = "/metrics", help_heading = "HTTP")]
    metrics_path: String,
    #[command(flatten)]
    logging: LoggingFlags,
}

/// Runs until it is told to stop. Exit codes: 0 good, 1 any error, 2 a flag.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = LivenessprobeFlags::command();
    // As in Go, the first positional ends the flags, and the rest is not looked at.
    let flags = normalise(&command, arguments).flags;
    let matches =
        command.try_get_matches_from(std::iter::once(OsString::from("csi-warden livenessprobe")).chain(flags));
    let flags = match matches.and_then(|matches| LivenessprobeFlags::from_arg_matches(&matches)) {
        Ok(flags) => flags,
        Err(error) => return usage(&error),
    };
    match run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn run(flags: &LivenessprobeFlags) -> anyhow::Result<()> {
    let log = flags.logging.settings()?;
    let settings = flags.settings()?;
    telemetry::init(log);
    flags.logging.tell_maxprocs();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(async { serve(settings, shutdown::on_signal()?).await });
    // Resolving a name may sit on a thread of its own; the process does not wait for it.
    runtime.shutdown_timeout(Duration::ZERO);
    result
}

/// The flags, checked.
#[derive(Debug)]
struct Settings {
    driver_socket: PathBuf,
    timeout: Duration,
    /// `None`: asked when we are asked.
    interval: Option<Duration>,
    health: ListenAddress,
    metrics: MetricsPlace,
    metrics_path: String,
}

#[derive(Debug)]
enum MetricsPlace {
    Nowhere,
    BesideHealth,
    At(ListenAddress),
}

impl LivenessprobeFlags {
    fn settings(&self) -> anyhow::Result<Settings> {
        let with_endpoint = !self.http_endpoint.is_empty();
        ensure!(
            !with_endpoint || self.health_port == DEFAULT_PORT,
            "only one of --health-port and --http-endpoint can be explicitly set"
        );
        ensure!(
            !with_endpoint || self.metrics_address.is_empty(),
            "only one of --metrics-address and --http-endpoint can be explicitly set"
        );
        ensure!(!self.probe_timeout.0.is_zero(), "--probe-timeout must be above zero");
        let path = &self.metrics_path;
        ensure!(path.starts_with('/'), "--metrics-path={path:?} must begin with a slash");
        ensure!(path != HEALTHZ, "--metrics-path={path:?} is where the driver's health is");
        let (health, metrics) = match (self.http_endpoint.as_str(), self.metrics_address.as_str()) {
            ("", "") => (self.health_port()?, MetricsPlace::Nowhere),
            ("", metrics) => (self.health_port()?, MetricsPlace::At(address("--metrics-address", metrics)?)),
            (endpoint, _) => (address("--http-endpoint", endpoint)?, MetricsPlace::BesideHealth),
        };
        Ok(Settings {
            driver_socket: driver_socket(&self.csi_address)?,
            timeout: self.probe_timeout.0,
            interval: (!self.probe_interval.0.is_zero()).then_some(self.probe_interval.0),
            health,
            metrics,
            metrics_path: path.clone(),
        })
    }

    fn health_port(&self) -> anyhow::Result<ListenAddress> {
        Ok(address("--health-port", &format!(":{}", self.health_port))?)
    }
}

async fn serve(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    let parts = Parts::new(stop);
    let result = start(settings, &parts).await;
    if result.is_err() {
        parts.stop().cancel();
    }
    let stopped = parts.stopped(STOP_GRACE).await;
    result?;
    stopped.map_err(|(part, error)| anyhow!(error).context(format!("the {part} failed")))
}

async fn start(settings: Settings, parts: &Parts) -> anyhow::Result<()> {
    let metrics = Metrics::new();
    let fit = |name: String| match name.as_str() {
        "" => Err(Unfit::<Infallible>::ForNow("the driver gives an empty name".to_owned())),
        _ => Ok(name),
    };
    let socket = &settings.driver_socket;
    // As upstream: who asks before the driver is there is refused the connection.
    if discover(socket, settings.timeout, &metrics, parts.stop(), fit, drop).await?.is_none() {
        return Ok(());
    }
    let asked =
        Asked { driver_socket: socket.clone(), timeout: settings.timeout, ready: DriverReady::new(metrics.clone()) };
    let path = settings.metrics_path;
    let beside = match settings.metrics {
        MetricsPlace::Nowhere => None,
        MetricsPlace::BesideHealth => Some((path, metrics)),
        MetricsPlace::At(address) => {
            let listener =
                address.listen().with_context(|| format!("cannot listen on {address} (--metrics-address)"))?;
            info!(address = %address, "Separate metrics ServeMux listening");
            let endpoints = LivenessEndpoints { liveness: None, metrics: Some((path, metrics)) };
            http::serve(listener, endpoints, parts).context("cannot serve HTTP")?;
            None
        }
    };
    let address = settings.health;
    let listener =
        address.listen().with_context(|| format!("cannot listen on {address} (--http-endpoint or --health-port)"))?;
    info!(address = %address, "ServeMux listening");
    let liveness = match settings.interval {
        Some(interval) => Liveness::in_background(asked, interval, parts),
        None => Liveness::on_demand(asked, parts),
    };
    let endpoints = LivenessEndpoints { liveness: Some(liveness), metrics: beside };
    http::serve(listener, endpoints, parts).context("cannot serve HTTP")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_well_formed() {
        LivenessprobeFlags::command().debug_assert();
    }
}
