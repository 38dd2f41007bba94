//! Keeps what a probe has learnt: a slow disk delays a round by a moment, and a hung one no round at all.

use super::lane::{Abandoned, Lane};
use crate::quiet::Quiet;
use std::error::Error;
use std::io;
use std::path::Path;
use std::time::Duration;
use tracing::{info, warn};

/// What is known good is worth waiting for its file system so long, and no longer.
const SAVE_LIMIT: Duration = Duration::from_millis(50);

/// Writes on a lane of its own, when there is something to keep.
#[derive(Debug)]
pub(super) struct Keeper {
    lane: Lane,
    due: bool,
    quiet: Quiet,
}

impl Keeper {
    /// Its thread, named `name`, starts with the first write.
    pub(super) fn new(name: &str) -> Self {
        Self { lane: Lane::new(name), due: false, quiet: Quiet::default() }
    }

    /// With `news`, there is something to keep.
    pub(super) fn note(&mut self, news: bool) {
        self.due |= news;
    }

    /// Writes by `save` what is to be kept at `path`, if there is something and somewhere.
    pub(super) async fn keep(&mut self, path: Option<&Path>, save: impl FnOnce() -> io::Result<()> + Send + 'static) {
        let Some(path) = path.filter(|_| self.due) else { return };
        if self.lane.is_busy() {
            return;
        }
        self.due = false;
        match self.lane.run(SAVE_LIMIT, save).await {
            Ok(Ok(())) => {
                if self.quiet.end() {
                    info!(path = %path.display(), "what was seen good is kept again");
                }
            }
            Ok(Err(error)) => {
                self.due = true;
                if self.quiet.begin_or_repeat(&error.to_string(), tokio::time::Instant::now()) {
                    let error = &error as &dyn Error;
                    warn!(path = %path.display(), error, "cannot keep what was seen good; all else goes on");
                }
            }
            Err(Abandoned::Late) => {}
            // Nothing was begun.
            Err(Abandoned::NoThread(_)) => self.due = true,
        }
    }
}
