//! `csi-warden status`: asks a running agent over its status socket.

use super::go_flags::{normalise, parse_bool};
use super::look::{Look, line, wrapped};
use super::run::RunFlags;
use super::{USAGE, complain, fail, print, print_to_reader, usage};
use crate::config::go_duration::GoDuration;
use crate::probe::observed;
use crate::status::next::shown;
use crate::status::server::SUFFIX;
use crate::status::snapshot::{ProbeNow, Snapshot};
use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use clap::{CommandFactory, FromArgMatches, Parser};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The agent answers from memory.
const DEADLINE: Duration = Duration::from_secs(5);

/// Where an agent's state usually lies, if its own flags cannot be read.
const USUAL_FOLDERS: [&str; 2] = ["/csi", "/run/csi"];

/// Shows what a running agent knows: the registration, each probe, and what would happen next.
#[derive(Debug, Parser)]
#[command(name = "csi-warden status", args_override_self = true, max_term_width = 110)]
pub struct StatusFlags {
    /// The agent's status socket [default: found by the flags of process 1, else in /csi and /run/csi]
    #[arg(long, value_name = "PATH")]
    status_socket: Option<PathBuf>,
    /// table or json
    #[arg(long, value_name = "FORM", default_value = "table")]
    output: String,
    /// Show it again and again, each --period
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set)]
    watch: bool,
    /// With --watch: from one look to the next
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    period: GoDuration,
}

/// Exit codes: 0 registered, 1 not registered, 2 no answer, or a flag.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = StatusFlags::command();
    let normalised = normalise(&command, arguments);
    if let Some(stray) = normalised.rest.first() {
        complain(&format!("csi-warden status takes no {stray:?}; see csi-warden status --help"));
        return ExitCode::from(USAGE);
    }
    let matches =
        command.try_get_matches_from(std::iter::once(OsString::from("csi-warden status")).chain(normalised.flags));
    let flags = match matches.and_then(|matches| StatusFlags::from_arg_matches(&matches)) {
        Ok(flags) => flags,
        Err(error) => return usage(&error),
    };
    if !["table", "json"].contains(&flags.output.as_str()) || flags.period.0.is_zero() {
        complain("csi-warden status: --output is table or json, and --period is above zero");
        return ExitCode::from(USAGE);
    }
    match run(&flags) {
        Ok(code) => code,
        Err(error) => {
            fail(&error);
            ExitCode::from(2)
        }
    }
}

fn run(flags: &StatusFlags) -> anyhow::Result<ExitCode> {
    let socket = match &flags.status_socket {
        Some(path) => path.clone(),
        None => find_socket()?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        loop {
            let answer =
                timeout(DEADLINE, ask(&socket)).await.map_err(|_elapsed| anyhow!("no answer within {DEADLINE:?}"));
            let answer = answer.and_then(|answer| answer).with_context(|| format!("cannot ask {}", socket.display()));
            if !flags.watch {
                let (text, snapshot) = answer?;
                print(&if flags.output == "json" { text } else { table(&snapshot, Look::of_stdout()) });
                return Ok(exit_code(&snapshot));
            }
            let look = Look::of_stdout();
            // Home, and clear to the end, so that nothing flickers; piped, one snapshot after the other.
            let clear = if look.colours { "\x1b[H\x1b[J" } else { "" };
            let shown = match answer {
                Ok((text, _)) if flags.output == "json" => print_to_reader(&text),
                Ok((_, snapshot)) => print_to_reader(&format!("{clear}{}", table(&snapshot, look))),
                // It may be restarting; whoever watches wants to see it come back.
                Err(error) => print_to_reader(&format!("{clear}{error:#}")),
            };
            if shown.is_err() {
                return Ok(ExitCode::SUCCESS);
            }
            tokio::select! {
                _ = tokio::signal::ctrl_c() => return Ok(ExitCode::SUCCESS),
                () = tokio::time::sleep(flags.period.0) => {}
            }
        }
    })
}

fn exit_code(snapshot: &Snapshot) -> ExitCode {
    if snapshot.registration.phase == "registered" { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn ask(socket: &Path) -> anyhow::Result<(String, Snapshot)> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get("/status").header("host", "localhost").body(Empty::<Bytes>::new())?;
    let answer = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        let text = String::from_utf8_lossy(&body).into_owned();
        if status != StatusCode::OK {
            bail!("{status}: {}", text.trim_end());
        }
        let snapshot = serde_json::from_str(&text).context("the answer is no snapshot of this version's")?;
        Ok((text, snapshot))
    };
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        // The connection is done once the answer is in; whichever comes first.
        _ = connection => answer.await,
    }
}

/// In a container the agent is process 1, and its flags tell where its state lies.
fn find_socket() -> anyhow::Result<PathBuf> {
    let agent = flags_of_process_1();
    if let Some(named) = agent.as_ref().and_then(RunFlags::named_status_socket) {
        return Ok(named);
    }
    let mut folders: Vec<PathBuf> = agent.map(|flags| flags.state_folder()).into_iter().collect();
    folders.extend(USUAL_FOLDERS.map(PathBuf::from));
    for folder in &folders {
        let mut found = sockets_in(folder);
        found.sort();
        match found.len() {
            0 => {}
            1 => return Ok(found.remove(0)),
            _ => bail!(
                "several agents keep their status socket in {}: choose one with --status-socket",
                folder.display()
            ),
        }
    }
    let places: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    bail!(
        "no status socket (*{SUFFIX}) in {}: it lies in the agent's --state-dir, and only with a health source; name it with --status-socket",
        places.join(", ")
    )
}

fn flags_of_process_1() -> Option<RunFlags> {
    let line = std::fs::read("/proc/1/cmdline").ok()?;
    let mut arguments =
        line.split(|byte| *byte == 0).filter(|word| !word.is_empty()).map(|word| OsStr::from_bytes(word).to_owned());
    let program = arguments.next()?;
    let name = Path::new(&program).file_name()?.to_str()?;
    if !["csi-warden", "csi-node-driver-registrar"].contains(&name) {
        return None;
    }
    let arguments: Vec<OsString> = arguments.skip_while(|word| word == "run").collect();
    let normalised = normalise(&RunFlags::command(), arguments);
    RunFlags::try_parse_from(std::iter::once(program).chain(normalised.flags)).ok()
}

fn sockets_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().as_bytes().ends_with(SUFFIX.as_bytes()))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        .map(|entry| entry.path())
        .collect()
}

fn table(snapshot: &Snapshot, look: Look) -> String {
    let registration = &snapshot.registration;
    let mut lines = vec![
        ("driver", snapshot.driver.clone().unwrap_or_else(|| "not known yet".to_owned()), ""),
        (
            "registration",
            format!("{} for {}", words(&registration.phase), shown(registration.for_seconds)),
            registration.phase.as_str(),
        ),
    ];
    if let Some(trouble) = &registration.trouble {
        lines.push(("", trouble.clone(), "lost"));
    }
    if let Some(health) = &snapshot.health {
        lines.push((
            "health",
            format!("{} for {}", health.verdict, shown(health.for_seconds)),
            health.verdict.as_str(),
        ));
        if let (true, Some(reason)) = (health.verdict == "unhealthy", &health.cause_reason) {
            let probe = health.cause_probe.as_deref().filter(|probe| !probe.is_empty());
            lines.push(("", probe.map_or_else(|| reason.clone(), |probe| format!("{probe}: {reason}")), "lost"));
        }
    }
    lines.push(("next", snapshot.next.clone(), ""));
    let mut text = String::new();
    for (name, words, colour) in lines {
        for (number, part) in wrapped(&words, look.columns.saturating_sub(14)).into_iter().enumerate() {
            let part = if colour.is_empty() { part } else { look.paint(&part, colour) };
            line(&mut text, &format!("{:<14}{part}", if number == 0 { name } else { "" }));
        }
    }
    if !snapshot.probes.is_empty() {
        text.push('\n');
        probes(&mut text, &snapshot.probes, look);
    }
    text.trim_end().to_owned()
}

fn probes(text: &mut String, probes: &[ProbeNow], look: Look) {
    let name_width = probes.iter().map(|probe| probe.name.chars().count()).max().unwrap_or(0).clamp(5, 24);
    line(
        text,
        &format!(
            "{:<name_width$}  {:<11}  {:<7}  {:>6}  {:<9}  {:>6}",
            "PROBE", "TYPE", "LAST", "AGE", "STREAK", "NEXT"
        ),
    );
    for probe in probes {
        let age = probe.age_seconds.map_or_else(|| "-".to_owned(), shown);
        let next = probe.next_in_seconds.map_or_else(|| "-".to_owned(), shown);
        let streak = match (probe.failures, probe.successes) {
            (0, 0) => "-".to_owned(),
            (0, good) => format!("{} good", if good > 9999 { ">9999".to_owned() } else { good.to_string() }),
            (bad, _) => format!("{bad}/{} bad", probe.failure_threshold),
        };
        let outcome = probe.outcome.as_deref().unwrap_or("-");
        let painted = look.paint(&format!("{outcome:<7}"), outcome);
        let name: String = probe.name.chars().take(name_width).collect();
        line(text, &format!("{name:<name_width$}  {:<11}  {painted}  {age:>6}  {streak:<9}  {next:>6}", probe.r#type));
        if let Some(reason) = &probe.reason {
            let message = probe.message.as_deref().filter(|message| !message.is_empty());
            let words = message.map_or_else(|| reason.clone(), |message| format!("{reason}: {message}"));
            let warns = if probe.on_failure == "warn" { " (only warns)" } else { "" };
            line(text, &look.cut(&format!("  {words}{warns}")));
        }
        for seen in observed::lines(&probe.observed) {
            line(text, &look.cut(&format!("  {seen}")));
        }
    }
}

fn words(phase: &str) -> &str {
    match phase {
        "waitingForDriver" => "waiting for the driver",
        "waitingForHealth" => "waiting for the first verdict",
        "waitingForKubelet" => "waiting for the kubelet",
        "standingBy" => "standing by",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::snapshot::{HealthNow, RegistrationNow};

    fn snapshot() -> Snapshot {
        let probe = |name: &str, outcome: &str, failures| ProbeNow {
            name: name.into(),
            r#type: "health-file".into(),
            outcome: Some(outcome.into()),
            reason: (outcome != "success").then(|| "HealthFileError".into()),
            message: (outcome != "success").then(|| "mlx5_0 port 1 is DOWN ".repeat(8)),
            observed: serde_json::Map::new(),
            age_seconds: Some(3.21),
            verdict: "healthy".into(),
            failures,
            successes: if failures == 0 { 12 } else { 0 },
            failure_threshold: 2,
            success_threshold: 2,
            on_failure: "fail".into(),
            next_in_seconds: Some(26.8),
        };
        let mut snapshot = Snapshot {
            version: "0".into(),
            driver: Some("x.example.com".into()),
            registration: RegistrationNow {
                phase: "registered".into(),
                for_seconds: 7500.0,
                confirmed: true,
                socket: None,
                trouble: None,
            },
            health: Some(HealthNow {
                verdict: "healthy".into(),
                for_seconds: 7500.0,
                cause_probe: None,
                cause_reason: None,
                recovery_in_seconds: None,
                on_unhealthy: "deregister".into(),
            }),
            probes: vec![probe("fabric", "failure", 1), probe("disk", "success", 0)],
            next: String::new(),
        };
        snapshot.next = crate::status::next::words(&snapshot);
        snapshot
    }

    #[test]
    fn table_reads_well_and_never_wraps() {
        let shown = table(&snapshot(), Look { terminal: false, colours: false, columns: 80 });
        insta::assert_snapshot!(shown, @r"
        driver        x.example.com
        registration  registered for 2h5m
        health        healthy for 2h5m
        next          1 more failure of fabric in a row withdraws the driver; next look
                      in 26s

        PROBE   TYPE         LAST        AGE  STREAK       NEXT
        fabric  health-file  failure      3s  1/2 bad       26s
          HealthFileError: mlx5_0 port 1 is DOWN mlx5_0 port 1 is DOWN mlx5_0 port 1 is…
        disk    health-file  success      3s  12 good       26s
        ");
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    }

    #[test]
    fn colours_are_for_terminals() {
        assert!(table(&snapshot(), Look { terminal: false, colours: true, columns: 80 }).contains("\x1b[32m"));
        assert!(!table(&snapshot(), Look { terminal: false, colours: false, columns: 80 }).contains('\x1b'));
    }

    #[test]
    fn flags_are_well_formed() {
        StatusFlags::command().debug_assert();
    }
}
