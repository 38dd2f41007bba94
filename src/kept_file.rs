//! A small file of ours that is kept over restarts: written in one step, never followed through a link, and set aside when odd.

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Ours are far below; a larger one is none of ours.
const MAX_BYTES: u64 = 64 * 1024;

/// Its place.
#[derive(Debug, Clone)]
pub struct KeptFile {
    path: PathBuf,
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

impl KeptFile {
    /// The file at `path`, whose folder is made if only it is missing.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is in it; `None` if there is none.
    ///
    /// # Errors
    /// When it cannot be read, or is no regular file of ours. Then it has been set aside.
    pub fn load(&self) -> Result<Option<Vec<u8>>, LoadError> {
        self.read().map_err(|problem| match problem {
            Problem::Io(source) => LoadError::Io { path: self.path.clone(), source },
            Problem::Odd(problem) => self.set_aside(problem),
        })
    }

    /// Replaces it in one step. Blocks as long as the file system does.
    ///
    /// # Errors
    /// The operating system's.
    pub fn save(&self, text: &[u8]) -> io::Result<()> {
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

    fn read(&self) -> Result<Option<Vec<u8>>, Problem> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match openat(CWD, &self.path, flags, Mode::empty()) {
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
        let uid = rustix::process::geteuid().as_raw();
        if stat.st_uid != uid && stat.st_uid != 0 {
            return Err(Problem::Odd(format!("belongs to uid {}, not to us ({uid})", stat.st_uid)));
        }
        let mut text = Vec::new();
        File::from(file).take(MAX_BYTES + 1).read_to_end(&mut text).map_err(Problem::Io)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(Problem::Odd(format!("has over {MAX_BYTES} bytes")));
        }
        Ok(Some(text))
    }

    /// Gives what is at the path another name, so that nothing is lost and ours has its place.
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
}

enum Problem {
    Io(io::Error),
    Odd(String),
}
