//! When to look again after events that only say "something may have changed": at once and a while after, since an event comes
//! before the change it tells of; however many events come, a bounded number of times.

use std::time::{Duration, Instant};

/// How long after an event there is a look. The kernel tells of a link before the port's state has followed.
const AFTER: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(1000)];

/// Looks that may follow each other as fast as events come: two series, so that an event and its echo cost no waiting.
const BURST: u32 = 8;

/// Beyond them there is a look once in this time: ten a second.
const INTERVAL: Duration = Duration::from_millis(100);

/// After events of links that are not known to matter there is one look, this long after the last at the earliest.
const OTHERS_INTERVAL: Duration = Duration::from_secs(1);

/// Plans the looks of one probe.
///
/// A later event starts the series again; that puts nothing off, since it begins with a look at once.
#[derive(Debug, Default)]
pub struct Rereads {
    /// The last event.
    event: Option<Instant>,
    /// How many of [`AFTER`] are done since the last event.
    done: usize,
    /// When the looks so far would have ended, had they come once an [`INTERVAL`].
    paid: Option<Instant>,
    /// When there is a look for what may not matter at all.
    others: Option<Instant>,
    /// When the last look began.
    looked: Option<Instant>,
}

impl Rereads {
    /// An event came.
    pub fn event(&mut self, now: Instant) {
        self.event = Some(now);
        self.done = 0;
    }

    /// An event came of something that is not known to matter, and may begin to.
    pub fn event_of_others(&mut self, now: Instant) {
        let earliest = self.looked.map_or(now, |looked| now.max(looked + OTHERS_INTERVAL));
        self.others.get_or_insert(earliest);
    }

    /// When the next look is due; `None` without an event whose series is not over.
    pub fn due(&self) -> Option<Instant> {
        let series = self.series();
        series.map_or(self.others, |series| Some(self.others.map_or(series, |others| series.min(others))))
    }

    fn series(&self) -> Option<Instant> {
        let wanted = self.event? + *AFTER.get(self.done)?;
        let allowed = self.paid.and_then(|paid| paid.checked_sub(INTERVAL * (BURST - 1)));
        Some(allowed.map_or(wanted, |allowed| wanted.max(allowed)))
    }

    /// A look that was due begins.
    pub fn begin(&mut self, now: Instant) {
        if let Some(event) = self.event {
            self.done = AFTER.iter().take_while(|after| event + **after <= now).count();
        }
        self.paid = Some(self.paid.map_or(now, |paid| paid.max(now)) + INTERVAL);
        (self.others, self.looked) = (None, Some(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use proptest::prelude::*;

    /// The moments of the looks, in milliseconds, when events come at `events` and every look is made when it is due.
    fn looks(events: &[u64], until: u64) -> Vec<u64> {
        let start = some_instant();
        let mut rereads = Rereads::default();
        let (mut looks, mut events) = (Vec::new(), events.iter().peekable());
        for millisecond in 0..until {
            let now = start + Duration::from_millis(millisecond);
            while events.next_if(|event| **event <= millisecond).is_some() {
                rereads.event(now);
            }
            if rereads.due().is_some_and(|due| due <= now) {
                rereads.begin(now);
                looks.push(millisecond);
            }
        }
        looks
    }

    #[test]
    fn after_an_event_there_are_four_looks_and_then_none() {
        assert_eq!(looks(&[10], 60_000), [10, 60, 210, 1010]);
        assert_eq!(looks(&[], 60_000), [0; 0]);
    }

    #[test]
    fn a_later_event_starts_the_series_again() {
        assert_eq!(looks(&[0, 20], 60_000), [0, 20, 70, 220, 1020]);
        assert_eq!(looks(&[0, 500, 5_000], 60_000), [0, 50, 200, 500, 550, 700, 1500, 5000, 5050, 5200, 6000]);
    }

    #[test]
    fn events_of_others_give_one_look_a_second_and_hold_up_none_that_matters() {
        let start = some_instant();
        let mut rereads = Rereads::default();
        let mut looks = Vec::new();
        for millisecond in 0..10_000 {
            let now = start + Duration::from_millis(millisecond);
            rereads.event_of_others(now);
            if millisecond == 3_500 {
                rereads.event(now);
            }
            if rereads.due().is_some_and(|due| due <= now) {
                rereads.begin(now);
                looks.push(millisecond);
            }
        }
        assert_eq!(looks, [0, 1000, 2000, 3000, 3500, 3550, 3700, 4500, 5500, 6500, 7500, 8500, 9500]);
    }

    #[test]
    fn looks_that_were_missed_are_made_up_by_one() {
        let start = some_instant();
        let mut rereads = Rereads::default();
        rereads.event(start);
        let late = start + Duration::from_millis(300);
        rereads.begin(late);
        assert_eq!(rereads.due(), Some(start + Duration::from_millis(1000)));
    }

    #[test]
    fn a_storm_costs_ten_looks_a_second_and_its_end_is_seen() {
        let storm: Vec<u64> = (0..60_000).collect();
        let looks = looks(&storm, 70_000);
        let during = looks.iter().filter(|look| **look < 60_000).count();
        assert!((590..=610).contains(&during), "{during}");
        let after: Vec<u64> = looks.into_iter().filter(|look| *look >= 60_049).collect();
        assert!(after.last().is_some_and(|last| *last >= 60_999), "{after:?}");
        assert!(after.len() <= 4, "{after:?}");
    }

    proptest! {
        #[test]
        fn looks_are_bounded_and_no_event_goes_unseen(mut events in proptest::collection::vec(0_u64..20_000, 0..400)) {
            events.sort_unstable();
            let looks = looks(&events, 30_000);
            for window in [1_000_u64, 5_000, 20_000] {
                for from in (0..20_000).step_by(500) {
                    let count = looks.iter().filter(|look| (from..from + window).contains(*look)).count();
                    prop_assert!(count as u64 <= window / 100 + u64::from(BURST) + 1, "{count} in {window} ms");
                }
            }
            for event in &events {
                // Never more than one interval late, and once more when the change has surely followed.
                prop_assert!(looks.iter().any(|look| (*event..=event + 100).contains(look)), "{event}: {looks:?}");
                prop_assert!(looks.iter().any(|look| *look >= event + 1000), "{event}: {looks:?}");
            }
        }
    }
}
