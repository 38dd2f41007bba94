//! The part that turns outcomes into the verdict: waits, asks the policy, tells.

use super::fence::{FencePost, utc_now};
use super::overrides::Overrides;
use super::probes::{Known, Probes};
use super::rules::{asks, groups, rules};
use super::{error, info, warn};
use crate::config::settings::Health as Settings;
use crate::config::watched::Watched;
use crate::driver_ready::DriverReady;
use crate::health_view::HealthView;
use crate::metrics::Metrics;
use crate::parts::{Fatal, Parts};
use crate::policy::admission::{Admission, Evidence};
use crate::policy::fence_override::{Order, Override, OverrideProblem};
use crate::policy::health::{Change, HealthPolicy};
use crate::policy::outcome::Health;
use crate::policy::reaction::{Facts, ReactionPolicy, Rules};
use crate::policy::volumes::{InUse, VolumeTable};
use crate::probe::lane::{Abandoned, Lane};
use crate::probe::runner::Report;
use crate::proxy::gate::FenceUp;
use crate::proxy::volumes::Volumes;
use crate::quiet::Quiet;
use crate::state_file::StateFile;
use crate::status::order::{Answer, FenceOrder, Ordered};
use std::error::Error;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// How long writing the state may take before it is left alone.
const STATE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct HealthPart {
    policy: HealthPolicy,
    reactions: ReactionPolicy,
    /// When the reaction may change by time alone.
    next_decision: Option<std::time::Instant>,
    decided: watch::Sender<Admission>,
    fence: FencePost,
    view: watch::Sender<HealthView>,
    rules: Rules,
    state: StateFile,
    overrides: Overrides,
    lane: Lane,
    state_quiet: Quiet,
    probes: Probes,
    metrics: Metrics,
    stop: CancellationToken,
}

/// What the part hears besides its probes.
pub(super) struct Heard {
    /// Other probes, after a change of the settings.
    pub(super) changes: mpsc::Receiver<Watched>,
    /// Volumes in use.
    pub(super) volumes: Volumes,
    /// An operator's word.
    pub(super) orders: mpsc::Receiver<Ordered>,
}

/// What runs before this one left.
pub(super) struct Kept {
    /// The verdict.
    pub(super) state: StateFile,
    /// Devices that were good.
    pub(super) known: Known,
    /// The operator's word, and where it is kept.
    pub(super) overrides: Overrides,
    pub(super) forced: Option<Override>,
}

/// What the part tells.
pub(super) struct Told {
    /// Whether the registration socket may be shown.
    pub(super) admission: watch::Receiver<Admission>,
    /// Whether calls about new volumes are refused, and why.
    pub(super) fence: watch::Receiver<Option<FenceUp>>,
    /// Everything, for people.
    pub(super) view: watch::Receiver<HealthView>,
}

impl HealthPart {
    /// Starts the probes and the part.
    pub(super) fn start(
        settings: &Settings,
        rules_of_reaction: Rules,
        kept: Kept,
        heard: Heard,
        metrics: Metrics,
        ready: DriverReady,
        parts: &Parts,
    ) -> Told {
        let Kept { state, known, overrides, forced } = kept;
        let now = Instant::now().into_std();
        let watched =
            Watched { probes: settings.probes.clone(), groups: settings.groups.clone(), warnings: Vec::new() };
        let mut policy = HealthPolicy::new(rules(&watched), groups(&watched), settings.hold, now);
        match state.load(now) {
            Ok(Some(past)) => {
                info!(
                    health = past.health.name(),
                    state.path = %state.path().display(),
                    "holding the verdict of the previous run"
                );
                policy.restore(&past);
            }
            Ok(None) => {}
            Err(error) => warn!(error = &error as &dyn Error, "the previous run's verdict is lost; beginning afresh"),
        }
        let (decided, admission) = watch::channel(Admission::Wait);
        let (up, fence) = watch::channel(None);
        let (reports, received) = mpsc::channel(16);
        let (view, seen) = watch::channel(HealthView {
            verdict: None,
            cause: None,
            release_at: None,
            probes: Vec::new(),
            reaction: rules_of_reaction.reaction,
            forced: None,
        });
        let mut part = Self {
            policy,
            reactions: ReactionPolicy::new(rules_of_reaction, now, settings.start_grace),
            next_decision: None,
            decided,
            fence: FencePost::new(up, metrics.clone()),
            view,
            rules: rules_of_reaction,
            state,
            overrides,
            lane: Lane::new("state"),
            state_quiet: Quiet::default(),
            probes: Probes::new(known, reports, metrics.clone(), ready, parts),
            metrics,
            stop: parts.stop().clone(),
        };
        part.reactions.force(forced);
        part.probes.replace(watched.probes);
        part.metrics.set_verdict(part.policy.health());
        part.decide(heard.volumes.look(VolumeTable::in_use));
        part.show();
        parts.spawn("health", part.run(received, heard));
        Told { admission, fence, view: seen }
    }

    async fn run(mut self, mut received: mpsc::Receiver<Report>, heard: Heard) -> Result<(), Fatal> {
        let Heard { mut changes, volumes, mut orders } = heard;
        let (mut volume_changes, mut returns) = (volumes.changes(), volumes.returns());
        let stop = self.stop.clone();
        loop {
            let deadline = self.deadline();
            let mut obeyed = None;
            let change = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                Some(report) = received.recv() => self.take_in(report),
                Some(watched) = changes.recv() => self.watch_others(watched),
                Some(ordered) = orders.recv() => {
                    obeyed = Some(self.obey(ordered));
                    None
                }
                Ok(()) = returns.changed() => {
                    if let Some(word) = self.overrides.of_another().await {
                        self.reactions.force(word);
                    }
                    None
                }
                Ok(()) = volume_changes.changed() => None,
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.policy.poll(Instant::now().into_std())
                }
            };
            if let Some(change) = &change {
                self.tell(change);
            }
            // The socket first, the state after: a slow disk must not delay the kubelet.
            volume_changes.mark_unchanged();
            let in_use = volumes.look(VolumeTable::in_use);
            self.metrics.set_volumes_in_use(match in_use {
                InUse::No | InUse::Unknown => 0,
                InUse::Yes(count) => count,
            });
            self.decide(in_use);
            self.show();
            if change.is_some() {
                self.save().await;
            }
            let in_force = self.reactions.forced(Instant::now().into_std()).cloned();
            let not_kept = self.overrides.keep(in_force.as_ref()).await;
            if let Some((answer, done)) = obeyed {
                // Whoever asked may have gone.
                drop(answer.send(done.map(|()| not_kept)));
            }
        }
    }

    /// When time alone may change something; never in the past, or the loop would spin.
    fn deadline(&self) -> Option<Instant> {
        let now = Instant::now().into_std();
        [self.policy.deadline(now), self.next_decision].into_iter().flatten().min().map(Instant::from_std)
    }

    fn take_in(&mut self, report: Report) -> Option<Change> {
        let (number, outcome, at) = self.probes.take_in(report, self.policy.health())?;
        self.policy.observe(number, outcome, at.into_std())
    }

    fn watch_others(&mut self, watched: Watched) -> Option<Change> {
        let names: Vec<&str> = watched.probes.iter().map(|probe| probe.name.as_str()).collect();
        info!(probes = names.join(", "), "watching by the new settings");
        self.state.watch_others(asks(&watched));
        let change = self.policy.replace(rules(&watched), groups(&watched), Instant::now().into_std());
        self.probes.replace(watched.probes);
        change
    }

    fn decide(&mut self, in_use: InUse) {
        let now = Instant::now();
        let evidence = Evidence {
            health: self.policy.health(),
            all_heard: self.policy.all_heard(),
            suspect: self.policy.suspect(),
        };
        let facts = Facts { evidence, since: self.policy.since(), in_use };
        let decision = self.reactions.decide(facts, now.into_std());
        self.next_decision = decision.next;
        let unhealthy = evidence.health == Health::Unhealthy && self.rules.reaction.fences();
        let cause = self.policy.cause().filter(|_| unhealthy).map(|(_, reason)| reason.to_string());
        self.fence.follow(decision, &self.reactions, cause, now);
        self.decided.send_if_modified(|before| std::mem::replace(before, decision.admission) != decision.admission);
    }

    /// An operator's word goes over the verdict's, for a while. Answered once it is in force and written down.
    fn obey(&mut self, ordered: Ordered) -> (Answer, Result<(), OverrideProblem>) {
        let now = Instant::now().into_std();
        let done = match ordered.order {
            FenceOrder::Auto => {
                self.reactions.force(None);
                warn!(by = ordered.by, "override ended: health decides about the fence again");
                Ok(())
            }
            FenceOrder::Force { forced, lasts, reason } => {
                let order = Order { by: ordered.by, at_utc: utc_now() };
                Override::new(forced, lasts, &reason, order, now).map(|forced| {
                    warn!(
                        by = forced.order.by,
                        fence = forced.forced.name(),
                        lasts = ?lasts,
                        reason = forced.reason,
                        "override: an operator decides about the fence"
                    );
                    self.reactions.force(Some(forced));
                })
            }
        };
        (ordered.answer, done)
    }

    fn show(&self) {
        self.view.send_replace(HealthView {
            verdict: Some((self.policy.health(), self.policy.since())),
            cause: self.policy.cause().map(|(probe, reason)| (probe.clone(), reason.to_string())),
            release_at: self.policy.deadline(Instant::now().into_std()),
            probes: self.probes.views(self.policy.probes()),
            reaction: self.rules.reaction,
            forced: self.reactions.forced(Instant::now().into_std()).cloned(),
        });
    }

    fn tell(&self, change: &Change) {
        self.metrics.set_verdict(change.to);
        self.metrics.count_transition(change.to, change.cause.as_ref().map(|(_, reason)| reason));
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
            Err(Abandoned::Late) => format!("no answer from its file system within {STATE_TIMEOUT:?}"),
            Err(no_thread @ Abandoned::NoThread(_)) => no_thread.to_string(),
        };
        if self.state_quiet.begin_or_repeat(&trouble, Instant::now()) {
            warn!(
                state.path = %self.state.path().display(),
                error = trouble,
                "cannot keep the verdict over a restart of ours; all else goes on"
            );
        }
    }
}
