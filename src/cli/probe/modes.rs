//! Once, until all is well, until stopped, or into a file.

use super::rounds::{Asked, Asking, Counting};
use super::words::{gist, outcome_line, probe_words, round_line, said, table, utc, waits_for};
use super::write::write_atomically;
use crate::cli::install::without_temporary_name;
use crate::cli::look::Look;
use crate::cli::{complain, print};
use crate::config::go_duration::GoDuration;
use crate::config::watched::Watched;
use crate::policy::outcome::Health;
use crate::probe::exec::wait_for_starts;
use crate::shutdown;
use std::future;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

/// Changes within this are looked at together.
const GATHER: Duration = Duration::from_millis(20);

/// When it ends, and what it gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    /// One round.
    Once,
    /// One round, in which a doubt is no reason to restart.
    Liveness,
    /// Until all is healthy, or for this long.
    Wait(Option<Duration>),
    /// Until stopped.
    Watch,
    /// Until stopped, into this file.
    Write(PathBuf),
}

/// `--output`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Table,
    Json,
    /// As the health file has it: of a COMMAND, if nothing else is asked for.
    Line,
}

impl Form {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "table" => Ok(Self::Table),
            "json" => Ok(Self::Json),
            other => Err(format!("{other:?} is no form: use table or json")),
        }
    }
}

/// Runs it to its end.
///
/// # Errors
/// When the system refuses what it takes: signal handlers, or the first write of the file.
pub(super) fn run(mode: Mode, watched: Watched, form: Form, period: Duration) -> anyhow::Result<ExitCode> {
    let counting = match mode {
        Mode::Once | Mode::Liveness | Mode::Write(_) => Counting::LastRound,
        Mode::Wait(_) | Mode::Watch => Counting::Thresholds,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        let stop = shutdown::on_signal_or_hangup()?;
        let asking = Asking::new(watched, counting);
        match mode {
            Mode::Once | Mode::Liveness => once(asking, form, &stop, mode == Mode::Liveness).await,
            Mode::Wait(limit) => wait(asking, form, period, limit, &stop).await,
            Mode::Watch => watch(asking, form, period, &stop).await,
            Mode::Write(file) => write(asking, &file, period, &stop).await,
        }
    });
    drop(runtime);
    wait_for_starts();
    code
}

fn exit_code(health: Health, liveness: bool) -> ExitCode {
    match health {
        Health::Healthy => ExitCode::SUCCESS,
        Health::Unhealthy => ExitCode::FAILURE,
        Health::Unknown if liveness => ExitCode::SUCCESS,
        Health::Unknown => ExitCode::from(2),
    }
}

async fn once(mut asking: Asking, form: Form, stop: &CancellationToken, liveness: bool) -> anyhow::Result<ExitCode> {
    tokio::select! {
        // Dropping the round kills the commands and all that they started.
        () = stop.cancelled() => Ok(exit_code(Health::Unknown, liveness)),
        () = asking.round() => {
            show(&asking, form)?;
            Ok(exit_code(asking.health(), liveness))
        }
    }
}

/// The last round, to stdout.
fn show(asking: &Asking, form: Form) -> anyhow::Result<()> {
    let health = asking.health();
    print(&match (form, asking.probes.as_slice()) {
        (Form::Line, [only]) => only.outcome().map_or_else(|| round_line(asking), outcome_line),
        (Form::Line, _) => round_line(asking),
        (Form::Table, _) => table(asking, health, Look::of_stdout()),
        (Form::Json, _) => serde_json::to_string_pretty(&said(asking, health))?,
    });
    Ok(())
}

/// Rounds by the period; each starts a period after the last one did, or at once if that took longer.
struct Rounds<'stop> {
    period: Duration,
    next: Instant,
    stop: &'stop CancellationToken,
    until: Option<Instant>,
}

/// Why there is no further round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Stopped,
    Deadline,
}

impl<'stop> Rounds<'stop> {
    fn new(period: Duration, limit: Option<Duration>, stop: &'stop CancellationToken) -> Self {
        let now = Instant::now();
        Self { period, next: now, stop, until: limit.and_then(|limit| now.checked_add(limit)) }
    }

    /// A round, or before it is due a word of the one probe that saw a change.
    async fn round_or_change(&mut self, asking: &mut Asking) -> Result<(), Ended> {
        let next = &mut self.next;
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(Ended::Stopped),
            () = async {
                let changed = tokio::select! {
                    biased;
                    () = sleep_until(*next) => None,
                    number = asking.changed() => Some(number),
                };
                match changed {
                    None => {
                        *next = Instant::now() + self.period;
                        asking.round().await;
                    }
                    Some(number) => {
                        sleep(GATHER).await;
                        asking.ask_again(number).await;
                    }
                }
            } => Ok(()),
        }
    }

    async fn round(&mut self, asking: &mut Asking) -> Result<(), Ended> {
        let (next, until) = (&mut self.next, self.until);
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(Ended::Stopped),
            () = async { match until { Some(at) => sleep_until(at).await, None => future::pending().await } } => Err(Ended::Deadline),
            () = async {
                sleep_until(*next).await;
                *next = Instant::now() + self.period;
                asking.round().await;
            } => Ok(()),
        }
    }
}

async fn wait(
    mut asking: Asking,
    form: Form,
    period: Duration,
    limit: Option<Duration>,
    stop: &CancellationToken,
) -> anyhow::Result<ExitCode> {
    let mut rounds = Rounds::new(period, limit, stop);
    let mut told = Vec::new();
    loop {
        match rounds.round(&mut asking).await {
            Ok(()) if asking.health() == Health::Healthy => {
                show(&asking, form)?;
                return Ok(ExitCode::SUCCESS);
            }
            Ok(()) => {
                let waits: Vec<_> = asking.missing().iter().map(|probe| (gist(probe), probe.successes())).collect();
                if waits != told {
                    complain(&format!("waiting for {}", waits_for(&asking)));
                    told = waits;
                }
            }
            Err(Ended::Stopped) => return Ok(exit_code(Health::Unknown, false)),
            Err(Ended::Deadline) => {
                let limit = GoDuration(limit.unwrap_or_default());
                complain(&format!("not healthy within {limit}: {}", waits_for(&asking)));
                show(&asking, form)?;
                return Ok(exit_code(asking.health(), false));
            }
        }
    }
}

async fn watch(mut asking: Asking, form: Form, period: Duration, stop: &CancellationToken) -> anyhow::Result<ExitCode> {
    let mut rounds = Rounds::new(period, None, stop);
    let mut told: Vec<String> = Vec::new();
    let mut told_health = None;
    while rounds.round_or_change(&mut asking).await.is_ok() {
        let (health, look) = (asking.health(), Look::of_stdout());
        let gists: Vec<String> = asking.probes.iter().map(gist).collect();
        let mut lines = Vec::new();
        if form != Form::Json && look.terminal {
            // Home, and clear to the end, so that nothing flickers.
            let now = utc(SystemTime::now());
            let foot = look.cut(&format!("{now}, each {} and at changes", GoDuration(period)));
            lines.push(format!("\x1b[H\x1b[J{}\n\n{foot}", table(&asking, health, look)));
        } else if form == Form::Json {
            if gists != told || told_health != Some(health) {
                lines.push(serde_json::to_string(&said(&asking, health))?);
            }
        } else {
            let now = utc(SystemTime::now());
            let changed = |(number, probe): (usize, &Asked)| {
                (told.get(number) != gists.get(number)).then(|| format!("{now} {}", probe_words(probe)))
            };
            lines.extend(asking.probes.iter().enumerate().filter_map(changed));
            if told_health != Some(health) {
                lines.push(format!("{now} health {health}"));
            }
        }
        (told, told_health) = (gists, Some(health));
        for line in lines {
            // Whoever watched is gone.
            if writeln!(stdout(), "{line}").is_err() {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes raw outcomes, not a verdict: the reader counts.
async fn write(
    mut asking: Asking,
    file: &Path,
    period: Duration,
    stop: &CancellationToken,
) -> anyhow::Result<ExitCode> {
    let mut rounds = Rounds::new(period, None, stop);
    let mut last = String::new();
    let mut written = false;
    while rounds.round(&mut asking).await.is_ok() {
        let line = round_line(&asking);
        match write_atomically(file, &line) {
            Ok(()) => written = true,
            // A folder that is missing from the start is a mistake in the manifest; one that goes may come back.
            Err(error) if !written => {
                let error = without_temporary_name(error);
                return Err(anyhow::Error::new(error).context(format!("cannot write {}", file.display())));
            }
            Err(error) => complain(&format!(
                "cannot write {}: {}; trying again in {period:?}",
                file.display(),
                without_temporary_name(error)
            )),
        }
        if line != last {
            complain(&format!("{}: {line}", file.display()));
            last = line;
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unhealthy_fails_a_liveness_probe() {
        let code = |health, liveness| format!("{:?}", exit_code(health, liveness));
        let same = |code: ExitCode| format!("{code:?}");
        for (health, once, liveness) in [(Health::Healthy, 0, 0), (Health::Unhealthy, 1, 1), (Health::Unknown, 2, 0)] {
            assert_eq!(code(health, false), same(ExitCode::from(once)));
            assert_eq!(code(health, true), same(ExitCode::from(liveness)));
        }
    }
}
