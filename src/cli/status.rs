//! `csi-warden status`: asks a running agent over its status socket.

mod table;

use super::given::{Given, GivenError};
use super::go_flags::{normalise, parse_bool};
use super::look::{Look, wrapped};
use super::run::RunFlags;
use super::{USAGE, complain, fail, print, print_to_reader, usage};
use crate::config::go_duration::GoDuration;
use crate::status::server::SUFFIX;
use crate::status::snapshot::Snapshot;
use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use clap::{CommandFactory, FromArgMatches, Parser};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use table::table;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The agent answers from memory.
const DEADLINE: Duration = Duration::from_secs(5);

/// Before the next try where the agent's queue is full.
const QUEUE_PAUSE: Duration = Duration::from_millis(20);

/// Where an agent's state usually lies, if its own flags cannot be read.
const USUAL_FOLDERS: [&str; 2] = ["/csi", "/run/csi"];

/// Shows what a running agent knows: the registration, each probe, and what would happen next.
#[derive(Debug, Parser)]
#[command(name = "csi-warden status", args_override_self = true, max_term_width = 110)]
pub struct StatusFlags {
    /// The agent's status socket [default: found by the flags and the settings file of process 1, else in /csi and /run/csi]
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
            let answer = ask(&socket).await.with_context(|| format!("cannot ask {}", socket.display()));
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
                Err(error) => {
                    let words = format!("{error:#}");
                    let words = if look.terminal { wrapped(&words, look.columns).join("\n") } else { words };
                    print_to_reader(&format!("{clear}{words}"))
                }
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

pub(super) async fn ask(socket: &Path) -> anyhow::Result<(String, Snapshot)> {
    let request = Request::get("/status").header("host", "localhost").body(Empty::<Bytes>::new())?;
    let (status, text) = answer_of(socket, request).await?;
    if status != StatusCode::OK {
        bail!("{status}: {}", text.trim_end());
    }
    let snapshot = serde_json::from_str(&text).context("the answer is no snapshot of this version's")?;
    Ok((text, snapshot))
}

/// The agent's answer to one request.
pub(super) async fn answer_of<B>(socket: &Path, request: Request<B>) -> anyhow::Result<(StatusCode, String)>
where
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let whole = async {
        let stream = loop {
            match UnixStream::connect(socket).await {
                // Many ask at once, and its queue is full for a moment.
                Err(error) if error.kind() == ErrorKind::WouldBlock => tokio::time::sleep(QUEUE_PAUSE).await,
                connected => break connected?,
            }
        };
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let answer = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            Ok((status, String::from_utf8_lossy(&body).into_owned()))
        };
        tokio::pin!(answer);
        tokio::select! {
            answer = &mut answer => answer,
            // The connection is done once the answer is in; whichever comes first.
            _ = connection => answer.await,
        }
    };
    timeout(DEADLINE, whole).await.map_err(|_elapsed| anyhow!("no answer within {DEADLINE:?}"))?
}

/// In a container the agent is process 1, and its flags tell where its state lies.
pub(super) fn find_socket() -> anyhow::Result<PathBuf> {
    socket_of(flags_of_process_1().as_ref())
}

/// The status socket of an agent with these flags.
pub(super) fn socket_of(agent: Option<&RunFlags>) -> anyhow::Result<PathBuf> {
    if let Some(named) = agent.and_then(RunFlags::named_status_socket) {
        return Ok(named);
    }
    let mut folders: Vec<PathBuf> = agent.map(RunFlags::state_folder).into_iter().collect();
    folders.extend(USUAL_FOLDERS.map(PathBuf::from));
    // The default of an agent's flags is one of them.
    let mut seen = std::collections::BTreeSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
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
    flags_of(&std::fs::read("/proc/1/cmdline").ok()?)
}

/// The flags of an agent with this command line, and what its settings file says besides.
fn flags_of(command_line: &[u8]) -> Option<RunFlags> {
    let arguments = arguments_of(command_line)?;
    match Given::read(RunFlags::command(), arguments.iter().cloned()) {
        Ok(given) => Some(given.flags),
        Err(GivenError::Usage(_)) => None,
        // The agent read it once, and goes on whatever becomes of it.
        Err(GivenError::File(_)) => {
            let flags = normalise(&RunFlags::command(), arguments).flags;
            RunFlags::try_parse_from(std::iter::once(OsString::from("csi-warden")).chain(flags)).ok()
        }
    }
}

/// The arguments of the agent that is process 1, if it is one.
pub(super) fn arguments_of_process_1() -> Option<Vec<OsString>> {
    arguments_of(&std::fs::read("/proc/1/cmdline").ok()?)
}

fn arguments_of(command_line: &[u8]) -> Option<Vec<OsString>> {
    let mut arguments = command_line
        .split(|byte| *byte == 0)
        .filter(|word| !word.is_empty())
        .map(|word| OsStr::from_bytes(word).to_owned());
    let program = arguments.next()?;
    let name = Path::new(&program).file_name()?.to_str()?;
    let is_agent = ["csi-warden", "csi-node-driver-registrar"].contains(&name);
    is_agent.then(|| arguments.skip_while(|word| word == "run").collect())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::look::width;
    use crate::status::snapshot::{HealthNow, ProbeNow, RegistrationNow};

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
            bypass: false,
            version: "0".into(),
            driver: Some("x.example.com".into()),
            fence: None,
            volumes: None,
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
    fn no_line_is_wider_than_the_terminal_whatever_is_in_it() {
        let mut odd = snapshot();
        odd.registration.trouble = Some(format!("{} 網路斷了", "/a/very/long/path".repeat(9)));
        odd.probes[0].name = "a-name-of-more-than-24-characters".into();
        odd.probes[0].message = Some("網路斷了".repeat(20));
        for columns in 14..130 {
            let shown = table(&odd, Look { terminal: true, colours: false, columns });
            let widest = shown.lines().map(width).max().unwrap();
            assert!(widest <= columns, "{columns}:\n{shown}");
            let titles = shown.lines().find(|line| line.starts_with("PROBE")).unwrap();
            assert_eq!(titles.contains("TYPE"), columns >= 61, "{columns}: {titles}");
        }
        let shown = table(&odd, Look { terminal: false, colours: false, columns: 40 });
        assert!(shown.contains("a-name-of-m…  failure      3s  1/2 bad\n"), "{shown}");
        assert!(shown.contains("\ndisk          success      3s  12 good"), "{shown}");
    }

    #[test]
    fn colours_are_for_terminals() {
        assert!(table(&snapshot(), Look { terminal: false, colours: true, columns: 80 }).contains("\x1b[32m"));
        assert!(!table(&snapshot(), Look { terminal: false, colours: false, columns: 80 }).contains('\x1b'));
    }

    #[test]
    fn an_agents_socket_is_found_by_its_flags_and_its_settings_file() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("warden.yaml");
        let found = |arguments: &str| {
            let line = format!("/csi-warden run --config={} {arguments}", config.display()).replace(' ', "\0");
            let flags = flags_of(line.as_bytes()).unwrap();
            (flags.named_status_socket(), flags.state_folder())
        };
        assert_eq!(found("--csi-address=/c/s"), (None, "/c".into()), "without the file");
        std::fs::write(&config, "csiAddress: /file/csi.sock\n").unwrap();
        assert_eq!(found(""), (None, "/file".into()));
        assert_eq!(found("--csi-address=/typed/csi.sock"), (None, "/typed".into()));
        std::fs::write(&config, "csiAddress: /file/csi.sock\nstateDir: /state\nstatusSocket: /own.sock\n").unwrap();
        assert_eq!(found(""), (Some("/own.sock".into()), "/state".into()));
        std::fs::write(&config, "stateDir: /state\nstartGrace: soon\n").unwrap();
        assert_eq!(found(""), (None, "/state".into()), "what is wrong since the start says nothing");
        assert!(flags_of(b"/bin/sh\0-c\0csi-warden").is_none());
    }

    #[test]
    fn flags_are_well_formed() {
        StatusFlags::command().debug_assert();
    }
}
