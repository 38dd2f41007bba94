//! What is watched: the probes and how their words add up.

use crate::policy::gpu::GpuRule;
pub use crate::policy::group::Require;
use crate::policy::health_file::HealthFileLimits;
use crate::policy::kernel_log::{LogRule, Since};
use crate::policy::nvme::NvmeRule;
use crate::policy::nvme_selector::Selector;
use crate::policy::probe_verdict::Thresholds;
use crate::policy::rdma::rules::RdmaRules;
use crate::policy::xid::XidTable;
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
    /// `nvme`: controllers by what the kernel says of them, and their SMART logs.
    Nvme(NvmeSettings),
    /// `gpu`: GPUs by PCI, the kernel log and `nvidia-smi`.
    Gpu(GpuSettings),
    /// `kmsg`: what the kernel log says of the hardware.
    Kmsg(KmsgSettings),
}

/// Settings of an `rdma` probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaSettings {
    /// Where the host's trees are mounted.
    pub host: HostTree,
    /// What is asserted.
    pub rules: RdmaRules,
}

/// Settings of an `nvme` probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeSettings {
    /// Where the host's trees are mounted.
    pub host: HostTree,
    /// Which controllers; empty is every one.
    pub devices: Vec<Selector>,
    /// Which of them not.
    pub exclude: Vec<Selector>,
    /// Whether each drive is asked for its SMART log.
    pub smart: bool,
    /// What is asserted.
    pub rule: NvmeRule,
}

/// Settings of a `gpu` probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSettings {
    /// Where the host's trees are mounted.
    pub host: HostTree,
    /// Which GPUs.
    pub select: GpuSelect,
    /// What is asserted.
    pub rule: GpuRule,
    /// `nvidia-smi`, if it is run.
    pub tool: Option<SmiTool>,
    /// Xid messages, if the kernel log is read.
    pub xid: Option<XidSettings>,
}

/// Which GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSelect {
    /// By PCI's number.
    pub vendors: Vec<u16>,
    /// Addresses and patterns of them; empty is every one.
    pub devices: Vec<String>,
    /// Which of them not.
    pub exclude: Vec<String>,
}

/// `nvidia-smi`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SmiTool {
    /// Without the query.
    pub command: Command,
    /// Whether to ask what the driver wants done.
    pub recovery_action: bool,
}

/// How Xid messages are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XidSettings {
    /// What each number means.
    pub table: XidTable,
    /// How long one holds.
    pub holds: Option<Duration>,
    /// From where on.
    pub since: Since,
}

/// Settings of a `kmsg` probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KmsgSettings {
    /// Where the host's trees are mounted.
    pub host: HostTree,
    /// From where on.
    pub since: Since,
    /// The first that matches a line decides.
    pub rules: Vec<LogRule>,
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
            Self::Nvme(_) => "nvme",
            Self::Gpu(_) => "gpu",
            Self::Kmsg(_) => "kmsg",
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
