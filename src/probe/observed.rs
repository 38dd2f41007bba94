//! What a probe saw, in figures: for people and machines, never for a verdict.

use crate::policy::outcome::Outcome;
use serde_json::{Map, Value, json};

/// By subject (`mlx5_0/1`, `nvme0`, `0000:18:00.0`): a map of plain values, or one plain value. Small: a handful of each.
///
/// A subject's `outcome`, `reason` and `message`, if it has some, are what the probe makes of it alone.
pub type Observed = Map<String, Value>;

/// Their order in a line; the rest follows by name.
const FIRST: [&str; 3] = ["outcome", "reason", "message"];

/// What a probe makes of one subject, to begin its map with.
pub fn judged(outcome: &Outcome) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("outcome".to_owned(), json!(outcome.name()));
    if let Some(reason) = outcome.reason() {
        map.insert("reason".to_owned(), json!(reason.code));
        if !reason.message.is_empty() {
            map.insert("message".to_owned(), json!(reason.message));
        }
    }
    map
}

/// A line for each subject: `mlx5_0/1  failure PortDown: state 1: DOWN  netdev eth2`. Without control characters.
pub fn lines(observed: &Observed) -> Vec<String> {
    observed.iter().map(|(subject, seen)| one_line(&format!("{subject}  {}", words(seen)))).collect()
}

fn words(seen: &Value) -> String {
    let Value::Object(map) = seen else { return plain(seen) };
    let of = |key: &str| map.get(key).map(plain).filter(|text| !text.is_empty());
    let judged = match (of("outcome"), of("reason"), of("message")) {
        (Some(outcome), Some(reason), Some(message)) => format!("{outcome} {reason}: {message}"),
        (outcome, reason, message) => [outcome, reason, message].into_iter().flatten().collect::<Vec<_>>().join(" "),
    };
    let rest = map.iter().filter(|(key, value)| !FIRST.contains(&key.as_str()) && !value.is_null());
    let rest = rest.map(|(key, value)| format!("{key}={}", quoted(&plain(value))));
    std::iter::once(judged).filter(|text| !text.is_empty()).chain(rest).collect::<Vec<_>>().join("  ")
}

fn quoted(text: &str) -> String {
    if text.is_empty() || text.contains([' ', '"']) { format!("{text:?}") } else { text.to_owned() }
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        other @ (Value::Bool(_) | Value::Number(_) | Value::Object(_)) => other.to_string(),
    }
}

fn one_line(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::outcome::{Reason, Severity};

    #[test]
    fn a_subject_is_a_line_that_begins_with_what_is_made_of_it() {
        let mut port = judged(&Outcome::Failure(Reason::new("PortDown", "is\ndown"), Severity::Hard));
        port.insert("state".into(), json!("1: DOWN"));
        port.insert("netdev".into(), json!("eth2"));
        port.insert("lid".into(), Value::Null);
        let observed =
            Observed::from_iter([("mlx5_0/1".to_owned(), Value::Object(port)), ("temperature".to_owned(), json!(41))]);
        assert_eq!(
            lines(&observed),
            ["mlx5_0/1  failure PortDown: is down  netdev=eth2  state=\"1: DOWN\"", "temperature  41"]
        );
        assert_eq!(judged(&Outcome::Success), Map::from_iter([("outcome".to_owned(), json!("success"))]));
    }
}
