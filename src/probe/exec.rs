//! The `exec` probe: a command's exit code says how the hardware is.

use super::Probe;
use super::lane::Abandoned;
pub use super::session::{Starter, wait_for_starts};
use crate::policy::outcome::{Outcome, Reason, Severity, with_detail};
use std::ffi::OsString;
use std::future;
use std::io;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// What is read of a command's output; the first line is the reason.
const MAX_OUTPUT_BYTES: usize = 16 * 1024;

/// Room for the first words; most commands have few.
const FIRST_READ_BYTES: usize = 512;

/// What a pipe holds.
const PIPE_BYTES: usize = 64 * 1024;

/// A command may say this much before its output is read at a pace.
const FREE_OUTPUT_BYTES: usize = 1024 * 1024;

/// From one read of a flood to the next: some 6 MB a second.
const FLOOD_PAUSE: Duration = Duration::from_millis(10);

/// Longest reason.
const MAX_REASON_CHARS: usize = 1024;

/// Once the command has ended, its output is there; a grandchild that keeps the pipe open is not waited for.
const OUTPUT_GRACE: Duration = Duration::from_millis(100);

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
/// [`Abandoned`] when it had to be killed, or could not even be started in time; within, the system's word when it cannot be started.
pub async fn output(starter: &mut Starter, command: &Command, limit: Duration) -> Result<io::Result<Ended>, Abandoned> {
    let deadline = Instant::now() + limit;
    let (mut session, outputs) = match starter.start(command, deadline).await? {
        Ok(started) => started,
        Err(error) => return Ok(Err(error)),
    };
    let (mut said, mut complained) = (Vec::new(), Vec::new());
    let ended = {
        let outputs = async {
            tokio::join!(read(outputs.said, &mut said), read(outputs.complained, &mut complained));
        };
        tokio::pin!(outputs);
        let ended = async {
            tokio::select! {
                () = &mut outputs => session.ended().await,
                ended = session.ended() => {
                    drop(timeout(OUTPUT_GRACE, &mut outputs).await);
                    ended
                }
            }
        };
        timeout_at(deadline, ended).await
    };
    let status = match ended {
        // Whatever it left running in its session goes with it.
        Ok(Ok(())) => session.finish().ok_or_else(|| io::Error::other("somebody else took its exit status")),
        Ok(Err(error)) => Err(error),
        // What is left of it is killed.
        Err(_elapsed) => return Err(Abandoned::Late),
    };
    Ok(Ok(Ended { status, said, complained }))
}

/// Runs the command once: exit 0 is a success, 1 a failure, anything else unknown. Its first line of output is the reason.
///
/// # Errors
/// [`Abandoned`] as [`output`].
pub async fn run(starter: &mut Starter, command: &Command, limit: Duration) -> Result<Outcome, Abandoned> {
    let name = command.program.to_string_lossy();
    let ended = match output(starter, command, limit).await? {
        Ok(ended) => ended,
        Err(error) => {
            return Ok(Outcome::Unknown(Reason::new("ExecNotStarted", format!("cannot run {name}: {error}"))));
        }
    };
    let text = first_line(&ended.said).or_else(|| first_line(&ended.complained)).unwrap_or_default();
    let unknown = |message| Outcome::Unknown(Reason::new("ExecUnknown", message));
    Ok(match ended.status.map(|status| (status, status.code())) {
        Ok((_, Some(0))) => Outcome::Success,
        Ok((_, Some(1))) => Outcome::Failure(Reason::new("ExecFailed", text), Severity::Hard),
        Ok((_, Some(code))) => unknown(with_detail(format!("{name} exited with {code}"), &text)),
        Ok((status, None)) => unknown(format!("{name} was killed by a signal: {status}")),
        Err(error) => unknown(format!("cannot wait for {name}: {error}")),
    })
}

/// The probe.
#[derive(Debug)]
pub struct Exec {
    starter: Starter,
    command: Command,
}

impl Exec {
    /// Runs `command` each round.
    pub fn new(command: &Command) -> Self {
        Self { starter: Starter::new("exec"), command: command.clone() }
    }
}

impl Probe for Exec {
    type Seen = Outcome;

    async fn look(&mut self, timeout: Duration) -> Result<Outcome, Abandoned> {
        run(&mut self.starter, &self.command, timeout).await
    }

    fn judge(&mut self, seen: Outcome, _now: std::time::Instant) -> Option<Outcome> {
        Some(seen)
    }

    async fn changed(&mut self) {
        future::pending().await
    }
}

/// Reads to the end. What is over the bound is thrown away, so that a talkative command does not block on its pipe; and of one
/// that talks without end only so much a second, so that its flood costs us next to nothing: then it is the writer who waits.
/// Reading stops at no bound, because a command that has much to say is no failure; the deadline ends a flood.
async fn read(mut stream: Receiver, into: &mut Vec<u8>) {
    let mut total = 0;
    loop {
        into.truncate(MAX_OUTPUT_BYTES);
        into.reserve(if total < MAX_OUTPUT_BYTES { FIRST_READ_BYTES } else { PIPE_BYTES });
        match stream.read_buf(into).await {
            // A broken pipe ends the text; what came is kept.
            Ok(0) | Err(_) => break,
            Ok(read) => total += read,
        }
        if total > FREE_OUTPUT_BYTES {
            sleep(FLOOD_PAUSE).await;
        }
    }
    into.truncate(MAX_OUTPUT_BYTES);
}

fn first_line(output: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(output);
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    Some(line.chars().filter(|char| !char.is_control()).take(MAX_REASON_CHARS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::time::{ClockId, clock_gettime};

    const LONG: Duration = Duration::from_secs(20);

    fn starter() -> Starter {
        Starter::new("test")
    }

    fn shell(script: &str) -> Command {
        Command { program: "sh".into(), arguments: vec!["-c".into(), script.into()], environment: Vec::new() }
    }

    async fn said(script: &str, limit: Duration) -> (String, String) {
        let Ok(outcome) = run(&mut starter(), &shell(script), limit).await else {
            return ("abandoned".into(), String::new());
        };
        (outcome.name().to_owned(), outcome.reason().map(ToString::to_string).unwrap_or_default())
    }

    #[tokio::test]
    async fn exit_codes_are_outcomes_and_the_first_line_is_the_reason() {
        assert_eq!(said("exit 0", LONG).await, ("success".into(), String::new()));
        assert_eq!(said("echo; echo port 1 down; echo more; exit 1", LONG).await.1, "ExecFailed: port 1 down");
        assert_eq!(said("echo oops >&2; exit 7", LONG).await.1, "ExecUnknown: sh exited with 7: oops");
        assert_eq!(said("exit 7", LONG).await.1, "ExecUnknown: sh exited with 7", "nothing dangles");
        assert_eq!(said("kill -9 $$", LONG).await.0, "unknown");
    }

    #[tokio::test]
    async fn a_missing_program_is_unknown_and_named() {
        let command = Command { program: "/no/such/program".into(), arguments: Vec::new(), environment: Vec::new() };
        let outcome = run(&mut starter(), &command, LONG).await.unwrap();
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
            sleep(Duration::from_millis(50)).await;
        }
        panic!("{pid} still runs");
    }

    /// Holds a write lease on a file: whoever opens it, the kernel to run it included, waits until this has ended, or for 45 s.
    const LEASE: &str = "use Fcntl; $SIG{IO} = 'IGNORE'; $| = 1; my $set_lease = 1024; \
        open(my $file, '<', $ARGV[0]) or die $!; \
        for (1..100) { if (fcntl($file, $set_lease, F_WRLCK)) { print 'held'; sleep 60; exit } select(undef, undef, undef, 0.05) } \
        die \"no lease: $!\"";

    struct Killed(std::process::Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }

    /// As on a file server that is away.
    #[tokio::test]
    #[expect(clippy::print_stderr, reason = "a test that tests nothing says so")]
    async fn a_program_that_cannot_be_read_is_abandoned_holds_up_nobody_and_is_not_started_twice() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::copy("/bin/true", &program).unwrap();
        let mut holder = std::process::Command::new("perl");
        holder.args(["-e", LEASE]).arg(&program).stdout(std::process::Stdio::piped());
        let Ok(mut holder) = holder.spawn().map(Killed) else {
            return eprintln!("SKIPPED: there is no perl to hold a lease");
        };
        let mut held = [0; 4];
        if io::Read::read_exact(holder.0.stdout.as_mut().unwrap(), &mut held).is_err() {
            return eprintln!("SKIPPED: no lease on {}", program.display());
        }
        let command = Command { program: program.into(), arguments: Vec::new(), environment: Vec::new() };
        let mut starter = starter();
        let began = Instant::now();
        for _ in 0..5 {
            assert_eq!(run(&mut starter, &command, Duration::from_millis(100)).await, Err(Abandoned::Late));
            assert!(starter.stays_busy().await);
        }
        assert!(began.elapsed() < Duration::from_secs(20), "it held up the thread for {:?}", began.elapsed());
        drop(holder);
        assert_eq!(run(&mut starter, &command, LONG).await, Ok(Outcome::Success), "once what was abandoned is buried");
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

    /// The test's thread is the one that reads.
    #[tokio::test]
    async fn a_flood_without_end_costs_us_next_to_nothing() {
        let cpu = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
        let before = cpu();
        assert_eq!(said("yes flood", Duration::from_secs(2)).await.0, "abandoned");
        let spent = cpu() - before;
        assert!(spent < Duration::from_millis(150), "{spent:?} of CPU in 2 s");
    }

    #[tokio::test]
    async fn environment_is_cleared_but_for_what_is_set() {
        let mut command = shell("test \"$A\" = b && test -z \"$CARGO_MANIFEST_DIR\" && test -z \"$HOME\"");
        command.environment = vec![("A".into(), "b".into())];
        assert_eq!(run(&mut starter(), &command, LONG).await, Ok(Outcome::Success));
    }
}
