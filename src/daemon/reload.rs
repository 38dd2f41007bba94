//! The part that follows the settings file: other probes at once, anything else after a restart, a bad file never.

use super::{info, warn};
use crate::config::source::ConfigSource;
use crate::config::watched::Watched;
use crate::grpc::connect::chain;
use crate::parts::{Fatal, Parts};
use crate::path_watch::PathWatch;
use crate::probe::lane::{Abandoned, Lane};
use std::time::Duration;
use tokio::sync::mpsc;

/// After a change, before the file is read again.
const SETTLE: Duration = Duration::from_millis(500);

/// Where inotify is not to be had, or misses something, the file is read again this often.
const PERIOD: Duration = Duration::from_secs(60);

/// How long the file system may take before it is left alone.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Checking flags takes deep calls; pages that are not touched cost nothing.
const STACK_BYTES: usize = 4 * 1024 * 1024;

/// Follows the file of `source` until all must end. `in_force` is what is watched now; `changes` hears of anything else.
pub(super) async fn run(
    source: ConfigSource,
    mut in_force: Watched,
    changes: mpsc::Sender<Watched>,
    parts: Parts,
) -> Result<(), Fatal> {
    let (stop, mut lane) = (parts.stop().clone(), Lane::with_stack("settings", STACK_BYTES));
    let mut watch = PathWatch::new(source.path());
    let mut told = String::new();
    loop {
        let (target, reader) = (watch.target(), source.clone());
        // The watch first: what changes after the look is then an event.
        let read = lane.run(TIMEOUT, move || (target.look(), reader.reload())).await;
        match read {
            Ok((looked, Ok(new))) => {
                watch.adopt(looked);
                tell_restart(&new.needs_restart, source.path(), &mut told);
                if (&new.watched.probes, &new.watched.groups) != (&in_force.probes, &in_force.groups) {
                    for warning in &new.watched.warnings {
                        warn!("{warning}");
                    }
                    in_force = new.watched.clone();
                    // The health part ends only when all ends.
                    drop(changes.send(new.watched).await);
                }
            }
            Ok((looked, Err(error))) => {
                watch.adopt(looked);
                let text = chain(&error);
                if told != text {
                    warn!(path = %source.path().display(), error = text, "the new settings cannot be; the old ones stay in force");
                    told = text;
                }
            }
            Err(abandoned) => {
                let text = match abandoned {
                    Abandoned::Late => format!("no answer from its file system within {TIMEOUT:?}"),
                    Abandoned::NoThread(_) => abandoned.to_string(),
                };
                if told != text {
                    warn!(path = %source.path().display(), error = text, "the settings file cannot be read; the old settings stay in force");
                    told = text;
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            // Whoever writes in several steps is through by then, and a storm is one change.
            () = watch.changed() => tokio::time::sleep(SETTLE).await,
            () = tokio::time::sleep(PERIOD) => {}
        }
    }
}

/// Once for each set of flags, and once when nothing of the kind is left.
fn tell_restart(flags: &[String], path: &std::path::Path, told: &mut String) {
    let text = flags.join(", ");
    if *told == text {
        return;
    }
    if text.is_empty() {
        info!(path = %path.display(), "the settings file is as it should be again");
    } else {
        warn!(path = %path.display(), settings = text, "changed in the settings file; in force after a restart");
    }
    *told = text;
}
