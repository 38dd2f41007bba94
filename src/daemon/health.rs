//! The part that turns outcomes into the verdict: waits, asks the policy, tells.

use super::{error, info, warn};
use crate::config::probes::ProbeKind;
use crate::config::settings::{Health as Settings, Reaction};
use crate::parts::{Fatal, Parts};
use crate::policy::admission::{Admission, AdmissionPolicy, Evidence};
use crate::policy::health::{Change, HealthPolicy};
use crate::policy::outcome::{Health, Outcome};
use crate::probe::health_file::HealthFile;
use crate::probe::lane::Lane;
use crate::probe::runner::{Report, Schedule, run_rounds};
use crate::quiet::Quiet;
use crate::state_file::StateFile;
use std::error::Error;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tracing::debug;

/// The name that the one probe of the flags carries.
const HEALTH_FILE: &str = "health-file";

/// Unknown for this many periods is worth a line.
const UNKNOWN_PERIODS: u32 = 3;

/// How long writing the state may take before it is left alone.
const STATE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct HealthPart {
    policy: HealthPolicy,
    admission: AdmissionPolicy,
    decided: watch::Sender<Admission>,
    reaction: Reaction,
    state: StateFile,
    lane: Lane,
    state_quiet: Quiet,
    period: Duration,
    unknown_since: Option<Instant>,
    unknown_told: bool,
    outcome_quiet: Quiet,
}

impl HealthPart {
    /// Starts the probes and the part; what it decides comes on the channel.
    pub(super) fn start(settings: &Settings, state: StateFile, parts: &Parts) -> watch::Receiver<Admission> {
        let now = Instant::now().into_std();
        let watched = settings.probes.iter().find_map(|probe| match &probe.kind {
            ProbeKind::HealthFile { path, limits } => Some((probe, path, *limits)),
            ProbeKind::Csi { .. } | ProbeKind::Exec { .. } => None,
        });
        let thresholds = watched.map(|(probe, ..)| (HEALTH_FILE.to_owned(), probe.thresholds));
        let mut policy = HealthPolicy::new(thresholds, settings.hold, now);
        match state.load(now) {
            Ok(Some(past)) => {
                info!(health = past.health.name(), state.path = %state.path().display(), "holding the verdict of the previous run");
                policy.restore(&past);
            }
            Ok(None) => {}
            Err(error) => warn!(error = &error as &dyn Error, "the previous run's verdict is lost; beginning afresh"),
        }
        // Observing never touches the registration: it is shown whatever the verdict.
        let first = match settings.reaction {
            Reaction::Observe => Admission::Show,
            Reaction::Deregister => Admission::Wait,
        };
        let (decided, admission) = watch::channel(first);
        let (reports, received) = mpsc::channel(16);
        let stop = parts.stop().clone();
        if let Some((probe, path, limits)) = watched {
            let schedule = Schedule {
                period: probe.period,
                timeout: probe.timeout,
                confirm_interval: probe.confirm_interval,
                failure_threshold: probe.thresholds.failure,
            };
            let probe = HealthFile::new(path, limits);
            parts.spawn(HEALTH_FILE, async move {
                run_rounds(0, probe, schedule, reports, stop).await;
                Ok(())
            });
        }
        let part = Self {
            policy,
            admission: AdmissionPolicy::new(now, settings.start_grace),
            decided,
            reaction: settings.reaction,
            state,
            lane: Lane::new("state"),
            state_quiet: Quiet::default(),
            period: watched.map_or(Duration::ZERO, |(probe, ..)| probe.period),
            unknown_since: None,
            unknown_told: false,
            outcome_quiet: Quiet::default(),
        };
        parts.spawn("health", part.run(received, parts.clone()));
        admission
    }

    async fn run(mut self, mut received: mpsc::Receiver<Report>, parts: Parts) -> Result<(), Fatal> {
        let stop = parts.stop().clone();
        loop {
            let deadline = self.deadline();
            let change = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                report = received.recv() => match report {
                    Some(report) => self.take_in(report),
                    None => return Ok(()),
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.policy.poll(Instant::now().into_std())
                }
            };
            if let Some(change) = &change {
                self.tell(change);
            }
            // The socket first, the state after: a slow disk must not delay the kubelet.
            self.decide();
            if change.is_some() {
                self.save().await;
            }
        }
    }

    /// When time alone may change something; never in the past, or the loop would spin.
    fn deadline(&self) -> Option<Instant> {
        let now = Instant::now().into_std();
        let admission = match self.reaction {
            Reaction::Observe => None,
            Reaction::Deregister => self.admission.deadline(now),
        };
        [self.policy.deadline(now), admission].into_iter().flatten().min().map(Instant::from_std)
    }

    fn take_in(&mut self, report: Report) -> Option<Change> {
        let now = Instant::now();
        debug!(
            probe = HEALTH_FILE,
            probe.outcome = report.outcome.name(),
            reason = report.outcome.reason().map(ToString::to_string),
            "probe round"
        );
        self.note_unknown(&report.outcome, now);
        match &report.outcome {
            Outcome::Failure(reason, _) | Outcome::Warning(reason) => {
                let text = reason.to_string();
                if self.outcome_quiet.begin_or_repeat(&text, now) {
                    warn!(
                        probe = HEALTH_FILE,
                        probe.outcome = report.outcome.name(),
                        reason = text,
                        "the probe does not succeed"
                    );
                }
            }
            Outcome::Success => {
                if self.outcome_quiet.end() {
                    info!(probe = HEALTH_FILE, "the probe succeeds again");
                }
            }
            Outcome::Unknown(_) => {}
        }
        self.policy.observe(report.probe, report.outcome, report.at.into_std())
    }

    fn note_unknown(&mut self, outcome: &Outcome, now: Instant) {
        let Outcome::Unknown(reason) = outcome else {
            if std::mem::take(&mut self.unknown_told) {
                info!(probe = HEALTH_FILE, "the probe knows again");
            }
            self.unknown_since = None;
            return;
        };
        let since = *self.unknown_since.get_or_insert(now);
        if !self.unknown_told && now - since >= self.period * UNKNOWN_PERIODS {
            self.unknown_told = true;
            warn!(
                probe = HEALTH_FILE,
                reason = %reason,
                health = self.policy.health().name(),
                "the probe has known nothing for {UNKNOWN_PERIODS} periods; the verdict is held"
            );
        }
    }

    fn decide(&mut self) {
        if self.reaction == Reaction::Observe {
            return;
        }
        let evidence = Evidence {
            health: self.policy.health(),
            all_heard: self.policy.all_heard(),
            suspect: self.policy.suspect(),
        };
        let decision = self.admission.decide(evidence, Instant::now().into_std());
        self.decided.send_if_modified(|before| std::mem::replace(before, decision) != decision);
    }

    fn tell(&self, change: &Change) {
        let (from, to) = (change.from.name(), change.to.name());
        match (change.to, &change.cause) {
            (Health::Unhealthy, Some((probe, reason))) => error!(
                health.from = from,
                health.to = to,
                probe = probe,
                reason = %reason,
                hold = ?self.policy.hold(),
                "driver health changed"
            ),
            (Health::Unhealthy, None) | (Health::Healthy | Health::Unknown, _) => {
                info!(health.from = from, health.to = to, "driver health changed");
            }
        }
    }

    async fn save(&mut self) {
        let (state, past) = (self.state.clone(), self.policy.past());
        let reason = self.policy.cause().map(|(probe, reason)| format!("{probe}: {reason}"));
        let now = Instant::now().into_std();
        let saved = self.lane.run(STATE_TIMEOUT, move || state.save(&past, reason, now)).await;
        let trouble = match saved {
            Ok(Ok(())) => {
                if self.state_quiet.end() {
                    info!(state.path = %self.state.path().display(), "the verdict is kept again");
                }
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_abandoned) => format!("no answer from its file system within {STATE_TIMEOUT:?}"),
        };
        if self.state_quiet.begin_or_repeat(&trouble, Instant::now()) {
            warn!(state.path = %self.state.path().display(), error = trouble, "cannot keep the verdict over a restart of ours; all else goes on");
        }
    }
}
