//! What the rest of the process may know about the registration.

use crate::policy::registration::State;
use std::path::PathBuf;
use std::time::Instant;

/// Where the registration stands, in an operator's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The driver has not answered yet, so there is nothing to register.
    WaitingForDriver,
    /// The probes have not decided yet.
    WaitingForHealth,
    /// Withdrawn, because the verdict is unhealthy.
    Withdrawn,
    /// About to be shown.
    Showing,
    /// It should be shown and cannot be.
    Lost,
    /// Shown, and the kubelet has not confirmed yet.
    WaitingForKubelet,
    /// The kubelet refused.
    Refused,
    /// The kubelet has confirmed.
    Registered,
    /// Another agent holds the path.
    StandingBy,
}

impl Phase {
    /// The phase of a policy's state. `wanted`: what the verdict says, once there is one; `trouble`: the driver does not
    /// answer; `lost`: the socket could not be shown.
    pub fn of(state: State, wanted: Option<bool>, trouble: bool, lost: bool) -> Self {
        match state {
            State::Hidden { .. } => match wanted {
                None => Self::WaitingForHealth,
                Some(false) => Self::Withdrawn,
                Some(true) => Self::Showing,
            },
            State::Asking { .. } | State::Publishing { .. } if lost => Self::Lost,
            State::Asking { .. } if trouble => Self::WaitingForDriver,
            State::Asking { .. } | State::Publishing { .. } => Self::Showing,
            State::Shown { .. } | State::Answered { .. } => Self::WaitingForKubelet,
            State::Refused { .. } => Self::Refused,
            State::Registered => Self::Registered,
            State::StandingBy => Self::StandingBy,
        }
    }
}

/// The registration, as told to HTTP and to people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Where it stands.
    pub phase: Phase,
    /// Since when.
    pub since: Instant,
    /// Whether the kubelet has confirmed us since our start.
    pub confirmed: bool,
    /// The driver's name, once known.
    pub driver_name: Option<String>,
    /// The registration socket's path, once known.
    pub socket: Option<PathBuf>,
    /// What stands in the way, if anything.
    pub trouble: Option<String>,
}

impl Status {
    /// Before the driver's name is known.
    pub fn waiting(now: Instant) -> Self {
        Self {
            phase: Phase::WaitingForDriver,
            since: now,
            confirmed: false,
            driver_name: None,
            socket: None,
            trouble: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_means_three_things() {
        let hidden = |wanted| Phase::of(State::Hidden { not_before: None }, wanted, false, false);
        assert_eq!(hidden(None), Phase::WaitingForHealth);
        assert_eq!(hidden(Some(false)), Phase::Withdrawn);
        assert_eq!(hidden(Some(true)), Phase::Showing);
    }

    #[test]
    fn a_socket_that_cannot_be_shown_stays_lost_while_the_driver_is_asked_again() {
        assert_eq!(Phase::of(State::Asking { at: None }, Some(true), true, true), Phase::Lost);
        assert_eq!(Phase::of(State::Asking { at: None }, Some(true), true, false), Phase::WaitingForDriver);
    }
}
