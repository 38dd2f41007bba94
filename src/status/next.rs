//! What happens next, in a sentence.

use super::snapshot::{HealthNow, ProbeNow, Snapshot};
use crate::config::go_duration::GoDuration;
use std::time::Duration;

/// The sentence for a snapshot.
pub fn words(snapshot: &Snapshot) -> String {
    match snapshot.registration.phase.as_str() {
        "waitingForDriver" => {
            "the driver is asked again until it answers; then it is registered, if it is healthy".to_owned()
        }
        "waitingForHealth" => match undecided(snapshot) {
            Some(probe) => {
                format!(
                    "{} failed, so nothing is shown to the kubelet until that is decided; {}",
                    probe.name,
                    next_look(probe)
                )
            }
            None => {
                "registered with the first good word, or after the start grace if nothing is known by then".to_owned()
            }
        },
        "withdrawn" => recovery(snapshot),
        "showing" => "the registration socket is shown as soon as the driver answers".to_owned(),
        "lost" => "showing the socket is tried again, with growing pauses".to_owned(),
        "waitingForKubelet" => {
            "the kubelet registers the driver as soon as it looks; else the socket is shown again".to_owned()
        }
        "refused" => "the kubelet tries again by itself, at most 2m2s after its last try".to_owned(),
        "standingBy" => "we take over when the other agent stops answering".to_owned(),
        _ => healthy(snapshot),
    }
}

fn healthy(snapshot: &Snapshot) -> String {
    if let Some(word) = snapshot.fence.as_ref().and_then(|fence| fence.r#override.as_ref()) {
        return format!("an operator decides: the override ends in {}, then health does", shown(word.ends_in_seconds));
    }
    let Some(health) = &snapshot.health else { return "nothing: no health source is configured".to_owned() };
    let consequence = match health.on_unhealthy.as_str() {
        "observe" => "is only logged",
        "fence" => "refuses new volumes",
        "fence-then-deregister" => "refuses new volumes, and withdraws the driver once those in use are out",
        _ => "withdraws the driver",
    };
    if health.verdict == "unhealthy" {
        return unhealthy(snapshot, health);
    }
    match undecided(snapshot) {
        Some(probe) => {
            let missing = probe.failure_threshold.saturating_sub(probe.failures);
            format!(
                "{} more failure{} of {} in a row {consequence}; {}",
                missing,
                plural(missing),
                probe.name,
                next_look(probe)
            )
        }
        None => format!("nothing while the probes pass; an unhealthy verdict {consequence}"),
    }
}

/// Unhealthy, and still registered.
fn unhealthy(snapshot: &Snapshot, health: &HealthNow) -> String {
    match health.on_unhealthy.as_str() {
        "observe" => format!("nothing, although it is unhealthy: --on-unhealthy=observe ({})", cause(health)),
        "fence" => "new volumes are let in again with the recovery; the driver stays registered".to_owned(),
        "fence-then-deregister" => match &snapshot.volumes {
            Some(volumes) if volumes.in_use > 0 => format!(
                "the driver is withdrawn once {} out, and shown again with the recovery",
                if volumes.in_use == 1 { "its volume is".to_owned() } else { format!("its {} volumes are", volumes.in_use) }
            ),
            Some(volumes) if !volumes.complete => {
                "the driver stays registered, as volumes may be in use that are not known; new ones are let in again with the recovery"
                    .to_owned()
            }
            Some(_) | None => "the driver is withdrawn soon, and shown again with the recovery".to_owned(),
        },
        _ => "the driver is about to be withdrawn".to_owned(),
    }
}

fn recovery(snapshot: &Snapshot) -> String {
    let Some(health) = &snapshot.health else { return "registered again when wanted".to_owned() };
    if let Some(wait) = health.recovery_in_seconds {
        return format!("registered again in {} if all stays well", shown(wait));
    }
    let bad = snapshot.probes.iter().find(|probe| probe.on_failure == "fail" && probe.verdict != "healthy");
    match bad {
        Some(probe) => {
            let missing = probe.success_threshold.saturating_sub(probe.successes).max(1);
            format!(
                "registered again after {missing} more success{} of {} in a row, and the hold; {}",
                if missing == 1 { "" } else { "es" },
                probe.name,
                next_look(probe)
            )
        }
        None => "registered again once every probe's last word is good and the hold is over".to_owned(),
    }
}

fn cause(health: &HealthNow) -> String {
    match (&health.cause_probe, &health.cause_reason) {
        (Some(probe), Some(reason)) if !probe.is_empty() => format!("{probe}: {reason}"),
        (_, Some(reason)) => reason.clone(),
        (_, None) => "no reason is known".to_owned(),
    }
}

/// A probe whose last word is a failure that is not decided yet.
fn undecided(snapshot: &Snapshot) -> Option<&ProbeNow> {
    let counts = |probe: &&ProbeNow| probe.on_failure == "fail" && probe.verdict != "unhealthy" && probe.failures > 0;
    snapshot.probes.iter().find(counts)
}

fn next_look(probe: &ProbeNow) -> String {
    match probe.next_in_seconds {
        Some(wait) => format!("next look in {}", shown(wait)),
        None => "it is being looked at".to_owned(),
    }
}

fn plural(count: u32) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Whole seconds from a second on; a person reads it.
pub fn shown(seconds: f64) -> String {
    let duration = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    if duration < Duration::from_millis(1) {
        return "0s".to_owned();
    }
    let whole = if duration >= Duration::from_secs(1) { Duration::from_secs(duration.as_secs()) } else { duration };
    GoDuration(whole).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::RegistrationNow;
    use super::*;

    fn snapshot(phase: &str, verdict: &str, probe: ProbeNow) -> Snapshot {
        Snapshot {
            bypass: false,
            fence: None,
            volumes: None,
            version: String::new(),
            driver: None,
            registration: RegistrationNow {
                phase: phase.into(),
                for_seconds: 1.0,
                confirmed: true,
                socket: None,
                trouble: None,
            },
            health: Some(HealthNow {
                verdict: verdict.into(),
                for_seconds: 1.0,
                cause_probe: Some("fabric".into()),
                cause_reason: Some("PortDown".into()),
                recovery_in_seconds: None,
                on_unhealthy: "deregister".into(),
            }),
            probes: vec![probe],
            next: String::new(),
        }
    }

    fn probe(verdict: &str, failures: u32, successes: u32) -> ProbeNow {
        ProbeNow {
            name: "fabric".into(),
            r#type: "exec".into(),
            outcome: None,
            reason: None,
            message: None,
            observed: serde_json::Map::new(),
            age_seconds: None,
            verdict: verdict.into(),
            failures,
            successes,
            failure_threshold: 2,
            success_threshold: 2,
            on_failure: "fail".into(),
            next_in_seconds: Some(12.7),
        }
    }

    #[test]
    fn an_operator_is_told_what_is_missing() {
        assert_eq!(
            words(&snapshot("registered", "healthy", probe("healthy", 1, 0))),
            "1 more failure of fabric in a row withdraws the driver; next look in 12s"
        );
        assert_eq!(
            words(&snapshot("withdrawn", "unhealthy", probe("unhealthy", 0, 0))),
            "registered again after 2 more successes of fabric in a row, and the hold; next look in 12s"
        );
        let mut held = snapshot("withdrawn", "unhealthy", probe("healthy", 0, 2));
        held.health.as_mut().unwrap().recovery_in_seconds = Some(0.25);
        assert_eq!(words(&held), "registered again in 250ms if all stays well");
        assert!(words(&snapshot("registered", "healthy", probe("healthy", 0, 9))).starts_with("nothing while"));
    }
}
