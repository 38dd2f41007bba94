//! What each call about a volume passes: the fence, and the table of volumes in use.

use super::body::{Stopped, gather};
use super::message;
use super::node_info::{self, Limit};
use super::volumes::{CallUnderWay, Volumes};
use crate::grpc::driver::NODE_GET_INFO;
use crate::metrics::Metrics;
use crate::policy::fence::{Fence, Judgement, RefusalCode, VolumeMethod, judge};
use crate::policy::volume_call::VolumeCall;
use crate::policy::volumes::VolumeTable;
use crate::quiet::Quiet;
use bytes::Bytes;
use h2::RecvStream;
use prost::Message;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Code, Status};
use tracing::warn;

/// The kubelet asks it of every volume that it has mounted, about once a minute.
const NODE_GET_VOLUME_STATS: &str = "/csi.v1.Node/NodeGetVolumeStats";

/// Why new volumes are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FenceUp {
    /// What is broken, or who put it up and why.
    pub reason: String,
    /// Since when.
    pub since: Instant,
    /// The same by the wall clock.
    pub since_utc: String,
}

/// Judges calls about volumes. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    driver_name: String,
    rules: GateRules,
    fence: watch::Receiver<Option<FenceUp>>,
    volumes: Volumes,
    metrics: Metrics,
    quiet: Mutex<Quiet>,
    overruled: Mutex<Quiet>,
}

/// What the gate does beside letting calls pass.
#[derive(Debug, Clone, Default)]
pub struct GateRules {
    /// `--refusal-code`
    pub refusal_code: RefusalCode,
    /// `--topology`: segments for NodeGetInfo.
    pub topology: BTreeMap<String, String>,
    /// `--fence-max-volumes`: the limit that NodeGetInfo gives while there is a fence. Without one, "no limit" is given as a number.
    pub fence_max_volumes: Option<i64>,
}

/// What the gate says.
pub(super) enum Entry {
    /// The call goes on; what was read of its body goes first.
    Pass(Bytes, Option<Box<CallUnderWay>>),
    /// It does not.
    Refuse(Status),
    /// The caller hung up.
    HungUp,
}

impl Gate {
    /// Follows the volumes in `volumes`, and refuses new ones while there is a fence.
    pub fn new(
        driver_name: &str,
        rules: GateRules,
        fence: watch::Receiver<Option<FenceUp>>,
        volumes: Volumes,
        metrics: Metrics,
    ) -> Self {
        let (driver_name, quiet, overruled) = (driver_name.to_owned(), Mutex::default(), Mutex::default());
        Self(Arc::new(Shared { driver_name, rules, fence, volumes, metrics, quiet, overruled }))
    }

    /// The volumes that it follows.
    pub(super) fn volumes(&self) -> &Volumes {
        &self.0.volumes
    }

    /// A call about a volume wants to pass.
    pub(super) async fn enter(&self, method: VolumeMethod, body: &mut RecvStream) -> Entry {
        let gathered = match gather(body, |_| false).await {
            Ok(gathered) => gathered,
            Err(Stopped::HungUp | Stopped::Broken(_)) => return Entry::HungUp,
        };
        let call = message::first(&gathered).and_then(|message| decode(method, &message));
        if let Some(status) = self.refusal(method, call.as_ref()) {
            return Entry::Refuse(status);
        }
        let under_way = match &call {
            Some(call) => Some(Box::new(self.0.volumes.begin(call))),
            None => {
                self.0.volumes.change(VolumeTable::undecodable);
                None
            }
        };
        Entry::Pass(gathered, under_way)
    }

    /// Whether a call of this method tells of volumes from before us.
    pub(super) fn learns_from(&self, path: &str) -> bool {
        path == NODE_GET_VOLUME_STATS && self.0.volumes.can_learn()
    }

    /// A call that may tell of a volume from before us passes.
    pub(super) async fn listen(&self, body: &mut RecvStream) -> Entry {
        let Ok(gathered) = gather(body, |_| false).await else { return Entry::HungUp };
        let asked = message::first(&gathered).and_then(|message| FirstTwo::decode(message).ok());
        let under_way = asked.and_then(|FirstTwo { volume_id, path }| self.0.volumes.ask(volume_id, path));
        Entry::Pass(gathered, under_way.map(Box::new))
    }

    /// Whether the answer to this method is not passed on as it is.
    pub(super) fn changes(&self, path: &str) -> bool {
        let rules = &self.0.rules;
        path == NODE_GET_INFO && (!rules.topology.is_empty() || rules.fence_max_volumes.is_some())
    }

    /// NodeGetInfo's answer with ours in it.
    pub(super) fn changed(&self, answer: &Bytes) -> Bytes {
        let shared = &self.0;
        let limit = match shared.rules.fence_max_volumes {
            Some(count) if shared.fence.borrow().is_some() => Limit::Most(count),
            Some(_) => Limit::AsNumber,
            None => Limit::Drivers,
        };
        // What is no answer that we know is not ours to change.
        let Ok(merged) = node_info::merge(answer, &shared.rules.topology, limit) else { return answer.clone() };
        let overruled = merged.overruled.join(", ");
        let mut quiet = shared.overruled.lock().unwrap_or_else(PoisonError::into_inner);
        if !overruled.is_empty() && quiet.begin_or_repeat(&overruled, Instant::now()) {
            warn!(
                driver.name = shared.driver_name,
                topology.keys = overruled,
                "the driver gives these topology keys other values than --topology; the driver's count"
            );
        }
        Bytes::from(merged.bytes)
    }

    fn refusal(&self, method: VolumeMethod, call: Option<&VolumeCall>) -> Option<Status> {
        let shared = &self.0;
        let up = shared.fence.borrow().clone()?;
        let fence = Fence { driver: &shared.driver_name, reason: &up.reason, since_utc: &up.since_utc };
        let judged = shared.volumes.look(|table| judge(method, call, &fence, table, shared.rules.refusal_code));
        match judged {
            Judgement::Pass => None,
            Judgement::Refuse { code, message } => {
                shared.metrics.count_fence_refusal(method.name());
                let mut quiet = shared.quiet.lock().unwrap_or_else(PoisonError::into_inner);
                if quiet.begin_or_repeat(&up.reason, Instant::now()) {
                    warn!(
                        driver.name = shared.driver_name,
                        grpc.method = method.name(),
                        "a call is refused: {message}"
                    );
                }
                Some(Status::new(Code::from_i32(code.number()), message))
            }
        }
    }
}

/// What is needed of the requests; secrets are skipped, not read.
#[derive(Message)]
struct FirstTwo {
    #[prost(string, tag = "1")]
    volume_id: String,
    #[prost(string, tag = "2")]
    path: String,
}

#[derive(Message)]
struct OfStage {
    #[prost(string, tag = "1")]
    volume_id: String,
    #[prost(string, tag = "3")]
    staging_target_path: String,
}

#[derive(Message)]
struct OfPublish {
    #[prost(string, tag = "1")]
    volume_id: String,
    #[prost(string, tag = "4")]
    target_path: String,
}

#[derive(Message)]
struct OfExpand {
    #[prost(string, tag = "1")]
    volume_id: String,
}

fn decode(method: VolumeMethod, message: &Bytes) -> Option<VolumeCall> {
    let message = message.clone();
    Some(match method {
        VolumeMethod::Stage => {
            let OfStage { volume_id: volume, staging_target_path: path } = OfStage::decode(message).ok()?;
            VolumeCall::Stage { volume, path }
        }
        VolumeMethod::Unstage => {
            let FirstTwo { volume_id: volume, path } = FirstTwo::decode(message).ok()?;
            VolumeCall::Unstage { volume, path }
        }
        VolumeMethod::Publish => {
            let OfPublish { volume_id: volume, target_path: target } = OfPublish::decode(message).ok()?;
            VolumeCall::Publish { volume, target }
        }
        VolumeMethod::Unpublish => {
            let FirstTwo { volume_id: volume, path: target } = FirstTwo::decode(message).ok()?;
            VolumeCall::Unpublish { volume, target }
        }
        VolumeMethod::Expand => VolumeCall::Expand { volume: OfExpand::decode(message).ok()?.volume_id },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::csi;

    #[test]
    fn each_request_gives_its_volume_and_its_path() {
        let (volume, path) = ("vol-1".to_owned(), "/somewhere".to_owned());
        let secrets = std::collections::HashMap::from([("key".to_owned(), "hidden".to_owned())]);
        let stage = csi::NodeStageVolumeRequest {
            volume_id: volume.clone(),
            staging_target_path: path.clone(),
            secrets: secrets.clone(),
            ..Default::default()
        };
        let publish = csi::NodePublishVolumeRequest {
            volume_id: volume.clone(),
            staging_target_path: "/staging".to_owned(),
            target_path: path.clone(),
            secrets,
            ..Default::default()
        };
        let unstage = csi::NodeUnstageVolumeRequest { volume_id: volume.clone(), staging_target_path: path.clone() };
        let unpublish = csi::NodeUnpublishVolumeRequest { volume_id: volume.clone(), target_path: path.clone() };
        let expand = csi::NodeExpandVolumeRequest { volume_id: volume.clone(), ..Default::default() };
        for (method, message, call) in [
            (
                VolumeMethod::Stage,
                stage.encode_to_vec(),
                VolumeCall::Stage { volume: volume.clone(), path: path.clone() },
            ),
            (
                VolumeMethod::Unstage,
                unstage.encode_to_vec(),
                VolumeCall::Unstage { volume: volume.clone(), path: path.clone() },
            ),
            (
                VolumeMethod::Publish,
                publish.encode_to_vec(),
                VolumeCall::Publish { volume: volume.clone(), target: path.clone() },
            ),
            (
                VolumeMethod::Unpublish,
                unpublish.encode_to_vec(),
                VolumeCall::Unpublish { volume: volume.clone(), target: path },
            ),
            (VolumeMethod::Expand, expand.encode_to_vec(), VolumeCall::Expand { volume }),
        ] {
            assert_eq!(decode(method, &Bytes::from(message)), Some(call));
        }
    }

    #[test]
    fn what_is_no_request_is_not_understood() {
        assert_eq!(decode(VolumeMethod::Stage, &Bytes::from_static(b"\x0a\xff")), None);
    }
}
