//! What the log says when the registration changes.

use super::RegistrationPart;
use crate::policy::registration::State;
use tracing::{info, warn};

impl RegistrationPart {
    /// Our patience with the kubelet is at its end: say why we publish again.
    pub(super) fn tell_impatience(&self) {
        let waited = self.policy.since().elapsed();
        match self.policy.state() {
            State::Shown { .. } => {
                self.metrics.count_silence();
                warn!(
                    socket.path = %self.settings.socket.path().display(),
                    waited = ?waited,
                    "the kubelet does not ask for the driver: is it running, and does the host path behind --plugin-registration-path \
                     lie in its root folder (/var/lib/kubelet/plugins_registry unless it was moved)? Showing the socket again"
                );
            }
            State::Answered { .. } => {
                warn!(waited = ?waited, "the kubelet asked for the driver and never said how it ended; showing the socket again");
            }
            State::Refused { .. } => {
                warn!(waited = ?waited, "the kubelet refused and did not come back; showing the socket again");
            }
            State::Hidden { .. }
            | State::Asking { .. }
            | State::Publishing { .. }
            | State::Registered
            | State::StandingBy => {}
        }
    }

    /// The state was `before`; say what is new, if anything.
    pub(super) fn tell_change(&mut self, before: State) {
        let after = self.policy.state();
        if std::mem::discriminant(&before) == std::mem::discriminant(&after) {
            return;
        }
        let path = self.settings.socket.path().display();
        match after {
            State::Registered => {
                info!(driver.name = self.settings.driver_name, "the kubelet has registered the driver")
            }
            State::StandingBy => info!(
                socket.path = %path,
                "another agent serves our registration socket's path; standing by until it stops answering"
            ),
            State::Asking { .. } => match before {
                State::Registered | State::StandingBy => {
                    warn!(socket.path = %path, "the registration socket is gone or dead; showing ours again");
                }
                State::Hidden { .. }
                | State::Asking { .. }
                | State::Publishing { .. }
                | State::Shown { .. }
                | State::Answered { .. }
                | State::Refused { .. } => {}
            },
            State::Hidden { .. }
            | State::Publishing { .. }
            | State::Shown { .. }
            | State::Answered { .. }
            | State::Refused { .. } => {}
        }
    }
}
