//! What would have happened, and when.

use super::Offset;
use crate::policy::outcome::{Health, Outcome, Reason};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// All of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Played {
    /// In the order of time.
    pub timeline: Vec<Happening>,
    /// How it was in the end.
    pub end: End,
    /// What was left out, in words.
    pub notes: Vec<String>,
}

/// Something at one time.
#[derive(Debug, Clone, PartialEq)]
pub struct Happening {
    /// When.
    pub at: Offset,
    /// What.
    pub what: What,
}

/// What can happen.
#[derive(Debug, Clone, PartialEq)]
pub enum What {
    /// A probe says something else than before.
    Outcome {
        /// Its name.
        probe: String,
        /// Its word.
        outcome: Outcome,
    },
    /// The verdict over all probes changes.
    Verdict {
        /// Before.
        from: Health,
        /// From now on.
        to: Health,
        /// The probe that decided it, and what it saw.
        cause: Option<(String, Reason)>,
        /// How long a recovery must last from here on.
        hold: Duration,
    },
    /// New volumes are refused, or let in again.
    Fence {
        /// Whether they are refused.
        up: bool,
    },
    /// The kubelet has the driver, or has it no more.
    Registration {
        /// Whether it has.
        registered: bool,
        /// How long it had not; `None` the first time.
        after: Option<Duration>,
    },
}

/// How it was in the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// The trace's end.
    pub at: Offset,
    /// The verdict.
    pub health: Health,
    /// Whether new volumes are refused.
    pub fenced: bool,
    /// Whether the kubelet has the driver.
    pub registered: bool,
    /// When the hold would be over, if only that is missing.
    pub release_at: Option<Offset>,
    /// Rounds of all probes.
    pub rounds: u64,
}

impl Happening {
    /// Whose it is: a probe's name, or that of a part.
    pub fn subject(&self) -> &str {
        match &self.what {
            What::Outcome { probe, .. } => probe,
            What::Verdict { .. } => "verdict",
            What::Fence { .. } => "fence",
            What::Registration { .. } => "registration",
        }
    }

    /// In a word, by which it is painted, and what goes on behind it.
    pub fn words(&self) -> (&'static str, String) {
        match &self.what {
            What::Outcome { outcome, .. } => {
                (outcome.name(), outcome.reason().map(|reason| format!(" {reason}")).unwrap_or_default())
            }
            What::Verdict { to, cause, hold, .. } => {
                let why = cause.as_ref().map(|(probe, reason)| format!(" by {probe}: {}", reason.code));
                let hold = (*to == Health::Unhealthy).then(|| format!("; a recovery must hold for {hold:?}"));
                (to.name(), why.into_iter().chain(hold).collect())
            }
            What::Fence { up: true } => ("up", ": new volumes are refused".to_owned()),
            What::Fence { up: false } => ("down", ": new volumes are let in".to_owned()),
            What::Registration { registered: true, after: None } => ("registered", String::new()),
            What::Registration { registered: true, after: Some(after) } => {
                ("registered", format!(" again, {:.1} s after it was withdrawn", after.as_secs_f64()))
            }
            What::Registration { registered: false, .. } => ("withdrawn", ": the kubelet drops the driver".to_owned()),
        }
    }

    fn json(&self) -> Value {
        let mut map = Map::new();
        let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
        put("seconds", seconds(self.at));
        let event = match &self.what {
            What::Outcome { probe, outcome } => {
                put("probe", json!(probe));
                put("outcome", json!(outcome.name()));
                if let Some(reason) = outcome.reason() {
                    put("reason", json!(reason.code));
                    put("message", json!(reason.message));
                }
                "outcome"
            }
            What::Verdict { from, to, cause, hold } => {
                put("from", json!(from.name()));
                put("to", json!(to.name()));
                if let Some((probe, reason)) = cause {
                    put("probe", json!(probe));
                    put("reason", json!(reason.code));
                    put("message", json!(reason.message));
                }
                if *to == Health::Unhealthy {
                    put("holdSeconds", json!(hold.as_secs_f64()));
                }
                "verdict"
            }
            What::Fence { up } => {
                put("up", json!(up));
                "fence"
            }
            What::Registration { registered, after } => {
                put("registered", json!(registered));
                if let Some(after) = after {
                    put("afterSeconds", json!(after.as_secs_f64()));
                }
                "registration"
            }
        };
        put("event", json!(event));
        Value::Object(map)
    }
}

impl Played {
    /// For machines.
    pub fn json(&self) -> Value {
        let end = &self.end;
        json!({
            "timeline": self.timeline.iter().map(Happening::json).collect::<Vec<_>>(),
            "end": {
                "seconds": seconds(end.at),
                "health": end.health.name(),
                "fenced": end.fenced,
                "registered": end.registered,
                "releaseSeconds": end.release_at.map(seconds),
                "rounds": end.rounds,
            },
            "notes": self.notes,
        })
    }
}

fn seconds(at: Offset) -> Value {
    // Within a week, which a double holds to the microsecond.
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of a week are far below 2^53")]
    let seconds = at.0 as f64 / 1000.0;
    json!(seconds)
}
