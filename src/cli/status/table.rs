//! What an agent knows, as a table for people.

use crate::cli::look::{Column, Look, fitting, line, row, titles, width, wrapped};
use crate::probe::observed;
use crate::status::next::shown;
use crate::status::snapshot::{FenceNow, PlaceNow, ProbeNow, Snapshot, VolumesNow};

/// The names before what is known.
const NAME_COLUMNS: usize = 14;

/// A terminal of fewer columns has no room beside the names.
const NARROW: usize = 30;

pub(super) fn table(snapshot: &Snapshot, look: Look) -> String {
    let registration = &snapshot.registration;
    let mut lines = vec![
        ("driver", snapshot.driver.clone().unwrap_or_else(|| "not known yet".to_owned()), ""),
        (
            "registration",
            format!("{} for {}", words(&registration.phase), shown(registration.for_seconds)),
            registration.phase.as_str(),
        ),
    ];
    if let Some(trouble) = &registration.trouble {
        lines.push(("", trouble.clone(), "lost"));
    }
    if let Some(health) = &snapshot.health {
        lines.push((
            "health",
            format!("{} for {}", health.verdict, shown(health.for_seconds)),
            health.verdict.as_str(),
        ));
        if let (true, Some(reason)) = (health.verdict == "unhealthy", &health.cause_reason) {
            let probe = health.cause_probe.as_deref().filter(|probe| !probe.is_empty());
            lines.push(("", probe.map_or_else(|| reason.clone(), |probe| format!("{probe}: {reason}")), "lost"));
        }
    }
    if let Some(fence) = &snapshot.fence {
        lines.extend(fence_lines(fence));
    }
    if snapshot.bypass {
        let words =
            "after three crashes of this agent the kubelet calls the driver itself until the next start: no fence";
        lines.push(("bypass", words.to_owned(), "warning"));
    }
    if let Some(volumes) = &snapshot.volumes {
        lines.push(("volumes", volumes_in_words(volumes), ""));
    }
    lines.push(("next", snapshot.next.clone(), ""));
    let mut text = String::new();
    for (name, words, colour) in lines {
        // Below the name where there is no room beside it.
        let indent = if look.columns < NARROW { 2 } else { NAME_COLUMNS };
        if look.columns < NARROW && !name.is_empty() {
            line(&mut text, &look.cut(name));
        }
        for (number, part) in wrapped(&words, look.columns.saturating_sub(indent)).into_iter().enumerate() {
            let part = if colour.is_empty() { part } else { look.paint(&part, colour) };
            let beside = if number == 0 && look.columns >= NARROW { name } else { "" };
            line(&mut text, &format!("{beside:<indent$}{part}"));
        }
    }
    if !snapshot.probes.is_empty() {
        text.push('\n');
        probes(&mut text, &snapshot.probes, look);
    }
    if let Some(volumes) = snapshot.volumes.as_ref().filter(|volumes| !volumes.places.is_empty()) {
        text.push('\n');
        places(&mut text, &volumes.places, look);
    }
    text.trim_end().to_owned()
}

fn fence_lines(fence: &FenceNow) -> Vec<(&'static str, String, &'static str)> {
    let mut lines = Vec::new();
    match (&fence.reason, fence.for_seconds) {
        (Some(reason), Some(lasted)) if fence.up => {
            lines.push(("fence", format!("up for {}: new volumes are refused", shown(lasted)), "unhealthy"));
            lines.push(("", reason.clone(), "lost"));
        }
        _ => lines.push(("fence", "down".to_owned(), "healthy")),
    }
    if let Some(word) = &fence.r#override {
        let ends = shown(word.ends_in_seconds);
        lines.push(("override", format!("{} for another {ends}: {}", word.fence, word.reason), "warning"));
        let kept = if word.from_before { "; kept from before the restart" } else { "" };
        lines.push(("", format!("{}, {}{kept}", word.by, word.since), "lost"));
    }
    lines
}

fn volumes_in_words(volumes: &VolumesNow) -> String {
    match (volumes.in_use, &volumes.gap) {
        (count, None) => format!("{count} in use"),
        (count, Some(gap)) => format!("{count} known to be in use; there may be more: {gap}"),
    }
}

/// Most that are listed; the rest is in the JSON.
const MOST_PLACES: usize = 40;

fn places(text: &mut String, places: &[PlaceNow], look: Look) {
    line(text, &look.cut("VOLUMES"));
    for place in places.iter().take(MOST_PLACES) {
        let state = match place.presence.as_str() {
            "there" => place.kind.clone(),
            other => format!("{}, {other}", place.kind),
        };
        line(text, &look.cut(&format!("{} {state} at {}", place.volume, place.path)));
    }
    if let Some(more) = places.len().checked_sub(MOST_PLACES).filter(|more| *more > 0) {
        line(text, &look.cut(&format!("and {more} more: --output json")));
    }
}

fn probes(text: &mut String, probes: &[ProbeNow], look: Look) {
    let names = probes.iter().map(|probe| width(&probe.name)).max().unwrap_or(0).clamp(5, 24);
    let left = |title, width, dispensable| Column { title, width, right: false, dispensable };
    let right = |title, dispensable| Column { title, width: 6, right: true, dispensable };
    let mut columns = [
        left("PROBE", names, 0),
        left("TYPE", 11, 4),
        left("LAST", 7, 0),
        right("AGE", 1),
        left("STREAK", 9, 2),
        right("NEXT", 3),
    ];
    let shown_columns = fitting(&mut columns, look.columns);
    line(text, &look.cut(&titles(&columns, &shown_columns)));
    for probe in probes {
        let age = probe.age_seconds.map_or_else(|| "-".to_owned(), shown);
        let next = probe.next_in_seconds.map_or_else(|| "-".to_owned(), shown);
        let streak = match (probe.failures, probe.successes) {
            (0, 0) => "-".to_owned(),
            (0, good) => format!("{} good", if good > 9999 { ">9999".to_owned() } else { good.to_string() }),
            (bad, _) => format!("{bad}/{} bad", probe.failure_threshold),
        };
        let outcome = probe.outcome.as_deref().unwrap_or("-");
        let cells = [
            (probe.name.as_str(), None),
            (probe.r#type.as_str(), None),
            (outcome, Some(outcome)),
            (age.as_str(), None),
            (streak.as_str(), None),
            (next.as_str(), None),
        ];
        line(text, &row(look, &columns, &shown_columns, &cells));
        if let Some(reason) = &probe.reason {
            let message = probe.message.as_deref().filter(|message| !message.is_empty());
            let words = message.map_or_else(|| reason.clone(), |message| format!("{reason}: {message}"));
            let warns = if probe.on_failure == "warn" { " (only warns)" } else { "" };
            line(text, &look.cut(&format!("  {words}{warns}")));
        }
        for seen in observed::lines(&probe.observed) {
            line(text, &look.cut(&format!("  {seen}")));
        }
    }
}

fn words(phase: &str) -> &str {
    match phase {
        "waitingForDriver" => "waiting for the driver",
        "waitingForHealth" => "waiting for the first verdict",
        "waitingForKubelet" => "waiting for the kubelet",
        "standingBy" => "standing by",
        other => other,
    }
}
