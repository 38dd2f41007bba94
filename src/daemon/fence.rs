//! What the fence is told: by health, or by an operator.

use super::{info, warn};
use crate::metrics::Metrics;
use crate::policy::fence_override::Override;
use crate::policy::reaction::{Decision, ReactionPolicy};
use crate::proxy::gate::FenceUp;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::time::Instant;

/// Puts the fence up and takes it down, and tells of it.
pub(super) struct FencePost {
    up: watch::Sender<Option<FenceUp>>,
    metrics: Metrics,
}

impl FencePost {
    pub(super) fn new(up: watch::Sender<Option<FenceUp>>, metrics: Metrics) -> Self {
        Self { up, metrics }
    }

    /// What calls see.
    pub(super) fn up(&self) -> Option<FenceUp> {
        self.up.borrow().clone()
    }

    /// Makes it so, if it is not. `cause` is what the probes say is broken.
    pub(super) fn follow(&self, decision: Decision, policy: &ReactionPolicy, cause: Option<String>, now: Instant) {
        let before = self.up();
        self.metrics.set_override(policy.forced(now.into_std()).map(|word| word.forced.name()));
        if !decision.fenced {
            self.metrics.set_fenced(None);
            if let Some(before) = before {
                self.up.send_replace(None);
                info!(fenced.reason = before.reason, lasted = ?now - before.since, "the fence is down: new volumes are let in again");
            }
            return;
        }
        let forced = policy.forced(now.into_std());
        let reason = match (&cause, forced) {
            // Whoever reads it wants to know what is broken, rather than who said so too.
            (Some(cause), _) => cause.clone(),
            (None, Some(Override { reason, .. })) => format!("put up by an operator: {reason}"),
            (None, None) => "unhealthy since before this agent started".to_owned(),
        };
        self.metrics.set_fenced(Some(if cause.is_none() && forced.is_some() { "override" } else { "health" }));
        match before {
            Some(before) if before.reason == reason => {}
            Some(before) => {
                self.up.send_replace(Some(FenceUp { reason, ..before }));
            }
            None => {
                warn!(reason = reason, "the fence is up: new volumes are refused, those in use can be unmounted");
                self.up.send_replace(Some(FenceUp { reason, since: now, since_utc: utc_now() }));
            }
        }
    }
}

/// The wall clock to the second, as in RFC 3339.
pub(super) fn utc_now() -> String {
    let now = OffsetDateTime::now_utc();
    let (date, clock) = (now.date(), now.time());
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z",
        date.year(),
        u8::from(date.month()),
        date.day(),
        clock.hour(),
        clock.minute(),
        clock.second()
    )
}
