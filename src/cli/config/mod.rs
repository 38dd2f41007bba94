//! `csi-warden config check` and `config print`: what a start would say, without a start.

mod hardware;
mod in_force;
mod render;

use super::given::{Given, GivenError};
use super::run::RunFlags;
use super::{USAGE, complain, fail, print, usage};
use crate::config::file::FileError;
use crate::config::settings::Settings;
use clap::{Arg, Command, CommandFactory};
use render::Form;
use std::ffi::OsString;
use std::process::ExitCode;

const HELP: &str = "\
Usage: csi-warden config check [--config FILE] [flags of run]
       csi-warden config print [--config FILE] [flags of run] [--output table|json|yaml]

check  finds everything that would keep `csi-warden run` from starting with these flags, on this machine
print  shows every setting in force, and whether it is a default, a flag, or which line of the file says so

Exit codes: 0 good, 1 bad, 2 usage.";

/// Exit codes: 0 good, 1 bad, 2 usage.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = arguments.next().unwrap_or_default();
    match command.to_string_lossy().as_ref() {
        "check" => check(arguments),
        "print" => show(arguments),
        "help" | "--help" | "-help" | "-h" => {
            print(HELP);
            ExitCode::SUCCESS
        }
        _ => {
            complain(HELP);
            ExitCode::from(USAGE)
        }
    }
}

fn check(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let given =
        match Given::read(flags("check", "Finds everything that would keep `csi-warden run` from starting"), arguments)
        {
            Ok(given) => given,
            Err(error) => return refused(error),
        };
    match checked(&given) {
        Ok(settings) => {
            for warning in &settings.warnings {
                complain(&format!("warning: {warning}"));
            }
            let (probes, groups) = settings.health.map_or((0, 0), |health| (health.probes.len(), health.groups.len()));
            print(&format!("good: {probes} {}, {groups} {}", noun(probes, "probe"), noun(groups, "group")));
            ExitCode::SUCCESS
        }
        Err(problems) => {
            for problem in problems.iter().flat_map(|problem| problem.lines()) {
                complain(problem);
            }
            ExitCode::FAILURE
        }
    }
}

fn show(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let output = Arg::new("output")
        .long("output")
        .value_name("FORM")
        .default_value("table")
        .help("table, json or yaml; the last is a settings file, each origin in a comment, refused until hidden values are filled in")
        .value_parser(Form::parse);
    let given = match Given::read(
        flags("print", "Shows every setting in force, and where it came from").arg(output),
        arguments,
    ) {
        Ok(given) => given,
        Err(error) => return refused(error),
    };
    let settings = match checked(&given) {
        Ok(settings) => settings,
        Err(problems) => return fail(&anyhow::anyhow!(problems.join("\n"))),
    };
    let form = given.matches.get_one::<Form>("output").copied().unwrap_or(Form::Table);
    let all = in_force::in_force(&settings, &RunFlags::command(), &given.matches, given.file.as_ref(), &given.typed);
    print(render::render(&all, form).trim_end());
    ExitCode::SUCCESS
}

/// Every problem, or the settings.
fn checked(given: &Given) -> Result<Settings, Vec<String>> {
    match (given.settings(), given.flags.logging.settings()) {
        (settings, Ok(_)) => settings,
        (Ok(_), Err(error)) => Err(vec![error.to_string()]),
        (Err(problems), Err(error)) => Err(std::iter::once(error.to_string()).chain(problems).collect()),
    }
}

fn refused(error: GivenError) -> ExitCode {
    match error {
        GivenError::Usage(error) => usage(&error),
        GivenError::File(FileError::Problems(problems)) => {
            for problem in &problems {
                complain(&problem.to_string());
            }
            ExitCode::FAILURE
        }
        GivenError::File(error) => fail(&error.into()),
    }
}

/// The flags of `run` under this command's name.
fn flags(command: &str, about: &'static str) -> Command {
    let usage = format!("csi-warden config {command} [--config FILE] [flags of run]");
    RunFlags::command().about(about).long_about(None).override_usage(usage).after_help("")
}

fn noun(count: usize, one: &str) -> String {
    if count == 1 { one.to_owned() } else { format!("{one}s") }
}
