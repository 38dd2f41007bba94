//! `csi-warden replay`: what would have happened on the node that a trace was recorded on.

use super::given::{Given, GivenError};
use super::go_flags::{normalise, parse_bool};
use super::look::{Look, line, padded, wrapped};
use super::run::RunFlags;
use super::{USAGE, complain, fail, print, usage};
use crate::config::file::FileError;
use crate::config::settings::Health as Settings;
use crate::policy::outcome::Health;
use crate::policy::volumes::InUse;
use crate::trace::Trace;
use crate::trace::format::MAX_BYTES;
use crate::trace::player::play;
use crate::trace::settings::{KINDS, has_smart, of_types};
use crate::trace::timeline::{Happening, Played};
use clap::{Arg, ArgAction, Command, CommandFactory};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::ExitCode;

/// A time, such as `  123.4 s`, and two blanks.
const TIME_COLUMNS: usize = 12;

/// `--output`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Table,
    Json,
}

/// `csi-warden replay` with the flags of `run`.
pub fn command() -> Command {
    let output =
        Arg::new("output").long("output").value_name("FORM").default_value("table").help("table or json").value_parser(
            |text: &str| match text {
                "table" => Ok(Form::Table),
                "json" => Ok(Form::Json),
                other => Err(format!("{other:?} is no form: use table or json")),
            },
        );
    let volumes = Arg::new("volumes-in-use")
        .long("volumes-in-use")
        .value_name("BOOL")
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("true")
        .default_value("false")
        .hide_default_value(true)
        .value_parser(parse_bool)
        .action(ArgAction::Set)
        .help("Assume that volumes are in use all the time, so that fence-then-deregister waits for --drain-timeout");
    RunFlags::command()
        .name("csi-warden replay")
        .about("Plays a trace of `csi-warden record` through the real probes and rules, and tells what would have happened")
        .long_about(
            "Plays a trace of `csi-warden record` through the real probes and rules, and tells what would have happened.\n\n\
             Takes the flags of `run` and its settings file; without probes of their own, those that the trace was recorded for, by \
             their defaults. Driver and kubelet are taken to answer at once. Needs no root, touches no hardware, and writes to a temporary \
             folder only. Exit 0: healthy in the end; 1: not; 2: no such trace, or a flag.",
        )
        .override_usage("csi-warden replay TRACE [--config FILE] [flags of run] [--output table|json] [--volumes-in-use]")
        .after_help("")
        .arg(output)
        .arg(volumes)
}

/// Exit codes: 0 healthy in the end, 1 not, 2 a trace or a flag that cannot be.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let (path, flags) = match split(arguments) {
        Ok(split) => split,
        Err(stray) => return refuse(&stray),
    };
    let mut given = match Given::read(command(), flags.clone().into_iter()) {
        Ok(given) => given,
        Err(error) => return refused(error),
    };
    let Some(path) = path else { return refuse("name the trace: csi-warden replay TRACE") };
    let trace = match read(Path::new(&path)) {
        Ok(trace) => trace,
        Err(problem) => return refuse(&format!("{}: {problem}", Path::new(&path).display())),
    };
    // Without probes of their own, those of the trace.
    if !given.typed.iter().any(|flag| matches!(flag.as_str(), "config" | "health-file")) {
        given = match with_the_traces_probes(&trace, flags) {
            Ok(given) => given,
            Err(problem) => return refuse(&problem),
        };
    }
    let settings = match given.health() {
        Ok(settings) if settings.probes.is_empty() => {
            return refuse("the settings have no probes, so there is nothing to play");
        }
        Ok(settings) => settings,
        Err(problems) => {
            for problem in problems.iter().flat_map(|problem| problem.lines()) {
                complain(problem);
            }
            return ExitCode::from(USAGE);
        }
    };
    let form = given.matches.get_one::<Form>("output").copied().unwrap_or(Form::Table);
    let in_use = given.matches.get_one::<bool>("volumes-in-use").copied().unwrap_or_default();
    match run(&trace, &settings, if in_use { InUse::Yes(1) } else { InUse::No }) {
        Ok(played) => {
            show(&played, form);
            if played.end.health == Health::Healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            fail(&error);
            ExitCode::from(USAGE)
        }
    }
}

/// The trace before the flags or behind them, and the flags.
fn split(arguments: impl Iterator<Item = OsString>) -> Result<(Option<OsString>, Vec<OsString>), String> {
    let mut arguments = arguments.peekable();
    let first = arguments.next_if(|first| !first.as_encoded_bytes().starts_with(b"-"));
    let normalised = normalise(&command(), arguments);
    let mut rest = first.into_iter().chain(normalised.rest);
    let path = rest.next();
    match rest.next() {
        Some(stray) => Err(format!("one trace is played at a time, so {stray:?} has no place")),
        None => Ok((path, normalised.flags)),
    }
}

fn read(path: &Path) -> Result<Trace, String> {
    let mut bytes = Vec::new();
    let opened: io::Result<Box<dyn Read>> = if path == OsStr::new("-") {
        Ok(Box::new(io::stdin()))
    } else {
        File::open(path).map(|file| Box::new(file) as _)
    };
    let most = u64::try_from(MAX_BYTES).unwrap_or(u64::MAX);
    opened.and_then(|file| file.take(most + 1).read_to_end(&mut bytes)).map_err(|error| error.to_string())?;
    Trace::parse(&bytes).map_err(|error| error.to_string())
}

/// As if a settings file had them.
fn with_the_traces_probes(trace: &Trace, mut flags: Vec<OsString>) -> Result<Given, String> {
    let known: Vec<_> = trace.probes.iter().filter(|probe| KINDS.contains(&probe.kind.as_str())).collect();
    if known.is_empty() {
        return Err("the trace names no probes: give --config with some".to_owned());
    }
    let text = of_types(known.iter().map(|probe| (probe.name.as_str(), probe.kind.as_str())), has_smart(trace));
    let written = tempfile::NamedTempFile::new().and_then(|mut file| file.write_all(text.as_bytes()).map(|()| file));
    let file = written.map_err(|error| format!("cannot write a temporary file: {error}"))?;
    let mut flag = OsString::from("--config=");
    flag.push(file.path());
    flags.insert(0, flag);
    Given::read(command(), flags.into_iter()).map_err(|error| match error {
        GivenError::Usage(error) => error.to_string(),
        GivenError::File(error) => format!("the probes of the trace cannot be: {error}"),
    })
}

fn run(trace: &Trace, settings: &Settings, in_use: InUse) -> anyhow::Result<Played> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let played = runtime.block_on(play(trace, settings, in_use));
    runtime.shutdown_background();
    Ok(played?)
}

fn show(played: &Played, form: Form) {
    match form {
        Form::Json => print(&format!("{:#}", played.json())),
        Form::Table => print(table(played, Look::of_stdout()).trim_end()),
    }
}

fn table(played: &Played, look: Look) -> String {
    let mut text = String::new();
    for note in &played.notes {
        line(&mut text, &format!("note: {note}"));
    }
    let names = played.timeline.iter().map(|happening| happening.subject().len()).max().unwrap_or_default();
    for happening in &played.timeline {
        row(&mut text, happening, names, look);
    }
    let end = &played.end;
    let (health, registered) = (end.health.name(), if end.registered { "registered" } else { "not registered" });
    let fenced = if end.fenced { ", fenced" } else { "" };
    let hold = end.release_at.map(|at| format!("; the hold would be over at {at} s")).unwrap_or_default();
    line(
        &mut text,
        &format!("{:>8} s  end: {health}, {registered}{fenced}{hold} ({} rounds)", end.at.to_string(), end.rounds),
    );
    text
}

fn row(text: &mut String, happening: &Happening, names: usize, look: Look) {
    let (word, sentence) = happening.words();
    let head = format!("{:>8} s  {}  ", happening.at.to_string(), padded(happening.subject(), names));
    let indent = TIME_COLUMNS + names + 2;
    let room = look.columns.saturating_sub(indent).max(20);
    for (number, words) in wrapped(&format!("{word}{sentence}"), room).iter().enumerate() {
        let lead = if number == 0 { head.clone() } else { " ".repeat(indent) };
        let words = match words.strip_prefix(word) {
            Some(rest) if number == 0 => format!("{}{rest}", look.paint(word, word)),
            Some(_) | None => words.clone(),
        };
        line(text, &format!("{lead}{words}"));
    }
}

fn refuse(problem: &str) -> ExitCode {
    complain(&format!("csi-warden replay: {problem}"));
    ExitCode::from(USAGE)
}

fn refused(error: GivenError) -> ExitCode {
    match error {
        GivenError::Usage(error) => return usage(&error),
        GivenError::File(FileError::Problems(problems)) => {
            for problem in &problems {
                complain(&problem.to_string());
            }
        }
        GivenError::File(error) => {
            fail(&error.into());
        }
    }
    ExitCode::from(USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_well_formed() {
        command().debug_assert();
    }
}
