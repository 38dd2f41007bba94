//! The connections to the driver: one for all calls, as long as it takes them, and a new one as soon as the driver is another.

use super::{CONNECTION_WINDOW_BYTES, SEND_BUFFER_BYTES, STREAM_WINDOW_BYTES};
use crate::grpc::patient_acks::PatientAcks;
use crate::grpc::read_driven::ReadDriven;
use crate::grpc::spoken::Spoken;
use crate::parts::Parts;
use bytes::Bytes;
use h2::client::SendRequest;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fs, io};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

/// A driver that accepts and says nothing for this long is not there. grpc-go waits as long for a connection.
const SILENCE: Duration = Duration::from_secs(20);

/// A full backlog clears as soon as the driver accepts; how long we try.
const BACKLOG_PATIENCE: Duration = Duration::from_secs(1);

/// In a rush of calls the driver's socket file is taken to be the one that was seen this long ago at most.
const SEEN_FOR: Duration = Duration::from_millis(5);

/// Calls in flight that are a rush.
const RUSH: usize = 8;

/// Between two tries at a full backlog.
const BACKLOG_PAUSE: Duration = Duration::from_millis(5);

/// The way to the driver. Clones are handles to the same one.
#[derive(Clone)]
pub(super) struct Upstream(Arc<Shared>);

struct Shared {
    path: PathBuf,
    connections: Mutex<Vec<Connection>>,
    /// Held while a connection is made, so that a burst of calls makes one.
    connecting: tokio::sync::Mutex<()>,
    seen: Mutex<Option<(Instant, SocketIdentity)>>,
    away: Mutex<bool>,
    parts: Parts,
}

struct Connection {
    requests: SendRequest<Bytes>,
    socket: SocketIdentity,
    /// One clone a call.
    load: Arc<Load>,
    spoken: Spoken,
    closed: CancellationToken,
}

/// A place for one call on a connection; keep it as long as the call lasts.
pub(super) struct Place {
    /// Sends one request.
    pub(super) requests: SendRequest<Bytes>,
    /// What the connection carries.
    pub(super) load: Arc<Load>,
}

/// What a connection carries.
#[derive(Debug, Default)]
pub(super) struct Load {
    /// Calls that wait for the driver to take what they have to say.
    waiting: AtomicUsize,
}

impl Load {
    /// Marks a call as waiting until it is dropped. The driver may have stopped reading the whole connection.
    pub(super) fn wait(&self) -> impl Drop + '_ {
        struct Waiting<'a>(&'a Load);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.waiting.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }
}

/// Which file the driver's socket is. A driver that starts again makes a new one, which may be given the old inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SocketIdentity {
    device: u64,
    inode: u64,
    born: (i64, i64),
}

impl SocketIdentity {
    fn of(path: &Path) -> io::Result<Self> {
        let file = fs::metadata(path)?;
        Ok(Self { device: file.dev(), inode: file.ino(), born: (file.mtime(), file.mtime_nsec()) })
    }
}

impl Upstream {
    pub(super) fn new(driver_socket: &Path, parts: &Parts) -> Self {
        Self(Arc::new(Shared {
            path: driver_socket.to_owned(),
            connections: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            seen: Mutex::default(),
            away: Mutex::default(),
            parts: parts.clone(),
        }))
    }

    /// Where the driver listens.
    pub(super) fn path(&self) -> &Path {
        &self.0.path
    }

    /// A place for one call. A connection to a driver that has another socket now is not used any more: the kubelet, which connects for
    /// each call, would not reach that driver either.
    ///
    /// # Errors
    /// As `connect(2)` gives them: the driver is away.
    pub(super) async fn place(&self) -> io::Result<Place> {
        match self.find_or_connect().await {
            Ok(place) => {
                self.tell_back();
                Ok(place)
            }
            Err(error) => {
                self.tell_away(&error);
                Err(error)
            }
        }
    }

    /// No further call on the connection of this place.
    pub(super) fn retire(&self, place: &Place) {
        self.connections().retain(|connection| !Arc::ptr_eq(&connection.load, &place.load));
    }

    async fn find_or_connect(&self) -> io::Result<Place> {
        if let Some(place) = self.found(self.socket()?) {
            return Ok(place);
        }
        // On the heap, because few calls come here, and each would have room for it.
        Box::pin(self.one_more()).await
    }

    async fn one_more(&self) -> io::Result<Place> {
        let _connecting = self.0.connecting.lock().await;
        let socket = self.look(Instant::now())?;
        if let Some(place) = self.found(socket) {
            return Ok(place);
        }
        let connection = self.connect(socket).await?;
        let place = connection.place();
        self.connections().push(connection);
        Ok(place)
    }

    /// The driver's socket, as it was not long ago.
    fn socket(&self) -> io::Result<SocketIdentity> {
        let now = Instant::now();
        match *self.seen() {
            Some((when, socket)) if now.duration_since(when) < SEEN_FOR && self.in_flight() >= RUSH => {
                return Ok(socket);
            }
            Some(_) | None => {}
        }
        self.look(now)
    }

    /// The driver's socket, as it is.
    fn look(&self, now: Instant) -> io::Result<SocketIdentity> {
        let socket = SocketIdentity::of(self.path())?;
        *self.seen() = Some((now, socket));
        Ok(socket)
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Option<(Instant, SocketIdentity)>> {
        self.0.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn in_flight(&self) -> usize {
        self.connections().iter().map(Connection::in_flight).sum()
    }

    /// A place on a connection that is there; forgets those of no use any more.
    fn found(&self, socket: SocketIdentity) -> Option<Place> {
        let mut connections = self.connections();
        connections.retain(|connection| connection.socket == socket && !connection.closed.is_cancelled());
        let at = connections.iter().position(Connection::has_room)?;
        // The extra ones of a burst.
        let mut number = 0;
        connections.retain(|connection| {
            number += 1;
            number - 1 <= at || !connection.is_idle()
        });
        Some(connections[at].place())
    }

    async fn connect(&self, socket: SocketIdentity) -> io::Result<Connection> {
        let spoken = Spoken::default();
        let stream = ReadDriven::new(connect_patiently(self.path()).await?.into_std()?)?;
        let stream = spoken.over(PatientAcks::over(stream));
        let (requests, io) = h2::client::Builder::new()
            .initial_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_send_buffer_size(SEND_BUFFER_BYTES)
            .max_local_error_reset_streams(None)
            .enable_push(false)
            // Until the driver says how many it takes at once: more might be refused.
            .initial_max_send_streams(1)
            .handshake(stream)
            .await
            .map_err(|error| error.into_io().unwrap_or_else(|| io::Error::other("HTTP/2 handshake failed")))?;
        let closed = CancellationToken::new();
        let (closes, heard) = (closed.clone().drop_guard(), spoken.clone());
        drop(self.0.parts.spawn_connection(async move {
            let _closes = closes;
            let mut io = std::pin::pin!(io);
            tokio::select! {
                ended = &mut io => return debug_end(ended),
                () = sleep(SILENCE) => if !heard.yet() {
                    return debug!("the driver accepted a connection and said nothing; giving it up");
                },
            }
            debug_end(io.await);
        }));
        Ok(Connection { requests, socket, load: Arc::default(), spoken, closed })
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.0.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell_away(&self, error: &io::Error) {
        if !std::mem::replace(&mut *self.0.away.lock().unwrap_or_else(PoisonError::into_inner), true) {
            warn!(
                error = error as &dyn std::error::Error,
                socket.path = %self.path().display(),
                "the driver cannot be reached; calls are answered with UNAVAILABLE until it is back"
            );
        }
    }

    fn tell_back(&self) {
        if std::mem::replace(&mut *self.0.away.lock().unwrap_or_else(PoisonError::into_inner), false) {
            info!(socket.path = %self.path().display(), "the driver takes calls again");
        }
    }
}

impl Connection {
    fn place(&self) -> Place {
        Place { requests: self.requests.clone(), load: Arc::clone(&self.load) }
    }

    fn has_room(&self) -> bool {
        // Before the driver's settings have come, calls queue on the connection. Later none queues behind another: each
        // would have a connection of its own without us.
        !self.spoken.yet()
            || (self.load.waiting.load(Ordering::Relaxed) == 0
                && self.in_flight() < self.requests.current_max_send_streams())
    }

    fn in_flight(&self) -> usize {
        Arc::strong_count(&self.load) - 1
    }

    fn is_idle(&self) -> bool {
        self.in_flight() == 0
    }
}

fn debug_end(ended: Result<(), h2::Error>) {
    if let Err(error) = ended {
        debug!(error = &error as &dyn std::error::Error, "a connection to the driver broke");
    }
}

async fn connect_patiently(path: &Path) -> io::Result<UnixStream> {
    let until = Instant::now() + BACKLOG_PATIENCE;
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                sleep(BACKLOG_PAUSE).await;
            }
            result => return result,
        }
    }
}
