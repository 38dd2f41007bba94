//! What one run of one probe says, and the verdict over many.

use std::fmt;

/// Why a probe did not simply succeed: a stable code for machines, a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    /// CamelCase and stable, e.g. `PortDown`: fit for a metric label or a condition's reason.
    pub code: &'static str,
    /// What was seen, where. Control characters are stripped by whoever read it.
    pub message: String,
}

impl Reason {
    /// A reason with its sentence.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_detail(self.code.to_owned(), &self.message))
    }
}

/// `what: detail`, or `what` alone where there is nothing more to say.
pub fn with_detail(what: String, detail: &str) -> String {
    match detail.trim() {
        "" => what,
        detail => format!("{what}: {detail}"),
    }
}

/// How sure a failure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The hardware or its watcher says so: confirmed after the confirm interval.
    Hard,
    /// A time-out or transport error: judged again only a period later.
    Soft,
}

/// One run of one probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All is well.
    Success,
    /// It works, but someone should look. Counts as a success.
    Warning(Reason),
    /// It does not work.
    Failure(Reason, Severity),
    /// Nothing is known. Never counts as a failure, nor as a success.
    Unknown(Reason),
}

impl Outcome {
    /// The outcome's name in logs, JSON and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Warning(_) => "warning",
            Self::Failure(..) => "failure",
            Self::Unknown(_) => "unknown",
        }
    }

    /// Why it is not a plain success.
    pub fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Success => None,
            Self::Warning(reason) | Self::Failure(reason, _) | Self::Unknown(reason) => Some(reason),
        }
    }
}

/// The verdict over many outcomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// No evidence yet.
    Unknown,
    /// The driver can do its work on this node.
    Healthy,
    /// It cannot.
    Unhealthy,
}

impl Health {
    /// The verdict's name in logs, JSON and the state file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
        }
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
