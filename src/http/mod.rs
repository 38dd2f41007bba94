//! The diagnostics server: `/healthz`, `/readyz`, `/registered`, and what there is of pprof.

mod diagnostics;

pub use diagnostics::Answers;

use crate::parts::{Fatal, Parts};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tracing::{debug, warn};

/// Connections served at a time; more wait in the kernel's queue. A kubelet has one.
const MAX_CONNECTIONS: usize = 64;

/// A client gets this long for its request line and headers, and as long between two requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// After a failed `accept`, so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Status and text of one answer.
pub type Answer = (StatusCode, String);

/// Serves `answers` on `listener` until all must end.
///
/// # Errors
/// When the listener cannot be used by the runtime.
pub fn serve(listener: std::net::TcpListener, answers: Answers, parts: &Parts) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let (answers, stop, connections) = (Arc::new(answers), parts.stop().clone(), parts.clone());
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    parts.spawn("http server", async move {
        loop {
            let place = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                place = Arc::clone(&places).acquire_owned() => place.map_err(Fatal::from)?,
            };
            let stream = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        warn!(error = &error as &dyn std::error::Error, "cannot accept a connection on the HTTP address");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
            };
            let (answers, stop) = (Arc::clone(&answers), stop.clone());
            let service = service_fn(move |request| respond(Arc::clone(&answers), request));
            connections.spawn_connection(async move {
                let _place = place;
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
        }
    });
    Ok(())
}

async fn respond(answers: Arc<Answers>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path();
    let (status, text) = match *request.method() {
        Method::GET | Method::HEAD => answers.get(path).await,
        _ => (StatusCode::METHOD_NOT_ALLOWED, "only GET is answered here".to_owned()),
    };
    debug!(http.path = path, http.status = status.as_u16(), "HTTP request");
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain; charset=utf-8"));
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    Ok(response)
}
