//! Serves gRPC on a unix socket, to clients of any kind.

use super::authority::AuthorityFix;
use crate::parts::Parts;
use crate::quiet::Quiet;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tower_service::Service;
use tracing::{debug, warn};

/// After a failed `accept` (out of descriptors, say), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves every connection on `listener` until `stop`; the listener is closed then, and calls in flight go on.
pub fn serve<S>(name: &'static str, listener: UnixListener, service: S, parts: &Parts, stop: CancellationToken)
where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    let connections = parts.clone();
    parts.spawn(name, async move {
        let mut quiet = Quiet::default();
        loop {
            let stream = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        quiet.end();
                        stream
                    }
                    Err(error) => {
                        if quiet.begin_or_repeat(&error.to_string(), Instant::now()) {
                            warn!(error = &error as &dyn std::error::Error, part = name, "cannot accept a connection");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
            };
            let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(AuthorityFix::new(stream)), TowerToHyperService::new(service.clone()));
            // Nothing ends it but its client and the end of all.
            drop(connections.spawn_connection(async move {
                if let Err(error) = connection.await {
                    debug!(error = &error as &dyn std::error::Error, part = name, "a connection broke");
                }
            }));
        }
    });
}
