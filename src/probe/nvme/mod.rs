//! The `nvme` probe: what the kernel says of each controller, and its SMART log if that is wanted. A controller that hangs
//! holds up nobody else: each has a lane for what the kernel knows and one for what only the drive knows.

mod admin;
pub mod read;

use super::Probe;
use super::device_lane::DeviceLane;
use super::join::join_all;
use super::keeper::Keeper;
use super::lane::{Abandoned, Lane};
use super::observed::{Observed, judged};
use crate::config::probes::NvmeSettings;
use crate::known_devices::KnownOf;
use crate::policy::nvme::{Looked, NvmePolicy, Seen, Smart, State};
use crate::policy::outcome::{Outcome, Reason};
use crate::policy::round::Silence;
use read::{Controller, Listed, controller, list, recorded_smart, smart};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The probe.
#[derive(Debug)]
pub struct Nvme {
    settings: NvmeSettings,
    pages: Pages,
    policy: NvmePolicy,
    known: KnownOf,
    keeper: Keeper,
    lane: Lane,
    lanes: BTreeMap<String, Lanes>,
    /// What stays of each when its name changes, by its name; kept for when it cannot be read.
    lasting: BTreeMap<String, String>,
    observed: Option<Arc<Observed>>,
}

/// Where SMART logs come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    Drive,
    /// A trace has them where the device files were.
    Trace,
}

#[derive(Debug)]
struct Lanes {
    sysfs: DeviceLane,
    drive: DeviceLane,
}

/// What a look gives.
#[derive(Debug)]
pub struct Look {
    listed: Result<Listed, Reason>,
    controllers: BTreeMap<String, Result<(Controller, Smart), Silence>>,
}

impl Nvme {
    /// Reads the controllers that `settings` selects. Those that it finds live are noted in `known`.
    pub fn new(settings: &NvmeSettings, known: KnownOf) -> Self {
        Self {
            settings: settings.clone(),
            pages: Pages::Drive,
            policy: NvmePolicy::new(settings.rule.clone(), known.devices()),
            known,
            keeper: Keeper::new("nvme-known"),
            lane: Lane::new("nvme"),
            lanes: BTreeMap::new(),
            lasting: BTreeMap::new(),
            observed: None,
        }
    }
}

impl Nvme {
    /// Reads a trace's tree, SMART logs included.
    pub fn replayed(settings: &NvmeSettings) -> Self {
        Self { pages: Pages::Trace, ..Self::new(settings, KnownOf::in_memory()) }
    }
}

impl Probe for Nvme {
    type Seen = Look;

    async fn look(&mut self, timeout: Duration) -> Result<Look, Abandoned> {
        let deadline = tokio::time::Instant::now() + timeout;
        let (sysfs, devices, exclude) =
            (self.settings.host.sysfs.clone(), self.settings.devices.clone(), self.settings.exclude.clone());
        let listed = self.lane.run(timeout, move || list(&sysfs, &devices, &exclude)).await?;
        let known = self.known.clone();
        self.keeper.keep(self.known.path(), move || known.save()).await;
        let names: Vec<String> =
            listed.iter().flat_map(|listed| &listed.selected).map(|(identity, _)| identity.name.clone()).collect();
        if listed.is_ok() {
            // A thread that is stuck in the kernel is not replaced by another one.
            self.lanes.retain(|name, lanes| names.contains(name) || lanes.sysfs.is_busy() || lanes.drive.is_busy());
        }
        for name in &names {
            self.lanes.entry(name.clone()).or_insert_with(|| Lanes::new(name));
        }
        let (settings, pages) = (&self.settings, self.pages);
        let looks = self.lanes.iter_mut().filter(|(name, _)| names.contains(name)).map(|(name, lanes)| {
            let look: Pin<Box<dyn Future<Output = _> + Send + '_>> =
                Box::pin(async move { (name.clone(), lanes.look(settings, pages, name, deadline, timeout).await) });
            look
        });
        let controllers = join_all(looks.collect()).await.into_iter().collect();
        Ok(Look { listed, controllers })
    }

    fn judge(&mut self, seen: Look, now: Instant) -> Option<Outcome> {
        let listed = match &seen.listed {
            Ok(listed) => listed,
            Err(reason) => {
                self.observed = None;
                return Some(Outcome::Unknown(reason.clone()));
            }
        };
        let facts = |(controller, smart): &(Controller, Smart)| Seen {
            state: controller.state.clone(),
            smart: smart.clone(),
            unreachable: controller.unreachable(),
        };
        let mut controllers: BTreeMap<String, Looked> = BTreeMap::new();
        for (identity, lasting) in &listed.selected {
            let name = &identity.name;
            let kept = self.lasting.entry(name.clone()).or_insert_with(|| name.clone());
            if let Some(lasting) = lasting {
                kept.clone_from(lasting);
            }
            let mut key = kept.clone();
            // Two ways to one port cannot be told apart but by their order.
            while controllers.contains_key(&key) {
                key.push('+');
            }
            let Some(seen) = seen.controllers.get(name) else { continue };
            let seen = seen.as_ref().map(facts).map_err(|silence| *silence);
            controllers.insert(key, Looked { name: name.clone(), place: identity.place(), seen });
        }
        self.lasting.retain(|name, _| seen.controllers.contains_key(name));
        let (outcome, each) = self.policy.judge(&controllers, &listed.absent, listed.whole, now);
        self.keeper.note(self.known.learn(self.policy.good()));
        let shown = each.into_iter().map(|(name, outcome)| {
            let mut map = judged(&outcome);
            if let Some(Ok((controller, smart))) = seen.controllers.get(&name) {
                show(&mut map, controller, smart);
            }
            (name, Value::Object(map))
        });
        self.observed = Some(Arc::new(shown.collect()));
        Some(outcome)
    }

    async fn changed(&mut self) {
        future::pending().await
    }

    fn observed(&self) -> Option<Arc<Observed>> {
        self.observed.clone()
    }
}

impl Lanes {
    fn new(name: &str) -> Self {
        // A thread's name has 15 bytes.
        Self { sysfs: DeviceLane::new(name), drive: DeviceLane::new(format!("{name}-smart")) }
    }

    async fn look(
        &mut self,
        settings: &NvmeSettings,
        pages: Pages,
        name: &str,
        deadline: tokio::time::Instant,
        timeout: Duration,
    ) -> Result<(Controller, Smart), Silence> {
        let (sysfs, wanted) = (settings.host.sysfs.clone(), name.to_owned());
        let seen = self.sysfs.ask(deadline, timeout, move || controller(&sysfs, &wanted)).await?;
        // A controller that is being reset would keep the command until it is done.
        if !settings.smart || seen.state != Ok(State::Live) {
            return Ok((seen, Smart::NotAsked));
        }
        let (host, wanted) = (settings.host.clone(), name.to_owned());
        let page = self.drive.ask(deadline, timeout, move || match pages {
            Pages::Drive => smart(&host.sysfs, &host.dev, &wanted),
            Pages::Trace => recorded_smart(&host.dev, &wanted),
        });
        Ok((seen, page.await.unwrap_or_else(Smart::Silent)))
    }
}

fn show(map: &mut serde_json::Map<String, Value>, controller: &Controller, smart: &Smart) {
    for (key, value) in &controller.shown {
        let key = if *key == "firmware_rev" { "firmware" } else { key };
        map.insert(key.to_owned(), json!(value));
    }
    if !controller.namespaces.is_empty() {
        let words = |(name, ana): (&String, &Option<String>)| match ana {
            Some(ana) => format!("{name}:{ana}"),
            None => name.clone(),
        };
        map.insert("namespaces".to_owned(), json!(controller.namespaces.iter().map(words).collect::<Vec<_>>()));
    }
    match smart {
        Smart::Log(log) => {
            map.insert("criticalWarning".to_owned(), json!(log.critical_warning));
            map.insert("temperatureCelsius".to_owned(), json!(log.celsius()));
            map.insert("sparePercent".to_owned(), json!(log.spare));
            map.insert("spareThresholdPercent".to_owned(), json!(log.spare_threshold));
            map.insert("enduranceUsedPercent".to_owned(), json!(log.percentage_used));
            // More than a number of JSON can hold, in theory.
            let errors = u64::try_from(log.media_errors).unwrap_or(u64::MAX);
            map.insert("mediaErrors".to_owned(), json!(errors));
        }
        Smart::NotPermitted(reason) | Smart::Unread(reason) => {
            map.insert("smart".to_owned(), json!(reason.code));
        }
        Smart::Silent(silence) => {
            let code = match silence {
                Silence::TimeOuts(_) => "NotAnswering",
                Silence::NoThread(_) => "NoThread",
            };
            map.insert("smart".to_owned(), json!(code));
        }
        Smart::NotAsked => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::probes::HostTree;
    use crate::known_devices::KnownDevices;
    use crate::policy::group::Require;
    use crate::policy::nvme::NvmeRule;
    use crate::policy::nvme_selector::Selector;
    use crate::policy::smart::SmartLimits;
    use proptest::prelude::*;
    use rustix::fs::{CWD, Mode, mkfifoat};
    use std::fs;
    use std::path::{Path, PathBuf};

    const TIMEOUT: Duration = Duration::from_secs(3);

    /// A made-up `/sys`.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            fs::create_dir_all(tree.folder("").parent().unwrap()).unwrap();
            tree
        }

        fn folder(&self, name: &str) -> PathBuf {
            self.0.path().join("class/nvme").join(name)
        }

        fn controller(&self, name: &str, attributes: &[(&str, &str)]) {
            for (attribute, value) in attributes {
                let path = self.folder(name).join(attribute);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{value}\n")).unwrap();
            }
        }

        fn settings(&self, devices: &[&str], exclude: &[&str], smart: bool) -> NvmeSettings {
            let words = |words: &[&str]| words.iter().map(|word| Selector::parse(word).unwrap()).collect();
            let root = self.0.path().to_owned();
            NvmeSettings {
                host: HostTree { sysfs: root.clone(), dev: root.join("dev"), proc: "/none".into() },
                devices: words(devices),
                exclude: words(exclude),
                smart,
                rule: NvmeRule {
                    require: Require::All,
                    grace: Duration::from_secs(60),
                    smart: SmartLimits::default(),
                    timeout: TIMEOUT,
                },
            }
        }
    }

    async fn said(probe: &mut Nvme, timeout: Duration) -> (&'static str, &'static str) {
        let seen = probe.look(timeout).await.unwrap();
        let outcome = probe.judge(seen, tokio::time::Instant::now().into_std()).unwrap();
        (outcome.name(), outcome.reason().map_or("", |reason| reason.code))
    }

    #[tokio::test]
    async fn controllers_of_every_transport_are_shown_with_what_tells_them_apart() {
        let tree = Tree::new();
        let pcie = [
            ("state", "live"),
            ("transport", "pcie"),
            ("address", "0000:01:00.0"),
            ("serial", "PHX1"),
            ("model", "Drive   "),
        ];
        tree.controller("nvme0", &pcie);
        let tcp = [
            ("state", "connecting"),
            ("transport", "tcp"),
            ("address", "traddr=192.168.1.5,trsvcid=4420"),
            ("nvme1c1n1/ana_state", "optimized"),
        ];
        tree.controller("nvme1", &tcp);
        tree.controller("nvme-fabrics", &[("state", "dead")]);
        let mut probe = Nvme::new(&tree.settings(&[], &[], false), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("warning", "Connecting"));
        let observed = probe.observed().unwrap();
        assert_eq!(observed.keys().collect::<Vec<_>>(), ["nvme0", "nvme1"]);
        assert_eq!(observed["nvme0"]["model"], json!("Drive"));
        assert_eq!(observed["nvme1"]["namespaces"], json!(["nvme1c1n1:optimized"]));
        for word in ["nvme0", "PHX1", "01:00.0"] {
            assert_eq!(
                said(&mut Nvme::new(&tree.settings(&[word], &[], false), KnownOf::in_memory()), TIMEOUT).await,
                ("success", ""),
                "{word}"
            );
        }
        assert_eq!(
            said(&mut Nvme::new(&tree.settings(&["192.168.1.*"], &[], false), KnownOf::in_memory()), TIMEOUT).await.0,
            "warning"
        );
        let absent = tree.settings(&["nvme0", "PHX2"], &[], false);
        assert_eq!(said(&mut Nvme::new(&absent, KnownOf::in_memory()), TIMEOUT).await, ("failure", "DeviceGone"));
    }

    #[tokio::test]
    async fn an_excluded_controller_is_never_read_and_a_hung_one_holds_up_nobody() {
        let tree = Tree::new();
        tree.controller("nvme0", &[("state", "live")]);
        // Reading a pipe that nobody writes ends at once; a pipe that somebody holds open is what `state` blocks on.
        tree.controller("nvme1", &[("serial", "X")]);
        mkfifoat(CWD, tree.folder("nvme1").join("state"), Mode::RUSR | Mode::WUSR).unwrap();
        let writer = fs::OpenOptions::new().read(true).write(true).open(tree.folder("nvme1").join("state")).unwrap();
        let mut probe = Nvme::new(&tree.settings(&[], &["nvme1"], false), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
        let mut probe = Nvme::new(&tree.settings(&[], &[], false), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("unknown", "StateUnreadable"));
        assert_eq!(probe.observed().unwrap()["nvme0"]["outcome"], json!("success"));
        drop(writer);
    }

    #[tokio::test]
    async fn a_controller_that_was_live_is_missed_after_a_restart() {
        let tree = Tree::new();
        let state = tempfile::tempdir().unwrap();
        let known = || {
            let known = KnownDevices::load(state.path(), "x.example.com", Path::new("/proc")).unwrap();
            known.of("drives", "all".into())
        };
        for name in ["nvme0", "nvme1"] {
            tree.controller(name, &[("state", "live"), ("serial", name)]);
        }
        let mut probe = Nvme::new(&tree.settings(&[], &[], false), known());
        // A round keeps what the one before has learnt, if the disk is quick enough.
        for _ in 0..100 {
            assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
            if known().devices().len() == 2 {
                break;
            }
        }
        fs::remove_dir_all(tree.folder("nvme1")).unwrap();
        let mut next = Nvme::new(&tree.settings(&[], &[], false), known());
        assert_eq!(said(&mut next, TIMEOUT).await, ("failure", "DeviceGone"));
    }

    #[tokio::test]
    async fn a_serial_number_that_cannot_be_read_is_no_absence() {
        let tree = Tree::new();
        tree.controller("nvme0", &[("state", "live"), ("serial", "PHX1"), ("cntlid", "0")]);
        let mut probe = Nvme::new(&tree.settings(&["PHX1", "nvme*"], &[], false), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
        // A folder in its place cannot be read as a file.
        fs::remove_file(tree.folder("nvme0").join("serial")).unwrap();
        fs::create_dir(tree.folder("nvme0").join("serial")).unwrap();
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
        fs::remove_dir(tree.folder("nvme0").join("serial")).unwrap();
        fs::rename(tree.folder("nvme0"), tree.folder("nvme5")).unwrap();
        tree.controller("nvme5", &[("serial", "PHX1")]);
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""), "back under another name");
        tree.controller("nvme5", &[("serial", "PHX2")]);
        assert_eq!(said(&mut probe, TIMEOUT).await, ("failure", "DeviceGone"));
    }

    #[tokio::test]
    async fn a_lane_that_is_held_is_one_controllers_silence() {
        let tree = Tree::new();
        tree.controller("nvme0", &[("state", "live")]);
        tree.controller("nvme1", &[("state", "live")]);
        let mut probe = Nvme::new(&tree.settings(&[], &[], false), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""));
        let release = probe.lanes.get_mut("nvme1").unwrap().sysfs.hang().await;
        let (long, began) = (Duration::from_secs(600), tokio::time::Instant::now());
        for (silent, outcome) in [(1, "unknown"), (2, "unknown"), (3, "failure")] {
            probe.lanes.get_mut("nvme1").unwrap().sysfs.be_silent(silent);
            assert_eq!(said(&mut probe, long).await, (outcome, "NotAnswering"));
            assert_eq!(probe.observed().unwrap()["nvme0"]["outcome"], json!("success"));
        }
        assert!(began.elapsed() < long / 10, "nobody waits for it again");
        drop(release);
        while probe.lanes["nvme1"].sysfs.is_busy() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(said(&mut probe, TIMEOUT).await, ("success", ""), "and it is back");
    }

    #[tokio::test]
    async fn without_the_right_or_the_device_file_the_state_still_counts() {
        let tree = Tree::new();
        tree.controller("nvme0", &[("state", "live"), ("dev", "1:3")]);
        let mut probe = Nvme::new(&tree.settings(&[], &[], true), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("warning", "SmartNoDevice"));
        fs::create_dir(tree.0.path().join("dev")).unwrap();
        fs::write(tree.0.path().join("dev/nvme0"), "").unwrap();
        assert_eq!(said(&mut probe, TIMEOUT).await, ("warning", "SmartNoDevice"), "a file is no device");
        tree.controller("nvme0", &[("state", "dead")]);
        assert_eq!(said(&mut probe, TIMEOUT).await, ("failure", "ControllerDead"));
    }

    #[tokio::test]
    async fn what_cannot_be_listed_is_unknown_and_what_is_not_there_is_not() {
        let tree = Tree::new();
        let mut probe = Nvme::new(&tree.settings(&[], &[], false), KnownOf::in_memory());
        assert_eq!(said(&mut probe, TIMEOUT).await, ("failure", "NoController"));
        fs::remove_dir_all(tree.0.path().join("class")).unwrap();
        assert_eq!(said(&mut probe, TIMEOUT).await, ("unknown", "SysfsUnreadable"));
        fs::create_dir(tree.0.path().join("class")).unwrap();
        fs::write(tree.0.path().join("class/nvme"), "").unwrap();
        assert_eq!(said(&mut probe, TIMEOUT).await, ("unknown", "SysfsUnreadable"));
    }

    fn read_whole(folder: &Path) -> Controller {
        controller(folder, "nvme0")
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_content_of_any_file_panics(state in any::<Vec<u8>>(), address in any::<Vec<u8>>(), ana in any::<Vec<u8>>()) {
            let tree = Tree::new();
            tree.controller("nvme0", &[("state", ""), ("nvme0n1/ana_state", "")]);
            fs::write(tree.folder("nvme0").join("state"), state).unwrap();
            fs::write(tree.folder("nvme0").join("address"), address).unwrap();
            fs::write(tree.folder("nvme0").join("nvme0n1/ana_state"), ana).unwrap();
            let seen = read_whole(tree.0.path());
            prop_assert!(seen.shown.values().all(|value| !value.chars().any(char::is_control)));
            prop_assert!(list(tree.0.path(), &[], &[]).is_ok());
        }
    }
}
