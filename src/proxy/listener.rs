//! The proxy socket: beside the driver's, root's alone, and put back when it is lost.

use super::answer::refuse;
use super::downstream::{self, TakesCalls};
use super::forward::{Change, End, Incoming, forward};
use super::gate::{Entry, Gate};
use super::idle::{Call, Idle};
use super::upstream::Upstream;
use super::volumes::{CallUnderWay, Volumes};
use crate::grpc::code;
use crate::grpc::read_driven::ReadDriven;
use crate::metrics::Metrics;
use crate::parts::{Fatal, Parts};
use crate::policy::fence::VolumeMethod;
use crate::quiet::Quiet;
use crate::registration::kept_socket::{KeptSocket, Look};
use crate::registration::socket::{PublishError, SocketPath};
use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream as Std;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, interval};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use tracing::{debug, info, warn};

/// How often the path is looked at. A connection that fails meanwhile is tried again by the kubelet.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// After a failed `accept` (out of descriptors, say), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Who may call, by user id.
pub type AllowedUids = BTreeSet<u32>;

/// What the proxy serves with.
#[derive(Debug, Clone)]
pub struct ProxySettings {
    /// Where the kubelet dials.
    pub socket: SocketPath,
    /// Where the driver listens.
    pub driver_socket: PathBuf,
    /// `--allowed-uids`.
    pub allowed: AllowedUids,
}

/// The proxy, listening but not yet serving.
pub struct Proxy {
    place: KeptSocket,
    driver_socket: PathBuf,
    allowed: AllowedUids,
}

impl Proxy {
    /// Puts the proxy socket in its place, over one that a former agent left or still serves: the newest has it.
    ///
    /// # Errors
    /// [`PublishError`] when it cannot be there. Nothing of anybody else's is touched.
    pub fn listen(settings: ProxySettings) -> Result<Self, PublishError> {
        let ProxySettings { socket, driver_socket, allowed } = settings;
        let place = KeptSocket::publish(socket)?;
        info!(
            socket.path = %place.path().display(),
            driver.socket = %driver_socket.display(),
            "Proxy socket open"
        );
        Ok(Self { place, driver_socket, allowed })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        self.place.path()
    }

    /// Serves until `stop`; then the socket goes, no call is taken any more, and those in flight go on. Connections and calls run
    /// among `connections`.
    pub fn serve(self, gate: Gate, metrics: Metrics, parts: &Parts, connections: &Parts, stop: CancellationToken) {
        let upstream = Upstream::new(&self.driver_socket, connections);
        let callers = Arc::new(Callers {
            upstream,
            gate,
            metrics,
            allowed: self.allowed,
            parts: connections.clone(),
            stop,
            idle: Idle::new(),
        });
        let mut place = self.place;
        parts.spawn("proxy", async move {
            let mut looks = interval(LOOK_EVERY);
            let stop = callers.stop.clone();
            let (mut quiet, mut lost) = (Quiet::default(), Quiet::default());
            loop {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => break,
                    _ = looks.tick() => {
                        callers.idle.shed();
                        keep(&mut place, callers.gate.volumes(), &mut lost).await;
                    }
                    accepted = place.accept() => match accepted {
                        Ok(stream) => {
                            quiet.end();
                            callers.serve(stream);
                        }
                        Err(error) => {
                            if quiet.begin_or_repeat(&error.to_string(), Instant::now()) {
                                warn!(error = &error as &dyn std::error::Error, "cannot accept a connection on the proxy socket");
                            }
                            callers.idle.shed();
                            tokio::time::sleep(ACCEPT_PAUSE).await;
                        }
                    },
                }
            }
            // A successor may have the path; then it stays.
            place.withdraw();
            Ok::<(), Fatal>(())
        });
    }
}

/// Looks after our socket. While a successor has it, that one follows the volumes.
async fn keep(place: &mut KeptSocket, volumes: &Volumes, quiet: &mut Quiet) {
    match place.look().await {
        Look::Ours => {
            quiet.end();
        }
        Look::Theirs => volumes.handed_over(),
        Look::PutBack => {
            volumes.came_back();
            warn!(socket.path = %place.path().display(), "the proxy socket was lost and is in its place again");
        }
        Look::Lost(error) => {
            if quiet.begin_or_repeat(&error.to_string(), Instant::now()) {
                warn!(error = &error as &dyn std::error::Error, "the proxy socket is lost; trying again");
            }
        }
    }
}

/// What each connection needs.
struct Callers {
    upstream: Upstream,
    gate: Gate,
    metrics: Metrics,
    allowed: AllowedUids,
    parts: Parts,
    stop: CancellationToken,
    idle: Idle,
}

impl Callers {
    fn serve(self: &Arc<Self>, stream: Std) {
        // Not by rustix: it wants a process id, and a caller outside our namespace of processes, as the kubelet is, has none here.
        let uid = getsockopt(&stream, PeerCredentials).ok().map(|peer| peer.uid());
        let stream = match ReadDriven::new(stream) {
            Ok(stream) => stream,
            Err(error) => {
                return warn!(
                    error = &error as &dyn std::error::Error,
                    "a connection on the proxy socket cannot be served"
                );
            }
        };
        // Told to go, it ends as at a stop of ours: no new call, and those under way finish.
        let (parts, stop) = (self.parts.clone(), self.stop.child_token());
        let connection = self.idle.enter(stop.clone());
        if !uid.is_some_and(|uid| self.allowed.contains(&uid)) {
            let status = Status::new(Code::PermissionDenied, self.refusal(uid));
            warn!(peer.uid = uid, "a caller on the proxy socket is refused: {}", status.message());
            let refuses: TakesCalls =
                Box::new(move |_, respond| Box::pin(refuse_all(respond, status.clone(), connection.call())));
            // On the heap, because a task is moved several times before it runs.
            drop(self.parts.spawn_connection(Box::pin(downstream::serve(stream, parts, stop, refuses))));
            return;
        }
        let (callers, held) = (Arc::clone(self), self.metrics.proxy_connection());
        let forwards: TakesCalls = Box::new(move |request, respond| {
            let _for_as_long = &held;
            Box::pin(one_call(request, respond, Arc::clone(&callers), connection.call()))
        });
        drop(self.parts.spawn_connection(Box::pin(downstream::serve(stream, parts, stop, forwards))));
    }

    fn refusal(&self, uid: Option<u32>) -> String {
        let allowed = self.allowed.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let Some(uid) = uid else {
            return "csi-warden: the caller's user is not known".to_owned();
        };
        let namespace = match uid {
            65534 => " (which is also how a user of another user namespace looks)",
            _ => "",
        };
        format!("csi-warden: user {uid}{namespace} may not call the CSI driver: --allowed-uids is {allowed}")
    }
}

/// One call, counted, and told at `--v=4` by method, code and time; never a payload, which may carry secrets.
fn one_call(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    callers: Arc<Callers>,
    on_its_connection: Call,
) -> impl Future<Output = End> + Send {
    let arrived = Instant::now();
    let (mut head, body) = request.into_parts();
    let target = std::mem::take(&mut head.uri);
    // On the heap, because a future that awaits it has it several times over.
    let mut call = Box::new(Incoming { head, target, gathered: Bytes::new(), body, arrived });
    async move {
        let _on_its_connection = on_its_connection;
        let Callers { upstream, gate, metrics, .. } = &*callers;
        let _held = metrics.proxied_call();
        let under_way = match admitted(gate, &mut call).await {
            Ok(under_way) => under_way,
            Err(Some(status)) => return refuse(&mut respond, &status),
            Err(None) => return End::Cancelled,
        };
        let change = |answer: &Bytes| gate.changed(answer);
        let change: Option<Change<'_>> = if gate.changes(call.target.path()) { Some(&change) } else { None };
        let end = forward(&mut call, &mut respond, upstream, change).await;
        if let (Some(under_way), Some(code)) = (under_way, end.word()) {
            under_way.ended(code.into());
        }
        let (code, took) = (end.code(), arrived.elapsed());
        metrics.observe_proxied(call.target.path(), code, took);
        debug!(grpc.method = call.target.path(), grpc.code = code::name(code), ?took, "GRPC proxied call");
        end
    }
}

/// What the gate follows of the call; or the status that it answers, if the caller has not hung up.
async fn admitted(gate: &Gate, call: &mut Incoming) -> Result<Option<Box<CallUnderWay>>, Option<Box<Status>>> {
    let entry = match VolumeMethod::of(call.target.path()) {
        Some(method) => Box::pin(gate.enter(method, &mut call.body)).await,
        None if gate.learns_from(call.target.path()) => Box::pin(gate.listen(&mut call.body)).await,
        None => return Ok(None),
    };
    match entry {
        Entry::Pass(gathered, under_way) => {
            call.gathered = gathered;
            Ok(under_way)
        }
        Entry::Refuse(status) => Err(Some(Box::new(status))),
        Entry::HungUp => Err(None),
    }
}

/// Answers every call on the connection with the same refusal.
async fn refuse_all(mut respond: SendResponse<Bytes>, status: Status, _on_its_connection: Call) -> End {
    refuse(&mut respond, &status)
}
