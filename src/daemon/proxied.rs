//! Whether calls go through us, and what that needs: the proxy socket, the table of volumes, and the memory of our own crashes.

use super::{info, warn};
use crate::config::proxy::ProxySettings;
use crate::grpc::connect::chain;
use crate::grpc::driver;
use crate::policy::crashes::Crashes;
use crate::proxy::kubelet_records;
use crate::proxy::listener::{self, Proxy};
use crate::proxy::volume_file::{Left, VolumeFile};
use crate::proxy::volumes::{Volumes, begin};
use crate::registration::socket::{MAX_SOCKET_PATH_BYTES, SocketPath};
use anyhow::{Context, anyhow};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::sleep;
use tracing::error;

/// An agent that hands over to us writes down within 50 ms what it hears.
const HANDING_OVER: Duration = Duration::from_millis(250);

/// The proxy, ready to serve.
pub(super) struct Proxied {
    /// Listens already.
    pub(super) proxy: Proxy,
    /// Volumes in use.
    pub(super) volumes: Volumes,
    /// Where they are kept.
    pub(super) file: VolumeFile,
    /// Ours in this boot.
    pub(super) crashes: Crashes,
    /// What the kubelet is told to dial.
    pub(super) endpoint: String,
}

/// Which way calls go.
pub(super) enum Way {
    /// Through us.
    Through(Box<Proxied>),
    /// The kubelet dials the driver's own socket.
    Around,
    /// Likewise, and we only observe: we have crashed too often to stand in the way of anything.
    Bypass,
}

/// What is known when the way is chosen.
pub(super) struct Node<'a> {
    pub(super) driver_name: &'a str,
    pub(super) driver_socket: &'a Path,
    /// As the kubelet dials the driver.
    pub(super) endpoint: &'a str,
    pub(super) state_folder: &'a Path,
    pub(super) proc_root: &'a Path,
    /// For a question to the driver.
    pub(super) timeout: Duration,
}

/// Chooses the way, and listens if it is ours.
///
/// # Errors
/// When the proxy is required and cannot be.
pub(super) async fn choose(wanted: Option<&ProxySettings>, node: &Node<'_>) -> anyhow::Result<Way> {
    let file = VolumeFile::new(node.state_folder, node.driver_name, node.proc_root);
    let Some(wanted) = wanted else {
        leave_gap(&file);
        return Ok(Way::Around);
    };
    let (path, _) = wanted.socket_for(node.driver_name, node.driver_socket, node.endpoint);
    let left = left_at(&path).await;
    let loaded = file.load(left);
    if let Some(trouble) = &loaded.trouble {
        warn!(error = trouble as &dyn std::error::Error, "the previous run's table of volumes is lost");
    }
    let crashes = loaded.crashes.clone();
    if crashes.bypass() {
        error!(
            "this agent has crashed three times within ten minutes: it stays out of the way until it is started again \
             later. The kubelet is given the driver's own socket and there is no fence; of all reactions only \
             --on-unhealthy=deregister goes on. Look at the earlier runs' logs, and report them"
        );
        leave_gap(&file);
        return Ok(Way::Bypass);
    }
    let (proxy, endpoint) = match listen(wanted, node) {
        Ok(listening) => listening,
        Err(error) if wanted.required => return Err(error),
        Err(error) => {
            warn!(
                error = format!("{error:#}"),
                "no proxy: the kubelet is given the driver's own socket, so there is no fence, and unhealthy withdraws the driver at once"
            );
            leave_gap(&file);
            return Ok(Way::Around);
        }
    };
    // From here on calls come to us, so what is on disk once the other agent's last ones are there is all that it knows.
    if left == Left::Served {
        sleep(HANDING_OVER).await;
    }
    // What was odd has been set aside, and nothing is there that could be taken over.
    let loaded = if loaded.trouble.is_some() { loaded } else { file.take_over(left) };
    let records = kubelet_records::read(node.driver_name, Path::new(node.endpoint), node.driver_socket);
    for trouble in &records.troubles {
        warn!(error = trouble, "a record of the kubelet's cannot be read, so volumes may be in use that are not known");
    }
    // Asked only where the answer matters.
    let stages = if records.staged.is_empty() { None } else { stages(node).await };
    let table = begin(loaded, &records, stages);
    info!(
        volumes.in_use = ?table.in_use(),
        volumes.complete = ?table.completeness(),
        state.path = %file.path().display(),
        "volumes in use at the start"
    );
    Ok(Way::Through(Box::new(Proxied { proxy, volumes: Volumes::new(table), file, crashes, endpoint })))
}

fn listen(wanted: &ProxySettings, node: &Node<'_>) -> anyhow::Result<(Proxy, String)> {
    let (path, endpoint) = wanted.socket_for(node.driver_name, node.driver_socket, node.endpoint);
    let bytes = endpoint.len();
    if bytes > MAX_SOCKET_PATH_BYTES {
        return Err(anyhow!(
            "the kubelet could not dial {endpoint}: {bytes} bytes, and a unix socket's path holds {MAX_SOCKET_PATH_BYTES}; choose a shorter --proxy-socket"
        ));
    }
    if path == node.driver_socket || same_file(&path, node.driver_socket) {
        return Err(anyhow!("the proxy socket {} is the driver's own: choose another --proxy-socket", path.display()));
    }
    let socket = SocketPath::at(&path).context("cannot place the proxy socket (--proxy-socket)")?;
    let settings = listener::ProxySettings {
        socket,
        driver_socket: node.driver_socket.to_owned(),
        allowed: wanted.allowed_uids.iter().copied().collect(),
    };
    Ok((Proxy::listen(settings).context("cannot open the proxy socket")?, endpoint))
}

/// Whether both paths lead to one file, links followed.
pub(super) fn same_file(one: &Path, other: &Path) -> bool {
    let file = |path: &Path| std::fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    file(one).is_some_and(|one| Some(one) == file(other))
}

/// What former agents left where we shall listen.
async fn left_at(path: &Path) -> Left {
    match UnixStream::connect(path).await {
        Ok(_) => Left::Served,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Left::Nothing,
        // Whatever it is, somebody did not take it away.
        Err(_) => Left::Dead,
    }
}

/// Whether the driver stages volumes; `None` if it does not say.
async fn stages(node: &Node<'_>) -> Option<bool> {
    match driver::stages(node.driver_socket, node.timeout).await {
        Ok(stages) => Some(stages),
        Err(error) => {
            warn!(error = chain(&error), "the driver does not tell whether it stages volumes");
            None
        }
    }
}

/// Whoever proxies next must not believe that nothing happened meanwhile.
fn leave_gap(file: &VolumeFile) {
    if let Err(error) = file.leave_gap() {
        warn!(
            error = &error as &dyn std::error::Error,
            state.path = %file.path().display(),
            "cannot write that volumes are not followed any more"
        );
    }
}
