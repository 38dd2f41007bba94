//! One map of a settings file, taken key by key; what is left over is unknown.

use super::file::Problem;
use super::go_duration::GoDuration;
use super::yaml::{Entry, Node, Value, echo};
use std::num::NonZeroU32;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

/// How much of a key an error repeats.
const MAX_KEY_CHARS: usize = 64;

/// A value and its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written<T> {
    /// What is set.
    pub value: T,
    /// Where, from 1.
    pub line: usize,
}

/// The keys of one map.
pub(super) struct Fields<'file, 'problems> {
    file: &'file Path,
    /// `probes[1]`
    path: String,
    line: usize,
    known: Vec<&'file str>,
    left: Vec<&'file Entry>,
    problems: &'problems mut Vec<Problem>,
}

impl<'file, 'problems> Fields<'file, 'problems> {
    /// The map in `node`; anything else is a problem, and has no keys.
    pub(super) fn new(
        file: &'file Path,
        path: String,
        node: &'file Node,
        known: Vec<&'file str>,
        problems: &'problems mut Vec<Problem>,
    ) -> Self {
        let mut fields = Self { file, path, line: node.line, known, left: Vec::new(), problems };
        match &node.value {
            Value::Map(entries) => fields.left = entries.iter().collect(),
            other @ (Value::Nothing | Value::Text(_) | Value::List(_)) => {
                let message = format!("must be a map with the keys {}, not {}", fields.known.join(", "), other.kind());
                fields.wrong(node.line, "", message);
            }
        }
        fields
    }

    /// What `key` is set to, if it is.
    pub(super) fn take(&mut self, key: &str) -> Option<&'file Node> {
        debug_assert!(self.known.contains(&key), "{key} is not among the known keys");
        self.take_unknown(key)
    }

    /// As [`Self::take`], for a key with a message of its own.
    pub(super) fn take_unknown(&mut self, key: &str) -> Option<&'file Node> {
        let at = self.left.iter().position(|entry| entry.key == key)?;
        Some(&self.left.remove(at).node)
    }

    /// What `key`, which must be there, is set to.
    pub(super) fn need(&mut self, key: &str, hint: &str) -> Option<&'file Node> {
        let node = self.take(key);
        if node.is_none() {
            self.wrong(self.line, key, format!("is missing: {hint}"));
        }
        node
    }

    /// One value.
    pub(super) fn text(&mut self, key: &str, node: &'file Node) -> Option<&'file str> {
        let message = match &node.value {
            Value::Text(text) => return Some(text),
            Value::Nothing => "has no value: give one, or leave the key out".to_owned(),
            other @ (Value::List(_) | Value::Map(_)) => format!("must be a single value, not {}", other.kind()),
        };
        self.wrong(node.line, key, message);
        None
    }

    /// One value as `T`; `None` if it is not set, or cannot be.
    pub(super) fn parsed<T>(&mut self, key: &str, parse: impl Fn(&str) -> Result<T, String>) -> Option<Written<T>> {
        let node = self.take(key)?;
        let text = self.text(key, node)?;
        match parse(text) {
            Ok(value) => Some(Written { value, line: node.line }),
            Err(message) => {
                self.wrong(node.line, key, message);
                None
            }
        }
    }

    /// A list of single values, and the line of each.
    pub(super) fn texts(&mut self, key: &str, node: &'file Node) -> Vec<Written<&'file str>> {
        let Value::List(items) = &node.value else {
            self.wrong(node.line, key, format!("must be a list such as [a, b], not {}", node.value.kind()));
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (at, item) in items.iter().enumerate() {
            if let Some(value) = self.text(&format!("{key}[{at}]"), item) {
                texts.push(Written { value, line: item.line });
            }
        }
        texts
    }

    /// Notes a problem of `key`, or of the map itself if that is empty.
    pub(super) fn wrong(&mut self, line: usize, key: &str, message: String) {
        // Keys of an environment are anybody's words.
        let key: String = key.chars().take(MAX_KEY_CHARS).filter(|char| !char.is_control()).collect();
        let field = match (self.path.as_str(), key.as_str()) {
            ("", key) => key.to_owned(),
            (path, "") => path.to_owned(),
            (path, key) => format!("{path}.{key}"),
        };
        self.problems.push(Problem { path: self.file.to_owned(), line, field, message });
    }

    /// `probes[1].exec`, for the map within this one.
    pub(super) fn within(&self, key: &str) -> String {
        format!("{}.{key}", self.path)
    }

    /// The file, for the map within this one.
    pub(super) fn file(&self) -> &'file Path {
        self.file
    }

    /// Where problems of maps within this one go.
    pub(super) fn problems(&mut self) -> &mut Vec<Problem> {
        self.problems
    }

    /// Whatever was not taken is unknown.
    pub(super) fn finish(mut self) {
        for entry in std::mem::take(&mut self.left) {
            let advice = match nearest(&entry.key, &self.known) {
                Some(meant) => format!("did you mean {meant}?"),
                None if self.known.len() <= 16 => format!("known here: {}", self.known.join(", ")),
                None => "known are probes, groups and the flags of `csi-warden run` in camelCase".to_owned(),
            };
            self.wrong(entry.line, &entry.key, format!("unknown key; {advice}"));
        }
    }
}

/// The known key that differs in dashes, case or two letters only.
fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    let bare = |text: &str| text.replace(['-', '_'], "").to_ascii_lowercase();
    let key = bare(&key.chars().take(64).collect::<String>());
    let (distance, best) =
        known.iter().map(|name| (distance(&key, &bare(name)), *name)).min_by_key(|(distance, _)| *distance)?;
    (distance <= 2 && distance * 2 <= best.len()).then_some(best)
}

/// Letters to change, add or drop.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (at, letter) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in to.iter().enumerate() {
            let kept = diagonal + usize::from(letter != *other);
            diagonal = row[column + 1];
            row[column + 1] = kept.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

/// A duration; zero is allowed.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    GoDuration::from_str(text).map(|duration| duration.0).map_err(|error| error.to_string())
}

/// A duration that is at least a millisecond.
pub(super) fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("must be above zero".to_owned()),
        short if short < Duration::from_millis(1) => Err(format!("{} is too short: at least 1ms", echo(text))),
        long => Ok(long),
    }
}

/// How many in a row.
pub(super) fn threshold(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| format!("{} is no threshold: use a whole number above zero", echo(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_miss_is_recognised_and_a_far_one_is_not() {
        let known = ["name", "timeout", "failureThreshold", "env"];
        for (typed, meant) in [
            ("timeOut", Some("timeout")),
            ("tiemout", Some("timeout")),
            ("failure-threshold", Some("failureThreshold")),
            ("failureTreshold", Some("failureThreshold")),
            ("nmae", Some("name")),
            ("env1", Some("env")),
            ("socket", None),
            ("", None),
        ] {
            assert_eq!(nearest(typed, &known), meant, "{typed}");
        }
    }
}
