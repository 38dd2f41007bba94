//! How the words about several devices add up to one outcome.

use super::outcome::{Outcome, Reason, Severity};
use std::num::NonZeroU32;

/// How many devices must work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Every one.
    All,
    /// One is enough.
    Any,
    /// At least this many.
    AtLeast(NonZeroU32),
}

/// Longest list of devices in a message.
const MAX_TOLD: usize = 4;

/// The outcome over devices, each named. A device of which nothing is known is neither good nor bad.
///
/// `none` is the outcome without any device.
pub fn add_up(devices: &[(&str, &Outcome)], need: Need, none: Reason) -> Outcome {
    let count = devices.len();
    let needed = match need {
        Need::All => count.max(1),
        Need::Any => 1,
        Need::AtLeast(number) => usize::try_from(number.get()).unwrap_or(usize::MAX),
    };
    if count == 0 {
        return Outcome::Failure(none, Severity::Hard);
    }
    let of = |name: &str| devices.iter().filter(|(_, outcome)| outcome.name() == name).collect::<Vec<_>>();
    let (failed, warned, unknown) = (of("failure"), of("warning"), of("unknown"));
    let told = |devices: &[&(&str, &Outcome)]| {
        let (name, first) = devices.first()?;
        let reason = first.reason()?;
        let mut message = format!("{name}: {}", reason.message);
        let others: Vec<&str> = devices.iter().skip(1).take(MAX_TOLD).map(|(name, _)| *name).collect();
        if !others.is_empty() {
            message += &format!("; also {}", others.join(", "));
        }
        if devices.len() > others.len() + 1 {
            message += &format!(" and {} more", devices.len() - others.len() - 1);
        }
        Some(Reason::new(reason.code, message))
    };
    if count - failed.len() < needed {
        let hard = |(_, outcome): &&&(&str, &Outcome)| matches!(outcome, Outcome::Failure(_, Severity::Hard));
        let severity = if failed.iter().any(|device| hard(&device)) { Severity::Hard } else { Severity::Soft };
        let few = || Reason::new("TooFew", format!("{count} devices, but {needed} are needed"));
        return Outcome::Failure(told(&failed).unwrap_or_else(few), severity);
    }
    if count - failed.len() - unknown.len() < needed {
        return told(&unknown).map_or(Outcome::Success, Outcome::Unknown);
    }
    told(&failed).or_else(|| told(&warned)).map_or(Outcome::Success, Outcome::Warning)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(letter: char) -> Outcome {
        let reason = Reason::new("Code", "seen");
        match letter {
            'g' => Outcome::Success,
            'w' => Outcome::Warning(reason),
            'h' => Outcome::Failure(reason, Severity::Hard),
            's' => Outcome::Failure(reason, Severity::Soft),
            _ => Outcome::Unknown(reason),
        }
    }

    fn sum(letters: &str, need: Need) -> Outcome {
        let outcomes: Vec<(String, Outcome)> =
            letters.chars().enumerate().map(|(at, letter)| (format!("d{at}"), outcome(letter))).collect();
        let devices: Vec<_> = outcomes.iter().map(|(name, outcome)| (name.as_str(), outcome)).collect();
        add_up(&devices, need, Reason::new("None", ""))
    }

    #[test]
    fn as_many_as_needed_must_work() {
        let two = Need::AtLeast(NonZeroU32::new(2).unwrap());
        for (letters, need, name) in [
            ("gg", Need::All, "success"),
            ("gw", Need::All, "warning"),
            ("gh", Need::All, "failure"),
            ("gu", Need::All, "unknown"),
            ("hu", Need::All, "failure"),
            ("gh", Need::Any, "warning"),
            ("gu", Need::Any, "success"),
            ("hu", Need::Any, "unknown"),
            ("hs", Need::Any, "failure"),
            ("", Need::Any, "failure"),
            ("ggh", two, "warning"),
            ("ghh", two, "failure"),
            ("guu", two, "unknown"),
            ("ghu", two, "unknown"),
            ("g", two, "failure"),
        ] {
            assert_eq!(sum(letters, need).name(), name, "{letters} {need:?}");
        }
    }

    #[test]
    fn one_hard_failure_makes_it_hard_and_all_are_told() {
        assert!(matches!(sum("ss", Need::All), Outcome::Failure(_, Severity::Soft)));
        let Outcome::Failure(reason, Severity::Hard) = sum("sghssss", Need::All) else { panic!() };
        assert_eq!((reason.code, reason.message.as_str()), ("Code", "d0: seen; also d2, d3, d4, d5 and 1 more"));
        let Outcome::Failure(reason, _) = sum("g", Need::AtLeast(NonZeroU32::new(2).unwrap())) else { panic!() };
        assert_eq!(reason.message, "1 devices, but 2 are needed");
    }
}
