//! What is probed: a command, the probes of a settings file, the driver, or a health file. Exactly one of them.

use super::ProbeFlags;
use crate::cli::given::{Given, GivenError};
use crate::cli::run::RunFlags;
use crate::config::gpu::{self, WrittenGpu};
use crate::config::kmsg::WrittenKmsg;
use crate::config::nvme::WrittenNvme;
use crate::config::paths::driver_socket;
use crate::config::probes::{HostTree, KmsgSettings, NvmeSettings, OnFailure, ProbeKind, ProbeSettings, RdmaSettings};
use crate::config::watched::{DEFAULT_TIMEOUT, Watched};
use crate::policy::kernel_log::Since;
use crate::policy::nvme_selector;
use crate::policy::probe_verdict::Thresholds;
use crate::policy::rdma::rules::RdmaRules;
use crate::policy::rdma::selector::Selector;
use crate::probe::exec;
use clap::CommandFactory;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

/// The name of the one probe that `-- COMMAND` makes.
const COMMAND_PROBE: &str = "command";

/// The name of the one probe that `--csi-address` makes.
const CSI_PROBE: &str = "csi";

/// As a usage error shows it.
const COMMAND: &str = "-- COMMAND";

/// Why there is nothing to ask.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SourceError {
    /// The command line, which stays wrong.
    Usage(String),
    /// The settings file, which may change. One line a problem.
    Config(Vec<String>),
}

/// The sources that were given, as a usage error names them. With a settings file, `--csi-address` is none: it says where the
/// file's `csi` probes find the driver.
pub(super) fn given(flags: &ProbeFlags, command: &[OsString]) -> Vec<&'static str> {
    let sources = [
        (COMMAND, !command.is_empty()),
        ("--config", flags.config.is_some()),
        ("--csi-address", flags.csi_address.is_some() && flags.config.is_none()),
        ("--health-file", flags.health_file.is_some()),
        ("--type", flags.r#type.is_some()),
    ];
    sources.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
}

/// The probes to ask.
///
/// # Errors
/// When they cannot be told from the flags and the file.
pub(super) fn watched(flags: &ProbeFlags, command: Vec<OsString>) -> Result<Watched, SourceError> {
    let timeout = flags.timeout.map_or(DEFAULT_TIMEOUT, |timeout| timeout.0);
    let period = flags.period.0;
    if let Some(config) = &flags.config {
        return chosen(of_file(config, flags)?, flags.probe.as_deref(), config);
    }
    if let Some(address) = &flags.csi_address {
        let socket = driver_socket(address).map_err(|error| SourceError::Usage(error.to_string()))?;
        return Ok(alone(CSI_PROBE, ProbeKind::Csi { socket }, period, timeout));
    }
    if let Some(path) = &flags.health_file {
        let mut watched = of_flags([("--health-file", path.as_os_str())]).map_err(|error| match error {
            SourceError::Config(lines) => SourceError::Usage(lines.join("; ")),
            usage @ SourceError::Usage(_) => usage,
        })?;
        for probe in &mut watched.probes {
            probe.thresholds = ONE;
            if let Some(timeout) = flags.timeout {
                probe.timeout = timeout.0;
            }
        }
        return Ok(watched);
    }
    if let Some(kind) = &flags.r#type {
        return of_type(kind, flags, period, timeout);
    }
    let mut words = command.into_iter();
    let program = words.next().unwrap_or_default();
    let command = exec::Command { program, arguments: words.collect(), environment: environment(&flags.env) };
    Ok(alone(COMMAND_PROBE, ProbeKind::Exec { command }, period, timeout))
}

const ONE: Thresholds = Thresholds { failure: NonZeroU32::MIN, success: NonZeroU32::MIN };

fn alone(name: &str, kind: ProbeKind, period: Duration, timeout: Duration) -> Watched {
    let probe = ProbeSettings {
        name: name.to_owned(),
        kind,
        period,
        timeout,
        confirm_interval: period,
        thresholds: ONE,
        on_failure: OnFailure::Fail,
    };
    Watched { probes: vec![probe], groups: Vec::new(), warnings: Vec::new() }
}

/// One probe with the defaults of its type.
fn of_type(kind: &str, flags: &ProbeFlags, period: Duration, timeout: Duration) -> Result<Watched, SourceError> {
    let words = flags.device.as_deref().map(|words| words.split(',').map(str::trim).filter(|word| !word.is_empty()));
    let words: Vec<&str> = words.into_iter().flatten().collect();
    if flags.device.is_some() && words.is_empty() {
        return Err(SourceError::Usage("--device names no device: leave it out for every device".to_owned()));
    }
    let host = HostTree { sysfs: flags.sysfs_root.clone(), dev: flags.dev_root.clone(), proc: flags.proc_root.clone() };
    let kind_of = match kind {
        "rdma" => {
            let devices = each(&words, Selector::parse)?;
            ProbeKind::Rdma(RdmaSettings { host, rules: RdmaRules { devices, details: true, ..RdmaRules::default() } })
        }
        "nvme" => {
            let devices = each(&words, nvme_selector::Selector::parse)?;
            ProbeKind::Nvme(NvmeSettings { devices, ..WrittenNvme::default().settings(&host, timeout) })
        }
        "gpu" => {
            let mut gpu = WrittenGpu::default().settings(&host, timeout);
            gpu.select.devices = each(&words, |word| gpu::address(word).map_err(|_| gpu::NO_ADDRESS.to_owned()))?;
            ProbeKind::Gpu(gpu)
        }
        "kmsg" if words.is_empty() => {
            // Who asks once wants to know what has happened.
            ProbeKind::Kmsg(KmsgSettings { since: Since::Boot, ..WrittenKmsg::default().settings(&host) })
        }
        "kmsg" => {
            return Err(SourceError::Usage(
                "--device is not for --type kmsg: the log is that of all devices".to_owned(),
            ));
        }
        _ => {
            return Err(SourceError::Usage(format!(
                "--type={kind:?} is unknown: use rdma, nvme, gpu or kmsg; other types have flags of their own, or need --config"
            )));
        }
    };
    Ok(alone(kind, kind_of, period, timeout))
}

fn each<T>(words: &[&str], parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, SourceError> {
    let parsed = words
        .iter()
        .map(|word| parse(word).map_err(|message| SourceError::Usage(format!("--device: {word:?} {message}"))));
    parsed.collect()
}

fn of_file(config: &Path, flags: &ProbeFlags) -> Result<Watched, SourceError> {
    let mut given = vec![("--config", config.as_os_str())];
    let roots = [
        ("--sysfs-root", &flags.sysfs_root, "/sys"),
        ("--dev-root", &flags.dev_root, "/dev"),
        ("--proc-root", &flags.proc_root, "/proc"),
    ];
    // The file may have its own, which a flag overrides.
    given.extend(
        roots
            .into_iter()
            .filter(|(_, root, usual)| *root != Path::new(usual))
            .map(|(flag, root, _)| (flag, root.as_os_str())),
    );
    let csi_address = flags.csi_address.as_deref();
    let socket = csi_address.map(driver_socket).transpose();
    let socket = socket.map_err(|error| SourceError::Usage(error.to_string()))?;
    given.extend(csi_address.map(|address| ("--csi-address", OsStr::new(address))));
    let mut watched = of_flags(given)?;
    if watched.probes.is_empty() {
        let message = format!("{}: it has no probes, so there is nothing to ask", config.display());
        return Err(SourceError::Config(vec![message]));
    }
    let asked = socket.map(|socket| ProbeKind::Csi { socket });
    if asked.is_some_and(|asked| watched.probes.iter().all(|probe| probe.kind != asked)) {
        let message = format!("{} has no csi probe without a socket of its own", config.display());
        watched.warnings.push(format!("--csi-address has no effect: {message}"));
    }
    Ok(watched)
}

/// As `run` with these flags alone would watch; the defaults are its own.
fn of_flags<'a>(flags: impl IntoIterator<Item = (&'a str, &'a OsStr)>) -> Result<Watched, SourceError> {
    let flags = flags.into_iter().map(|(name, value)| {
        let mut flag = OsString::from(name);
        flag.push("=");
        flag.push(value);
        flag
    });
    let given = Given::read(RunFlags::command(), flags).map_err(|error| match error {
        GivenError::Usage(error) => SourceError::Usage(error.to_string()),
        GivenError::File(error) => {
            let cause = error.source().map_or_else(String::new, |source| format!(": {source}"));
            SourceError::Config(format!("{error}{cause}").lines().map(str::to_owned).collect())
        }
    })?;
    given.watched().map_err(SourceError::Config)
}

/// Those that `--probe` names; the groups require no more than what is left of them.
fn chosen(mut watched: Watched, names: Option<&str>, config: &Path) -> Result<Watched, SourceError> {
    let Some(names) = names else { return Ok(watched) };
    let names: Vec<&str> = names.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let known: Vec<&str> = watched.probes.iter().map(|probe| probe.name.as_str()).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(name)) {
        return Err(SourceError::Usage(format!(
            "--probe: {} has no probe {unknown:?}; it has {}",
            config.display(),
            known.join(", ")
        )));
    }
    if names.is_empty() {
        return Err(SourceError::Usage(format!(
            "--probe names no probe; {} has {}",
            config.display(),
            known.join(", ")
        )));
    }
    watched.probes.retain(|probe| names.contains(&probe.name.as_str()));
    Ok(watched)
}

/// An entry of `--env` that sets a variable without a name.
pub(super) fn nameless(env: &str) -> Option<&str> {
    env.split(',').find(|entry| entry.starts_with('='))
}

/// `A=b,HOME`: set A, and pass HOME on if we have it.
fn environment(text: &str) -> Vec<(OsString, OsString)> {
    text.split(',')
        .filter(|entry| !entry.is_empty())
        .filter_map(|entry| match entry.split_once('=') {
            Some((name, value)) => Some((name.into(), value.into())),
            None => std::env::var_os(entry).map(|value| (entry.into(), value)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_is_set_or_passed_on_by_name() {
        let set = environment("A=b=c,,PATH,NO_SUCH_VARIABLE");
        assert_eq!(set[0], ("A".into(), "b=c".into()));
        assert_eq!(set.len(), 2);
    }
}
