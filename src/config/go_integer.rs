//! Whole numbers as Go's flag package reads them: `0x2648`, `0b10`, `0o17`, `017` and `1_000` are numbers, too.

/// A whole number in any of Go's forms, as `strconv.ParseInt` reads it with base 0.
///
/// # Errors
/// A sentence that repeats the text: it is no number, or none that fits `T`.
///
/// Source: <https://pkg.go.dev/strconv#ParseInt>
pub fn integer<T: TryFrom<i64> + Bounded>(text: &str) -> Result<T, String> {
    let number = parse(text).ok_or_else(|| format!("{text:?} is not a whole number"))?;
    T::try_from(number).map_err(|_outside| format!("{text:?} is not in {}", T::RANGE))
}

/// A log level. Upstream reads it with base 10, so zeros in front mean nothing; the other forms are taken besides.
///
/// # Errors
/// As [`integer`].
pub fn level(text: &str) -> Result<i32, String> {
    text.parse().or_else(|_not_decimal| integer(text))
}

/// A type whose bounds an error can name.
pub trait Bounded {
    /// `LOWEST to HIGHEST`
    const RANGE: &'static str;
}

impl Bounded for i32 {
    const RANGE: &'static str = "-2147483648 to 2147483647";
}

impl Bounded for u32 {
    const RANGE: &'static str = "0 to 4294967295";
}

impl Bounded for i64 {
    const RANGE: &'static str = "-9223372036854775808 to 9223372036854775807";
}

fn parse(text: &str) -> Option<i64> {
    let (negative, digits) = match text.as_bytes() {
        [b'-', ..] => (true, &text[1..]),
        [b'+', ..] => (false, &text[1..]),
        _ => (false, text),
    };
    let (radix, digits, prefixed) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..], true),
        [b'0', b'b' | b'B', ..] => (2, &digits[2..], true),
        [b'0', b'o' | b'O', ..] => (8, &digits[2..], true),
        [b'0', _, ..] => (8, &digits[1..], true),
        _ => (10, digits, false),
    };
    // One underscore between digits, or between the prefix and the first of them.
    let digits = match digits.strip_prefix('_') {
        Some(rest) if prefixed => rest,
        Some(_) => return None,
        None => digits,
    };
    if digits.split('_').any(|part| part.is_empty() || !part.chars().all(|digit| digit.is_digit(radix))) {
        return None;
    }
    let sign = if negative { "-" } else { "" };
    i64::from_str_radix(&format!("{sign}{}", digits.replace('_', "")), radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_gos_is_a_number() {
        for (text, number) in [
            ("0", 0),
            ("9808", 9808),
            ("+7", 7),
            ("-1", -1),
            ("0x2648", 9800),
            ("0X1f", 31),
            ("-0x10", -16),
            ("0b101", 5),
            ("0o17", 15),
            ("017", 15),
            ("1_000", 1000),
            ("0x_ff", 255),
            ("0_7", 7),
            ("-9223372036854775808", i64::MIN),
        ] {
            assert_eq!(integer(text), Ok(number), "{text}");
        }
    }

    #[test]
    fn what_go_refuses_is_refused_and_repeated() {
        for text in [
            "",
            "-",
            "0x",
            "0b2",
            "08",
            "1__0",
            "_1",
            "1_",
            "0x1_",
            "0__7",
            "1.0",
            "1e3",
            " 1",
            "--1",
            "9223372036854775808",
        ] {
            let error = integer::<i64>(text).unwrap_err();
            assert!(error.contains(&format!("{text:?}")), "{text}: {error}");
        }
        assert_eq!(integer::<u32>("-1"), Err("\"-1\" is not in 0 to 4294967295".to_owned()));
    }

    #[test]
    fn a_level_keeps_its_base_of_ten() {
        assert_eq!((level("010"), level("0x2"), level("-1")), (Ok(10), Ok(2), Ok(-1)));
        assert!(level("verbose").is_err());
    }
}
