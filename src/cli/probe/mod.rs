//! `csi-warden probe`: asks probes as `run` does, once, or until they are well, or again and again; and writes what they say to
//! the shared health file.

mod modes;
mod rounds;
mod source;
mod words;
mod write;

use super::go_flags::{normalise, parse_bool};
use super::{USAGE, complain, fail, usage};
use crate::config::go_duration::GoDuration;
use crate::config::probes::ProbeKind;
use crate::config::watched::Watched;
use clap::{CommandFactory, FromArgMatches, Parser};
use modes::{Form, Mode};
use source::SourceError;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Asks probes how the hardware is: a command, the probes of a settings file, the driver, or a health file.
///
/// Once, unless told otherwise; exit 0 is healthy, 1 unhealthy, 2 unknown or a flag. A command says by its exit code: 0 is good, 1
/// bad, anything else unknown; its first line is the reason. With --write it goes on until it is stopped and writes each round's
/// outcome to the file that `csi-warden run --health-file` reads.
#[derive(Debug, Parser)]
#[command(
    name = "csi-warden probe",
    args_override_self = true,
    max_term_width = 110,
    override_usage = "csi-warden probe [FLAGS] -- COMMAND [ARGUMENT…]
       csi-warden probe [FLAGS] --config FILE [--probe NAME,…] [--csi-address PATH]
       csi-warden probe [FLAGS] --csi-address PATH
       csi-warden probe [FLAGS] --health-file PATH
       csi-warden probe [FLAGS] --type TYPE [--device SELECTOR,…]"
)]
pub struct ProbeFlags {
    /// Ask the probes of this settings file, as `csi-warden run` would; its groups and thresholds count
    #[arg(long, value_name = "FILE", help_heading = "What is asked")]
    config: Option<PathBuf>,
    /// With --config: only these probes, separated by commas
    #[arg(long, value_name = "NAME,…", help_heading = "What is asked")]
    probe: Option<String>,
    /// Ask the driver at this socket, a path or unix:///path, by its Identity.Probe. With --config: where its csi probes find it
    #[arg(long, value_name = "PATH", help_heading = "What is asked")]
    csi_address: Option<String>,
    /// Read this health file
    #[arg(long, value_name = "PATH", help_heading = "What is asked")]
    health_file: Option<PathBuf>,
    /// Ask the hardware, by the defaults of this type of probe: rdma, nvme, gpu or kmsg
    #[arg(long, value_name = "TYPE", help_heading = "What is asked")]
    r#type: Option<String>,
    /// With --type: only these devices, separated by commas; by name, pattern or address, as `devices` in a settings file. One
    /// that is named must be there [default: every device]
    #[arg(long, value_name = "SELECTOR,…", help_heading = "What is asked")]
    device: Option<String>,
    /// Where the host's /sys is mounted, for probes of hardware
    #[arg(long, value_name = "DIR", default_value = "/sys", help_heading = "What is asked")]
    sysfs_root: PathBuf,
    /// Where the host's /dev is mounted, for probes of hardware
    #[arg(long, value_name = "DIR", default_value = "/dev", help_heading = "What is asked")]
    dev_root: PathBuf,
    /// Where the host's /proc is mounted, for probes of hardware
    #[arg(long, value_name = "DIR", default_value = "/proc", help_heading = "What is asked")]
    proc_root: PathBuf,
    /// A round takes no longer; a command is killed. With --config each probe has its own [default: 3s]
    #[arg(long, value_name = "DURATION", help_heading = "What is asked")]
    timeout: Option<GoDuration>,
    /// Variables to pass on to COMMAND, which gets none of ours but PATH: NAME=VALUE or NAME, separated by commas
    #[arg(
        long,
        value_name = "NAME[=VALUE],…",
        default_value = "",
        hide_default_value = true,
        help_heading = "What is asked"
    )]
    env: String,

    /// Exit 1 only if unhealthy, and 0 if nothing is known: for a liveness probe, which must not restart on a doubt
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", hide_default_value = true, value_parser = parse_bool, action = clap::ArgAction::Set, help_heading = "How often")]
    liveness: bool,
    /// Rounds until all is healthy, for ever or for this long: for an init container
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, help_heading = "How often")]
    wait: Option<Option<GoDuration>>,
    /// Rounds until stopped, and a look at once where a probe notices a change; tells each change
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", hide_default_value = true, value_parser = parse_bool, action = clap::ArgAction::Set, help_heading = "How often")]
    watch: bool,
    /// Write `OK`, `ERROR reason` or `UNKNOWN reason` to this file, in one step, every period. Its folder must exist
    #[arg(long, value_name = "FILE", help_heading = "How often")]
    write: Option<PathBuf>,
    /// With --wait, --watch and --write: from the start of one round to the start of the next
    #[arg(long, value_name = "DURATION", default_value = "10s", help_heading = "How often")]
    period: GoDuration,

    /// table or json [default: table, but one line for a COMMAND]
    #[arg(long, value_name = "FORM", value_parser = Form::parse)]
    output: Option<Form>,
}

/// Exit codes: 0 healthy, 1 unhealthy, 2 unknown or usage.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = ProbeFlags::command();
    let normalised = normalise(&command, arguments);
    let matches =
        command.try_get_matches_from(std::iter::once(OsString::from("csi-warden probe")).chain(normalised.flags));
    let flags = match matches.and_then(|matches| ProbeFlags::from_arg_matches(&matches)) {
        Ok(flags) => flags,
        Err(error) => return usage(&error),
    };
    let command = normalised.rest;
    if let Some(problem) = contradiction(&flags, &command) {
        return refuse(&problem);
    }
    let form = flags.output.unwrap_or(if command.is_empty() { Form::Table } else { Form::Line });
    let watched = match source::watched(&flags, command) {
        Ok(watched) => watched,
        Err(SourceError::Usage(problem)) => return refuse(&problem),
        Err(SourceError::Config(problems)) => {
            for problem in problems {
                complain(&problem);
            }
            // A file can go bad at any time, which says nothing about what it watches.
            return if flags.liveness { ExitCode::SUCCESS } else { ExitCode::from(USAGE) };
        }
    };
    if let Some(problem) = reads_what_it_writes(&flags, &watched) {
        return refuse(&problem);
    }
    for warning in &watched.warnings {
        complain(&format!("warning: {warning}"));
    }
    let slowest = watched.probes.iter().map(|probe| probe.timeout).max().unwrap_or_default();
    let again = flags.write.is_some() || flags.watch || flags.wait.is_some();
    if again && slowest > flags.period.0 {
        let (slowest, period) = (GoDuration(slowest), flags.period);
        complain(&format!(
            "warning: a round may take {slowest}, which is above --period={period}, and then delays the next"
        ));
    }
    match modes::run(mode(&flags), watched, form, flags.period.0) {
        Ok(code) => code,
        Err(error) => fail(&error),
    }
}

fn refuse(problem: &str) -> ExitCode {
    complain(&format!("csi-warden probe: {problem}"));
    ExitCode::from(USAGE)
}

fn mode(flags: &ProbeFlags) -> Mode {
    match (&flags.write, flags.wait, flags.watch, flags.liveness) {
        (Some(file), ..) => Mode::Write(file.clone()),
        (None, Some(limit), ..) => Mode::Wait(limit.map(|limit| limit.0)),
        (None, None, true, _) => Mode::Watch,
        (None, None, false, true) => Mode::Liveness,
        (None, None, false, false) => Mode::Once,
    }
}

/// What cannot be meant, with the flags that say so.
fn contradiction(flags: &ProbeFlags, command: &[OsString]) -> Option<String> {
    let duration_apart = || {
        let first = command.first()?.to_str()?;
        (flags.wait == Some(None) && first.parse::<GoDuration>().is_ok())
            .then(|| format!("--wait takes its time after an equals sign: --wait={first}"))
    };
    if let Some(problem) = duration_apart() {
        return Some(problem);
    }
    let modes = [
        ("--wait", flags.wait.is_some()),
        ("--watch", flags.watch),
        ("--write", flags.write.is_some()),
        ("--liveness", flags.liveness),
    ];
    let modes: Vec<&str> = modes.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect();
    if let [one, other, ..] = modes.as_slice() {
        return Some(format!("{one} and {other} exclude each other: give one of them"));
    }
    match source::given(flags, command).as_slice() {
        [] => {
            return Some(
                "nothing to ask: give -- COMMAND [ARGUMENT…], --config FILE, --csi-address PATH, --health-file PATH or --type TYPE"
                    .to_owned(),
            );
        }
        [_] => {}
        [one, other, ..] => return Some(format!("{one} and {other} exclude each other: one thing is asked at a time")),
    }
    if flags.probe.is_some() && flags.config.is_none() {
        return Some("--probe chooses among the probes of --config, which is missing".to_owned());
    }
    if flags.device.is_some() && flags.r#type.is_none() {
        return Some("--device chooses among the devices of --type, which is missing".to_owned());
    }
    if !flags.env.is_empty() && command.is_empty() {
        return Some("--env is for -- COMMAND, which is missing; a settings file has its own env".to_owned());
    }
    if let Some(entry) = source::nameless(&flags.env) {
        return Some(format!("--env: {entry:?} names no variable: give NAME=VALUE or NAME"));
    }
    if flags.timeout.is_some() && flags.config.is_some() {
        return Some(
            "--timeout and --config exclude each other: each probe of the file has its own timeout".to_owned(),
        );
    }
    if flags.output.is_some() && flags.write.is_some() {
        return Some("--output and --write exclude each other: the file has one form".to_owned());
    }
    let timeout_is_zero = flags.timeout.is_some_and(|timeout| timeout.0.is_zero());
    if flags.period.0.is_zero() || timeout_is_zero {
        return Some("--period and --timeout must be above zero".to_owned());
    }
    let wait_is_zero = flags.wait.flatten().is_some_and(|limit| limit.0.is_zero());
    wait_is_zero.then(|| "--wait must be above zero; --wait alone waits for ever".to_owned())
}

/// A health file that is fed from itself would say for ever what it says now.
fn reads_what_it_writes(flags: &ProbeFlags, watched: &Watched) -> Option<String> {
    let write = flags.write.as_ref()?;
    let reads =
        watched.probes.iter().any(|probe| matches!(&probe.kind, ProbeKind::HealthFile { path, .. } if path == write));
    let flag = if flags.health_file.is_some() { "--health-file" } else { "a probe of --config" };
    reads.then(|| {
        format!("--write and {flag} name one file, {}: it would say for ever what it says now", write.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_well_formed() {
        ProbeFlags::command().debug_assert();
    }
}
