//! The questions we ask a CSI driver.

use super::code;
use super::connect::{CallError, call, origin, request};
use crate::api::csi::identity_client::IdentityClient;
use crate::api::csi::node_client::NodeClient;
use crate::api::csi::{
    GetPluginInfoRequest, NodeGetCapabilitiesRequest, NodeGetInfoRequest, NodeGetInfoResponse, ProbeRequest,
    node_service_capability,
};
use std::future::Future;
use std::{path::Path, time::Duration};
use tokio::time::Instant;
use tracing::debug;

/// The questions' full names, as metrics have them.
pub const GET_PLUGIN_INFO: &str = "/csi.v1.Identity/GetPluginInfo";
/// See [`probe`].
pub const PROBE: &str = "/csi.v1.Identity/Probe";
/// See [`stages`].
pub const NODE_GET_CAPABILITIES: &str = "/csi.v1.Node/NodeGetCapabilities";
/// See [`node_info`].
pub const NODE_GET_INFO: &str = "/csi.v1.Node/NodeGetInfo";

/// The driver's name, as it gives it; may be empty or unfit for a file name.
///
/// # Errors
/// [`CallError`] when it cannot be reached, does not answer within `deadline`, or answers with an error.
pub async fn plugin_name(driver_socket: &Path, deadline: Duration) -> Result<String, CallError> {
    let call = call(driver_socket, deadline, |connection| async move {
        let mut client = IdentityClient::with_origin(connection, origin());
        Ok(client.get_plugin_info(request(GetPluginInfoRequest {})).await?.into_inner().name)
    });
    told(GET_PLUGIN_INFO, call).await
}

/// What the driver will tell the kubelet about this node.
///
/// # Errors
/// As [`plugin_name`]. Whatever fails here would fail at the kubelet.
pub async fn node_info(driver_socket: &Path, deadline: Duration) -> Result<NodeGetInfoResponse, CallError> {
    let call = call(driver_socket, deadline, |connection| async move {
        let mut client = NodeClient::with_origin(connection, origin());
        Ok(client.node_get_info(request(NodeGetInfoRequest {})).await?.into_inner())
    });
    told(NODE_GET_INFO, call).await
}

/// Whether the driver says that it is ready; saying nothing about it counts as yes.
///
/// # Errors
/// As [`plugin_name`].
pub async fn probe(driver_socket: &Path, deadline: Duration) -> Result<bool, CallError> {
    let call = call(driver_socket, deadline, |connection| async move {
        let mut client = IdentityClient::with_origin(connection, origin());
        Ok(client.probe(request(ProbeRequest {})).await?.into_inner().ready.unwrap_or(true))
    });
    told(PROBE, call).await
}

/// Whether the driver stages volumes before it publishes them.
///
/// # Errors
/// As [`plugin_name`].
pub async fn stages(driver_socket: &Path, deadline: Duration) -> Result<bool, CallError> {
    let call = call(driver_socket, deadline, |connection| async move {
        let mut client = NodeClient::with_origin(connection, origin());
        let answer = client.node_get_capabilities(request(NodeGetCapabilitiesRequest {})).await?.into_inner();
        Ok(answer.capabilities.iter().any(|capability| match capability.r#type {
            Some(node_service_capability::Type::Rpc(rpc)) => {
                rpc.r#type() == node_service_capability::rpc::Type::StageUnstageVolume
            }
            None => false,
        }))
    });
    told(NODE_GET_CAPABILITIES, call).await
}

/// Logs the call at `--v=4`: method, code and time, never a payload.
async fn told<T>(method: &'static str, call: impl Future<Output = Result<T, CallError>>) -> Result<T, CallError> {
    let began = Instant::now();
    let result = call.await;
    let code = match &result {
        Ok(_) => Some(tonic::Code::Ok),
        Err(error) => error.grpc_code(),
    };
    debug!(grpc.method = method, grpc.code = code.map_or("not connected", code::name), took = ?began.elapsed(), "GRPC call");
    result
}
