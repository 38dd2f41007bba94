//! Serves the snapshot on a unix socket to the users that may know: root, and the one we run as.

use super::order::{self, FenceAnswer, FenceRequest, Ordered, Orders};
use super::snapshot::{Snapshot, VolumesNow};
use crate::health_view::HealthView;
use crate::http::places::{Answering, Places};
use crate::parts::{Fatal, Parts};
use crate::proxy::gate::FenceUp;
use crate::proxy::volumes::Volumes;
use crate::quiet::Quiet;
use crate::registration::Status;
use crate::registration::kept_socket::{KeptSocket, Look};
use crate::registration::socket::{PublishError, SocketPath};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, interval, timeout};
use tracing::{debug, info, warn};

/// Ends every status socket's name, after the driver's.
pub const SUFFIX: &str = "-warden-status.sock";

/// Connections served at a time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;

/// A client gets this long for its one request and for reading the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// An order has far below 1 KiB.
const MOST_ORDER_BYTES: usize = 4096;

/// How often the path is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// After a failed `accept`, so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What snapshots are taken of.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The registration.
    pub status: watch::Receiver<Status>,
    /// The probes.
    pub health: Option<watch::Receiver<HealthView>>,
    /// Volumes in use, if calls go through us.
    pub volumes: Option<Volumes>,
    /// The fence.
    pub fence: watch::Receiver<Option<FenceUp>>,
    /// Where an operator's word goes; without a proxy there is no fence to speak of.
    pub orders: Option<Orders>,
    /// The agent stays out of the way after crashes of its own.
    pub bypass: bool,
}

impl Sources {
    fn snapshot(&self) -> Snapshot {
        let health = self.health.as_ref().map(|health| health.borrow().clone());
        let volumes = self.volumes.as_ref().map(|volumes| volumes.look(VolumesNow::of));
        let fence = self.orders.is_some().then(|| self.fence.borrow().clone());
        let now = Instant::now().into_std();
        let snapshot = Snapshot::take(&self.status.borrow(), health.as_ref(), fence.as_ref(), volumes, now);
        Snapshot { bypass: self.bypass, ..snapshot }
    }
}

/// Serves at `path` until all must end; the file goes with it. That it cannot be served is a warning: nobody depends on it.
pub fn serve(path: &Path, sources: Sources, parts: &Parts) {
    let socket = match SocketPath::at(path) {
        Ok(socket) => socket,
        Err(error) => {
            warn!(error = &error as &dyn std::error::Error, "no status socket");
            return;
        }
    };
    let mut place = match KeptSocket::publish(socket) {
        Ok(place) => place,
        Err(error @ (PublishError::NotASocket { .. } | PublishError::Os { .. })) => {
            warn!(error = &error as &dyn std::error::Error, "no status socket");
            return;
        }
    };
    info!(socket.path = %path.display(), "status socket open");
    let (connections, stop) = (parts.clone(), parts.stop().clone());
    parts.spawn("status server", async move {
        let (mut places, mut looks, mut quiet) =
            (Places::new(MAX_CONNECTIONS), interval(LOOK_EVERY), Quiet::default());
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                () = places.free() => {}
            }
            tokio::select! {
                () = stop.cancelled() => break,
                _ = looks.tick() => keep(&mut place, &mut quiet).await,
                accepted = place.accept() => match accepted {
                    Ok(stream) => {
                        let stream = match UnixStream::from_std(stream) {
                            Ok(stream) => stream,
                            Err(error) => {
                                debug!(error = &error as &dyn std::error::Error, "a connection on the status socket cannot be served");
                                continue;
                            }
                        };
                        // We answer from memory: whoever has been here for a while waits for nothing of ours.
                        let connection = connections.spawn_connection(one(stream, sources.clone(), stop.clone()));
                        places.take(connection, Answering::default());
                    }
                    Err(error) => {
                        debug!(error = &error as &dyn std::error::Error, "cannot accept a connection on the status socket");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        // A newer agent may have taken the path; then there is nothing to do.
        place.withdraw();
        Ok::<(), Fatal>(())
    });
}

/// Looks after our socket: an operator must find the agent that is left when a newer one has gone.
async fn keep(place: &mut KeptSocket, quiet: &mut Quiet) {
    match place.look().await {
        Look::Ours => {
            quiet.end();
        }
        Look::Theirs => {}
        Look::PutBack => info!(socket.path = %place.path().display(), "status socket open again"),
        Look::Lost(error) => {
            if quiet.begin_or_repeat(&error.to_string(), Instant::now()) {
                warn!(error = &error as &dyn std::error::Error, "the status socket is lost; trying again");
            }
        }
    }
}

async fn one(stream: UnixStream, sources: Sources, stop: tokio_util::sync::CancellationToken) {
    let peer = stream.peer_cred().ok();
    let uid = peer.as_ref().map(tokio::net::unix::UCred::uid);
    let who = format!(
        "uid {} pid {}",
        uid.map_or_else(|| "?".to_owned(), |uid| uid.to_string()),
        peer.and_then(|peer| peer.pid()).map_or_else(|| "?".to_owned(), |pid| pid.to_string())
    );
    let allowed = uid.is_some_and(|uid| uid == 0 || uid == rustix::process::geteuid().as_raw());
    let service = service_fn(move |request| respond(allowed, who.clone(), sources.clone(), request));
    let connection = hyper::server::conn::http1::Builder::new()
        .keep_alive(false)
        .timer(TokioTimer::new())
        .header_read_timeout(CLIENT_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        () = stop.cancelled() => {}
        ended = timeout(CLIENT_TIMEOUT, connection) => match ended {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(error = &error as &dyn std::error::Error, "a connection on the status socket broke"),
            Err(_elapsed) => debug!("a client of the status socket was too slow"),
        },
    }
}

async fn respond(
    allowed: bool,
    who: String,
    sources: Sources,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, text) = match (request.method(), request.uri().path()) {
        _ if !allowed => (StatusCode::FORBIDDEN, "only root and the agent's own user may ask\n".to_owned()),
        (&Method::GET, "/status") => match serde_json::to_string(&sources.snapshot()) {
            Ok(text) => (StatusCode::OK, text),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
        },
        (&Method::POST, "/fence") => match order(request, who, &sources).await {
            Ok(answer) => (StatusCode::OK, serde_json::to_string(&answer).unwrap_or_default()),
            Err(told) => told,
        },
        _ => (StatusCode::NOT_FOUND, "only GET /status and POST /fence are answered here\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    Ok(response)
}

/// Takes an operator's word to whoever decides about the fence.
async fn order(request: Request<Incoming>, by: String, sources: &Sources) -> Result<FenceAnswer, (StatusCode, String)> {
    let bad = |text: String| (StatusCode::BAD_REQUEST, format!("{text}\n"));
    let Some(orders) = &sources.orders else {
        return Err((
            StatusCode::CONFLICT,
            "this agent does not proxy the driver's calls, so it has no fence\n".to_owned(),
        ));
    };
    let body =
        Limited::new(request.into_body(), MOST_ORDER_BYTES).collect().await.map_err(|error| bad(error.to_string()))?;
    let request: FenceRequest =
        serde_json::from_slice(&body.to_bytes()).map_err(|error| bad(format!("this is no order: {error}")))?;
    let order = request.order().map_err(bad)?;
    let (answer, answered) = oneshot::channel();
    let gone = || (StatusCode::SERVICE_UNAVAILABLE, "the agent is stopping\n".to_owned());
    orders.send(Ordered { order, by, answer }).await.map_err(|_| gone())?;
    match answered.await {
        Ok(Ok(not_kept)) => Ok(FenceAnswer { not_kept }),
        Ok(Err(problem)) => Err(bad(order::problem(problem).to_owned())),
        Err(_) => Err(gone()),
    }
}
