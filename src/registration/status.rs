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
    /// The phase of a policy's state. `trouble`: the last try to get on failed.
    pub fn of(state: State, trouble: bool) -> Self {
        match (state, trouble) {
            (State::Hidden { .. }, _) => Self::Withdrawn,
            (State::Asking { .. }, true) => Self::WaitingForDriver,
            (State::Asking { .. }, false) | (State::Publishing { .. }, false) => Self::Showing,
            (State::Publishing { .. }, true) => Self::Lost,
            (State::Shown { .. } | State::Answered { .. }, _) => Self::WaitingForKubelet,
            (State::Refused { .. }, _) => Self::Refused,
            (State::Registered, _) => Self::Registered,
            (State::StandingBy, _) => Self::StandingBy,
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
    /// Whether the verdict allows the driver to be seen.
    pub wanted: bool,
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
            wanted: false,
        }
    }
}
