//! Taints and tolerations: the API server refuses misspelt ones, and takes others that do not mean what they seem to.

use super::pod::{Pod, Word};
use super::report::{Check, Report};
use crate::config::yaml::{Node, echo};

/// All there are; case matters.
const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

/// The last two only behind a feature gate.
const OPERATORS: [&str; 4] = ["Exists", "Equal", "Lt", "Gt"];

/// Flags whose value ends in an effect.
const FLAGS: [&str; 2] = ["set-taint", "register-with-taints"];

/// Whether every effect is one of the three.
pub(super) fn effects(report: &mut Report, taints: &[&Node], tolerations: &[&Node], pods: &[Pod]) {
    for taint in taints {
        match taint.get("effect") {
            Some(effect) => of(report, effect.text().unwrap_or_default(), effect.line),
            None if taint.get("key").is_some() => {
                report.fail(Check::Effects, taint.line, "a taint without an effect", "effect: NoSchedule");
            }
            None => {}
        }
    }
    for toleration in tolerations {
        // None, or an empty one, tolerates each.
        if let Some(effect) = toleration.get("effect")
            && let Some(text) = effect.text().filter(|text| !text.is_empty())
        {
            of(report, text, effect.line);
        }
    }
    let words = |pod: &Pod| -> Vec<Word> {
        pod.containers.iter().flat_map(|container| FLAGS.iter().filter_map(|flag| container.flag(flag))).collect()
    };
    for word in pods.iter().flat_map(words) {
        for taint in word.text.split(',').filter(|_| !word.is_open()) {
            of(report, taint.rsplit_once(':').map_or("", |(_, effect)| effect), word.line);
        }
    }
}

fn of(report: &mut Report, effect: &str, line: usize) {
    report.looked(Check::Effects);
    if EFFECTS.contains(&effect) {
        return;
    }
    let bare = |text: &str| text.chars().filter(char::is_ascii_alphabetic).collect::<String>().to_ascii_lowercase();
    let meant = EFFECTS.iter().find(|known| bare(known) == bare(effect)).unwrap_or(&EFFECTS[0]);
    let seen = format!("{} is no effect, and the API server refuses it: case matters", echo(effect));
    report.fail(Check::Effects, line, &seen, &format!("effect: {meant}"));
}

/// Whether each toleration means what it seems to.
pub(super) fn tolerations(report: &mut Report, tolerations: &[&Node]) {
    for toleration in tolerations {
        report.looked(Check::Tolerations);
        let text = |key: &str| toleration.get(key).and_then(Node::text).unwrap_or_default();
        let (key, operator, value) = (text("key"), text("operator"), text("value"));
        let mut wrong = |seen: &str, fix: &str| report.fail(Check::Tolerations, toleration.line, seen, fix);
        if !operator.is_empty() && !OPERATORS.contains(&operator) {
            let seen = format!("{} is no operator, and the API server refuses it", echo(operator));
            wrong(&seen, "operator: Equal, or Exists for any value of the key");
            continue;
        }
        if operator == "Exists" && !value.is_empty() {
            let seen = format!("operator Exists with the value {}, which the API server refuses", echo(value));
            wrong(&seen, "operator: Equal");
        }
        if operator != "Exists" && key.is_empty() {
            wrong(
                "no key: only operator Exists may be without one",
                "operator: Exists tolerates everything; else name the key",
            );
        }
        if operator == "Exists" && key.ends_with(['*', '.', '/', '-']) {
            let seen =
                format!("operator Exists with {}: it does not match by prefix, it needs the whole key", echo(key));
            wrong(&seen, "write one toleration for each taint, with its whole key");
        }
    }
}
