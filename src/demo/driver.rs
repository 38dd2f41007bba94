//! An embedded CSI driver that mounts nothing, and can be told to misbehave.

use crate::api::csi::identity_server::{Identity, IdentityServer};
use crate::api::csi::node_server::{Node, NodeServer};
use crate::api::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest, NodeGetCapabilitiesResponse,
    NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeStageVolumeRequest, NodeStageVolumeResponse,
    NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest, NodeUnstageVolumeResponse,
    ProbeRequest, ProbeResponse,
};
use crate::grpc::serve::serve;
use crate::parts::Parts;
use http::{Request as HttpRequest, Response as HttpResponse};
use hyper::body::Incoming;
use std::convert::Infallible;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fs, io};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::{Code, Request, Response, Status};
use tower_service::Service;

/// How the driver behaves from now on.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// What GetPluginInfo answers.
    pub name: String,
    /// What NodeGetInfo answers.
    pub node_id: String,
    /// Each answer takes this long.
    pub delay: Duration,
    /// NodeGetInfo fails with this text.
    pub node_info_error: Option<String>,
    /// Only this `:authority` is answered, as strict servers do.
    pub only_authority: Option<String>,
    /// What Probe answers; `None` leaves it out.
    pub ready: Option<bool>,
    /// Probe fails with this code.
    pub probe_error: Option<Code>,
    /// What calls about volumes are answered with: `Ok` says done, though nothing is mounted.
    pub volumes: Code,
    /// The calls about volumes, by method.
    pub volume_calls: Vec<&'static str>,
    /// How often NodeGetInfo was asked.
    pub node_info_calls: u32,
    /// How often Probe was asked.
    pub probe_calls: u32,
}

/// A running driver; its socket goes with it.
#[derive(Debug)]
pub struct DemoDriver {
    behaviour: Arc<Mutex<Behaviour>>,
    path: PathBuf,
    parts: Parts,
}

impl DemoDriver {
    /// Listens at `path`, replacing a socket that is there, and calls itself `name`.
    ///
    /// # Errors
    /// When it cannot listen there.
    pub fn start(path: &Path, name: &str) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let listener = UnixListener::bind(path)?;
        let behaviour = Arc::new(Mutex::new(Behaviour {
            name: name.to_owned(),
            node_id: "demo-node".to_owned(),
            delay: Duration::ZERO,
            node_info_error: None,
            only_authority: None,
            ready: Some(true),
            probe_error: None,
            volumes: Code::Unimplemented,
            volume_calls: Vec::new(),
            node_info_calls: 0,
            probe_calls: 0,
        }));
        let parts = Parts::new(CancellationToken::new());
        let service = Services {
            identity: IdentityServer::new(Answers(Arc::clone(&behaviour))),
            node: NodeServer::new(Answers(Arc::clone(&behaviour))),
            behaviour: Arc::clone(&behaviour),
        };
        serve("demo driver", listener, service, &parts, parts.stop().clone());
        Ok(Self { behaviour, path: path.to_owned(), parts })
    }

    /// The behaviour, to look at or to change.
    pub fn behaviour(&self) -> MutexGuard<'_, Behaviour> {
        lock(&self.behaviour)
    }
}

impl Drop for DemoDriver {
    fn drop(&mut self) {
        self.parts.stop().cancel();
        // Somebody else may have removed the folder already.
        drop(fs::remove_file(&self.path));
    }
}

fn lock(behaviour: &Mutex<Behaviour>) -> MutexGuard<'_, Behaviour> {
    behaviour.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Both services on one socket, told apart by their paths.
#[derive(Clone)]
struct Services {
    identity: IdentityServer<Answers>,
    node: NodeServer<Answers>,
    behaviour: Arc<Mutex<Behaviour>>,
}

impl Service<HttpRequest<Incoming>> for Services {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Incoming>) -> Self::Future {
        let wanted = lock(&self.behaviour).only_authority.clone();
        let authority = request.uri().authority().map(ToString::to_string);
        if wanted.is_some() && wanted != authority {
            let status = Status::invalid_argument(format!("authority {authority:?} is not served here"));
            return Box::pin(async move { Ok(status.into_http()) });
        }
        if request.uri().path().starts_with("/csi.v1.Identity/") {
            self.identity.call(request)
        } else {
            self.node.call(request)
        }
    }
}

#[derive(Debug, Clone)]
struct Answers(Arc<Mutex<Behaviour>>);

impl Answers {
    async fn behaviour(&self) -> Behaviour {
        let behaviour = lock(&self.0).clone();
        tokio::time::sleep(behaviour.delay).await;
        behaviour
    }

    async fn about_volume<T: Default>(&self, method: &'static str) -> Result<Response<T>, Status> {
        lock(&self.0).volume_calls.push(method);
        let code = self.behaviour().await.volumes;
        if code == Code::Ok {
            return Ok(Response::new(T::default()));
        }
        Err(Status::new(code, "the demo driver mounts nothing"))
    }
}

#[tonic::async_trait]
impl Identity for Answers {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let name = self.behaviour().await.name;
        Ok(Response::new(GetPluginInfoResponse { name, vendor_version: "demo".into(), ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        Ok(Response::new(GetPluginCapabilitiesResponse::default()))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        lock(&self.0).probe_calls += 1;
        let behaviour = self.behaviour().await;
        match behaviour.probe_error {
            Some(code) => Err(Status::new(code, "as told")),
            None => Ok(Response::new(ProbeResponse { ready: behaviour.ready })),
        }
    }
}

#[tonic::async_trait]
impl Node for Answers {
    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Result<Response<NodeGetInfoResponse>, Status> {
        lock(&self.0).node_info_calls += 1;
        let behaviour = self.behaviour().await;
        match behaviour.node_info_error {
            Some(text) => Err(Status::internal(text)),
            None => Ok(Response::new(NodeGetInfoResponse { node_id: behaviour.node_id, ..Default::default() })),
        }
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        Ok(Response::new(NodeGetCapabilitiesResponse::default()))
    }

    async fn node_stage_volume(
        &self,
        _: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        self.about_volume("NodeStageVolume").await
    }

    async fn node_unstage_volume(
        &self,
        _: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        self.about_volume("NodeUnstageVolume").await
    }

    async fn node_publish_volume(
        &self,
        _: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        self.about_volume("NodePublishVolume").await
    }

    async fn node_unpublish_volume(
        &self,
        _: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        self.about_volume("NodeUnpublishVolume").await
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        self.about_volume("NodeGetVolumeStats").await
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        self.about_volume("NodeExpandVolume").await
    }
}
