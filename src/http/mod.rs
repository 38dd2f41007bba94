//! The HTTP server, and what it is asked: the registrar's duty (`diagnostics.rs`) and livenessprobe's (`liveness.rs`).

mod diagnostics;
mod liveness;
pub mod places;

pub use diagnostics::Diagnostics;
pub use liveness::LivenessEndpoints;

use crate::metrics::Metrics;
use crate::parts::{Fatal, Parts};
use crate::quiet::Quiet;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use places::{Answering, Places};
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tracing::{debug, warn};

/// Connections served at a time; more wait in the kernel's queue. A kubelet has one.
const MAX_CONNECTIONS: usize = 128;

/// A client gets this long for its request line and headers, and as long between two requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// After a failed `accept`, so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const PLAIN: &str = "text/plain; charset=utf-8";

/// Prometheus goes by the version.
const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// One answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub text: String,
    content_type: &'static str,
}

impl Answer {
    /// A text for people and scripts.
    pub fn text(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), content_type: PLAIN }
    }

    /// What there is nothing at, in the words of Go's servers.
    pub fn not_found() -> Self {
        Self::text(StatusCode::NOT_FOUND, "404 page not found\n")
    }

    /// All metrics, for Prometheus.
    pub fn metrics(metrics: &Metrics) -> Self {
        Self { status: StatusCode::OK, text: metrics.render(), content_type: METRICS }
    }
}

/// Knows what each path answers.
pub trait Answers: Send + Sync + 'static {
    /// The answer to GET `path`. Dropped when the client hangs up.
    fn get(&self, path: &str) -> impl Future<Output = Answer> + Send;
}

/// Serves `answers` on `listener` until all must end.
///
/// # Errors
/// When the listener cannot be used by the runtime.
pub fn serve(listener: std::net::TcpListener, answers: impl Answers, parts: &Parts) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let (answers, stop, connections) = (Arc::new(answers), parts.stop().clone(), parts.clone());
    parts.spawn("http server", async move {
        let mut quiet = Quiet::default();
        let mut places = Places::new(MAX_CONNECTIONS);
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok::<(), Fatal>(()),
                () = places.free() => {}
            }
            let stream = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        quiet.end();
                        stream
                    }
                    Err(error) => {
                        if quiet.begin_or_repeat(&error.to_string(), Instant::now()) {
                            warn!(error = &error as &dyn std::error::Error, "cannot accept a connection on the HTTP address");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
            };
            let (answers, stop) = (Arc::clone(&answers), stop.clone());
            let answering = Answering::default();
            let busy = answering.clone();
            let service = service_fn(move |request| {
                let (answers, busy) = (Arc::clone(&answers), busy.clone());
                async move {
                    busy.set(true);
                    let response = respond(answers, request).await;
                    busy.set(false);
                    response
                }
            });
            let connection = connections.spawn_connection(async move {
                let connection = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER_TIMEOUT)
                    .serve_connection(TokioIo::new(stream), service);
                tokio::select! {
                    () = stop.cancelled() => {}
                    ended = connection => if let Err(error) = ended {
                        debug!(error = &error as &dyn std::error::Error, "an HTTP connection broke");
                    },
                }
            });
            places.take(connection, answering);
        }
    });
    Ok(())
}

async fn respond(answers: Arc<impl Answers>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path();
    let answer = match *request.method() {
        Method::GET | Method::HEAD => answers.get(path).await,
        _ => Answer::text(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered here"),
    };
    debug!(http.path = path, http.status = answer.status.as_u16(), "HTTP request");
    let mut response = Response::new(Full::new(Bytes::from(answer.text)));
    *response.status_mut() = answer.status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(answer.content_type));
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    Ok(response)
}
