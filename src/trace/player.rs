//! Plays a trace through the real probes and rules. Time is counted, not waited for: ten minutes pass in a moment.

use super::host::Host;
use super::link_events::tells;
use super::settings::lead;
use super::timeline::{End, Happening, Played, What};
use super::{Change, Offset, Step, Trace};
use crate::config::probes::{ProbeKind, ProbeSettings};
use crate::config::settings::Health as Settings;
use crate::config::watched::Watched;
use crate::daemon::rules::{groups, rules};
use crate::known_ports::KnownPorts;
use crate::policy::admission::{Admission, Evidence};
use crate::policy::health::{Change as Turn, HealthPolicy};
use crate::policy::kernel_log::Since;
use crate::policy::outcome::Outcome;
use crate::policy::pace::{Pace, Schedule};
use crate::policy::reaction::{Facts, ReactionPolicy};
use crate::policy::registration::{Action, Event, Registration, RegistrationTimings, State};
use crate::policy::repeats::{Repeats, Spacing};
use crate::policy::rereads::Rereads;
use crate::policy::volumes::InUse;
use crate::probe::Probe;
use crate::probe::gpu::Gpu;
use crate::probe::health_file::HealthFile;
use crate::probe::kmsg::Kmsg;
use crate::probe::kmsg::log::Line;
use crate::probe::lane::Abandoned;
use crate::probe::nvme::Nvme;
use crate::probe::rdma::Rdma;
use std::io;
use std::time::{Duration, Instant};

/// More rounds take minutes, and are a mistake in the settings.
const MAX_ROUNDS: u64 = 1_000_000;

/// Reading a temporary folder that takes so long is no word about the hardware.
const LOOK_LIMIT: Duration = Duration::from_secs(60);

/// Why a trace was not played to its end.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    /// The made-up host cannot be made.
    #[error("cannot write the trace's tree to a temporary folder")]
    Host(#[from] io::Error),
    /// This machine is too busy.
    #[error("reading the trace's tree took over {LOOK_LIMIT:?}: is this machine overloaded?")]
    Slow,
    /// The probes' periods are too short for it.
    #[error("the trace takes over {MAX_ROUNDS} rounds of probes: give them longer periods")]
    TooManyRounds,
    /// Nothing is left to ask.
    #[error("none of the probes can be played: {}", .0.join("; "))]
    NoProbes(Vec<String>),
}

/// Plays `trace` with these settings. `in_use` is what is assumed of volumes on the node.
///
/// # Errors
/// Why it could not be played to its end.
pub async fn play(trace: &Trace, settings: &Settings, in_use: InUse) -> Result<Played, PlayError> {
    let host = Host::new()?;
    let mut watched =
        Watched { probes: settings.probes.clone(), groups: settings.groups.clone(), warnings: Vec::new() };
    let notes = lead(&mut watched, trace, &host);
    if watched.probes.is_empty() {
        return Err(PlayError::NoProbes(notes));
    }
    let periods =
        watched.probes.iter().map(|probe| trace.end.since(Offset(0)).as_nanos() / probe.period.as_nanos().max(1));
    if periods.sum::<u128>() > u128::from(MAX_ROUNDS) {
        return Err(PlayError::TooManyRounds);
    }
    let start = tokio::time::Instant::now().into_std();
    let mut agent = Agent {
        policy: HealthPolicy::new(rules(&watched), groups(&watched), settings.hold, start),
        reactions: ReactionPolicy::new(settings.rules, start, settings.start_grace),
        registration: Registration::new(RegistrationTimings::default(), start),
        in_use,
        next_decision: None,
        fenced: false,
        admitted: Admission::Wait,
        registered: false,
        withdrawn_at: None,
        timeline: Timeline { start, root: host.path().to_string_lossy().into_owned(), happenings: Vec::new() },
    };
    let known = KnownPorts::in_memory();
    let mut probes: Vec<Asked> = watched.probes.iter().map(|probe| Asked::new(probe, &known, start)).collect();
    let mut steps = trace.steps.iter().peekable();
    let (mut now, mut rounds) = (start, 0);
    let end = start + trace.end.since(Offset(0));
    loop {
        while let Some(step) = steps.next_if(|step| at(step, start) <= now) {
            apply(step, &host, &mut probes, start)?;
        }
        for (number, probe) in probes.iter_mut().enumerate() {
            if probe.wakes_at() > now {
                continue;
            }
            rounds += 1;
            if rounds > MAX_ROUNDS {
                return Err(PlayError::TooManyRounds);
            }
            if let Some(outcome) = probe.round(now).await.map_err(|_abandoned| PlayError::Slow)? {
                agent.hear(number, probe, outcome, now);
            }
        }
        agent.go_on(now);
        let waits = [agent.deadline(now), steps.peek().map(|step| at(step, start))];
        let wakes = probes.iter().map(Asked::wakes_at);
        let Some(next) = waits.into_iter().flatten().chain(wakes).min().filter(|next| *next <= end) else { break };
        now = next.max(now);
    }
    let end = End {
        at: trace.end,
        health: agent.policy.health(),
        fenced: agent.fenced,
        registered: agent.registered,
        release_at: agent.policy.deadline(end).map(|at| agent.timeline.offset(at)),
        rounds,
    };
    Ok(Played { timeline: agent.timeline.happenings, end, notes })
}

/// What was there before the start is there at the start.
fn at(step: &Step, start: Instant) -> Instant {
    start + step.at.since(Offset(0))
}

fn apply(step: &Step, host: &Host, probes: &mut [Asked], start: Instant) -> io::Result<()> {
    let mut told = false;
    for change in &step.changes {
        match change {
            Change::Path(path, entry) => {
                host.put(path, entry.as_ref(), step.at)?;
                let file = path.strip_prefix("health/").map(|name| host.health_file(name));
                for probe in probes.iter_mut() {
                    probe.woken |= file.is_some() && probe.reads == file;
                }
                // What was there at the start did not change.
                told |= step.at > Offset(0) && tells(host.path(), path);
            }
            Change::Kernel(text) => {
                let history = step.at < Offset(0);
                let at = if history { start.checked_sub(Offset(0).since(step.at)) } else { Some(at(step, start)) };
                for probe in probes.iter_mut() {
                    probe.hand_over(&Line { at, history, text: text.clone() });
                }
            }
        }
    }
    for rereads in probes.iter_mut().filter_map(|probe| probe.rereads.as_mut()).filter(|_| told) {
        rereads.event(at(step, start));
    }
    Ok(())
}

/// One probe, and when it runs.
struct Asked {
    settings: ProbeSettings,
    kind: Kind,
    pace: Pace,
    /// Something happened that it would be woken by.
    woken: bool,
    /// The looks that follow such a thing, if it only says "look again".
    rereads: Option<Rereads>,
    repeats: Repeats,
    /// The file that it watches.
    reads: Option<std::path::PathBuf>,
    last: Option<(&'static str, Option<&'static str>)>,
}

enum Kind {
    HealthFile(Box<HealthFile>),
    Rdma(Box<Rdma>),
    Nvme(Box<Nvme>),
    Gpu(Box<Gpu>, Option<Since>),
    Kmsg(Box<Kmsg>, Since),
    /// It has no part in a trace.
    Nothing,
}

impl Asked {
    fn new(settings: &ProbeSettings, known: &KnownPorts, start: Instant) -> Self {
        let kind = match &settings.kind {
            ProbeKind::HealthFile { path, limits } => Kind::HealthFile(Box::new(HealthFile::new(path, *limits))),
            ProbeKind::Rdma(rdma) => Kind::Rdma(Box::new(Rdma::replayed(rdma, known.clone()))),
            ProbeKind::Nvme(nvme) => Kind::Nvme(Box::new(Nvme::replayed(nvme))),
            ProbeKind::Gpu(gpu) => Kind::Gpu(Box::new(Gpu::replayed(gpu)), gpu.xid.as_ref().map(|xid| xid.since)),
            ProbeKind::Kmsg(kmsg) => Kind::Kmsg(Box::new(Kmsg::replayed(kmsg)), kmsg.since),
            ProbeKind::Csi { .. } | ProbeKind::Exec { .. } => Kind::Nothing,
        };
        let reads = if let ProbeKind::HealthFile { path, .. } = &settings.kind { Some(path.clone()) } else { None };
        let rereads = matches!(kind, Kind::Rdma(_)).then(Rereads::default);
        let spacing = Spacing { confirm_interval: settings.confirm_interval, period: settings.period };
        let schedule = Schedule {
            period: settings.period,
            timeout: settings.timeout,
            confirm_interval: settings.confirm_interval,
            failure_threshold: settings.thresholds.failure,
        };
        Self {
            settings: settings.clone(),
            kind,
            pace: Pace::new(schedule, start),
            woken: false,
            rereads,
            repeats: Repeats::new(spacing),
            reads,
            last: None,
        }
    }

    fn hand_over(&mut self, line: &Line) {
        let counts = |since: &Since| !line.history || *since == Since::Boot;
        self.woken |= match &mut self.kind {
            Kind::Kmsg(kmsg, since) if counts(since) => kmsg.hand_over(line.clone()),
            Kind::Gpu(gpu, Some(since)) if counts(since) => gpu.hand_over(line.clone()),
            Kind::Kmsg(..) | Kind::Gpu(..) | Kind::HealthFile(_) | Kind::Rdma(_) | Kind::Nvme(_) | Kind::Nothing => {
                false
            }
        };
    }

    fn wakes_at(&self) -> Instant {
        let events_from = self.pace.events_from();
        let woken = self.woken.then_some(events_from);
        let again = self.rereads.as_ref().and_then(Rereads::due).map(|due| due.max(events_from));
        woken.into_iter().chain(again).fold(self.pace.due(), Instant::min)
    }

    async fn round(&mut self, now: Instant) -> Result<Option<Outcome>, Abandoned> {
        let planned = (self.pace.due() <= now).then(|| self.pace.due());
        self.woken = false;
        let again = self.rereads.as_mut().filter(|_| planned.is_none());
        let looks_again = again.map(|rereads| rereads.begin(now)).is_some();
        let outcome = match &mut self.kind {
            Kind::HealthFile(probe) => ask(probe.as_mut(), now).await,
            Kind::Rdma(probe) => ask(probe.as_mut(), now).await,
            Kind::Nvme(probe) => ask(probe.as_mut(), now).await,
            Kind::Gpu(probe, _) => ask(probe.as_mut(), now).await,
            Kind::Kmsg(probe, _) => ask(probe.as_mut(), now).await,
            Kind::Nothing => Ok(None),
        }?;
        let outcome = outcome.filter(|word| !looks_again || self.repeats.counts(word, now));
        if let Some(word) = &outcome {
            self.repeats.counted(word, now);
        }
        self.pace.ran(planned, now, now);
        self.pace.said(outcome.as_ref(), now);
        Ok(outcome)
    }
}

async fn ask(probe: &mut impl Probe, now: Instant) -> Result<Option<Outcome>, Abandoned> {
    let seen = probe.look(LOOK_LIMIT).await?;
    Ok(probe.judge(seen, now))
}

/// All that follows from the probes' words, with a driver and a kubelet that answer at once.
struct Agent {
    policy: HealthPolicy,
    reactions: ReactionPolicy,
    registration: Registration,
    in_use: InUse,
    next_decision: Option<Instant>,
    fenced: bool,
    admitted: Admission,
    registered: bool,
    withdrawn_at: Option<Instant>,
    timeline: Timeline,
}

impl Agent {
    fn hear(&mut self, number: usize, probe: &mut Asked, outcome: Outcome, now: Instant) {
        let word = (outcome.name(), outcome.reason().map(|reason| reason.code));
        if probe.last.replace(word) != Some(word) {
            self.timeline.push(now, What::Outcome { probe: probe.settings.name.clone(), outcome: outcome.clone() });
        }
        let turn = self.policy.observe(number, outcome, now);
        self.tell(turn, now);
        self.decide(now);
    }

    /// Time alone may change something.
    fn go_on(&mut self, now: Instant) {
        let turn = self.policy.poll(now);
        self.tell(turn, now);
        self.decide(now);
        if self.registration.deadline().is_some_and(|at| at <= now) {
            self.register(Event::Tick, now);
        }
    }

    fn deadline(&self, now: Instant) -> Option<Instant> {
        let waits = [self.policy.deadline(now), self.next_decision, self.registration.deadline()];
        waits.into_iter().flatten().filter(|at| *at > now).min()
    }

    fn tell(&mut self, turn: Option<Turn>, now: Instant) {
        if let Some(Turn { from, to, cause }) = turn {
            let hold = self.policy.hold();
            self.timeline.push(now, What::Verdict { from, to, cause, hold });
        }
    }

    fn decide(&mut self, now: Instant) {
        let evidence = Evidence {
            health: self.policy.health(),
            all_heard: self.policy.all_heard(),
            suspect: self.policy.suspect(),
        };
        let facts = Facts { evidence, since: self.policy.since(), in_use: self.in_use };
        let decision = self.reactions.decide(facts, now);
        self.next_decision = decision.next;
        if std::mem::replace(&mut self.fenced, decision.fenced) != decision.fenced {
            self.timeline.push(now, What::Fence { up: decision.fenced });
        }
        if std::mem::replace(&mut self.admitted, decision.admission) != decision.admission {
            match decision.admission {
                Admission::Wait => {}
                Admission::Show => self.register(Event::Wanted, now),
                Admission::Withhold => self.register(Event::Unwanted, now),
            }
        }
    }

    fn register(&mut self, event: Event, now: Instant) {
        let mut action = self.registration.on(event, now);
        while let Some(taken) = action {
            action = match taken {
                Action::AskDriver => self.registration.on(Event::DriverAnswered, now),
                Action::Publish(_) => {
                    let next = self.registration.on(Event::Published, now);
                    let next = next.or(self.registration.on(Event::GetInfo, now));
                    next.or(self.registration.on(Event::Accepted, now))
                }
                Action::Withdraw => None,
            };
        }
        let registered = self.registration.state() == State::Registered;
        if std::mem::replace(&mut self.registered, registered) != registered {
            let withdrawn = self.withdrawn_at.take();
            let after = withdrawn.filter(|_| registered).map(|at| now.saturating_duration_since(at));
            self.withdrawn_at = (!registered).then_some(now);
            self.timeline.push(now, What::Registration { registered, after });
        }
    }
}

/// What was told so far.
struct Timeline {
    start: Instant,
    /// Where the made-up host lies, which is nobody's business.
    root: String,
    happenings: Vec<Happening>,
}

impl Timeline {
    fn push(&mut self, now: Instant, mut what: What) {
        match &mut what {
            What::Outcome {
                outcome: Outcome::Failure(reason, _) | Outcome::Warning(reason) | Outcome::Unknown(reason),
                ..
            }
            | What::Verdict { cause: Some((_, reason)), .. } => {
                reason.message = reason.message.replace(&self.root, "");
            }
            What::Outcome { .. } | What::Verdict { .. } | What::Fence { .. } | What::Registration { .. } => {}
        }
        self.happenings.push(Happening { at: self.offset(now), what });
    }

    fn offset(&self, at: Instant) -> Offset {
        Offset::after(at.saturating_duration_since(self.start))
    }
}
