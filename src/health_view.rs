//! What the health part knows, for people.

use crate::config::probes::ProbeSettings;
use crate::policy::fence_override::Override;
use crate::policy::outcome::{Health, Outcome};
use crate::policy::reaction::Reaction;
use crate::probe::observed::Observed;
use std::sync::Arc;
use std::time::Instant;

/// The verdict and the probes at one moment.
#[derive(Debug, Clone)]
pub struct HealthView {
    /// The verdict and since when; `None` before the first word of any probe.
    pub verdict: Option<(Health, Instant)>,
    /// The probe that made it unhealthy, and what it saw.
    pub cause: Option<(String, String)>,
    /// When the recovery is believed, if all stays well.
    pub release_at: Option<Instant>,
    /// Each probe.
    pub probes: Vec<ProbeView>,
    /// What an unhealthy verdict does.
    pub reaction: Reaction,
    /// An operator's word that goes over it.
    pub forced: Option<Override>,
}

/// One probe.
#[derive(Debug, Clone)]
pub struct ProbeView {
    /// Its settings.
    pub settings: ProbeSettings,
    /// Its verdict.
    pub health: Health,
    /// Its last word and when it came.
    pub last: Option<(Outcome, Instant)>,
    /// What it saw then, beside that.
    pub observed: Option<Arc<Observed>>,
    /// Failures and successes in a row.
    pub streak: (u32, u32),
    /// When it runs next, if no event comes before.
    pub next: Option<Instant>,
}
