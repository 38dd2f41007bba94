//! The flags as typed, or as the file has them, before they are checked against each other.

use super::file::ConfigFile;
use clap::Command;
use std::path::PathBuf;
use std::time::Duration;

/// `--config`, read.
#[derive(Debug, Clone)]
pub struct TypedFile {
    /// What it says.
    pub file: ConfigFile,
    /// Flags on the command line, without dashes: there the file's word does not count.
    pub typed: Vec<String>,
    /// By which the file's flags are checked when it is read again.
    pub flags: fn() -> Command,
}

/// The flags as typed, or as the file has them, before they are checked against each other.
#[derive(Debug, Clone)]
pub struct Typed {
    /// `--csi-address`
    pub csi_address: String,
    /// `--kubelet-registration-path`
    pub kubelet_registration_path: String,
    /// `--plugin-registration-path`
    pub plugin_registration_path: PathBuf,
    /// `--timeout`
    pub timeout: Duration,
    /// `--http-endpoint`
    pub http_endpoint: String,
    /// `--health-port`
    pub health_port: i64,
    /// `--enable-pprof`
    pub enable_pprof: bool,
    /// `--health-file`
    pub health_file: Option<PathBuf>,
    /// `--health-interval`
    pub health_interval: Duration,
    /// `--health-max-age`
    pub health_max_age: Duration,
    /// `--health-dead-after`
    pub health_dead_after: Duration,
    /// `--failure-threshold`
    pub failure_threshold: u32,
    /// `--success-threshold`
    pub success_threshold: u32,
    /// `--confirm-interval`
    pub confirm_interval: Duration,
    /// `--recovery-hold`
    pub recovery_hold: Duration,
    /// `--max-recovery-hold`
    pub max_recovery_hold: Duration,
    /// `--flap-window`
    pub flap_window: Duration,
    /// `--start-grace`
    pub start_grace: Duration,
    /// `--on-unhealthy`
    pub on_unhealthy: Option<String>,
    /// `--deregister-after`
    pub deregister_after: Duration,
    /// `--drain-timeout`
    pub drain_timeout: Duration,
    /// `--proxy`
    pub proxy: String,
    /// `--proxy-socket`
    pub proxy_socket: Option<PathBuf>,
    /// `--refusal-code`
    pub refusal_code: String,
    /// `--allowed-uids`
    pub allowed_uids: Vec<u32>,
    /// `--topology`, as key=value
    pub topology: Vec<String>,
    /// `--topology-file`
    pub topology_file: Option<PathBuf>,
    /// `--fence-max-volumes`
    pub fence_max_volumes: bool,
    /// `--state-dir`
    pub state_dir: Option<PathBuf>,
    /// `--status-socket`
    pub status_socket: Option<PathBuf>,
    /// `--sysfs-root`
    pub sysfs_root: PathBuf,
    /// `--dev-root`
    pub dev_root: PathBuf,
    /// `--proc-root`
    pub proc_root: PathBuf,
    /// `--liveness-endpoint`
    pub liveness_endpoint: String,
    /// `--probe-timeout`
    pub probe_timeout: Duration,
    /// `--probe-interval`
    pub probe_interval: Duration,
    /// Flags that were typed and mean nothing without `--liveness-endpoint`.
    pub liveness_only_flags: Vec<&'static str>,
    /// Flags that were typed and mean nothing without the proxy.
    pub proxy_only_flags: Vec<&'static str>,
    /// Flags that were typed and mean nothing but for `fence-then-deregister`.
    pub drain_only_flags: Vec<&'static str>,
    /// Flags that were typed and mean nothing without a health source.
    pub health_only_flags: Vec<&'static str>,
    /// `--config`
    pub config: Option<TypedFile>,
}
