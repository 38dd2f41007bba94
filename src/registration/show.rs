//! Puts the registration socket where the kubelet sees it, and takes it away.

use super::server::{Calls, KubeletService};
use super::socket::{Found, PublishError};
use super::{RegistrationPart, Served};
use crate::grpc::connect::chain;
use crate::parts::Fatal;
use crate::policy::registration::{Event, PathState, Rival};
use std::error::Error;
use tokio::time::Instant;
use tracing::{error, info, warn};

impl RegistrationPart {
    pub(super) async fn publish(&mut self, rival: Rival) -> Result<Event, Fatal> {
        if rival == Rival::Yield {
            match self.looks.state(self.ours()).await? {
                Some(PathState::Ours | PathState::Gone | PathState::Dead) => {}
                // Somebody who is only silent so far gets the benefit of the doubt.
                Some(PathState::Held) | None => return Ok(Event::Path(PathState::Held)),
            }
        }
        match self.settings.socket.publish() {
            Ok((listener, id)) => {
                let stop = self.parts.stop().child_token();
                let serial = self.next_serial;
                self.next_serial += 1;
                let calls = Calls { serial, sender: self.calls.clone() };
                let service = KubeletService::new(&self.settings.driver_name, &self.settings.endpoint, calls);
                service.serve(listener, &self.parts, stop.clone());
                if let Some(old) = self.served.replace(Served { id, serial, stop }) {
                    old.stop.cancel();
                }
                info!(
                    driver.name = self.settings.driver_name,
                    socket.path = %self.settings.socket.path().display(),
                    endpoint = self.settings.endpoint,
                    "Registration Server started"
                );
                self.metrics.count_publication();
                self.trouble = None;
                self.lost = false;
                if self.publish_quiet.end() {
                    info!(socket.path = %self.settings.socket.path().display(), "the registration socket is in its place again");
                }
                Ok(Event::Published)
            }
            Err(error @ PublishError::NotASocket { .. }) => Err(error.into()),
            Err(error) => {
                let text = chain(&error);
                if self.publish_quiet.begin_or_repeat(&text, Instant::now()) {
                    error!(error = &error as &dyn Error, "cannot show the registration socket; trying again");
                }
                self.trouble = Some(text);
                self.lost = true;
                Ok(Event::PublishFailed)
            }
        }
    }

    /// Unlinks our socket, or a dead one in its place, and only then stops listening. When that fails we go on serving what
    /// the kubelet still sees, and the next look tries again.
    pub(super) async fn withdraw(&mut self) {
        self.asking = None;
        let socket = self.settings.socket.clone();
        let removed = match socket.found() {
            Ok(Found::Socket(id)) => {
                if Some(id) == self.ours() || self.looks.rival().await == super::path::Rival::Dead {
                    socket.withdraw(id)
                } else {
                    Ok(false)
                }
            }
            Ok(Found::Nothing | Found::NotASocket) => Ok(false),
            Err(error) => Err(error),
        };
        match removed {
            Ok(unlinked) => {
                self.stuck_quiet.end();
                if unlinked {
                    info!(
                        driver.name = self.settings.driver_name,
                        socket.path = %socket.path().display(),
                        "registration socket withdrawn; the kubelet drops the driver"
                    );
                }
                self.stuck = false;
                self.trouble = None;
                if let Some(served) = self.served.take() {
                    served.stop.cancel();
                }
            }
            Err(error) => {
                let text = format!("cannot unlink {}: {error}", socket.path().display());
                if self.stuck_quiet.begin_or_repeat(&text, Instant::now()) {
                    error!(
                        error = &error as &dyn Error,
                        socket.path = %socket.path().display(),
                        "cannot unlink the registration socket, so the kubelet still has the driver; trying again"
                    );
                }
                self.stuck = true;
                self.trouble = Some(text);
            }
        }
    }

    /// Unhealthy, and somebody else serves our path: nothing of ours to withdraw, but no reason to be calm either.
    pub(super) fn note_other_agent(&mut self, path: Option<PathState>) {
        const OTHER: &str = "another agent serves the registration socket, so the kubelet still has the driver";
        if path == Some(PathState::Held) {
            if self.other_quiet.begin_or_repeat(OTHER, Instant::now()) {
                warn!(socket.path = %self.settings.socket.path().display(), "unhealthy, but {OTHER}");
            }
            self.trouble = Some(OTHER.to_owned());
        } else if self.other_quiet.end() {
            self.trouble = None;
        }
    }
}
