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
    on_signals(&[("SIGTERM", SignalKind::terminate()), ("SIGINT", SignalKind::interrupt())])
}

/// As [`on_signal`], and SIGHUP: for what a person starts in a terminal, which may be closed.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn on_signal_or_hangup() -> anyhow::Result<CancellationToken> {
    on_signals(&[
        ("SIGTERM", SignalKind::terminate()),
        ("SIGINT", SignalKind::interrupt()),
        ("SIGHUP", SignalKind::hangup()),
    ])
}

fn on_signals(signals: &[(&'static str, SignalKind)]) -> anyhow::Result<CancellationToken> {
    let token = CancellationToken::new();
    for &(name, kind) in signals {
        let mut received = signal(kind).with_context(|| format!("cannot handle {name}"))?;
        let stop = token.clone();
        #[expect(clippy::disallowed_methods, reason = "lives as long as the process, before and after all parts")]
        tokio::spawn(async move {
            received.recv().await;
            info!(signal = name, "stopping");
            stop.cancel();
        });
    }
    Ok(token)
}
