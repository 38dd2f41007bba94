//! Settings in force as a table, JSON, or a settings file.

use super::in_force::Setting;
use crate::cli::look::{padded, width};
use serde_json::{Map, Value, json};

/// Stands for a value of an environment.
const HIDDEN: &str = "(hidden)";

/// `--output`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// For people.
    Table,
    /// For programs: each value with where it is from.
    Json,
    /// For `--config`: each origin in a comment.
    Yaml,
}

impl Form {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "table" => Ok(Self::Table),
            "json" => Ok(Self::Json),
            "yaml" => Ok(Self::Yaml),
            other => Err(format!("{other:?} is unknown: use table, json or yaml")),
        }
    }
}

pub(super) fn render(all: &[(String, Setting)], form: Form) -> String {
    match form {
        Form::Table => table(all),
        Form::Json => {
            let all: Map<_, _> = all.iter().map(|(key, setting)| (key.clone(), json(setting))).collect();
            format!("{:#}", Value::Object(all))
        }
        Form::Yaml => yaml(all),
    }
}

fn table(all: &[(String, Setting)]) -> String {
    let mut rows = vec![("SETTING".to_owned(), "VALUE".to_owned(), "FROM".to_owned())];
    for (key, setting) in all {
        flatten(key.clone(), setting, &mut rows);
    }
    let widest =
        |column: fn(&(String, String, String)) -> &String| rows.iter().map(|row| width(column(row))).max().unwrap_or(0);
    let (first, second) = (widest(|row| &row.0), widest(|row| &row.1));
    let row = |(key, value, from): &(String, String, String)| {
        format!("{}  {}  {from}\n", padded(key, first), padded(value, second))
    };
    rows.iter().map(row).collect()
}

fn flatten(path: String, setting: &Setting, rows: &mut Vec<(String, String, String)>) {
    match setting {
        Setting::Value(value, from) => rows.push((path, plain(value), from.clone())),
        Setting::Hidden(names, from) => rows.push((path, plain(&hidden(names)), from.clone())),
        Setting::Map(entries) | Setting::Made(entries) => {
            for (key, setting) in entries {
                flatten(format!("{path}.{key}"), setting, rows);
            }
        }
        Setting::List(items) => {
            for (at, setting) in items.iter().enumerate() {
                flatten(format!("{path}[{at}]"), setting, rows);
            }
        }
    }
}

/// Bare where that is clear to the eye.
fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) if !text.contains(char::is_control) => text.clone(),
        other @ (Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_)) => {
            other.to_string()
        }
    }
}

fn json(setting: &Setting) -> Value {
    match setting {
        Setting::Value(value, from) => json!({"value": value, "from": from}),
        Setting::Hidden(names, from) => json!({"value": hidden(names), "from": from}),
        Setting::Map(entries) | Setting::Made(entries) => {
            Value::Object(entries.iter().map(|(key, setting)| ((*key).to_owned(), json(setting))).collect())
        }
        Setting::List(items) => items.iter().map(json).collect(),
    }
}

fn hidden(names: &[String]) -> Value {
    Value::Object(names.iter().map(|name| (name.clone(), json!(HIDDEN))).collect())
}

fn hides(setting: &Setting) -> bool {
    match setting {
        Setting::Hidden(names, _) => !names.is_empty(),
        Setting::Value(..) => false,
        Setting::Map(entries) | Setting::Made(entries) => entries.iter().any(|(_, setting)| hides(setting)),
        Setting::List(items) => items.iter().any(hides),
    }
}

/// JSON is YAML, so every value is written as JSON; what is not set is left out.
///
/// A hidden value is left empty, which every reader of settings refuses: a placeholder would be passed on as the secret.
fn yaml(all: &[(String, Setting)]) -> String {
    let mut text = String::new();
    if all.iter().any(|(_, setting)| hides(setting)) {
        text += "# Values of env are hidden. This file is refused until they are filled in.\n";
    }
    for (key, setting) in all {
        match setting {
            Setting::Value(Value::Null, _) => {}
            Setting::Value(value, from) => line(&mut text, key, value, from),
            Setting::List(items) => {
                let written = || items.iter().filter(|item| matches!(item, Setting::Map(_)));
                if written().next().is_some() {
                    text += &format!("{key}:\n");
                }
                for item in written() {
                    yaml_item(&mut text, item);
                }
            }
            Setting::Map(_) | Setting::Made(_) | Setting::Hidden(..) => {}
        }
    }
    text
}

fn yaml_item(text: &mut String, item: &Setting) {
    let Setting::Map(entries) = item else { return };
    for (at, (key, setting)) in entries.iter().enumerate() {
        let indent = if at == 0 { "  - " } else { "    " };
        match setting {
            Setting::Value(value, from) => line(text, &format!("{indent}{key}"), value, from),
            Setting::Map(inner) => {
                text.push_str(&format!("{indent}{key}:\n"));
                for (key, setting) in inner {
                    match setting {
                        Setting::Value(value, from) => line(text, &format!("      {key}"), value, from),
                        Setting::Hidden(names, from) if names.is_empty() => {
                            line(text, &format!("      {key}"), &hidden(names), from);
                        }
                        Setting::Hidden(names, from) => {
                            text.push_str(&format!("      {key}:  # {from}\n"));
                            for name in names {
                                text.push_str(&format!("        {}:  # hidden: fill it in\n", json!(name)));
                            }
                        }
                        Setting::Map(_) | Setting::Made(_) | Setting::List(_) => {}
                    }
                }
            }
            Setting::List(_) | Setting::Made(_) | Setting::Hidden(..) => {}
        }
    }
}

fn line(text: &mut String, key: &str, value: &Value, from: &str) {
    text.push_str(&format!("{key}: {value}  # {from}\n"));
}
