//! What is watched: the probes and how their words add up.

pub use crate::policy::group::Require;
use crate::policy::health_file::HealthFileLimits;
use crate::policy::probe_verdict::Thresholds;
use crate::policy::rdma::rules::RdmaRules;
use crate::probe::exec::Command;
use std::path::PathBuf;
use std::time::Duration;

/// One probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeSettings {
    /// Unique; shown everywhere.
    pub name: String,
    /// What it asks.
    pub kind: ProbeKind,
    /// From the start of one round to the start of the next.
    pub period: Duration,
    /// How long one round may take.
    pub timeout: Duration,
    /// A hard failure is looked at again after this.
    pub confirm_interval: Duration,
    /// Rounds in a row.
    pub thresholds: Thresholds,
    /// What its failures do.
    pub on_failure: OnFailure,
}

/// What a probe asks, with the settings of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeKind {
    /// `health-file`: a shared file says OK or ERROR.
    HealthFile {
        /// The file.
        path: PathBuf,
        /// Its ages.
        limits: HealthFileLimits,
    },
    /// `csi`: the driver's own Identity.Probe, on a fresh connection.
    Csi {
        /// The socket to ask; the driver's own unless set.
        socket: PathBuf,
    },
    /// `exec`: a command's exit code.
    Exec {
        /// The command.
        command: Command,
    },
    /// `rdma`: ports by what the kernel says of them.
    Rdma(RdmaSettings),
}

/// Settings of an `rdma` probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaSettings {
    /// Where the host's trees are mounted.
    pub host: HostTree,
    /// What is asserted.
    pub rules: RdmaRules,
}

/// `--sysfs-root`, `--dev-root`, `--proc-root`: where the host's trees are mounted. Probes of hardware look nowhere else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTree {
    /// The host's `/sys`.
    pub sysfs: PathBuf,
    /// The host's `/dev`.
    pub dev: PathBuf,
    /// The host's `/proc`.
    pub proc: PathBuf,
}

impl ProbeKind {
    /// The type's name, as in the config file.
    pub fn name(&self) -> &'static str {
        match self {
            Self::HealthFile { .. } => "health-file",
            Self::Csi { .. } => "csi",
            Self::Exec { .. } => "exec",
            Self::Rdma(_) => "rdma",
        }
    }
}

/// What a probe's failures do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// They make the driver unhealthy.
    Fail,
    /// They are told, and nothing more.
    Warn,
}

/// Probes of which not all need pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSettings {
    /// Unique among groups and probes.
    pub name: String,
    /// Its probes' names; each belongs to one group at most.
    pub probes: Vec<String>,
    /// How many must pass.
    pub require: Require,
}
