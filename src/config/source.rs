//! Reads the settings file again while the daemon runs.

use super::file::{ConfigFile, FileError, FileFlag, load};
use super::watched::{Defaults, Watched};
use clap::Command;
use std::path::{Path, PathBuf};

/// The file that settings came from, and what a new version of it is compared with.
#[derive(Debug, Clone)]
pub struct ConfigSource {
    path: PathBuf,
    flags: fn() -> Command,
    in_force: Vec<FileFlag>,
    /// Flags typed on the command line: what the file says of them never counts.
    typed: Vec<String>,
    defaults: Defaults,
}

/// A new version of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reloaded {
    /// What is to be watched from now on, with the defaults of the flags in force. No probes at all is possible.
    pub watched: Watched,
    /// Flags whose new value needs a restart, by their names in the file, such as `startGrace (warden.yaml:3)`.
    pub needs_restart: Vec<String>,
}

impl ConfigSource {
    pub(super) fn new(file: &ConfigFile, typed: Vec<String>, flags: fn() -> Command, defaults: Defaults) -> Self {
        Self { path: file.path.clone(), flags, in_force: file.flags.clone(), typed, defaults }
    }

    /// The file, for a watch on it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file again. Blocks as long as its file system does; changes nothing.
    ///
    /// # Errors
    /// As at the start; what is in force then stays.
    pub fn reload(&self) -> Result<Reloaded, FileError> {
        let file = load(&self.path, &(self.flags)())?;
        let watched = Watched::new(&self.defaults, Some(&file)).map_err(FileError::Problems)?;
        Ok(Reloaded { watched, needs_restart: self.changed_flags(&file) })
    }

    fn changed_flags(&self, file: &ConfigFile) -> Vec<String> {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy();
        let before = |flag: &FileFlag| self.in_force.iter().find(|old| old.flag == flag.flag);
        let new = file.flags.iter().filter(|flag| before(flag).is_none_or(|old| old.value != flag.value));
        let gone = self.in_force.iter().filter(|old| file.flag(&old.flag).is_none());
        let counts = |flag: &&FileFlag| !self.typed.contains(&flag.flag);
        new.filter(counts)
            .map(|flag| format!("{} ({name}:{})", flag.key, flag.line))
            .chain(gone.filter(counts).map(|flag| format!("{} (no longer in {name})", flag.key)))
            .collect()
    }
}
