//! An embedded kubelet, as far as plugin registration goes: it finds sockets in a folder, dials them the way the real one does
//! (percent-encoded path as `:authority`), and forgets a driver when its socket is unlinked.

use crate::api::csi::NodeGetInfoRequest;
use crate::api::csi::node_client::NodeClient;
use crate::api::registration::registration_client::RegistrationClient;
use crate::api::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use crate::grpc::authority::{AuthorityAs, percent_encode_path};
use crate::grpc::connect::{Connection, origin};
use crate::policy::backoff::Backoff;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

/// The real kubelet's deadlines and back-off.
const GET_INFO_DEADLINE: Duration = Duration::from_secs(1);
const NODE_INFO_DEADLINE: Duration = Duration::from_secs(120);
const NOTIFY_DEADLINE: Duration = Duration::from_secs(5);
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(122);

/// What it did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubeletEvent {
    /// A driver is in its list now.
    Registered {
        /// Its name.
        driver: String,
        /// Where it is to be dialled.
        endpoint: String,
    },
    /// A driver is no longer.
    Deregistered {
        /// Its name.
        driver: String,
    },
    /// A registration did not work; it will be tried again.
    Failed {
        /// What went wrong.
        error: String,
    },
}

/// How it behaves.
#[derive(Debug, Clone)]
pub struct KubeletOptions {
    /// From one pass over the folder to the next; the real one's is a second.
    pub pass: Duration,
    /// NotifyRegistrationStatus comes this much later than it could.
    pub notify_delay: Duration,
    /// Every registration is refused with this text.
    pub refuse: Option<String>,
}

impl Default for KubeletOptions {
    fn default() -> Self {
        Self { pass: Duration::from_secs(1), notify_delay: Duration::ZERO, refuse: None }
    }
}

struct Known {
    inode: u64,
    driver: String,
}

/// Serves `folder` until `stop`, telling what it does.
pub async fn run(
    folder: PathBuf,
    options: KubeletOptions,
    events: mpsc::Sender<KubeletEvent>,
    stop: CancellationToken,
) {
    let mut known: BTreeMap<PathBuf, Known> = BTreeMap::new();
    let mut backoffs: BTreeMap<PathBuf, (Backoff, Instant)> = BTreeMap::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(options.pass) => {}
        }
        let sockets = sockets(&folder);
        let gone: Vec<PathBuf> =
            known.keys().filter(|path| sockets.get(*path) != known.get(*path).map(|k| &k.inode)).cloned().collect();
        for path in gone {
            if let Some(known) = known.remove(&path) {
                tell(&events, KubeletEvent::Deregistered { driver: known.driver }).await;
            }
        }
        for (path, inode) in sockets {
            let waits = backoffs.get(&path).is_some_and(|(_, until)| *until > Instant::now());
            if known.contains_key(&path) || waits {
                continue;
            }
            let event = match register(&path, &options).await {
                Ok(info) => {
                    backoffs.remove(&path);
                    known.insert(path, Known { inode, driver: info.name.clone() });
                    KubeletEvent::Registered { driver: info.name, endpoint: info.endpoint }
                }
                Err(error) => {
                    let (backoff, until) = backoffs
                        .entry(path)
                        .or_insert_with(|| (Backoff::new(FIRST_BACKOFF, MAX_BACKOFF), Instant::now()));
                    *until = Instant::now() + backoff.pause();
                    KubeletEvent::Failed { error }
                }
            };
            tell(&events, event).await;
        }
    }
}

/// Sockets in the folder, dot-files left out, with their inodes.
fn sockets(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let Ok(entries) = fs::read_dir(folder) else {
        return BTreeMap::new();
    };
    entries
        .filter_map(Result::ok)
        .filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
        .filter_map(|entry| {
            let metadata = fs::symlink_metadata(entry.path()).ok()?;
            metadata.file_type().is_socket().then(|| (entry.path(), metadata.ino()))
        })
        .collect()
}

async fn register(path: &Path, options: &KubeletOptions) -> Result<PluginInfo, String> {
    let stream = UnixStream::connect(path).await.map_err(|error| format!("cannot dial {}: {error}", path.display()))?;
    let connection = Connection::over(AuthorityAs::new(stream, percent_encode_path(path)))
        .await
        .map_err(|error| format!("cannot speak with {}: {error}", path.display()))?;
    let mut plugin = RegistrationClient::with_origin(connection, origin());
    let info = within(GET_INFO_DEADLINE, "GetInfo", plugin.get_info(InfoRequest {})).await?;
    let accepted = match &options.refuse {
        Some(text) => Err(text.clone()),
        None => node_info(&info.endpoint).await,
    };
    tokio::time::sleep(options.notify_delay).await;
    let status =
        RegistrationStatus { plugin_registered: accepted.is_ok(), error: accepted.clone().err().unwrap_or_default() };
    within(NOTIFY_DEADLINE, "NotifyRegistrationStatus", plugin.notify_registration_status(status)).await?;
    accepted.map(|()| info)
}

/// The kubelet refuses a driver that cannot tell about its node.
async fn node_info(endpoint: &str) -> Result<(), String> {
    let connection =
        Connection::open(Path::new(endpoint)).await.map_err(|error| format!("cannot dial {endpoint}: {error}"))?;
    let mut node = NodeClient::with_origin(connection, origin());
    let info = within(NODE_INFO_DEADLINE, "NodeGetInfo", node.node_get_info(NodeGetInfoRequest {})).await?;
    if info.node_id.is_empty() { Err("the driver gave an empty node ID".to_owned()) } else { Ok(()) }
}

async fn within<T>(
    deadline: Duration,
    what: &str,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, String> {
    match timeout(deadline, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(format!("{what}: {:?}: {}", status.code(), status.message())),
        Err(_elapsed) => Err(format!("{what}: no answer within {deadline:?}")),
    }
}

async fn tell(events: &mpsc::Sender<KubeletEvent>, event: KubeletEvent) {
    // Nobody listens any more: the show is over.
    drop(events.send(event).await);
}
