//! gRPC on a unix socket, without tonic's transport.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::fs::FileTypeExt as _,
    path::Path,
};

use anyhow::{Context as _, bail};
use csi_warden::api::csi::{
    identity_server::{Identity, IdentityServer},
    node_server::{Node, NodeServer},
};
use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixListener;
use tokio_util::task::TaskTracker;
use tonic::{Status, body::Body, codegen::Service as _};

/// Listens at `endpoint`; a socket that an earlier run left there is replaced, anything else is kept.
pub(crate) fn bind(endpoint: &Path) -> anyhow::Result<UnixListener> {
    match fs::symlink_metadata(endpoint) {
        Ok(found) if found.file_type().is_socket() => {
            fs::remove_file(endpoint).context("cannot remove a stale socket")?
        }
        Ok(_) => bail!("{} exists and is not a socket", endpoint.display()),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).context("cannot look at the endpoint"),
    }
    UnixListener::bind(endpoint).with_context(|| format!("cannot listen on {}", endpoint.display()))
}

/// Answers until the listener fails.
pub(crate) async fn serve(listener: UnixListener, identity: impl Identity, node: impl Node) -> io::Result<()> {
    let services = Services { identity: IdentityServer::new(identity), node: NodeServer::new(node) };
    let connections = TaskTracker::new();
    loop {
        let (stream, _) = listener.accept().await?;
        let services = services.clone();
        let answer = service_fn(move |request| services.clone().answer(request));
        let connection = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), answer);
        // A connection that breaks is the caller's loss; the next one is served all the same.
        connections.spawn(async move { drop(connection.await) });
    }
}

/// Both services; the request's path picks one.
struct Services<I, N> {
    identity: IdentityServer<I>,
    node: NodeServer<N>,
}

impl<I: Identity, N: Node> Services<I, N> {
    async fn answer(mut self, request: Request<Incoming>) -> Result<Response<Body>, std::convert::Infallible> {
        match request.uri().path() {
            path if path.starts_with("/csi.v1.Identity/") => self.identity.call(request).await,
            path if path.starts_with("/csi.v1.Node/") => self.node.call(request).await,
            path => Ok(Status::unimplemented(format!("no such service: {path}")).into_http()),
        }
    }
}

impl<I, N> Clone for Services<I, N> {
    fn clone(&self) -> Self {
        Self { identity: self.identity.clone(), node: self.node.clone() }
    }
}
