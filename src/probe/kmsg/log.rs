//! The kernel log, read as it grows: `<dev-root>/kmsg`, without waiting and without losing what comes between two looks.

use super::record::records;
use crate::policy::kernel_log::{Message, Since};
use crate::policy::outcome::Reason;
use rustix::fs::{CWD, FileType, Mode, OFlags, SeekFrom, Stat, fstat, major, minor, openat, seek, stat};
use rustix::io::{Errno, read};
use rustix::time::{ClockId, clock_gettime};
use std::future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The numbers of the kernel log. In its place a container may have another device, such as `/dev/null`, in which nothing ever
/// stands.
///
/// Source: <https://www.kernel.org/doc/Documentation/admin-guide/devices.txt>
pub const KMSG: (u32, u32) = (1, 11);

/// Longer than any record.
const RECORD_BYTES: usize = 16 * 1024;

/// Records that are read without giving others a turn.
const RECORDS_A_TURN: usize = 128;

/// Turns in one look; what is left makes the next one follow at once. More than the kernel keeps, as a rule.
const MAX_TURNS: usize = 256;

/// Lost places in one turn; a log that runs over faster than it can be read is left until the next.
const MAX_LOST: u32 = 16;

/// Lines that wait to be judged; a storm of faults says nothing new after that many.
const MAX_WAITING: usize = 1024;

/// A message that concerns somebody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// When it was written; `None` before anything the clock can tell.
    pub at: Option<Instant>,
    /// Whether it was there before us.
    pub history: bool,
    /// Its text.
    pub text: String,
}

impl Line {
    /// In the policy's terms.
    pub fn message(&self, now: Instant) -> Message<'_> {
        let age = self.at.map_or(Duration::MAX, |at| now.saturating_duration_since(at));
        Message { age, history: self.history, text: &self.text }
    }
}

/// The kernel log.
#[derive(Debug)]
pub struct KernelLog {
    path: PathBuf,
    since: Since,
    open: Option<Open>,
    /// The last record that was read: after an error reading goes on behind it.
    last: Option<u64>,
    /// What was written before this is history.
    began: Option<Duration>,
    lost: u64,
    /// They wait here, so that a look that is given up or does not count loses none.
    waiting: Vec<Line>,
}

#[derive(Debug)]
enum Open {
    /// Tells when there is something to read.
    Watched(AsyncFd<OwnedFd>),
    /// A recorded log: it is read by the period alone.
    Plain(OwnedFd),
    /// There is no file: lines are handed over.
    HandedOver,
}

impl KernelLog {
    /// The log under `dev_root`, which need not be there yet.
    pub fn new(dev_root: &Path, since: Since) -> Self {
        Self { path: dev_root.join("kmsg"), since, open: None, last: None, began: None, lost: 0, waiting: Vec::new() }
    }

    /// A log that is replayed: its lines come by [`Self::hand_over`], and no file is read.
    pub fn replayed() -> Self {
        Self { open: Some(Open::HandedOver), ..Self::new(Path::new(""), Since::Now) }
    }

    /// Puts a line behind those that wait.
    pub fn hand_over(&mut self, line: Line) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push(line);
        }
    }

    /// How often the log had run over what was not read yet.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Reads on; the lines that `concerns` picks wait for [`Self::take`]. Never waits for the log, only gives others a turn.
    ///
    /// # Errors
    /// Why the log cannot be read.
    pub async fn look(&mut self, concerns: impl Fn(&str) -> bool) -> Result<(), Reason> {
        for _ in 0..MAX_TURNS {
            let opened = match self.open.take() {
                Some(open) => Ok(open),
                None => self.open(),
            };
            let turn = opened.and_then(|open| {
                let turn = self.drain(&open, &concerns)?;
                self.open = Some(match (turn, open) {
                    (Turn::Ended, Open::Watched(watched)) => Open::Plain(watched.into_inner()),
                    (Turn::Dry | Turn::Ended | Turn::More, open) => open,
                });
                Ok(turn)
            });
            match turn {
                Ok(Turn::Dry | Turn::Ended) => return Ok(()),
                Ok(Turn::More) => tokio::task::yield_now().await,
                Err(error) => return Err(self.unread(error)),
            }
        }
        Ok(())
    }

    /// The lines since the last time, in their order.
    pub fn take(&mut self) -> Vec<Line> {
        std::mem::take(&mut self.waiting)
    }

    /// Waits until there may be news. Cancelling it loses nothing.
    pub async fn changed(&self) {
        match &self.open {
            Some(Open::Watched(watched)) => {
                // The readiness stays until a look finds nothing more.
                if watched.readable().await.is_ok() {
                    return;
                }
                future::pending().await
            }
            Some(Open::Plain(_) | Open::HandedOver) | None => future::pending().await,
        }
    }

    fn open(&self) -> Result<Open, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        // Some devices act on being opened, so it is looked at first, and again once it is open.
        log_kind(&stat(&self.path)?)?;
        let descriptor = openat(CWD, &self.path, flags, Mode::empty())?;
        let kind = log_kind(&fstat(&descriptor)?)?;
        if self.since == Since::Now && self.last.is_none() {
            match seek(&descriptor, SeekFrom::End(0)) {
                // A pipe holds no past.
                Ok(_) | Err(Errno::SPIPE) => {}
                Err(error) => return Err(error),
            }
        }
        if kind == FileType::RegularFile {
            return Ok(Open::Plain(descriptor));
        }
        #[expect(
            deprecated,
            reason = "its successor is unsafe, and asks only that the descriptor stays open: we own it"
        )]
        let watched = AsyncFd::try_with_interest(descriptor, Interest::READABLE);
        Ok(watched.map_or_else(|refused| Open::Plain(refused.into_parts().0), Open::Watched))
    }

    fn drain(&mut self, open: &Open, concerns: impl Fn(&str) -> bool) -> Result<Turn, Errno> {
        let descriptor = match open {
            Open::Watched(watched) => watched.get_ref(),
            Open::Plain(descriptor) => descriptor,
            Open::HandedOver => return Ok(Turn::Dry),
        };
        let (now, now_instant) = (since_boot(), tokio::time::Instant::now().into_std());
        let began = *self.began.get_or_insert(now);
        let mut buffer = vec![0; RECORD_BYTES];
        let mut lost = 0;
        for _ in 0..RECORDS_A_TURN {
            let length = match read(descriptor.as_fd(), buffer.as_mut_slice()) {
                Ok(0) => return Ok(Turn::Ended),
                Err(Errno::AGAIN) => {
                    if let Open::Watched(watched) = open {
                        // Takes the readiness back, unless there was news meanwhile.
                        drop(watched.try_io(Interest::READABLE, |_| Err::<(), _>(io::ErrorKind::WouldBlock.into())));
                    }
                    return Ok(Turn::Dry);
                }
                Ok(length) => length,
                Err(Errno::INTR) => continue,
                // The log ran over; the next read is the oldest that is left.
                Err(Errno::PIPE) => {
                    self.lost = self.lost.saturating_add(1);
                    lost += 1;
                    if lost > MAX_LOST {
                        break;
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            let text = String::from_utf8_lossy(&buffer[..length]);
            for record in records(&text) {
                if self.last.is_some_and(|last| record.sequence <= last) {
                    continue;
                }
                self.last = Some(record.sequence);
                if !concerns(record.text) || self.waiting.len() >= MAX_WAITING {
                    continue;
                }
                let written = Duration::from_micros(record.microseconds);
                let at = now_instant.checked_sub(now.saturating_sub(written));
                self.waiting.push(Line { at, history: written < began, text: record.text.to_owned() });
            }
        }
        Ok(Turn::More)
    }

    fn unread(&self, error: Errno) -> Reason {
        let path = self.path.display();
        match error {
            Errno::PERM | Errno::ACCESS => {
                let message = format!(
                    "{path} may not be read ({error}): it takes CAP_SYSLOG where kernel.dmesg_restrict is 1, and a container that may open the device"
                );
                Reason::new("KernelLogNotPermitted", message)
            }
            Errno::NOENT | Errno::NOTDIR => {
                Reason::new("KernelLogMissing", format!("{path} does not exist: mount the host's /dev/kmsg there"))
            }
            Errno::NODEV => Reason::new(
                "KernelLogMissing",
                format!("{path} is not the kernel log: mount the host's /dev/kmsg there"),
            ),
            error => Reason::new("KernelLogUnreadable", format!("{path} cannot be read: {error}")),
        }
    }
}

/// What kind of log it is: the kernel's own, or a recorded one.
fn log_kind(stat: &Stat) -> Result<FileType, Errno> {
    match FileType::from_raw_mode(stat.st_mode) {
        kind @ (FileType::Fifo | FileType::RegularFile) => Ok(kind),
        kind @ FileType::CharacterDevice if (major(stat.st_rdev), minor(stat.st_rdev)) == KMSG => Ok(kind),
        FileType::CharacterDevice
        | FileType::Directory
        | FileType::Symlink
        | FileType::Socket
        | FileType::BlockDevice
        | FileType::Unknown => Err(Errno::NODEV),
    }
}

/// What one turn ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Nothing more to read for now.
    Dry,
    /// The end of what is no device: it would tell for ever that there is something to read.
    Ended,
    /// There may be more.
    More,
}

/// The clock of the kernel's messages.
fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::mkfifoat;
    use std::fs::{self, File, OpenOptions};
    use std::io::Write;
    use tokio::time::timeout;

    /// A look at everything, and what it gave.
    async fn seen(log: &mut KernelLog) -> Result<Vec<String>, &'static str> {
        log.look(|_| true).await.map_err(|reason| reason.code)?;
        Ok(log.take().into_iter().map(|line| line.text).collect())
    }

    fn lines(texts: &[&str]) -> Result<Vec<String>, &'static str> {
        Ok(texts.iter().map(ToString::to_string).collect())
    }

    fn record(sequence: u64, text: &str) -> String {
        format!("4,{sequence},{},-;{text}\n", since_boot().as_micros())
    }

    /// As `/dev/kmsg` would, it can be waited for.
    fn pipe(folder: &Path) -> File {
        mkfifoat(CWD, folder.join("kmsg"), Mode::RUSR | Mode::WUSR).unwrap();
        OpenOptions::new().read(true).write(true).open(folder.join("kmsg")).unwrap()
    }

    #[tokio::test]
    async fn a_line_is_seen_at_once_and_an_empty_log_is_waited_for_without_turning() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = pipe(folder.path());
        let mut log = KernelLog::new(folder.path(), Since::Now);
        assert_eq!(seen(&mut log).await, lines(&[]));
        for round in 0..3 {
            let quiet = Duration::from_millis(100);
            assert!(timeout(quiet, log.changed()).await.is_err(), "round {round}: nothing to read");
            writer.write_all(record(round, "hello").as_bytes()).unwrap();
            timeout(Duration::from_secs(20), log.changed()).await.unwrap();
            assert_eq!(seen(&mut log).await, lines(&["hello"]));
        }
    }

    #[tokio::test]
    async fn a_pipe_that_nobody_writes_any_more_does_not_wake_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = pipe(folder.path());
        let mut log = KernelLog::new(folder.path(), Since::Now);
        writer.write_all(record(1, "hello").as_bytes()).unwrap();
        assert_eq!(seen(&mut log).await, lines(&["hello"]));
        drop(writer);
        for _ in 0..3 {
            assert_eq!(seen(&mut log).await, lines(&[]));
        }
        assert!(timeout(Duration::from_millis(100), log.changed()).await.is_err());
    }

    #[tokio::test]
    async fn another_device_in_its_place_is_no_log() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/null", folder.path().join("kmsg")).unwrap();
        let mut log = KernelLog::new(folder.path(), Since::Now);
        assert_eq!(seen(&mut log).await, Err("KernelLogMissing"), "nothing would ever be found in it");
    }

    #[tokio::test]
    async fn a_long_history_is_read_in_one_look_and_only_what_concerns_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..20_000)
            .map(|sequence| record(sequence, if sequence % 1000 == 0 { "fault" } else { "noise" }))
            .collect();
        fs::write(folder.path().join("kmsg"), text).unwrap();
        let mut log = KernelLog::new(folder.path(), Since::Boot);
        log.look(|text| text == "fault").await.unwrap();
        // Twice is a record cut in two by a read, which the device never does.
        assert!((18..=20).contains(&log.take().len()));
        assert!(log.last > Some(19_990), "{:?}", log.last);
        assert_eq!(log.take(), []);
    }

    #[tokio::test]
    async fn a_storm_of_faults_is_bounded_and_a_look_that_does_not_count_loses_none() {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..20_000).map(|sequence| record(sequence, "fault")).collect();
        fs::write(folder.path().join("kmsg"), text).unwrap();
        let mut log = KernelLog::new(folder.path(), Since::Boot);
        for _ in 0..3 {
            log.look(|_| true).await.unwrap();
        }
        assert_eq!(log.take().len(), MAX_WAITING);
    }

    #[tokio::test]
    async fn what_was_there_before_is_left_out_or_is_history() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        fs::write(&path, "4,1,1000,-;old\n").unwrap();
        let mut from_now = KernelLog::new(folder.path(), Since::Now);
        let mut from_boot = KernelLog::new(folder.path(), Since::Boot);
        assert_eq!(seen(&mut from_now).await, lines(&[]));
        from_boot.look(|_| true).await.unwrap();
        let now = tokio::time::Instant::now().into_std();
        let old = from_boot.take();
        assert!(old[0].text == "old" && old[0].message(now).history && old[0].message(now).age > Duration::ZERO);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(record(2, "new").as_bytes()).unwrap();
        for log in [&mut from_now, &mut from_boot] {
            log.look(|_| true).await.unwrap();
            let new = log.take();
            assert!(new.len() == 1 && new[0].text == "new" && !new[0].history);
        }
    }

    #[tokio::test]
    async fn a_log_that_cannot_be_read_says_why_and_is_read_once_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = KernelLog::new(folder.path(), Since::Boot);
        assert_eq!(seen(&mut log).await, Err("KernelLogMissing"));
        fs::create_dir(folder.path().join("kmsg")).unwrap();
        assert_eq!(seen(&mut log).await, Err("KernelLogMissing"));
        fs::remove_dir(folder.path().join("kmsg")).unwrap();
        fs::write(folder.path().join("kmsg"), record(1, "now")).unwrap();
        assert_eq!(seen(&mut log).await, lines(&["now"]));
        let refused = log.unread(Errno::PERM);
        assert_eq!(refused.code, "KernelLogNotPermitted");
        assert!(refused.message.contains("CAP_SYSLOG"));
    }
}
