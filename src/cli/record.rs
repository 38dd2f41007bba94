//! `csi-warden record`: a trace of what probes read on this host, for `csi-warden replay`.

use super::given::{Given, GivenError};
use super::go_flags::{normalise, parse_bool};
use super::run::RunFlags;
use super::{USAGE, complain, fail, usage};
use crate::config::go_duration::GoDuration;
use crate::config::probes::{ProbeKind, ProbeSettings};
use crate::shutdown;
use crate::trace::format::{LONGEST, MAX_BYTES};
use crate::trace::recorder::{Ended, create, record};
use crate::trace::settings::{KINDS, of_types};
use anyhow::Context;
use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Records what probes of hardware read on this host: everything once, then each change with its time, as text.
///
/// Ends after --for, by SIGTERM, or by SIGINT (Ctrl-C). Nothing is read but what the probes themselves read, and of the kernel log only lines
/// that their rules match. `csi-warden replay` plays it anywhere. Exit 0: the trace is whole; 1: it could not be written; 2: a flag.
#[derive(Debug, Parser)]
#[command(
    name = "csi-warden record",
    args_override_self = true,
    max_term_width = 110,
    override_usage = "csi-warden record --config FILE --out FILE [FLAGS]
       csi-warden record --type TYPE,… --out FILE [FLAGS]
       csi-warden record --health-file PATH --out FILE [FLAGS]"
)]
pub struct RecordFlags {
    /// Record for the probes of this settings file, as `csi-warden run` would have them
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Record for the defaults of these types, separated by commas: rdma, nvme, gpu, kmsg
    #[arg(long, value_name = "TYPE,…")]
    r#type: Option<String>,
    /// Record this health file, too
    #[arg(long, value_name = "PATH")]
    health_file: Option<PathBuf>,
    /// Where the trace is written (required)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write over a file that is there
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", hide_default_value = true, value_parser = parse_bool, action = clap::ArgAction::Set)]
    overwrite: bool,
    /// How long [default: until stopped, at most 168h]
    #[arg(long, value_name = "DURATION")]
    r#for: Option<GoDuration>,
    /// From one look to the next; what changes back in between is not seen
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    period: GoDuration,
    /// Where the host's /sys is mounted
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    sysfs_root: PathBuf,
    /// Where the host's /dev is mounted
    #[arg(long, value_name = "DIR", default_value = "/dev")]
    dev_root: PathBuf,
    /// Where the host's /proc is mounted
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    proc_root: PathBuf,
}

/// Exit codes: 0 whole, 1 not written, 2 usage.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = RecordFlags::command();
    let normalised = normalise(&command, arguments);
    if let Some(stray) = normalised.rest.first() {
        return refuse(&[format!("csi-warden record takes no {stray:?}; see csi-warden record --help")]);
    }
    let matches =
        command.try_get_matches_from(std::iter::once(OsString::from("csi-warden record")).chain(normalised.flags));
    let flags = match matches.and_then(|matches| RecordFlags::from_arg_matches(&matches)) {
        Ok(flags) => flags,
        Err(error) => return usage(&error),
    };
    let Some(out) = &flags.out else { return refuse(&["--out is missing: name the file for the trace".to_owned()]) };
    let probes = match contradiction(&flags).map_or_else(|| probes(&flags), |problem| Err(vec![problem])) {
        Ok(probes) => probes,
        Err(problems) => return refuse(&problems),
    };
    match run(&probes, &flags, out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn contradiction(flags: &RecordFlags) -> Option<String> {
    if flags.config.is_some() && flags.r#type.is_some() {
        return Some("--config and --type exclude each other: give one of them".to_owned());
    }
    if flags.config.is_none() && flags.r#type.is_none() && flags.health_file.is_none() {
        return Some("nothing to record: give --config FILE, --type TYPE,… or --health-file PATH".to_owned());
    }
    if flags.period.0 < Duration::from_millis(10) {
        return Some(format!("--period={}: looking more often than every 10ms would only heat the node", flags.period));
    }
    match flags.r#for {
        Some(time) if time.0.is_zero() || time.0 > LONGEST => {
            Some(format!("--for={time} must be above zero and at most 168h"))
        }
        Some(_) | None => None,
    }
}

/// Those of the settings that a trace can hold. The others are told.
fn probes(flags: &RecordFlags) -> Result<Vec<ProbeSettings>, Vec<String>> {
    let types: Vec<&str> =
        flags.r#type.iter().flat_map(|types| types.split(',')).map(str::trim).filter(|kind| !kind.is_empty()).collect();
    let hardware = &KINDS[..4];
    if let Some(unknown) = types.iter().find(|kind| !hardware.contains(kind)) {
        return Err(vec![format!("--type={unknown}: a trace has no such type, but {}", hardware.join(", "))]);
    }
    let temporary = |error: std::io::Error| vec![format!("cannot write a temporary file: {error}")];
    let mut made = tempfile::NamedTempFile::new().map_err(temporary)?;
    made.write_all(of_types(types.iter().map(|kind| (*kind, *kind)), false).as_bytes()).map_err(temporary)?;
    let config = flags.config.as_deref().or((!types.is_empty()).then_some(made.path()));
    let paths = [
        ("--config", config),
        ("--health-file", flags.health_file.as_deref()),
        ("--sysfs-root", Some(flags.sysfs_root.as_path())),
        ("--dev-root", Some(flags.dev_root.as_path())),
        ("--proc-root", Some(flags.proc_root.as_path())),
    ];
    let arguments = paths.into_iter().filter_map(|(flag, path)| Some(joined(flag, path?.as_os_str())));
    let given = Given::read(RunFlags::command(), arguments).map_err(|error| match error {
        GivenError::Usage(error) => vec![error.to_string()],
        GivenError::File(error) => {
            let cause = std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
            format!("{error}{cause}").lines().map(str::to_owned).collect()
        }
    })?;
    let mut probes = given.watched()?.probes;
    probes.retain(|probe| {
        let left_out = matches!(probe.kind, ProbeKind::Exec { .. } | ProbeKind::Csi { .. });
        if left_out {
            complain(&format!(
                "note: probe {} of type {} is left out: it reads nothing that a trace could hold",
                probe.name,
                probe.kind.name()
            ));
        }
        !left_out
    });
    if probes.is_empty() {
        Err(vec!["the settings have no probe that reads hardware or a health file".to_owned()])
    } else {
        Ok(probes)
    }
}

fn joined(flag: &str, value: &OsStr) -> OsString {
    let mut joined = OsString::from(flag);
    joined.push("=");
    joined.push(value);
    joined
}

fn run(probes: &[ProbeSettings], flags: &RecordFlags, out: &std::path::Path) -> anyhow::Result<()> {
    let shown = out.display();
    let mut file = create(out, flags.overwrite).with_context(|| match out.exists() {
        true if !flags.overwrite => format!("{shown} is there already; --overwrite writes over it"),
        _ => format!("cannot write {shown}"),
    })?;
    let limit = flags.r#for.map(|time| time.0);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let stop = shutdown::on_signal_or_hangup()?;
        let ended = record(probes, flags.period.0, limit, &mut file, &stop).await;
        ended.with_context(|| format!("cannot write {shown}"))
    });
    // A lane may sit in the kernel for ever; the process does not wait for it.
    runtime.shutdown_background();
    if ended? == Ended::Full {
        complain(&format!("{shown} is full: a trace has at most {} MiB", MAX_BYTES / 1024 / 1024));
    }
    Ok(())
}

fn refuse(problems: &[String]) -> ExitCode {
    for problem in problems {
        complain(&format!("csi-warden record: {problem}"));
    }
    ExitCode::from(USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_well_formed() {
        RecordFlags::command().debug_assert();
    }
}
