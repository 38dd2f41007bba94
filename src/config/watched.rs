//! What is watched once the defaults are filled in: the flag's own probe, and those of the file.

use super::file::{ConfigFile, Problem};
use super::go_duration::GoDuration;
use super::probes::{GroupSettings, HostTree, OnFailure, ProbeKind, ProbeSettings, RdmaSettings, Require};
use super::written::{WrittenKind, WrittenProbe};
use crate::policy::health_file::HealthFileLimits;
use crate::policy::probe_verdict::Thresholds;
use std::path::PathBuf;
use std::time::Duration;

/// The probe that `--health-file` makes.
pub const FLAG_PROBE: &str = "health-file";

/// A command or a call costs something; this is Kubernetes' own default.
pub const DEFAULT_PERIOD: Duration = Duration::from_secs(10);

/// Reading what the kernel knows costs next to nothing, and a cut cable should not go unseen for long.
pub const HARDWARE_PERIOD: Duration = Duration::from_secs(1);

/// A round that takes longer is no answer.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(3);

/// What probes get that do not say otherwise: the flags in force at the start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// `--csi-address`
    pub driver_socket: PathBuf,
    /// `--health-file`
    pub health_file: Option<PathBuf>,
    /// `--health-interval`
    pub health_interval: Duration,
    /// `--health-max-age`
    pub health_max_age: Duration,
    /// `--health-dead-after`; `None` is never.
    pub health_dead_after: Option<Duration>,
    /// `--failure-threshold`, `--success-threshold`
    pub thresholds: Thresholds,
    /// `--confirm-interval`
    pub confirm_interval: Duration,
    /// `--sysfs-root`, `--dev-root`, `--proc-root`
    pub host: HostTree,
}

/// Probes and groups, ready to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watched {
    /// In order: the flag's, then the file's.
    pub probes: Vec<ProbeSettings>,
    /// In the file's order.
    pub groups: Vec<GroupSettings>,
    /// What is odd but not wrong, for the log.
    pub warnings: Vec<String>,
}

impl Watched {
    /// Fills in the defaults.
    ///
    /// # Errors
    /// Every contradiction.
    pub fn new(defaults: &Defaults, file: Option<&ConfigFile>) -> Result<Self, Vec<Problem>> {
        let (mut watched, mut problems) =
            (Self { probes: Vec::new(), groups: Vec::new(), warnings: Vec::new() }, Vec::new());
        watched.probes.extend(defaults.flag_probe());
        let Some(file) = file else { return Ok(watched) };
        for (at, written) in file.probes.iter().enumerate() {
            let mut note = |line, field: &str, message| {
                let field = format!("probes[{at}].{field}");
                problems.push(Problem { path: file.path.clone(), line, field, message });
            };
            if written.name.value == FLAG_PROBE && defaults.health_file.is_some() {
                let message = format!("{FLAG_PROBE:?} is the name of the probe that --health-file makes: use another");
                note(written.name.line, "name", message);
            }
            let probe = defaults.fill_in(written, &mut note);
            // A type's own defaults are meant so.
            if probe.timeout > probe.period && (written.timeout.is_some() || written.period.is_some()) {
                watched.warnings.push(format!(
                    "{}:{}: probes[{at}]: timeout {} is above period {}; rounds never overlap, so a slow one delays the next",
                    file.path.display(),
                    written.timeout.as_ref().or(written.period.as_ref()).map_or(written.line, |written| written.line),
                    GoDuration(probe.timeout),
                    GoDuration(probe.period),
                ));
            }
            watched.probes.push(probe);
        }
        if !watched.probes.is_empty() && watched.probes.iter().all(|probe| probe.on_failure == OnFailure::Warn) {
            watched.warnings.push(format!(
                "{}: every probe has onFailure: warn, so nothing can make the driver unhealthy",
                file.path.display()
            ));
        }
        watched.groups = file
            .groups
            .iter()
            .map(|group| GroupSettings {
                name: group.name.value.clone(),
                probes: group.probes.value.clone(),
                require: group.require.as_ref().map_or(Require::All, |require| require.value),
            })
            .collect();
        if problems.is_empty() { Ok(watched) } else { Err(problems) }
    }
}

impl Defaults {
    fn flag_probe(&self) -> Option<ProbeSettings> {
        let path = self.health_file.clone()?;
        let limits = HealthFileLimits {
            period: self.health_interval,
            confirm_interval: self.confirm_interval,
            max_age: self.health_max_age,
            dead_after: self.health_dead_after,
        };
        Some(ProbeSettings {
            name: FLAG_PROBE.to_owned(),
            kind: ProbeKind::HealthFile { path, limits },
            period: self.health_interval,
            timeout: health_file_timeout(self.health_max_age),
            confirm_interval: self.confirm_interval,
            thresholds: self.thresholds,
            on_failure: OnFailure::Fail,
        })
    }

    fn fill_in(&self, written: &WrittenProbe, note: &mut impl FnMut(usize, &str, String)) -> ProbeSettings {
        let or =
            |set: &Option<super::fields::Written<Duration>>, default| set.as_ref().map_or(default, |set| set.value);
        let confirm_interval = or(&written.confirm_interval, self.confirm_interval);
        let (period, timeout, kind) = match &written.kind.value {
            WrittenKind::HealthFile { path, max_age, dead_after } => {
                let period = or(&written.period, self.health_interval);
                let max_age_set = max_age.as_ref();
                let max_age = or(max_age, self.health_max_age);
                let dead = match dead_after {
                    Some(set) => (!set.value.is_zero()).then_some(set.value),
                    None => self.health_dead_after,
                };
                if let Some(dead) = dead
                    && dead <= max_age
                {
                    let message = format!(
                        "{} must be longer than maxAge, which is {}; 0 is never",
                        GoDuration(dead),
                        GoDuration(max_age)
                    );
                    let line = dead_after.as_ref().or(max_age_set).map_or(written.line, |set| set.line);
                    note(line, "healthFile.deadAfter", message);
                }
                if let Some(timeout) = &written.timeout
                    && timeout.value >= max_age
                {
                    let message = format!(
                        "{} must be below healthFile.maxAge, which is {}: the file would be old before it is read",
                        GoDuration(timeout.value),
                        GoDuration(max_age)
                    );
                    note(timeout.line, "timeout", message);
                }
                let limits = HealthFileLimits { period, confirm_interval, max_age, dead_after: dead };
                let kind = ProbeKind::HealthFile { path: path.value.clone(), limits };
                (period, or(&written.timeout, health_file_timeout(max_age)), kind)
            }
            WrittenKind::Csi { socket } => {
                let socket = socket.as_ref().map_or_else(|| self.driver_socket.clone(), |socket| socket.value.clone());
                let kind = ProbeKind::Csi { socket };
                (or(&written.period, DEFAULT_PERIOD), or(&written.timeout, DEFAULT_TIMEOUT), kind)
            }
            WrittenKind::Exec { command, .. } => {
                let kind = ProbeKind::Exec { command: command.value.clone() };
                (or(&written.period, DEFAULT_PERIOD), or(&written.timeout, DEFAULT_TIMEOUT), kind)
            }
            WrittenKind::Nvme(nvme) => {
                let timeout = or(&written.timeout, DEFAULT_TIMEOUT);
                let settings = nvme.settings(&self.host, timeout);
                // A drive is asked less often than the kernel.
                let period = if settings.smart { DEFAULT_PERIOD } else { HARDWARE_PERIOD };
                (or(&written.period, period), timeout, ProbeKind::Nvme(settings))
            }
            WrittenKind::Gpu(gpu) => {
                let timeout = or(&written.timeout, DEFAULT_TIMEOUT);
                (or(&written.period, DEFAULT_PERIOD), timeout, ProbeKind::Gpu(gpu.settings(&self.host, timeout)))
            }
            WrittenKind::Kmsg(kmsg) => {
                let kind = ProbeKind::Kmsg(kmsg.settings(&self.host));
                (or(&written.period, DEFAULT_PERIOD), or(&written.timeout, DEFAULT_TIMEOUT), kind)
            }
            WrittenKind::Rdma(written_rdma) => {
                let kind = ProbeKind::Rdma(RdmaSettings { host: self.host.clone(), rules: written_rdma.rules() });
                (or(&written.period, HARDWARE_PERIOD), or(&written.timeout, DEFAULT_TIMEOUT), kind)
            }
        };
        let threshold =
            |set: &Option<super::fields::Written<_>>, default| set.as_ref().map_or(default, |set| set.value);
        ProbeSettings {
            name: written.name.value.clone(),
            kind,
            period,
            timeout,
            confirm_interval,
            thresholds: Thresholds {
                failure: threshold(&written.failure_threshold, self.thresholds.failure),
                success: threshold(&written.success_threshold, self.thresholds.success),
            },
            on_failure: written.on_failure.as_ref().map_or(default_on_failure(&written.kind.value), |set| set.value),
        }
    }
}

/// A dead GPU makes no mount unsafe.
fn default_on_failure(kind: &WrittenKind) -> OnFailure {
    match kind {
        WrittenKind::Gpu(_) => OnFailure::Warn,
        WrittenKind::HealthFile { .. }
        | WrittenKind::Csi { .. }
        | WrittenKind::Exec { .. }
        | WrittenKind::Rdma(_)
        | WrittenKind::Nvme(_)
        | WrittenKind::Kmsg(_) => OnFailure::Fail,
    }
}

/// One look may take this long, and never longer than half the file's maximal age.
fn health_file_timeout(max_age: Duration) -> Duration {
    DEFAULT_TIMEOUT.min(max_age / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::run::RunFlags;
    use crate::config::file::understand;
    use clap::CommandFactory;
    use std::num::NonZeroU32;
    use std::path::Path;

    const SECOND: Duration = Duration::from_secs(1);

    fn defaults(health_file: Option<&str>) -> Defaults {
        let threshold = |count| NonZeroU32::new(count).unwrap();
        Defaults {
            driver_socket: "/csi/csi.sock".into(),
            health_file: health_file.map(PathBuf::from),
            health_interval: 30 * SECOND,
            health_max_age: 4 * SECOND,
            health_dead_after: Some(600 * SECOND),
            thresholds: Thresholds { failure: threshold(3), success: threshold(4) },
            confirm_interval: 2 * SECOND,
            host: HostTree { sysfs: "/sys".into(), dev: "/dev".into(), proc: "/proc".into() },
        }
    }

    fn watched(health_file: Option<&str>, text: &str) -> Watched {
        let (file, problems) = understand(Path::new("t.yaml"), text, &RunFlags::command()).unwrap();
        assert!(problems.is_empty(), "{problems:?}");
        Watched::new(&defaults(health_file), Some(&file)).unwrap()
    }

    #[test]
    fn the_flag_alone_makes_one_probe_of_its_own() {
        let watched = Watched::new(&defaults(Some("/h/health")), None).unwrap();
        let [probe] = watched.probes.as_slice() else { panic!("{watched:?}") };
        assert_eq!((probe.name.as_str(), probe.period, probe.timeout), (FLAG_PROBE, 30 * SECOND, 2 * SECOND));
        assert_eq!((probe.thresholds.failure.get(), probe.confirm_interval), (3, 2 * SECOND));
        assert!(watched.groups.is_empty() && watched.warnings.is_empty());
    }

    #[test]
    fn the_flags_probe_comes_before_those_of_the_file() {
        let watched = watched(Some("/h/health"), "probes: [{name: a, type: csi}]");
        let names: Vec<_> = watched.probes.iter().map(|probe| probe.name.as_str()).collect();
        assert_eq!(names, [FLAG_PROBE, "a"]);
    }

    #[test]
    fn what_a_probe_does_not_say_is_the_flags_or_the_types() {
        let watched = watched(
            None,
            "probes:\n- {name: a, type: csi, failureThreshold: 1}\n- {name: b, type: health-file, healthFile: {path: /h/b, deadAfter: 0}}\n",
        );
        let [csi, file] = watched.probes.as_slice() else { panic!("{watched:?}") };
        assert_eq!((csi.period, csi.timeout), (DEFAULT_PERIOD, DEFAULT_TIMEOUT));
        assert_eq!((csi.thresholds.failure.get(), csi.thresholds.success.get()), (1, 4));
        let ProbeKind::HealthFile { limits, .. } = &file.kind else { panic!("{file:?}") };
        assert_eq!((limits.period, limits.max_age, limits.dead_after), (30 * SECOND, 4 * SECOND, None));
        assert_eq!((limits.confirm_interval, file.timeout), (2 * SECOND, 2 * SECOND));
    }
}
