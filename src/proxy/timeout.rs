//! The caller's deadline, which goes on running while a call waits here.

use http::{HeaderName, HeaderValue};
use std::time::Duration;

/// The header's name.
pub(super) static GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Waits shorter than this are within what any transport adds.
const UNNOTICED: Duration = Duration::from_millis(1);

/// A timeout has at most eight digits.
const MOST: u128 = 99_999_999;

/// What is left of the timeout in `header` after `waited`; `None` if the header can stay as it is, because nothing of note has passed, or
/// because it is none that we understand.
///
/// Source: <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>
pub(super) fn remaining(header: &HeaderValue, waited: Duration) -> Option<HeaderValue> {
    if waited < UNNOTICED {
        return None;
    }
    let text = header.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanoseconds = u128::from(digits.parse::<u32>().ok()?) * per_unit(unit)?;
    let left = nanoseconds.saturating_sub(waited.as_nanos());
    // The finest unit that has room: nothing is lost that matters.
    let written = ["n", "u", "m", "S", "M", "H"].into_iter().find_map(|unit| {
        let amount = left / per_unit(unit)?;
        (amount <= MOST).then(|| format!("{amount}{unit}"))
    })?;
    HeaderValue::try_from(written).ok()
}

fn per_unit(unit: &str) -> Option<u128> {
    Some(match unit {
        "n" => 1,
        "u" => 1_000,
        "m" => 1_000_000,
        "S" => 1_000_000_000,
        "M" => 60_000_000_000,
        "H" => 3_600_000_000_000,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn after(header: &str, waited: Duration) -> Option<String> {
        let left = remaining(&HeaderValue::from_str(header).unwrap(), waited)?;
        Some(left.to_str().unwrap().to_owned())
    }

    #[test]
    fn the_wait_is_taken_off() {
        assert_eq!(after("2000m", Duration::from_millis(500)).as_deref(), Some("1500000u"));
        assert_eq!(after("99999999H", Duration::from_secs(3600)).as_deref(), Some("99999998H"));
        assert_eq!(after("1S", Duration::from_secs(5)).as_deref(), Some("0n"), "over is over, and not for ever");
    }

    #[test]
    fn a_call_that_did_not_wait_keeps_its_header() {
        assert_eq!(after("119999999u", Duration::from_micros(300)), None);
    }

    #[test]
    fn what_is_not_a_timeout_stays_as_it_is() {
        for odd in ["", "S", "1", "1s", "-1S", "123456789S", "1.5S", " 1S"] {
            assert_eq!(after(odd, Duration::from_secs(1)), None, "{odd:?}");
        }
    }

    proptest! {
        #[test]
        fn the_rest_is_never_longer_than_the_whole_less_the_wait(
            amount in 0u32..=99_999_999, unit in 0usize..6, waited in 1u64..10_000_000,
        ) {
            let unit = ["n", "u", "m", "S", "M", "H"][unit];
            let waited = Duration::from_millis(waited);
            let left = after(&format!("{amount}{unit}"), waited).unwrap();
            let (digits, left_unit) = left.split_at(left.len() - 1);
            prop_assert!(digits.len() <= 8);
            let left = digits.parse::<u128>().unwrap() * per_unit(left_unit).unwrap();
            let exact = (u128::from(amount) * per_unit(unit).unwrap()).saturating_sub(waited.as_nanos());
            prop_assert!(left <= exact && exact - left < per_unit(left_unit).unwrap());
        }
    }
}
