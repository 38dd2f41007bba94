//! What a set of ports is worth: all of them, any, or a number.

use crate::policy::group::Require;
use crate::policy::outcome::{Outcome, Reason, Severity};
use std::fmt;

/// Why a port must be fit for use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Its device is named.
    Named,
    /// It was seen good.
    KnownGood,
    /// It need not: nobody named it, and it was never seen good; or somebody else's it is.
    No,
}

impl Wanted {
    /// A word for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Named => "named",
            Self::KnownGood => "known-good",
            Self::No => "no",
        }
    }
}

/// What is made of one port, or of a device whose ports are not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortWord {
    /// The device's name, or the selector that finds none.
    pub device: String,
    /// The port, if it is about one.
    pub port: Option<u32>,
    /// Whether it must be fit.
    pub wanted: Wanted,
    /// Whether it could stand in for another.
    pub counts: bool,
    /// Its own outcome.
    pub outcome: Outcome,
}

impl fmt::Display for PortWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}/{port}", self.device),
            None => f.write_str(&self.device),
        }
    }
}

impl PortWord {
    fn fit(&self) -> bool {
        matches!(self.outcome, Outcome::Success | Outcome::Warning(_))
    }

    fn failed(&self) -> Option<Severity> {
        if let Outcome::Failure(_, severity) = &self.outcome { Some(*severity) } else { None }
    }
}

/// The outcome of all. `nothing` says what to tell when there is no port at all.
pub fn worth(words: &[PortWord], require: Require, nothing: impl Fn() -> String) -> Outcome {
    let wanted: Vec<&PortWord> = words.iter().filter(|word| word.wanted != Wanted::No).collect();
    let pool: Vec<&PortWord> = words.iter().filter(|word| word.wanted != Wanted::No || word.counts).collect();
    let (from, need) = match require {
        Require::All if !wanted.is_empty() => (&wanted, wanted.len()),
        // A node whose only port is dead at boot must not look well.
        Require::All | Require::Any => (&pool, 1),
        Require::AtLeast(count) => (&pool, usize::try_from(count.get()).unwrap_or(usize::MAX)),
    };
    let fit = from.iter().filter(|word| word.fit()).count();
    if fit >= need {
        return well(from, need);
    }
    let unknown = from.iter().find(|word| matches!(word.outcome, Outcome::Unknown(_)));
    let unknowns = from.iter().filter(|word| matches!(word.outcome, Outcome::Unknown(_))).count();
    if let Some(word) = unknown
        && fit + unknowns >= need
    {
        return Outcome::Unknown(told(word, from));
    }
    let hard = from.iter().filter(|word| word.failed() == Some(Severity::Hard)).count();
    let severity = if from.is_empty() || from.len() < need.saturating_add(hard) && hard > 0 {
        Severity::Hard
    } else {
        Severity::Soft
    };
    let culprit = from
        .iter()
        .filter(|word| word.failed().is_some())
        // Wanted before others, hard before soft.
        .min_by_key(|word| (word.wanted == Wanted::No, word.failed() != Some(Severity::Hard)));
    let reason = match culprit {
        Some(word) if word.wanted != Wanted::No => told(word, from),
        Some(word) => {
            let reason = told(word, from);
            let why = word.outcome.reason().map_or("", |reason| reason.code);
            let so_far = if need > 1 { format!("{fit} of {need} ports are fit: ") } else { String::new() };
            Reason::new("NoUsablePort", format!("{so_far}{why}: {}", reason.message))
        }
        None if from.is_empty() => Reason::new("NoUsablePort", nothing()),
        None => Reason::new("NoUsablePort", format!("{fit} of {need} ports are there")),
    };
    Outcome::Failure(reason, severity)
}

fn well(from: &[&PortWord], need: usize) -> Outcome {
    let lame = from.iter().find(|word| word.wanted != Wanted::No && word.failed().is_some());
    if let Some(word) = lame {
        let code = word.outcome.reason().map_or("", |reason| reason.code);
        let message = format!("enough for {need}, but {code}: {}", told(word, from).message);
        return Outcome::Warning(Reason::new("Degraded", message));
    }
    let warns = from.iter().find(|word| matches!(word.outcome, Outcome::Warning(_)));
    warns.map_or(Outcome::Success, |word| Outcome::Warning(told(word, from)))
}

/// `mlx5_0/1: state 1: DOWN; and 2 more of 8`
fn told(word: &PortWord, from: &[&PortWord]) -> Reason {
    let Some(reason) = word.outcome.reason() else { return Reason::new("", "") };
    let alike = from.iter().filter(|other| other.outcome.name() == word.outcome.name()).count();
    let more = if alike > 1 { format!("; and {} more of {}", alike - 1, from.len()) } else { String::new() };
    Reason::new(reason.code, format!("{word}: {}{more}", reason.message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    fn word(device: &str, wanted: Wanted, outcome: Outcome) -> PortWord {
        PortWord { device: device.into(), port: Some(1), wanted, counts: true, outcome }
    }

    fn down() -> Outcome {
        Outcome::Failure(Reason::new("PortDown", "state 1: DOWN"), Severity::Hard)
    }

    fn gone() -> Outcome {
        Outcome::Failure(Reason::new("DeviceGone", "is gone"), Severity::Soft)
    }

    fn silent() -> Outcome {
        Outcome::Unknown(Reason::new("NotAnswering", "no answer"))
    }

    fn said(words: &[PortWord], require: Require) -> (&'static str, &'static str) {
        let outcome = worth(words, require, || "no device".into());
        (outcome.name(), outcome.reason().map_or("", |reason| reason.code))
    }

    fn number(count: u32) -> Require {
        Require::AtLeast(NonZeroU32::new(count).unwrap())
    }

    #[test]
    fn all_any_and_a_number_are_told_apart() {
        let rails = |outcomes: [Outcome; 3]| {
            let names = ["mlx5_0", "mlx5_1", "mlx5_2"].into_iter();
            names.zip(outcomes).map(|(name, outcome)| word(name, Wanted::KnownGood, outcome)).collect::<Vec<_>>()
        };
        let good = || Outcome::Success;
        for (words, require, expected) in [
            (rails([good(), good(), good()]), Require::All, ("success", "")),
            (rails([good(), down(), good()]), Require::All, ("failure", "PortDown")),
            (rails([good(), silent(), good()]), Require::All, ("unknown", "NotAnswering")),
            (rails([silent(), down(), good()]), Require::All, ("failure", "PortDown")),
            (rails([good(), down(), down()]), Require::Any, ("warning", "Degraded")),
            (rails([silent(), down(), down()]), Require::Any, ("unknown", "NotAnswering")),
            (rails([down(), down(), down()]), Require::Any, ("failure", "PortDown")),
            (rails([good(), good(), down()]), number(2), ("warning", "Degraded")),
            (rails([good(), silent(), down()]), number(2), ("unknown", "NotAnswering")),
            (rails([good(), down(), down()]), number(2), ("failure", "PortDown")),
            (rails([good(), good(), good()]), number(4), ("failure", "NoUsablePort")),
        ] {
            assert_eq!(said(&words, require), expected, "{words:?} {require:?}");
        }
    }

    #[test]
    fn a_port_that_nobody_wants_has_no_say_until_none_is_left() {
        let words = |other| [word("mlx5_0", Wanted::KnownGood, other), word("mlx5_1", Wanted::No, down())];
        assert_eq!(said(&words(Outcome::Success), Require::All), ("success", ""));
        assert_eq!(said(&words(silent()), Require::All), ("unknown", "NotAnswering"));
        assert_eq!(said(&words(Outcome::Success)[1..], Require::All), ("failure", "NoUsablePort"));
        assert_eq!(said(&[word("a", Wanted::No, silent())], Require::All), ("unknown", "NotAnswering"));
        assert_eq!(said(&[], Require::All), ("failure", "NoUsablePort"));
    }

    #[test]
    fn soft_failures_alone_are_soft() {
        let severity = |words: &[PortWord], require| match worth(words, require, String::new) {
            Outcome::Failure(_, severity) => severity,
            other @ (Outcome::Success | Outcome::Warning(_) | Outcome::Unknown(_)) => panic!("{other:?}"),
        };
        let of = |outcome| word("mlx5_0", Wanted::Named, outcome);
        assert_eq!(severity(&[of(gone())], Require::All), Severity::Soft);
        assert_eq!(severity(&[of(gone()), of(down())], Require::All), Severity::Hard);
        assert_eq!(severity(&[of(gone()), of(down())], Require::Any), Severity::Soft, "the hard one alone would do");
    }

    #[test]
    fn the_reason_names_the_port_and_counts_the_others() {
        let words = [word("mlx5_3", Wanted::Named, down()), word("mlx5_4", Wanted::Named, down())];
        let outcome = worth(&words, Require::All, String::new);
        assert_eq!(outcome.reason().unwrap().message, "mlx5_3/1: state 1: DOWN; and 1 more of 2");
    }
}
