//! docs/config.md and docs/config.schema.json say what the program does.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use clap::{Arg, CommandFactory};
use csi_warden::cli::run::RunFlags;
use csi_warden::config::file::{self, GROUPS, PROBES};
use csi_warden::config::written::{GROUP_KEYS, PROBE_KEYS, PROBE_TYPES};
use csi_warden::config::yaml::{self, Node, Value as Yaml};
use csi_warden::policy::kernel_log::Class;
use csi_warden::policy::kernel_log_rules;
use csi_warden::policy::xid::XidTable;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

const DOCUMENT: &str = include_str!("../docs/config.md");
const SCHEMA: &str = include_str!("../docs/config.schema.json");

/// As in the schema; Go's, and never negative.
const DURATION: &str = "^[+]?(0|(([0-9]+(\\.[0-9]*)?|\\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$";

fn schema() -> Value {
    serde_json::from_str(SCHEMA).unwrap()
}

fn keys(object: &Value) -> BTreeSet<String> {
    object.as_object().unwrap().keys().cloned().collect()
}

fn set<'a>(keys: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    keys.into_iter().map(str::to_owned).collect()
}

/// What the schema must say of a flag.
fn property(flag: &Arg) -> Value {
    let text = |text: &dyn ToString| text.to_string();
    let mut property = Map::new();
    property.insert("description".into(), json!(flag.get_help().map(|help| text(&help)).unwrap()));
    let default = flag.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
    let names = flag.get_value_names().unwrap();
    let default = match (names[0].as_str(), default) {
        ("DURATION", default) => {
            // A bare 0 is a number in YAML.
            property.extend([("type".into(), json!(["string", "integer"])), ("pattern".into(), json!(DURATION))]);
            property.extend([("minimum".into(), json!(0)), ("maximum".into(), json!(0))]);
            default.map(Value::String)
        }
        ("BOOL", default) => {
            property.insert("type".into(), json!("boolean"));
            default.map(|default| json!(default == "true"))
        }
        ("N" | "LEVEL" | "PORT", default) => {
            property.insert("type".into(), json!("integer"));
            default.map(|default| json!(default.parse::<i64>().unwrap()))
        }
        ("UIDS", default) => {
            // A single one is a number in YAML.
            property.insert("type".into(), json!(["string", "integer"]));
            default.map(Value::String)
        }
        (_, default) => {
            property.insert("type".into(), json!("string"));
            default.filter(|default| !default.is_empty()).map(Value::String)
        }
    };
    property.extend(default.map(|default| ("default".into(), default)));
    Value::Object(property)
}

/// With CSI_WARDEN_BLESS=1 the file is written anew.
#[test]
fn the_schema_has_every_flag_as_the_program_has_it_and_no_other() {
    let (flags, mut schema) = (RunFlags::command(), schema());
    let mut expected: Map<String, Value> = file::settable(&flags).map(|(key, flag)| (key, property(flag))).collect();
    for key in [PROBES, GROUPS] {
        expected.insert(key.to_owned(), schema["properties"][key].clone());
    }
    if std::env::var_os("CSI_WARDEN_BLESS").is_some() {
        schema["properties"] = Value::Object(expected);
        fs::write("docs/config.schema.json", format!("{schema:#}\n")).unwrap();
        return;
    }
    assert_eq!(keys(&schema["properties"]), expected.keys().cloned().collect());
    for (key, property) in &expected {
        assert_eq!(schema["properties"][key], *property, "{key}; CSI_WARDEN_BLESS=1 writes the schema anew");
    }
}

#[test]
fn the_schema_has_every_key_of_probes_and_groups_and_no_other() {
    let schema = schema();
    let probe = &schema["properties"]["probes"]["items"];
    let own = PROBE_TYPES.map(|(_, key, _)| key);
    assert_eq!(keys(&probe["properties"]), set(PROBE_KEYS.into_iter().chain(own)));
    assert_eq!(probe["properties"]["type"]["enum"], json!(PROBE_TYPES.map(|(kind, ..)| kind)));
    for (_, key, inner) in PROBE_TYPES {
        assert_eq!(keys(&probe["properties"][key]["properties"]), set(inner.iter().copied()), "{key}");
        assert_eq!(probe["properties"][key]["additionalProperties"], json!(false), "{key}");
    }
    let group = &schema["properties"]["groups"]["items"];
    assert_eq!(keys(&group["properties"]), set(GROUP_KEYS));
    for object in [&schema, probe, group] {
        assert_eq!(object["additionalProperties"], json!(false));
    }
}

#[test]
fn the_documents_list_every_built_in_rule_and_xid() {
    let kernel_log = fs::read_to_string("docs/kernel-log.md").unwrap();
    for rule in kernel_log_rules::built_in() {
        assert!(kernel_log.contains(&format!("`{}`", rule.name)), "{}", rule.name);
    }
    let gpu = fs::read_to_string("docs/gpu.md").unwrap();
    let row = |name: &str| {
        let row = gpu.lines().find(|line| line.starts_with(&format!("| {name} |"))).unwrap();
        row.split('|').nth(2).unwrap().split(',').map(|number| number.trim().parse().unwrap()).collect::<Vec<u32>>()
    };
    let table = XidTable::default();
    let listed = |class| (0..1000).filter(|number| table.class(*number) == class).collect::<Vec<u32>>();
    assert_eq!((row("fatal"), row("ignored")), (listed(Class::Fatal), listed(Class::Ignore)));
}

/// The `yaml` blocks of the document.
fn examples() -> Vec<String> {
    let blocks = DOCUMENT.split("```yaml\n").skip(1);
    blocks.map(|block| block.split("```").next().unwrap().to_owned()).collect()
}

#[test]
fn every_example_is_taken_without_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("warden.yaml");
    assert!(examples().len() >= 3);
    for example in examples() {
        fs::write(&path, &example).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
            .args(["config", "check", "--kubelet-registration-path=/k/csi.sock"])
            .arg(format!("--config={}", path.display()))
            .arg(format!("--plugin-registration-path={}", folder.path().display()))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{example}\n{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn every_example_is_valid_by_the_schema() {
    for example in examples() {
        assert_eq!(invalid(&yaml::parse(&example).unwrap(), &schema()), None, "{example}");
    }
}

#[test]
fn the_schema_refuses_what_the_program_refuses() {
    for text in [
        "healthfile: /x",
        "failureThreshold: two",
        "enablePprof: yes",
        "timeout: 3",
        "probes: []",
        "probes: [{name: a}]",
        "probes: [{name: a, type: smart}]",
        "probes: [{name: a, type: nvme, nvme: {devices: []}}]",
        "probes: [{name: a, type: nvme, nvme: {smart: true, percentageUsed: {warn: 300}}}]",
        "probes: [{name: a, type: nvme, nvme: {smart: true, temperature: {hot: 1}}}]",
        "probes: [{name: a, type: nvme, nvme: {smart: true, criticalWarning: {readOnly: off}}}]",
        "probes: [{name: a, type: gpu, gpu: {count: -1}}]",
        "probes: [{name: a, type: gpu, gpu: {xid: on}}]",
        "probes: [{name: a, type: gpu, gpu: {nvidiaSmi: {}}}]",
        "probes: [{name: a, type: gpu, nvme: {}}]",
        "probes: [{name: a, type: kmsg, kmsg: {since: ever}}]",
        "probes: [{name: a, type: kmsg, kmsg: {rules: [{name: a, match: x}]}}]",
        "probes: [{name: a, type: kmsg, kmsg: {rules: []}}]",
        "probes: [{name: a, type: rdma, rdma: {device: [mlx5_0]}}]",
        "probes: [{name: a, type: rdma, rdma: {devices: []}}]",
        "probes: [{name: a, type: rdma, rdma: {ports: 1}}]",
        "probes: [{name: a, type: rdma, rdma: {deviceNodes: [umad]}}]",
        "probes: [{name: a, type: csi, rdma: {}}]",
        "probes: [{name: a, type: exec}]",
        "probes: [{name: a, type: exec, exec: {}}]",
        "probes: [{name: a, type: exec, exec: {command: []}}]",
        "probes: [{name: a, type: csi, exec: {command: [x]}}]",
        "probes: [{name: a, type: health-file}]",
        "probes: [{name: a, type: csi, failureThreshold: 0}]",
        "probes: [{name: a, type: csi, onFailure: ignore}]",
        "groups: [{name: g, probes: [a], require: 0}]",
        "groups: [{name: g, probes: []}]",
        "[a]",
    ] {
        let refused = file::understand("t.yaml".as_ref(), text, &RunFlags::command());
        assert!(refused.is_err() || refused.is_ok_and(|(_, problems)| !problems.is_empty()), "{text}");
        assert!(invalid(&yaml::parse(text).unwrap(), &schema()).is_some(), "{text}");
    }
}

/// Why the schema refuses the node, by the words that our schema uses; patterns are left to editors.
fn invalid(node: &Node, schema: &Value) -> Option<String> {
    let Some(schema) = schema.as_object() else {
        return (schema == &json!(false)).then(|| "must not be there".to_owned());
    };
    let refuse = |wrong: bool, word: &str| wrong.then(|| format!("line {}: {word}: {node:?}", node.line));
    schema.iter().find_map(|(word, rule)| match (word.as_str(), &node.value) {
        ("type", value) => {
            let types = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
            refuse(!types.iter().any(|name| is(value, name.as_str().unwrap())), word)
        }
        ("enum", Yaml::Text(text)) => refuse(!rule.as_array().unwrap().contains(&json!(text)), word),
        ("const", Yaml::Text(text)) => refuse(*rule != json!(text), word),
        ("minimum", Yaml::Text(text)) => {
            refuse(text.parse().is_ok_and(|number: i64| number < rule.as_i64().unwrap()), word)
        }
        ("maximum", Yaml::Text(text)) => {
            refuse(text.parse().is_ok_and(|number: i64| number > rule.as_i64().unwrap()), word)
        }
        ("minItems", Yaml::List(items)) => refuse((items.len() as u64) < rule.as_u64().unwrap(), word),
        ("items", Yaml::List(items)) => items.iter().find_map(|item| invalid(item, rule)),
        ("required", Yaml::Map(entries)) => {
            let has = |key: &Value| entries.iter().any(|entry| json!(entry.key) == *key);
            refuse(!rule.as_array().unwrap().iter().all(has), word)
        }
        ("properties", Yaml::Map(entries)) => {
            entries.iter().find_map(|entry| invalid(&entry.node, rule.get(&entry.key)?))
        }
        ("additionalProperties", Yaml::Map(entries)) => {
            let known = |key: &str| schema.get("properties").is_some_and(|known| known.get(key).is_some());
            entries.iter().filter(|entry| !known(&entry.key)).find_map(|entry| invalid(&entry.node, rule))
        }
        ("anyOf", _) => refuse(rule.as_array().unwrap().iter().all(|choice| invalid(node, choice).is_some()), word),
        ("allOf", _) => rule.as_array().unwrap().iter().find_map(|part| invalid(node, part)),
        ("if", _) if invalid(node, rule).is_none() => invalid(node, &schema["then"]),
        (
            "$schema"
            | "$id"
            | "title"
            | "description"
            | "default"
            | "pattern"
            | "examples"
            | "if"
            | "then"
            | "enum"
            | "const"
            | "minimum"
            | "maximum"
            | "minItems"
            | "items"
            | "required"
            | "properties"
            | "additionalProperties",
            _,
        ) => None,
        (other, _) => panic!("this validator does not know {other}"),
    })
}

fn is(value: &Yaml, name: &str) -> bool {
    match (name, value) {
        ("object", Yaml::Map(_)) | ("array", Yaml::List(_)) | ("string", Yaml::Text(_)) => true,
        ("integer", Yaml::Text(text)) => text.parse::<i64>().is_ok(),
        ("number", Yaml::Text(text)) => text.parse::<f64>().is_ok(),
        ("boolean", Yaml::Text(text)) => matches!(text.as_str(), "true" | "false"),
        _ => false,
    }
}
