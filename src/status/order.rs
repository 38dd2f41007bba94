//! An operator's word about the fence, as it travels over the status socket.

use crate::policy::fence_override::{Forced, OverrideProblem};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// The request's body.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FenceRequest {
    /// `on`, `off` or `auto`.
    pub fence: String,
    /// How long it holds; not with `auto`.
    #[serde(default)]
    pub for_seconds: f64,
    /// Why; not with `auto`.
    #[serde(default)]
    pub reason: String,
}

impl FenceRequest {
    /// The order in it.
    ///
    /// # Errors
    /// What is wrong with it, for a person.
    pub fn order(&self) -> Result<FenceOrder, String> {
        let forced = match self.fence.as_str() {
            "on" => Forced::On,
            "off" => Forced::Off,
            "auto" => return Ok(FenceOrder::Auto),
            other => return Err(format!("fence is on, off or auto, not {other:?}")),
        };
        let lasts = Duration::try_from_secs_f64(self.for_seconds)
            .map_err(|_| format!("forSeconds is no duration: {}", self.for_seconds))?;
        Ok(FenceOrder::Force { forced, lasts, reason: crate::grpc::connect::fit_for_a_line(&self.reason) })
    }
}

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FenceOrder {
    /// Health decides again.
    Auto,
    /// The operator decides, for a while.
    Force {
        /// What.
        forced: Forced,
        /// For how long.
        lasts: Duration,
        /// Why.
        reason: String,
    },
}

/// An order on its way to whoever decides, and the way back.
#[derive(Debug)]
pub struct Ordered {
    /// What is asked for.
    pub order: FenceOrder,
    /// By whom, for the log.
    pub by: String,
    /// Whether it is done, or why not.
    pub answer: Answer,
}

/// Done, with what kept it from being written down, so that it ends with the agent; or not done.
pub type Answer = oneshot::Sender<Result<Option<String>, OverrideProblem>>;

/// The answer's body.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FenceAnswer {
    /// Why a restart of the agent would end it, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_kept: Option<String>,
}

/// Where orders go.
pub type Orders = mpsc::Sender<Ordered>;

/// What is wrong with an override, in words.
pub fn problem(problem: OverrideProblem) -> &'static str {
    match problem {
        OverrideProblem::NoTime => "an override needs a time: --for 30m",
        OverrideProblem::TooLong => "an override lasts a day at most",
        OverrideProblem::NoReason => "an override needs a reason: --reason \"...\"",
    }
}
