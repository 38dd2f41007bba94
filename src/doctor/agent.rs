//! What a running agent says of itself: where the registration stands, and when each probe last spoke.

use super::finding::Finding;
use crate::config::probes::ProbeSettings;
use crate::status::next::shown;
use crate::status::snapshot::{ProbeNow, Snapshot};
use std::time::Duration;

const REGISTRATION: &str = "registration";
const CLOCK: &str = "last-probe";

/// After this an unchanged wait is trouble: the kubelet looks each second.
const PATIENCE_SECONDS: f64 = 30.0;

/// As many periods may pass without a word.
const PERIODS: u32 = 3;

/// Where the answer stands for itself.
const STATUS: &str = "csi-warden status, and docs/troubleshooting.md";

/// No agent answers; `why` says where it was looked for.
pub(super) fn absent(why: &str, is_named: bool) -> Vec<Finding> {
    let finding = |check| {
        if is_named {
            Finding::unknown(check, why)
        } else {
            Finding::not_applicable(check, format!("no agent to ask: {why}"))
        }
    };
    vec![finding(REGISTRATION), finding(CLOCK)]
}

/// What its answer says. `probes` tells the periods.
pub(super) fn check(snapshot: &Snapshot, probes: &[ProbeSettings]) -> Vec<Finding> {
    let mut findings = vec![registration(snapshot)];
    let old: Vec<_> = snapshot.probes.iter().filter_map(|probe| silent(probe, probes)).collect();
    let spoke = snapshot.probes.iter().filter(|probe| probe.age_seconds.is_some()).count();
    findings.push(match (old.as_slice(), spoke) {
        ([], 0) if snapshot.probes.is_empty() => Finding::not_applicable(CLOCK, "the agent watches nothing"),
        ([], 0) => Finding::unknown(CLOCK, "no probe has spoken yet"),
        ([], _) => {
            let oldest = snapshot.probes.iter().filter_map(|probe| probe.age_seconds).fold(0.0, f64::max);
            Finding::pass(CLOCK, format!("each probe spoke within {}", shown(oldest)))
        }
        (old, _) => Finding::fail(CLOCK, old.join("; "), STATUS),
    });
    findings
}

fn registration(snapshot: &Snapshot) -> Finding {
    let now = &snapshot.registration;
    let seen = format!("{} for {}", now.phase, shown(now.for_seconds));
    let seen = now.trouble.as_ref().map_or_else(|| seen.clone(), |trouble| format!("{seen}: {trouble}"));
    match now.phase.as_str() {
        "registered" | "standingBy" => Finding::pass(REGISTRATION, seen),
        "refused" | "lost" => Finding::fail(REGISTRATION, seen, STATUS),
        "waitingForKubelet" | "showing" | "waitingForDriver" if now.for_seconds > PATIENCE_SECONDS => {
            Finding::fail(REGISTRATION, seen, STATUS)
        }
        // Withdrawn on purpose, or about to be shown.
        _ => Finding::unknown(REGISTRATION, seen).with_fix(STATUS),
    }
}

/// How long a probe has said nothing, if that is too long.
fn silent(probe: &ProbeNow, settings: &[ProbeSettings]) -> Option<String> {
    let own = settings.iter().find(|own| own.name == probe.name);
    // Other settings than the agent's: its next look tells at least that.
    let limit = own.map_or(Duration::from_secs(90), |own| own.period * PERIODS + own.timeout);
    let age = probe.age_seconds.filter(|age| *age > limit.as_secs_f64())?;
    Some(format!("{} spoke last {} ago, and should each {}", probe.name, shown(age), shown(limit.as_secs_f64())))
}
