//! How the words about several devices add up to one outcome.

use super::group::Require;
use super::outcome::{Outcome, Reason, Severity};

/// Longest list of devices in a message.
const MAX_TOLD: usize = 4;

/// A device that was seen good.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Good {
    /// As it was called last.
    pub name: String,
    /// Its PCI address then, if it has one.
    pub pci: Option<String>,
}

/// The outcome over devices, each named. A device of which nothing is known is neither good nor bad.
///
/// `none` is the outcome without any device.
pub fn add_up(devices: &[(&str, &Outcome)], require: Require, none: Reason) -> Outcome {
    let count = devices.len();
    let needed = match require {
        Require::All => count.max(1),
        Require::Any => 1,
        Require::AtLeast(number) => usize::try_from(number.get()).unwrap_or(usize::MAX),
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
    use std::num::NonZeroU32;

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

    fn sum(letters: &str, require: Require) -> Outcome {
        let outcomes: Vec<(String, Outcome)> =
            letters.chars().enumerate().map(|(at, letter)| (format!("d{at}"), outcome(letter))).collect();
        let devices: Vec<_> = outcomes.iter().map(|(name, outcome)| (name.as_str(), outcome)).collect();
        add_up(&devices, require, Reason::new("None", ""))
    }

    #[test]
    fn as_many_as_needed_must_work() {
        let two = Require::AtLeast(NonZeroU32::new(2).unwrap());
        for (letters, require, name) in [
            ("gg", Require::All, "success"),
            ("gw", Require::All, "warning"),
            ("gh", Require::All, "failure"),
            ("gu", Require::All, "unknown"),
            ("hu", Require::All, "failure"),
            ("gh", Require::Any, "warning"),
            ("gu", Require::Any, "success"),
            ("hu", Require::Any, "unknown"),
            ("hs", Require::Any, "failure"),
            ("", Require::Any, "failure"),
            ("ggh", two, "warning"),
            ("ghh", two, "failure"),
            ("guu", two, "unknown"),
            ("ghu", two, "unknown"),
            ("g", two, "failure"),
        ] {
            assert_eq!(sum(letters, require).name(), name, "{letters} {require:?}");
        }
    }

    #[test]
    fn one_hard_failure_makes_it_hard_and_all_are_told() {
        assert!(matches!(sum("ss", Require::All), Outcome::Failure(_, Severity::Soft)));
        let Outcome::Failure(reason, Severity::Hard) = sum("sghssss", Require::All) else { panic!() };
        assert_eq!((reason.code, reason.message.as_str()), ("Code", "d0: seen; also d2, d3, d4, d5 and 1 more"));
        let Outcome::Failure(reason, _) = sum("g", Require::AtLeast(NonZeroU32::new(2).unwrap())) else { panic!() };
        assert_eq!(reason.message, "1 devices, but 2 are needed");
    }
}
