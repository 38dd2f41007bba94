//! Settings of the probes of hardware, each with where it came from.

use super::in_force::{DEFAULT, Origins, Setting, duration, require};
use crate::config::fields::Written;
use crate::config::gpu::{WrittenGpu, WrittenXid};
use crate::config::kmsg::WrittenKmsg;
use crate::config::nvme::WrittenNvme;
use crate::config::probes::{GpuSettings, KmsgSettings, NvmeSettings};
use crate::policy::kernel_log::{Class, Since};
use crate::policy::nvme_selector::Selector;
use crate::policy::smart::{Level, Limits, Warning};
use serde::Serialize;
use serde_json::{Map, Value, json};

impl Origins<'_> {
    /// The keys under `nvme`.
    pub(super) fn nvme(&self, nvme: &NvmeSettings, set: &WrittenNvme) -> Vec<(&'static str, Setting)> {
        let texts = |selectors: &[Selector]| json!(selectors.iter().map(ToString::to_string).collect::<Vec<_>>());
        let devices = if nvme.devices.is_empty() { json!(["*"]) } else { texts(&nvme.devices) };
        let mut own = vec![
            self.key("devices", devices, set.devices.as_ref()),
            self.key("exclude", texts(&nvme.exclude), set.exclude.as_ref()),
            self.key("require", require(nvme.rule.require), set.require.as_ref()),
            self.key("grace", duration(nvme.rule.grace), set.grace.as_ref()),
            self.key("smart", json!(nvme.smart), set.smart.as_ref()),
        ];
        if nvme.smart {
            let smart = &nvme.rule.smart;
            let warnings: Map<String, Value> = Warning::ALL
                .into_iter()
                .zip(smart.warnings)
                .map(|(warning, at)| (warning.name().to_owned(), json!(level(at))))
                .collect();
            let spare = json!(level(smart.spare_below_threshold));
            own.extend([
                self.key("criticalWarning", Value::Object(warnings), set.critical_warning.as_ref()),
                self.key("spareBelowThreshold", spare, set.spare_below_threshold.as_ref()),
                self.key("percentageUsed", limits(smart.percentage_used), set.percentage_used.as_ref()),
                self.key("temperature", limits(smart.celsius), set.temperature.as_ref()),
                self.key("mediaErrors", limits(smart.media_errors), set.media_errors.as_ref()),
                self.key("hold", duration(smart.hold), set.hold.as_ref()),
            ]);
        }
        own
    }

    /// The keys under `gpu`.
    pub(super) fn gpu(&self, gpu: &GpuSettings, set: &WrittenGpu) -> Vec<(&'static str, Setting)> {
        let vendors: Vec<_> = gpu.select.vendors.iter().map(|vendor| format!("{vendor:04x}")).collect();
        let devices = if gpu.select.devices.is_empty() { json!(["*"]) } else { json!(gpu.select.devices) };
        let mut own = vec![
            self.key("vendors", json!(vendors), set.vendors.as_ref()),
            self.key("devices", devices, set.devices.as_ref()),
            self.key("exclude", json!(gpu.select.exclude), set.exclude.as_ref()),
            self.key("require", require(gpu.rule.require), set.require.as_ref()),
            self.key("memoryUsed", limits(gpu.rule.memory_used), set.memory_used.as_ref()),
        ];
        if let Some(count) = gpu.rule.count {
            own.push(self.key("count", json!(count), set.count.as_ref()));
        }
        if let Some(tool) = &gpu.tool {
            // The environment may hold secrets.
            let words: Vec<_> = std::iter::once(&tool.command.program)
                .chain(&tool.command.arguments)
                .map(|word| word.to_string_lossy())
                .collect();
            let value = json!({ "command": words, "recoveryAction": tool.recovery_action });
            own.push(self.key("nvidiaSmi", value, set.tool.as_ref()));
        }
        let xid = match &gpu.xid {
            None => json!("off"),
            Some(xid) => {
                let mut value = Map::new();
                let moved = match set.xid.as_ref().map(|set| &set.value) {
                    Some(WrittenXid::Table { moved, .. }) => moved.as_slice(),
                    Some(WrittenXid::Off) | None => &[],
                };
                for (key, class) in [("fatal", Class::Fatal), ("warn", Class::Warn), ("ignore", Class::Ignore)] {
                    let numbers: Vec<_> =
                        moved.iter().filter(|(_, of)| *of == class).map(|(number, _)| number).collect();
                    if !numbers.is_empty() {
                        value.insert(key.to_owned(), json!(numbers));
                    }
                }
                value.insert("for".to_owned(), xid.holds.map_or(json!("recovery"), duration));
                value.insert("since".to_owned(), json!(since(xid.since)));
                Value::Object(value)
            }
        };
        own.push(self.key("xid", xid, set.xid.as_ref()));
        own
    }

    /// The keys under `kmsg`.
    pub(super) fn kmsg(&self, kmsg: &KmsgSettings, set: &WrittenKmsg) -> Vec<(&'static str, Setting)> {
        let built_in = set.built_in.as_ref().is_none_or(|set| set.value);
        let mut own = vec![
            self.key("since", json!(since(kmsg.since)), set.since.as_ref()),
            self.key("builtIn", json!(built_in), set.built_in.as_ref()),
        ];
        if let Some(rules) = &set.rules {
            let rule = |rule: &crate::config::kmsg::WrittenRule| {
                let mut value = Map::new();
                value.insert("name".to_owned(), json!(rule.name));
                let patterns = [("match", &rule.pattern), ("until", &rule.until)];
                for (key, pattern) in patterns {
                    if let Some(pattern) = pattern {
                        value.insert(key.to_owned(), json!(pattern.as_str()));
                    }
                }
                let class = match rule.class {
                    Class::Fatal => "fatal",
                    Class::Warn => "warn",
                    Class::Ignore => "ignore",
                };
                value.insert("class".to_owned(), json!(class));
                if let Some(holds) = rule.holds {
                    value.insert("for".to_owned(), holds.map_or(json!("recovery"), duration));
                }
                Value::Object(value)
            };
            let value = Value::Array(rules.value.iter().map(rule).collect());
            own.push(self.key("rules", value, Some(rules)));
        }
        own
    }

    fn key<T>(&self, key: &'static str, value: Value, set: Option<&Written<T>>) -> (&'static str, Setting) {
        (key, Setting::Value(value, self.written(set, || DEFAULT.to_owned())))
    }
}

fn limits<T: Serialize>(limits: Limits<T>) -> Value {
    let limit = |limit: Option<T>| limit.map_or(json!("never"), |limit| json!(limit));
    json!({ "warn": limit(limits.warn), "fail": limit(limits.fail) })
}

fn level(level: Level) -> &'static str {
    match level {
        Level::Ignore => "ignore",
        Level::Warn => "warn",
        Level::Fail => "fail",
    }
}

fn since(since: Since) -> &'static str {
    match since {
        Since::Now => "now",
        Since::Boot => "boot",
    }
}
