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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::run::RunFlags;
    use crate::config::probes::HostTree;
    use crate::config::probes::ProbeKind;
    use crate::policy::probe_verdict::Thresholds;
    use clap::CommandFactory;
    use std::fs;
    use std::num::NonZeroU32;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    fn source(path: &Path, typed: &[&str]) -> ConfigSource {
        let two = NonZeroU32::new(2).unwrap();
        let defaults = Defaults {
            driver_socket: "/csi/csi.sock".into(),
            health_file: None,
            health_interval: Duration::from_secs(30),
            health_max_age: Duration::from_secs(90),
            health_dead_after: None,
            thresholds: Thresholds { failure: two, success: two },
            confirm_interval: Duration::from_secs(1),
            host: HostTree { sysfs: "/sys".into(), dev: "/dev".into(), proc: "/proc".into() },
        };
        let file = load(path, &RunFlags::command()).unwrap();
        ConfigSource::new(&file, typed.iter().map(ToString::to_string).collect(), RunFlags::command, defaults)
    }

    #[test]
    fn a_new_version_gives_its_probes_and_names_the_flags_that_need_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("warden.yaml");
        fs::write(&path, "startGrace: 5s\nv: 2\nflapWindow: 1m\nprobes: [{name: a, type: csi}]\n").unwrap();
        let source = source(&path, &["v"]);
        let same = source.reload().unwrap();
        assert_eq!((same.watched.probes.len(), same.needs_restart.len()), (1, 0));
        assert_eq!(same.watched.probes[0].kind, ProbeKind::Csi { socket: "/csi/csi.sock".into() });

        fs::write(&path, "v: 4\nflapWindow: 2m\nprobes: [{name: a, type: csi, period: 1s}]\n").unwrap();
        let new = source.reload().unwrap();
        assert_eq!(new.watched.probes[0].period, Duration::from_secs(1));
        assert_ne!(new.watched, same.watched);
        assert_eq!(
            new.needs_restart,
            ["flapWindow (warden.yaml:2)", "startGrace (no longer in warden.yaml)"],
            "v was typed, so the file never counted"
        );
    }

    #[test]
    fn a_bad_new_version_is_an_error_and_a_config_map_that_swaps_its_links_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for (version, text) in [("..1", "probes: [{name: a, type: csi}]"), ("..2", "probes: [{name: a, tpye: csi}]")] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("warden.yaml"), text).unwrap();
        }
        symlink("..1", at("..data")).unwrap();
        symlink("..data/warden.yaml", at("warden.yaml")).unwrap();
        let source = source(&at("warden.yaml"), &[]);
        assert!(source.reload().is_ok());
        symlink("..2", at("..new")).unwrap();
        fs::rename(at("..new"), at("..data")).unwrap();
        let error = source.reload().unwrap_err().to_string();
        assert!(error.contains("warden.yaml:1: probes[0].tpye: unknown key; did you mean type?"), "{error}");
    }
}
