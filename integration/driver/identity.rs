//! The Identity service: a name, and always ready.

use csi_warden::api::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse, identity_server::Identity, plugin_capability,
};
use tonic::{Request, Response, Status};

use crate::call_log::CallLog;

/// What the driver says about itself.
#[derive(Clone)]
pub(crate) struct Driver {
    name: String,
    log: CallLog,
}

impl Driver {
    /// A driver of that name.
    pub(crate) fn new(name: String, log: CallLog) -> Self {
        Self { name, log }
    }
}

#[tonic::async_trait]
impl Identity for Driver {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let vendor_version = env!("CARGO_PKG_VERSION").into();
        let info = GetPluginInfoResponse { name: self.name.clone(), vendor_version, ..Default::default() };
        self.log.answer("GetPluginInfo", "", Ok(info))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let topology = plugin_capability::Service {
            r#type: plugin_capability::service::Type::VolumeAccessibilityConstraints.into(),
        };
        let capability = PluginCapability { r#type: Some(plugin_capability::Type::Service(topology)) };
        let capabilities = GetPluginCapabilitiesResponse { capabilities: vec![capability] };
        self.log.answer("GetPluginCapabilities", "", Ok(capabilities))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        self.log.answer("Probe", "", Ok(ProbeResponse { ready: Some(true) }))
    }
}
