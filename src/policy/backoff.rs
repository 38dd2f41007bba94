//! Growing pauses between tries.

use std::time::Duration;

/// Pauses that double from `first` to `max`.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Starts at `first`; never above `max`.
    pub fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first.min(max) }
    }

    /// The pause to make now; the next one is twice as long.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.max);
        pause
    }

    /// Begins again at the first pause.
    pub fn reset(&mut self) {
        self.next = self.first.min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_maximum_and_begin_again() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
        let pauses: Vec<u128> = (0..6).map(|_| backoff.pause().as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1000, 1000]);
        backoff.reset();
        assert_eq!(backoff.pause().as_millis(), 100);
    }
}
