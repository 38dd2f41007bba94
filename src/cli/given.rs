//! The command line and the settings file that it names, read as one: for every command that takes the flags of `run`.

use super::go_flags::{normalise, texts_are_utf_8};
use super::run::RunFlags;
use crate::config::file::{self, ConfigFile, FileError, Problem};
use crate::config::settings::{Health, Settings, SettingsErrors, Typed, TypedFile};
use crate::config::watched::Watched;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};
use std::ffi::OsString;

/// The command line and the file, as one.
pub struct Given {
    /// Their values; the command line's win.
    pub flags: RunFlags,
    /// As parsed.
    pub matches: ArgMatches,
    /// `--config`; not read for `--version`.
    pub file: Option<ConfigFile>,
    /// What is wrong with values of the file; these values are left out.
    pub problems: Vec<Problem>,
    /// Flags on the command line, without dashes.
    pub typed: Vec<String>,
}

/// Why there is nothing to go on with.
pub enum GivenError {
    /// A flag, or a call for help.
    Usage(clap::Error),
    /// `--config`
    File(FileError),
}

impl Given {
    /// Reads the command line by `command`, which has the flags of `run` at least, and the file that it names.
    ///
    /// # Errors
    /// An unknown flag or a bad value on the command line, or a file without settings.
    pub fn read(mut command: Command, arguments: impl Iterator<Item = OsString>) -> Result<Self, GivenError> {
        // As in Go, the first positional ends the flags, and the rest is not looked at.
        let typed = normalise(&command, arguments).flags;
        texts_are_utf_8(&mut command, &typed).map_err(GivenError::Usage)?;
        let mut parse = |file: Vec<OsString>| {
            let all = std::iter::once(OsString::from("csi-warden")).chain(file).chain(typed.iter().cloned());
            let matches = command.try_get_matches_from_mut(all).map_err(GivenError::Usage)?;
            let flags = RunFlags::from_arg_matches(&matches).map_err(GivenError::Usage)?;
            Ok((flags, matches))
        };
        let (flags, matches) = parse(Vec::new())?;
        let by_hand = |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
        let listed = RunFlags::command();
        let typed =
            listed.get_arguments().filter(by_hand).filter_map(|arg| arg.get_long()).map(str::to_owned).collect();
        let Some(path) = flags.config.clone().filter(|_| !flags.version) else {
            return Ok(Self { flags, matches, file: None, problems: Vec::new(), typed });
        };
        let (file, problems) = file::examine(&path, &listed).map_err(GivenError::File)?;
        // Before the typed ones: the last one wins.
        let (flags, matches) = parse(file.arguments(&typed).collect())?;
        Ok(Self { flags, matches, file: Some(file), problems, typed })
    }

    /// What `run` runs with.
    ///
    /// # Errors
    /// Every problem, one line each.
    pub fn settings(&self) -> Result<Settings, Vec<String>> {
        self.with_the_files(Settings::check(&self.typed()))
    }

    /// What `run` would watch.
    ///
    /// # Errors
    /// Every problem of the probes, one line each.
    pub fn watched(&self) -> Result<Watched, Vec<String>> {
        self.with_the_files(Settings::watched(&self.typed()))
    }

    /// How `run` would watch, and what it would do.
    ///
    /// # Errors
    /// Every problem of the probes, the verdict and the reaction, one line each.
    pub fn health(&self) -> Result<Health, Vec<String>> {
        self.with_the_files(Settings::health(&self.typed()))
    }

    fn with_the_files<T>(&self, checked: Result<T, SettingsErrors>) -> Result<T, Vec<String>> {
        let mut problems: Vec<String> = self.problems.iter().map(ToString::to_string).collect();
        match checked {
            Ok(good) if problems.is_empty() => return Ok(good),
            Ok(_) => {}
            Err(errors) => problems.extend(errors.lines()),
        }
        Err(problems)
    }

    fn typed(&self) -> Typed {
        let by_hand = |name: &str| self.matches.value_source(name) == Some(ValueSource::CommandLine);
        let config =
            self.file.clone().map(|file| TypedFile { file, typed: self.typed.clone(), flags: RunFlags::command });
        Typed { config, ..self.flags.typed(by_hand) }
    }
}
