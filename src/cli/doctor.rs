//! `csi-warden doctor`: what a node, a pod or a manifest lacks, and how to mend it.

use super::given::{Given, GivenError};
use super::go_flags::normalise;
use super::look::{Column, Look, fitting, line, row, titles, width, wrapped};
use super::run::RunFlags;
use super::{USAGE, complain, print, status, usage};
use crate::doctor::finding::{Finding, Status, verdict};
use crate::doctor::place::{Own, Place, Sockets};
use crate::doctor::{self, Agent, manifest};
use clap::{Arg, ArgAction, Command, CommandFactory};
use serde_json::json;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Where the host's `/etc` is mounted, unless said otherwise.
const ETC: &str = "/etc";

const HELP: &str = "\
Exit codes: 0 nothing failed, 1 some check failed, 2 nothing could be told, or usage.
In an agent's container its flags and settings file are found by themselves. See docs/doctor.md.";

/// Exit codes: 0 nothing failed, 1 some check failed, 2 nothing could be told, or usage.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let typed: Vec<OsString> = arguments.collect();
    let stray = normalise(&flags(), typed.clone()).rest;
    if let Some(stray) = stray.first() {
        complain(&format!("csi-warden doctor takes no {stray:?}; see csi-warden doctor --help"));
        return ExitCode::from(USAGE);
    }
    let (given, unread) = match read(typed) {
        Ok(read) => read,
        Err(error) => return usage(&error),
    };
    let output = text(&given, "output").unwrap_or_default();
    if !["table", "json"].contains(&output.as_str()) {
        complain(&format!("csi-warden doctor: --output={output:?} is unknown: use table or json"));
        return ExitCode::from(USAGE);
    }
    let manifests: Vec<&PathBuf> = given.matches.get_many("manifest").into_iter().flatten().collect();
    let findings = if manifests.is_empty() {
        match node(&given, unread) {
            Ok(findings) => findings,
            Err(error) => {
                super::fail(&error);
                return ExitCode::from(USAGE);
            }
        }
    } else {
        manifests.into_iter().flat_map(|path| manifest::check(path)).collect()
    };
    print(&if output == "json" { as_json(&findings) } else { table(&findings, Look::of_stdout()) });
    ExitCode::from(verdict(&findings))
}

/// The flags of `run`, and its own.
pub fn flags() -> Command {
    let usage = "csi-warden doctor [--config FILE] [flags of run]\n       csi-warden doctor --manifest FILE";
    let own = |arg: Arg| arg.help_heading("Doctor");
    RunFlags::command()
        .about("Checks node, paths and permissions, or manifests, and says how to mend what is wrong; changes nothing")
        .long_about(None)
        .override_usage(usage)
        .after_help(HELP)
        .arg(own(Arg::new("output").long("output").value_name("FORM").default_value("table").help("table or json")))
        .arg(own(Arg::new("etc_root")
            .long("etc-root")
            .value_name("DIR")
            .default_value(ETC)
            .value_parser(clap::value_parser!(PathBuf))
            .help(
                "Where the host's /etc is mounted: NetworkManager, modprobe.d, and the kubelet's unit are looked at",
            )))
        .arg(own(Arg::new("manifest")
            .long("manifest")
            .value_name("FILE")
            .action(ArgAction::Append)
            .value_parser(clap::value_parser!(PathBuf))
            .help("Check this YAML file of Kubernetes objects instead of the node, on any machine; may be repeated")))
}

/// What is given, or what the agent beside us was given; and why a settings file could not be read.
fn read(typed: Vec<OsString>) -> Result<(Given, Option<String>), clap::Error> {
    let mut arguments = normalise(&flags(), typed).flags;
    // They say where to look, and not at which agent.
    let own = [
        "--output=",
        "--etc-root=",
        "--manifest=",
        "--sysfs-root=",
        "--dev-root=",
        "--proc-root=",
        "--status-socket=",
        "--help",
    ];
    let is_own = |flag: &OsString| own.iter().any(|own| flag.to_string_lossy().starts_with(own));
    if arguments.iter().all(is_own)
        && let Some(agents) = status::arguments_of_process_1()
    {
        arguments.splice(0..0, normalise(&RunFlags::command(), agents).flags);
    }
    match Given::read(flags(), arguments.iter().cloned()) {
        Ok(given) => Ok((given, None)),
        Err(GivenError::Usage(error)) => Err(error),
        Err(GivenError::File(error)) => {
            arguments.retain(|flag| !flag.to_string_lossy().starts_with("--config="));
            match Given::read(flags(), arguments.into_iter()) {
                Ok(given) => Ok((given, Some(format!("{:#}", anyhow::Error::from(error))))),
                Err(GivenError::Usage(error)) => Err(error),
                // There is no file any more.
                Err(GivenError::File(error)) => Err(clap::Error::raw(clap::error::ErrorKind::Io, error)),
            }
        }
    }
}

fn text(given: &Given, name: &str) -> Option<String> {
    given.matches.get_one::<String>(name).cloned()
}

fn node(given: &Given, unread: Option<String>) -> anyhow::Result<Vec<Finding>> {
    let mut findings = vec![settings(given, unread)];
    let place = place(given);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(async {
        let agent = ask(given).await;
        doctor::node(place, &agent).await
    });
    // A read may sit in the kernel for ever; the process does not wait for it.
    runtime.shutdown_timeout(Duration::ZERO);
    findings.extend(found);
    Ok(findings)
}

async fn ask(given: &Given) -> Agent {
    let is_named = given.flags.named_status_socket().is_some();
    match status::socket_of(Some(&given.flags)) {
        Ok(socket) => match status::ask(&socket).await {
            Ok((_, snapshot)) => Agent::Answers(Box::new(snapshot)),
            // A socket is there, so an agent was.
            Err(error) => Agent::Absent { why: format!("{}: {error:#}", socket.display()), is_named: true },
        },
        Err(error) => Agent::Absent { why: format!("{error:#}"), is_named },
    }
}

/// Whether `run` would start with these flags.
fn settings(given: &Given, unread: Option<String>) -> Finding {
    const CHECK: &str = "settings";
    const FIX: &str = "csi-warden config check, with the same flags";
    if let Some(why) = unread {
        return Finding::fail(CHECK, why, FIX);
    }
    if !given.flags.is_told() && given.file.is_none() {
        return Finding::not_applicable(CHECK, "no flags of an agent are given");
    }
    let checked = if given.flags.is_told() { given.settings().map(drop) } else { given.watched().map(drop) };
    match checked {
        Ok(()) => Finding::pass(CHECK, "csi-warden run would start with them"),
        Err(problems) => Finding::fail(CHECK, problems.join("; "), FIX),
    }
}

fn place(given: &Given) -> Place {
    let flags = &given.flags;
    let probes = given.watched().map(|watched| watched.probes).unwrap_or_default();
    let own = Own::read();
    let etc: PathBuf = given.matches.get_one("etc_root").cloned().unwrap_or_else(|| ETC.into());
    let sockets = flags.registration_paths().map(|(driver, told, registration_folder)| Sockets {
        driver,
        told,
        registration_folder,
        state_folder: (!probes.is_empty()).then(|| flags.state_folder()),
    });
    let etc_is_doubtful = own.in_pod && etc == std::path::Path::new(ETC);
    Place { host: flags.host(), etc, etc_is_doubtful, sockets, probes, own }
}

fn as_json(findings: &[Finding]) -> String {
    let count = |status: Status| findings.iter().filter(|finding| finding.status == status).count();
    let summary = json!({
        "pass": count(Status::Pass),
        "fail": count(Status::Fail),
        "unknown": count(Status::Unknown),
        "notApplicable": count(Status::NotApplicable),
    });
    format!("{:#}", json!({ "version": env!("CARGO_PKG_VERSION"), "summary": summary, "checks": findings }))
}

/// Indentation of what was seen and of the fix, below the check's name.
const INDENT: &str = "  ";

fn table(findings: &[Finding], look: Look) -> String {
    let names = findings.iter().map(|finding| width(finding.check)).max().unwrap_or(0).max(5);
    let mut columns = [
        Column { title: "CHECK", width: names, right: false, dispensable: 0 },
        Column { title: "STATUS", width: 14, right: false, dispensable: 0 },
    ];
    let fit = fitting(&mut columns, look.columns);
    let mut text = String::new();
    line(&mut text, &look.cut(&titles(&columns, &fit)));
    // What is to be done comes first; within that, in the order of the checks.
    let order = [Status::Fail, Status::Unknown, Status::Pass, Status::NotApplicable];
    let sorted = order.into_iter().flat_map(|status| findings.iter().filter(move |finding| finding.status == status));
    for finding in sorted {
        let (word, colour) = match finding.status {
            Status::Pass => ("pass", "success"),
            Status::Fail => ("FAIL", "failure"),
            Status::Unknown => ("unknown", "unknown"),
            Status::NotApplicable => ("not applicable", ""),
        };
        let colour = Some(colour).filter(|colour| !colour.is_empty());
        line(&mut text, &row(look, &columns, &fit, &[(finding.check, None), (word, colour)]));
        for part in wrapped(&finding.seen, look.columns.saturating_sub(INDENT.len())) {
            line(&mut text, &format!("{INDENT}{part}"));
        }
        // It is to be copied, so no line ends within it, however narrow the terminal.
        if let Some(fix) = &finding.fix {
            line(&mut text, &format!("{INDENT}fix: {fix}"));
        }
    }
    let count = |status: Status| findings.iter().filter(|finding| finding.status == status).count();
    let summary = format!(
        "{} passed, {} failed, {} unknown, {} not applicable",
        count(Status::Pass),
        count(Status::Fail),
        count(Status::Unknown),
        count(Status::NotApplicable)
    );
    text.push('\n');
    for part in wrapped(&summary, look.columns) {
        line(&mut text, &part);
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests;
