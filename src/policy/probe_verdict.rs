//! Hysteresis of one probe: outcomes in a row turn its verdict, and one stray outcome never does.

use super::outcome::{Health, Outcome, Reason, Severity};
use std::{num::NonZeroU32, time::Instant};

/// How many rounds in a row turn a probe's verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Failures in a row that make it unhealthy.
    pub failure: NonZeroU32,
    /// Successes in a row that make it healthy again.
    pub success: NonZeroU32,
}

/// A probe, as far as the rules care.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeRule {
    /// Unique.
    pub name: String,
    /// What it asks, in words: another question is another probe, whatever its name.
    pub asks: String,
    /// Rounds in a row.
    pub thresholds: Thresholds,
}

/// One probe's verdict and its streaks.
#[derive(Debug, Clone)]
pub struct ProbeVerdict {
    rule: ProbeRule,
    health: Health,
    failures: u32,
    successes: u32,
    /// When the present run of successes began.
    good_since: Option<Instant>,
    seen_failure: bool,
    last: Option<Outcome>,
    cause: Option<Reason>,
}

impl ProbeVerdict {
    /// Nothing was heard yet.
    pub fn new(rule: ProbeRule) -> Self {
        Self {
            rule,
            health: Health::Unknown,
            failures: 0,
            successes: 0,
            good_since: None,
            seen_failure: false,
            last: None,
            cause: None,
        }
    }

    /// The probe's name.
    pub fn name(&self) -> &str {
        &self.rule.name
    }

    /// Its verdict.
    pub fn health(&self) -> Health {
        self.health
    }

    /// What it said last.
    pub fn last(&self) -> Option<&Outcome> {
        self.last.as_ref()
    }

    /// Its rule.
    pub fn rule(&self) -> &ProbeRule {
        &self.rule
    }

    /// Failures in a row so far.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Successes in a row so far.
    pub fn successes(&self) -> u32 {
        self.successes
    }

    /// What made it unhealthy.
    pub fn cause(&self) -> Option<&Reason> {
        self.cause.as_ref()
    }

    /// Whether its last word is a failure that is not decided yet.
    pub fn suspect(&self) -> bool {
        matches!(self.last, Some(Outcome::Failure(..))) && self.health != Health::Unhealthy
    }

    /// Takes over the verdict of a previous run.
    pub fn restore(&mut self, health: Health) {
        self.health = health;
    }

    /// Takes in one outcome.
    pub fn observe(&mut self, outcome: Outcome, now: Instant) {
        match &outcome {
            Outcome::Success | Outcome::Warning(_) => {
                self.failures = 0;
                self.successes = self.successes.saturating_add(1);
                self.good_since.get_or_insert(now);
                // A first good word needs no confirmation; one that follows a failure does.
                let first_word = self.health == Health::Unknown && !self.seen_failure;
                if first_word || self.successes >= self.rule.thresholds.success.get() {
                    self.health = Health::Healthy;
                    self.cause = None;
                }
            }
            Outcome::Failure(reason, Severity::Hard | Severity::Soft) => {
                self.successes = 0;
                self.good_since = None;
                self.seen_failure = true;
                self.failures = self.failures.saturating_add(1);
                if self.failures >= self.rule.thresholds.failure.get() {
                    self.health = Health::Unhealthy;
                    self.cause = Some(reason.clone());
                }
            }
            Outcome::Unknown(_) => {}
        }
        self.last = Some(outcome);
    }

    /// Since when it has been good, if its last word is good.
    pub fn good_since(&self) -> Option<Instant> {
        match self.last {
            Some(Outcome::Success | Outcome::Warning(_)) => self.good_since,
            Some(Outcome::Failure(..) | Outcome::Unknown(_)) | None => None,
        }
    }
}
