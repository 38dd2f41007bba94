//! One gRPC client connection over a unix socket, and what can go wrong with a call on it.

use super::corked::Corked;
use super::spoken::Spoken;
use crate::policy::outcome::with_detail;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{error::Error, fmt, io};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::body::Body;

/// How the user agent of our own calls begins, whatever the version, so that our servers do not take them for the kubelet's.
pub const USER_AGENT_NAME: &str = "csi-warden/";

const USER_AGENT: &str = concat!("csi-warden/", env!("CARGO_PKG_VERSION"));

/// The address that generated clients put before a method's path. Strict drivers answer only to `localhost`.
pub fn origin() -> http::Uri {
    http::Uri::from_static("http://localhost")
}

/// Why a call to a socket failed.
#[derive(Debug)]
pub enum CallError {
    /// Nobody could be reached at the path.
    Connect {
        /// The socket.
        path: PathBuf,
        /// The operating system's word.
        source: io::Error,
    },
    /// Somebody accepted and closed at once: no call was made.
    Closed {
        /// The socket.
        path: PathBuf,
    },
    /// Somebody accepted and did not answer in time.
    Deadline {
        /// The socket.
        path: PathBuf,
        /// How long we waited.
        after: Duration,
        /// Whether it said anything at all. If not, no call was made.
        spoke: bool,
    },
    /// The other side answered with a gRPC error, or with something that is not gRPC.
    Status {
        /// The socket.
        path: PathBuf,
        /// The answer.
        source: Box<tonic::Status>,
    },
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect { path, source } if source.kind() == io::ErrorKind::PermissionDenied => {
                let uid = rustix::process::geteuid().as_raw();
                write!(f, "permission denied connecting to {} as uid {uid}", path.display())
            }
            Self::Connect { path, .. } => write!(f, "cannot connect to {}", path.display()),
            Self::Closed { path } => write!(f, "{} accepted and closed without a word", path.display()),
            Self::Deadline { path, after, .. } => {
                write!(f, "{} accepted but did not answer within {after:?}", path.display())
            }
            Self::Status { path, source } => {
                let answer = format!("{} answered {:?}", path.display(), source.code());
                f.write_str(&with_detail(answer, &fit_for_a_line(source.message())))
            }
        }
    }
}

impl Error for CallError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Connect { source, .. } => Some(source),
            Self::Closed { .. } | Self::Deadline { .. } | Self::Status { .. } => None,
        }
    }
}

impl CallError {
    /// The code that the call ended with; `None` if it never became one.
    pub fn grpc_code(&self) -> Option<tonic::Code> {
        match self {
            Self::Connect { .. } | Self::Closed { .. } | Self::Deadline { spoke: false, .. } => None,
            Self::Deadline { spoke: true, .. } => Some(tonic::Code::DeadlineExceeded),
            // What the driver did not say itself came from a connection that broke under the call.
            Self::Status { source, .. } if source.source().is_some() => Some(tonic::Code::Unavailable),
            Self::Status { source, .. } => Some(source.code()),
        }
    }
}

/// Connects, runs `call` on the connection, and closes it; all within `deadline`.
///
/// # Errors
/// [`CallError`], which names the socket and tells nobody there from nobody answering.
pub async fn call<T, F>(path: &Path, deadline: Duration, call: impl FnOnce(Connection) -> F) -> Result<T, CallError>
where
    F: Future<Output = Result<T, tonic::Status>>,
{
    let spoken = Spoken::default();
    let whole = async {
        let connect = async { Connection::over(Corked::over(spoken.over(UnixStream::connect(path).await?))).await };
        let connection = connect.await.map_err(|source| CallError::Connect { path: path.to_owned(), source })?;
        call(connection).await.map_err(|status| match spoken.yet() {
            true => CallError::Status { path: path.to_owned(), source: Box::new(status) },
            false => CallError::Closed { path: path.to_owned() },
        })
    };
    match timeout(deadline, whole).await {
        Ok(result) => result,
        Err(_elapsed) => Err(CallError::Deadline { path: path.to_owned(), after: deadline, spoke: spoken.yet() }),
    }
}

/// An HTTP/2 connection over a unix socket that generated clients can call on. Closed when dropped.
#[derive(Debug, Clone)]
pub struct Connection {
    sender: SendRequest<Body>,
    _io: std::sync::Arc<AbortOnDrop>,
}

impl Connection {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// The operating system's, as `connect(2)` gives them.
    pub async fn open(path: &Path) -> io::Result<Self> {
        Self::over(UnixStream::connect(path).await?).await
    }

    /// Speaks HTTP/2 over any stream.
    ///
    /// # Errors
    /// When the stream breaks while the client preface is written.
    pub async fn over(
        stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
    ) -> io::Result<Self> {
        let (sender, io) = http2::Builder::new(TokioExecutor::new())
            .handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        #[expect(
            clippy::disallowed_methods,
            reason = "ends with its connection, aborted when the last handle is dropped"
        )]
        let task = tokio::spawn(async move {
            // An error here reaches every call in flight on its own.
            drop(io.await);
        });
        Ok(Self { sender, _io: std::sync::Arc::new(AbortOnDrop(task)) })
    }
}

impl tower_service::Service<Request<Body>> for Connection {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.sender.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.sender.send_request(request))
    }
}

/// A request that carries our user agent.
pub fn request<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.metadata_mut().insert("user-agent", tonic::metadata::MetadataValue::from_static(USER_AGENT));
    request
}

#[derive(Debug)]
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Longest text of somebody else's that is passed on.
const MAX_FOREIGN_CHARS: usize = 1024;

/// Somebody else's text, without control characters and not without end.
pub fn fit_for_a_line(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).take(MAX_FOREIGN_CHARS).collect()
}

/// The error and what is behind it, in one line.
pub fn chain(error: &(impl Error + ?Sized)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
