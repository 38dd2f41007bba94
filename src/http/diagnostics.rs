//! The registrar's duty: is the registration alive, confirmed, there.
//!
//! | path | 200 | else |
//! |---|---|---|
//! | `/healthz` | alive: waiting, registered, standing by, or withdrawn on purpose | 404 or 500: the socket is lost or dead |
//! | `/readyz` | the kubelet has confirmed us since our start, or the driver is withdrawn on purpose | 503 |
//! | `/registered` | the kubelet has the driver | 503 |
//! | `/metrics` | docs/metrics.md | |

use super::{Answer, Answers};
use crate::grpc::connect::{CallError, chain};
use crate::metrics::Metrics;
use crate::registration::check;
use crate::registration::{Phase, Status};
use http::StatusCode;
use std::io;
use std::time::Duration;
use tokio::sync::watch;

/// Answers about the registration.
#[derive(Debug)]
pub struct Diagnostics {
    status: watch::Receiver<Status>,
    metrics: Metrics,
    /// How long our own registration socket may take to answer.
    deadline: Duration,
    pprof: bool,
}

impl Answers for Diagnostics {
    async fn get(&self, path: &str) -> Answer {
        let status = self.status.borrow().clone();
        match path {
            "/healthz" => self.healthz(&status).await,
            "/readyz" => readyz(&status),
            "/registered" => registered(&status),
            "/metrics" => Answer::metrics(&self.metrics),
            _ => match path.strip_prefix("/debug/pprof") {
                Some(rest) if self.pprof => pprof(rest),
                Some(_) | None => Answer::not_found(),
            },
        }
    }
}

impl Diagnostics {
    /// Answers from `status`; `/healthz` asks the registration socket itself, within `deadline`.
    pub fn new(status: watch::Receiver<Status>, metrics: Metrics, deadline: Duration, pprof: bool) -> Self {
        Self { status, metrics, deadline, pprof }
    }

    async fn healthz(&self, status: &Status) -> Answer {
        match status.phase {
            Phase::WaitingForDriver
            | Phase::WaitingForHealth
            | Phase::Withdrawn
            | Phase::Showing
            | Phase::StandingBy => Answer::text(StatusCode::OK, format!("ok: {}", words(status))),
            Phase::Lost => {
                Answer::text(StatusCode::NOT_FOUND, format!("registration socket does not exist: {}", words(status)))
            }
            Phase::WaitingForKubelet | Phase::Refused | Phase::Registered => self.ask_socket(status).await,
        }
    }

    /// As upstream: the socket must exist and answer GetInfo with our driver's name.
    async fn ask_socket(&self, status: &Status) -> Answer {
        let Some(socket) = &status.socket else {
            return Answer::text(StatusCode::OK, "ok");
        };
        match check::plugin_name(socket, self.deadline).await {
            Ok(name) if Some(&name) == status.driver_name.as_ref() => Answer::text(StatusCode::OK, "ok"),
            Ok(name) => Answer::text(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("{} answers for another driver, {name:?}", socket.display()),
            ),
            Err(CallError::Connect { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Answer::text(StatusCode::NOT_FOUND, "registration socket does not exist")
            }
            Err(error) => Answer::text(StatusCode::INTERNAL_SERVER_ERROR, chain(&error)),
        }
    }
}

fn readyz(status: &Status) -> Answer {
    let ready = match status.phase {
        Phase::Withdrawn => !status.stuck,
        Phase::Registered => true,
        Phase::WaitingForDriver
        | Phase::WaitingForHealth
        | Phase::Showing
        | Phase::Lost
        | Phase::WaitingForKubelet
        | Phase::Refused
        | Phase::StandingBy => status.confirmed,
    };
    Answer::text(if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, words(status))
}

fn registered(status: &Status) -> Answer {
    let code = if status.phase == Phase::Registered { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    Answer::text(code, words(status))
}

/// Where the registration stands, for a person.
fn words(status: &Status) -> String {
    let place = match status.phase {
        Phase::WaitingForDriver => "waiting for the driver",
        Phase::WaitingForHealth => "waiting for the first health verdict",
        Phase::Withdrawn => "withdrawn on purpose: the driver is unhealthy on this node",
        Phase::Showing => "showing the registration socket",
        Phase::Lost => "the registration socket cannot be shown",
        Phase::WaitingForKubelet => "waiting for the kubelet",
        Phase::Refused => "refused by the kubelet, which tries again by itself",
        Phase::Registered => "registered",
        Phase::StandingBy => "standing by: another agent serves the registration socket",
    };
    match &status.trouble {
        Some(trouble) => format!("{place}: {trouble}"),
        None => place.to_owned(),
    }
}

fn pprof(rest: &str) -> Answer {
    match rest {
        "/cmdline" => {
            let line: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
            Answer::text(StatusCode::OK, line.join("\0"))
        }
        "" | "/" => Answer::text(
            StatusCode::OK,
            "cmdline: this process's arguments\nprofile, symbol, trace: need Go's runtime, which this program does not have; \
             use perf on the node\n",
        ),
        _ => Answer::text(
            StatusCode::NOT_IMPLEMENTED,
            "this profile needs Go's runtime, which this program does not have; use perf on the node\n",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;

    fn status(phase: Phase, confirmed: bool) -> Status {
        Status { phase, confirmed, ..Status::waiting(some_instant()) }
    }

    fn diagnostics(status: watch::Receiver<Status>, pprof: bool) -> Diagnostics {
        Diagnostics::new(status, Metrics::new(), Duration::from_secs(1), pprof)
    }

    const ALL: [Phase; 9] = [
        Phase::WaitingForDriver,
        Phase::WaitingForHealth,
        Phase::Withdrawn,
        Phase::Showing,
        Phase::Lost,
        Phase::WaitingForKubelet,
        Phase::Refused,
        Phase::Registered,
        Phase::StandingBy,
    ];

    #[test]
    fn only_a_confirmed_registration_counts_as_registered() {
        for phase in ALL {
            let code = registered(&status(phase, true)).status;
            assert_eq!(code == StatusCode::OK, phase == Phase::Registered, "{phase:?}");
        }
    }

    #[test]
    fn readiness_stays_after_the_first_confirmation_and_a_sick_node_is_ready() {
        for phase in ALL {
            assert_eq!(readyz(&status(phase, true)).status, StatusCode::OK, "{phase:?}");
            let unconfirmed = readyz(&status(phase, false)).status;
            assert_eq!(
                unconfirmed == StatusCode::OK,
                matches!(phase, Phase::Registered | Phase::Withdrawn),
                "{phase:?}"
            );
        }
    }

    #[tokio::test]
    async fn liveness_fails_only_for_a_socket_that_is_lost_or_dead() {
        for phase in ALL {
            let (sender, receiver) =
                watch::channel(Status { socket: Some("/no/such/socket".into()), ..status(phase, false) });
            let answer = diagnostics(receiver, false).get("/healthz").await;
            let lost = matches!(phase, Phase::Lost | Phase::WaitingForKubelet | Phase::Refused | Phase::Registered);
            assert_eq!(
                answer.status,
                if lost { StatusCode::NOT_FOUND } else { StatusCode::OK },
                "{phase:?}: {answer:?}"
            );
            drop(sender);
        }
    }

    #[tokio::test]
    async fn pprof_is_served_only_when_asked_for() {
        let (_sender, receiver) = watch::channel(status(Phase::Registered, true));
        let with = diagnostics(receiver.clone(), true);
        assert_eq!(with.get("/debug/pprof/cmdline").await.status, StatusCode::OK);
        assert_eq!(with.get("/debug/pprof/profile").await.status, StatusCode::NOT_IMPLEMENTED);
        let without = diagnostics(receiver, false);
        for path in ["/debug/pprof/cmdline", "/metricsx", "/"] {
            assert_eq!(without.get(path).await.status, StatusCode::NOT_FOUND);
        }
    }
}
