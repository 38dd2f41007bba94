//! The tree of a trace on disk: a temporary folder that probes read in place of the host. Nothing is written outside of it.

use super::Offset;
use super::entry::Entry;
use super::tree::ROOTS;
use crate::config::probes::HostTree;
use rustix::fs::{CWD, Mode, mkfifoat};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// A made-up host.
#[derive(Debug)]
pub struct Host {
    folder: TempDir,
}

impl Host {
    /// An empty one, which goes away when it is dropped.
    ///
    /// # Errors
    /// The operating system's.
    pub fn new() -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("csi-warden-replay-").tempdir()?;
        for root in ROOTS {
            fs::create_dir(folder.path().join(root))?;
        }
        Ok(Self { folder })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// In the settings' terms.
    pub fn tree(&self) -> HostTree {
        let at = |root| self.path().join(root);
        HostTree { sysfs: at("sys"), dev: at("dev"), proc: at("proc") }
    }

    /// Where the health file of the probe `name` lies.
    pub fn health_file(&self, name: &str) -> PathBuf {
        self.path().join("health").join(name)
    }

    /// Puts `entry`, or nothing, at `path`, which has plain names only. `at` is when it was written.
    ///
    /// # Errors
    /// The operating system's.
    pub fn put(&self, path: &str, entry: Option<&Entry>, at: Offset) -> io::Result<()> {
        let full = self.plain_parent(path)?;
        match entry {
            Some(Entry::Folder) if is_folder(&full) => return Ok(()),
            // Never for a moment without a file: a probe may read just now, and each write shall be another file.
            Some(Entry::Value(bytes)) if !is_folder(&full) => {
                let beside = self.path().join("written");
                fs::write(&beside, bytes)?;
                let age = Duration::from_millis(u64::try_from(-at.0).unwrap_or_default());
                let written = SystemTime::now().checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH);
                File::options().write(true).open(&beside)?.set_modified(written)?;
                return fs::rename(beside, full);
            }
            Some(_) | None => remove(&full)?,
        }
        match entry {
            // The root of a tree stays, with nothing in it.
            None if !path.contains('/') => fs::create_dir(full),
            None => Ok(()),
            Some(Entry::Folder) => fs::create_dir(full),
            Some(Entry::Value(bytes)) => fs::write(full, bytes),
            Some(Entry::Link(target)) => symlink(target, full),
            Some(Entry::Device(device)) => fs::write(full, device.to_string()),
            // What is no file reads as EINVAL here, and a link to itself as an error that is no absence.
            Some(Entry::Unreadable(error)) if matches!(error.as_str(), "EINVAL" | "ENODATA") => {
                Ok(mkfifoat(CWD, full, Mode::RUSR | Mode::WUSR)?)
            }
            Some(Entry::Unreadable(_)) => symlink(full.file_name().unwrap_or_default(), &full),
        }
    }

    /// The path on disk, its parents made plain folders: nothing is ever written through a link.
    fn plain_parent(&self, path: &str) -> io::Result<PathBuf> {
        let mut full = self.path().to_owned();
        let mut steps = path.split('/').peekable();
        while let Some(step) = steps.next() {
            if matches!(step, "" | "." | "..") {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{path:?} is no plain path")));
            }
            full.push(step);
            if steps.peek().is_some() && !is_folder(&full) {
                remove(&full)?;
                fs::create_dir(&full)?;
            }
        }
        Ok(full)
    }
}

/// A link to one is none.
fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::tree::{MAX_ATTRIBUTE_BYTES, Tree};
    use rustix::io::Errno;

    #[test]
    fn probes_read_what_the_trace_has() {
        let host = Host::new().unwrap();
        let put = |path: &str, entry: Entry| host.put(path, Some(&entry), Offset(0)).unwrap();
        put("sys/class/ib/a", Entry::Link("../../devices/a".into()));
        put("sys/devices/a/state", Entry::Value(b"4: ACTIVE\n".to_vec()));
        put("sys/devices/a/empty", Entry::Unreadable("EINVAL".into()));
        put("sys/devices/a/broken", Entry::Unreadable("EIO".into()));
        let tree = Tree::open(&host.tree().sysfs).unwrap();
        let mut buffer = [0; MAX_ATTRIBUTE_BYTES];
        assert_eq!(tree.read("class/ib/a/state", &mut buffer), Ok("4: ACTIVE\n"));
        assert_eq!(tree.read("class/ib/a/empty", &mut buffer), Err(Errno::INVAL));
        let broken = tree.read("class/ib/a/broken", &mut buffer).unwrap_err();
        assert!(!crate::probe::tree::is_absence(broken), "{broken}");
        host.put("sys/devices/a", None, Offset(0)).unwrap();
        assert_eq!(tree.read("class/ib/a/state", &mut buffer), Err(Errno::NOENT));
    }

    #[test]
    fn nothing_is_written_through_a_link() {
        let outside = tempfile::tempdir().unwrap();
        let host = Host::new().unwrap();
        let link = Entry::Link(outside.path().to_str().unwrap().to_owned());
        host.put("sys/a", Some(&link), Offset(0)).unwrap();
        host.put("sys/a/b", Some(&Entry::Value(b"x".to_vec())), Offset(0)).unwrap();
        host.put("sys/c", Some(&link), Offset(0)).unwrap();
        host.put("sys/c", None, Offset(0)).unwrap();
        assert!(host.put("sys/../../x", None, Offset(0)).is_err());
        assert!(outside.path().exists() && fs::read_dir(outside.path()).unwrap().next().is_none());
    }
}
