//! The `csi` probe: the driver's own Identity.Probe, on a fresh connection each time, so that a driver whose socket is gone is
//! noticed although an old connection would still answer.

use super::Probe;
use super::lane::Abandoned;
use crate::driver_ready::{Answer, DriverReady};
use crate::grpc::connect::{CallError, chain, fit_for_a_line};
use crate::policy::outcome::{Outcome, Reason, Severity, with_detail};
use std::error::Error;
use std::future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tonic::Code;

/// The probe.
#[derive(Debug)]
pub struct Csi {
    socket: PathBuf,
    ready: DriverReady,
}

impl Csi {
    /// Asks the driver at `socket`.
    pub fn new(socket: &Path, ready: DriverReady) -> Self {
        Self { socket: socket.to_owned(), ready }
    }
}

impl Probe for Csi {
    type Seen = Answer;

    async fn look(&mut self, timeout: Duration) -> Result<Self::Seen, Abandoned> {
        let answer = self.ready.ask(&self.socket, timeout).await;
        if matches!(*answer, Err(CallError::Deadline { .. })) { Err(Abandoned::Late) } else { Ok(answer) }
    }

    fn judge(&mut self, seen: Self::Seen, _now: Instant) -> Option<Outcome> {
        Some(judge(&seen))
    }

    async fn changed(&mut self) {
        future::pending().await
    }
}

/// A driver that is away or says that it is not ready fails. One that answers with an error of its own is there: Probe is
/// optional, and its errors are no failures of ours to judge.
fn judge(answer: &Result<bool, CallError>) -> Outcome {
    match answer {
        Ok(true) => Outcome::Success,
        Ok(false) => {
            let reason = Reason::new("DriverNotReady", "the driver answers Probe with ready: false");
            Outcome::Failure(reason, Severity::Soft)
        }
        Err(CallError::Status { source, .. }) if source.code() == Code::Unimplemented && source.source().is_none() => {
            Outcome::Success
        }
        Err(CallError::Status { source, .. }) if source.source().is_none() => {
            let answer = format!("the driver answers Probe with {:?}", source.code());
            Outcome::Warning(Reason::new("DriverError", with_detail(answer, &fit_for_a_line(source.message()))))
        }
        Err(
            error @ (CallError::Connect { .. }
            | CallError::Closed { .. }
            | CallError::Status { .. }
            | CallError::Deadline { .. }),
        ) => Outcome::Failure(Reason::new("DriverGone", chain(error)), Severity::Soft),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::driver::DemoDriver;
    use crate::metrics::Metrics;
    use std::fs;

    const LONG: Duration = Duration::from_secs(20);

    async fn outcome(probe: &mut Csi) -> (&'static str, &'static str) {
        let seen = probe.look(LONG).await.unwrap();
        let outcome = probe.judge(seen, crate::policy::some_instant()).unwrap();
        (outcome.name(), outcome.reason().map_or("", |reason| reason.code))
    }

    #[tokio::test]
    async fn ready_unready_errors_and_absence_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("csi.sock");
        let mut probe = Csi::new(&socket, DriverReady::new(Metrics::new()));
        assert_eq!(outcome(&mut probe).await, ("failure", "DriverGone"));
        let driver = DemoDriver::start(&socket, "x").unwrap();
        for (ready, seen) in [(Some(true), "success"), (None, "success"), (Some(false), "failure")] {
            driver.behaviour().ready = ready;
            assert_eq!(outcome(&mut probe).await.0, seen, "{ready:?}");
        }
        for (code, seen) in [
            (Code::Unimplemented, ("success", "")),
            (Code::FailedPrecondition, ("warning", "DriverError")),
            (Code::Unavailable, ("warning", "DriverError")),
        ] {
            driver.behaviour().probe_error = Some(code);
            assert_eq!(outcome(&mut probe).await, seen, "{code:?}");
        }
        driver.behaviour().probe_error = None;
        driver.behaviour().ready = Some(true);
        // The socket is lost while the driver and old connections live on.
        fs::remove_file(&socket).unwrap();
        assert_eq!(outcome(&mut probe).await, ("failure", "DriverGone"));
    }

    #[tokio::test]
    async fn silence_is_abandoned_and_a_broken_connection_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("csi.sock");
        let silent = tokio::net::UnixListener::bind(&socket).unwrap();
        let mut probe = Csi::new(&socket, DriverReady::new(Metrics::new()));
        assert!(probe.look(Duration::from_millis(100)).await.is_err());
        let closing = async {
            loop {
                drop(silent.accept().await.unwrap());
            }
        };
        tokio::select! {
            () = closing => {}
            seen = outcome(&mut probe) => assert_eq!(seen, ("failure", "DriverGone")),
        }
    }
}
