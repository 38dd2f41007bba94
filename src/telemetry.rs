//! The log: klog's text or JSON on stderr, as the replaced sidecars write it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt::{self, Write as _};
use std::io;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;
use time::OffsetDateTime;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

/// Only our own lines are shown; hyper and h2 have their own, for their own developers.
const OUR_TARGET: &str = "csi_warden";

/// The target of what is shown from `--v=5` on, at level DEBUG. Lines at level TRACE are not compiled: h2 has hundreds for each call.
pub const DETAIL: &str = "csi_warden::detail";

/// What to log, and how.
#[derive(Debug, Clone)]
pub struct LogSettings {
    /// `--v`
    pub verbosity: i32,
    /// `--vmodule`
    pub vmodule: VModule,
    /// `--logging-format`
    pub format: Format,
}

/// The two forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `I1130 16:41:55.492853       1 main.rs:145] "message" key="value"`
    Text,
    /// `{"ts":…,"caller":"main.rs:145","msg":"message","v":0,"key":"value"}`
    Json,
}

/// `--vmodule`: verbosity by source file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VModule(Vec<(String, i32)>);

impl VModule {
    /// Whether nothing was given.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn verbosity(&self, file: &str) -> Option<i32> {
        let name = file.rsplit('/').next().unwrap_or(file);
        let name = name.strip_suffix(".rs").unwrap_or(name);
        self.0.iter().find(|(pattern, _)| matches_glob(pattern, name)).map(|(_, level)| *level)
    }
}

impl FromStr for VModule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',')
            .filter(|entry| !entry.is_empty())
            .map(|entry| {
                let (pattern, level) =
                    entry.split_once('=').ok_or_else(|| format!("{entry:?} is not of the form pattern=N"))?;
                match level.parse() {
                    Ok(level) if !pattern.is_empty() => Ok((pattern.to_owned(), level)),
                    Ok(_) | Err(_) => Err(format!("{entry:?} is not of the form pattern=N")),
                }
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

/// `*` for any run of characters, `?` for one.
fn matches_glob(pattern: &str, name: &str) -> bool {
    match (pattern.chars().next(), name.chars().next()) {
        (None, None) => true,
        (Some('*'), _) => {
            matches_glob(&pattern[1..], name) || (!name.is_empty() && matches_glob(pattern, &name[first_len(name)..]))
        }
        (Some(wanted), Some(found)) if wanted == '?' || wanted == found => {
            matches_glob(&pattern[first_len(pattern)..], &name[first_len(name)..])
        }
        (None | Some(_), _) => false,
    }
}

fn first_len(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

/// Starts the log. A second call changes nothing.
pub fn init(settings: LogSettings) {
    let format = settings.format;
    let layer = tracing_subscriber::fmt::layer()
        .event_format(Klog { format })
        .with_writer(|| Stderr)
        .with_filter(Verbosity(settings));
    // Only a test that starts two daemons in one process calls it twice.
    drop(Registry::default().with(layer).try_init());
}

/// Lines that were not written because whoever reads stderr does not.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Stderr, but never waited for: a stuck log reader must not stop a node's registration. What does not fit is counted.
struct Stderr;

impl io::Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let stderr = io::stderr();
        if !takes_a_line(&stderr) {
            LOST.fetch_add(1, Ordering::Relaxed);
            return Ok(line.len());
        }
        let lost = LOST.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let note = text_line(
                'W',
                "telemetry.rs",
                &format!("{lost} log lines were lost: nobody read stderr"),
                SystemTime::now(),
            );
            io::Write::write_all(&mut &stderr, note.as_bytes())?;
        }
        io::Write::write_all(&mut &stderr, line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A pipe that polls as writable takes at least [`MAX_LINE_BYTES`] without blocking.
fn takes_a_line(stderr: &io::Stderr) -> bool {
    let mut fds = [PollFd::new(stderr, PollFlags::OUT)];
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1)) && !fds[0].revents().is_empty()
}

/// The klog level that a line needs: 0 is always shown, 4 with `--v=4`.
fn klog_level(level: &Level, target: &str) -> i32 {
    match *level {
        Level::ERROR | Level::WARN | Level::INFO => 0,
        Level::DEBUG => 4 + i32::from(target == DETAIL),
        Level::TRACE => 5,
    }
}

struct Verbosity(LogSettings);

impl Verbosity {
    fn shows(&self, metadata: &Metadata<'_>) -> bool {
        if !metadata.target().starts_with(OUR_TARGET) {
            return false;
        }
        let verbosity = metadata.file().and_then(|file| self.0.vmodule.verbosity(file)).unwrap_or(self.0.verbosity);
        klog_level(metadata.level(), metadata.target()) <= verbosity.max(0)
    }
}

impl<S> Filter<S> for Verbosity {
    fn enabled(&self, metadata: &Metadata<'_>, _context: &Context<'_, S>) -> bool {
        self.shows(metadata)
    }

    /// Where a line stands says all, so it is asked once: h2 has hundreds of lines for each call.
    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.shows(metadata) { Interest::always() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let highest = self.0.vmodule.0.iter().map(|(_, level)| *level).fold(self.0.verbosity, i32::max);
        Some(match highest {
            ..4 => LevelFilter::INFO,
            4.. => LevelFilter::DEBUG,
        })
    }
}

struct Klog {
    format: Format,
}

impl<S, N> FormatEvent<S, N> for Klog
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let line = match self.format {
            Format::Text => text(event.metadata(), &fields, SystemTime::now()),
            Format::Json => json(event.metadata(), fields, SystemTime::now()),
        };
        writer.write_str(&cut(line))
    }
}

/// A pipe takes this much in one piece or not at all (PIPE_BUF), the note about lost lines included.
const MAX_LINE_BYTES: usize = 4096 - 256;

fn cut(mut line: String) -> String {
    if line.len() > MAX_LINE_BYTES {
        let end = (0..=MAX_LINE_BYTES - 5).rev().find(|end| line.is_char_boundary(*end)).unwrap_or(0);
        line.truncate(end);
        line.push_str("…\n");
    }
    line
}

/// An event's message and its fields, in their order.
#[derive(Default)]
struct Fields {
    message: String,
    fields: Vec<(&'static str, Value)>,
}

enum Value {
    Text(String),
    Bare(serde_json::Value),
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::Text(text)) => self.message = text,
            (name, value) => self.fields.push((name, value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, Value::Text(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, Value::Text(value.to_owned()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, Value::Bare(value.into()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, Value::Bare(value.into()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, Value::Bare(value.into()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, Value::Bare(value.into()));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.add(field, Value::Text(crate::grpc::connect::chain(value)));
    }
}

fn caller(metadata: &Metadata<'_>) -> String {
    let file = metadata.file().unwrap_or("unknown");
    format!("{}:{}", file.rsplit('/').next().unwrap_or(file), metadata.line().unwrap_or(0))
}

fn text(metadata: &Metadata<'_>, fields: &Fields, now: SystemTime) -> String {
    let severity = match *metadata.level() {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        Level::INFO | Level::DEBUG | Level::TRACE => 'I',
    };
    let mut line = text_line(severity, &caller(metadata), &fields.message, now);
    line.pop();
    for (name, value) in &fields.fields {
        // Writing to a String cannot fail.
        let written = match value {
            Value::Text(text) => write!(line, " {name}={text:?}"),
            Value::Bare(value) => write!(line, " {name}={value}"),
        };
        debug_assert!(written.is_ok());
    }
    line.push('\n');
    line
}

/// A line without fields.
fn text_line(severity: char, caller: &str, message: &str, now: SystemTime) -> String {
    let now = OffsetDateTime::from(now);
    format!(
        "{severity}{:02}{:02} {:02}:{:02}:{:02}.{:06} {:>7} {caller}] {message:?}\n",
        u8::from(now.month()),
        now.day(),
        now.hour(),
        now.minute(),
        now.second(),
        now.microsecond(),
        std::process::id(),
    )
}

fn json(metadata: &Metadata<'_>, fields: Fields, now: SystemTime) -> String {
    let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut object = serde_json::Map::new();
    let micros = u32::try_from(since_epoch.as_micros() % 1000).unwrap_or_default();
    let millis = u32::try_from(since_epoch.as_millis() % 1_000_000_000).unwrap_or_default();
    // In three parts, so that no conversion loses digits: an f64 holds milliseconds of this epoch to better than 1 µs.
    let whole = u32::try_from(since_epoch.as_millis() / 1_000_000_000).unwrap_or_default();
    let ts = f64::from(whole) * 1e9 + f64::from(millis) + f64::from(micros) / 1e3;
    object.insert("ts".into(), ts.into());
    object.insert("caller".into(), caller(metadata).into());
    object.insert("msg".into(), fields.message.into());
    if *metadata.level() != Level::ERROR {
        object.insert("v".into(), klog_level(metadata.level(), metadata.target()).into());
    }
    for (name, value) in fields.fields {
        let name = if name == "error" { "err" } else { name };
        let value = match value {
            Value::Text(text) => text.into(),
            Value::Bare(value) => value,
        };
        object.insert(name.into(), value);
    }
    format!("{}\n", serde_json::Value::Object(object))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vmodule_is_read_and_matched_by_file_name() {
        let vmodule: VModule = "sock*=5,s?rver=4".parse().unwrap();
        assert_eq!(vmodule.verbosity("src/registration/socket.rs"), Some(5));
        assert_eq!(vmodule.verbosity("src/registration/server.rs"), Some(4));
        assert_eq!(vmodule.verbosity("src/main.rs"), None);
        for bad in ["socket", "=4", "socket=x", "socket="] {
            assert!(bad.parse::<VModule>().is_err(), "{bad}");
        }
    }

    #[test]
    fn lines_that_nobody_sees_are_not_even_asked_about() {
        let hint = |verbosity, vmodule: &str| {
            let settings = LogSettings { verbosity, vmodule: vmodule.parse().unwrap(), format: Format::Text };
            Filter::<Registry>::max_level_hint(&Verbosity(settings)).unwrap()
        };
        assert_eq!(
            (hint(-1, ""), hint(0, ""), hint(3, "a=2")),
            (LevelFilter::INFO, LevelFilter::INFO, LevelFilter::INFO)
        );
        assert_eq!(
            (hint(4, ""), hint(5, ""), hint(9, "a=1")),
            (LevelFilter::DEBUG, LevelFilter::DEBUG, LevelFilter::DEBUG)
        );
        assert_eq!((hint(0, "socket=4"), hint(0, "a=1,b=5")), (LevelFilter::DEBUG, LevelFilter::DEBUG));
    }

    #[test]
    fn lines_are_shown_from_their_klog_level_on() {
        assert!(klog_level(&Level::WARN, OUR_TARGET) <= 0 && klog_level(&Level::INFO, OUR_TARGET) <= 0);
        assert_eq!(klog_level(&Level::DEBUG, OUR_TARGET), 4);
        assert_eq!(klog_level(&Level::DEBUG, DETAIL), 5);
    }
}
