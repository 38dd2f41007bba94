//! A command in a session of its own: started without a copy of this process, waited for, killed with all that it left in its
//! process group, and buried.

use super::exec::Command;
use super::lane::{Abandoned, Lane};
use crate::policy::backoff::Backoff;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal as NixSignal};
use rustix::fs::{Access, FileType, OFlags, access, fcntl_setfl, stat};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, pidfd_open, waitid, waitpgid,
};
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe::Receiver;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// Where programs are found; the rest of our environment is not passed on.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs what has no `#!` line, as `execvp` does.
const SHELL: &str = "/bin/sh";

/// `POSIX_SPAWN_SETSID` of glibc and musl, which the library does not name.
///
/// Source: <https://sourceware.org/git/?p=glibc.git;a=blob;f=posix/spawn.h>
const SET_SESSION: i32 = 0x80;

/// What was killed is usually buried within this.
const BURIAL: Duration = Duration::from_millis(100);

/// A program that takes longer to start when all ends is left to itself.
const LAST_STARTS: Duration = Duration::from_millis(500);

/// Pauses between looks at what was killed and is not dead yet.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// Starts commands, one after the other, on a lane: to start one, the kernel reads its program, which takes as long as the file
/// system does. The next one waits until that before has been buried, so that what cannot be killed does not pile up.
#[derive(Debug)]
pub struct Starter {
    lane: Lane,
    free: Arc<Semaphore>,
}

/// A started command, and all that it started in its process group; killed and buried when dropped.
#[derive(Debug)]
pub(super) struct Session {
    group: Group,
    end: End,
}

/// A process group of ours, by its leader; killed and buried when dropped, on whatever thread that is.
#[derive(Debug)]
struct Group {
    leader: Pid,
    runtime: Handle,
    /// Given back when all that was ours of the group is buried; `None` once it is over.
    turn: Option<OwnedSemaphorePermit>,
    /// Until whoever asked for it has it.
    starting: Option<Starting>,
}

/// Commands that are being started and that nobody has in hand yet: an end of this process now would leave them running.
static STARTING: Mutex<usize> = Mutex::new(0);
static IN_HAND: Condvar = Condvar::new();

#[derive(Debug)]
struct Starting;

impl Starting {
    fn count() -> MutexGuard<'static, usize> {
        STARTING.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin() -> Self {
        *Self::count() += 1;
        Self
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        *Self::count() -= 1;
        IN_HAND.notify_all();
    }
}

/// To be called when the runtime is gone: waits, for a moment at most, until what was being started then has been killed.
pub fn wait_for_starts() {
    let wait = IN_HAND.wait_timeout_while(Starting::count(), LAST_STARTS, |starting| *starting > 0);
    drop(wait.unwrap_or_else(PoisonError::into_inner));
}

/// What tells that the command may have ended.
#[derive(Debug)]
enum End {
    Descriptor(AsyncFd<OwnedFd>),
    /// Linux before 5.3, or a seccomp profile that does not know `pidfd_open`.
    Signal(tokio::signal::unix::Signal),
}

impl End {
    #[expect(deprecated, reason = "an OwnedFd is what the new constructor, which is unsafe, asks for")]
    fn descriptor(leader: Pid) -> io::Result<Self> {
        let descriptor = pidfd_open(leader, PidfdFlags::NONBLOCK)?;
        AsyncFd::with_interest(descriptor, Interest::READABLE).map(Self::Descriptor)
    }

    fn signal() -> io::Result<Self> {
        signal(SignalKind::child()).map(Self::Signal)
    }
}

/// The command's two outputs.
pub(super) struct Outputs {
    pub(super) said: Receiver,
    pub(super) complained: Receiver,
}

impl Starter {
    /// Its thread, named `name`, starts with the first command.
    pub fn new(name: impl Into<String>) -> Self {
        Self { lane: Lane::new(name), free: Arc::new(Semaphore::new(1)) }
    }

    /// Whether a command is being started, or not buried yet, and that is not over in a moment.
    pub async fn stays_busy(&self) -> bool {
        timeout(BURIAL, self.free.acquire()).await.is_err()
    }

    /// Starts the command. Its input is empty, its environment `PATH` and what is set, its signals are as by default, and
    /// nothing else is open but its outputs.
    ///
    /// This process is not copied for it: the lane stands still until the new program has taken over, as after `vfork`.
    ///
    /// # Errors
    /// [`Abandoned`] when that was not by `deadline`, waiting for the command before included; it is killed as soon as it has
    /// started. Within, what `execvp` gives, or the system's word when it refuses what it takes.
    pub(super) async fn start(
        &mut self,
        command: &Command,
        deadline: Instant,
    ) -> Result<io::Result<(Session, Outputs)>, Abandoned> {
        let turn = timeout_at(deadline, Arc::clone(&self.free).acquire_owned()).await;
        let turn = turn.map_err(|_elapsed| Abandoned::Late)?.map_err(|_closed| Abandoned::Late)?;
        let (said, complained) = match (pipe(), pipe()) {
            (Ok(said), Ok(complained)) => (said, complained),
            (Err(error), _) | (_, Err(error)) => return Ok(Err(error)),
        };
        let outputs = Outputs { said: said.0, complained: complained.0 };
        let (command, runtime) = (command.clone(), Handle::current());
        let starting = Starting::begin();
        let job = move || {
            let leader = spawn(&command, &said.1, &complained.1)?;
            Ok(Group { leader, runtime, turn: Some(turn), starting: Some(starting) })
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let group: io::Result<Group> = self.lane.run(left, job).await?;
        Ok(group.and_then(Session::of).map(|session| (session, outputs)))
    }
}

impl Session {
    fn of(mut group: Group) -> io::Result<Self> {
        group.starting = None;
        let end = End::descriptor(group.leader).or_else(|_not_to_be_had| End::signal())?;
        Ok(Self { group, end })
    }

    /// Waits until the command itself has ended. It is not buried yet, so that its number stays its own.
    pub(super) async fn ended(&mut self) -> io::Result<()> {
        while !has_ended(self.group.leader)? {
            match &mut self.end {
                End::Descriptor(descriptor) => descriptor.readable().await?.clear_ready(),
                End::Signal(signals) => {
                    signals.recv().await;
                }
            }
        }
        Ok(())
    }

    /// Kills whatever is left, and tells how the command has ended, if it has.
    pub(super) fn finish(mut self) -> Option<ExitStatus> {
        self.group.end()
    }
}

impl Group {
    /// Kills the group and buries those of it that are ours; the status is the leader's. As process 1 of a container we inherit
    /// what a command leaves behind.
    fn end(&mut self) -> Option<ExitStatus> {
        let turn = self.turn.take()?;
        // All may have ended already. As long as the leader is not buried, nobody else can have its number.
        kill_process_group(self.leader, Signal::KILL).ok();
        let mut status = None;
        if !bury(self.leader, &mut status) {
            self.runtime.spawn(bury_later(self.leader, turn));
        }
        status
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end();
    }
}

/// Both ends of a pipe; reading does not block, writing does.
fn pipe() -> io::Result<(Receiver, OwnedFd)> {
    let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
    fcntl_setfl(&ours, OFlags::NONBLOCK)?;
    Ok((Receiver::from_owned_fd_unchecked(ours)?, theirs))
}

fn has_ended(leader: Pid) -> io::Result<bool> {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(leader), look)?.is_some())
}

/// Whether none of the group is left that is ours to bury.
fn bury(leader: Pid, status: &mut Option<ExitStatus>) -> bool {
    loop {
        match waitpgid(leader, WaitOptions::NOHANG) {
            Ok(Some((dead, how))) => {
                if dead == leader {
                    *status = Some(ExitStatus::from_raw(how.as_raw()));
                }
            }
            Ok(None) => return false,
            Err(Errno::INTR) => {}
            Err(_none) => return true,
        }
    }
}

/// A process that sits in the kernel dies when it leaves it.
async fn bury_later(leader: Pid, turn: OwnedSemaphorePermit) {
    let mut pauses = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
    while !bury(leader, &mut None) {
        sleep(pauses.pause()).await;
    }
    drop(turn);
}

fn spawn(command: &Command, said: &OwnedFd, complained: &OwnedFd) -> io::Result<Pid> {
    let mut environment = BTreeMap::from([(OsString::from("PATH"), OsString::from(PATH))]);
    environment.extend(command.environment.iter().cloned());
    let program = find(&command.program, environment.get(OsStr::new("PATH")).map_or(OsStr::new(""), |path| path))?;
    let variables = environment.iter().map(|(name, value)| {
        let mut variable = name.as_bytes().to_vec();
        variable.push(b'=');
        variable.extend_from_slice(value.as_bytes());
        CString::new(variable)
    });
    let variables = variables.collect::<Result<Vec<CString>, _>>()?;
    let words = std::iter::once(&command.program).chain(&command.arguments);
    let mut words = words.map(|word| CString::new(word.as_bytes())).collect::<Result<Vec<CString>, _>>()?;

    let mut files = PosixSpawnFileActions::init()?;
    files.add_open(0, c"/dev/null", nix::fcntl::OFlag::O_RDONLY, nix::sys::stat::Mode::empty())?;
    files.add_dup2(said.as_raw_fd(), 1)?;
    files.add_dup2(complained.as_raw_fd(), 2)?;
    let mut attributes = PosixSpawnAttr::init()?;
    // We ignore SIGPIPE, as every Rust program does; a command that loses its reader is to die of it.
    attributes.set_sigdefault(&SigSet::from(NixSignal::SIGPIPE))?;
    attributes.set_sigmask(&SigSet::empty())?;
    attributes.set_flags(
        PosixSpawnFlags::from_bits_retain(SET_SESSION)
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK,
    )?;
    let started = match posix_spawn(program.as_path(), &files, &attributes, &words, &variables) {
        Err(nix::errno::Errno::ENOEXEC) => {
            words.splice(..1, [CString::from(c"/bin/sh"), CString::new(program.as_os_str().as_bytes())?]);
            posix_spawn(SHELL, &files, &attributes, &words, &variables)
        }
        started => started,
    }?;
    Pid::from_raw(started.as_raw()).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// As `execvp` finds it: what has a slash is a path, all else is looked up.
fn find(program: &OsStr, path: &OsStr) -> io::Result<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Ok(program.into());
    }
    let mut why = Errno::NOENT;
    for folder in path.as_bytes().split(|byte| *byte == b':').filter(|_| !program.is_empty()) {
        // Nothing between two colons is the folder we are in.
        let folder = if folder.is_empty() { Path::new(".") } else { Path::new(OsStr::from_bytes(folder)) };
        let candidate = folder.join(program);
        let Ok(found) = stat(&candidate) else { continue };
        if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
            && access(&candidate, Access::EXEC_OK).is_ok()
        {
            return Ok(candidate);
        }
        why = Errno::ACCESS;
    }
    Err(why.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use tokio::io::AsyncReadExt;

    fn command(words: &[&str], environment: &[(&str, &str)]) -> Command {
        Command {
            program: words[0].into(),
            arguments: words[1..].iter().map(OsString::from).collect(),
            environment: environment.iter().map(|(name, value)| (name.into(), value.into())).collect(),
        }
    }

    const LONG: Duration = Duration::from_secs(20);

    async fn start(command: &Command) -> io::Result<(Session, Outputs)> {
        Starter::new("test").start(command, Instant::now() + LONG).await.unwrap()
    }

    /// What it said, and how it ended.
    async fn said(command: &Command) -> (String, Option<i32>) {
        let (mut session, mut outputs) = start(command).await.unwrap();
        let mut text = String::new();
        outputs.said.read_to_string(&mut text).await.unwrap();
        session.ended().await.unwrap();
        (text, session.finish().unwrap().code())
    }

    /// Fields of `/proc/self/stat` from the state on: parent, process group, session.
    #[tokio::test]
    async fn a_command_leads_a_session_and_a_process_group_of_its_own() {
        let (text, code) = said(&command(&["cat", "/proc/self/stat"], &[])).await;
        let number = text.split(' ').next().unwrap().to_owned();
        let rest: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
        assert_eq!((rest[2], rest[3], code), (number.as_str(), number.as_str(), Some(0)), "{text}");
    }

    #[tokio::test]
    async fn signals_are_as_by_default_and_the_input_is_empty() {
        // SIGPIPE is the thirteenth; whoever runs the tests may ignore others.
        let (text, _) = said(&command(&["grep", "^SigIgn", "/proc/self/status"], &[])).await;
        let ignored = u64::from_str_radix(text.rsplit('\t').next().unwrap().trim(), 16).unwrap();
        assert_eq!(ignored & (1 << 12), 0, "{text}");
        let (text, _) = said(&command(&["grep", "^SigBlk", "/proc/self/status"], &[])).await;
        assert_eq!(text, "SigBlk:\t0000000000000000\n");
        assert_eq!(said(&command(&["readlink", "/proc/self/fd/0"], &[])).await.0, "/dev/null\n");
    }

    #[tokio::test]
    async fn programs_are_found_and_run_as_execvp_does() {
        let folder = tempfile::tempdir().unwrap();
        let (script, other) = (folder.path().join("script"), folder.path().join("other"));
        std::fs::write(&script, "echo no first line: $1\n").unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(&other, "").unwrap();
        let path = format!("/no/such:{}:/bin", folder.path().display());
        let with_path = |words: &[&str]| command(words, &[("PATH", path.as_str())]);
        // Another test's child may hold the new file open for writing for a moment.
        let mut ran = said(&with_path(&["script", "x"])).await;
        for _ in 0..50 {
            if ran.1 == Some(0) {
                break;
            }
            sleep(Duration::from_millis(20)).await;
            ran = said(&with_path(&["script", "x"])).await;
        }
        assert_eq!(ran, ("no first line: x\n".to_owned(), Some(0)));
        for (words, error) in [
            (&["other"][..], io::ErrorKind::PermissionDenied),
            (&["missing"], io::ErrorKind::NotFound),
            (&[""], io::ErrorKind::NotFound),
            (&["/no/such"], io::ErrorKind::NotFound),
            (&["sh", "a\0b"], io::ErrorKind::InvalidInput),
        ] {
            assert_eq!(start(&with_path(words)).await.map(|_| ()).unwrap_err().kind(), error, "{words:?}");
        }
    }

    #[tokio::test]
    async fn the_end_is_noticed_without_a_descriptor_for_it() {
        let (mut session, _outputs) = start(&command(&["sh", "-c", "sleep 0.2; exit 3"], &[])).await.unwrap();
        session.end = End::signal().unwrap();
        session.ended().await.unwrap();
        assert_eq!(session.finish().unwrap().code(), Some(3));
    }

    #[tokio::test]
    async fn what_is_dropped_is_killed_and_buried() {
        let (session, _outputs) = start(&command(&["sleep", "600"], &[])).await.unwrap();
        let there = PathBuf::from(format!("/proc/{}", session.group.leader.as_raw_nonzero()));
        assert!(there.exists());
        drop(session);
        for _ in 0..400 {
            if !there.exists() {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
        panic!("{} is left", there.display());
    }
}
