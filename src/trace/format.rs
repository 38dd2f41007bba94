//! The text of a trace: one change a line, in the order of time.
//!
//! ```text
//! csi-warden-trace 1
//! probe fabric rdma
//! @0.000
//! sys/devices/…/ports/1/state = 4: ACTIVE\n
//! @12.003
//! sys/devices/…/ports/1/state = 1: DOWN\n
//! kernel mlx5_core 0000:41:00.0: Port module event: module 0, Cable unplugged
//! end 60.000
//! ```

use super::entry::{Entry, Problem, unescape};
use super::tree::Tree;
use super::{Change, Offset, Recorded, Step, Trace};
use std::fmt;
use std::time::Duration;

/// The first line.
const HEADER: &str = "csi-warden-trace 1";

/// A longer file is refused, and a recording ends there.
pub const MAX_BYTES: usize = 16 * 1024 * 1024;

/// A longer line is no line of ours.
const MAX_LINE_BYTES: usize = 32 * 1024;

/// The most that a trace may last; as much may lie before its start.
pub const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// More probes are nobody's settings.
const MAX_PROBES: usize = 64;

/// Why a text is no trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct FormatError {
    /// From one on.
    pub line: usize,
    /// What is wrong there.
    pub problem: String,
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// The first line that cannot be.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::default();
        if bytes.len() > MAX_BYTES {
            return Err(reader.wrong(format!("the file has over {} MiB", MAX_BYTES / 1024 / 1024)));
        }
        for line in bytes.split(|byte| *byte == b'\n') {
            reader.line += 1;
            if line.len() > MAX_LINE_BYTES {
                return Err(reader.wrong(format!("the line has over {MAX_LINE_BYTES} bytes")));
            }
            let line = std::str::from_utf8(line).map_err(|_| reader.wrong("the line is not UTF-8"))?;
            reader.take(line.strip_suffix('\r').unwrap_or(line))?;
        }
        // What follows the last line's end is no line.
        reader.line -= usize::from(bytes.ends_with(b"\n"));
        reader.end()
    }
}

/// The state of the reading.
#[derive(Default)]
struct Reader {
    line: usize,
    has_header: bool,
    probes: Vec<Recorded>,
    steps: Vec<Step>,
    tree: Tree,
    end: Option<Offset>,
}

impl Reader {
    fn take(&mut self, line: &str) -> Result<(), FormatError> {
        if !self.has_header {
            self.has_header = line == HEADER;
            let other = line.starts_with("csi-warden-trace ");
            return match (self.has_header, other) {
                (true, _) => Ok(()),
                (false, true) => Err(self.wrong("this version of csi-warden reads traces of version 1")),
                (false, false) => Err(self.wrong(format!("no trace: its first line must be {HEADER:?}"))),
            };
        }
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        if self.end.is_some() {
            return Err(self.wrong("something follows the end"));
        }
        let taken = if let Some(time) = line.strip_prefix('@') {
            self.step(time)
        } else {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "end" => self.ended(rest),
                "probe" => self.probe(rest),
                "kernel" => self.kernel(rest),
                path => self.change(path, rest),
            }
        };
        taken.map_err(|problem| self.wrong(problem))
    }

    fn probe(&mut self, text: &str) -> Result<(), Problem> {
        let (name, kind) = text.split_once(' ').ok_or("a probe is written `probe NAME TYPE`")?;
        let is_word = |word: &str| {
            (1..=63).contains(&word.len())
                && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte))
        };
        if !is_word(name) || !is_word(kind) {
            return Err("names and types of probes have 1 to 63 of a-z, 0-9, . and -");
        }
        if !self.steps.is_empty() {
            return Err("probes stand before the first time");
        }
        if self.probes.iter().any(|probe| probe.name == name) {
            return Err("there are two probes of this name");
        }
        if self.probes.len() == MAX_PROBES {
            return Err("there are over 64 probes");
        }
        self.probes.push(Recorded { name: name.to_owned(), kind: kind.to_owned() });
        Ok(())
    }

    fn step(&mut self, text: &str) -> Result<(), Problem> {
        let at = offset(text)?;
        if self.steps.last().is_some_and(|last| last.at >= at) {
            return Err("time goes on from step to step");
        }
        self.steps.push(Step { at, changes: Vec::new() });
        Ok(())
    }

    fn ended(&mut self, text: &str) -> Result<(), Problem> {
        let end = offset(text)?;
        if end.0 < 0 || self.steps.last().is_some_and(|last| last.at > end) {
            return Err("the end comes after the last step, and not before the start");
        }
        self.end = Some(end);
        Ok(())
    }

    fn kernel(&mut self, text: &str) -> Result<(), Problem> {
        let text = String::from_utf8(unescape(text)?).map_err(|_| "the line of the kernel log is not UTF-8")?;
        self.push(Change::Kernel(text))
    }

    fn change(&mut self, path: &str, text: &str) -> Result<(), Problem> {
        let path = String::from_utf8(unescape(path)?).map_err(|_| "the path is not UTF-8")?;
        let entry = if text == "gone" { None } else { Some(Entry::parse(text)?) };
        self.tree.change(&path, entry.as_ref())?;
        self.push(Change::Path(path, entry))
    }

    fn push(&mut self, change: Change) -> Result<(), Problem> {
        let step = self.steps.last_mut().ok_or("a line `@SECONDS` must come before the first change")?;
        step.changes.push(change);
        Ok(())
    }

    fn end(self) -> Result<Trace, FormatError> {
        match self.end {
            Some(end) => Ok(Trace { probes: self.probes, steps: self.steps, end }),
            None => Err(self.wrong("the trace is cut off: its last line must be `end SECONDS`")),
        }
    }

    fn wrong(&self, problem: impl Into<String>) -> FormatError {
        FormatError { line: self.line.max(1), problem: problem.into() }
    }
}

/// `12.003`, `-600`, `0.5`
fn offset(text: &str) -> Result<Offset, Problem> {
    const PROBLEM: Problem = "a time is written in seconds, such as 12.003, within 7 days of the start";
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let (seconds, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let number = |text: &str, most: usize| {
        let good = (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
        good.then(|| text.parse::<i64>().ok()).flatten().ok_or(PROBLEM)
    };
    let milliseconds = number(seconds, 7)? * 1000 + number(&format!("{fraction:0<3}"), 3)?;
    if milliseconds > Offset::after(LONGEST).0 {
        return Err(PROBLEM);
    }
    Ok(Offset(if negative { -milliseconds } else { milliseconds }))
}

/// What a recording begins with.
pub struct Head<'a>(pub &'a [Recorded]);

impl fmt::Display for Head<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEADER}")?;
        self.0.iter().try_for_each(|probe| writeln!(f, "probe {} {}", probe.name, probe.kind))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "@{}", self.at)?;
        self.changes.iter().try_for_each(|change| writeln!(f, "{change}"))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel(text) => write!(f, "kernel {}", text.as_bytes().escape_ascii()),
            Self::Path(path, entry) => {
                let path = path.as_bytes().escape_ascii().to_string().replace(' ', "\\x20");
                match entry {
                    Some(entry) => write!(f, "{path} {entry}"),
                    None => write!(f, "{path} gone"),
                }
            }
        }
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Head(&self.probes))?;
        self.steps.iter().try_for_each(|step| write!(f, "{step}"))?;
        writeln!(f, "end {}", self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::rdma::DeviceStandIn;
    use proptest::prelude::*;

    const GOOD: &str = "csi-warden-trace 1\n# a comment\nprobe fabric rdma\n\n@-600\nhealth/f = OK\\n\n@0\n\
                        sys/class/infiniband/a -> ../../devices/a\nsys/devices/a/x\\x20y = 4: ACTIVE\\n\n\
                        dev/infiniband/uverbs0 c 231:192\ndev/infiniband/uverbs1 c 231:193 EPERM\nsys/b ! EINVAL\nsys/c /\n\
                        @12.5\nsys/devices/a gone\nkernel mlx5: \\\\ \\x00\nend 60\n";

    #[test]
    fn every_kind_of_line_is_understood() {
        let trace = Trace::parse(GOOD.as_bytes()).unwrap();
        assert_eq!(trace.steps.iter().map(|step| step.at.0).collect::<Vec<_>>(), [-600_000, 0, 12_500]);
        assert_eq!((trace.steps[1].changes.len(), trace.end), (6, Offset(60_000)));
        assert!(matches!(&trace.steps[1].changes[1], Change::Path(path, _) if path == "sys/devices/a/x y"));
        assert_eq!(Trace::parse(trace.to_string().as_bytes()), Ok(trace));
        assert!(Trace::parse(GOOD.replace('\n', "\r\n").as_bytes()).is_ok(), "a mail may have carried it");
    }

    #[test]
    fn what_is_no_trace_is_told_with_its_line() {
        let head = "csi-warden-trace 1\n";
        let long = format!("{head}@0\nsys/a = {}\nend 1\n", "x".repeat(MAX_LINE_BYTES));
        for (text, line, says) in [
            ("", 1, "first line"),
            ("csi-warden-trace 2\n", 1, "version 1"),
            ("\u{7f}ELF", 1, "no trace"),
            (&format!("{head}@0\n"), 2, "cut off"),
            (&format!("{head}@0\nsys/a = 1"), 3, "cut off"),
            (&format!("{head}@0\nsys/a = 1\nend 1\nsys/a = 2\n"), 5, "follows the end"),
            (&format!("{head}@2\n@1\nend 3\n"), 3, "time goes on"),
            (&format!("{head}@2\nend 1\n"), 3, "end comes after"),
            (&format!("{head}sys/a = 1\nend 1\n"), 2, "@SECONDS"),
            (&format!("{head}@0\nsys/../../etc/x = 1\nend 1\n"), 3, "plain names"),
            (&format!("{head}@0\n/etc/x = 1\nend 1\n"), 3, "begins with"),
            (&format!("{head}@0\nsys/a\\x2f..\\x2f..\\x2fb = 1\nend 1\n"), 3, "plain names"),
            (&format!("{head}@0\nsys/l -> /etc\nsys/l/x = 1\nend 1\n"), 4, "behind a link"),
            (&format!("{head}@0\nsys/a : 1\nend 1\n"), 3, "after the path"),
            (&format!("{head}@0\nsys/a = \\q\nend 1\n"), 3, "backslash"),
            (&format!("{head}@0\nsys/a ! broken\nend 1\n"), 3, "EINVAL"),
            (&format!("{head}@0\nsys/a gone\nend 1\n"), 3, "nothing that could be gone"),
            (&format!("{head}@1e9\nend 1\n"), 2, "seconds"),
            (&format!("{head}@9999999\nend 1\n"), 2, "7 days"),
            (&format!("{head}probe A/b rdma\nend 1\n"), 2, "a-z"),
            (long.as_str(), 3, "bytes"),
        ] {
            let error = Trace::parse(text.as_bytes()).unwrap_err();
            assert!(error.line == line && error.problem.contains(says), "{text:.60}: {error}");
        }
        assert!(Trace::parse(&vec![b'\n'; MAX_BYTES + 1]).unwrap_err().problem.contains("MiB"));
    }

    fn entry() -> impl Strategy<Value = Entry> {
        prop_oneof![
            Just(Entry::Folder),
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(Entry::Value),
            "[^\0]{1,20}".prop_map(Entry::Link),
            (any::<u32>(), any::<u32>(), proptest::option::of("E[A-Z0-9]{1,8}"))
                .prop_map(|(major, minor, refused)| Entry::Device(DeviceStandIn { major, minor, refused })),
            "E[A-Z0-9]{1,8}".prop_map(Entry::Unreadable),
        ]
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            ("(sys|dev|proc)(/[a-c\\\\ é]{1,2}){1,4}", proptest::option::of(entry()))
                .prop_map(|(path, entry)| Change::Path(path, entry)),
            "\\PC{0,30}".prop_map(Change::Kernel),
        ]
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again_as_it_was(
            steps in proptest::collection::vec((1_i64..100_000, proptest::collection::vec(change(), 0..8)), 0..6),
            before in 0_i64..200_000,
        ) {
            let (mut tree, mut at) = (Tree::default(), -before);
            let mut trace = Trace { probes: Vec::new(), steps: Vec::new(), end: Offset(0) };
            for (later, mut changes) in steps {
                at += later;
                changes.retain(|change| match change {
                    Change::Path(path, entry) => tree.change(path, entry.as_ref()).is_ok(),
                    Change::Kernel(_) => true,
                });
                trace.steps.push(Step { at: Offset(at), changes });
            }
            trace.end = Offset(at.max(0));
            prop_assert_eq!(Trace::parse(trace.to_string().as_bytes()), Ok(trace));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), lines in "([@a-z0-9 =/\\\\.!>-]{0,12}\n){0,12}") {
            drop(Trace::parse(&bytes));
            let told = Trace::parse(format!("{HEADER}\n{lines}").as_bytes());
            if let Err(error) = told {
                prop_assert!((1..=lines.lines().count() + 2).contains(&error.line), "{}", error);
            }
        }
    }
}
