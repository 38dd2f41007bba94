//! `csi-warden [run]`: every flag of the registrar it replaces, and its own.

use super::given::{Given, GivenError};
use super::go_flags::parse_bool;
use super::logging::LoggingFlags;
use super::{COMMANDS, fail, print, usage};
use crate::config::go_duration::GoDuration;
use crate::config::go_integer::integer;
use crate::config::paths::{state_folder, unix_path};
use crate::config::probes::HostTree;
use crate::config::settings::Typed;
use crate::probe::exec::wait_for_starts;
use crate::{daemon, shutdown, telemetry};
use anyhow::Context;
use clap::{CommandFactory, Parser};
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tracing::{info, warn};

/// Registers a CSI driver with the kubelet, and withdraws it while the node's storage hardware is gone.
///
/// Takes every flag of csi-node-driver-registrar, in both dash styles, and takes its place; docs/differences.md tells where it
/// does better on purpose. Without a health source it watches nothing.
#[derive(Debug, Parser)]
#[command(name = "csi-warden", args_override_self = true, disable_version_flag = true, after_help = COMMANDS, max_term_width = 110)]
pub struct RunFlags {
    /// The driver's socket: a path, or unix:///path
    #[arg(long, value_name = "PATH", default_value = "/run/csi/socket", help_heading = "Registration")]
    csi_address: String,
    /// The driver socket's path on the host, as the kubelet is to dial it (required)
    #[arg(long, value_name = "PATH", default_value = "", hide_default_value = true, help_heading = "Registration")]
    kubelet_registration_path: String,
    /// Folder of the registration socket: plugins_registry in the kubelet's root folder
    #[arg(long, value_name = "DIR", default_value = "/registration", help_heading = "Registration")]
    plugin_registration_path: PathBuf,
    /// First deadline of asking the driver's name (doubled up to 30s when it is too short), and the deadline of /healthz
    #[arg(long, value_name = "DURATION", default_value = "1s", help_heading = "Registration")]
    timeout: GoDuration,
    /// Deprecated, without effect: the driver is waited for without end
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "0",
        hide_default_value = true,
        help_heading = "Registration"
    )]
    connection_timeout: GoDuration,
    /// Deprecated: `kubelet-registration-probe` exits 0 at once; anything else registers
    #[arg(long, value_name = "MODE", default_value = "", hide_default_value = true, help_heading = "Registration")]
    mode: String,

    /// YAML file with probes, groups, and any of these flags by its camelCase name; a flag given here wins. See docs/config.md
    #[arg(long, value_name = "FILE", help_heading = "Registration")]
    pub(super) config: Option<PathBuf>,

    /// Listen address of /healthz, /readyz, /registered and /metrics, such as :9809 or 127.0.0.1:9809; empty: none
    #[arg(long, value_name = "ADDR", default_value = "", hide_default_value = true, help_heading = "HTTP")]
    http_endpoint: String,
    /// Deprecated: as --http-endpoint=:PORT; 0: none
    #[arg(long, value_name = "PORT", default_value = "0", allow_negative_numbers = true, value_parser = integer::<i64>, help_heading = "HTTP")]
    health_port: i64,
    /// Serve /debug/pprof/ on the HTTP address: what a Rust program can tell, and why not the rest
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set, help_heading = "HTTP")]
    enable_pprof: bool,

    /// Listen address of livenessprobe's /healthz, such as :9808, for the driver's container: is the driver ready? Empty: none
    #[arg(long, value_name = "ADDR", default_value = "", hide_default_value = true, help_heading = "Liveness")]
    liveness_endpoint: String,
    /// The driver's Probe must be answered within this, connecting included
    #[arg(long, value_name = "DURATION", default_value = "3s", help_heading = "Liveness")]
    probe_timeout: GoDuration,
    /// The driver is asked this often, however many ask for /healthz
    #[arg(long, value_name = "DURATION", default_value = "10s", help_heading = "Liveness")]
    probe_interval: GoDuration,

    /// File that says OK or ERROR, written by whoever watches the hardware. Mount its folder, not the file
    #[arg(long, value_name = "PATH", help_heading = "Health")]
    health_file: Option<PathBuf>,
    /// The file is looked at this often, and at once when it changes
    #[arg(long, value_name = "DURATION", default_value = "30s", help_heading = "Health")]
    health_interval: GoDuration,
    /// An older file says nothing: the verdict is held
    #[arg(long, value_name = "DURATION", default_value = "90s", help_heading = "Health")]
    health_max_age: GoDuration,
    /// The writer of a file this old is dead, which is a failure; 0: never
    #[arg(long, value_name = "DURATION", default_value = "10m", help_heading = "Health")]
    health_dead_after: GoDuration,
    /// Failures in a row that make the driver unhealthy
    #[arg(long, value_name = "N", default_value = "2", value_parser = integer::<u32>, help_heading = "Health")]
    failure_threshold: u32,
    /// Successes in a row that make it healthy again
    #[arg(long, value_name = "N", default_value = "2", value_parser = integer::<u32>, help_heading = "Health")]
    success_threshold: u32,
    /// A failure is looked at again after this; writes of the same word within it count as one
    #[arg(long, value_name = "DURATION", default_value = "1s", help_heading = "Health")]
    confirm_interval: GoDuration,
    /// All must be well this long before the driver is healthy again; doubles with each outage in the flap window
    #[arg(long, value_name = "DURATION", default_value = "30s", help_heading = "Health")]
    recovery_hold: GoDuration,
    /// What the doubling stops at
    #[arg(long, value_name = "DURATION", default_value = "10m", help_heading = "Health")]
    max_recovery_hold: GoDuration,
    /// Outages that began within this time count as flaps
    #[arg(long, value_name = "DURATION", default_value = "10m", help_heading = "Health")]
    flap_window: GoDuration,
    /// While nothing is known yet, the driver is registered after this
    #[arg(long, value_name = "DURATION", default_value = "10s", help_heading = "Health")]
    start_grace: GoDuration,
    /// What an unhealthy verdict does: observe, fence, deregister, fence-then-deregister [default: fence-then-deregister with the proxy, else deregister]
    #[arg(long, value_name = "REACTION", help_heading = "Health")]
    on_unhealthy: Option<String>,
    /// fence-then-deregister: unhealthy for this long without a break, a driver without volumes is withdrawn
    #[arg(long, value_name = "DURATION", default_value = "15s", help_heading = "Health")]
    deregister_after: GoDuration,
    /// fence-then-deregister: unhealthy for this long, the driver is withdrawn even with volumes in use; 0: never
    #[arg(long, value_name = "DURATION", default_value = "0", help_heading = "Health")]
    drain_timeout: GoDuration,
    /// Folder of the state file, which keeps the verdict over restarts [default: the driver socket's folder]
    #[arg(long, value_name = "DIR", help_heading = "Health")]
    state_dir: Option<PathBuf>,
    /// The socket that `csi-warden status` asks [default: DRIVER-warden-status.sock in the state folder]
    #[arg(long, value_name = "PATH", help_heading = "Health")]
    status_socket: Option<PathBuf>,
    /// Where the host's /sys is mounted, for probes of hardware
    #[arg(long, value_name = "DIR", default_value = "/sys", help_heading = "Health")]
    sysfs_root: PathBuf,
    /// Where the host's /dev is mounted, for probes of hardware
    #[arg(long, value_name = "DIR", default_value = "/dev", help_heading = "Health")]
    dev_root: PathBuf,
    /// Where the host's /proc is mounted; tells this boot from the last one, and probes of hardware look there
    #[arg(long, value_name = "DIR", default_value = "/proc", help_heading = "Health")]
    proc_root: PathBuf,

    /// Whether calls pass through us, so that a fence can refuse new work: auto (with a health source), on, off
    #[arg(long, value_name = "MODE", default_value = "auto", help_heading = "Proxy")]
    proxy: String,
    /// The socket that the kubelet dials, in the driver socket's folder [default: DRIVER-warden.sock beside the driver socket]
    #[arg(long, value_name = "PATH", help_heading = "Proxy")]
    proxy_socket: Option<PathBuf>,
    /// What refuses stage and publish: auto (final if nothing of the volume can be here), failed-precondition, unavailable
    #[arg(long, value_name = "CODE", default_value = "auto", help_heading = "Proxy")]
    refusal_code: String,
    /// Users who may call through the proxy, by number
    #[arg(long, value_name = "UIDS", default_value = "0", value_delimiter = ',', help_heading = "Proxy")]
    allowed_uids: Vec<u32>,
    /// A topology segment for NodeGetInfo's answer; may be repeated. The driver's own values win
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', help_heading = "Proxy")]
    topology: Vec<String>,
    /// File of such segments: lines of key=value, or a YAML map. Where --topology names the key, that counts
    #[arg(long, value_name = "FILE", help_heading = "Proxy")]
    topology_file: Option<PathBuf>,
    /// While fenced, answer NodeGetInfo with a limit of one volume, so that the scheduler places no second one
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set, help_heading = "Proxy")]
    fence_max_volumes: bool,

    #[command(flatten)]
    pub(super) logging: LoggingFlags,
    /// Print the version
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set, hide_default_value = true)]
    pub(super) version: bool,
}

/// Runs the daemon until it is told to stop. Exit codes as the replaced registrar's: 0 good, 1 any error, 2 a flag.
pub fn main(program: &OsStr, arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let given = match Given::read(RunFlags::command(), arguments) {
        Ok(given) => given,
        Err(GivenError::Usage(error)) => return usage(&error),
        Err(GivenError::File(error)) => return fail(&error.into()),
    };
    match run(program, &given) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn run(program: &OsStr, given: &Given) -> anyhow::Result<()> {
    let flags = &given.flags;
    let log = flags.logging.settings()?;
    if flags.version {
        print(&format!("{} {}", program.to_string_lossy(), env!("CARGO_PKG_VERSION")));
        return Ok(());
    }
    if flags.mode == "kubelet-registration-probe" && !flags.kubelet_registration_path.is_empty() {
        return Ok(());
    }
    let settings = given.settings().map_err(|problems| anyhow::anyhow!(problems.join("\n")))?;
    telemetry::init(log);
    info!(version = env!("CARGO_PKG_VERSION"), "Version");
    info!(mode = flags.mode, "Running node-driver-registrar");
    for warning in &settings.warnings {
        warn!("{warning}");
    }
    if !flags.connection_timeout.0.is_zero() {
        warn!("--connection-timeout is deprecated and has no effect");
    }
    flags.logging.tell_maxprocs();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the runtime")?;
    let result = runtime.block_on(async { daemon::run(settings, shutdown::on_signal()?).await });
    // A lane may sit in the kernel for ever; the process does not wait for it.
    runtime.shutdown_timeout(Duration::ZERO);
    wait_for_starts();
    result
}

impl RunFlags {
    /// The status socket, if these flags name it.
    pub fn named_status_socket(&self) -> Option<PathBuf> {
        self.status_socket.clone()
    }

    /// Where the state of an agent with these flags lies.
    pub fn state_folder(&self) -> PathBuf {
        let driver_socket = unix_path(&self.csi_address).unwrap_or_default();
        state_folder(self.state_dir.as_deref(), &driver_socket)
    }

    /// `--kubelet-registration-path`, if it is given.
    pub fn is_told(&self) -> bool {
        !self.kubelet_registration_path.is_empty()
    }

    /// `--sysfs-root`, `--dev-root`, `--proc-root`.
    pub fn host(&self) -> HostTree {
        HostTree { sysfs: self.sysfs_root.clone(), dev: self.dev_root.clone(), proc: self.proc_root.clone() }
    }

    /// The paths of the registration, without a look at the machine; `None` where they cannot be.
    pub fn registration_paths(&self) -> Option<(PathBuf, PathBuf, PathBuf)> {
        let driver = unix_path(&self.csi_address)?;
        let told = unix_path(&self.kubelet_registration_path)?;
        Some((driver, told, self.plugin_registration_path.clone()))
    }

    /// As the settings want them; `typed_by_hand` tells of a flag whether the command line has it.
    pub(super) fn typed(&self, typed_by_hand: impl Fn(&str) -> bool) -> Typed {
        let health_only = [
            ("health_interval", "--health-interval"),
            ("health_max_age", "--health-max-age"),
            ("health_dead_after", "--health-dead-after"),
            ("failure_threshold", "--failure-threshold"),
            ("success_threshold", "--success-threshold"),
            ("confirm_interval", "--confirm-interval"),
            ("recovery_hold", "--recovery-hold"),
            ("max_recovery_hold", "--max-recovery-hold"),
            ("flap_window", "--flap-window"),
            ("start_grace", "--start-grace"),
            ("on_unhealthy", "--on-unhealthy"),
            ("deregister_after", "--deregister-after"),
            ("drain_timeout", "--drain-timeout"),
            ("state_dir", "--state-dir"),
            ("status_socket", "--status-socket"),
            ("sysfs_root", "--sysfs-root"),
            ("dev_root", "--dev-root"),
            ("proc_root", "--proc-root"),
        ];
        let proxy_only = [
            ("proxy_socket", "--proxy-socket"),
            ("refusal_code", "--refusal-code"),
            ("allowed_uids", "--allowed-uids"),
            ("topology", "--topology"),
            ("topology_file", "--topology-file"),
            ("fence_max_volumes", "--fence-max-volumes"),
        ];
        let drain_only = [("deregister_after", "--deregister-after"), ("drain_timeout", "--drain-timeout")];
        let liveness_only = [("probe_timeout", "--probe-timeout"), ("probe_interval", "--probe-interval")];
        let typed_of = |flags: &[(&str, &'static str)]| {
            flags.iter().filter(|(id, _)| typed_by_hand(id)).map(|(_, flag)| *flag).collect::<Vec<_>>()
        };
        Typed {
            csi_address: self.csi_address.clone(),
            kubelet_registration_path: self.kubelet_registration_path.clone(),
            plugin_registration_path: self.plugin_registration_path.clone(),
            timeout: self.timeout.0,
            http_endpoint: self.http_endpoint.clone(),
            health_port: self.health_port,
            enable_pprof: self.enable_pprof,
            health_file: self.health_file.clone(),
            health_interval: self.health_interval.0,
            health_max_age: self.health_max_age.0,
            health_dead_after: self.health_dead_after.0,
            failure_threshold: self.failure_threshold,
            success_threshold: self.success_threshold,
            confirm_interval: self.confirm_interval.0,
            recovery_hold: self.recovery_hold.0,
            max_recovery_hold: self.max_recovery_hold.0,
            flap_window: self.flap_window.0,
            start_grace: self.start_grace.0,
            on_unhealthy: self.on_unhealthy.clone(),
            deregister_after: self.deregister_after.0,
            drain_timeout: self.drain_timeout.0,
            proxy: self.proxy.clone(),
            proxy_socket: self.proxy_socket.clone(),
            refusal_code: self.refusal_code.clone(),
            allowed_uids: self.allowed_uids.clone(),
            topology: self.topology.clone(),
            topology_file: self.topology_file.clone(),
            fence_max_volumes: self.fence_max_volumes,
            proxy_only_flags: typed_of(&proxy_only),
            drain_only_flags: typed_of(&drain_only),
            state_dir: self.state_dir.clone(),
            status_socket: self.status_socket.clone(),
            sysfs_root: self.sysfs_root.clone(),
            dev_root: self.dev_root.clone(),
            proc_root: self.proc_root.clone(),
            config: None,
            liveness_endpoint: self.liveness_endpoint.clone(),
            probe_timeout: self.probe_timeout.0,
            probe_interval: self.probe_interval.0,
            liveness_only_flags: typed_of(&liveness_only),
            health_only_flags: typed_of(&health_only),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_well_formed() {
        RunFlags::command().debug_assert();
    }
}
