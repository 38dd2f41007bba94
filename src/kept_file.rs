//! Small files of ours that outlast a restart: opened without following links, owner checked, size capped, written in one step.
//! Whatever else is in their place is set aside under another name, and is never fatal.

use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat};
use rustix::time::{ClockId, clock_gettime};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Another agent holds the folder for one write of a small file. Whoever holds it for longer is none.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Between two tries at the folder's lock.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// A file in our own hands.
#[derive(Debug, Clone)]
pub struct KeptFile {
    path: PathBuf,
    most_bytes: u64,
}

/// Why a file was not taken over. It has been set aside, or left where even that failed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It cannot be opened or read.
    #[error("cannot read {}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's word.
        source: io::Error,
    },
    /// It is not a file of ours.
    #[error("{} {problem}; set aside as {}", .path.display(), .aside.display())]
    Odd {
        /// The file.
        path: PathBuf,
        /// What is odd about it.
        problem: String,
        /// Its new name.
        aside: PathBuf,
    },
}

/// Which writing of a file it is: each makes a new one, and an inode that is used again has another time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

/// The folder, held against other agents of the same driver until this is dropped.
#[derive(Debug)]
#[must_use = "dropped, it is not held any more"]
pub struct FolderLock {
    _folder: Option<OwnedFd>,
}

enum Problem {
    Io(io::Error),
    Odd(String),
}

impl KeptFile {
    /// The file at `path`; a larger one than `most_bytes` is not ours.
    pub fn new(path: PathBuf, most_bytes: u64) -> Self {
        Self { path, most_bytes }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its content; `None` if nothing is there. Blocks as long as the file system does.
    ///
    /// # Errors
    /// When something is there that is not a file of ours. It is set aside; the caller goes on without.
    pub fn read(&self) -> Result<Option<Vec<u8>>, LoadError> {
        self.look().map_err(|problem| match problem {
            Problem::Io(source) => LoadError::Io { path: self.path.clone(), source },
            Problem::Odd(problem) => self.set_aside(problem),
        })
    }

    /// Gives what is at the path another name, so that nothing is lost and ours has its place; returns what to tell.
    pub fn set_aside(&self, problem: String) -> LoadError {
        let aside = (1..100)
            .map(|number| self.path.with_extension(format!("json.odd-{number}")))
            .find(|aside| fs::symlink_metadata(aside).is_err())
            .unwrap_or_else(|| self.path.with_extension("json.odd-100"));
        match fs::rename(&self.path, &aside) {
            Ok(()) => LoadError::Odd { path: self.path.clone(), problem, aside },
            Err(source) => LoadError::Io { path: self.path.clone(), source },
        }
    }

    /// Writes it in one step, and makes the folder if only it is missing. Blocks as long as the file system does.
    ///
    /// # Errors
    /// The operating system's. What was there before then still is.
    pub fn replace(&self, text: &[u8]) -> io::Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        // Mode 0600, under a name that nobody can have prepared.
        let mut new = tempfile::Builder::new().prefix(".warden-").tempfile_in(folder)?;
        new.write_all(text)?;
        new.persist(&self.path).map_err(|error| error.error)?;
        Ok(())
    }

    /// Removes it.
    ///
    /// # Errors
    /// The operating system's. That nothing is there is none.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Which one is there now.
    pub fn version(&self) -> Option<Version> {
        let file = fs::symlink_metadata(&self.path).ok()?;
        Some(Version { device: file.dev(), inode: file.ino(), changed: (file.ctime(), file.ctime_nsec()) })
    }

    /// Holds the file's folder, so that of two agents one after the other reads and writes. Blocks for a second at most, and then
    /// goes on without: a lock that cannot be had (a file system without, a stranger who keeps it) must not stop anything.
    pub fn lock(&self) -> FolderLock {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(folder) = openat(CWD, folder, flags, Mode::empty()) else { return FolderLock { _folder: None } };
        let until = since_boot() + LOCK_PATIENCE;
        while flock(&folder, FlockOperation::NonBlockingLockExclusive) == Err(rustix::io::Errno::WOULDBLOCK)
            && since_boot() < until
        {
            thread::sleep(LOCK_PAUSE);
        }
        FolderLock { _folder: Some(folder) }
    }

    fn look(&self) -> Result<Option<Vec<u8>>, Problem> {
        let Some(file) = open_unfollowed(&self.path)? else { return Ok(None) };
        let stat = fstat(&file).map_err(|error| Problem::Io(error.into()))?;
        let uid = rustix::process::geteuid().as_raw();
        if stat.st_uid != uid && stat.st_uid != 0 {
            return Err(Problem::Odd(format!("belongs to uid {}, not to us ({uid})", stat.st_uid)));
        }
        read_capped(file, self.most_bytes).map(Some)
    }
}

/// Reads a regular file of at most `most_bytes` that is no link; `None` if nothing is there.
///
/// # Errors
/// The operating system's word, or what is odd about it.
pub fn read_regular(path: &Path, most_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let text = open_unfollowed(path).and_then(|file| file.map(|file| read_capped(file, most_bytes)).transpose());
    text.map_err(|problem| match problem {
        Problem::Io(error) => error,
        Problem::Odd(problem) => io::Error::other(problem),
    })
}

fn open_unfollowed(path: &Path) -> Result<Option<File>, Problem> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match openat(CWD, path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(None),
        Err(rustix::io::Errno::LOOP) => return Err(Problem::Odd("is a link".to_owned())),
        Err(rustix::io::Errno::NXIO) => return Err(Problem::Odd("is not a regular file".to_owned())),
        Err(error) => return Err(Problem::Io(error.into())),
    };
    let stat = fstat(&file).map_err(|error| Problem::Io(error.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Problem::Odd("is not a regular file".to_owned()));
    }
    Ok(Some(file.into()))
}

fn read_capped(file: File, most_bytes: u64) -> Result<Vec<u8>, Problem> {
    let mut text = Vec::new();
    file.take(most_bytes + 1).read_to_end(&mut text).map_err(Problem::Io)?;
    if text.len() as u64 > most_bytes {
        return Err(Problem::Odd(format!("has over {most_bytes} bytes")));
    }
    Ok(text)
}

/// This boot's ID; `None` if it cannot be read.
pub fn boot_id(proc_root: &Path) -> Option<String> {
    let text = fs::read_to_string(proc_root.join("sys/kernel/random/boot_id")).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The time since the boot. Goes on over our restarts and while the machine sleeps.
pub fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or_default(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// Both clocks at one moment. The boot clock goes on over our restarts, the monotonic one has no zero that a file could name.
#[derive(Debug, Clone, Copy)]
pub struct BootClock {
    /// The monotonic clock's.
    pub now: Instant,
    /// The boot clock's.
    pub boot: Duration,
}

impl BootClock {
    /// Reads the boot clock; `now` is the other's.
    pub fn read(now: Instant) -> Self {
        Self { now, boot: since_boot() }
    }

    /// A moment in the future, or nonsense, is now: it can only make us wait longer.
    pub fn instant(&self, boot_seconds: f64) -> Instant {
        let then = Duration::try_from_secs_f64(boot_seconds).unwrap_or(self.boot);
        self.now.checked_sub(self.boot.saturating_sub(then)).unwrap_or(self.now)
    }

    /// A moment in seconds since the boot.
    pub fn seconds(&self, instant: Instant) -> f64 {
        self.boot.saturating_sub(self.now.saturating_duration_since(instant)).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_held_by_one_at_a_time_and_nobody_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let file = KeptFile::new(folder.path().join("x"), 100);
        let held = file.lock();
        let other = file.clone();
        let waits = thread::spawn(move || {
            let _lock = other.lock();
            other.replace(b"second").unwrap();
        });
        thread::sleep(Duration::from_millis(50));
        file.replace(b"first").unwrap();
        let before = file.version();
        drop(held);
        waits.join().unwrap();
        assert_eq!(fs::read(file.path()).unwrap(), b"second");
        assert_ne!(file.version(), before, "another one");
        let _held = file.lock();
        drop(file.lock());
        drop(KeptFile::new("/nowhere/x".into(), 100).lock());
    }

    #[test]
    fn moments_that_cannot_be_are_now() {
        let now = crate::policy::some_instant();
        let clock = BootClock { now, boot: Duration::from_secs(100) };
        for seconds in [f64::NAN, f64::INFINITY, -1.0, 1e300, 101.0] {
            assert_eq!(clock.instant(seconds), now, "{seconds}");
        }
    }
}
