//! The `gpu` probe: GPUs by PCI, what the kernel log tells of them, and what `nvidia-smi` says if it is to be run.

pub mod bus;

use super::Probe;
use super::device_lane::{DeviceLane, Patience};
use super::exec::{Command, Starter, output};
use super::join::join_all;
use super::keeper::Keeper;
use super::kmsg::log::{KernelLog, Line};
use super::kmsg::told;
use super::lane::{Abandoned, Lane};
use super::observed::{Observed, judged};
use crate::config::probes::GpuSettings;
use crate::known_devices::KnownOf;
use crate::policy::gpu::{self, GpuPolicy, OnBus, Tool};
use crate::policy::kernel_log::KernelLogPolicy;
use crate::policy::outcome::{Outcome, Reason};
use crate::policy::round::Silence;
use crate::policy::smi::{Answer, COLUMNS, Figure, Row};
use bus::{Listed, list, on_bus};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The probe.
#[derive(Debug)]
pub struct Gpu {
    settings: GpuSettings,
    policy: GpuPolicy,
    known: KnownOf,
    keeper: Keeper,
    log: Option<KernelLog>,
    log_policy: KernelLogPolicy,
    bus: Bus,
    tool: Starter,
    patience: Patience,
    observed: Option<Arc<Observed>>,
}

/// The lanes on which PCI is looked at.
#[derive(Debug)]
struct Bus {
    lane: Lane,
    lanes: BTreeMap<String, DeviceLane>,
}

type OnBusByAddress = BTreeMap<String, Result<OnBus, Silence>>;

/// What a look gives.
#[derive(Debug)]
pub struct Look {
    listed: Result<Listed, Reason>,
    on_bus: OnBusByAddress,
    tool: Tool,
    /// Why the kernel log cannot be read, if it should be.
    log_unread: Option<Reason>,
}

impl Gpu {
    /// Looks at the GPUs that `settings` selects. Those that it finds good are noted in `known`.
    pub fn new(settings: &GpuSettings, known: KnownOf) -> Self {
        let xid = settings.xid.as_ref();
        Self {
            settings: settings.clone(),
            policy: GpuPolicy::new(settings.rule.clone(), known.devices()),
            known,
            keeper: Keeper::new("gpu-known"),
            log: xid.map(|xid| KernelLog::new(&settings.host.dev, xid.since)),
            log_policy: KernelLogPolicy::new(xid.map(|xid| xid.table.rules(xid.holds)).unwrap_or_default()),
            bus: Bus { lane: Lane::new("gpu"), lanes: BTreeMap::new() },
            tool: Starter::new("gpu-tool"),
            patience: Patience::default(),
            observed: None,
        }
    }

    /// Reads no kernel log: the lines of a trace are handed over.
    pub fn replayed(settings: &GpuSettings) -> Self {
        let log = settings.xid.as_ref().map(|_| KernelLog::replayed());
        Self { log, ..Self::new(settings, KnownOf::in_memory()) }
    }

    /// Takes in a line of the trace; one that means nothing is left out. Says whether it wakes the probe.
    pub fn hand_over(&mut self, line: Line) -> bool {
        let Some(log) = self.log.as_mut().filter(|_| self.log_policy.concerns(&line.text)) else { return false };
        log.hand_over(line);
        true
    }
}

impl Bus {
    async fn look(
        &mut self,
        settings: &GpuSettings,
        timeout: Duration,
    ) -> Result<(Result<Listed, Reason>, OnBusByAddress), Abandoned> {
        let deadline = tokio::time::Instant::now() + timeout;
        let (sysfs, select) = (settings.host.sysfs.clone(), settings.select.clone());
        let listed = self.lane.run(timeout, move || list(&sysfs, &select)).await?;
        let Ok(there) = &listed else { return Ok((listed, BTreeMap::new())) };
        // A thread that is stuck in the kernel is not replaced by another one.
        self.lanes.retain(|address, lane| there.selected.contains(address) || lane.is_busy());
        for address in &there.selected {
            self.lanes.entry(address.clone()).or_insert_with(|| DeviceLane::new(address.as_str()));
        }
        let sysfs = &settings.host.sysfs;
        let looks =
            self.lanes.iter_mut().filter(|(address, _)| there.selected.contains(*address)).map(|(address, lane)| {
                let (sysfs, wanted) = (sysfs.clone(), address.clone());
                let look: Pin<Box<dyn Future<Output = _> + Send + '_>> = Box::pin(async move {
                    (address.clone(), lane.ask(deadline, timeout, move || on_bus(&sysfs, &wanted)).await)
                });
                look
            });
        let on_bus = join_all(looks.collect()).await.into_iter().collect();
        Ok((listed, on_bus))
    }
}

impl Probe for Gpu {
    type Seen = Look;

    async fn look(&mut self, timeout: Duration) -> Result<Look, Abandoned> {
        let (settings, starter, patience) = (&self.settings, &mut self.tool, &mut self.patience);
        let tool = async {
            let Some(tool) = &settings.tool else { return Tool::NotAsked };
            // One that cannot be started or killed is not waited for again.
            if let Some(silence) = patience.still_waiting(starter.stays_busy().await, timeout) {
                return Tool::Silent(silence);
            }
            patience.ask();
            let answer = ask(starter, &tool.command, tool.recovery_action, timeout).await;
            patience.heard(answer).unwrap_or_else(Tool::Silent)
        };
        let known = self.known.clone();
        self.keeper.keep(self.known.path(), move || known.save()).await;
        let (bus, tool) = tokio::join!(self.bus.look(settings, timeout), tool);
        let (listed, on_bus) = bus?;
        let log_unread = match &mut self.log {
            Some(log) => log.look(|text| self.log_policy.concerns(text)).await.err(),
            None => None,
        };
        Ok(Look { listed, on_bus, tool, log_unread })
    }

    fn judge(&mut self, seen: Look, now: Instant) -> Option<Outcome> {
        for line in self.log.as_mut().map(KernelLog::take).unwrap_or_default() {
            self.log_policy.read(line.message(now), now);
        }
        let listed = match seen.listed {
            Ok(listed) => listed,
            Err(reason) => {
                self.observed = None;
                return Some(Outcome::Unknown(reason));
            }
        };
        let look = gpu::Look {
            on_bus: &seen.on_bus,
            absent: &listed.absent,
            excluded: &listed.excluded,
            doubt: listed.doubt.as_ref(),
            tool: &seen.tool,
            held: self.log_policy.held(now),
            log_unread: seen.log_unread.as_ref(),
        };
        let (outcome, each) = self.policy.judge(look);
        self.keeper.note(self.known.learn(self.policy.good()));
        let answer = if let Tool::Said(answer) = &seen.tool { Some(answer) } else { None };
        let mut observed: Observed = self.log_policy.held(now).iter().map(told).collect();
        for (address, outcome) in each {
            let mut map = judged(&outcome);
            if let Some(Ok(on_bus)) = seen.on_bus.get(&address) {
                map.insert("driver".to_owned(), json!(on_bus.driver));
            }
            if let Some(row) = answer.and_then(|answer| answer.rows.iter().find(|row| row.pci == address)) {
                show(&mut map, row);
            }
            observed.insert(address, Value::Object(map));
        }
        self.observed = Some(Arc::new(observed));
        Some(outcome)
    }

    async fn changed(&mut self) {
        match &self.log {
            Some(log) => log.changed().await,
            None => std::future::pending().await,
        }
    }

    fn observed(&self) -> Option<Arc<Observed>> {
        self.observed.clone()
    }
}

fn show(map: &mut Map<String, Value>, row: &Row) {
    map.insert("uuid".to_owned(), json!(row.uuid));
    for (key, figure) in [
        ("memoryUsedMiB", &row.memory_used),
        ("memoryTotalMiB", &row.memory_total),
        ("temperatureCelsius", &row.temperature),
    ] {
        let value = match figure {
            Figure::Number(number) => json!(number),
            Figure::Trouble(words) => json!(words),
            Figure::Absent => continue,
        };
        map.insert(key.to_owned(), value);
    }
    if let Some(action) = &row.recovery_action {
        map.insert("recoveryAction".to_owned(), json!(action));
    }
}

/// Runs the tool once.
async fn ask(
    starter: &mut Starter,
    command: &Command,
    recovery_action: bool,
    timeout: Duration,
) -> Result<Tool, Abandoned> {
    let columns = if recovery_action { COLUMNS.as_slice() } else { &COLUMNS[..COLUMNS.len() - 1] };
    let mut command = command.clone();
    command.arguments.push(format!("--query-gpu={}", columns.join(",")).into());
    command.arguments.push("--format=csv,noheader,nounits".into());
    let name = command.program.to_string_lossy();
    let not_run = |error: io::Error| {
        let code = if error.kind() == io::ErrorKind::NotFound { "ToolMissing" } else { "ToolNotRun" };
        Tool::NotRun(Reason::new(code, format!("cannot run {name}: {error}")))
    };
    let ended = match output(starter, &command, timeout).await? {
        Ok(ended) => ended,
        Err(error) => return Ok(not_run(error)),
    };
    Ok(match ended.status {
        Ok(status) => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            Tool::Said(Answer::parse(&text(&ended.said), &text(&ended.complained), status.code()))
        }
        Err(error) => not_run(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::probes::{GpuSelect, HostTree, SmiTool, XidSettings};
    use crate::known_devices::KnownDevices;
    use crate::policy::gpu::GpuRule;
    use crate::policy::group::Require;
    use crate::policy::kernel_log::Since;
    use crate::policy::smart::Limits;
    use crate::policy::xid::{HOLDS, XidTable};
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn device(root: &Path, address: &str, vendor: &str, class: &str, config: &[u8]) {
        let folder = root.join("bus/pci/devices").join(address);
        fs::create_dir_all(&folder).unwrap();
        for (name, bytes) in [("vendor", vendor.as_bytes()), ("class", class.as_bytes()), ("config", config)] {
            fs::write(folder.join(name), bytes).unwrap();
        }
        drop(symlink("../../drivers/nvidia", folder.join("driver")));
    }

    fn settings(root: &Path, tool: Option<&str>) -> GpuSettings {
        let script = |script: &str| Command {
            program: "sh".into(),
            arguments: vec!["-c".into(), script.into(), "nvidia-smi".into()],
            environment: Vec::new(),
        };
        GpuSettings {
            host: HostTree { sysfs: root.to_owned(), dev: root.to_owned(), proc: "/none".into() },
            select: GpuSelect { vendors: vec![0x10de], devices: Vec::new(), exclude: Vec::new() },
            rule: GpuRule {
                count: None,
                require: Require::All,
                memory_used: Limits { warn: None, fail: None },
                timeout: TIMEOUT,
            },
            tool: tool.map(|tool| SmiTool { command: script(tool), recovery_action: true }),
            xid: Some(XidSettings { table: XidTable::default(), holds: Some(HOLDS), since: Since::Now }),
        }
    }

    async fn said(probe: &mut Gpu, timeout: Duration) -> (&'static str, &'static str) {
        let seen = probe.look(timeout).await.unwrap();
        let outcome = probe.judge(seen, tokio::time::Instant::now().into_std()).unwrap();
        (outcome.name(), outcome.reason().map_or("", |reason| reason.code))
    }

    #[tokio::test]
    async fn gpus_are_found_by_vendor_and_class_and_one_off_the_bus_is_told() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("kmsg"), "").unwrap();
        device(root.path(), "0000:17:00.0", "0x10de\n", "0x030200\n", &[0xde, 0x10, 0, 0]);
        device(root.path(), "0000:17:00.1", "0x10de\n", "0x040300\n", &[0xff; 64]);
        device(root.path(), "0000:00:02.0", "0x8086\n", "0x030000\n", &[0xff; 64]);
        let mut probe = Gpu::new(&settings(root.path(), None), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
        assert_eq!(probe.observed().unwrap().keys().collect::<Vec<_>>(), ["0000:17:00.0"]);
        assert_eq!(probe.observed().unwrap()["0000:17:00.0"]["driver"], json!("nvidia"));
        device(root.path(), "0000:17:00.0", "0x10de\n", "0x030200\n", &[0xff; 64]);
        assert_eq!(said(&mut probe, TIMEOUT).await, ("failure", "OffTheBus"));
        device(root.path(), "0000:17:00.0", "0x10de\n", "0x030200\n", &[0xde, 0x10, 0, 0]);
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
        // A folder in its place cannot be read as a file.
        let vendor = root.path().join("bus/pci/devices/0000:17:00.0/vendor");
        fs::remove_file(&vendor).unwrap();
        fs::create_dir(&vendor).unwrap();
        assert_eq!(said(&mut probe, TIMEOUT).await, ("unknown", "SysfsUnreadable"), "unread is no absence");
        fs::remove_dir_all(root.path().join("bus/pci/devices/0000:17:00.0")).unwrap();
        assert_eq!(said(&mut probe, TIMEOUT).await, ("failure", "DeviceGone"));
        fs::remove_dir_all(root.path().join("bus")).unwrap();
        assert_eq!(said(&mut probe, TIMEOUT).await, ("unknown", "SysfsUnreadable"));
    }

    #[tokio::test]
    async fn a_gpu_that_hangs_costs_its_own_word_and_nobody_waits_for_it_again() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("kmsg"), "").unwrap();
        for address in ["0000:17:00.0", "0000:18:00.0"] {
            device(root.path(), address, "0x10de\n", "0x030200\n", &[0xde, 0x10, 0, 0]);
        }
        let mut probe = Gpu::new(&settings(root.path(), None), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
        let hung = "0000:18:00.0";
        let release = probe.bus.lanes.get_mut(hung).unwrap().hang().await;
        let (long, began) = (Duration::from_secs(600), tokio::time::Instant::now());
        for (silent, outcome) in [(1, "unknown"), (2, "unknown"), (3, "failure")] {
            probe.bus.lanes.get_mut(hung).unwrap().be_silent(silent);
            assert_eq!(said(&mut probe, long).await, (outcome, "NotAnswering"));
            assert_eq!(probe.observed().unwrap()["0000:17:00.0"]["outcome"], json!("success"));
        }
        assert!(began.elapsed() < long / 10, "it was waited for");
        drop(release);
        while probe.bus.lanes[hung].is_busy() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""), "and it is back");
    }

    #[tokio::test]
    async fn a_gpu_that_was_good_is_missed_after_a_restart() {
        let (root, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(root.path().join("kmsg"), "").unwrap();
        let known = || {
            let known = KnownDevices::load(state.path(), "x.example.com", Path::new("/proc")).unwrap();
            known.of("gpus", "all".into())
        };
        for address in ["0000:17:00.0", "0000:18:00.0"] {
            device(root.path(), address, "0x10de\n", "0x030200\n", &[0xde, 0x10, 0, 0]);
        }
        let mut probe = Gpu::new(&settings(root.path(), None), known());
        // A round keeps what the one before has learnt, if the disk is quick enough.
        for _ in 0..100 {
            assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
            if known().devices().len() == 2 {
                break;
            }
        }
        fs::remove_dir_all(root.path().join("bus/pci/devices/0000:18:00.0")).unwrap();
        let mut next = Gpu::new(&settings(root.path(), None), known());
        assert_eq!(said(&mut next, TIMEOUT).await, ("failure", "DeviceGone"));
    }

    #[tokio::test]
    async fn an_xid_wakes_the_probe_and_is_its_gpus() {
        let root = tempfile::tempdir().unwrap();
        device(root.path(), "0000:17:00.0", "0x10de\n", "0x030200\n", &[0xde, 0x10]);
        rustix::fs::mkfifoat(rustix::fs::CWD, root.path().join("kmsg"), rustix::fs::Mode::from_raw_mode(0o600))
            .unwrap();
        let mut kernel = fs::OpenOptions::new().read(true).write(true).open(root.path().join("kmsg")).unwrap();
        let mut probe = Gpu::new(&settings(root.path(), None), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let line = format!(
            "4,9,{},-;NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.\n",
            time.tv_sec * 1_000_000
        );
        io::Write::write_all(&mut kernel, line.as_bytes()).unwrap();
        tokio::time::timeout(TIMEOUT, probe.changed()).await.unwrap();
        assert_eq!(said(&mut probe, TIMEOUT).await, ("failure", "Xid"));
        assert_eq!(probe.observed().unwrap()["0000:17:00.0"]["outcome"], json!("failure"));
    }

    #[tokio::test]
    async fn a_log_that_cannot_be_read_warns_and_hides_nothing() {
        let root = tempfile::tempdir().unwrap();
        device(root.path(), "0000:17:00.0", "0x10de\n", "0x030200\n", &[0xde, 0x10]);
        assert_eq!(
            said(&mut Gpu::new(&settings(root.path(), None), KnownOf::in_memory()), TIMEOUT).await,
            ("warning", "KernelLogMissing")
        );
        device(root.path(), "0000:17:00.0", "0x10de\n", "0x030200\n", &[0xff; 64]);
        assert_eq!(
            said(&mut Gpu::new(&settings(root.path(), None), KnownOf::in_memory()), TIMEOUT).await,
            ("failure", "OffTheBus")
        );
    }

    #[tokio::test]
    async fn the_tool_is_asked_in_its_own_words_and_never_waited_for_too_long() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("kmsg"), "").unwrap();
        device(root.path(), "0000:17:00.0", "0x10de\n", "0x030200\n", &[0xde, 0x10]);
        let asked = "case \"$1 $2\" in *gpu_recovery_action*--format=csv,noheader,nounits) ;; *) exit 9 ;; esac; ";
        let row = "echo '0, 00000000:17:00.0, GPU-a, 1, 2, [N/A], None'";
        for (script, seen) in [
            (format!("{asked}{row}"), ("success", "")),
            (format!("{row}; exit 14"), ("warning", "ToolDegraded")),
            (
                "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18".to_owned(),
                ("failure", "ToolFailed"),
            ),
        ] {
            assert_eq!(
                said(&mut Gpu::new(&settings(root.path(), Some(&script)), KnownOf::in_memory()), TIMEOUT).await,
                seen,
                "{script}"
            );
        }
        let mut missing = settings(root.path(), Some(""));
        missing.tool.as_mut().unwrap().command.program = "/no/such/nvidia-smi".into();
        assert_eq!(said(&mut Gpu::new(&missing, KnownOf::in_memory()), TIMEOUT).await, ("unknown", "ToolMissing"));
        let mut hung = Gpu::new(&settings(root.path(), Some("sleep 60")), KnownOf::in_memory());
        let short = Duration::from_millis(300);
        for outcome in ["unknown", "unknown", "failure"] {
            assert_eq!(said(&mut hung, short).await, (outcome, "NotAnswering"));
        }
    }
}
