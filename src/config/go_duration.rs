//! Durations as Go writes them: `1s`, `1m30s`, `1.5h`, `300ms`, `0`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A duration that is typed and shown as Go does. Never negative: no setting of ours, nor of the sidecars we replace, means
/// anything below zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GoDuration(pub Duration);

/// Why a text is no duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// Not Go's form.
    #[error("{0:?} is not a duration: use a number with a unit, such as 500ms, 30s, 1m30s or 2h")]
    Malformed(String),
    /// Below zero.
    #[error("{0:?} is negative; a duration here must not be")]
    Negative(String),
    /// Beyond Go's 290 years.
    #[error("{0:?} is too long a duration")]
    TooLong(String),
}

const NANOS_PER_SECOND: u128 = 1_000_000_000;

impl FromStr for GoDuration {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Self, DurationError> {
        let malformed = || DurationError::Malformed(text.to_owned());
        let (negative, mut rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            Some(_) | None => (false, text),
        };
        if rest.is_empty() {
            return Err(malformed());
        }
        let mut nanos: u128 = 0;
        if rest != "0" {
            while !rest.is_empty() {
                let (part, after) = component(rest).ok_or_else(malformed)?;
                nanos = nanos.saturating_add(part);
                rest = after;
            }
        }
        if nanos > u128::from(i64::MAX.unsigned_abs()) {
            return Err(DurationError::TooLong(text.to_owned()));
        }
        if negative && nanos > 0 {
            return Err(DurationError::Negative(text.to_owned()));
        }
        let (seconds, below) = (nanos / NANOS_PER_SECOND, nanos % NANOS_PER_SECOND);
        match (u64::try_from(seconds), u32::try_from(below)) {
            (Ok(seconds), Ok(below)) => Ok(Self(Duration::new(seconds, below))),
            (Err(_), _) | (_, Err(_)) => Err(malformed()),
        }
    }
}

/// The first number with its unit, in nanoseconds, and what follows.
fn component(text: &str) -> Option<(u128, &str)> {
    let whole_end = text.find(|char: char| !char.is_ascii_digit()).unwrap_or(text.len());
    let (whole, rest) = text.split_at(whole_end);
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(rest.find(|char: char| !char.is_ascii_digit()).unwrap_or(rest.len())),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let unit_end = rest.find(|char: char| char.is_ascii_digit() || char == '.').unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(unit_end);
    let unit: u128 = match unit {
        "ns" => 1,
        "us" | "µs" | "μs" => 1_000,
        "ms" => 1_000_000,
        "s" => NANOS_PER_SECOND,
        "m" => 60 * NANOS_PER_SECOND,
        "h" => 3600 * NANOS_PER_SECOND,
        _ => return None,
    };
    let whole =
        whole.bytes().fold(0_u128, |value, digit| value.saturating_mul(10).saturating_add(u128::from(digit - b'0')));
    // Digits beyond the 18th are far below a nanosecond, even of an hour.
    let fraction = &fraction[..fraction.len().min(18)];
    let (numerator, denominator) =
        fraction.bytes().fold((0_u128, 1_u128), |(n, d), digit| (n * 10 + u128::from(digit - b'0'), d * 10));
    Some((whole.saturating_mul(unit).saturating_add(unit * numerator / denominator), rest))
}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        if seconds < 60 || self.0.subsec_nanos() > 0 {
            return write!(f, "{:?}", self.0);
        }
        for (count, unit) in [(seconds / 3600, "h"), (seconds / 60 % 60, "m"), (seconds % 60, "s")] {
            if count > 0 {
                write!(f, "{count}{unit}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> Result<Duration, DurationError> {
        text.parse::<GoDuration>().map(|duration| duration.0)
    }

    #[test]
    fn gos_forms_are_read() {
        for (text, nanos) in [
            ("0", 0),
            ("+0", 0),
            ("-0s", 0),
            ("1s", 1_000_000_000),
            ("1m30s", 90_000_000_000),
            ("1.5h", 5_400_000_000_000),
            (".5s", 500_000_000),
            ("1.s", 1_000_000_000),
            ("300ms", 300_000_000),
            ("1us", 1_000),
            ("1µs", 1_000),
            ("1μs", 1_000),
            ("1h1m1s1ms1us1ns", 3_661_001_001_001),
            ("0.000000001s", 1),
            ("0.100000000000000000000h", 360_000_000_000),
            ("9223372036854775807ns", i64::MAX.unsigned_abs()),
        ] {
            assert_eq!(parsed(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_its_reason() {
        for text in
            ["", "-", "1", "s", "1x", "1 s", " 1s", "1s ", "one", "1..5s", "1.5.5s", ".s", "1d", "0x1s", "1S", "ms1"]
        {
            assert_eq!(parsed(text), Err(DurationError::Malformed(text.into())), "{text}");
        }
        assert_eq!(parsed("-1s"), Err(DurationError::Negative("-1s".into())));
        assert_eq!(parsed("9223372036854775808ns"), Err(DurationError::TooLong("9223372036854775808ns".into())));
        let long = format!("{}h", "9".repeat(200));
        assert_eq!(parsed(&long), Err(DurationError::TooLong(long.clone())));
    }

    #[test]
    fn shown_durations_are_short() {
        let shown = |text: &str| text.parse::<GoDuration>().unwrap().to_string();
        assert_eq!(
            [shown("30s"), shown("90s"), shown("10m"), shown("1.5s"), shown("2h5s")],
            ["30s", "1m30s", "10m", "1.5s", "2h5s"]
        );
    }

    proptest! {
        #[test]
        fn what_is_shown_reads_back(millis in 0_u64..1_000_000_000_000) {
            let duration = Duration::from_millis(millis);
            prop_assert_eq!(parsed(&GoDuration(duration).to_string()), Ok(duration));
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            drop(parsed(&text));
        }

        #[test]
        fn no_near_miss_panics(text in "[-+]?([0-9]{0,30}(\\.[0-9]{0,30})?(ns|us|µs|ms|s|m|h|x)?){0,5}") {
            drop(parsed(&text));
        }
    }
}
