//! `csi-warden demo`: no cluster, no root, nothing left behind.

use super::go_flags::{normalise, parse_bool};
use super::{USAGE, complain, fail, print, usage};
use crate::demo::play::play;
use crate::shutdown;
use crate::telemetry::{self, Format, LogSettings, VModule};
use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;
use std::process::ExitCode;

/// Plays a failure and a recovery of storage hardware in about 12 s, with an embedded CSI driver and an embedded kubelet.
#[derive(Debug, Parser)]
#[command(name = "csi-warden demo", args_override_self = true, max_term_width = 110)]
pub struct DemoFlags {
    /// Leave everything running afterwards, and say which file to write
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set)]
    keep: bool,
    /// Show the agent's own log, too, on stderr
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set)]
    log: bool,
}

/// Exit codes: 0 when everything happened as it should, 1 when not, 2 for a flag.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = DemoFlags::command();
    let normalised = normalise(&command, arguments);
    if let Some(stray) = normalised.rest.first() {
        complain(&format!("csi-warden demo takes no {stray:?}; see csi-warden demo --help"));
        return ExitCode::from(USAGE);
    }
    let matches =
        command.try_get_matches_from(std::iter::once(OsString::from("csi-warden demo")).chain(normalised.flags));
    let flags = match matches.and_then(|matches| DemoFlags::from_arg_matches(&matches)) {
        Ok(flags) => flags,
        Err(error) => return usage(&error),
    };
    if flags.log {
        telemetry::init(LogSettings { verbosity: 0, vmodule: VModule::default(), format: Format::Text });
    }
    match run(flags.keep) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn run(keep: bool) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async { play(keep, shutdown::on_signal_or_hangup()?, print).await });
    runtime.shutdown_background();
    result
}
