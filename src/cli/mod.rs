//! Flags as typed, and one file a subcommand.

pub mod config;
pub mod demo;
pub mod doctor;
mod fence;
pub mod given;
pub mod go_flags;
pub mod install;
pub mod livenessprobe;
pub mod logging;
mod look;
pub mod probe;
pub mod record;
pub mod replay;
pub mod run;
pub mod status;

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// A flag or its value cannot be read: as in Go.
pub const USAGE: u8 = 2;

/// Started under this name, every argument belongs to `run`: the image takes the replaced sidecar's place.
const REGISTRAR_NAME: &str = "csi-node-driver-registrar";

/// Started under this name, every argument belongs to `livenessprobe`.
const LIVENESSPROBE_NAME: &str = "livenessprobe";

/// The subcommands, for the help text.
pub const COMMANDS: &str = "\
Commands (`csi-warden COMMAND --help` tells more):
  run            register the driver and watch its node's health; the default, may be left out
  livenessprobe  answer the kubelet's liveness probe of the driver; takes livenessprobe's flags
  config         check: find what is wrong with the settings; print: show those in force and where each came from
  demo           play a failure and a recovery with an embedded driver and kubelet, without a cluster
  probe          ask probes once, until healthy, or again and again, and write the shared health file
  record         write what probes read into a trace, as it changes
  replay         play such a trace through the real probes and rules: what would have happened, and when
  status         show what a running agent knows, and what would happen next
  doctor         check node, paths and permissions, or manifests, and say how to mend what is wrong; changes nothing
  fence          on, off or auto: refuse new volumes on this node for a while, or let them in, whatever its health
  install        copy this program to a folder, for exec probes in other containers
  help           this text
  version        print the version";

/// Picks the subcommand and runs it.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    // What our parent left open is none of our commands' business.
    close_fds::set_fds_cloexec(3, &[]);
    let program = arguments.next().unwrap_or_else(|| "csi-warden".into());
    let name = Path::new(&program).file_name().unwrap_or(&program).to_string_lossy().into_owned();
    let mut arguments = arguments.peekable();
    if name == REGISTRAR_NAME {
        return run::main(&program, arguments);
    }
    if name == LIVENESSPROBE_NAME {
        return livenessprobe::main(arguments);
    }
    // Nothing at all is `run` too, which says what it needs.
    let command = match arguments.peek().map(|first| first.to_string_lossy().into_owned()) {
        Some(first) if !first.starts_with('-') => first,
        Some(_) | None => return run::main(&program, arguments),
    };
    let rest = arguments.skip(1);
    match command.as_str() {
        "run" => run::main(&program, rest),
        "config" => config::main(rest),
        "livenessprobe" => livenessprobe::main(rest),
        "demo" => demo::main(rest),
        "probe" => probe::main(rest),
        "record" => record::main(rest),
        "replay" => replay::main(rest),
        "status" => status::main(rest),
        "doctor" => doctor::main(rest),
        "fence" => fence::main(rest),
        "install" => install::main(rest),
        "help" => run::main(&program, std::iter::once(OsString::from("--help"))),
        "version" => run::main(&program, std::iter::once(OsString::from("--version"))),
        other => {
            complain(&format!("unknown command {other:?}\n\n{COMMANDS}"));
            ExitCode::from(USAGE)
        }
    }
}

/// One line (or more) to stderr; the log may not be up yet.
pub(crate) fn complain(text: &str) {
    // With stderr closed there is nobody to tell.
    drop(writeln!(std::io::stderr(), "{text}"));
}

/// Text that was asked for, to stdout.
pub(crate) fn print(text: &str) {
    // With the reader gone there is nobody to tell; what goes on for ever asks `print_to_reader` instead.
    drop(print_to_reader(text));
}

/// As [`print`].
///
/// # Errors
/// When nobody reads stdout any more, so that whoever repeats himself can end.
pub(crate) fn print_to_reader(text: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{text}")
}

/// Shows clap's word on help or a usage error, and gives its exit code.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // With the terminal gone there is nobody to tell.
    drop(error.print());
    if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
}

/// The error and what is behind it, once, to stderr.
pub(crate) fn fail(error: &anyhow::Error) -> ExitCode {
    complain(&format!("csi-warden: {error:#}"));
    ExitCode::FAILURE
}
