//! `kmsg:` in a settings file.

use super::fields::{Fields, Written, positive_duration};
use super::levels::boolean;
use super::probes::{HostTree, KmsgSettings};
use super::yaml::{Node, Value, echo};
use crate::policy::kernel_log::{Class, LogRule, Since};
use crate::policy::kernel_log_rules::{HOLDS, built_in};
use crate::policy::line_pattern::LinePattern;
use std::time::Duration;

/// The keys under `kmsg`.
pub const KEYS: &[&str] = &["since", "builtIn", "rules"];

/// The keys of a rule.
pub const RULE_KEYS: [&str; 5] = ["name", "match", "class", "for", "until"];

/// As long as a name in Kubernetes.
const MAX_NAME_BYTES: usize = 63;

/// What the file says; what is not there has its default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrittenKmsg {
    /// Unless now.
    pub since: Option<Written<Since>>,
    /// Unless true.
    pub built_in: Option<Written<bool>>,
    /// The file's own, before the built-in ones.
    pub rules: Option<Written<Vec<WrittenRule>>>,
}

/// A rule of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenRule {
    /// If a built-in rule has it, this one is in its place.
    pub name: String,
    /// Unless the built-in rule's.
    pub pattern: Option<LinePattern>,
    /// Always there.
    pub class: Class,
    /// Unless the default; `Some(None)` is until the recovery.
    pub holds: Option<Option<Duration>>,
    /// What ends it.
    pub until: Option<LinePattern>,
}

impl WrittenKmsg {
    pub(super) fn read(own: &mut Fields<'_, '_>) -> Self {
        let built_in = own.parsed("builtIn", boolean);
        let with_built_in = built_in.as_ref().is_none_or(|set| set.value);
        let rules = own.take("rules").map(|node| rules(own, node, with_built_in));
        if !with_built_in
            && rules.is_none()
            && let Some(built_in) = &built_in
        {
            let message = "leaves no rule: write some under rules, or remove this line".to_owned();
            own.wrong(built_in.line, "builtIn", message);
        }
        Self { since: own.parsed("since", since), built_in, rules }
    }

    /// With the defaults filled in.
    pub fn settings(&self, host: &HostTree) -> KmsgSettings {
        let with_built_in = self.built_in.as_ref().is_none_or(|set| set.value);
        let written = self.rules.as_ref().map(|rules| rules.value.as_slice()).unwrap_or_default();
        KmsgSettings {
            host: host.clone(),
            since: self.since.as_ref().map_or(Since::Now, |set| set.value),
            rules: merged(written, if with_built_in { built_in() } else { Vec::new() }),
        }
    }
}

/// `now` or `boot`.
pub(super) fn since(text: &str) -> Result<Since, String> {
    match text {
        "now" => Ok(Since::Now),
        "boot" => Ok(Since::Boot),
        other => Err(format!("{} is unknown: use now or boot", echo(other))),
    }
}

/// The file's rules in their order, each with all built-in ones that it replaces, then what is left of the built-in ones.
fn merged(written: &[WrittenRule], mut built_in: Vec<LogRule>) -> Vec<LogRule> {
    let mut rules = Vec::new();
    for rule in written {
        let (replaced, kept): (Vec<_>, Vec<_>) = built_in.into_iter().partition(|known| known.name == rule.name);
        built_in = kept;
        match &rule.pattern {
            Some(pattern) => rules.push(LogRule {
                name: rule.name.clone(),
                pattern: pattern.clone(),
                class: rule.class,
                holds: rule.holds.unwrap_or(Some(HOLDS)),
                until: rule.until.clone(),
            }),
            None => rules.extend(replaced.into_iter().map(|known| LogRule {
                class: rule.class,
                holds: rule.holds.unwrap_or(known.holds),
                until: rule.until.clone().or(known.until),
                ..known
            })),
        }
    }
    rules.extend(built_in);
    rules
}

fn rules<'file>(own: &mut Fields<'file, '_>, node: &'file Node, with_built_in: bool) -> Written<Vec<WrittenRule>> {
    let mut rules: Vec<WrittenRule> = Vec::new();
    let items = match &node.value {
        Value::List(items) if !items.is_empty() => items.as_slice(),
        Value::List(_) | Value::Nothing => {
            own.wrong(node.line, "rules", "is empty: list some, or leave the key out".to_owned());
            &[]
        }
        other @ (Value::Text(_) | Value::Map(_)) => {
            own.wrong(node.line, "rules", format!("must be a list, each item after a dash, not {}", other.kind()));
            &[]
        }
    };
    for (at, item) in items.iter().enumerate() {
        let (file, within) = (own.file(), own.within(&format!("rules[{at}]")));
        let mut fields = Fields::new(file, within, item, RULE_KEYS.to_vec(), own.problems());
        if !matches!(item.value, Value::Map(_)) {
            continue;
        }
        let name = fields.need("name", "give the rule a name of its own, or that of a built-in one");
        let name = name.and_then(|node| Some((fields.text("name", node)?, node.line)));
        let name = name.and_then(|(name, line)| {
            let fits = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-');
            let problem = if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(fits) {
                format!("{} is no name: use 1 to {MAX_NAME_BYTES} of a-z, 0-9, . and -", echo(name))
            } else if rules.iter().any(|other| other.name == name) {
                format!("another rule is named {name:?}: give each its own name")
            } else {
                return Some(name.to_owned());
            };
            fields.wrong(line, "name", problem);
            None
        });
        let is_built_in = |name: &String| with_built_in && built_in().iter().any(|known| known.name == *name);
        let pattern = fields.parsed("match", pattern);
        if pattern.is_none()
            && let Some(name) = &name
            && !is_built_in(name)
            && !matches!(&item.value, Value::Map(entries) if entries.iter().any(|entry| entry.key == "match"))
        {
            let message = format!("is missing: write the text of the line, as no built-in rule is named {name:?}");
            fields.wrong(item.line, "match", message);
        }
        let class = fields.need("class", "say what such a line means: fatal, warn or ignore");
        let class = class.and_then(|node| {
            let class = match fields.text("class", node)? {
                "fatal" => Class::Fatal,
                "warn" => Class::Warn,
                "ignore" => Class::Ignore,
                other => {
                    fields.wrong(node.line, "class", format!("{} is unknown: use fatal, warn or ignore", echo(other)));
                    return None;
                }
            };
            Some(class)
        });
        let holds = fields.parsed("for", |text| match text {
            "recovery" => Ok(None),
            time => positive_duration(time).map(Some).map_err(|message| format!("{message}; or recovery")),
        });
        let until = fields.parsed("until", self::pattern);
        if let (Some(Written { value: None, line }), None, Some(_)) = (&holds, &until, &pattern) {
            fields.wrong(*line, "for", "recovery needs until, the line that tells of it".to_owned());
        }
        fields.finish();
        if let (Some(name), Some(class)) = (name, class) {
            rules.push(WrittenRule {
                name,
                pattern: pattern.map(|set| set.value),
                class,
                holds: holds.map(|set| set.value),
                until: until.map(|set| set.value),
            });
        }
    }
    Written { value: rules, line: node.line }
}

fn pattern(text: &str) -> Result<LinePattern, String> {
    LinePattern::new(text).map_err(|error| format!("{} {}", echo(text), error.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(name: &str, pattern: Option<&str>, class: Class) -> WrittenRule {
        let pattern = pattern.map(|pattern| LinePattern::new(pattern).unwrap());
        WrittenRule { name: name.into(), pattern, class, holds: None, until: None }
    }

    #[test]
    fn a_rule_of_the_file_comes_first_and_replaces_its_namesakes() {
        let rules =
            merged(&[rule("own", Some("x"), Class::Fatal), rule("efa-admin-timeout", None, Class::Warn)], built_in());
        let names: Vec<_> = rules.iter().take(3).map(|rule| rule.name.as_str()).collect();
        assert_eq!(names, ["own", "efa-admin-timeout", "efa-admin-timeout"]);
        assert!(rules[1..3].iter().all(|rule| rule.class == Class::Warn));
        assert_eq!(rules.len(), built_in().len() + 1);
        let replaced = merged(&[rule("soft-lockup", Some("hung"), Class::Fatal)], built_in());
        assert_eq!((replaced.len(), replaced[0].pattern.as_str()), (built_in().len(), "hung"));
    }
}
