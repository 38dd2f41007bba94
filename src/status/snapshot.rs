//! The snapshot: one JSON document. Ages and waits are seconds, so that no clock needs to agree.

use crate::config::probes::OnFailure;
use crate::health_view::{HealthView, ProbeView};
use crate::policy::volumes::{Completeness, InUse, VolumeTable};
use crate::probe::observed::Observed;
use crate::proxy::gate::FenceUp;
use crate::registration::{Phase, Status};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Everything at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// The agent's version.
    pub version: String,
    /// The driver's name, once known.
    pub driver: Option<String>,
    /// The kubelet's side.
    pub registration: RegistrationNow,
    /// The verdict; absent without a health source.
    pub health: Option<HealthNow>,
    /// The fence; absent without a proxy.
    #[serde(default)]
    pub fence: Option<FenceNow>,
    /// Volumes in use; absent without a proxy.
    #[serde(default)]
    pub volumes: Option<VolumesNow>,
    /// The agent stays out of the way after crashes of its own: no proxy, no fence.
    #[serde(default)]
    pub bypass: bool,
    /// Each probe.
    pub probes: Vec<ProbeNow>,
    /// What happens next, for a person.
    pub next: String,
}

/// The registration at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegistrationNow {
    /// A stable word: `registered`, `withdrawn`, …
    pub phase: String,
    /// For how long.
    pub for_seconds: f64,
    /// Whether the kubelet has confirmed us since our start.
    pub confirmed: bool,
    /// The registration socket.
    pub socket: Option<String>,
    /// What stands in the way.
    pub trouble: Option<String>,
}

/// The verdict at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthNow {
    /// `unknown`, `healthy` or `unhealthy`.
    pub verdict: String,
    /// For how long.
    pub for_seconds: f64,
    /// The probe that made it unhealthy; empty when held from a run before.
    pub cause_probe: Option<String>,
    /// What that probe saw.
    pub cause_reason: Option<String>,
    /// When the recovery is believed, if all stays well.
    pub recovery_in_seconds: Option<f64>,
    /// `observe` or `deregister`.
    pub on_unhealthy: String,
}

/// The fence at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FenceNow {
    /// New volumes are refused.
    pub up: bool,
    /// Why.
    pub reason: Option<String>,
    /// For how long.
    pub for_seconds: Option<f64>,
    /// Since when, in UTC.
    pub since: Option<String>,
    /// An operator's word that goes over the verdict's.
    pub r#override: Option<OverrideNow>,
}

/// An operator's word.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OverrideNow {
    /// `on` or `off`.
    pub fence: String,
    /// Why.
    pub reason: String,
    /// When it ends by itself.
    pub ends_in_seconds: f64,
    /// Who asked: user and process.
    #[serde(default)]
    pub by: String,
    /// When that was, in UTC.
    #[serde(default)]
    pub since: String,
    /// It was kept from before a restart of the agent.
    #[serde(default)]
    pub from_before: bool,
}

/// Volumes in use at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumesNow {
    /// How many are known.
    pub in_use: usize,
    /// Whether there can be no others.
    pub complete: bool,
    /// Why there may be others.
    pub gap: Option<String>,
    /// Calls about volumes that are under way.
    pub calls: usize,
    /// Where each is.
    pub places: Vec<PlaceNow>,
}

/// A volume at a place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlaceNow {
    /// The volume's ID.
    pub volume: String,
    /// `staged` or `published`.
    pub kind: String,
    /// Where.
    pub path: String,
    /// `there`, `renewing`, `coming` or `leaving`.
    pub presence: String,
}

impl VolumesNow {
    /// What the table knows.
    pub fn of(table: &VolumeTable) -> Self {
        let places: Vec<PlaceNow> = table
            .places()
            .map(|place| PlaceNow {
                volume: place.volume,
                kind: place.kind.name().to_owned(),
                path: place.path,
                presence: place.presence.name().to_owned(),
            })
            .collect();
        let gap = match table.completeness() {
            Completeness::Complete => None,
            Completeness::Incomplete(gap) => Some(gap.text().to_owned()),
        };
        let in_use = match table.in_use() {
            InUse::No | InUse::Unknown => 0,
            InUse::Yes(count) => count,
        };
        Self { in_use, complete: gap.is_none(), gap, calls: table.in_flight(), places }
    }
}

/// One probe at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProbeNow {
    /// Its name.
    pub name: String,
    /// As in the settings file: `health-file`, `csi`, `exec`, `rdma`.
    pub r#type: String,
    /// `success`, `warning`, `failure`, `unknown`; absent before its first word.
    pub outcome: Option<String>,
    /// The stable code of its reason.
    pub reason: Option<String>,
    /// The reason's sentence.
    pub message: Option<String>,
    /// What it saw, by device and port; empty for a probe that sees no devices.
    #[serde(default)]
    pub observed: Observed,
    /// How old its last word is.
    pub age_seconds: Option<f64>,
    /// Its own verdict.
    pub verdict: String,
    /// Failures in a row.
    pub failures: u32,
    /// Successes in a row.
    pub successes: u32,
    /// Failures in a row that decide.
    pub failure_threshold: u32,
    /// Successes in a row that decide.
    pub success_threshold: u32,
    /// `fail` or `warn`.
    pub on_failure: String,
    /// When it runs next, if no event comes before.
    pub next_in_seconds: Option<f64>,
}

impl Snapshot {
    /// What is known at `now`.
    pub fn take(
        status: &Status,
        health: Option<&HealthView>,
        fence: Option<&Option<FenceUp>>,
        volumes: Option<VolumesNow>,
        now: Instant,
    ) -> Self {
        let mut snapshot = Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            driver: status.driver_name.clone(),
            registration: RegistrationNow {
                phase: phase(status.phase).to_owned(),
                for_seconds: seconds(now.saturating_duration_since(status.since)),
                confirmed: status.confirmed,
                socket: status.socket.as_ref().map(|path| path.display().to_string()),
                trouble: status.trouble.clone(),
            },
            health: health.filter(|view| !view.probes.is_empty()).and_then(|view| health_now(view, now)),
            fence: fence.map(|up| fence_now(up.as_ref(), health, now)),
            volumes,
            bypass: false,
            probes: health
                .map(|view| view.probes.iter().map(|probe| probe_now(probe, now)).collect())
                .unwrap_or_default(),
            next: String::new(),
        };
        snapshot.next = super::next::words(&snapshot);
        snapshot
    }
}

/// The phase's stable word.
fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::WaitingForDriver => "waitingForDriver",
        Phase::WaitingForHealth => "waitingForHealth",
        Phase::Withdrawn => "withdrawn",
        Phase::Showing => "showing",
        Phase::Lost => "lost",
        Phase::WaitingForKubelet => "waitingForKubelet",
        Phase::Refused => "refused",
        Phase::Registered => "registered",
        Phase::StandingBy => "standingBy",
    }
}

fn health_now(view: &HealthView, now: Instant) -> Option<HealthNow> {
    let (health, since) = view.verdict?;
    Some(HealthNow {
        verdict: health.name().to_owned(),
        for_seconds: seconds(now.saturating_duration_since(since)),
        cause_probe: view.cause.as_ref().map(|(probe, _)| probe.clone()),
        cause_reason: view.cause.as_ref().map(|(_, reason)| reason.clone()),
        recovery_in_seconds: view.release_at.map(|at| seconds(at.saturating_duration_since(now))),
        on_unhealthy: view.reaction.name().to_owned(),
    })
}

fn fence_now(up: Option<&FenceUp>, health: Option<&HealthView>, now: Instant) -> FenceNow {
    let forced = health.and_then(|view| view.forced.as_ref());
    FenceNow {
        up: up.is_some(),
        reason: up.map(|up| up.reason.clone()),
        for_seconds: up.map(|up| seconds(now.saturating_duration_since(up.since.into_std()))),
        since: up.map(|up| up.since_utc.clone()),
        r#override: forced.filter(|forced| forced.until > now).map(|forced| OverrideNow {
            fence: forced.forced.name().to_owned(),
            reason: forced.reason.clone(),
            ends_in_seconds: seconds(forced.until - now),
            by: forced.order.by.clone(),
            since: forced.order.at_utc.clone(),
            from_before: forced.from_before,
        }),
    }
}

fn probe_now(probe: &ProbeView, now: Instant) -> ProbeNow {
    let (outcome, at) = probe.last.as_ref().map_or((None, None), |(outcome, at)| (Some(outcome), Some(*at)));
    let reason = outcome.and_then(|outcome| outcome.reason());
    let on_failure = match probe.settings.on_failure {
        OnFailure::Fail => "fail",
        OnFailure::Warn => "warn",
    };
    ProbeNow {
        name: probe.settings.name.clone(),
        r#type: probe.settings.kind.name().to_owned(),
        outcome: outcome.map(|outcome| outcome.name().to_owned()),
        reason: reason.map(|reason| reason.code.to_owned()),
        message: reason.map(|reason| reason.message.clone()),
        observed: probe.observed.as_deref().cloned().unwrap_or_default(),
        age_seconds: at.map(|at| seconds(now.saturating_duration_since(at))),
        verdict: probe.health.name().to_owned(),
        failures: probe.streak.0,
        successes: probe.streak.1,
        failure_threshold: probe.settings.thresholds.failure.get(),
        success_threshold: probe.settings.thresholds.success.get(),
        on_failure: on_failure.to_owned(),
        next_in_seconds: probe.next.map(|at| seconds(at.saturating_duration_since(now))),
    }
}

/// To the millisecond: more would only be noise in a JSON document.
fn seconds(duration: std::time::Duration) -> f64 {
    (duration.as_secs_f64() * 1e3).round() / 1e3
}
