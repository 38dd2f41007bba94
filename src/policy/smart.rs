//! What an NVMe drive says of itself: its SMART log page, and what each part of it means.

use super::outcome::{Outcome, Reason, Severity};
use std::fmt;
use std::time::{Duration, Instant};

/// As long as the page is.
pub const PAGE_BYTES: usize = 512;

/// No drive works above this; none is as cold as 0 K.
const MAX_KELVIN: u16 = 500;

/// Of the freezing point.
const KELVIN: u16 = 273;

/// The page, as far as anything here depends on it.
///
/// Source: NVM Express Base Specification, SMART / Health Information (log page identifier 02h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmartLog {
    /// Bits, see [`Warning`].
    pub critical_warning: u8,
    /// In Kelvin.
    pub temperature: u16,
    /// What is left of the spare blocks, in percent.
    pub spare: u8,
    /// The drive's own limit for them.
    pub spare_threshold: u8,
    /// What of the rated lifetime is used, in percent; goes past 100, and stops at 255. It says nothing of space.
    pub percentage_used: u8,
    /// Errors that the drive could not correct.
    pub media_errors: u128,
}

/// Why a page is no page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Implausible(&'static str);

impl fmt::Display for Implausible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl SmartLog {
    /// The page with zeros for all that [`Self::parse`] passes over, such as how much was written.
    pub fn judged(page: &[u8; PAGE_BYTES]) -> Vec<u8> {
        let reads = |at: usize| at < 6 || (160..176).contains(&at);
        page.iter().enumerate().map(|(at, byte)| if reads(at) { *byte } else { 0 }).collect()
    }

    /// Reads the page.
    ///
    /// # Errors
    /// What no drive can mean: it says nothing then, neither good nor bad.
    pub fn parse(page: &[u8]) -> Result<Self, Implausible> {
        let Some(page) = page.first_chunk::<PAGE_BYTES>() else { return Err(Implausible("the page is cut short")) };
        for (byte, name) in [(0, "the page is all zeros"), (0xff, "the page is all ones")] {
            if page.iter().all(|other| *other == byte) {
                return Err(Implausible(name));
            }
        }
        let temperature = u16::from_le_bytes([page[1], page[2]]);
        let mut media_errors = [0; 16];
        media_errors.copy_from_slice(&page[160..176]);
        let log = Self {
            critical_warning: page[0],
            temperature,
            spare: page[3],
            spare_threshold: page[4],
            percentage_used: page[5],
            media_errors: u128::from_le_bytes(media_errors),
        };
        if temperature == 0 || temperature > MAX_KELVIN {
            return Err(Implausible("the temperature is impossible"));
        }
        if log.spare > 100 || log.spare_threshold > 100 {
            return Err(Implausible("more than 100 % are spare"));
        }
        Ok(log)
    }

    /// In degrees Celsius.
    pub fn celsius(&self) -> i32 {
        i32::from(self.temperature) - i32::from(KELVIN)
    }

    fn warns_of(&self, warning: Warning) -> bool {
        self.critical_warning & (1 << warning.bit()) != 0
    }
}

/// The bits of the page's critical warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warning {
    /// Bit 0: less is spare than the drive's limit.
    Spare,
    /// Bit 1: too hot or too cold.
    Temperature,
    /// Bit 2: media or internal errors have made it unreliable.
    Reliability,
    /// Bit 3: all media is read-only.
    ReadOnly,
    /// Bit 4: what keeps the cache over a power loss does not work.
    VolatileBackup,
    /// Bit 5: the persistent memory region is read-only or unreliable.
    PersistentMemory,
}

impl Warning {
    /// All, by their bits.
    pub const ALL: [Self; 6] = [
        Self::Spare,
        Self::Temperature,
        Self::Reliability,
        Self::ReadOnly,
        Self::VolatileBackup,
        Self::PersistentMemory,
    ];

    /// As in the settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spare => "spare",
            Self::Temperature => "temperature",
            Self::Reliability => "reliability",
            Self::ReadOnly => "readOnly",
            Self::VolatileBackup => "volatileBackup",
            Self::PersistentMemory => "persistentMemory",
        }
    }

    fn bit(self) -> usize {
        Self::ALL.into_iter().position(|other| other == self).unwrap_or_default()
    }

    fn reason(self) -> (&'static str, &'static str) {
        match self {
            Self::Spare => ("SpareLow", "the drive says that its spare blocks run out"),
            Self::Temperature => ("Temperature", "the drive says that it is too hot or too cold"),
            Self::Reliability => ("ReliabilityDegraded", "the drive says that it is no longer reliable"),
            Self::ReadOnly => ("ReadOnly", "the drive has made itself read-only"),
            Self::VolatileBackup => ("CacheUnprotected", "the drive's cache would not survive a power loss"),
            Self::PersistentMemory => {
                ("MemoryRegion", "the drive's persistent memory region is read-only or unreliable")
            }
        }
    }
}

/// What something means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Nothing.
    Ignore,
    /// Someone should look.
    Warn,
    /// The drive does not work.
    Fail,
}

/// Two limits; `None` is never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits<T> {
    /// From here on a warning.
    pub warn: Option<T>,
    /// From here on a failure.
    pub fail: Option<T>,
}

impl<T: PartialOrd + Copy> Limits<T> {
    /// What `value` means.
    pub fn above(&self, value: T) -> Level {
        let reached = |limit: Option<T>| limit.is_some_and(|limit| value >= limit);
        match (reached(self.fail), reached(self.warn)) {
            (true, _) => Level::Fail,
            (false, true) => Level::Warn,
            (false, false) => Level::Ignore,
        }
    }
}

/// What counts, and how much.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SmartLimits {
    /// For each bit of the critical warning, by [`Warning::ALL`].
    pub warnings: [Level; 6],
    /// The spare blocks are below the drive's own limit.
    pub spare_below_threshold: Level,
    /// Of the rated lifetime, in percent.
    pub percentage_used: Limits<u8>,
    /// In degrees Celsius, besides the drive's own limit.
    pub celsius: Limits<i32>,
    /// New errors since the probe began.
    pub media_errors: Limits<u64>,
    /// A temperature, and growth of errors, are told for this long after they were last seen.
    pub hold: Duration,
}

impl Default for SmartLimits {
    fn default() -> Self {
        let [spare, temperature, reliability, read_only, backup, memory] =
            [Level::Warn, Level::Warn, Level::Fail, Level::Fail, Level::Warn, Level::Warn];
        Self {
            warnings: [spare, temperature, reliability, read_only, backup, memory],
            spare_below_threshold: Level::Fail,
            percentage_used: Limits { warn: Some(90), fail: None },
            celsius: Limits { warn: None, fail: None },
            media_errors: Limits { warn: Some(1), fail: None },
            hold: Duration::from_secs(600),
        }
    }
}

/// Judges the pages of one drive.
#[derive(Debug, Default)]
pub struct SmartPolicy {
    /// Errors that were there before, and how many there are.
    errors: Option<(u128, u128)>,
    /// The last growth of errors.
    grown: Option<Instant>,
    /// The last time that the temperature meant something.
    hot: Option<(Level, Reason, Instant)>,
}

impl SmartPolicy {
    /// What `log` says.
    pub fn judge(&mut self, log: &SmartLog, limits: &SmartLimits, now: Instant) -> Outcome {
        let mut found: Vec<(Level, Reason)> = Vec::new();
        let mut note = |level, code, message: String| found.push((level, Reason::new(code, message)));
        if log.spare < log.spare_threshold {
            let message = format!("{} % spare, below the drive's limit of {} %", log.spare, log.spare_threshold);
            note(limits.spare_below_threshold, "SpareBelowThreshold", message);
        } else if log.spare == log.spare_threshold && log.spare_threshold > 0 {
            let level = if limits.spare_below_threshold == Level::Ignore { Level::Ignore } else { Level::Warn };
            note(level, "SpareLow", format!("{} % spare, which is the drive's limit", log.spare));
        }
        for (warning, level) in Warning::ALL.into_iter().zip(limits.warnings) {
            if !log.warns_of(warning) || warning == Warning::Temperature {
                continue;
            }
            let (code, message) = warning.reason();
            // Drives set the bit by wear alone: then it says what the percentage does.
            let worn =
                warning == Warning::Reliability && log.percentage_used >= 100 && log.spare >= log.spare_threshold;
            if worn && !log.warns_of(Warning::ReadOnly) {
                let message = format!("endurance used: {} % of the rated lifetime, and {message}", log.percentage_used);
                note(level.min(Level::Warn), "EnduranceUsed", message);
            } else {
                note(level, code, message.to_owned());
            }
        }
        let message = format!("endurance used: {} % of the rated lifetime (not of the space)", log.percentage_used);
        note(limits.percentage_used.above(log.percentage_used), "EnduranceUsed", message);
        found.extend(self.temperature(log, limits, now));
        found.extend(self.errors(log, limits, now));
        // The worst decides, and of those the first.
        let worst = found.iter().map(|(level, _)| *level).max().unwrap_or(Level::Ignore);
        let mut at_worst = found.into_iter().filter(|(level, _)| *level == worst).map(|(_, reason)| reason);
        let Some(first) = at_worst.next() else { return Outcome::Success };
        let others: Vec<String> = at_worst.map(|reason| reason.message).collect();
        let message = std::iter::once(first.message).chain(others).collect::<Vec<_>>().join("; ");
        let reason = Reason::new(first.code, message);
        match worst {
            Level::Ignore => Outcome::Success,
            Level::Warn => Outcome::Warning(reason),
            Level::Fail => Outcome::Failure(reason, Severity::Hard),
        }
    }

    fn temperature(&mut self, log: &SmartLog, limits: &SmartLimits, now: Instant) -> Option<(Level, Reason)> {
        let bit = if log.warns_of(Warning::Temperature) {
            limits.warnings[Warning::Temperature.bit()]
        } else {
            Level::Ignore
        };
        let level = bit.max(limits.celsius.above(log.celsius()));
        if level != Level::Ignore {
            let (code, message) = Warning::Temperature.reason();
            let message = if bit == Level::Ignore { "hot".to_owned() } else { message.to_owned() };
            let reason = Reason::new(code, format!("{message}: {} °C", log.celsius()));
            // What is worse is held; what is milder does not shorten it.
            let keep = self.hot.as_ref().is_some_and(|(held, _, at)| *held > level && holds(*at, limits, now));
            if !keep {
                self.hot = Some((level, reason.clone(), now));
            }
            return Some((level, reason));
        }
        let (held, reason, at) = self.hot.as_ref()?;
        // A failure ends with its cause; the warning stays a while.
        holds(*at, limits, now).then(|| ((*held).min(Level::Warn), reason.clone()))
    }

    fn errors(&mut self, log: &SmartLog, limits: &SmartLimits, now: Instant) -> Option<(Level, Reason)> {
        let (mut before, last) = self.errors.unwrap_or((log.media_errors, log.media_errors));
        if log.media_errors > last {
            self.grown = Some(now);
        } else if log.media_errors < last || !self.grown.is_some_and(|at| holds(at, limits, now)) {
            // Another drive under the name, or nothing new for long enough.
            before = log.media_errors;
        }
        self.errors = Some((before, log.media_errors));
        let new = u64::try_from(log.media_errors - before).unwrap_or(u64::MAX);
        let message = format!("{new} new media errors, {} in all", log.media_errors);
        Some((limits.media_errors.above(new), Reason::new("MediaErrors", message))).filter(|_| new > 0)
    }
}

fn holds(at: Instant, limits: &SmartLimits, now: Instant) -> bool {
    now.saturating_duration_since(at) < limits.hold
}

impl PartialOrd for Level {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Level {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let rank = |level: &Self| match level {
            Self::Ignore => 0,
            Self::Warn => 1,
            Self::Fail => 2,
        };
        rank(self).cmp(&rank(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use proptest::prelude::*;

    const GOOD: SmartLog = SmartLog {
        critical_warning: 0,
        temperature: 313,
        spare: 100,
        spare_threshold: 10,
        percentage_used: 3,
        media_errors: 7,
    };

    fn judged(log: SmartLog) -> Outcome {
        SmartPolicy::default().judge(&log, &SmartLimits::default(), some_instant())
    }

    fn named(outcome: &Outcome) -> (&'static str, &'static str) {
        (outcome.name(), outcome.reason().map_or("", |reason| reason.code))
    }

    fn page() -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES];
        page[1..6].copy_from_slice(&[57, 1, 100, 10, 3]);
        page[160] = 7;
        page
    }

    #[test]
    fn the_page_is_read_by_its_offsets() {
        assert_eq!(SmartLog::parse(&page()), Ok(GOOD));
        assert_eq!(GOOD.celsius(), 40);
        assert_eq!(judged(GOOD), Outcome::Success);
    }

    #[test]
    fn implausible_pages_say_nothing() {
        let with = |at: usize, byte| {
            let mut page = page();
            page[at] = byte;
            page
        };
        let mut cold = page();
        cold[1..3].fill(0);
        for bad in [
            vec![0; 512],
            vec![0xff; 512],
            vec![],
            page()[..511].to_vec(),
            with(2, 2),
            with(3, 101),
            with(4, 101),
            cold,
        ] {
            assert!(SmartLog::parse(&bad).is_err(), "{:?}", bad.get(..8));
        }
    }

    #[test]
    fn wear_is_a_warning_however_far_it_goes() {
        for (used, name) in [
            (0, "success"),
            (89, "success"),
            (90, "warning"),
            (99, "warning"),
            (100, "warning"),
            (105, "warning"),
            (200, "warning"),
            (255, "warning"),
        ] {
            let outcome = judged(SmartLog { percentage_used: used, ..GOOD });
            assert_eq!(outcome.name(), name, "{used}");
            if let Some(reason) = outcome.reason() {
                assert!(reason.message.contains("endurance used") && reason.message.contains("lifetime"), "{reason}");
            }
        }
        let beyond =
            SmartLimits { percentage_used: Limits { warn: Some(150), fail: Some(200) }, ..SmartLimits::default() };
        for (used, name) in [(149, "success"), (150, "warning"), (199, "warning"), (200, "failure"), (255, "failure")] {
            let log = SmartLog { percentage_used: used, ..GOOD };
            assert_eq!(SmartPolicy::default().judge(&log, &beyond, some_instant()).name(), name, "{used}");
        }
    }

    #[test]
    fn each_bit_means_what_it_says_and_wear_alone_condemns_no_drive() {
        for (bits, used, seen) in [
            (0, 3, ("success", "")),
            (1, 3, ("warning", "SpareLow")),
            (2, 3, ("warning", "Temperature")),
            (4, 3, ("failure", "ReliabilityDegraded")),
            (4, 99, ("failure", "ReliabilityDegraded")),
            (4, 100, ("warning", "EnduranceUsed")),
            (4, 255, ("warning", "EnduranceUsed")),
            (8, 3, ("failure", "ReadOnly")),
            (12, 255, ("failure", "ReliabilityDegraded")),
            (16, 3, ("warning", "CacheUnprotected")),
            (32, 3, ("warning", "MemoryRegion")),
            (64, 3, ("success", "")),
        ] {
            let outcome = judged(SmartLog { critical_warning: bits, percentage_used: used, ..GOOD });
            assert_eq!(named(&outcome), seen, "{bits:#b} at {used} %");
        }
    }

    #[test]
    fn spare_below_the_drives_own_limit_fails_and_at_it_warns() {
        for (spare, threshold, seen) in [
            (100, 10, ("success", "")),
            (10, 10, ("warning", "SpareLow")),
            (9, 10, ("failure", "SpareBelowThreshold")),
            (0, 0, ("success", "")),
        ] {
            let outcome = judged(SmartLog { spare, spare_threshold: threshold, ..GOOD });
            assert_eq!(named(&outcome), seen, "{spare} of {threshold}");
        }
        // With the reliability bit by wear, too: the spare decides.
        let outcome = judged(SmartLog { spare: 5, critical_warning: 5, percentage_used: 120, ..GOOD });
        assert_eq!(named(&outcome), ("failure", "SpareBelowThreshold"));
    }

    #[test]
    fn errors_that_were_there_are_no_news_and_growth_is_told_for_a_while() {
        let (start, limits) = (some_instant(), SmartLimits::default());
        let mut policy = SmartPolicy::default();
        let mut at = |errors, seconds| {
            let log = SmartLog { media_errors: errors, ..GOOD };
            named(&policy.judge(&log, &limits, start + Duration::from_secs(seconds)))
        };
        assert_eq!(at(1_000, 0), ("success", ""));
        assert_eq!(at(1_001, 10), ("warning", "MediaErrors"));
        assert_eq!(at(1_001, 609), ("warning", "MediaErrors"));
        assert_eq!(at(1_001, 610), ("success", ""));
        assert_eq!(at(3, 620), ("success", ""), "another drive");
        assert_eq!(at(4, 630), ("warning", "MediaErrors"));
    }

    #[test]
    fn a_temperature_is_told_for_a_while_and_then_forgotten() {
        let (start, limits) = (
            some_instant(),
            SmartLimits { celsius: Limits { warn: Some(70), fail: Some(85) }, ..SmartLimits::default() },
        );
        let mut policy = SmartPolicy::default();
        let mut at = |celsius: u16, seconds| {
            let log = SmartLog { temperature: celsius + KELVIN, ..GOOD };
            policy.judge(&log, &limits, start + Duration::from_secs(seconds)).name()
        };
        assert_eq!(
            [at(69, 0), at(70, 10), at(60, 20), at(60, 609), at(60, 610)],
            ["success", "warning", "warning", "warning", "success"]
        );
        assert_eq!([at(85, 700), at(84, 710), at(20, 720), at(20, 1310)], ["failure", "warning", "warning", "success"]);
    }

    proptest! {
        #[test]
        fn no_page_panics_and_a_good_one_never_fails_by_wear(mut bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            if let Ok(log) = SmartLog::parse(&bytes) {
                judged(log);
            }
            if bytes.len() >= PAGE_BYTES {
                bytes[0] = 0;
                bytes[1..5].copy_from_slice(&[57, 1, 100, 10]);
                let log = SmartLog::parse(&bytes).unwrap();
                prop_assert_ne!(judged(log).name(), "failure");
            }
        }
    }
}
