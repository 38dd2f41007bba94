//! `--config=FILE`: probes, groups and flags in YAML. Every problem names file, line and field.

use super::fields::Fields;
use super::written::{WrittenGroup, WrittenProbe};
use super::yaml::{self, Node, Value, echo};
use clap::{Arg, Command};
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat};
use std::error::Error as _;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Some 300 probes. The parser holds up to 50 times the file for a moment, which must fit a container's limit.
pub const MAX_FILE_BYTES: u64 = 64 * 1024;

/// Flags that say something about the call, not about the daemon.
const COMMAND_LINE_ONLY: [&str; 3] = ["config", "version", "help"];

/// The keys that are no flags.
pub const PROBES: &str = "probes";
/// As above.
pub const GROUPS: &str = "groups";

/// What a file says, each value checked by itself, none against the others yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFile {
    /// As given.
    pub path: PathBuf,
    /// In the file's order.
    pub flags: Vec<FileFlag>,
    /// In the file's order.
    pub probes: Vec<WrittenProbe>,
    /// In the file's order.
    pub groups: Vec<WrittenGroup>,
}

/// A flag by its camelCase name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFlag {
    /// `healthFile`
    pub key: String,
    /// `health-file`
    pub flag: String,
    /// As written.
    pub value: String,
    /// From 1.
    pub line: usize,
}

/// One thing that cannot be, and where it is written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Problem {
    /// The file, as given.
    pub path: PathBuf,
    /// From 1.
    pub line: usize,
    /// `probes[1].timeout`; empty when it is about the text itself.
    pub field: String,
    /// What is wrong, and what to do.
    pub message: String,
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be opened or read.
    #[error("--config={}: cannot read it", .path.display())]
    Io {
        /// The file, as given.
        path: PathBuf,
        /// The operating system's word.
        source: io::Error,
    },
    /// Something else holds the path.
    #[error("--config={} is {kind}: give the path of a YAML file", .path.display())]
    NotAFile {
        /// The path, as given.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// Larger than any honest one.
    #[error("--config={} has more than {} KiB: that is no settings file", .path.display(), MAX_FILE_BYTES / 1024)]
    TooLarge {
        /// The file, as given.
        path: PathBuf,
    },
    /// What it says cannot be.
    #[error("{}", lines(.0))]
    Problems(Vec<Problem>),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.path.display(), self.line)?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

impl ConfigFile {
    /// The file's flags as the command line has them, without those that are typed there: these win, and lists do not grow.
    pub fn arguments(&self, typed: &[String]) -> impl Iterator<Item = OsString> {
        self.flags
            .iter()
            .filter(|flag| !typed.contains(&flag.flag))
            .map(|flag| format!("--{}={}", flag.flag, flag.value).into())
    }

    /// Where the file sets the flag, if it does.
    pub fn flag(&self, flag: &str) -> Option<&FileFlag> {
        self.flags.iter().find(|written| written.flag == flag)
    }
}

/// Reads the file, whole, and checks each value by itself. `flags` are those of `run`, by which its flags are checked.
///
/// # Errors
/// All problems at once.
pub fn load(path: &Path, flags: &Command) -> Result<ConfigFile, FileError> {
    let (file, problems) = examine(path, flags)?;
    if problems.is_empty() { Ok(file) } else { Err(FileError::Problems(problems)) }
}

/// As [`load`], but gives what is good besides what is not.
///
/// # Errors
/// If there is no text of settings at all.
pub fn examine(path: &Path, flags: &Command) -> Result<(ConfigFile, Vec<Problem>), FileError> {
    let problem = |line, message: String| {
        FileError::Problems(vec![Problem { path: path.to_owned(), line, field: String::new(), message }])
    };
    let bytes = read(path)?;
    let text = std::str::from_utf8(&bytes).map_err(|error| {
        let before = &bytes[..error.valid_up_to()];
        problem(
            1 + before.iter().filter(|byte| **byte == b'\n').count(),
            "not UTF-8 text: save the file as UTF-8".to_owned(),
        )
    })?;
    understand(path, text, flags).map_err(|error| problem(error.line, error.message))
}

/// Makes sense of the text; what [`examine`] does once it has the bytes.
///
/// # Errors
/// What makes it no YAML document of settings.
pub fn understand(path: &Path, text: &str, flags: &Command) -> Result<(ConfigFile, Vec<Problem>), yaml::YamlError> {
    let root = yaml::parse(text)?;
    let wrong = |message: &str| yaml::YamlError { line: root.line, message: message.to_owned() };
    match &root.value {
        Value::Nothing => return Err(wrong("the file sets nothing: write settings, or leave --config out")),
        Value::Map(entries) if entries.is_empty() => {
            return Err(wrong("the file sets nothing: write settings, or leave --config out"));
        }
        Value::Map(_) => {}
        Value::Text(_) | Value::List(_) => {
            return Err(wrong("the file must be a map of keys, such as `probes:` or `healthFile:`"));
        }
    }
    let known: Vec<(String, &Arg)> = settable(flags).collect();
    let mut problems = Vec::new();
    let mut file = ConfigFile { path: path.to_owned(), flags: Vec::new(), probes: Vec::new(), groups: Vec::new() };
    let names = known.iter().map(|(key, _)| key.as_str()).chain([PROBES, GROUPS]).collect();
    let mut fields = Fields::new(path, String::new(), &root, names, &mut problems);
    for (key, _) in &known {
        if let Some(node) = fields.take(key)
            && let Some(flag) = flag(&mut fields, key, node, flags)
        {
            file.flags.push(flag);
        }
    }
    file.flags.sort_by_key(|flag| flag.line);
    let (probes, groups) = (fields.take(PROBES), fields.take(GROUPS));
    for only in COMMAND_LINE_ONLY {
        if let Some(node) = fields.take_unknown(only) {
            fields.wrong(node.line, only, format!("--{only} can only be given on the command line: remove this line"));
        }
    }
    fields.finish();
    if let Some(node) = probes {
        file.probes = WrittenProbe::read_all(path, node, &mut problems);
    }
    if let Some(node) = groups {
        // A probe that could not be read would be unknown here: one mistake, two messages.
        let probes = problems.is_empty().then_some(file.probes.as_slice());
        file.groups = WrittenGroup::read_all(path, node, probes, &mut problems);
    }
    problems.sort_by_key(|problem| problem.line);
    Ok((file, problems))
}

/// The flags that a file may set, by their keys there.
pub fn settable(flags: &Command) -> impl Iterator<Item = (String, &Arg)> {
    flags.get_arguments().filter_map(|flag| {
        let long = flag.get_long()?;
        (!COMMAND_LINE_ONLY.contains(&long)).then(|| (camel_case(long), flag))
    })
}

/// `health-file` as `healthFile`.
pub fn camel_case(flag: &str) -> String {
    let mut key = String::with_capacity(flag.len());
    for (at, word) in flag.split('-').enumerate() {
        let (first, rest) = word.split_at(word.len().min(1));
        if at == 0 {
            key += word;
        } else {
            key += &first.to_ascii_uppercase();
            key += rest;
        }
    }
    key
}

fn flag<'file>(fields: &mut Fields<'file, '_>, key: &str, node: &'file Node, flags: &Command) -> Option<FileFlag> {
    let value = fields.text(key, node)?.to_owned();
    let arg = flags.get_arguments().find(|arg| arg.get_long().is_some_and(|long| camel_case(long) == key))?;
    let flag = arg.get_long()?.to_owned();
    let alone = [OsString::from("csi-warden"), format!("--{flag}={value}").into()];
    if let Err(error) = flags.clone().try_get_matches_from(alone) {
        // The value parser's own words; clap's speak of the command line.
        let message = error.source().map_or_else(|| format!("{} is refused here", echo(&value)), ToString::to_string);
        let message =
            if message.contains(&format!("{value:?}")) { message } else { format!("{}: {message}", echo(&value)) };
        fields.wrong(node.line, key, message);
        return None;
    }
    Some(FileFlag { key: key.to_owned(), flag, value, line: node.line })
}

/// Follows links (a ConfigMap is made of them), never waits, and reads regular files only.
fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    let failed = |source: io::Error| FileError::Io { path: path.to_owned(), source };
    // Looked at first: opening some devices does something.
    let metadata = std::fs::metadata(path).map_err(failed)?;
    refuse_odd(path, FileType::from_raw_mode(std::os::unix::fs::MetadataExt::mode(&metadata)))?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let descriptor = openat(CWD, path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
    let stat = fstat(&descriptor).map_err(|error| failed(error.into()))?;
    refuse_odd(path, FileType::from_raw_mode(stat.st_mode))?;
    let mut bytes = Vec::new();
    File::from(descriptor).take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length <= MAX_FILE_BYTES) {
        Ok(bytes)
    } else {
        Err(FileError::TooLarge { path: path.to_owned() })
    }
}

fn refuse_odd(path: &Path, kind: FileType) -> Result<(), FileError> {
    let kind = match kind {
        FileType::RegularFile => return Ok(()),
        FileType::Directory => "a folder",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Symlink | FileType::Unknown => "no regular file",
    };
    Err(FileError::NotAFile { path: path.to_owned(), kind })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::run::RunFlags;
    use clap::CommandFactory;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    static FLAGS: LazyLock<Command> = LazyLock::new(RunFlags::command);

    fn understood(text: &str) -> (ConfigFile, Vec<Problem>) {
        understand(Path::new("warden.yaml"), text, &FLAGS).unwrap()
    }

    #[test]
    fn flags_become_arguments_of_the_same_name() {
        let (file, problems) = understood("csiAddress: /c\nhealthMaxAge: 20s\nv: 4\nenablePprof: true\n");
        assert!(problems.is_empty(), "{problems:?}");
        let arguments: Vec<_> = file.arguments(&[]).collect();
        assert_eq!(arguments, ["--csi-address=/c", "--health-max-age=20s", "--v=4", "--enable-pprof=true"]);
        assert_eq!(file.flag("v").map(|flag| flag.line), Some(3));
    }

    #[test]
    fn every_flag_but_those_about_the_call_has_a_key_of_its_own() {
        let keys: Vec<_> = settable(&FLAGS).map(|(key, _)| key).collect();
        let unique: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(unique.len(), keys.len());
        assert!(keys.iter().all(|key| !key.contains('-') && key != PROBES && key != GROUPS));
        assert_eq!(keys.len(), FLAGS.get_arguments().filter(|flag| flag.get_long().is_some()).count() - 2);
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_taken_or_refused_with_a_line(
            text in "(probes|groups|healthFile|timeout|name|type|exec|csi|command|env|health-file|1s|0|a|:|: |- |\n|  |\\{|\\}|\\[|\\]|, |&a |\\*a|\"|'|#|\t){0,60}"
        ) {
            if let Ok((file, problems)) = understand(Path::new("warden.yaml"), &text, &FLAGS) {
                for problem in &problems {
                    prop_assert!((1..=text.lines().count() + 1).contains(&problem.line), "{}", problem);
                    prop_assert!(!problem.to_string().contains('\n'));
                }
                let arguments = std::iter::once("csi-warden".into()).chain(file.arguments(&[]));
                prop_assert!(FLAGS.clone().try_get_matches_from(arguments).is_ok());
            }
        }
    }
}
