//! The driver's place in the kubelet: shows, heals and withdraws the registration socket as `policy::registration` says.

pub mod check;
pub mod kept_socket;
pub mod server;
pub mod socket;

mod path;
mod show;
mod status;
mod words;

pub use status::{Phase, Status};

use crate::api::csi::NodeGetInfoResponse;
use crate::grpc::connect::{CallError, chain, fit_for_a_line};
use crate::grpc::driver;
use crate::metrics::Metrics;
use crate::parts::{Fatal, Parts};
use crate::path_watch::PathWatch;
use crate::policy::admission::Admission;
use crate::policy::backoff::Backoff;
use crate::policy::registration::{Action, Event, Registration, RegistrationTimings, State};
use crate::policy::topology::Collision;
use crate::quiet::Quiet;
use path::PathLooks;
use server::{KubeletCall, ServedCall};
use socket::{FileId, SocketPath};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

/// How often the path is looked at although no event came: inotify can lose some.
const RECHECK: Duration = Duration::from_secs(5);

/// Longest time that one NodeGetInfo may take: the kubelet's own limit.
const NODE_INFO_DEADLINE: Duration = Duration::from_secs(120);

/// What the first NodeGetInfo is given; doubled with each that was too slow.
const FIRST_NODE_INFO_DEADLINE: Duration = Duration::from_secs(10);

/// Whom to register, and where.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The driver's own socket.
    pub driver_socket: PathBuf,
    /// The driver's name, as it gave it.
    pub driver_name: String,
    /// What the kubelet is told to dial.
    pub endpoint: String,
    /// What the proxy adds to the driver's topology.
    pub topology: BTreeMap<String, String>,
    /// Where the registration socket goes.
    pub socket: SocketPath,
    /// The waits.
    pub timings: RegistrationTimings,
}

type Asking = Pin<Box<dyn Future<Output = Result<NodeGetInfoResponse, CallError>> + Send>>;

/// The part that keeps the registration.
pub struct RegistrationPart {
    settings: Settings,
    parts: Parts,
    policy: Registration,
    status: watch::Sender<Status>,
    metrics: Metrics,
    calls: mpsc::Sender<ServedCall>,
    next_serial: u64,
    /// The socket we serve, whoever holds the path.
    served: Option<Served>,
    asking: Option<Asking>,
    node_info_deadline: Backoff,
    next_deadline: Duration,
    last_info: Option<NodeGetInfoResponse>,
    looks: PathLooks,
    watch: PathWatch,
    /// The last try to show the socket failed.
    lost: bool,
    trouble: Option<String>,
    driver_quiet: Quiet,
    refusal_quiet: Quiet,
    publish_quiet: Quiet,
    stuck_quiet: Quiet,
    other_quiet: Quiet,
    /// The last try to withdraw the socket failed.
    stuck: bool,
}

struct Served {
    id: FileId,
    serial: u64,
    /// Dropped after the unlink: it keeps the inode from being reused.
    stop: CancellationToken,
}

impl RegistrationPart {
    /// Nothing is shown yet. `status` and `metrics` are told about every change.
    pub fn new(
        settings: Settings,
        parts: &Parts,
        status: watch::Sender<Status>,
        metrics: Metrics,
    ) -> (Self, mpsc::Receiver<ServedCall>) {
        let (calls, received) = mpsc::channel(16);
        metrics.set_registered(false);
        let mut node_info_deadline = Backoff::new(FIRST_NODE_INFO_DEADLINE, NODE_INFO_DEADLINE);
        let part = Self {
            policy: Registration::new(settings.timings.clone(), Instant::now().into_std()),
            looks: PathLooks::new(settings.socket.clone(), settings.driver_name.clone()),
            watch: PathWatch::new(settings.socket.path()),
            settings,
            parts: parts.clone(),
            status,
            metrics,
            calls,
            next_serial: 0,
            served: None,
            asking: None,
            next_deadline: node_info_deadline.pause(),
            node_info_deadline,
            last_info: None,
            lost: false,
            trouble: None,
            driver_quiet: Quiet::default(),
            refusal_quiet: Quiet::default(),
            publish_quiet: Quiet::default(),
            stuck_quiet: Quiet::default(),
            other_quiet: Quiet::default(),
            stuck: false,
        };
        (part, received)
    }

    /// Follows the verdict, the kubelet and the folder until all must end; then withdraws the socket.
    ///
    /// # Errors
    /// When something that is not a socket holds the path.
    pub async fn run(
        mut self,
        mut received: mpsc::Receiver<ServedCall>,
        mut admission: watch::Receiver<Admission>,
    ) -> Result<(), Fatal> {
        let stop = self.parts.stop().clone();
        let mut recheck = tokio::time::interval(RECHECK);
        recheck.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        admission.mark_changed();
        let result = loop {
            let deadline = self.policy.deadline().map(Instant::from_std);
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => break Ok(()),
                Ok(()) = admission.changed() => match *admission.borrow_and_update() {
                    Admission::Show => Some(Event::Wanted),
                    Admission::Withhold => Some(Event::Unwanted),
                    Admission::Wait => None,
                },
                Some(call) = received.recv() => self.heard(call),
                answer = answer(&mut self.asking) => Some(self.answered(answer)),
                () = self.watch.changed() => self.look().await?,
                _ = recheck.tick() => self.look().await?,
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.tell_impatience();
                    Some(Event::Tick)
                }
            };
            if let Some(event) = event
                && let Err(error) = self.happened(event).await
            {
                break Err(error);
            }
            self.publish_status();
        };
        self.withdraw().await;
        result
    }

    /// Lets the policy decide and does what it says, until it says nothing more.
    async fn happened(&mut self, event: Event) -> Result<(), Fatal> {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let before = self.policy.state();
            let action = self.policy.on(event, Instant::now().into_std());
            self.tell_change(before);
            match action {
                None => {}
                Some(Action::AskDriver) => self.ask(),
                Some(Action::Withdraw) => self.withdraw().await,
                Some(Action::Publish(rival)) => events.push_back(self.publish(rival).await?),
            }
        }
        Ok(())
    }

    /// What the kubelet said on the socket that we serve now. What it says on a connection to an older one is about a
    /// registration that is no more.
    fn heard(&mut self, call: ServedCall) -> Option<Event> {
        if self.served.as_ref().is_none_or(|served| served.serial != call.serial) {
            return None;
        }
        Some(match call.call {
            KubeletCall::GetInfo => Event::GetInfo,
            KubeletCall::Accepted => {
                self.trouble = None;
                if self.refusal_quiet.end() {
                    info!(driver.name = self.settings.driver_name, "the kubelet accepts the driver again");
                }
                Event::Accepted
            }
            KubeletCall::Refused(text) => {
                self.metrics.count_refusal();
                let help = self.explained(&text);
                if self.refusal_quiet.begin_or_repeat(&text, Instant::now()) {
                    error!(
                        driver.name = self.settings.driver_name,
                        endpoint = self.settings.endpoint,
                        error = text,
                        help,
                        "the kubelet could not register the driver; it will try again by itself"
                    );
                }
                // The kubelet's own words are long, and what they mean is all that one can act on.
                let why = help.unwrap_or_else(|| fit_for_a_line(&text));
                self.trouble = Some(format!("the kubelet refused the driver: {why}"));
                Event::Refused
            }
        })
    }

    /// What the kubelet's refusal means, and what helps, where that is known.
    fn explained(&self, refusal: &str) -> Option<String> {
        let collision = Collision::find(refusal)?;
        let ours = self.settings.topology.get(&collision.key) == Some(&collision.reported);
        Some(collision.explanation(ours))
    }

    fn ask(&mut self) {
        let (socket, deadline) = (self.settings.driver_socket.clone(), self.next_deadline);
        let metrics = self.metrics.clone();
        self.asking = Some(Box::pin(async move {
            let began = Instant::now();
            let answer = driver::node_info(&socket, deadline).await;
            metrics.observe_call(driver::NODE_GET_INFO, &answer, began.elapsed());
            answer
        }));
    }

    fn answered(&mut self, answer: Result<NodeGetInfoResponse, CallError>) -> Event {
        self.asking = None;
        match answer {
            Ok(info) if info.node_id.is_empty() => {
                self.driver_trouble("the driver's NodeGetInfo gives an empty node ID, which the kubelet refuses", None)
            }
            Ok(info) => {
                if self.driver_quiet.end() {
                    info!(driver.name = self.settings.driver_name, "the driver answers NodeGetInfo again");
                }
                if let Some(before) = &self.last_info
                    && *before != info
                {
                    info!(
                        driver.name = self.settings.driver_name,
                        before = ?before,
                        after = ?info,
                        "the driver tells other facts about this node than at its last registration"
                    );
                }
                self.last_info = Some(info);
                self.trouble = None;
                Event::DriverAnswered
            }
            Err(error) => {
                if matches!(error, CallError::Deadline { .. }) {
                    self.next_deadline = self.node_info_deadline.pause();
                }
                self.driver_trouble(
                    "the driver does not answer NodeGetInfo, so the kubelet would refuse it; asking again",
                    Some(&error),
                )
            }
        }
    }

    fn driver_trouble(&mut self, what: &'static str, error: Option<&CallError>) -> Event {
        let text = error.map_or_else(|| what.to_owned(), chain);
        if self.driver_quiet.begin_or_repeat(&text, Instant::now()) {
            warn!(
                driver.name = self.settings.driver_name,
                socket.path = %self.settings.driver_socket.display(),
                error = text,
                "{what}"
            );
        }
        self.trouble = Some(text);
        Event::DriverFailed
    }

    /// What the path holds, as an event if it can matter now.
    async fn look(&mut self) -> Result<Option<Event>, Fatal> {
        self.watch.adopt(self.watch.target().look());
        match self.policy.state() {
            State::Hidden { .. } if self.policy.wanted() == Some(false) => {
                let path = self.looks.state(self.ours()).await?;
                self.note_other_agent(path);
                Ok(path.map(Event::Path))
            }
            State::Hidden { .. } => Ok(None),
            State::Asking { .. }
            | State::Publishing { .. }
            | State::Shown { .. }
            | State::Answered { .. }
            | State::Registered
            | State::Refused { .. }
            | State::StandingBy => Ok(self.looks.state(self.ours()).await?.map(Event::Path)),
        }
    }

    /// The socket we serve, whoever holds the path.
    fn ours(&self) -> Option<FileId> {
        self.served.as_ref().map(|served| served.id)
    }

    fn publish_status(&self) {
        let status = Status {
            phase: Phase::of(&self.policy, self.trouble.is_some(), self.lost),
            since: self.policy.since(),
            confirmed: self.policy.confirmed(),
            driver_name: Some(self.settings.driver_name.clone()),
            socket: Some(self.settings.socket.path().to_owned()),
            trouble: self.trouble.clone(),
            stuck: self.stuck,
        };
        self.metrics.set_registered(status.phase == Phase::Registered);
        self.status.send_if_modified(|old| {
            let changed = *old != status;
            if changed {
                *old = status;
            }
            changed
        });
    }
}

async fn answer(asking: &mut Option<Asking>) -> Result<NodeGetInfoResponse, CallError> {
    match asking {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}
