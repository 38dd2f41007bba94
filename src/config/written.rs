//! Probes and groups as a file writes them: typed, defaults not yet filled in.

use super::fields::{Fields, Written, duration, positive_duration, threshold};
use super::file::Problem;
use super::gpu::{self, WrittenGpu};
use super::kmsg::{self, WrittenKmsg};
use super::nvme::{self, WrittenNvme};
use super::paths::{names_a_file, unix_path};
use super::probes::{OnFailure, Require};
use super::rdma::{self, WrittenRdma};
use super::yaml::{Node, Value, echo};
use crate::probe::exec::Command;
use crate::registration::socket::MAX_SOCKET_PATH_BYTES;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Keys of a probe that every type has.
pub const PROBE_KEYS: [&str; 8] =
    ["name", "type", "period", "timeout", "failureThreshold", "successThreshold", "confirmInterval", "onFailure"];

/// The types, the key of each one's own settings, and the keys in there.
pub const PROBE_TYPES: [(&str, &str, &[&str]); 7] = [
    ("health-file", "healthFile", &["path", "maxAge", "deadAfter"]),
    ("csi", "csi", &["socket"]),
    ("exec", "exec", &["command", "env"]),
    ("rdma", "rdma", rdma::KEYS),
    ("nvme", "nvme", nvme::KEYS),
    ("gpu", "gpu", gpu::KEYS),
    ("kmsg", "kmsg", kmsg::KEYS),
];

/// Keys of a group.
pub const GROUP_KEYS: [&str; 3] = ["name", "probes", "require"];

/// As long as a name in Kubernetes.
const MAX_NAME_BYTES: usize = 63;

/// A probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenProbe {
    /// Where it begins.
    pub line: usize,
    /// Unique.
    pub name: Written<String>,
    /// What it asks.
    pub kind: Written<WrittenKind>,
    /// Unless the type's default.
    pub period: Option<Written<Duration>>,
    /// Likewise.
    pub timeout: Option<Written<Duration>>,
    /// Unless the flag's.
    pub failure_threshold: Option<Written<NonZeroU32>>,
    /// Likewise.
    pub success_threshold: Option<Written<NonZeroU32>>,
    /// Likewise.
    pub confirm_interval: Option<Written<Duration>>,
    /// Unless `fail`.
    pub on_failure: Option<Written<OnFailure>>,
}

/// A type with its own settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WrittenKind {
    /// `health-file`
    HealthFile {
        /// The file.
        path: Written<PathBuf>,
        /// Unless the flag's.
        max_age: Option<Written<Duration>>,
        /// Likewise; zero is never.
        dead_after: Option<Written<Duration>>,
    },
    /// `csi`
    Csi {
        /// Unless the driver's.
        socket: Option<Written<PathBuf>>,
    },
    /// `exec`
    Exec {
        /// The command with its environment.
        command: Written<Command>,
        /// Where the environment is written.
        env_line: Option<usize>,
    },
    /// `rdma`
    Rdma(WrittenRdma),
    /// `nvme`
    Nvme(WrittenNvme),
    /// `gpu`
    Gpu(WrittenGpu),
    /// `kmsg`
    Kmsg(WrittenKmsg),
}

/// A group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenGroup {
    /// Unique among groups and probes.
    pub name: Written<String>,
    /// Each a probe's, and in no other group.
    pub probes: Written<Vec<String>>,
    /// Unless `all`.
    pub require: Option<Written<Require>>,
}

impl WrittenProbe {
    pub(super) fn read_all(file: &Path, node: &Node, problems: &mut Vec<Problem>) -> Vec<Self> {
        let mut names = BTreeSet::new();
        let mut probes = Vec::new();
        for (at, item) in items(file, "probes", node, problems).iter().enumerate() {
            let path = format!("probes[{at}]");
            let Some(probe) = Self::read(file, &path, item, problems) else { continue };
            if names.insert(probe.name.value.clone()) {
                probes.push(probe);
            } else {
                problems.push(Problem {
                    path: file.to_owned(),
                    line: probe.name.line,
                    field: format!("{path}.name"),
                    message: format!("another probe is named {:?}: give each its own name", probe.name.value),
                });
            }
        }
        probes
    }

    fn read(file: &Path, path: &str, node: &Node, problems: &mut Vec<Problem>) -> Option<Self> {
        let known = PROBE_KEYS.into_iter().chain(PROBE_TYPES.map(|(_, key, _)| key)).collect();
        let mut fields = Fields::new(file, path.to_owned(), node, known, problems);
        if !matches!(node.value, Value::Map(_)) {
            return None;
        }
        let name = fields.need("name", "give the probe a name of its own").and_then(|node| name(&mut fields, node));
        let kind = kind(file, &mut fields);
        let period = fields.parsed("period", positive_duration);
        let timeout = fields.parsed("timeout", positive_duration);
        let failure_threshold = fields.parsed("failureThreshold", threshold);
        let success_threshold = fields.parsed("successThreshold", threshold);
        let confirm_interval = fields.parsed("confirmInterval", duration);
        let on_failure = fields.parsed("onFailure", |text| match text {
            "fail" => Ok(OnFailure::Fail),
            "warn" => Ok(OnFailure::Warn),
            other => Err(format!("{} is unknown: use fail or warn", echo(other))),
        });
        fields.finish();
        Some(Self {
            line: node.line,
            name: name?,
            kind: kind?,
            period,
            timeout,
            failure_threshold,
            success_threshold,
            confirm_interval,
            on_failure,
        })
    }
}

fn kind(file: &Path, fields: &mut Fields<'_, '_>) -> Option<Written<WrittenKind>> {
    let own = PROBE_TYPES.map(|(kind, key, _)| (kind, key, fields.take(key)));
    let types = PROBE_TYPES.map(|(kind, ..)| kind).join(", ");
    let node = fields.need("type", &format!("use one of {types}"))?;
    let line = node.line;
    let kind = fields.text("type", node)?;
    let Some((_, key, keys)) = PROBE_TYPES.into_iter().find(|(name, ..)| *name == kind) else {
        fields.wrong(line, "type", format!("{} is unknown: use one of {types}", echo(kind)));
        return None;
    };
    for (other, key, node) in own {
        if let Some(node) = node
            && other != kind
        {
            fields.wrong(node.line, key, format!("belongs to type {other}, but the type is {kind}: remove one"));
        }
    }
    let settings = own.into_iter().find(|(name, ..)| *name == kind).and_then(|(_, _, node)| node);
    let Some(settings) = settings else {
        // These need no settings of their own.
        let value = match kind {
            "csi" => WrittenKind::Csi { socket: None },
            "rdma" => WrittenKind::Rdma(WrittenRdma::default()),
            "nvme" => WrittenKind::Nvme(WrittenNvme::default()),
            "gpu" => WrittenKind::Gpu(WrittenGpu::default()),
            "kmsg" => WrittenKind::Kmsg(WrittenKmsg::default()),
            _ => {
                fields.wrong(line, key, format!("is missing: type {kind} needs it, with the keys {}", keys.join(", ")));
                return None;
            }
        };
        return Some(Written { value, line });
    };
    let within = fields.within(key);
    let is_map = matches!(settings.value, Value::Map(_));
    let mut own = Fields::new(file, within, settings, keys.to_vec(), fields.problems());
    if !is_map {
        return None;
    }
    let value = match kind {
        "health-file" => health_file(&mut own),
        "csi" => Some(WrittenKind::Csi { socket: own.parsed("socket", socket) }),
        "rdma" => Some(WrittenKind::Rdma(WrittenRdma::read(&mut own))),
        "nvme" => Some(WrittenKind::Nvme(WrittenNvme::read(&mut own))),
        "gpu" => Some(WrittenKind::Gpu(WrittenGpu::read(&mut own))),
        "kmsg" => Some(WrittenKind::Kmsg(WrittenKmsg::read(&mut own))),
        _ => exec(file, &mut own),
    };
    own.finish();
    Some(Written { value: value?, line })
}

fn health_file(own: &mut Fields<'_, '_>) -> Option<WrittenKind> {
    let max_age = own.parsed("maxAge", positive_duration);
    let dead_after = own.parsed("deadAfter", duration);
    let node = own.need("path", "name the file that says OK or ERROR")?;
    let path = PathBuf::from(own.text("path", node)?);
    if !names_a_file(&path) {
        own.wrong(node.line, "path", format!("{} names no file", echo(&path.to_string_lossy())));
        return None;
    }
    Some(WrittenKind::HealthFile { path: Written { value: path, line: node.line }, max_age, dead_after })
}

fn socket(text: &str) -> Result<PathBuf, String> {
    let path =
        unix_path(text).ok_or_else(|| format!("{} is not a unix socket: give a path, or unix:///path", echo(text)))?;
    let bytes = path.as_os_str().len();
    if bytes > MAX_SOCKET_PATH_BYTES {
        return Err(format!("the path has {bytes} bytes; a unix socket's path holds {MAX_SOCKET_PATH_BYTES}"));
    }
    Ok(path)
}

fn exec(file: &Path, own: &mut Fields<'_, '_>) -> Option<WrittenKind> {
    let (command, env_line) = command(file, own, "a list of the program and its arguments, such as [/check, --quick]")?;
    Some(WrittenKind::Exec { command, env_line })
}

/// `command` and `env`; the latter's line, too.
pub(super) fn command(file: &Path, own: &mut Fields<'_, '_>, hint: &str) -> Option<(Written<Command>, Option<usize>)> {
    let env = own.take("env");
    let environment = env.map(|node| environment(file, own, node)).unwrap_or_default();
    let node = own.need("command", hint)?;
    let words = own.texts("command", node);
    let Value::List(items) = &node.value else { return None };
    let Some((program, arguments)) = words.split_first() else {
        if items.is_empty() {
            own.wrong(node.line, "command", "is empty: name the program, and its arguments after it".to_owned());
        }
        return None;
    };
    if program.value.is_empty() {
        own.wrong(program.line, "command[0]", "is empty: name the program".to_owned());
        return None;
    }
    let command = Command {
        program: program.value.into(),
        arguments: arguments.iter().map(|word| word.value.into()).collect(),
        environment,
    };
    Some((Written { value: command, line: node.line }, env.map(|node| node.line)))
}

/// Names and values to set. A value may be a secret: no message repeats one.
fn environment(file: &Path, own: &mut Fields<'_, '_>, node: &Node) -> Vec<(std::ffi::OsString, std::ffi::OsString)> {
    let Value::Map(entries) = &node.value else {
        own.wrong(node.line, "env", format!("must be a map such as {{NAME: value}}, not {}", node.value.kind()));
        return Vec::new();
    };
    let within = own.within("env");
    let known = entries.iter().map(|entry| entry.key.as_str()).collect();
    let mut variables = Fields::new(file, within, node, known, own.problems());
    let mut environment = Vec::new();
    for entry in entries {
        if entry.key.is_empty() || entry.key.contains(['=', '\0']) {
            variables.wrong(entry.line, "", format!("{} cannot be a variable's name", echo(&entry.key)));
        } else if let Some(value) = variables.text(&entry.key, &entry.node) {
            environment.push((entry.key.as_str().into(), value.into()));
        }
    }
    environment
}

impl WrittenGroup {
    /// `probes` are those of the file, unless some of them could not be read.
    pub(super) fn read_all(
        file: &Path,
        node: &Node,
        probes: Option<&[WrittenProbe]>,
        problems: &mut Vec<Problem>,
    ) -> Vec<Self> {
        let mut grouped: Vec<(String, String)> = Vec::new();
        let mut groups: Vec<Self> = Vec::new();
        for (at, item) in items(file, "groups", node, problems).iter().enumerate() {
            let path = format!("groups[{at}]");
            let mut fields = Fields::new(file, path, item, GROUP_KEYS.to_vec(), problems);
            if !matches!(item.value, Value::Map(_)) {
                continue;
            }
            let name = fields.need("name", "give the group a name of its own").and_then(|node| name(&mut fields, node));
            if let Some(name) = &name {
                let taken = groups.iter().any(|other| other.name.value == name.value)
                    || probes.is_some_and(|probes| probes.iter().any(|probe| probe.name.value == name.value));
                if taken {
                    let message = format!("another group or probe is named {:?}: give each its own name", name.value);
                    fields.wrong(name.line, "name", message);
                }
            }
            let members = fields.need("probes", "list the names of the group's probes");
            let members = members.map(|node| {
                let members = fields.texts("probes", node);
                if matches!(&node.value, Value::List(items) if items.is_empty()) {
                    fields.wrong(node.line, "probes", "is empty: list the names of the group's probes".to_owned());
                }
                let group = name.as_ref().map_or("", |name| name.value.as_str());
                for (at, member) in members.iter().enumerate() {
                    let field = format!("probes[{at}]");
                    if let Some((_, other)) = grouped.iter().find(|(probe, _)| probe == member.value) {
                        let message =
                            format!("{:?} is already in group {other:?}: a probe is in one at most", member.value);
                        fields.wrong(member.line, &field, message);
                    } else if probes.is_some_and(|all| all.iter().all(|probe| probe.name.value != member.value)) {
                        let message = format!("no probe of this file is named {}", echo(member.value));
                        fields.wrong(member.line, &field, message);
                    } else {
                        grouped.push((member.value.to_owned(), group.to_owned()));
                    }
                }
                Written {
                    value: members.iter().map(|member| member.value.to_owned()).collect::<Vec<_>>(),
                    line: node.line,
                }
            });
            let require = fields.parsed("require", require);
            if let (Some(Written { value: Require::AtLeast(count), line }), Some(members)) = (&require, &members)
                && usize::try_from(count.get()).is_ok_and(|count| count > members.value.len())
            {
                let message = format!("{count} cannot be had of {} probes", members.value.len());
                fields.wrong(*line, "require", message);
            }
            fields.finish();
            if let (Some(name), Some(probes)) = (name, members) {
                groups.push(Self { name, probes, require });
            }
        }
        groups
    }
}

pub(super) fn require(text: &str) -> Result<Require, String> {
    match text {
        "all" => Ok(Require::All),
        "any" => Ok(Require::Any),
        number => number
            .parse()
            .map(Require::AtLeast)
            .map_err(|_| format!("{} is unknown: use all, any, or a whole number above zero", echo(number))),
    }
}

/// The items of a list that must not be empty: an empty one would watch nothing, in silence.
fn items<'a>(file: &Path, key: &str, node: &'a Node, problems: &mut Vec<Problem>) -> &'a [Node] {
    let message = match &node.value {
        Value::List(items) if !items.is_empty() => return items,
        Value::List(_) | Value::Nothing => "is empty: list some, or leave the key out".to_owned(),
        other @ (Value::Text(_) | Value::Map(_)) => {
            format!("must be a list, each item after a dash, not {}", other.kind())
        }
    };
    problems.push(Problem { path: file.to_owned(), line: node.line, field: key.to_owned(), message });
    &[]
}

fn name(fields: &mut Fields<'_, '_>, node: &Node) -> Option<Written<String>> {
    let text = match &node.value {
        Value::Text(text) => text,
        other @ (Value::Nothing | Value::List(_) | Value::Map(_)) => {
            fields.wrong(node.line, "name", format!("must be a single word, not {}", other.kind()));
            return None;
        }
    };
    let fits = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-');
    if text.is_empty() || text.len() > MAX_NAME_BYTES || !text.bytes().all(fits) {
        let message = format!("{} is no name: use 1 to {MAX_NAME_BYTES} of a-z, 0-9, . and -", echo(text));
        fields.wrong(node.line, "name", message);
        return None;
    }
    Some(Written { value: text.clone(), line: node.line })
}
