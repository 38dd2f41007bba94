//! Logs an outage once, its changes at a bounded rate, and its end once.

use std::time::Duration;
use tokio::time::Instant;

/// A lasting trouble is told again this often, so that a log's tail shows it.
const REPEAT: Duration = Duration::from_secs(60);

/// A trouble that changes its words is told at most this often.
const LEAST_GAP: Duration = Duration::from_secs(10);

/// Decides whether a trouble is worth a line now.
#[derive(Debug, Default)]
pub struct Quiet {
    /// The last line's words, and when it was written.
    last: Option<(String, Instant)>,
    /// Whether the trouble of that line is still there.
    told: bool,
}

impl Quiet {
    /// The trouble is there, in these words; true if they are worth a line. One that comes and goes quickly is not told
    /// each time.
    pub fn begin_or_repeat(&mut self, words: &str, now: Instant) -> bool {
        let worth = match &self.last {
            None => true,
            Some((before, at)) if self.told && before == words => now - *at >= REPEAT,
            Some((_, at)) => now - *at >= LEAST_GAP,
        };
        if worth {
            self.last = Some((words.to_owned(), now));
            self.told = true;
        }
        worth
    }

    /// The trouble is over; true if it had been told.
    pub fn end(&mut self) -> bool {
        std::mem::take(&mut self.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_told_once_then_at_a_fixed_rate_and_its_end_once() {
        let (mut quiet, start) = (Quiet::default(), Instant::now());
        let lines =
            (0..600).filter(|&second| quiet.begin_or_repeat("down", start + Duration::from_secs(second))).count();
        assert_eq!(lines, 10);
        assert!(quiet.end());
        assert!(!quiet.end());
    }

    #[tokio::test(start_paused = true)]
    async fn changing_words_do_not_flood() {
        let (mut quiet, start) = (Quiet::default(), Instant::now());
        let tell = |step: u64| quiet.begin_or_repeat(&step.to_string(), start + Duration::from_millis(step * 100));
        assert_eq!((0..600).map(tell).filter(|told| *told).count(), 6);
    }

    #[tokio::test(start_paused = true)]
    async fn a_trouble_that_comes_and_goes_is_not_told_each_time() {
        let (mut quiet, start) = (Quiet::default(), Instant::now());
        let mut lines = 0;
        for step in 0..600 {
            lines += u32::from(quiet.begin_or_repeat("down", start + Duration::from_millis(step * 100)));
            lines += u32::from(quiet.end());
        }
        assert_eq!(lines, 12);
    }
}
