//! What a kernel-log rule looks for: plain text with `*` for anything, and `{device}` for the device's name.

/// A longer pattern is no pattern of one line.
const MAX_PATTERN_BYTES: usize = 256;

/// Longer than any device's name.
const MAX_DEVICE_BYTES: usize = 64;

const DEVICE: &str = "{device}";

/// A pattern, found anywhere in a line. Letters count as they are, upper and lower case too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinePattern {
    written: String,
    /// Texts in this order, with anything between them.
    before: Vec<String>,
    /// After `{device}`, if the pattern has one: the text that follows at once, and those that come later.
    after: Option<(String, Vec<String>)>,
}

/// Why a text is no pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatternError {
    /// It would be found in every line.
    Empty,
    /// More bytes than a pattern has.
    TooLong,
    /// `{device}` is written twice.
    TwoDevices,
    /// `*{device}`: where the name begins cannot be told.
    DeviceAfterAnything,
}

impl PatternError {
    /// What is wrong, and what to do.
    pub fn message(self) -> String {
        match self {
            Self::Empty => "would be found in every line: write some of the line's text".to_owned(),
            Self::TooLong => format!("is too long: at most {MAX_PATTERN_BYTES} bytes"),
            Self::TwoDevices => "holds {device} twice: keep one".to_owned(),
            Self::DeviceAfterAnything => {
                "has {device} after a `*`: write the text that stands before the name".to_owned()
            }
        }
    }
}

/// Where a pattern was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found<'line> {
    /// What stands at `{device}`; `None` if the pattern has none.
    pub device: Option<&'line str>,
}

impl LinePattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// What could not be meant.
    pub fn new(written: &str) -> Result<Self, PatternError> {
        if written.len() > MAX_PATTERN_BYTES {
            return Err(PatternError::TooLong);
        }
        let texts = |part: &str| part.split('*').filter(|text| !text.is_empty()).map(str::to_owned).collect();
        let mut parts = written.split(DEVICE);
        let before = parts.next().unwrap_or_default();
        let after = parts.next();
        if parts.next().is_some() {
            return Err(PatternError::TwoDevices);
        }
        if after.is_some() && before.ends_with('*') {
            return Err(PatternError::DeviceAfterAnything);
        }
        let before: Vec<String> = texts(before);
        let after = after.map(|after| match after.split_once('*') {
            Some((at_once, later)) => (at_once.to_owned(), texts(later)),
            None => (after.to_owned(), Vec::new()),
        });
        let says_something = !before.is_empty()
            || after.as_ref().is_some_and(|(at_once, later)| !at_once.is_empty() || !later.is_empty());
        if says_something { Ok(Self { written: written.to_owned(), before, after }) } else { Err(PatternError::Empty) }
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.written
    }

    /// Where the pattern is in `line`, the first place that fits. Takes time in proportion to the line.
    pub fn find<'line>(&self, line: &'line str) -> Option<Found<'line>> {
        let Some((at_once, later)) = &self.after else {
            return in_order(line, &self.before).map(|_| Found { device: None });
        };
        // All but the last text before the name may be anywhere; the last one stands right before it.
        let (last, earlier) = match self.before.split_last() {
            Some((last, earlier)) => (last.as_str(), earlier),
            None => ("", &[][..]),
        };
        let mut rest = in_order(line, earlier)?;
        loop {
            let at = if last.is_empty() { word(rest)? } else { rest.find(last)? + last.len() };
            let from = &rest[at..];
            let device = device(from);
            let behind = &from[device.len()..];
            if !device.is_empty()
                && let Some(behind) = behind.strip_prefix(at_once.as_str())
                && in_order(behind, later).is_some()
            {
                return Some(Found { device: Some(device) });
            }
            // Every turn is nearer to the end; the name may hold the text that stands before another one.
            rest = if last.is_empty() { behind } else { from };
        }
    }
}

/// What is left of `line` after `texts`, each after the one before it.
fn in_order<'line>(line: &'line str, texts: &[String]) -> Option<&'line str> {
    texts.iter().try_fold(line, |rest, text| rest.find(text.as_str()).map(|at| &rest[at + text.len()..]))
}

/// Where the next word begins.
fn word(text: &str) -> Option<usize> {
    text.find(is_device)
}

fn is_device(char: char) -> bool {
    char.is_ascii_alphanumeric() || matches!(char, '_' | '-' | '.' | '/' | '@')
}

/// The name that `text` begins with: `nvme0`, `0000:05:00.0`. A colon belongs to it only before more of it.
fn device(text: &str) -> &str {
    let bytes = text.as_bytes();
    let mut end = 0;
    while end < bytes.len().min(MAX_DEVICE_BYTES) {
        let fits = match bytes[end] {
            b':' => end > 0 && bytes.get(end + 1).is_some_and(u8::is_ascii_alphanumeric),
            byte => is_device(char::from(byte)) && byte.is_ascii(),
        };
        if !fits {
            break;
        }
        end += 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn device_in(pattern: &str, line: &str) -> Option<Option<String>> {
        let found = LinePattern::new(pattern).unwrap().find(line)?;
        Some(found.device.map(str::to_owned))
    }

    fn some(name: &str) -> Option<Option<String>> {
        Some(Some(name.to_owned()))
    }

    #[test]
    fn names_are_taken_whole_and_without_the_colon_behind_them() {
        let line = "mlx5_core 0000:41:00.0: poll_health:852:(pid 0): device's health compromised - reached miss count";
        assert_eq!(device_in("mlx5_core {device}*health compromised", line), some("0000:41:00.0"));
        let xid = "NVRM: Xid (PCI:0000:05:00): 79, pid=1, GPU has fallen off the bus.";
        assert_eq!(device_in("NVRM: Xid (PCI:{device}): 79,", xid), some("0000:05:00"));
        let nvme = "nvme nvme0: I/O 24 QID 0 timeout, reset controller";
        assert_eq!(device_in("nvme {device}: I/O*timeout, reset controller", nvme), some("nvme0"));
        assert_eq!(device_in("{device}: Link is Down", "e1000e 0000:00:1f.6 eth0: Link is Down"), some("eth0"));
    }

    #[test]
    fn a_place_that_does_not_fit_does_not_hide_one_that_does() {
        assert_eq!(device_in("nvme {device}: gone", "nvme nvme1: here, nvme nvme2: gone"), some("nvme2"));
        assert_eq!(device_in("a {device}: b", "a a x: b"), some("x"));
        assert_eq!(device_in("nvme {device}: gone", "nvme : gone"), None);
    }

    #[test]
    fn texts_come_in_their_order_with_anything_between() {
        assert_eq!(device_in("one*two", "zero one, then two"), Some(None));
        assert_eq!(device_in("one*two", "two, then one"), None);
        assert_eq!(device_in("One", "one"), None, "case counts");
        assert_eq!(device_in("ab*bc", "abc"), None, "nothing is used twice");
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (pattern, error) in [
            ("", PatternError::Empty),
            ("**", PatternError::Empty),
            ("{device}", PatternError::Empty),
            ("a {device} {device}", PatternError::TwoDevices),
            ("a *{device}: b", PatternError::DeviceAfterAnything),
            (&"x".repeat(257), PatternError::TooLong),
        ] {
            assert_eq!(LinePattern::new(pattern), Err(error), "{pattern}");
        }
    }

    proptest! {
        #[test]
        fn no_pattern_and_no_line_panics_or_hangs(pattern in "(\\{device\\}|[ab:. *é]){0,12}", line in "[ab:. é0]{0,200}") {
            if let Ok(pattern) = LinePattern::new(&pattern)
                && let Some(Found { device: Some(device) }) = pattern.find(&line)
            {
                prop_assert!(!device.is_empty() && line.contains(device));
            }
        }

        #[test]
        fn a_line_is_found_by_any_of_its_own_text(line in "[a-z0-9:. ]{1,60}", from in 0_usize..60, length in 1_usize..60) {
            let part: String = line.chars().skip(from).take(length).collect();
            if let Ok(pattern) = LinePattern::new(&part) {
                prop_assert!(pattern.find(&line).is_some());
            }
        }
    }
}
