//! `csi-warden fence`: an operator's word goes over the verdict's, for a while.

use super::go_flags::normalise;
use super::status::{answer_of, find_socket};
use super::{USAGE, complain, fail, print, usage};
use crate::config::go_duration::GoDuration;
use crate::status::next::shown;
use crate::status::order::{FenceAnswer, FenceRequest};
use anyhow::Context;
use bytes::Bytes;
use clap::{CommandFactory, FromArgMatches, Parser};
use http::Request;
use http_body_util::Full;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Puts the fence of a running agent up or down for a while, whatever the health, or gives the decision back.
///
/// on: new volumes are refused, those in use can be unmounted. off: nothing is refused, and the driver stays registered. auto: health
/// decides again, at once.
#[derive(Debug, Parser)]
#[command(
    name = "csi-warden fence",
    args_override_self = true,
    max_term_width = 110,
    override_usage = "csi-warden fence on|off|auto [flags]"
)]
struct FenceFlags {
    /// With on and off: how long it holds, restarts of the agent included; a day at most
    #[arg(long = "for", value_name = "DURATION", default_value = "30m")]
    lasts: GoDuration,
    /// With on and off: why; shown in status, log and events
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// The agent's status socket [default: found by the flags of process 1, else in /csi and /run/csi]
    #[arg(long, value_name = "PATH")]
    status_socket: Option<PathBuf>,
}

/// Exit codes: 0 done, 1 refused by the agent, 2 no answer, or a flag.
pub(super) fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let mut rest: Vec<OsString> = Vec::new();
    let mut word = None;
    // The word may stand before or after the flags, as people type it.
    for argument in arguments.by_ref() {
        match argument.to_str() {
            Some(one @ ("on" | "off" | "auto")) if word.is_none() && !takes_value(rest.last()) => {
                word = Some(one.to_owned())
            }
            _ => rest.push(argument),
        }
    }
    let command = FenceFlags::command();
    let normalised = normalise(&command, rest);
    if let Some(stray) = normalised.rest.first() {
        complain(&format!("csi-warden fence takes on, off or auto, not {stray:?}; see csi-warden fence --help"));
        return ExitCode::from(USAGE);
    }
    let matches =
        command.try_get_matches_from(std::iter::once(OsString::from("csi-warden fence")).chain(normalised.flags));
    let flags = match matches.and_then(|matches| FenceFlags::from_arg_matches(&matches)) {
        Ok(flags) => flags,
        Err(error) => return usage(&error),
    };
    let Some(word) = word else {
        complain("csi-warden fence: say on, off or auto; see csi-warden fence --help");
        return ExitCode::from(USAGE);
    };
    if word != "auto" && flags.reason.trim().is_empty() {
        complain("csi-warden fence: say why with --reason; whoever finds the node so will want to know");
        return ExitCode::from(USAGE);
    }
    match ask(&word, &flags) {
        Ok(Ok(FenceAnswer { not_kept })) => {
            print(&done(&word, &flags));
            if let Some(trouble) = not_kept {
                let end = if word == "auto" { "comes back with it" } else { "ends with it" };
                complain(&format!("csi-warden fence: if the agent restarts, the override {end}: {trouble}"));
            }
            ExitCode::SUCCESS
        }
        Ok(Err(refusal)) => {
            complain(&format!("csi-warden fence: {refusal}"));
            ExitCode::FAILURE
        }
        Err(error) => {
            fail(&error);
            ExitCode::from(USAGE)
        }
    }
}

/// Whether the argument before is a flag whose value comes next.
fn takes_value(before: Option<&OsString>) -> bool {
    before.and_then(|before| before.to_str()).is_some_and(|before| before.starts_with('-') && !before.contains('='))
}

fn ask(word: &str, flags: &FenceFlags) -> anyhow::Result<Result<FenceAnswer, String>> {
    let socket = match &flags.status_socket {
        Some(path) => path.clone(),
        None => find_socket()?,
    };
    let auto = word == "auto";
    let request = FenceRequest {
        fence: word.to_owned(),
        for_seconds: if auto { 0.0 } else { flags.lasts.0.as_secs_f64() },
        reason: if auto { String::new() } else { flags.reason.clone() },
    };
    let body = Full::new(Bytes::from(serde_json::to_vec(&request)?));
    let request = Request::post("/fence").header("host", "localhost").body(body)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (status, text) =
        runtime.block_on(answer_of(&socket, request)).with_context(|| format!("cannot ask {}", socket.display()))?;
    // An older agent says nothing more.
    Ok(if status.is_success() {
        Ok(serde_json::from_str(&text).unwrap_or_default())
    } else {
        Err(text.trim_end().to_owned())
    })
}

fn done(word: &str, flags: &FenceFlags) -> String {
    let lasts = shown(flags.lasts.0.max(Duration::ZERO).as_secs_f64());
    match word {
        "on" => format!("The fence is up for {lasts}: new volumes are refused, those in use can be unmounted."),
        "off" => format!(
            "The fence is off for {lasts}: nothing is refused, and the driver stays registered, whatever its health."
        ),
        _ => "Health decides about the fence again.".to_owned(),
    }
}
