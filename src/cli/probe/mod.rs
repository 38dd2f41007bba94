//! `csi-warden probe`: runs a command as a health check, and writes what it says to the shared health file.

use super::go_flags::normalise;
use super::{USAGE, complain, fail, print, usage};
use crate::config::go_duration::GoDuration;
use crate::policy::outcome::{Outcome, Reason};
use crate::probe::exec;
use crate::probe::health_file::UNKNOWN;
use crate::shutdown;
use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Runs a command as a health check: exit 0 is good, 1 bad, anything else unknown; its first line is the reason.
///
/// Without --write it runs once, prints the outcome and exits 0, 1 or 2 accordingly. With --write it goes on until it is
/// stopped and writes each outcome to the file that `csi-warden run --health-file` reads.
#[derive(Debug, Parser)]
#[command(
    name = "csi-warden probe",
    args_override_self = true,
    max_term_width = 110,
    override_usage = "csi-warden probe [--write FILE [--period DURATION]] [--timeout DURATION] -- COMMAND [ARGUMENT…]"
)]
pub struct ProbeFlags {
    /// Write `OK`, `ERROR reason` or `UNKNOWN reason` to this file, in one step, every period. Its folder must exist
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// From the start of one run to the start of the next
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    period: GoDuration,
    /// The command is killed after this
    #[arg(long, value_name = "DURATION", default_value = "3s")]
    timeout: GoDuration,
    /// Variables to pass on to the command, which gets none of ours but PATH: NAME=VALUE or NAME, separated by commas
    #[arg(long, value_name = "NAME[=VALUE],…", default_value = "", hide_default_value = true)]
    env: String,
}

/// Exit codes: 0 good, 1 bad, 2 unknown or usage.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = ProbeFlags::command();
    let normalised = normalise(&command, arguments);
    let matches =
        command.try_get_matches_from(std::iter::once(OsString::from("csi-warden probe")).chain(normalised.flags));
    let flags = match matches.and_then(|matches| ProbeFlags::from_arg_matches(&matches)) {
        Ok(flags) => flags,
        Err(error) => return usage(&error),
    };
    let mut words = normalised.rest.into_iter();
    let Some(program) = words.next() else {
        complain("csi-warden probe: no command given. Usage: csi-warden probe [--write FILE] -- COMMAND [ARGUMENT…]");
        return ExitCode::from(USAGE);
    };
    if flags.period.0.is_zero() || flags.timeout.0.is_zero() {
        complain("csi-warden probe: --period and --timeout must be above zero");
        return ExitCode::from(USAGE);
    }
    if flags.write.is_some() && flags.timeout.0 > flags.period.0 {
        complain("csi-warden probe: --timeout is above --period, so a slow command delays the next run");
    }
    let command = exec::Command { program, arguments: words.collect(), environment: environment(&flags.env) };
    match run(&flags, &command) {
        Ok(code) => code,
        Err(error) => fail(&error),
    }
}

fn run(flags: &ProbeFlags, command: &exec::Command) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match &flags.write {
            None => {
                let stop = shutdown::on_signal_or_hangup()?;
                tokio::select! {
                    // Dropping the run kills the command and all that it started.
                    () = stop.cancelled() => Ok(ExitCode::from(USAGE)),
                    outcome = outcome(command, flags.timeout.0) => {
                        print(&line(&outcome));
                        Ok(exit_code(&outcome))
                    }
                }
            }
            Some(file) => write_rounds(command, file, flags.period.0, flags.timeout.0).await,
        }
    })
}

/// One run; silence is its own outcome here, where nobody counts.
async fn outcome(command: &exec::Command, limit: Duration) -> Outcome {
    exec::run(command, limit).await.unwrap_or_else(|_abandoned| {
        let name = command.program.to_string_lossy();
        Outcome::Unknown(Reason::new("NotAnswering", format!("{name} did not end within {limit:?} and was killed")))
    })
}

/// Writes raw outcomes, not a verdict: the reader counts.
async fn write_rounds(
    command: &exec::Command,
    file: &Path,
    period: Duration,
    limit: Duration,
) -> anyhow::Result<ExitCode> {
    let stop = shutdown::on_signal_or_hangup()?;
    let mut next = Instant::now();
    let mut last = String::new();
    let mut written = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(ExitCode::SUCCESS),
            () = sleep_until(next) => {}
        }
        next = Instant::now() + period;
        let outcome = tokio::select! {
            () = stop.cancelled() => return Ok(ExitCode::SUCCESS),
            outcome = outcome(command, limit) => outcome,
        };
        let line = line(&outcome);
        match write_atomically(file, &line) {
            Ok(()) => written = true,
            // A folder that is missing from the start is a mistake in the manifest; one that goes may come back.
            Err(error) if !written => {
                return Err(anyhow::Error::new(error).context(format!("cannot write {}", file.display())));
            }
            Err(error) => complain(&format!("cannot write {}: {error}; trying again in {period:?}", file.display())),
        }
        if line != last {
            complain(&format!("{}: {line}", file.display()));
            last = line;
        }
    }
}

fn line(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Success => "OK".to_owned(),
        Outcome::Warning(reason) => format!("OK warning: {reason}"),
        Outcome::Failure(reason, _) if reason.message.is_empty() => "ERROR".to_owned(),
        Outcome::Failure(reason, _) => format!("ERROR {}", reason.message),
        Outcome::Unknown(reason) => format!("{UNKNOWN} {reason}"),
    }
}

fn exit_code(outcome: &Outcome) -> ExitCode {
    match outcome {
        Outcome::Success | Outcome::Warning(_) => ExitCode::SUCCESS,
        Outcome::Failure(..) => ExitCode::FAILURE,
        Outcome::Unknown(_) => ExitCode::from(2),
    }
}

/// A reader sees the old line or the new one, never half of it. Readable for all: the agent may run as another user.
///
/// Anything but a regular file is left alone: it is somebody's device, folder or link.
fn write_atomically(file: &Path, line: &str) -> io::Result<()> {
    match fs::symlink_metadata(file) {
        Ok(metadata) if !metadata.is_file() => {
            return Err(io::Error::other("something that is not a regular file is there; it is left untouched"));
        }
        Ok(_) | Err(_) => {}
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut new = tempfile::Builder::new()
        .prefix(".health-")
        .permissions(fs::Permissions::from_mode(0o644))
        .tempfile_in(folder)?;
    writeln!(new, "{line}")?;
    // The umask may have taken something away.
    new.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    new.persist(file).map_err(|error| error.error)?;
    Ok(())
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
    use crate::policy::outcome::Severity;

    #[test]
    fn flags_are_well_formed() {
        ProbeFlags::command().debug_assert();
    }

    #[test]
    fn outcomes_are_written_in_the_readers_words() {
        let reason = || Reason::new("ExecFailed", "port 1 down");
        assert_eq!(line(&Outcome::Success), "OK");
        assert_eq!(line(&Outcome::Failure(reason(), Severity::Hard)), "ERROR port 1 down");
        assert_eq!(line(&Outcome::Unknown(reason())), "UNKNOWN ExecFailed: port 1 down");
    }

    #[test]
    fn the_file_is_replaced_in_one_step_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("health");
        write_atomically(&file, "OK").unwrap();
        write_atomically(&file, "ERROR x").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "ERROR x\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
        assert!(write_atomically(&folder.path().join("no/health"), "OK").is_err());
    }

    #[test]
    fn what_is_no_regular_file_is_left_untouched() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::write(&precious, "p").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        let sub = folder.path().join("folder");
        fs::create_dir(&sub).unwrap();
        for path in [&link, &sub, &PathBuf::from("/dev/full")] {
            assert!(write_atomically(path, "OK").unwrap_err().to_string().contains("not a regular file"), "{path:?}");
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "p");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn environment_is_set_or_passed_on_by_name() {
        let set = environment("A=b=c,,PATH,NO_SUCH_VARIABLE");
        assert_eq!(set[0], ("A".into(), "b=c".into()));
        assert_eq!(set.len(), 2);
    }
}
