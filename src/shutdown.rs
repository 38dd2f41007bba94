//! Signals that end the process in good order.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

/// A token that SIGTERM or SIGINT cancels.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn on_signal() -> anyhow::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let stop = token.clone();
    #[expect(clippy::disallowed_methods, reason = "lives as long as the process, before and after all parts")]
    tokio::spawn(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        info!(signal = name, "stopping");
        stop.cancel();
    });
    Ok(token)
}
