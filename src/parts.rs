//! The running parts: one token stops all, one tracker waits for all, and the first failure ends the process.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A failure that ends the process, told once by `main`.
pub type Fatal = Box<dyn std::error::Error + Send + Sync>;

/// Spawns the parts and stops them together. Clones are handles to the same set.
#[derive(Debug, Clone)]
pub struct Parts {
    stop: CancellationToken,
    tracker: TaskTracker,
    failure: Arc<Mutex<Option<(&'static str, Fatal)>>>,
    failed: Arc<AtomicBool>,
}

impl Parts {
    /// Nothing runs yet; `stop` ends all.
    pub fn new(stop: CancellationToken) -> Self {
        Self { stop, tracker: TaskTracker::new(), failure: Arc::default(), failed: Arc::default() }
    }

    /// A set of its own for connections that are to end later than the rest: it shares the stop and the failure, and
    /// [`Self::finished`] waits for it alone.
    pub fn apart(&self) -> Self {
        Self { tracker: TaskTracker::new(), ..self.clone() }
    }

    /// Whether a part has failed or panicked, so that all must end.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Waits until all connections of this set have ended, or `grace` has passed.
    pub async fn finished(self, grace: Duration) -> bool {
        self.tracker.close();
        timeout(grace, self.tracker.wait()).await.is_ok()
    }

    /// Cancelled when all must end.
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Runs a part. When it fails or panics, everything stops.
    pub fn spawn(&self, name: &'static str, part: impl Future<Output = Result<(), Fatal>> + Send + 'static) {
        let on_panic = PanicStops { parts: self.clone(), name, finished: false };
        self.tracker.spawn(async move {
            let mut on_panic = on_panic;
            if let Err(error) = part.await {
                on_panic.fail(error);
            }
            on_panic.finished = true;
        });
    }

    /// Runs one connection. What happens on it concerns nobody else; it is cut when all must end, after its grace.
    pub fn spawn_connection(&self, connection: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        self.tracker.spawn(connection).abort_handle()
    }

    /// Waits until all must end, then until all parts have ended, or `grace` has passed.
    ///
    /// # Errors
    /// The first failure of a part, with its name.
    pub async fn stopped(self, grace: Duration) -> Result<(), (&'static str, Fatal)> {
        self.stop.cancelled().await;
        self.tracker.close();
        // A connection that an idle client keeps open is not worth waiting for longer.
        drop(timeout(grace, self.tracker.wait()).await);
        match self.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }
}

/// Records a failure, and stops all when its part is dropped unfinished (a panic unwinds through it).
struct PanicStops {
    parts: Parts,
    name: &'static str,
    finished: bool,
}

impl PanicStops {
    fn fail(&self, error: impl Into<Fatal>) {
        let Parts { failure, failed, stop, .. } = &self.parts;
        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((self.name, error.into()));
        failed.store(true, Ordering::Relaxed);
        stop.cancel();
    }
}

impl Drop for PanicStops {
    fn drop(&mut self) {
        if !self.finished && std::thread::panicking() {
            self.fail("it panicked; please report this as a bug");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn first_failure_stops_all_and_is_named() {
        let parts = Parts::new(CancellationToken::new());
        parts.spawn("a", async { Err("broken".into()) });
        let stop = parts.stop().clone();
        parts.spawn("b", async move {
            stop.cancelled().await;
            Ok(())
        });
        let all = parts.clone();
        let (name, error) = parts.stopped(Duration::from_secs(10)).await.unwrap_err();
        assert!(all.has_failed() && all.apart().has_failed(), "also after it was told");
        assert_eq!((name, error.to_string().as_str()), ("a", "broken"));
    }

    #[tokio::test]
    async fn a_panic_stops_all() {
        let parts = Parts::new(CancellationToken::new());
        parts.spawn("a", async {
            assert!(std::hint::black_box(false), "on purpose");
            Ok(())
        });
        assert_eq!(parts.stopped(Duration::from_secs(10)).await.unwrap_err().0, "a");
    }
}
