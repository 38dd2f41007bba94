//! Our own crashes: after some of them in a row a run stays out of the way of the calls.

/// So many crashes of ours
const CRASHES: usize = 3;

/// within this many seconds, and the kubelet is given the driver's own socket instead of ours.
const CRASH_WINDOW_SECONDS: u64 = 600;

/// Starts of this agent that followed a crash, in seconds since the boot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Crashes {
    seconds: Vec<u64>,
}

impl Crashes {
    /// The crashes after this start, at `now` seconds since the boot. `before` is what the last run of this boot left, `None` if
    /// it ended in good order or there was none.
    pub fn at_start(before: Option<&[u64]>, now: u64) -> Self {
        let recent = |at: &u64| *at <= now && now - *at < CRASH_WINDOW_SECONDS;
        let mut seconds: Vec<u64> = before.unwrap_or_default().iter().copied().filter(recent).collect();
        seconds.extend(before.map(|_| now));
        seconds.drain(..seconds.len().saturating_sub(CRASHES));
        Self { seconds }
    }

    /// Whether this run stays out of the way: it announces the driver's own socket and only observes.
    pub fn bypass(&self) -> bool {
        self.seconds.len() >= CRASHES
    }

    /// For the state file.
    pub fn seconds(&self) -> &[u64] {
        &self.seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_crashes_within_ten_minutes_give_way_to_the_driver() {
        let first = Crashes::at_start(None, 100);
        assert_eq!(first, Crashes::default());
        let mut crashes = first;
        for (now, bypass) in [(110, false), (120, false), (130, true), (140, true)] {
            crashes = Crashes::at_start(Some(crashes.seconds()), now);
            assert_eq!(crashes.bypass(), bypass, "{now}");
        }
        assert!(crashes.seconds().len() <= CRASHES, "bounded");
        assert!(!Crashes::at_start(None, 150).bypass(), "a good end clears");
        assert!(!Crashes::at_start(Some(&[100, 120]), 700).bypass(), "the first one is too old");
        assert!(Crashes::at_start(Some(&[101, 120]), 700).bypass());
        assert!(!Crashes::at_start(Some(&[u64::MAX, 9_000]), 700).bypass(), "a future that cannot be");
    }
}
