//! An operator's word about the fence: for a while, with a reason, and over a restart of the agent.

use std::time::{Duration, Instant};

/// What an operator asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forced {
    /// No fence, and registered, whatever the health.
    Off,
    /// A fence, whatever the health. Withdraws nothing by itself.
    On,
}

impl Forced {
    /// Its name on the command line, in status and in its file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
        }
    }

    /// The one of that name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Off, Self::On].into_iter().find(|forced| forced.name() == name)
    }
}

/// An operator's word, for a while.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    /// What is asked for.
    pub forced: Forced,
    /// When it ends by itself.
    pub until: Instant,
    /// Why; told wherever the fence is.
    pub reason: String,
    /// Who asked, and when.
    pub order: Order,
    /// Taken over from a run before this one.
    pub from_before: bool,
}

/// Who asked for an override, and when, for people.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Order {
    /// The caller's user and process.
    pub by: String,
    /// When, in UTC.
    pub at_utc: String,
}

/// Why an override is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverrideProblem {
    /// It would end at once.
    NoTime,
    /// It would outlast the memory of whoever set it: over [`Override::LONGEST`].
    TooLong,
    /// Nobody will know why.
    NoReason,
}

impl Override {
    /// Nobody may forget a fence, or its absence, for longer than a day.
    pub const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

    /// An override from `now` on.
    ///
    /// # Errors
    /// When it has no time, too much, or no reason.
    pub fn new(
        forced: Forced,
        lasts: Duration,
        reason: &str,
        order: Order,
        now: Instant,
    ) -> Result<Self, OverrideProblem> {
        match reason.trim() {
            _ if lasts.is_zero() => Err(OverrideProblem::NoTime),
            _ if lasts > Self::LONGEST => Err(OverrideProblem::TooLong),
            "" => Err(OverrideProblem::NoReason),
            reason => Ok(Self { forced, until: now + lasts, reason: reason.to_owned(), order, from_before: false }),
        }
    }
}

/// One moment by two clocks. The first starts with each boot and cannot be set; the second outlasts a boot, and can.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clocks {
    /// Since the boot.
    pub boot: Duration,
    /// Since the Unix epoch.
    pub wall: Duration,
}

impl Clocks {
    /// The moment that comes so much later.
    pub fn after(self, time: Duration) -> Self {
        Self { boot: self.boot.saturating_add(time), wall: self.wall.saturating_add(time) }
    }
}

/// What is left of an override that an earlier run wrote down, as of the moment it was written until the moment it ends; `None` when
/// it is over. Within one boot the wall clock is not asked; over a boot nothing else can be.
///
/// Never more than there was when it was written, nor than a day: a clock that went back makes nothing last for ever.
pub fn left(written: Clocks, until: Clocks, now: Clocks, same_boot: bool) -> Option<Duration> {
    let (written, until, now) = match same_boot {
        true => (written.boot, until.boot, now.boot),
        false => (written.wall, until.wall, now.wall),
    };
    let whole = until.saturating_sub(written).min(Override::LONGEST);
    let left = until.saturating_sub(now).min(whole);
    (!left.is_zero()).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use proptest::prelude::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn clocks(boot: u64, wall: u64) -> Clocks {
        Clocks { boot: Duration::from_secs(boot), wall: Duration::from_secs(wall) }
    }

    #[test]
    fn an_override_has_a_bounded_time_and_a_reason() {
        let start = some_instant();
        let new = |lasts, reason| Override::new(Forced::On, lasts, reason, Order::default(), start);
        assert_eq!(new(Duration::ZERO, "x"), Err(OverrideProblem::NoTime));
        assert_eq!(new(Override::LONGEST + Duration::from_secs(1), "x"), Err(OverrideProblem::TooLong));
        assert_eq!(new(Duration::from_secs(1), " "), Err(OverrideProblem::NoReason));
        assert!(new(Override::LONGEST, "x").is_ok());
        for forced in [Forced::On, Forced::Off] {
            assert_eq!(Forced::named(forced.name()), Some(forced));
        }
    }

    #[test]
    fn a_restart_takes_nothing_from_an_override_and_adds_nothing() {
        let written = clocks(100, 1_000_000);
        let until = written.after(HOUR);
        let left = |now, same_boot| left(written, until, now, same_boot);
        assert_eq!(left(clocks(160, 1_000_060), true), Some(HOUR - Duration::from_secs(60)));
        assert_eq!(left(until, true), None);
        for stepped in [0, 1_900_000] {
            assert_eq!(
                left(clocks(160, stepped), true),
                Some(HOUR - Duration::from_secs(60)),
                "the wall clock was set"
            );
        }
        assert_eq!(left(clocks(60, 1_000_060), false), Some(HOUR - Duration::from_secs(60)), "over a boot");
        assert_eq!(left(clocks(60, until.wall.as_secs()), false), None);
        assert_eq!(left(clocks(60, 0), false), Some(HOUR), "the wall clock went back over a boot");
    }

    proptest! {
        #[test]
        fn nothing_that_a_file_or_a_clock_may_say_makes_it_last_for_longer_than_it_was_given(
            written in any::<(u64, u64)>(), until in any::<(u64, u64)>(), now in any::<(u64, u64)>(), same in any::<bool>(),
        ) {
            let (written, until) = (clocks(written.0, written.1), clocks(until.0, until.1));
            let given = if same { until.boot.saturating_sub(written.boot) } else { until.wall.saturating_sub(written.wall) };
            if let Some(left) = left(written, until, clocks(now.0, now.1), same) {
                prop_assert!(left <= given && left <= Override::LONGEST && !left.is_zero());
            }
        }
    }
}
