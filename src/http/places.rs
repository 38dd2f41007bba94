//! So many connections at a time, and nobody keeps others out by holding his.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

/// With all places taken, the oldest connection that waits for its client, not for our answer, gives its place up once it is
/// this old.
const LEAST_AGE_TO_YIELD: Duration = Duration::from_millis(200);

/// How often places are looked for while there is none.
const PLACE_PAUSE: Duration = Duration::from_millis(20);

/// The open connections of one listener, oldest first.
#[derive(Debug)]
pub struct Places {
    most: usize,
    open: VecDeque<Open>,
}

/// A connection, and whether its client waits for us.
#[derive(Debug)]
struct Open {
    since: Instant,
    answering: Answering,
    connection: AbortHandle,
}

/// Set while a client waits for our answer. Clones are the same mark.
#[derive(Debug, Clone, Default)]
pub struct Answering(Arc<AtomicBool>);

impl Answering {
    /// The client waits for us, or we for him.
    pub fn set(&self, answering: bool) {
        self.0.store(answering, Ordering::Relaxed);
    }
}

impl Places {
    /// Room for `most` connections.
    pub fn new(most: usize) -> Self {
        Self { most, open: VecDeque::new() }
    }

    /// Waits until there is a place for one more. Cancelling it loses nothing.
    pub async fn free(&mut self) {
        loop {
            self.open.retain(|open| !open.connection.is_finished());
            if self.open.len() < self.most {
                return;
            }
            let yields =
                |open: &Open| !open.answering.0.load(Ordering::Relaxed) && open.since.elapsed() >= LEAST_AGE_TO_YIELD;
            if let Some(idle) = self.open.iter().position(yields).and_then(|at| self.open.remove(at)) {
                idle.connection.abort();
                return;
            }
            sleep(PLACE_PAUSE).await;
        }
    }

    /// Takes a place.
    pub fn take(&mut self, connection: AbortHandle, answering: Answering) {
        self.open.push_back(Open { since: Instant::now(), answering, connection });
    }
}
