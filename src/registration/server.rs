//! The kubelet's side: answers GetInfo and takes in how the registration ended.

use crate::api::registration::registration_server::{Registration, RegistrationServer};
use crate::api::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use crate::grpc::connect::USER_AGENT_NAME;
use crate::grpc::serve::serve;
use crate::parts::Parts;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::{debug, info};

/// The registration interface's name for a CSI driver.
const CSI_PLUGIN: &str = "CSIPlugin";

/// The version of the CSI handshake, which the kubelet wants to be 1.x.
const CSI_VERSION: &str = "1.0.0";

/// What the kubelet did.
#[derive(Debug)]
pub enum KubeletCall {
    /// It asked who we are.
    GetInfo,
    /// It has the driver.
    Accepted,
    /// It refused, and says why.
    Refused(String),
}

/// What the kubelet did, and on which of the sockets that we have served.
#[derive(Debug)]
pub struct ServedCall {
    /// The socket's.
    pub serial: u64,
    /// What it did.
    pub call: KubeletCall,
}

/// Where one socket's calls go.
#[derive(Debug, Clone)]
pub struct Calls {
    /// The socket's.
    pub serial: u64,
    /// To whoever keeps the registration.
    pub sender: mpsc::Sender<ServedCall>,
}

/// Answers the kubelet. Our own health checks are answered too, and not reported.
#[derive(Debug, Clone)]
pub struct KubeletService {
    info: PluginInfo,
    calls: Calls,
}

impl KubeletService {
    /// Announces `driver_name`, to be dialled by the kubelet at `endpoint`, a path on the host.
    pub fn new(driver_name: &str, endpoint: &str, calls: Calls) -> Self {
        let info = PluginInfo {
            r#type: CSI_PLUGIN.into(),
            name: driver_name.into(),
            endpoint: endpoint.into(),
            supported_versions: vec![CSI_VERSION.into()],
        };
        Self { info, calls }
    }

    /// Serves every connection on `listener` until `stop`; the listener is closed then.
    pub fn serve(self, listener: UnixListener, parts: &Parts, stop: CancellationToken) {
        serve("registration server", listener, RegistrationServer::new(self), parts, stop);
    }

    async fn report(&self, call: KubeletCall) {
        // The receiver is gone only while we stop; then nobody is interested.
        drop(self.calls.sender.send(ServedCall { serial: self.calls.serial, call }).await);
    }
}

#[tonic::async_trait]
impl Registration for KubeletService {
    async fn get_info(&self, request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        if !is_our_own(&request) {
            debug!(
                plugin.name = self.info.name,
                plugin.endpoint = self.info.endpoint,
                plugin.versions = CSI_VERSION,
                "Received GetInfo call"
            );
            self.report(KubeletCall::GetInfo).await;
        }
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        info!(
            plugin.registered = status.plugin_registered,
            error = status.error,
            "Received NotifyRegistrationStatus call"
        );
        let call = if status.plugin_registered { KubeletCall::Accepted } else { KubeletCall::Refused(status.error) };
        self.report(call).await;
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

fn is_our_own<T>(request: &Request<T>) -> bool {
    request
        .metadata()
        .get("user-agent")
        .is_some_and(|agent| agent.as_encoded_bytes().starts_with(USER_AGENT_NAME.as_bytes()))
}
