//! Rounds: every probe is asked once, all at the same time, and their words add up to a verdict.

use crate::config::probes::{OnFailure, ProbeKind, ProbeSettings};
use crate::config::watched::Watched;
use crate::daemon::rules::groups;
use crate::driver_ready::DriverReady;
use crate::known_devices::KnownOf;
use crate::known_ports::KnownPorts;
use crate::metrics::Metrics;
use crate::policy::group::GroupRule;
use crate::policy::outcome::{Health, Outcome, Reason};
use crate::policy::probe_verdict::{ProbeRule, ProbeVerdict, Thresholds};
use crate::policy::repeats::{Events, Repeats, Spacing};
use crate::policy::round::{Rounds, Timing, no_thread};
use crate::probe::Probe;
use crate::probe::csi::Csi;
use crate::probe::exec::Exec;
use crate::probe::gpu::Gpu;
use crate::probe::health_file::HealthFile;
use crate::probe::join::join_all;
use crate::probe::kmsg::Kmsg;
use crate::probe::lane::Abandoned;
use crate::probe::nvme::Nvme;
use crate::probe::observed::Observed;
use crate::probe::rdma::Rdma;
use std::future::{Future, poll_fn};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::time::Instant;

/// What one probe said in a round.
#[derive(Debug, Clone)]
pub(super) struct Word {
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
    pub(super) observed: Option<Arc<Observed>>,
}

/// What is asked, and what it said last.
pub(super) struct Asking {
    pub(super) probes: Vec<Asked>,
    groups: Vec<GroupRule>,
}

/// One probe.
pub(super) struct Asked {
    pub(super) settings: ProbeSettings,
    pub(super) word: Option<Word>,
    verdict: ProbeVerdict,
    repeats: Repeats,
    kind: Kind,
}

enum Kind {
    HealthFile(Box<HealthFile>),
    Csi(Csi),
    Exec(Exec),
    Rdma(Box<Rdma>),
    Nvme(Box<Nvme>),
    Gpu(Box<Gpu>),
    Kmsg(Box<Kmsg>),
}

/// Why a probe is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Due,
    Changed,
}

/// What turns a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counting {
    /// One word each: the verdict is that of the last round alone.
    LastRound,
    /// As many in a row as each probe's thresholds say.
    Thresholds,
}

impl Asking {
    pub(super) fn new(watched: Watched, counting: Counting) -> Self {
        let groups = groups(&watched);
        // Nobody reads these figures.
        let ready = DriverReady::new(Metrics::new());
        let probes = watched.probes.into_iter().map(|settings| Asked::new(settings, counting, &ready)).collect();
        Self { probes, groups }
    }

    /// Asks every probe once. Dropping it kills the commands that run.
    pub(super) async fn round(&mut self) {
        let rounds = self
            .probes
            .iter_mut()
            .map(|probe| -> Pin<Box<dyn Future<Output = ()> + '_>> { Box::pin(probe.ask(Why::Due)) });
        join_all(rounds.collect()).await;
    }

    /// Waits until a probe has a reason to be asked before its time; which one. Cancelling it loses nothing.
    pub(super) async fn changed(&mut self) -> usize {
        let changes = self.probes.iter_mut().map(|probe| Box::pin(probe.changed()));
        let mut changes: Vec<_> = changes.collect();
        poll_fn(|context| {
            let at = changes.iter_mut().position(|change| change.as_mut().poll(context).is_ready());
            at.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Asks the probe of this number alone, after a change.
    pub(super) async fn ask_again(&mut self, number: usize) {
        if let Some(probe) = self.probes.get_mut(number) {
            probe.ask(Why::Changed).await;
        }
    }

    /// All groups must pass; one that cannot any more decides.
    pub(super) fn health(&self) -> Health {
        add_up(&self.groups, &self.verdicts())
    }

    /// The verdict of the last round alone.
    pub(super) fn round_health(&self) -> Health {
        add_up(&self.groups, &self.alone())
    }

    /// The probe that speaks for the last round: the one that keeps it from being healthy, else one that warns.
    pub(super) fn speaker(&self) -> Option<&Asked> {
        let alone = self.alone();
        let of = |wanted: Health| {
            let group = self.groups.iter().find(|group| group.health(&alone) == wanted)?;
            group
                .members
                .iter()
                .copied()
                .find(|member| alone.get(*member).is_some_and(|probe| probe.health() == wanted))
        };
        let warns = || {
            let warns = |probe: &Asked| matches!(probe.outcome(), Some(Outcome::Warning(_)));
            self.probes.iter().position(warns)
        };
        of(Health::Unhealthy).or_else(|| of(Health::Unknown)).or_else(warns).and_then(|at| self.probes.get(at))
    }

    /// The probes that keep the verdict from being healthy.
    pub(super) fn missing(&self) -> Vec<&Asked> {
        let verdicts = self.verdicts();
        let open = self.groups.iter().filter(|group| group.health(&verdicts) != Health::Healthy);
        let members = open.flat_map(|group| &group.members).filter_map(|member| self.probes.get(*member));
        members.filter(|probe| probe.verdict.health() != Health::Healthy).collect()
    }

    fn alone(&self) -> Vec<ProbeVerdict> {
        self.probes.iter().map(Asked::alone).collect()
    }

    fn verdicts(&self) -> Vec<ProbeVerdict> {
        self.probes.iter().map(|probe| probe.verdict.clone()).collect()
    }
}

fn add_up(groups: &[GroupRule], probes: &[ProbeVerdict]) -> Health {
    let healths: Vec<Health> = groups.iter().map(|group| group.health(probes)).collect();
    if healths.contains(&Health::Unhealthy) {
        Health::Unhealthy
    } else if healths.contains(&Health::Unknown) {
        Health::Unknown
    } else {
        Health::Healthy
    }
}

impl Asked {
    fn new(settings: ProbeSettings, counting: Counting, ready: &DriverReady) -> Self {
        let thresholds = match counting {
            Counting::LastRound => ONE,
            Counting::Thresholds => settings.thresholds,
        };
        let kind = match &settings.kind {
            ProbeKind::HealthFile { path, limits } => Kind::HealthFile(Box::new(HealthFile::new(path, *limits))),
            ProbeKind::Csi { socket } => Kind::Csi(Csi::new(socket, ready.clone())),
            ProbeKind::Exec { command } => Kind::Exec(Exec::new(command)),
            ProbeKind::Nvme(nvme) => Kind::Nvme(Box::new(Nvme::new(nvme, KnownOf::in_memory()))),
            ProbeKind::Gpu(gpu) => Kind::Gpu(Box::new(Gpu::new(gpu, KnownOf::in_memory()))),
            ProbeKind::Kmsg(kmsg) => Kind::Kmsg(Box::new(Kmsg::new(kmsg))),
            ProbeKind::Rdma(rdma) => Kind::Rdma(Box::new(Rdma::new(rdma, KnownPorts::in_memory()))),
        };
        let verdict = ProbeVerdict::new(rule(&settings, thresholds));
        let spacing = Spacing { confirm_interval: settings.confirm_interval, period: settings.period };
        Self { settings, word: None, verdict, repeats: Repeats::new(spacing), kind }
    }

    pub(super) fn outcome(&self) -> Option<&Outcome> {
        self.word.as_ref().map(|word| &word.outcome)
    }

    /// Successes in a row, and how many it takes.
    pub(super) fn successes(&self) -> (u32, u32) {
        (self.verdict.successes(), self.verdict.rule().thresholds.success.get())
    }

    pub(super) fn only_warns(&self) -> bool {
        self.settings.on_failure == OnFailure::Warn
    }

    async fn changed(&mut self) {
        match &mut self.kind {
            Kind::HealthFile(probe) => probe.changed().await,
            Kind::Csi(probe) => probe.changed().await,
            Kind::Exec(probe) => probe.changed().await,
            Kind::Rdma(probe) => probe.changed().await,
            Kind::Nvme(probe) => probe.changed().await,
            Kind::Gpu(probe) => probe.changed().await,
            Kind::Kmsg(probe) => probe.changed().await,
        }
    }

    /// Whether the probe is told to look again, rather than of news.
    fn looks_again(&self) -> bool {
        fn of<P: Probe>(_: &P) -> bool {
            P::EVENTS == Events::LookAgain
        }
        match &self.kind {
            Kind::HealthFile(probe) => of(probe.as_ref()),
            Kind::Csi(probe) => of(probe),
            Kind::Exec(probe) => of(probe),
            Kind::Rdma(probe) => of(probe.as_ref()),
            Kind::Nvme(probe) => of(probe.as_ref()),
            Kind::Gpu(probe) => of(probe.as_ref()),
            Kind::Kmsg(probe) => of(probe.as_ref()),
        }
    }

    async fn ask(&mut self, why: Why) {
        let timeout = self.settings.timeout;
        let started = Instant::now();
        let said = match &mut self.kind {
            Kind::HealthFile(probe) => ask(probe.as_mut(), timeout).await,
            Kind::Csi(probe) => ask(probe, timeout).await,
            Kind::Exec(probe) => ask(probe, timeout).await,
            Kind::Rdma(probe) => ask(probe.as_mut(), timeout).await,
            Kind::Nvme(probe) => ask(probe.as_mut(), timeout).await,
            Kind::Gpu(probe) => ask(probe.as_mut(), timeout).await,
            Kind::Kmsg(probe) => ask(probe.as_mut(), timeout).await,
        };
        let took = started.elapsed();
        let stopped = Rounds::new(timeout).stopped(Timing { late: Duration::ZERO, took });
        let said = match (stopped, said) {
            (Some(stopped), _) => Some((stopped, None)),
            (None, Said::Outcome(outcome, observed)) => Some((outcome, observed)),
            (None, Said::NoAnswer) => Some((no_answer(&self.settings), None)),
            (None, Said::NothingNew) => None,
        };
        match (said, &mut self.word) {
            (Some((outcome, observed)), _) => {
                let now = started.into_std();
                if why == Why::Due || !self.looks_again() || self.repeats.counts(&outcome, now) {
                    self.repeats.counted(&outcome, now);
                    self.verdict.observe(outcome.clone(), now);
                }
                self.word = Some(Word { outcome, took, observed });
            }
            // A health file that nobody has written again says nothing twice.
            (None, Some(word)) => word.took = took,
            (None, None) => {}
        }
    }

    fn alone(&self) -> ProbeVerdict {
        let mut verdict = ProbeVerdict::new(rule(&self.settings, ONE));
        if let Some(outcome) = self.outcome() {
            verdict.observe(outcome.clone(), Instant::now().into_std());
        }
        verdict
    }
}

const ONE: Thresholds = Thresholds { failure: NonZeroU32::MIN, success: NonZeroU32::MIN };

fn rule(settings: &ProbeSettings, thresholds: Thresholds) -> ProbeRule {
    ProbeRule { name: settings.name.clone(), asks: String::new(), thresholds }
}

enum Said {
    Outcome(Outcome, Option<Arc<Observed>>),
    NoAnswer,
    NothingNew,
}

async fn ask(probe: &mut impl Probe, timeout: Duration) -> Said {
    let started = Instant::now().into_std();
    match probe.look(timeout).await {
        Ok(seen) => match probe.judge(seen, started) {
            Some(outcome) => Said::Outcome(outcome, probe.observed()),
            None => Said::NothingNew,
        },
        Err(Abandoned::NoThread(why)) => Said::Outcome(no_thread(why), None),
        Err(Abandoned::Late) => Said::NoAnswer,
    }
}

/// Silence is its own outcome here, where nobody counts how often.
fn no_answer(settings: &ProbeSettings) -> Outcome {
    let limit = settings.timeout;
    let message = match &settings.kind {
        ProbeKind::Exec { command } => {
            format!("{} did not end within {limit:?} and was killed", command.program.to_string_lossy())
        }
        ProbeKind::HealthFile { path, .. } => format!("{} could not be read within {limit:?}", path.display()),
        ProbeKind::Nvme(nvme) => format!("{} did not answer within {limit:?}", nvme.host.sysfs.display()),
        ProbeKind::Gpu(gpu) => format!("{} did not answer within {limit:?}", gpu.host.sysfs.display()),
        ProbeKind::Kmsg(kmsg) => format!("{} did not answer within {limit:?}", kmsg.host.dev.display()),
        ProbeKind::Rdma(rdma) => format!("{} did not answer within {limit:?}", rdma.host.sysfs.display()),
        ProbeKind::Csi { socket } => format!("the driver at {} did not answer within {limit:?}", socket.display()),
    };
    Outcome::Unknown(Reason::new("NotAnswering", message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::probes::{GroupSettings, Require};
    use crate::probe::exec::Command;

    fn exec(name: &str, script: &str) -> ProbeSettings {
        let command =
            Command { program: "sh".into(), arguments: vec!["-c".into(), script.into()], environment: Vec::new() };
        let two = NonZeroU32::new(2).unwrap();
        ProbeSettings {
            name: name.into(),
            kind: ProbeKind::Exec { command },
            period: Duration::from_secs(10),
            timeout: Duration::from_secs(20),
            confirm_interval: Duration::from_secs(1),
            thresholds: Thresholds { failure: two, success: two },
            on_failure: OnFailure::Fail,
        }
    }

    fn watched(probes: Vec<ProbeSettings>, any: &[&str]) -> Watched {
        let probes_of = any.iter().map(ToString::to_string).collect();
        let group = GroupSettings { name: "g".into(), probes: probes_of, require: Require::Any };
        Watched { probes, groups: if any.is_empty() { vec![] } else { vec![group] }, warnings: vec![] }
    }

    #[tokio::test]
    async fn one_of_an_any_group_is_enough_and_the_rest_must_all_pass() {
        let both = || vec![exec("a", "echo cut; exit 1"), exec("b", "exit 0")];
        let mut any = Asking::new(watched(both(), &["a", "b"]), Counting::LastRound);
        any.round().await;
        assert_eq!(any.health(), Health::Healthy);
        assert!(any.speaker().is_none() && any.missing().is_empty());
        let mut each = Asking::new(watched(both(), &[]), Counting::LastRound);
        each.round().await;
        assert_eq!(each.health(), Health::Unhealthy);
        assert_eq!(each.speaker().unwrap().settings.name, "a");
    }

    #[tokio::test]
    async fn thresholds_count_where_they_are_asked_to() {
        let mut asking = Asking::new(watched(vec![exec("a", "exit 1")], &[]), Counting::Thresholds);
        asking.round().await;
        assert_eq!((asking.health(), asking.round_health()), (Health::Unknown, Health::Unhealthy));
        asking.round().await;
        assert_eq!(asking.health(), Health::Unhealthy);
    }

    #[tokio::test]
    async fn probes_run_at_the_same_time_and_what_only_warns_has_no_say() {
        let started = Instant::now();
        let mut warn = exec("w", "sleep 1; exit 1");
        warn.on_failure = OnFailure::Warn;
        let mut asking =
            Asking::new(watched(vec![exec("a", "sleep 1"), exec("b", "sleep 1"), warn], &[]), Counting::LastRound);
        asking.round().await;
        assert!(started.elapsed() < Duration::from_millis(2500));
        assert_eq!(asking.health(), Health::Healthy);
        assert_eq!(asking.probes[2].outcome().unwrap().name(), "failure");
    }
}
