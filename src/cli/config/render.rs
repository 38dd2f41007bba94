//! Settings in force as a table, JSON, or a settings file.

use super::in_force::Setting;
use serde_json::{Map, Value, json};

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
    let width = |column: fn(&(String, String, String)) -> &String| {
        rows.iter().map(|row| column(row).chars().count()).max().unwrap_or(0)
    };
    let (first, second) = (width(|row| &row.0), width(|row| &row.1));
    rows.iter().map(|(key, value, from)| format!("{key:first$}  {value:second$}  {from}\n")).collect()
}

fn flatten(path: String, setting: &Setting, rows: &mut Vec<(String, String, String)>) {
    match setting {
        Setting::Value(value, from) => rows.push((path, plain(value), from.clone())),
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
        Setting::Map(entries) | Setting::Made(entries) => {
            Value::Object(entries.iter().map(|(key, setting)| ((*key).to_owned(), json(setting))).collect())
        }
        Setting::List(items) => items.iter().map(json).collect(),
    }
}

/// JSON is YAML, so every value is written as JSON; what is not set is left out.
fn yaml(all: &[(String, Setting)]) -> String {
    let mut text = String::new();
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
            Setting::Map(_) | Setting::Made(_) => {}
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
                    if let Setting::Value(value, from) = setting {
                        line(text, &format!("      {key}"), value, from);
                    }
                }
            }
            Setting::List(_) | Setting::Made(_) => {}
        }
    }
}

fn line(text: &mut String, key: &str, value: &Value, from: &str) {
    text.push_str(&format!("{key}: {value}  # {from}\n"));
}
