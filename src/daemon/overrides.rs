//! The operator's word on disk: written down whenever it changes, so that a restart of ours does not end it.

use super::{info, warn};
use crate::override_file::OverrideFile;
use crate::policy::fence_override::Override;
use crate::probe::lane::Lane;
use crate::quiet::Quiet;
use std::error::Error;
use std::time::Duration;
use tokio::time::Instant;

/// How long writing it may take before it is left alone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// After a write that failed.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(5);

pub(super) struct Overrides {
    /// `None`: there is no fence to speak of, so nothing is kept.
    file: Option<OverrideFile>,
    written: Option<Override>,
    /// What could not be written, when, and why.
    failed: Option<(Option<Override>, Instant, String)>,
    lane: Lane,
    quiet: Quiet,
}

impl Overrides {
    pub(super) fn new(file: Option<OverrideFile>) -> Self {
        Self { file, written: None, failed: None, lane: Lane::new("override"), quiet: Quiet::default() }
    }

    /// The word that the run before left. What is kept is ours with the first [`Self::keep`].
    pub(super) fn load(file: &OverrideFile, now: Instant) -> Option<Override> {
        match file.load(now.into_std()) {
            Ok(Some(word)) => {
                tell(&word, now);
                Some(word)
            }
            Ok(None) => None,
            Err(error) => {
                warn!(error = &error as &dyn Error, "an operator's override of the fence is lost, if there was one");
                None
            }
        }
    }

    /// Writes `word` down if it is not what is written; what went wrong, for whoever gave it. Waits for the file system, for a while.
    pub(super) async fn keep(&mut self, word: Option<&Override>) -> Option<String> {
        let Some(file) = &self.file else { return None };
        if self.written.as_ref() == word {
            self.failed = None;
            return None;
        }
        let now = Instant::now();
        if let Some((tried, at, trouble)) = &self.failed
            && tried.as_ref() == word
            && (now - *at < PAUSE_AFTER_FAILURE || self.lane.is_busy())
        {
            return Some(trouble.clone());
        }
        let (mut file, word) = (file.clone(), word.cloned());
        let kept = word.clone();
        let saved = self.lane.run(WRITE_TIMEOUT, move || {
            let saved = file.keep(kept.as_ref(), now.into_std());
            (file, saved)
        });
        let trouble = match saved.await {
            Ok((file, Ok(()))) => {
                if self.quiet.end() {
                    info!(state.path = %file.path().display(), "the operator's override is kept again");
                }
                (self.file, self.written, self.failed) = (Some(file), word, None);
                return None;
            }
            Ok((_, Err(error))) => error.to_string(),
            Err(_abandoned) => format!("no answer from its file system within {WRITE_TIMEOUT:?}"),
        };
        if self.quiet.begin_or_repeat(&trouble, now) {
            warn!(error = trouble, "cannot keep the operator's override over a restart of ours; all else goes on");
        }
        self.failed = Some((word, now, trouble.clone()));
        Some(trouble)
    }

    /// The word that another agent left, which had the calls meanwhile and so the operator's ear. `None`: nobody said anything.
    pub(super) async fn of_another(&mut self) -> Option<Option<Override>> {
        let (Some(file), None) = (self.file.clone(), &self.failed) else { return None };
        let now = Instant::now();
        let word = self.lane.run(WRITE_TIMEOUT, move || file.of_another(now.into_std())).await.ok().flatten()?;
        match &word {
            Some(word) => tell(word, now),
            None => info!("the operator's override was ended while another agent had the calls"),
        }
        Some(word)
    }
}

fn tell(word: &Override, now: Instant) {
    warn!(
        fence = word.forced.name(),
        reason = word.reason,
        by = word.order.by,
        at = word.order.at_utc,
        left = ?word.until.saturating_duration_since(now.into_std()),
        "override kept from before the restart: an operator decides about the fence"
    );
}
