//! What a round said, in words: the health file's line, the table, JSON, and the lines of `--watch`.

use super::rounds::{Asked, Asking};
use crate::cli::look::{Column, Look, fitting, line, row, titles, width, wrapped};
use crate::policy::outcome::{Health, Outcome, Reason};
use crate::probe::health_file::UNKNOWN;
use crate::probe::observed::{self, Observed};
use serde::Serialize;
use std::time::{Duration, SystemTime};
use time::OffsetDateTime;

/// A reason that has less room than this beside the outcome stands below.
const MIN_REASON_COLUMNS: usize = 20;

/// One probe's outcome as the health file has it.
pub(super) fn outcome_line(outcome: &Outcome) -> String {
    one_line(&match outcome {
        Outcome::Success => "OK".to_owned(),
        Outcome::Warning(reason) => format!("OK warning: {reason}"),
        Outcome::Failure(reason, _) if reason.message.is_empty() => "ERROR".to_owned(),
        Outcome::Failure(reason, _) => format!("ERROR {}", reason.message),
        Outcome::Unknown(reason) => format!("{UNKNOWN} {reason}"),
    })
}

/// The last round of all probes as the health file has it.
pub(super) fn round_line(asking: &Asking) -> String {
    if let [only] = asking.probes.as_slice()
        && !only.only_warns()
        && let Some(outcome) = only.outcome()
    {
        return outcome_line(outcome);
    }
    let speaker = asking.speaker();
    let reason = speaker.and_then(Asked::outcome).and_then(Outcome::reason);
    let words = match (speaker, reason) {
        (Some(speaker), Some(reason)) => Some((speaker.settings.name.as_str(), reason)),
        _ => None,
    };
    one_line(&match (asking.round_health(), words) {
        (Health::Healthy, None) => "OK".to_owned(),
        (Health::Healthy, Some((name, reason))) => format!("OK warning: {name}: {reason}"),
        (Health::Unhealthy, Some((name, reason))) => format!("ERROR {name}: {}", short(reason)),
        (Health::Unhealthy, None) => "ERROR".to_owned(),
        (Health::Unknown, Some((name, reason))) => format!("{UNKNOWN} {name}: {reason}"),
        (Health::Unknown, None) => UNKNOWN.to_owned(),
    })
}

fn short(reason: &Reason) -> &str {
    if reason.message.is_empty() { reason.code } else { &reason.message }
}

/// `--output json`, in this order.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Said<'a> {
    health: &'static str,
    probes: Vec<ProbeSaid<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ProbeSaid<'a> {
    name: &'a str,
    r#type: &'static str,
    outcome: &'static str,
    reason: Option<&'static str>,
    message: Option<&'a str>,
    duration_ms: u64,
    /// By device and port; empty for a probe that sees no devices.
    observed: Observed,
}

/// The last round, for machines.
pub(super) fn said(asking: &Asking, health: Health) -> Said<'_> {
    let probes = asking.probes.iter().map(|probe| {
        let reason = probe.outcome().and_then(Outcome::reason);
        ProbeSaid {
            name: &probe.settings.name,
            r#type: probe.settings.kind.name(),
            outcome: probe.outcome().map_or("unknown", Outcome::name),
            reason: reason.map(|reason| reason.code),
            message: reason.map(|reason| reason.message.as_str()),
            duration_ms: probe.word.as_ref().map_or(0, |word| milliseconds(word.took)),
            observed: seen(probe).cloned().unwrap_or_default(),
        }
    });
    Said { health: health.name(), probes: probes.collect() }
}

fn seen(probe: &Asked) -> Option<&Observed> {
    probe.word.as_ref()?.observed.as_deref()
}

fn milliseconds(took: Duration) -> u64 {
    u64::try_from(took.as_millis()).unwrap_or(u64::MAX)
}

/// The verdict, and a row for each probe; no line is longer than the terminal.
pub(super) fn table(asking: &Asking, health: Health, look: Look) -> String {
    let mut text = String::new();
    line(&mut text, &format!("health  {}", look.paint(health.name(), health.name())));
    text.push('\n');
    let names = asking.probes.iter().map(|probe| width(&probe.settings.name)).max().unwrap_or(0).clamp(5, 24);
    let mut columns = [
        Column { title: "PROBE", width: names, right: false, dispensable: 0 },
        Column { title: "TYPE", width: 11, right: false, dispensable: 2 },
        Column { title: "OUTCOME", width: 7, right: false, dispensable: 0 },
        Column { title: "MS", width: 6, right: true, dispensable: 1 },
    ];
    let shown = fitting(&mut columns, look.columns);
    let titles = titles(&columns, &shown);
    let room = look.columns.saturating_sub(width(&titles) + 2);
    let beside = room >= MIN_REASON_COLUMNS;
    line(&mut text, &look.cut(&if beside { format!("{titles}  REASON") } else { titles }));
    for probe in &asking.probes {
        let outcome = probe.outcome().map_or("unknown", Outcome::name);
        let took = probe.word.as_ref().map_or_else(|| "-".to_owned(), |word| milliseconds(word.took).to_string());
        let reason = one_line(&reason(probe));
        let cells = [
            (probe.settings.name.as_str(), None),
            (probe.settings.kind.name(), None),
            (outcome, Some(outcome)),
            (took.as_str(), None),
        ];
        let row = row(look, &columns, &shown, &cells);
        if beside && width(&reason) <= room {
            line(&mut text, &format!("{row}  {reason}"));
            continue;
        }
        line(&mut text, &row);
        for part in wrapped(&reason, look.columns.saturating_sub(2)).iter().filter(|part| !part.is_empty()) {
            line(&mut text, &format!("  {part}"));
        }
        for subject in seen(probe).map(observed::lines).unwrap_or_default() {
            for (number, part) in wrapped(&subject, look.columns.saturating_sub(6)).into_iter().enumerate() {
                let indent = if number == 0 { "  " } else { "      " };
                line(&mut text, &look.cut(&format!("{indent}{part}")));
            }
        }
    }
    text.trim_end().to_owned()
}

fn reason(probe: &Asked) -> String {
    let reason = probe.outcome().and_then(Outcome::reason).map(ToString::to_string).unwrap_or_default();
    match (reason.is_empty(), probe.only_warns()) {
        (false, true) => format!("{reason} (only warns)"),
        _ => reason,
    }
}

/// `fabric failure ExecFailed: port 1 down`
pub(super) fn probe_words(probe: &Asked) -> String {
    let outcome = probe.outcome().map_or("unknown", Outcome::name);
    one_line(format!("{} {outcome} {}", probe.settings.name, reason(probe)).trim_end())
}

/// Tells one word from another; ages, which grow with every round, are no change.
pub(super) fn gist(probe: &Asked) -> String {
    let reason = probe.outcome().and_then(Outcome::reason);
    match reason.map(|reason| reason.code) {
        Some(code @ ("HealthFileStale" | "HealthFileDead")) => code.to_owned(),
        Some(_) | None => probe_words(probe),
    }
}

/// What is still to come until all is healthy.
pub(super) fn waits_for(asking: &Asking) -> String {
    let missing = asking.missing();
    let words = missing.iter().map(|probe| {
        let name = &probe.settings.name;
        match probe.outcome() {
            None => format!("{name}: no round has ended yet"),
            Some(Outcome::Success | Outcome::Warning(_)) => {
                let (so_far, needed) = probe.successes();
                format!("{name}: {so_far} of {needed} successes in a row")
            }
            Some(Outcome::Failure(reason, _) | Outcome::Unknown(reason)) => format!("{name}: {reason}"),
        }
    });
    one_line(&words.collect::<Vec<_>>().join("; "))
}

/// RFC 3339, in seconds.
pub(super) fn utc(now: SystemTime) -> String {
    let now = OffsetDateTime::from(now);
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z",
        now.year(),
        u8::from(now.month()),
        now.day(),
        now.hour(),
        now.minute(),
        now.second()
    )
}

/// A driver's own words may have anything in them.
fn one_line(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::probe::rounds::{Counting, Word};
    use crate::config::probes::{OnFailure, ProbeKind, ProbeSettings};
    use crate::config::watched::Watched;
    use crate::policy::outcome::Severity;
    use crate::policy::probe_verdict::Thresholds;
    use serde_json::{Value, json};
    use std::num::NonZeroU32;
    use std::time::UNIX_EPOCH;

    fn failure(message: &str) -> Outcome {
        Outcome::Failure(Reason::new("ExecFailed", message), Severity::Hard)
    }

    fn asking(said: &[(&str, Outcome)]) -> Asking {
        let probes = said
            .iter()
            .map(|(name, _)| ProbeSettings {
                name: (*name).to_owned(),
                kind: ProbeKind::Csi { socket: "/csi/csi.sock".into() },
                period: Duration::from_secs(10),
                timeout: Duration::from_secs(3),
                confirm_interval: Duration::from_secs(1),
                thresholds: Thresholds { failure: NonZeroU32::MIN, success: NonZeroU32::MIN },
                on_failure: if name.starts_with("warn") { OnFailure::Warn } else { OnFailure::Fail },
            })
            .collect();
        let watched = Watched { probes, groups: vec![], warnings: vec![] };
        let mut asking = Asking::new(watched, Counting::LastRound);
        for (probe, (_, outcome)) in asking.probes.iter_mut().zip(said) {
            probe.word = Some(Word { outcome: outcome.clone(), took: Duration::from_millis(12), observed: None });
        }
        asking
    }

    #[test]
    fn outcomes_are_written_in_the_readers_words() {
        let reason = || Reason::new("ExecFailed", "port 1 down");
        assert_eq!(outcome_line(&Outcome::Success), "OK");
        assert_eq!(outcome_line(&failure("port 1 down")), "ERROR port 1 down");
        assert_eq!(outcome_line(&Outcome::Unknown(reason())), "UNKNOWN ExecFailed: port 1 down");
        assert_eq!(outcome_line(&failure("a\nOK")), "ERROR a OK", "one line, whatever the driver says");
    }

    #[test]
    fn several_probes_are_written_as_one_word_with_the_name_of_who_says_it() {
        let unknown = || Outcome::Unknown(Reason::new("NotAnswering", "silence"));
        for (said, words) in [
            (vec![("a", Outcome::Success), ("b", Outcome::Success)], "OK"),
            (vec![("a", Outcome::Success), ("b", failure("cut"))], "ERROR b: cut"),
            (vec![("a", unknown()), ("b", failure(""))], "ERROR b: ExecFailed"),
            (vec![("a", Outcome::Success), ("b", unknown())], "UNKNOWN b: NotAnswering: silence"),
            (vec![("a", Outcome::Success), ("warn", failure("cut"))], "OK"),
            (vec![("warn", failure("cut"))], "OK"),
            (
                vec![("a", Outcome::Success), ("b", Outcome::Warning(Reason::new("DriverError", "odd")))],
                "OK warning: b: DriverError: odd",
            ),
        ] {
            assert_eq!(round_line(&asking(&said)), words, "{said:?}");
        }
    }

    #[test]
    fn the_table_fits_80_columns_and_loses_no_word() {
        let long = "mlx5_0 port 1 is DOWN ".repeat(8);
        let asking = asking(&[
            ("a", Outcome::Success),
            ("warns", failure("cut")),
            ("a-name-of-more-than-24-characters", failure(long.trim())),
        ]);
        let shown = table(&asking, Health::Unhealthy, Look { terminal: false, colours: false, columns: 80 });
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
        assert_eq!(shown.matches("DOWN").count(), 8, "{shown}");
        assert!(shown.starts_with("health  unhealthy\n\nPROBE") && !shown.contains('\x1b'), "{shown}");
        assert!(shown.contains("ExecFailed: cut") && shown.contains("(only warns)"), "{shown}");
        assert!(shown.contains("csi          success      12\n"), "{shown}");
        assert!(
            table(&asking, Health::Healthy, Look { terminal: true, colours: true, columns: 80 }).contains("\x1b[31m")
        );
    }

    #[test]
    fn no_line_of_the_table_is_wider_than_the_terminal() {
        let asking = asking(&[
            ("a-name-of-more-than-24-characters", failure(&"網路斷了".repeat(20))),
            ("b", failure(&"/sys/class/infiniband".repeat(9))),
            ("c", Outcome::Success),
        ]);
        for columns in 17..130 {
            let shown = table(&asking, Health::Unhealthy, Look { terminal: true, colours: false, columns });
            let widest = shown.lines().map(width).max().unwrap();
            assert!(widest <= columns, "{columns}:\n{shown}");
            assert_eq!(shown.matches('斷').count(), 20, "{columns}:\n{shown}");
        }
        let shown = table(&asking, Health::Unhealthy, Look { terminal: false, colours: false, columns: 80 });
        assert!(shown.contains("a-name-of-more-than-24-…  csi          failure      12"), "{shown}");
    }

    #[test]
    fn json_has_the_settled_shape() {
        let asking = asking(&[("a", Outcome::Success), ("b", failure("cut"))]);
        let expected = json!({"health": "unhealthy", "probes": [
            {"name": "a", "type": "csi", "outcome": "success", "reason": null, "message": null, "durationMs": 12, "observed": {}},
            {"name": "b", "type": "csi", "outcome": "failure", "reason": "ExecFailed", "message": "cut", "durationMs": 12, "observed": {}},
        ]});
        let said = serde_json::to_string(&said(&asking, asking.round_health())).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&said).unwrap(), expected);
        assert!(said.starts_with(r#"{"health":"unhealthy","probes":[{"name":"a","type":"csi","outcome":"#), "{said}");
    }

    #[test]
    fn times_are_utc() {
        assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(951_782_400)), "2000-02-29T00:00:00Z");
    }
}
