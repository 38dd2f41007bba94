//! Traces: what probes of hardware read, over a while, as text; recorded on a node, and played through the real probes and rules anywhere.

pub mod entry;
pub mod format;
pub mod host;
mod link_events;
pub mod player;
pub mod recorder;

pub mod settings;
mod snapshot;

pub mod timeline;
pub mod tree;

use entry::Entry;
use std::fmt;
use std::time::Duration;

/// A trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The probes that it was recorded for.
    pub probes: Vec<Recorded>,
    /// In the order of time.
    pub steps: Vec<Step>,
    /// When the recording ended.
    pub end: Offset,
}

/// A probe that a trace was recorded for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// As in the settings.
    pub name: String,
    /// As in the settings: `rdma`.
    pub kind: String,
}

/// What changed at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// When it was seen.
    pub at: Offset,
    /// In their order.
    pub changes: Vec<Change>,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// What is at this path now; `None` if nothing is, nor below.
    Path(String, Option<Entry>),
    /// A line of the kernel log.
    Kernel(String),
}

/// Milliseconds since the start of the recording; below zero is what was there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Offset(pub i64);

impl Offset {
    /// After the start.
    pub fn after(duration: Duration) -> Self {
        Self(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX))
    }

    /// Before the start.
    pub fn before(duration: Duration) -> Self {
        Self(-Self::after(duration).0)
    }

    /// How long after `other`; zero if it is before.
    pub fn since(self, other: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(other.0)).unwrap_or_default())
    }
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sign, of) = (if self.0 < 0 { "-" } else { "" }, self.0.unsigned_abs());
        write!(f, "{sign}{}.{:03}", of / 1000, of % 1000)
    }
}
