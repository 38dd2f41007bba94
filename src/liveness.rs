//! Is the driver ready? One `Identity.Probe` on a fresh connection, however many ask.
//!
//! A connection that was opened earlier is never used: it would go on answering after the socket's file is gone, and the kubelet,
//! which opens one for each call, would not.

use crate::driver_ready::DriverReady;
use crate::grpc::code;
use crate::grpc::connect::{CallError, chain, fit_for_a_line};
use crate::parts::Parts;
use crate::policy::backoff::Backoff;
use crate::quiet::Quiet;
use crate::telemetry::DETAIL;
use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, error, info};

/// Pauses between tries to connect within one round. A connect costs microseconds.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// In the background, a driver that was not ready is asked again after this, so that its recovery is seen soon.
const RETRY: Duration = Duration::from_secs(1);

/// A round may end this much later than its interval and timeout say, on a machine with much to do.
const SLACK: Duration = Duration::from_secs(1);

/// Whom to ask, and for how long.
#[derive(Debug, Clone)]
pub struct Asked {
    /// The driver's socket.
    pub driver_socket: PathBuf,
    /// `--probe-timeout`: bounds connecting and Probe together.
    pub timeout: Duration,
    /// Asks, together with whoever else asks this driver.
    pub ready: DriverReady,
}

/// Answers `/healthz`. Clones ask together.
#[derive(Debug, Clone)]
pub struct Liveness(Way);

#[derive(Debug, Clone)]
enum Way {
    OnDemand(Arc<Flight>),
    Background { last: watch::Receiver<Option<Round>>, max_age: Duration },
}

impl Liveness {
    /// Asks the driver whenever it is asked, as upstream does, but never twice at a time: who comes while a round runs gets that
    /// round's word. The round belongs to nobody, so a client that hangs up cancels nothing.
    pub fn on_demand(asked: Asked, parts: &Parts) -> Self {
        let round = Rounds { asked, quiet: Quiet::default() };
        Self(Way::OnDemand(Arc::new(Flight {
            rounds: Arc::new(tokio::sync::Mutex::new(round)),
            running: Mutex::default(),
            parts: parts.clone(),
        })))
    }

    /// Asks the driver every `interval`, from now on, and answers from what it said last.
    pub fn in_background(asked: Asked, interval: Duration, parts: &Parts) -> Self {
        let (sender, last) = watch::channel(None);
        let max_age = interval.saturating_add(asked.timeout).saturating_add(SLACK);
        let stop = parts.stop().clone();
        parts.spawn("liveness probe", async move {
            let rounds = ask_for_ever(Rounds { asked, quiet: Quiet::default() }, interval, sender);
            tokio::select! {
                () = stop.cancelled() => {}
                () = rounds => {}
            }
            Ok(())
        });
        Self(Way::Background { last, max_age })
    }

    /// Whether the driver is ready.
    ///
    /// # Errors
    /// Why it is not, or why nothing is known about it. The text begins with upstream's.
    pub async fn ready(&self) -> Result<(), NotReady> {
        match &self.0 {
            Way::OnDemand(flight) => match flight.join().await {
                Some(word) => word.judged(),
                None => Err(NotReady("the program is ending".to_owned())),
            },
            Way::Background { last, max_age } => from_last(last.borrow().as_ref(), *max_age, Instant::now()),
        }
    }
}

/// Why the driver does not count as ready.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotReady(String);

fn from_last(last: Option<&Round>, max_age: Duration, now: Instant) -> Result<(), NotReady> {
    let Some(round) = last else {
        return Err(NotReady("the driver has not answered yet".to_owned()));
    };
    let age = now.saturating_duration_since(round.at);
    if age > max_age {
        return Err(NotReady(format!("the last word of the driver is {age:.1?} old; it was: {}", round.word)));
    }
    round.word.judged().map_err(|NotReady(text)| NotReady(format!("{text} ({age:.1?} ago)")))
}

/// What came of one round. Its text begins with upstream's.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Word {
    Ready,
    NotReady,
    /// Nobody takes calls at the socket.
    Unreachable(String),
    /// Somebody is there and does not answer.
    Busy(String),
    /// The driver answered with an error.
    Failed(String),
}

impl Word {
    fn judged(&self) -> Result<(), NotReady> {
        match self {
            Self::Ready => Ok(()),
            Self::NotReady | Self::Unreachable(_) | Self::Busy(_) | Self::Failed(_) => Err(NotReady(self.to_string())),
        }
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("ok"),
            Self::NotReady => f.write_str("driver responded but is not ready"),
            Self::Unreachable(text) | Self::Busy(text) | Self::Failed(text) => f.write_str(text),
        }
    }
}

/// What a round that ended with `error` says.
fn word(error: &CallError, timeout: Duration) -> Word {
    // grpc-go connects again and again until its context ends, so this is all that upstream says then.
    const NOT_CONNECTED: &str = "context deadline exceeded";
    const BUSY: &str = "the driver is busy or stuck";
    match error {
        CallError::Connect { source, .. } if source.kind() == ErrorKind::WouldBlock => {
            Word::Busy(format!("{NOT_CONNECTED}: {BUSY}: its queue of connections is full"))
        }
        CallError::Connect { source, .. }
            if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
        {
            Word::Unreachable(format!("{NOT_CONNECTED}: nobody listens: {}", chain(error)))
        }
        CallError::Connect { .. } | CallError::Closed { .. } => {
            Word::Unreachable(format!("{NOT_CONNECTED}: {}", chain(error)))
        }
        CallError::Deadline { path, spoke, .. } => {
            let upstream = if *spoke { "rpc error: code = DeadlineExceeded desc = " } else { "" };
            Word::Busy(format!(
                "{upstream}{NOT_CONNECTED}: {BUSY}: {} accepted but did not answer within {timeout:?}",
                path.display()
            ))
        }
        CallError::Status { source, .. } => {
            let code = code::name(error.grpc_code().unwrap_or(source.code()));
            Word::Failed(format!("rpc error: code = {code} desc = {}", fit_for_a_line(source.message())))
        }
    }
}

#[derive(Debug, Clone)]
struct Round {
    word: Word,
    at: Instant,
}

/// Gives rounds, and logs an outage once and its end once.
#[derive(Debug)]
struct Rounds {
    asked: Asked,
    quiet: Quiet,
}

impl Rounds {
    async fn next(&mut self) -> Word {
        let word = self.ask().await;
        self.tell(&word);
        word
    }

    /// As upstream, connects again and again until the timeout, so that a driver which starts meanwhile is ready.
    async fn ask(&self) -> Word {
        let Asked { driver_socket, timeout, ready } = &self.asked;
        let until = Instant::now() + *timeout;
        let mut pauses = Backoff::new(FIRST_PAUSE, MAX_PAUSE);
        loop {
            let began = Instant::now();
            let answer = ready.ask(driver_socket, until - began).await;
            let word = match &*answer {
                Ok(true) => return Word::Ready,
                Ok(false) => return Word::NotReady,
                Err(error @ (CallError::Connect { .. } | CallError::Closed { .. })) => word(error, *timeout),
                Err(error) => return word(error, *timeout),
            };
            let next = Instant::now() + pauses.pause();
            if next >= until {
                sleep_until(until).await;
                return word;
            }
            sleep_until(next).await;
        }
    }

    fn tell(&mut self, word: &Word) {
        if *word == Word::Ready {
            debug!(target: DETAIL, "Health check succeeded");
            if self.quiet.end() {
                info!(socket.path = %self.asked.driver_socket.display(), "the driver is ready again");
            }
            return;
        }
        let text = word.to_string();
        if !self.quiet.begin_or_repeat(&text, Instant::now()) {
            return;
        }
        let socket = self.asked.driver_socket.display();
        match word {
            Word::Ready => {}
            Word::NotReady => error!(socket.path = %socket, "Driver responded but is not ready"),
            Word::Unreachable(_) => {
                error!(socket.path = %socket, error = text, "Failed to establish connection to CSI driver");
            }
            Word::Busy(_) | Word::Failed(_) => error!(socket.path = %socket, error = text, "Health check failed"),
        }
    }
}

async fn ask_for_ever(mut rounds: Rounds, interval: Duration, last: watch::Sender<Option<Round>>) {
    loop {
        let began = Instant::now();
        let word = rounds.next().await;
        let pause = if word == Word::Ready {
            (began + interval).saturating_duration_since(Instant::now())
        } else {
            interval.min(RETRY)
        };
        last.send_replace(Some(Round { word, at: Instant::now() }));
        sleep(pause).await;
    }
}

/// The round that runs, if one does, and how the next one is begun.
#[derive(Debug)]
struct Flight {
    rounds: Arc<tokio::sync::Mutex<Rounds>>,
    running: Mutex<Option<watch::Receiver<Option<Word>>>>,
    parts: Parts,
}

impl Flight {
    /// The word of the round that runs, or of one begun now; `None` when the program ends before it does.
    async fn join(self: &Arc<Self>) -> Option<Word> {
        let mut word = self.board();
        // Borrowed only until the end of this line: the sender must not wait for a client.
        word.wait_for(Option::is_some).await.ok().and_then(|word| word.clone())
    }

    fn board(self: &Arc<Self>) -> watch::Receiver<Option<Word>> {
        let mut running = self.running();
        if let Some(word) = &*running {
            return word.clone();
        }
        let (sender, receiver) = watch::channel(None);
        *running = Some(receiver.clone());
        let (flight, stop) = (Arc::clone(self), self.parts.stop().clone());
        self.parts.spawn_connection(async move {
            let landed = Landed(&flight);
            let word = tokio::select! {
                () = stop.cancelled() => return,
                word = async { flight.rounds.lock().await.next().await } => word,
            };
            // Who comes from now on begins a round of his own.
            drop(landed);
            sender.send_replace(Some(word));
        });
        receiver
    }

    fn running(&self) -> MutexGuard<'_, Option<watch::Receiver<Option<Word>>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Clears the place for the next round, however this one ends.
struct Landed<'a>(&'a Flight);

impl Drop for Landed<'_> {
    fn drop(&mut self) {
        *self.0.running() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use std::io;
    use std::path::Path;

    const TIMEOUT: Duration = Duration::from_secs(3);

    fn text(error: &CallError) -> String {
        word(error, TIMEOUT).to_string()
    }

    fn no_connection(kind: ErrorKind) -> CallError {
        CallError::Connect { path: "/csi/csi.sock".into(), source: kind.into() }
    }

    #[test]
    fn each_text_begins_with_upstreams_and_tells_a_busy_driver_from_a_dead_one() {
        let deadline = |spoke| CallError::Deadline { path: "/csi/csi.sock".into(), after: TIMEOUT, spoke };
        let status = |status| CallError::Status { path: "/csi/csi.sock".into(), source: Box::new(status) };
        for (error, said) in [
            (
                no_connection(ErrorKind::NotFound),
                "context deadline exceeded: nobody listens: cannot connect to /csi/csi.sock: entity not found",
            ),
            (
                no_connection(ErrorKind::WouldBlock),
                "context deadline exceeded: the driver is busy or stuck: its queue of connections is full",
            ),
            (
                CallError::Closed { path: "/csi/csi.sock".into() },
                "context deadline exceeded: /csi/csi.sock accepted and closed without a word",
            ),
            (
                deadline(false),
                "context deadline exceeded: the driver is busy or stuck: /csi/csi.sock accepted but did not answer within 3s",
            ),
            (
                deadline(true),
                "rpc error: code = DeadlineExceeded desc = context deadline exceeded: the driver is busy or stuck: /csi/csi.sock accepted but did not answer within 3s",
            ),
            (status(tonic::Status::internal("no fabric")), "rpc error: code = Internal desc = no fabric"),
            (
                status(tonic::Status::from_error(io::Error::other("broken").into())),
                "rpc error: code = Unavailable desc = broken",
            ),
        ] {
            assert_eq!(text(&error), said);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_word_fails_whatever_it_was() {
        let at = Instant::now();
        let ready = Round { word: Word::Ready, at };
        let max_age = Duration::from_secs(14);
        let after = |age| from_last(Some(&ready), max_age, at + age);
        let not_ready = |text: &str| Err(NotReady(text.to_owned()));
        assert_eq!(after(max_age), Ok(()));
        let old = after(max_age + Duration::from_millis(500));
        assert_eq!(old, not_ready("the last word of the driver is 14.5s old; it was: ok"));
        assert_eq!(from_last(None, max_age, at), not_ready("the driver has not answered yet"));
        assert_eq!(
            from_last(Some(&Round { word: Word::NotReady, at }), max_age, at + Duration::from_secs(2)),
            not_ready("driver responded but is not ready (2.0s ago)")
        );
    }

    #[tokio::test]
    async fn a_round_with_nobody_there_takes_its_timeout_and_counts_nothing() {
        let metrics = Metrics::new();
        let asked = Asked {
            driver_socket: Path::new("/no/such/csi.sock").to_owned(),
            timeout: Duration::from_millis(120),
            ready: DriverReady::new(metrics.clone()),
        };
        let began = Instant::now();
        let word = Rounds { asked, quiet: Quiet::default() }.next().await;
        assert!(matches!(word, Word::Unreachable(_)), "{word:?}");
        assert!(began.elapsed() >= Duration::from_millis(120));
        assert!(!metrics.render().contains("csi_sidecar_operations_seconds"));
    }
}
