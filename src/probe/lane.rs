//! A thread of its own for everything of one device that may block in the kernel, so that it blocks nothing else.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
use tracing::{info, warn};

/// A probe reads small files; 2 MiB (the default) a thread would be most of our memory.
const STACK_BYTES: usize = 256 * 1024;

type Job = Box<dyn FnOnce() + Send>;

/// Why a job gave no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Abandoned {
    /// Not in time. The run may still sit in the kernel; the next one waits for it.
    #[error("no answer in time")]
    Late,
    /// It was not even begun: the system gives us no thread, for this reason. The next run tries again.
    #[error("cannot start a thread: {0}")]
    NoThread(&'static str),
}

/// Runs blocking jobs one after the other; at most one is ever outstanding.
#[derive(Debug)]
pub struct Lane {
    name: String,
    stack_bytes: usize,
    jobs: Option<Sender<Job>>,
    free: Arc<Semaphore>,
    /// Whether it was told that there is no thread to be had.
    told: bool,
}

impl Lane {
    /// A lane for `name`; its thread starts with the first job.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), stack_bytes: STACK_BYTES, jobs: None, free: Arc::new(Semaphore::new(1)), told: false }
    }

    /// A lane for jobs that need more room than a probe's.
    pub fn with_stack(name: impl Into<String>, stack_bytes: usize) -> Self {
        Self { stack_bytes, ..Self::new(name) }
    }

    /// Whether a job is outstanding, such as one that was abandoned.
    pub fn is_busy(&self) -> bool {
        self.free.available_permits() == 0
    }

    /// Runs `job` on the lane.
    ///
    /// # Errors
    /// [`Abandoned::Late`] when it has not answered within `limit`, waiting for an earlier one included;
    /// [`Abandoned::NoThread`] at once when there is no thread to be had.
    pub async fn run<T: Send + 'static>(
        &mut self,
        limit: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Abandoned> {
        let whole = async {
            let permit = Arc::clone(&self.free).acquire_owned().await.map_err(|_closed| Abandoned::Late)?;
            let (answer, answered) = oneshot::channel();
            let job: Job = Box::new(move || {
                let value = job();
                // The lane is free before the answer is read.
                drop(permit);
                // Nobody waits for an abandoned run's answer.
                drop(answer.send(value));
            });
            self.send(job)?;
            answered.await.map_err(|_panicked| Abandoned::Late)
        };
        timeout(limit, whole).await.unwrap_or(Err(Abandoned::Late))
    }

    fn send(&mut self, job: Job) -> Result<(), Abandoned> {
        let job = match &self.jobs {
            Some(jobs) => match jobs.send(job) {
                Ok(()) => return Ok(()),
                // A job panicked and took the thread with it: a new one does the next.
                Err(lost) => lost.0,
            },
            None => job,
        };
        let (jobs, received) = channel::<Job>();
        let thread = thread::Builder::new().name(self.name.clone()).stack_size(self.stack_bytes).spawn(move || {
            for job in received {
                job();
            }
        });
        if let Err(error) = thread {
            if !std::mem::replace(&mut self.told, true) {
                let error = &error as &dyn std::error::Error;
                warn!(error, part = self.name, "cannot start a thread; trying again each time");
            }
            return Err(Abandoned::NoThread(why_not(&error)));
        }
        if std::mem::take(&mut self.told) {
            info!(part = self.name, "the thread could be started");
        }
        let sent = jobs.send(job);
        self.jobs = Some(jobs);
        sent.map_err(|_ended| Abandoned::Late)
    }
}

/// Why the system starts no thread, for whoever has to mend it.
fn why_not(error: &io::Error) -> &'static str {
    let kind = error.kind();
    if kind == io::ErrorKind::WouldBlock {
        "the limit of threads (pids) of this pod, user or node is reached, or its memory is short"
    } else if kind == io::ErrorKind::OutOfMemory {
        "there is no memory for it"
    } else if kind == io::ErrorKind::PermissionDenied {
        "it is not permitted (a seccomp profile?)"
    } else {
        "the system refuses it"
    }
}

/// More than any machine has, so that no thread starts: the system's answer is that of a limit of threads.
#[cfg(test)]
pub(super) const NO_STACK: usize = 1 << 60;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test]
    async fn a_blocked_job_is_abandoned_and_the_lane_works_again_when_it_returns() {
        let mut lane = Lane::new("test");
        let (release, blocked) = channel::<()>();
        let short = Duration::from_millis(50);
        assert_eq!(lane.run(short, move || blocked.recv().is_ok()).await, Err(Abandoned::Late));
        let runs = Arc::new(AtomicU32::new(0));
        for _ in 0..3 {
            let runs = Arc::clone(&runs);
            assert_eq!(lane.run(short, move || runs.fetch_add(1, Ordering::SeqCst)).await, Err(Abandoned::Late));
        }
        assert_eq!(runs.load(Ordering::SeqCst), 0, "at most one outstanding");
        release.send(()).unwrap();
        assert_eq!(lane.run(Duration::from_secs(10), || 7).await, Ok(7));
    }

    #[tokio::test]
    async fn a_thread_that_cannot_be_started_is_no_silence_and_the_next_run_tries_again() {
        let mut lane = Lane::with_stack("test", NO_STACK);
        let long = Duration::from_secs(3600);
        for _ in 0..3 {
            let answer = lane.run(long, || 7).await;
            assert!(matches!(answer, Err(Abandoned::NoThread(why)) if why.contains("pids")), "{answer:?}");
            assert!(lane.told && !lane.is_busy());
        }
        lane.stack_bytes = STACK_BYTES;
        assert_eq!(lane.run(long, || 7).await, Ok(7));
        assert!(!lane.told);
    }

    #[tokio::test]
    async fn a_panicking_job_costs_one_answer_not_the_lane() {
        let mut lane = Lane::new("test");
        let long = Duration::from_secs(10);
        assert_eq!(lane.run(long, || assert!(std::hint::black_box(false), "on purpose")).await, Err(Abandoned::Late));
        // The dead thread's channel may close a moment later.
        let mut answer = Err(Abandoned::Late);
        for _ in 0..100 {
            answer = lane.run(long, || 7).await;
            if answer.is_ok() {
                break;
            }
        }
        assert_eq!(answer, Ok(7));
    }
}
