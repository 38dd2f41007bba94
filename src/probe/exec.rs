//! The `exec` probe: a command's exit code says how the hardware is.

use super::Probe;
use super::lane::Abandoned;
use crate::policy::outcome::{Outcome, Reason, Severity};
use process_wrap::tokio::{ChildWrapper, CommandWrap, KillOnDrop, ProcessSession};
use std::ffi::OsString;
use std::future;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{Instant, timeout, timeout_at};

/// What is read of a command's output; the first line is the reason.
const MAX_OUTPUT_BYTES: u64 = 16 * 1024;

/// Longest reason.
const MAX_REASON_CHARS: usize = 1024;

/// Once the command has ended, its output is there; a grandchild that keeps the pipe open is not waited for.
const OUTPUT_GRACE: Duration = Duration::from_millis(100);

/// How long a killed command may take to be reaped before it is left to the runtime's own reaper.
const REAP_GRACE: Duration = Duration::from_secs(1);

/// Where programs are found; the rest of the environment is not passed on.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A command and the environment it gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// The program, looked up in the usual folders if it has no slash.
    pub program: OsString,
    /// Its arguments. There is no shell.
    pub arguments: Vec<OsString>,
    /// Variables to set, besides `PATH`.
    pub environment: Vec<(OsString, OsString)>,
}

/// What a command left behind.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub status: io::Result<ExitStatus>,
    /// What it wrote to its output, the first 16 KiB.
    pub said: Vec<u8>,
    /// Likewise, to its error output.
    pub complained: Vec<u8>,
}

/// Runs the command once, to its end.
///
/// It runs in a session of its own, and the whole session's process group is killed at the deadline, or when this is dropped.
///
/// # Errors
/// [`Abandoned`] within, when it had to be killed; the system's word when it cannot be started.
pub async fn output(command: &Command, limit: Duration) -> io::Result<Result<Ended, Abandoned>> {
    let deadline = Instant::now() + limit;
    let mut wrap = CommandWrap::with_new(&command.program, |process| {
        process
            .args(&command.arguments)
            .env_clear()
            .env("PATH", PATH)
            .envs(command.environment.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    });
    let mut child = Running(wrap.wrap(ProcessSession).wrap(KillOnDrop).spawn()?);
    let (stdout, stderr) = (child.0.stdout().take(), child.0.stderr().take());
    let (mut said, mut complained) = (Vec::new(), Vec::new());
    let status = {
        let outputs = async {
            tokio::join!(read(stdout, &mut said), read(stderr, &mut complained));
        };
        tokio::pin!(outputs);
        let ended = async {
            tokio::select! {
                () = &mut outputs => child.0.wait().await,
                status = child.0.wait() => {
                    drop(timeout(OUTPUT_GRACE, &mut outputs).await);
                    status
                }
            }
        };
        timeout_at(deadline, ended).await
    };
    // Whatever it left running in its session goes with it; the library buries what we inherit as a container's process 1.
    child.kill();
    match status {
        Ok(status) => Ok(Ok(Ended { status, said, complained })),
        Err(_elapsed) => {
            drop(timeout(REAP_GRACE, child.0.wait()).await);
            Ok(Err(Abandoned))
        }
    }
}

/// Runs the command once: exit 0 is a success, 1 a failure, anything else unknown. Its first line of output is the reason.
///
/// # Errors
/// [`Abandoned`] when it had to be killed.
pub async fn run(command: &Command, limit: Duration) -> Result<Outcome, Abandoned> {
    let name = command.program.to_string_lossy();
    let ended = match output(command, limit).await {
        Ok(ended) => ended?,
        Err(error) => {
            return Ok(Outcome::Unknown(Reason::new("ExecNotStarted", format!("cannot run {name}: {error}"))));
        }
    };
    let text = first_line(&ended.said).or_else(|| first_line(&ended.complained)).unwrap_or_default();
    Ok(match ended.status {
        Ok(status) => match status.code() {
            Some(0) => Outcome::Success,
            Some(1) => Outcome::Failure(Reason::new("ExecFailed", text), Severity::Hard),
            Some(code) => Outcome::Unknown(Reason::new("ExecUnknown", format!("{name} exited with {code}: {text}"))),
            None => Outcome::Unknown(Reason::new("ExecUnknown", format!("{name} was killed by a signal: {status}"))),
        },
        Err(error) => Outcome::Unknown(Reason::new("ExecUnknown", format!("cannot wait for {name}: {error}"))),
    })
}

/// The probe.
#[derive(Debug)]
pub struct Exec {
    command: Command,
}

impl Exec {
    /// Runs `command` each round.
    pub fn new(command: &Command) -> Self {
        Self { command: command.clone() }
    }
}

impl Probe for Exec {
    type Seen = Outcome;

    async fn look(&mut self, timeout: Duration) -> Result<Outcome, Abandoned> {
        run(&self.command, timeout).await
    }

    fn judge(&mut self, seen: Outcome, _now: std::time::Instant) -> Option<Outcome> {
        Some(seen)
    }

    async fn changed(&mut self) {
        future::pending().await
    }
}

/// A command and all that it started in its session.
struct Running(Box<dyn ChildWrapper>);

impl Running {
    fn kill(&mut self) {
        // It may have ended already.
        drop(self.0.start_kill());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads to the end; what is over the bound is read and thrown away, so that a talkative command does not block on its pipe.
async fn read(stream: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) {
    let Some(mut stream) = stream else { return };
    // A broken pipe ends the text; what came is kept.
    drop((&mut stream).take(MAX_OUTPUT_BYTES).read_to_end(into).await);
    drop(tokio::io::copy(&mut stream, &mut tokio::io::sink()).await);
}

fn first_line(output: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(output);
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    Some(line.chars().filter(|char| !char.is_control()).take(MAX_REASON_CHARS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Command {
        Command { program: "sh".into(), arguments: vec!["-c".into(), script.into()], environment: Vec::new() }
    }

    async fn said(script: &str, limit: Duration) -> (String, String) {
        let Ok(outcome) = run(&shell(script), limit).await else { return ("abandoned".into(), String::new()) };
        (outcome.name().to_owned(), outcome.reason().map(ToString::to_string).unwrap_or_default())
    }

    #[tokio::test]
    async fn exit_codes_are_outcomes_and_the_first_line_is_the_reason() {
        assert_eq!(said("exit 0", LONG).await, ("success".into(), String::new()));
        assert_eq!(said("echo; echo port 1 down; echo more; exit 1", LONG).await.1, "ExecFailed: port 1 down");
        assert_eq!(said("echo oops >&2; exit 7", LONG).await.1, "ExecUnknown: sh exited with 7: oops");
        assert_eq!(said("kill -9 $$", LONG).await.0, "unknown");
    }

    #[tokio::test]
    async fn a_missing_program_is_unknown_and_named() {
        let command = Command { program: "/no/such/program".into(), arguments: Vec::new(), environment: Vec::new() };
        let outcome = run(&command, LONG).await.unwrap();
        assert!(outcome.reason().unwrap().message.contains("/no/such/program"));
    }

    #[tokio::test]
    async fn a_command_that_hangs_and_ignores_term_is_killed_at_its_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let pid_file = folder.path().join("pid");
        let script = format!("trap '' TERM; echo $$ > {}; sleep 600 & sleep 600", pid_file.display());
        assert_eq!(said(&script, Duration::from_millis(500)).await.0, "abandoned");
        let pid = std::fs::read_to_string(pid_file).unwrap();
        let gone = || !std::path::Path::new("/proc").join(pid.trim()).exists();
        for _ in 0..100 {
            if gone() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("{pid} still runs");
    }

    #[tokio::test]
    async fn a_grandchild_that_keeps_the_pipe_is_not_waited_for() {
        let started = Instant::now();
        assert_eq!(said("sleep 30 & echo fine; exit 0", LONG).await.0, "success");
        assert!(started.elapsed() < Duration::from_secs(10));
    }

    #[tokio::test]
    async fn flooding_output_is_read_and_forgotten() {
        let (name, reason) = said("yes flood | head -c 20000000; exit 1", LONG).await;
        assert_eq!((name.as_str(), reason.as_str()), ("failure", "ExecFailed: flood"));
    }

    #[tokio::test]
    async fn environment_is_cleared_but_for_what_is_set() {
        let mut command = shell("test \"$A\" = b && test -z \"$CARGO_MANIFEST_DIR\" && test -z \"$HOME\"");
        command.environment = vec![("A".into(), "b".into())];
        assert_eq!(run(&command, LONG).await, Ok(Outcome::Success));
    }
}
