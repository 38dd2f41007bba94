//! Asks a driver whether it is ready, once for all who want to know at the same moment.
//!
//! Each answer is that of a fresh connection: an old one would go on answering after the socket's file is gone. livenessprobe's duty
//! and each `csi` probe ask by clocks of their own, which often strike together.

use crate::grpc::connect::CallError;
use crate::grpc::driver;
use crate::metrics::Metrics;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Who comes this much later is too late for the call that is under way: what it says may be about a moment before he asked.
const SAME_MOMENT: Duration = Duration::from_millis(5);

/// What the driver said; of all who asked at that moment.
pub type Answer = Arc<Result<bool, CallError>>;

/// Asks drivers. Clones ask together.
#[derive(Debug, Clone)]
pub struct DriverReady(Arc<Calls>);

#[derive(Debug)]
struct Calls {
    metrics: Metrics,
    /// The last call to each socket, while it is under way.
    under_way: Mutex<HashMap<PathBuf, Call>>,
}

#[derive(Debug)]
struct Call {
    began: Instant,
    until: Instant,
    answer: watch::Receiver<Option<Answer>>,
}

impl DriverReady {
    /// Each call is counted in `metrics`, once, however many wait for it.
    pub fn new(metrics: Metrics) -> Self {
        Self(Arc::new(Calls { metrics, under_way: Mutex::default() }))
    }

    /// Asks the driver at `socket`, within `deadline`; saying nothing about it counts as ready.
    pub async fn ask(&self, socket: &Path, deadline: Duration) -> Answer {
        let until = Instant::now() + deadline;
        loop {
            let Some(mut answer) = self.joined(socket, until) else {
                return self.call(socket, until).await;
            };
            // Borrowed only until the end of this line: the one who calls must not wait for us.
            let answer = answer.wait_for(Option::is_some).await.ok().and_then(|answer| answer.clone());
            match answer {
                // Less time was given to that call than we have.
                Some(answer)
                    if matches!(*answer, Err(CallError::Deadline { .. })) && until > Instant::now() + SAME_MOMENT => {}
                Some(answer) => return answer,
                // Who called has gone.
                None => {}
            }
        }
    }

    /// A call of this moment that ends before `until`.
    fn joined(&self, socket: &Path, until: Instant) -> Option<watch::Receiver<Option<Answer>>> {
        let calls = self.0.under_way();
        let call = calls.get(socket)?;
        let same_moment = call.began.elapsed() <= SAME_MOMENT && call.until <= until + SAME_MOMENT;
        same_moment.then(|| call.answer.clone())
    }

    async fn call(&self, socket: &Path, until: Instant) -> Answer {
        let began = Instant::now();
        let (sender, answer) = watch::channel(None);
        self.0.under_way().insert(socket.to_owned(), Call { began, until, answer });
        let _over = Over { calls: &self.0, socket, began };
        let answer = Arc::new(driver::probe(socket, until - began).await);
        self.0.metrics.observe_call(driver::PROBE, &answer, began.elapsed());
        sender.send_replace(Some(Arc::clone(&answer)));
        answer
    }
}

impl Calls {
    fn under_way(&self) -> MutexGuard<'_, HashMap<PathBuf, Call>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes a call off the list, however it ends.
struct Over<'a> {
    calls: &'a Calls,
    socket: &'a Path,
    began: Instant,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        let mut calls = self.calls.under_way();
        // A later one may have taken its place.
        if calls.get(self.socket).is_some_and(|call| call.began == self.began) {
            calls.remove(self.socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::net::UnixListener;
    use tokio::time::sleep;

    const LONG: Duration = Duration::from_secs(20);

    /// Accepts, and closes after `silence`; counts.
    async fn door(listener: UnixListener, silence: Duration, count: Arc<AtomicUsize>) {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            sleep(silence).await;
            drop(stream);
        }
    }

    struct Bed {
        folder: tempfile::TempDir,
        count: Arc<AtomicUsize>,
        ready: DriverReady,
    }

    impl Bed {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            Self { folder, count: Arc::default(), ready: DriverReady::new(Metrics::new()) }
        }

        fn socket(&self) -> PathBuf {
            self.folder.path().join("csi.sock")
        }

        /// Runs `asking` beside the door.
        async fn with_door<T>(&self, silence: Duration, asking: impl Future<Output = T>) -> (T, usize) {
            let listener = UnixListener::bind(self.socket()).unwrap();
            let said = tokio::select! {
                () = door(listener, silence, Arc::clone(&self.count)) => unreachable!(),
                said = asking => said,
            };
            (said, self.count.load(Ordering::SeqCst))
        }
    }

    /// On a clock that stands while anybody has something to do: a busy machine makes no two moments of one.
    #[tokio::test(start_paused = true)]
    async fn who_asks_at_the_same_moment_gets_one_answer_and_later_ones_get_their_own() {
        let bed = Bed::new();
        let socket = bed.socket();
        let ask = || bed.ready.ask(&socket, LONG);
        let late = async {
            sleep(Duration::from_millis(60)).await;
            ask().await
        };
        let ((a, b, late), connections) =
            bed.with_door(Duration::from_millis(150), async { tokio::join!(ask(), ask(), late) }).await;
        assert!(Arc::ptr_eq(&a, &b) && !Arc::ptr_eq(&a, &late));
        assert_eq!(connections, 2);
        assert!(bed.ready.0.under_way().is_empty());
    }

    #[tokio::test]
    async fn an_answer_that_is_there_is_nobody_elses() {
        let bed = Bed::new();
        let socket = bed.socket();
        let asking = async {
            bed.ready.ask(&socket, LONG).await;
            bed.ready.ask(&socket, LONG).await;
        };
        assert_eq!(bed.with_door(Duration::ZERO, asking).await.1, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn each_has_its_own_deadline_whoever_calls() {
        let bed = Bed::new();
        let socket = bed.socket();
        let (short, longer) = (Duration::from_millis(100), Duration::from_millis(600));
        let took = |deadline| {
            let (began, ready, socket) = (Instant::now(), &bed.ready, &socket);
            async move {
                assert!(matches!(*ready.ask(socket, deadline).await, Err(CallError::Deadline { .. })));
                began.elapsed()
            }
        };
        let asking = async { (tokio::join!(took(short), took(longer)), tokio::join!(took(longer), took(short))) };
        let (((a, b), (c, d)), _) = bed.with_door(LONG, asking).await;
        for (took, deadline) in [(a, short), (b, longer), (c, longer), (d, short)] {
            assert!(took >= deadline && took < deadline + Duration::from_millis(400), "{took:?} of {deadline:?}");
        }
    }

    #[tokio::test]
    async fn who_waits_for_a_caller_that_goes_asks_himself() {
        let bed = Bed::new();
        let socket = bed.socket();
        let goes = tokio::time::timeout(Duration::from_millis(50), bed.ready.ask(&socket, LONG));
        let ((goes, stays), connections) =
            bed.with_door(Duration::from_millis(150), async { tokio::join!(goes, bed.ready.ask(&socket, LONG)) }).await;
        assert!(goes.is_err() && matches!(*stays, Err(CallError::Closed { .. })), "{stays:?}");
        assert_eq!(connections, 2);
    }
}
