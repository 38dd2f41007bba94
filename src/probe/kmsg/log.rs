//! The kernel log, read as it grows: `<dev-root>/kmsg`, without waiting and without losing what comes between two looks.

use super::record::records;
use crate::policy::kernel_log::{Message, Since};
use crate::policy::outcome::Reason;
use rustix::fs::{CWD, FileType, Mode, OFlags, SeekFrom, fstat, openat, seek};
use rustix::io::{Errno, read};
use rustix::time::{ClockId, clock_gettime};
use std::future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Longer than any record.
const RECORD_BYTES: usize = 16 * 1024;

/// Records in one look; what is left makes the next one follow at once.
const MAX_RECORDS: usize = 512;

/// Lost places in one look; a log that runs over faster than it can be read is left until the next.
const MAX_LOST: u32 = 16;

/// A message, as one look gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// How long ago it was written.
    pub age: Duration,
    /// Whether it was there before us.
    pub history: bool,
    /// Its text.
    pub text: String,
}

impl Line {
    /// In the policy's terms.
    pub fn message(&self) -> Message<'_> {
        Message { age: self.age, history: self.history, text: &self.text }
    }
}

/// What one look gives.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct News {
    /// The kernel's new messages, in their order.
    pub lines: Vec<Line>,
    /// Why the log cannot be read, if so.
    pub unread: Option<Reason>,
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
}

#[derive(Debug)]
enum Open {
    /// Tells when there is something to read.
    Watched(AsyncFd<OwnedFd>),
    /// A recorded log: it is read by the period alone.
    Plain(OwnedFd),
}

impl KernelLog {
    /// The log under `dev_root`, which need not be there yet.
    pub fn new(dev_root: &Path, since: Since) -> Self {
        Self { path: dev_root.join("kmsg"), since, open: None, last: None, began: None, lost: 0 }
    }

    /// How often the log had run over what was not read yet.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// What is new. Never waits.
    pub fn news(&mut self) -> News {
        let now = since_boot();
        let began = *self.began.get_or_insert(now);
        if self.open.is_none() {
            match self.open() {
                Ok(open) => self.open = Some(open),
                Err(error) => return News { lines: Vec::new(), unread: Some(self.unread(error)) },
            }
        }
        let mut lines = Vec::new();
        match self.drain(now, began, &mut lines) {
            Ok(()) => News { lines, unread: None },
            Err(error) => {
                self.open = None;
                News { lines, unread: Some(self.unread(error)) }
            }
        }
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
            Some(Open::Plain(_)) | None => future::pending().await,
        }
    }

    fn open(&self) -> Result<Open, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let descriptor = openat(CWD, &self.path, flags, Mode::empty())?;
        let kind = FileType::from_raw_mode(fstat(&descriptor)?.st_mode);
        if !matches!(kind, FileType::CharacterDevice | FileType::Fifo | FileType::RegularFile) {
            return Err(Errno::INVAL);
        }
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

    fn drain(&mut self, now: Duration, began: Duration, lines: &mut Vec<Line>) -> Result<(), Errno> {
        let Some(open) = &self.open else { return Ok(()) };
        let descriptor = match open {
            Open::Watched(watched) => watched.get_ref(),
            Open::Plain(descriptor) => descriptor,
        };
        let mut buffer = vec![0; RECORD_BYTES];
        let mut lost = 0;
        for _ in 0..MAX_RECORDS {
            let length = match read(descriptor.as_fd(), buffer.as_mut_slice()) {
                Ok(0) | Err(Errno::AGAIN) => {
                    if let Open::Watched(watched) = open {
                        // Takes the readiness back, unless there was news meanwhile.
                        drop(watched.try_io(Interest::READABLE, |_| Err::<(), _>(io::ErrorKind::WouldBlock.into())));
                    }
                    break;
                }
                Ok(length) => length,
                Err(Errno::INTR) => continue,
                // The log ran over; the next read is the oldest that is left.
                Err(Errno::PIPE) if lost < MAX_LOST => {
                    lost += 1;
                    continue;
                }
                Err(Errno::PIPE) => break,
                Err(error) => return Err(error),
            };
            let text = String::from_utf8_lossy(&buffer[..length]);
            for record in records(&text) {
                if self.last.is_some_and(|last| record.sequence <= last) {
                    continue;
                }
                self.last = Some(record.sequence);
                let written = Duration::from_micros(record.microseconds);
                let (age, history) = (now.saturating_sub(written), written < began);
                lines.push(Line { age, history, text: record.text.to_owned() });
            }
        }
        self.lost = self.lost.saturating_add(u64::from(lost));
        Ok(())
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
            error => Reason::new("KernelLogUnreadable", format!("{path} cannot be read: {error}")),
        }
    }
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

    fn texts(news: &News) -> Vec<&str> {
        news.lines.iter().map(|line| line.text.as_str()).collect()
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
        assert_eq!(log.news(), News::default());
        for round in 0..3 {
            let quiet = Duration::from_millis(100);
            assert!(timeout(quiet, log.changed()).await.is_err(), "round {round}: nothing to read");
            writer.write_all(record(round, "hello").as_bytes()).unwrap();
            timeout(Duration::from_secs(20), log.changed()).await.unwrap();
            assert_eq!(texts(&log.news()), ["hello"]);
        }
    }

    #[tokio::test]
    async fn a_storm_is_taken_in_parts_and_nothing_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = File::create(folder.path().join("kmsg")).unwrap();
        let mut log = KernelLog::new(folder.path(), Since::Boot);
        for sequence in 0..20_000 {
            file.write_all(record(sequence, "storm").as_bytes()).unwrap();
        }
        let mut seen = 0;
        for _ in 0..100 {
            seen += log.news().lines.len();
        }
        // Records that a read of the file cuts in two are none; the device never does so.
        assert!((19_900..=20_000).contains(&seen), "{seen}");
    }

    #[tokio::test]
    async fn what_was_there_before_is_left_out_or_is_history() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        fs::write(&path, "4,1,1000,-;old\n").unwrap();
        let (mut from_now, mut from_boot) =
            (KernelLog::new(folder.path(), Since::Now), KernelLog::new(folder.path(), Since::Boot));
        assert_eq!(texts(&from_now.news()), Vec::<&str>::new());
        let news = from_boot.news();
        assert_eq!(texts(&news), ["old"]);
        assert!(news.lines[0].history && news.lines[0].age > Duration::ZERO);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(record(2, "new").as_bytes()).unwrap();
        for log in [&mut from_now, &mut from_boot] {
            let news = log.news();
            assert_eq!(texts(&news), ["new"]);
            assert!(!news.lines[0].history);
        }
    }

    #[tokio::test]
    async fn a_log_that_cannot_be_read_says_why_and_is_read_once_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = KernelLog::new(folder.path(), Since::Boot);
        assert_eq!(log.news().unread.unwrap().code, "KernelLogMissing");
        fs::create_dir(folder.path().join("kmsg")).unwrap();
        assert_eq!(log.news().unread.unwrap().code, "KernelLogUnreadable");
        fs::remove_dir(folder.path().join("kmsg")).unwrap();
        fs::write(folder.path().join("kmsg"), record(1, "now")).unwrap();
        assert_eq!(texts(&log.news()), ["now"]);
        let refused = log.unread(Errno::PERM);
        assert_eq!(refused.code, "KernelLogNotPermitted");
        assert!(refused.message.contains("CAP_SYSLOG"));
    }
}
