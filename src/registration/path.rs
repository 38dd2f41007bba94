//! What holds the path of the registration socket: ours, nothing, a dead socket, or another agent.

use super::check;
use super::socket::{FileId, Found, PublishError, SocketPath};
use crate::grpc::connect::CallError;
use crate::parts::Fatal;
use crate::policy::registration::PathState;
use crate::quiet::Quiet;
use std::future::Future;
use std::io;
use std::time::Duration;
use tokio::time::Instant;
use tracing::warn;

/// How long a socket in our place may take to answer GetInfo; the kubelet gives it as long.
const RIVAL_DEADLINE: Duration = Duration::from_secs(1);

/// A socket that accepts but does not answer counts as dead after this many looks in a row.
const SILENT_LOOKS: u32 = 3;

/// Looks at the path, and remembers who was silent there.
#[derive(Debug)]
pub(super) struct PathLooks {
    socket: SocketPath,
    driver_name: String,
    silent_looks: u32,
    trouble: Quiet,
    stranger: Quiet,
}

impl PathLooks {
    pub(super) fn new(socket: SocketPath, driver_name: String) -> Self {
        Self { socket, driver_name, silent_looks: 0, trouble: Quiet::default(), stranger: Quiet::default() }
    }

    /// What is there, if `ours` is our socket. `None` while it cannot be told.
    ///
    /// # Errors
    /// When something that is not a socket holds the path.
    pub(super) async fn state(&mut self, ours: Option<FileId>) -> Result<Option<PathState>, Fatal> {
        let found = match self.socket.found() {
            Ok(found) => found,
            Err(error) => {
                if self.trouble.begin_or_repeat(&error.to_string(), Instant::now()) {
                    warn!(error = &error as &dyn std::error::Error, "cannot look at the registration socket");
                }
                return Ok(None);
            }
        };
        self.trouble.end();
        match found {
            Found::Nothing => Ok(Some(PathState::Gone)),
            Found::NotASocket => Err(PublishError::NotASocket { path: self.socket.path().to_owned() }.into()),
            Found::Socket(id) if Some(id) == ours => {
                self.silent_looks = 0;
                Ok(Some(PathState::Ours))
            }
            Found::Socket(_) => Ok(self.rivals_state().await),
        }
    }

    async fn rivals_state(&mut self) -> Option<PathState> {
        let rival = self.rival().await;
        self.silent_looks = if matches!(rival, Rival::Silent) { self.silent_looks + 1 } else { 0 };
        match rival {
            Rival::Answers(name) if name != self.driver_name => {
                if self.stranger.begin_or_repeat(&name, Instant::now()) {
                    warn!(
                        socket.path = %self.socket.path().display(),
                        other.name = name,
                        "another driver answers on our registration socket's path; standing by"
                    );
                }
                Some(PathState::Held)
            }
            Rival::Answers(_) | Rival::Unknown => Some(PathState::Held),
            Rival::Silent => (self.silent_looks >= SILENT_LOOKS).then_some(PathState::Dead),
            Rival::Dead => Some(PathState::Dead),
        }
    }

    /// Who answers on the socket at the path that is not ours. The future borrows nothing.
    pub(super) fn rival(&self) -> impl Future<Output = Rival> + Send + use<> {
        let socket = self.socket.clone();
        async move {
            match check::plugin_name(socket.path(), RIVAL_DEADLINE).await {
                Ok(name) => Rival::Answers(name),
                Err(CallError::Connect { source, .. }) => {
                    let dead = matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound);
                    if dead { Rival::Dead } else { Rival::Unknown }
                }
                Err(CallError::Closed { .. } | CallError::Deadline { .. } | CallError::Status { .. }) => Rival::Silent,
            }
        }
    }
}

/// Who is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Rival {
    /// Somebody, who gives this name.
    Answers(String),
    /// Somebody accepts, and says nothing sensible.
    Silent,
    /// Nobody.
    Dead,
    /// We may not ask, and a permission denied does not tell that nobody is there.
    Unknown,
}
