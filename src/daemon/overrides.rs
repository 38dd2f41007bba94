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

    /// The word that the run before left.
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
        // After a failure nobody knows what is written, or will be.
        if self.failed.is_none() && self.written.as_ref() == word {
            return None;
        }
        let now = Instant::now();
        if let Some((tried, at, trouble)) = &self.failed
            && tried.as_ref() == word
            && (now - *at < PAUSE_AFTER_FAILURE || self.lane.is_busy())
        {
            return Some(trouble.clone());
        }
        let (keeper, path, word) = (file.clone(), file.path().to_owned(), word.cloned());
        let kept = word.clone();
        let trouble = match self.lane.run(WRITE_TIMEOUT, move || keeper.keep(kept.as_ref(), now.into_std())).await {
            Ok(Ok(())) => {
                if self.quiet.end() {
                    info!(state.path = %path.display(), "the operator's override is kept again");
                }
                (self.written, self.failed) = (word, None);
                return None;
            }
            Ok(Err(error)) => error.to_string(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kept_file::KeptFile;
    use crate::policy::fence_override::{Forced, Order};

    /// The file system is slow by a stranger's hold of the folder; the paused clock does not wait for it.
    #[tokio::test(start_paused = true)]
    async fn a_word_that_is_written_after_all_can_still_be_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let file = OverrideFile::new(folder.path(), "x.example.com", folder.path());
        let now = Instant::now();
        let word = Override::new(Forced::Off, Duration::from_secs(3600), "swap", Order::default(), now.into_std());
        let mut overrides = Overrides::new(Some(file.clone()));
        let held = KeptFile::new(folder.path().join("x"), 1).lock();
        assert!(overrides.keep(Some(&word.unwrap())).await.unwrap().contains("no answer"));
        drop(held);
        tokio::time::resume();
        while overrides.lane.is_busy() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(file.path().exists(), "nobody waited for it, and it is there");
        assert_eq!(overrides.keep(None).await, None);
        assert!(!file.path().exists());
    }
}
