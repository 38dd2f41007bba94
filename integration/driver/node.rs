//! The Node service: a tmpfs for each volume.

use std::{io, path::Path, time::Duration};

use csi_warden::api::csi::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest, NodeGetCapabilitiesResponse,
    NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability, NodeStageVolumeRequest,
    NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest,
    NodeUnstageVolumeResponse, VolumeUsage, node_server::Node, node_service_capability, volume_usage,
};
use tokio::time::sleep;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};

use crate::{
    call_log::CallLog,
    mounts::{self, Access},
};

/// What the node can do beyond publishing.
pub(crate) use csi_warden::api::csi::node_service_capability::rpc::Type as Capability;

/// Set by the kubelet for a volume that lives and dies with its pod.
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

/// One node with tmpfs volumes.
#[derive(Clone)]
pub(crate) struct MountingNode {
    info: NodeGetInfoResponse,
    capabilities: Vec<Capability>,
    /// How long a stage takes.
    stage_takes: Duration,
    /// What goes on although its caller may have hung up.
    under_way: TaskTracker,
    log: CallLog,
}

impl MountingNode {
    /// A node that describes itself by `info` and offers `capabilities`.
    pub(crate) fn new(
        info: NodeGetInfoResponse,
        capabilities: Vec<Capability>,
        stage_takes: Duration,
        log: CallLog,
    ) -> Self {
        Self { info, capabilities, stage_takes, under_way: TaskTracker::new(), log }
    }

    fn stage(&self, request: &NodeStageVolumeRequest) -> Result<NodeStageVolumeResponse, Status> {
        present("volume_id", &request.volume_id)?;
        present("staging_target_path", &request.staging_target_path)?;
        request.volume_capability.as_ref().ok_or_else(|| missing("volume_capability"))?;
        mounts::mount_volume(&request.volume_id, Path::new(&request.staging_target_path), Access::ReadWrite)
            .map_err(|error| failed("stage", &error))?;
        Ok(NodeStageVolumeResponse {})
    }

    fn publish(&self, request: &NodePublishVolumeRequest) -> Result<NodePublishVolumeResponse, Status> {
        present("volume_id", &request.volume_id)?;
        present("target_path", &request.target_path)?;
        request.volume_capability.as_ref().ok_or_else(|| missing("volume_capability"))?;
        let target = Path::new(&request.target_path);
        let access = if request.readonly { Access::ReadOnly } else { Access::ReadWrite };
        let ephemeral = request.volume_context.get(EPHEMERAL).is_some_and(|value| value == "true");
        if self.capabilities.contains(&Capability::StageUnstageVolume) && !ephemeral {
            present("staging_target_path", &request.staging_target_path)?;
            mounts::bind_volume(Path::new(&request.staging_target_path), target, access)
        } else {
            mounts::mount_volume(&request.volume_id, target, access)
        }
        .map_err(|error| failed("publish", &error))?;
        Ok(NodePublishVolumeResponse {})
    }
}

#[tonic::async_trait]
impl Node for MountingNode {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        if self.stage_takes.is_zero() {
            return self.log.answer("NodeStageVolume", &request.volume_id, self.stage(&request));
        }
        self.log.answer("NodeStageVolume-begun", &request.volume_id, Ok(()))?;
        let node = self.clone();
        let slow = self.under_way.spawn(async move {
            sleep(node.stage_takes).await;
            node.log.answer("NodeStageVolume", &request.volume_id, node.stage(&request))
        });
        slow.await.map_err(|error| Status::internal(format!("stage: {error}")))?
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let NodeUnstageVolumeRequest { volume_id, staging_target_path } = request.into_inner();
        let outcome = withdraw(&volume_id, "staging_target_path", &staging_target_path);
        self.log.answer("NodeUnstageVolume", &volume_id, outcome.map(|()| NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.log.answer("NodePublishVolume", &request.volume_id, self.publish(&request))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let NodeUnpublishVolumeRequest { volume_id, target_path } = request.into_inner();
        let outcome = withdraw(&volume_id, "target_path", &target_path);
        self.log.answer("NodeUnpublishVolume", &volume_id, outcome.map(|()| NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let NodeGetVolumeStatsRequest { volume_id, volume_path, .. } = request.into_inner();
        self.log.answer("NodeGetVolumeStats", &volume_id, stats(&volume_id, &volume_path))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let outcome = Err(Status::unimplemented("volumes of this driver do not grow"));
        self.log.answer("NodeExpandVolume", &request.into_inner().volume_id, outcome)
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let capabilities = self.capabilities.iter().map(|&offer| NodeServiceCapability {
            r#type: Some(node_service_capability::Type::Rpc(node_service_capability::Rpc { r#type: offer.into() })),
        });
        let capabilities = NodeGetCapabilitiesResponse { capabilities: capabilities.collect() };
        self.log.answer("NodeGetCapabilities", "", Ok(capabilities))
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Result<Response<NodeGetInfoResponse>, Status> {
        self.log.answer("NodeGetInfo", "", Ok(self.info.clone()))
    }
}

/// Unpublish and unstage are one act: the mount at `path` goes.
fn withdraw(volume_id: &str, field: &str, path: &str) -> Result<(), Status> {
    present("volume_id", volume_id)?;
    present(field, path)?;
    mounts::unmount_volume(Path::new(path)).map_err(|error| failed("unmount", &error))
}

fn stats(volume_id: &str, path: &str) -> Result<NodeGetVolumeStatsResponse, Status> {
    present("volume_id", volume_id)?;
    present("volume_path", path)?;
    if !mounts::is_mounted(Path::new(path)).map_err(|error| failed("stats", &error))? {
        return Err(Status::not_found(format!("no volume is mounted at {path}")));
    }
    let fs = rustix::fs::statvfs(path).map_err(|error| failed("stats", &error.into()))?;
    let usage = |unit: volume_usage::Unit, total: u64, free: u64, available: u64| VolumeUsage {
        unit: unit.into(),
        total: total.cast_signed(),
        used: total.saturating_sub(free).cast_signed(),
        available: available.cast_signed(),
    };
    let block = fs.f_frsize;
    let bytes = usage(volume_usage::Unit::Bytes, fs.f_blocks * block, fs.f_bfree * block, fs.f_bavail * block);
    let inodes = usage(volume_usage::Unit::Inodes, fs.f_files, fs.f_ffree, fs.f_favail);
    Ok(NodeGetVolumeStatsResponse { usage: vec![bytes, inodes], volume_condition: None })
}

fn present(field: &str, value: &str) -> Result<(), Status> {
    if value.is_empty() { Err(missing(field)) } else { Ok(()) }
}

fn missing(field: &str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
}

fn failed(what: &str, error: &io::Error) -> Status {
    Status::internal(format!("{what}: {error}"))
}
