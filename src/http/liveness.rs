//! livenessprobe's duty: is the driver ready, and the metrics, where they are wanted.

use super::{Answer, Answers};
use crate::liveness::Liveness;
use crate::metrics::Metrics;
use http::StatusCode;

/// Answers `/healthz` and the path of the metrics; either may be missing.
#[derive(Debug)]
pub struct LivenessEndpoints {
    /// Behind `/healthz`.
    pub liveness: Option<Liveness>,
    /// Path and what is behind it.
    pub metrics: Option<(String, Metrics)>,
}

impl Answers for LivenessEndpoints {
    async fn get(&self, path: &str) -> Answer {
        match (path, &self.liveness, &self.metrics) {
            ("/healthz", Some(liveness), _) => match liveness.ready().await {
                Ok(()) => Answer::text(StatusCode::OK, "ok"),
                Err(why) => Answer::text(StatusCode::INTERNAL_SERVER_ERROR, why.to_string()),
            },
            (path, _, Some((wanted, metrics))) if path == wanted => Answer::metrics(metrics),
            (_, None | Some(_), None | Some(_)) => Answer::not_found(),
        }
    }
}
