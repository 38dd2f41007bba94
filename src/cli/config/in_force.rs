//! Every setting in force, and where it came from.

use crate::cli::go_flags::parse_bool;
use crate::config::fields::Written;
use crate::config::file::{ConfigFile, settable};
use crate::config::go_duration::GoDuration;
use crate::config::go_integer::{integer, level};
use crate::config::gpu::WrittenGpu;
use crate::config::kmsg::WrittenKmsg;
use crate::config::nvme::WrittenNvme;
use crate::config::probes::{GroupSettings, OnFailure, ProbeKind, ProbeSettings, Require};
use crate::config::rdma::WrittenRdma;
use crate::config::settings::{Health, Settings};
use crate::config::watched::FLAG_PROBE;
use crate::config::written::{WrittenGroup, WrittenKind, WrittenProbe};
use crate::policy::rdma::rules::RdmaRules;
use crate::policy::rdma::selector::Selector;
use clap::{ArgMatches, Command};
use serde_json::{Value, json};

/// A tree of settings. Keys are those of the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Setting {
    /// A value or a list of values, and where it came from: `default`, `flag`, `warden.yaml:7`.
    Value(Value, String),
    /// By key, in the order of the file's shape.
    Map(Vec<(&'static str, Setting)>),
    /// As [`Self::Map`], for what a flag has made: a settings file has the flag instead.
    Made(Vec<(&'static str, Setting)>),
    /// Probes or groups.
    List(Vec<Setting>),
    /// Variables by name, which may be secrets, and where they came from.
    Hidden(Vec<String>, String),
}

/// Where flags came from.
pub(super) struct Origins<'a> {
    file: Option<&'a ConfigFile>,
    typed: &'a [String],
}

/// The settings by key: the flags, then `probes`, then `groups`.
///
/// Values of an exec probe's environment may be secrets and are not shown.
pub(super) fn in_force(
    settings: &Settings,
    flags: &Command,
    matches: &ArgMatches,
    file: Option<&ConfigFile>,
    typed: &[String],
) -> Vec<(String, Setting)> {
    let origins = Origins { file, typed };
    let mut all = Vec::new();
    for (key, flag) in settable(flags) {
        let long = flag.get_long().unwrap_or_default();
        let value = match (typed_value(flag, matches), &settings.health) {
            (Value::Null, Some(health)) => made_default(long, settings, health),
            (value, _) => value,
        };
        let from = origins.flag(long);
        if !(flag.is_hide_set() && from == DEFAULT) {
            all.push((key, Setting::Value(value, from)));
        }
    }
    let Some(health) = &settings.health else { return all };
    let written = |probe: &ProbeSettings| {
        file.and_then(|file| file.probes.iter().find(|written| written.name.value == probe.name))
    };
    let probes = health.probes.iter().map(|probe| origins.probe(probe, written(probe))).collect();
    all.push(("probes".to_owned(), Setting::List(probes)));
    if let Some(file) = file
        && !health.groups.is_empty()
    {
        let groups = health.groups.iter().zip(&file.groups).map(|(group, written)| origins.group(group, written));
        all.push(("groups".to_owned(), Setting::List(groups.collect())));
    }
    all
}

pub(super) const DEFAULT: &str = "default";

/// Of a flag whose default is made when the daemon starts.
fn made_default(flag: &str, settings: &Settings, health: &Health) -> Value {
    match flag {
        "on-unhealthy" => json!(health.rules.reaction.name()),
        "state-dir" => json!(settings.state_folder.to_string_lossy()),
        _ => Value::Null,
    }
}

impl Origins<'_> {
    fn flag(&self, flag: &str) -> String {
        if self.typed.iter().any(|typed| typed == flag) {
            return "flag".to_owned();
        }
        self.file.and_then(|file| file.flag(flag)).map_or(DEFAULT.to_owned(), |flag| self.line(flag.line))
    }

    /// Of a value that a probe takes from a flag.
    fn inherited(&self, flag: &str) -> String {
        match self.flag(flag).as_str() {
            "flag" => format!("flag --{flag}"),
            other => other.to_owned(),
        }
    }

    fn line(&self, line: usize) -> String {
        let name = self.file.map(|file| file.path.file_name().unwrap_or(file.path.as_os_str()).to_string_lossy());
        format!("{}:{line}", name.unwrap_or_default())
    }

    pub(super) fn written<T>(&self, written: Option<&Written<T>>, otherwise: impl FnOnce() -> String) -> String {
        written.map_or_else(otherwise, |written| self.line(written.line))
    }

    fn probe(&self, probe: &ProbeSettings, written: Option<&WrittenProbe>) -> Setting {
        let default = || DEFAULT.to_owned();
        // The probe that --health-file makes has no lines of its own.
        let itself = |otherwise: &str| match written {
            Some(written) => self.line(written.line),
            None => self.inherited(otherwise),
        };
        let period_flag = || match &probe.kind {
            ProbeKind::HealthFile { .. } => self.inherited("health-interval"),
            ProbeKind::Csi { .. }
            | ProbeKind::Exec { .. }
            | ProbeKind::Rdma(_)
            | ProbeKind::Nvme(_)
            | ProbeKind::Gpu(_)
            | ProbeKind::Kmsg(_) => default(),
        };
        let value = |value: Value, from: String| Setting::Value(value, from);
        let mut map = vec![
            (
                "name",
                value(json!(probe.name), written.map_or_else(|| itself("health-file"), |set| self.line(set.name.line))),
            ),
            (
                "type",
                value(
                    json!(probe.kind.name()),
                    written.map_or_else(|| itself("health-file"), |set| self.line(set.kind.line)),
                ),
            ),
            (
                "period",
                value(duration(probe.period), self.written(written.and_then(|set| set.period.as_ref()), period_flag)),
            ),
            (
                "timeout",
                value(duration(probe.timeout), self.written(written.and_then(|set| set.timeout.as_ref()), default)),
            ),
            (
                "failureThreshold",
                value(
                    json!(probe.thresholds.failure.get()),
                    self.written(written.and_then(|set| set.failure_threshold.as_ref()), || {
                        self.inherited("failure-threshold")
                    }),
                ),
            ),
            (
                "successThreshold",
                value(
                    json!(probe.thresholds.success.get()),
                    self.written(written.and_then(|set| set.success_threshold.as_ref()), || {
                        self.inherited("success-threshold")
                    }),
                ),
            ),
            (
                "confirmInterval",
                value(
                    duration(probe.confirm_interval),
                    self.written(written.and_then(|set| set.confirm_interval.as_ref()), || {
                        self.inherited("confirm-interval")
                    }),
                ),
            ),
            (
                "onFailure",
                value(
                    json!(match probe.on_failure {
                        OnFailure::Fail => "fail",
                        OnFailure::Warn => "warn",
                    }),
                    self.written(written.and_then(|set| set.on_failure.as_ref()), default),
                ),
            ),
        ];
        map.push(self.own(probe, written));
        if written.is_some() { Setting::Map(map) } else { Setting::Made(map) }
    }

    /// The settings under the type's own key.
    fn own(&self, probe: &ProbeSettings, written: Option<&WrittenProbe>) -> (&'static str, Setting) {
        let kind = written.map(|written| &written.kind.value);
        let default = || DEFAULT.to_owned();
        match &probe.kind {
            ProbeKind::HealthFile { path, limits } => {
                let (path_set, age_set, dead_set) =
                    if let Some(WrittenKind::HealthFile { path, max_age, dead_after }) = kind {
                        (Some(path), max_age.as_ref(), dead_after.as_ref())
                    } else {
                        (None, None, None)
                    };
                let dead_after = limits.dead_after.unwrap_or_default();
                let own = vec![
                    (
                        "path",
                        Setting::Value(
                            json!(path.to_string_lossy()),
                            self.written(path_set, || self.inherited(FLAG_PROBE)),
                        ),
                    ),
                    (
                        "maxAge",
                        Setting::Value(
                            duration(limits.max_age),
                            self.written(age_set, || self.inherited("health-max-age")),
                        ),
                    ),
                    (
                        "deadAfter",
                        Setting::Value(
                            duration(dead_after),
                            self.written(dead_set, || self.inherited("health-dead-after")),
                        ),
                    ),
                ];
                ("healthFile", Setting::Map(own))
            }
            ProbeKind::Csi { socket } => {
                let set = if let Some(WrittenKind::Csi { socket }) = kind { socket.as_ref() } else { None };
                let from = self.written(set, || self.inherited("csi-address"));
                ("csi", Setting::Map(vec![("socket", Setting::Value(json!(socket.to_string_lossy()), from))]))
            }
            ProbeKind::Exec { command } => {
                let (command_set, env_line) = if let Some(WrittenKind::Exec { command, env_line }) = kind {
                    (Some(command), *env_line)
                } else {
                    (None, None)
                };
                let words: Vec<_> = std::iter::once(&command.program)
                    .chain(&command.arguments)
                    .map(|word| word.to_string_lossy())
                    .collect();
                let mut own = vec![("command", Setting::Value(json!(words), self.written(command_set, default)))];
                if let Some(line) = env_line {
                    let names = command.environment.iter().map(|(name, _)| name.to_string_lossy().into_owned());
                    own.push(("env", Setting::Hidden(names.collect(), self.line(line))));
                }
                ("exec", Setting::Map(own))
            }
            ProbeKind::Nvme(nvme) => {
                let set = if let Some(WrittenKind::Nvme(set)) = kind { set.clone() } else { WrittenNvme::default() };
                ("nvme", Setting::Map(self.nvme(nvme, &set)))
            }
            ProbeKind::Gpu(gpu) => {
                let set = if let Some(WrittenKind::Gpu(set)) = kind { set.clone() } else { WrittenGpu::default() };
                ("gpu", Setting::Map(self.gpu(gpu, &set)))
            }
            ProbeKind::Kmsg(kmsg) => {
                let set = if let Some(WrittenKind::Kmsg(set)) = kind { set.clone() } else { WrittenKmsg::default() };
                ("kmsg", Setting::Map(self.kmsg(kmsg, &set)))
            }
            ProbeKind::Rdma(rdma) => {
                let set = if let Some(WrittenKind::Rdma(set)) = kind { set.clone() } else { WrittenRdma::default() };
                ("rdma", Setting::Map(self.rdma(&rdma.rules, &set)))
            }
        }
    }

    fn rdma(&self, rules: &RdmaRules, set: &WrittenRdma) -> Vec<(&'static str, Setting)> {
        let default = || DEFAULT.to_owned();
        let texts = |selectors: &[Selector]| json!(selectors.iter().map(ToString::to_string).collect::<Vec<_>>());
        let devices = if rules.devices.is_empty() { json!(["*"]) } else { texts(&rules.devices) };
        let ports = if rules.ports.is_empty() { json!("all") } else { json!(rules.ports) };
        let nodes = json!(rules.device_nodes.iter().map(|node| node.name()).collect::<Vec<_>>());
        let mut own = vec![
            ("devices", Setting::Value(devices, self.written(set.devices.as_ref(), default))),
            ("exclude", Setting::Value(texts(&rules.exclude), self.written(set.exclude.as_ref(), default))),
            ("ports", Setting::Value(ports, self.written(set.ports.as_ref(), default))),
            ("require", Setting::Value(require(rules.require), self.written(set.require.as_ref(), default))),
            ("deviceNodes", Setting::Value(nodes, self.written(set.device_nodes.as_ref(), default))),
            ("details", Setting::Value(json!(rules.details), self.written(set.details.as_ref(), default))),
        ];
        if let Some(rate) = rules.min_rate {
            own.push(("minRate", Setting::Value(json!(rate.gigabits()), self.written(set.min_rate.as_ref(), default))));
        }
        own
    }

    fn group(&self, group: &GroupSettings, written: &WrittenGroup) -> Setting {
        let require = require(group.require);
        Setting::Map(vec![
            ("name", Setting::Value(json!(group.name), self.line(written.name.line))),
            ("probes", Setting::Value(json!(group.probes), self.line(written.probes.line))),
            ("require", Setting::Value(require, self.written(written.require.as_ref(), || DEFAULT.to_owned()))),
        ])
    }
}

pub(super) fn require(require: Require) -> Value {
    match require {
        Require::All => json!("all"),
        Require::Any => json!("any"),
        Require::AtLeast(count) => json!(count.get()),
    }
}

pub(super) fn duration(value: std::time::Duration) -> Value {
    json!(GoDuration(value).to_string())
}

/// A flag's value as the file would have it; numbers and booleans as such.
fn typed_value(flag: &clap::Arg, matches: &ArgMatches) -> Value {
    let Some(raw) = matches.get_raw(flag.get_id().as_str()) else { return Value::Null };
    let all: Vec<_> = raw.map(|raw| raw.to_string_lossy()).collect();
    let text = match (flag.get_value_delimiter(), all.last()) {
        (Some(delimiter), _) => all.join(&delimiter.to_string()),
        (None, Some(last)) => last.clone().into_owned(),
        (None, None) => return Value::Null,
    };
    match flag.get_value_names().and_then(|names| names.first()).map(clap::builder::Str::as_str) {
        Some("BOOL") => parse_bool(&text).map_or_else(|_| json!(text), Value::Bool),
        Some("LEVEL") => level(&text).map_or_else(|_| json!(text), |number| json!(number)),
        Some("N" | "PORT") => integer::<i64>(&text).map_or_else(|_| json!(text), |number| json!(number)),
        Some(_) | None => json!(text),
    }
}
