//! The probes that run: started and stopped as the settings say, and what each said last. An outage of a probe is logged here,
//! once; what all of them together mean is for `health.rs`.

use super::{info, warn};
use crate::config::probes::{ProbeKind, ProbeSettings};
use crate::driver_ready::DriverReady;
use crate::health_view::ProbeView;
use crate::known_devices::KnownDevices;
use crate::known_ports::KnownPorts;
use crate::metrics::Metrics;
use crate::parts::Parts;
use crate::policy::outcome::{Health, Outcome};
use crate::policy::probe_verdict::ProbeVerdict;
use crate::probe::Probe;
use crate::probe::csi::Csi;
use crate::probe::exec::Exec;
use crate::probe::gpu::Gpu;
use crate::probe::health_file::HealthFile;
use crate::probe::kmsg::Kmsg;
use crate::probe::nvme::Nvme;
use crate::probe::observed::Observed;
use crate::probe::rdma::Rdma;
use crate::probe::runner::{Report, RunnerId, Schedule, run_rounds};
use crate::quiet::Quiet;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// Unknown for this many periods is worth a line.
const UNKNOWN_PERIODS: u32 = 3;

/// All of them.
pub(super) struct Probes {
    /// In the policy's order.
    runners: Vec<Runner>,
    next_runner: u64,
    known: Known,
    reports: mpsc::Sender<Report>,
    metrics: Metrics,
    ready: DriverReady,
    parts: Parts,
}

/// What was good before.
pub(super) struct Known {
    pub(super) ports: KnownPorts,
    pub(super) devices: KnownDevices,
}

/// A probe that runs, and what was told of it.
struct Runner {
    id: RunnerId,
    settings: ProbeSettings,
    stop: CancellationToken,
    last: Option<(Outcome, Instant)>,
    observed: Option<Arc<Observed>>,
    next: Option<Instant>,
    unknown_since: Option<Instant>,
    unknown_told: bool,
    quiet: Quiet,
}

impl Probes {
    /// None yet. What they say goes to `reports`.
    pub(super) fn new(
        known: Known,
        reports: mpsc::Sender<Report>,
        metrics: Metrics,
        ready: DriverReady,
        parts: &Parts,
    ) -> Self {
        Self { runners: Vec::new(), next_runner: 0, known, reports, metrics, ready, parts: parts.clone() }
    }

    /// Starts the probes that do not run yet in just this way, and stops those that are gone.
    pub(super) fn replace(&mut self, probes: Vec<ProbeSettings>) {
        let mut before = std::mem::take(&mut self.runners);
        for settings in probes {
            let kept = before.iter().position(|runner| runner.settings == settings).map(|at| before.swap_remove(at));
            let runner = kept.unwrap_or_else(|| self.start_probe(settings));
            self.runners.push(runner);
        }
        for gone in before {
            gone.stop.cancel();
            if !self.runners.iter().any(|runner| runner.settings.name == gone.settings.name) {
                self.metrics.forget_probe(&gone.settings.name);
            }
        }
    }

    fn start_probe(&mut self, settings: ProbeSettings) -> Runner {
        let id = RunnerId(self.next_runner);
        self.next_runner += 1;
        let stop = self.parts.stop().child_token();
        match &settings.kind {
            ProbeKind::HealthFile { path, limits } => self.spawn(id, HealthFile::new(path, *limits), &settings, &stop),
            ProbeKind::Csi { socket } => self.spawn(id, Csi::new(socket, self.ready.clone()), &settings, &stop),
            ProbeKind::Exec { command } => self.spawn(id, Exec::new(command), &settings, &stop),
            ProbeKind::Nvme(nvme) => {
                let selects = format!("{:?} {:?} {:?}", nvme.host, nvme.devices, nvme.exclude);
                let known = self.known.devices.of(&settings.name, selects);
                self.spawn(id, Nvme::new(nvme, known), &settings, &stop);
            }
            ProbeKind::Gpu(gpu) => {
                let known = self.known.devices.of(&settings.name, format!("{:?} {:?}", gpu.host, gpu.select));
                self.spawn(id, Gpu::new(gpu, known), &settings, &stop);
            }
            ProbeKind::Kmsg(kmsg) => self.spawn(id, Kmsg::new(kmsg), &settings, &stop),
            ProbeKind::Rdma(rdma) => self.spawn(id, Rdma::new(rdma, self.known.ports.clone()), &settings, &stop),
        }
        Runner {
            id,
            settings,
            stop,
            last: None,
            observed: None,
            next: None,
            unknown_since: None,
            unknown_told: false,
            quiet: Quiet::default(),
        }
    }

    fn spawn(&self, id: RunnerId, probe: impl Probe + 'static, settings: &ProbeSettings, stop: &CancellationToken) {
        let schedule = Schedule {
            period: settings.period,
            timeout: settings.timeout,
            confirm_interval: settings.confirm_interval,
            failure_threshold: settings.thresholds.failure,
        };
        let (reports, stop) = (self.reports.clone(), stop.clone());
        self.parts.spawn("probe", async move {
            run_rounds(id, probe, schedule, reports, stop).await;
            Ok(())
        });
    }

    /// A report heard while `held` is the verdict; its probe's place, what it said and when, if it is of a probe that runs and a
    /// round is over.
    pub(super) fn take_in(&mut self, report: Report, held: Health) -> Option<(usize, Outcome, Instant)> {
        // A word of a probe that is gone.
        let number = self.runners.iter().position(|runner| runner.id == report.runner)?;
        let runner = &mut self.runners[number];
        runner.next = Some(report.next);
        let outcome = report.outcome?;
        self.metrics.observe_round(&runner.settings.name, &outcome, report.took);
        runner.tell(&outcome, held);
        runner.last = Some((outcome.clone(), report.at));
        runner.observed = report.observed;
        Some((number, outcome, report.at))
    }

    /// Each as people see it, with its verdict.
    pub(super) fn views<'a>(&self, verdicts: impl Iterator<Item = &'a ProbeVerdict>) -> Vec<ProbeView> {
        let views = self.runners.iter().zip(verdicts).map(|(runner, verdict)| ProbeView {
            settings: runner.settings.clone(),
            health: verdict.health(),
            last: runner.last.clone().map(|(outcome, at)| (outcome, at.into_std())),
            streak: (verdict.failures(), verdict.successes()),
            observed: runner.observed.clone(),
            next: runner.next.map(Instant::into_std),
        });
        views.collect()
    }
}

impl Runner {
    /// An outage once, its end once, and silence that lasts.
    fn tell(&mut self, outcome: &Outcome, held: Health) {
        let (now, probe) = (Instant::now(), self.settings.name.as_str());
        let reason = outcome.reason().map(ToString::to_string);
        debug!(probe = probe, probe.outcome = outcome.name(), reason = reason, "probe round");
        self.note_unknown(outcome, held, now);
        let probe = self.settings.name.as_str();
        match (outcome, reason) {
            (Outcome::Failure(..) | Outcome::Warning(_), Some(reason)) => {
                if self.quiet.begin_or_repeat(&reason, now) {
                    warn!(probe = probe, probe.outcome = outcome.name(), reason = reason, "the probe does not succeed");
                }
            }
            (Outcome::Success, _) => {
                if self.quiet.end() {
                    info!(probe = probe, "the probe succeeds again");
                }
            }
            (Outcome::Unknown(_) | Outcome::Failure(..) | Outcome::Warning(_), _) => {}
        }
    }

    fn note_unknown(&mut self, outcome: &Outcome, held: Health, now: Instant) {
        let probe = self.settings.name.as_str();
        let Outcome::Unknown(reason) = outcome else {
            if std::mem::take(&mut self.unknown_told) {
                info!(probe = probe, "the probe knows again");
            }
            self.unknown_since = None;
            return;
        };
        let since = *self.unknown_since.get_or_insert(now);
        if !self.unknown_told && now - since >= self.settings.period * UNKNOWN_PERIODS {
            self.unknown_told = true;
            warn!(
                probe = probe,
                reason = %reason,
                health = held.name(),
                "the probe has known nothing for {UNKNOWN_PERIODS} periods; the verdict is held"
            );
        }
    }
}
