//! What the rest of the process may know about the registration.

use crate::policy::registration::{Registration, State};
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
    /// The phase of the policy. `trouble`: the driver does not answer; `lost`: the last try to show the socket failed.
    pub fn of(policy: &Registration, trouble: bool, lost: bool) -> Self {
        match policy.state() {
            State::Hidden { .. } => match policy.wanted() {
                None => Self::WaitingForHealth,
                Some(false) => Self::Withdrawn,
                Some(true) => Self::Showing,
            },
            // About to be shown anew, while the old socket is still there and answers.
            State::Asking { .. } | State::Publishing { .. } if policy.shown() => Self::WaitingForKubelet,
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
    /// The socket should be withdrawn and cannot be.
    pub stuck: bool,
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
            stuck: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::registration::{Event, RegistrationTimings};
    use crate::policy::some_instant;

    fn policy(events: &[Event]) -> Registration {
        let now = some_instant();
        let mut policy = Registration::new(RegistrationTimings::default(), now);
        for event in events {
            policy.on(*event, now);
        }
        policy
    }

    #[test]
    fn hidden_means_three_things() {
        let phase = |events: &[Event]| Phase::of(&policy(events), false, false);
        assert_eq!(phase(&[]), Phase::WaitingForHealth);
        assert_eq!(phase(&[Event::Unwanted]), Phase::Withdrawn);
        assert_eq!(phase(&[Event::Unwanted, Event::Wanted]), Phase::Showing);
    }

    #[test]
    fn lost_is_only_a_socket_that_is_not_there() {
        let asking = policy(&[Event::Wanted]);
        assert_eq!(Phase::of(&asking, true, true), Phase::Lost);
        assert_eq!(Phase::of(&asking, true, false), Phase::WaitingForDriver);
        let mut impatient = policy(&[Event::Wanted, Event::DriverAnswered, Event::Published]);
        let until = impatient.deadline().unwrap();
        impatient.on(Event::Tick, until);
        assert!(matches!(impatient.state(), State::Asking { .. }));
        assert_eq!(
            Phase::of(&impatient, true, true),
            Phase::WaitingForKubelet,
            "the old one is still there and answers"
        );
    }
}
