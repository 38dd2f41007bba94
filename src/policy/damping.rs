//! How long a recovery must last before it is believed: longer with each flap.

use std::{collections::VecDeque, time::Duration, time::Instant};

/// The settings of [`Damping`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// How long all must have been well after the first outage.
    pub base: Duration,
    /// What the doubling stops at.
    pub max: Duration,
    /// Outages that began within this time of the last one count as flaps.
    pub window: Duration,
}

/// Remembers when outages began. More than [`Damping::MOST`] are never kept: the hold has reached its maximum long before.
#[derive(Debug, Clone)]
pub struct Damping {
    hold: Hold,
    falls: VecDeque<Instant>,
}

impl Damping {
    /// 2^32 times any base is above any sensible maximum.
    pub const MOST: usize = 33;

    /// No outage so far.
    pub fn new(hold: Hold) -> Self {
        Self { hold, falls: VecDeque::new() }
    }

    /// An outage begins.
    pub fn fell(&mut self, now: Instant) {
        self.falls.push_back(now);
        while self.falls.len() > Self::MOST {
            self.falls.pop_front();
        }
        let window = self.hold.window;
        self.falls.retain(|&fall| now.saturating_duration_since(fall) < window || fall == now);
    }

    /// How long all must have been well before the last outage counts as over: the base, doubled for every earlier
    /// outage in the window.
    pub fn hold(&self) -> Duration {
        let flaps = u32::try_from(self.falls.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let factor = 1_u32.checked_shl(flaps).unwrap_or(u32::MAX);
        self.hold.base.saturating_mul(factor).min(self.hold.max)
    }

    /// When the outages that still count began, oldest first.
    pub fn falls(&self) -> impl Iterator<Item = Instant> + '_ {
        self.falls.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use proptest::prelude::*;

    const HOLD: Hold =
        Hold { base: Duration::from_secs(30), max: Duration::from_secs(600), window: Duration::from_secs(600) };

    #[test]
    fn hold_doubles_with_each_flap_in_the_window() {
        let start = some_instant();
        let mut damping = Damping::new(HOLD);
        let mut holds = Vec::new();
        for minute in 0..7 {
            damping.fell(start + Duration::from_secs(minute * 60));
            holds.push(damping.hold().as_secs());
        }
        assert_eq!(holds, [30, 60, 120, 240, 480, 600, 600]);
    }

    #[test]
    fn flap_outside_the_window_does_not_count() {
        let start = some_instant();
        let mut damping = Damping::new(HOLD);
        damping.fell(start);
        damping.fell(start + Duration::from_secs(600));
        assert_eq!(damping.hold().as_secs(), 30);
    }

    proptest! {
        #[test]
        fn hold_is_never_below_the_base_nor_above_the_maximum(gaps in proptest::collection::vec(0_u64..2_000, 0..100)) {
            let mut now = some_instant();
            let mut damping = Damping::new(HOLD);
            for gap in gaps {
                now += Duration::from_secs(gap);
                damping.fell(now);
                prop_assert!(damping.hold() >= HOLD.base && damping.hold() <= HOLD.max);
                prop_assert!(damping.falls().count() <= Damping::MOST);
            }
        }
    }
}
