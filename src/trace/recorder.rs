//! Records what probes read on this host: all of it first, then only what changes.

use super::entry::Entry;
use super::format::{Head, LONGEST, MAX_BYTES};
use super::tree::Tree;
use super::{Change, Offset, Recorded, Step, snapshot};
use crate::config::probes::{ProbeKind, ProbeSettings};
use crate::policy::kernel_log::KernelLogPolicy;
use crate::probe::kmsg::log::{KernelLog, Line};
use crate::probe::lane::Lane;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;

/// A probe's tree that takes longer is left as it was.
const LOOK_LIMIT: Duration = Duration::from_secs(3);

/// As much of a health file as the probe reads.
const MAX_HEALTH_BYTES: u64 = 4096;

/// Room for the last line.
const END_BYTES: usize = 64;

/// Why a recording ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was told to.
    Told,
    /// Its time was over.
    Time,
    /// The trace would have grown over its limit.
    Full,
}

/// One probe's part of the recording.
struct Source {
    name: String,
    kind: ProbeKind,
    lane: Lane,
    tree: Tree,
    health: Option<Option<HealthWrite>>,
    log: Option<(KernelLog, KernelLogPolicy)>,
    fell_silent: bool,
}

/// Tells one write of a health file from another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HealthWrite {
    inode: u64,
    modified: Option<SystemTime>,
    text: Vec<u8>,
}

/// Records into `file` until `stop`, or for as long as `limit`.
///
/// # Errors
/// What keeps the file from being written.
pub async fn record(
    probes: &[ProbeSettings],
    period: Duration,
    limit: Option<Duration>,
    file: &mut File,
    stop: &CancellationToken,
) -> io::Result<Ended> {
    let mut sources: Vec<Source> = probes.iter().map(Source::new).collect();
    let recorded: Vec<Recorded> =
        probes.iter().map(|probe| Recorded { name: probe.name.clone(), kind: probe.kind.name().to_owned() }).collect();
    let head = Head(&recorded).to_string();
    file.write_all(head.as_bytes())?;
    let (start, limit) = (Instant::now(), limit.unwrap_or(LONGEST).min(LONGEST));
    let mut times = interval_at(start, period);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut written = head.len();
    let mut tree = Tree::default();
    let mut last: Option<Offset> = None;
    let ended = loop {
        let rest = (start + limit).saturating_duration_since(Instant::now());
        tokio::select! {
            biased;
            () = stop.cancelled() => break Ended::Told,
            () = tokio::time::sleep(rest) => break Ended::Time,
            _ = times.tick() => {}
        }
        // What the first look finds is how it was at the start.
        let at = if last.is_none() { Offset(0) } else { Offset::after(start.elapsed()) };
        let steps = look(&mut sources, &mut tree, start, at, last.is_none()).await;
        let mut text = String::new();
        for source in &mut sources {
            if std::mem::take(&mut source.fell_silent) {
                text += &format!("# {at}: no answer within {LOOK_LIMIT:?} for probe {}\n", source.name);
            }
        }
        for mut step in steps {
            // Two of one time, or of before, would not be in order.
            step.at = last.map_or(step.at, |last| step.at.max(Offset(last.0 + 1)));
            last = Some(step.at);
            text += &step.to_string();
        }
        if written + text.len() + END_BYTES > MAX_BYTES {
            break Ended::Full;
        }
        written += text.len();
        file.write_all(text.as_bytes())?;
    };
    let end = Offset::after(start.elapsed()).max(last.unwrap_or_default());
    writeln!(file, "end {end}")?;
    file.sync_all()?;
    Ok(ended)
}

/// One look at everything.
async fn look(sources: &mut [Source], tree: &mut Tree, start: Instant, at: Offset, first: bool) -> Vec<Step> {
    let (mut now, mut steps) = (Vec::new(), Vec::new());
    let mut whole = Tree::default();
    for source in sources.iter_mut() {
        source.look().await;
        for (path, entry) in source.tree.entries() {
            // Several probes may read one tree; what one saw as a folder stays one.
            if !(*entry == Entry::Folder && whole.at(path).is_some()) {
                whole.change(path, Some(entry)).ok();
            }
        }
        if let Some((age, change)) = source.health_change() {
            match age.filter(|_| first) {
                Some(age) => steps.push(Step { at: Offset::before(age), changes: vec![change] }),
                None => now.push(change),
            }
        }
        let of_start = start.into_std();
        let lines = source.lines().await;
        // A probe of GPUs and one of the kernel log may see the same line.
        let known = now.clone();
        for line in lines.into_iter().filter(|line| !known.contains(&Change::Kernel(line.text.clone()))) {
            match line.at {
                Some(written) if written >= of_start => now.push(Change::Kernel(line.text)),
                Some(written) => steps.push(Step {
                    at: Offset::before(of_start.saturating_duration_since(written).min(LONGEST)),
                    changes: vec![Change::Kernel(line.text)],
                }),
                None => {}
            }
        }
    }
    let mut changes = whole.changes_since(tree);
    *tree = whole;
    changes.extend(now);
    // What was before the start comes first, by its time; a step of nothing is none.
    steps.sort_by_key(|step| step.at);
    if !changes.is_empty() {
        steps.push(Step { at, changes });
    }
    steps
}

impl Source {
    fn new(probe: &ProbeSettings) -> Self {
        let log = match &probe.kind {
            ProbeKind::Kmsg(kmsg) => Some((kmsg.host.dev.as_path(), kmsg.since, kmsg.rules.clone())),
            ProbeKind::Gpu(gpu) => {
                gpu.xid.as_ref().map(|xid| (gpu.host.dev.as_path(), xid.since, xid.table.rules(xid.holds)))
            }
            ProbeKind::Rdma(_)
            | ProbeKind::Nvme(_)
            | ProbeKind::HealthFile { .. }
            | ProbeKind::Csi { .. }
            | ProbeKind::Exec { .. } => None,
        };
        Self {
            name: probe.name.clone(),
            kind: probe.kind.clone(),
            lane: Lane::new("record"),
            tree: Tree::default(),
            health: None,
            log: log.map(|(dev, since, rules)| (KernelLog::new(dev, since), KernelLogPolicy::new(rules))),
            fell_silent: false,
        }
    }

    async fn look(&mut self) {
        if self.lane.is_busy() {
            // It still sits in the kernel, and was told of.
            return;
        }
        let kind = self.kind.clone();
        let looked = self.lane.run(LOOK_LIMIT, move || snapshot::take(&kind)).await;
        self.fell_silent = looked.is_err();
        if let Ok(tree) = looked {
            self.tree = tree;
        }
    }

    /// A write of the health file, and how old it is.
    fn health_change(&mut self) -> Option<(Option<Duration>, Change)> {
        let ProbeKind::HealthFile { path, .. } = &self.kind else { return None };
        let seen = read_health(path);
        let before = self.health.replace(seen.clone());
        if before.as_ref() == Some(&seen) || before.is_none() && seen.is_none() {
            return None;
        }
        let age = seen.as_ref().and_then(|write| SystemTime::now().duration_since(write.modified?).ok());
        let entry = seen.map(|write| Entry::Value(write.text));
        Some((age.map(|age| age.min(LONGEST)), Change::Path(format!("health/{}", self.name), entry)))
    }

    async fn lines(&mut self) -> Vec<Line> {
        let Some((log, policy)) = &mut self.log else { return Vec::new() };
        // A log that cannot be read has no lines; the probe says why.
        drop(log.look(|text| policy.concerns(text)).await);
        log.take()
    }
}

/// Only a regular file that says one of the words is recorded: a link could have led to a secret.
fn read_health(path: &Path) -> Option<HealthWrite> {
    let metadata = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file)?;
    let mut text = Vec::new();
    File::open(path).and_then(|file| file.take(MAX_HEALTH_BYTES).read_to_end(&mut text)).ok()?;
    if crate::probe::health_file::parse(&text).is_none() {
        text = b"(neither OK nor ERROR)\n".to_vec();
    }
    Some(HealthWrite { inode: metadata.ino(), modified: metadata.modified().ok(), text })
}

/// Opens the file of a recording, which must not be there unless it may be `overwritten`.
///
/// # Errors
/// The operating system's.
pub fn create(path: &Path, overwritten: bool) -> io::Result<File> {
    let mut options = File::options();
    options.write(true);
    if overwritten {
        options.create(true).truncate(true)
    } else {
        options.create_new(true)
    };
    options.open(path)
}
