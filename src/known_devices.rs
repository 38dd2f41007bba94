//! NVMe controllers and GPUs that were seen good, over restarts of the agent within one boot: one small JSON file beside the state
//! file, shared by all probes. What one boot has is no promise of the next, as drives are connected and cards moved; who is to be
//! missed then is named in the settings.

use crate::kept_file::{KeptFile, LoadError, boot_id};
use crate::policy::devices::Good;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The form's version. A file of another version is set aside.
const SCHEMA: u32 = 1;

/// Over a thousand devices take less.
const MAX_BYTES: u64 = 512 * 1024;

/// Devices by what stays of each when its name changes.
pub type Devices = BTreeMap<String, Good>;

/// What is known good, and where it is kept.
#[derive(Debug, Clone, Default)]
pub struct KnownDevices {
    known: Arc<Mutex<Known>>,
    /// Held from the look at what is known until it is written: each probe writes from a lane of its own, and the last must have all.
    saving: Arc<Mutex<()>>,
    file: Option<KeptFile>,
    boot_id: Option<String>,
}

/// By the names of probes.
#[derive(Debug, Default)]
struct Known {
    /// Of the run before, until the probe is there.
    before: BTreeMap<String, Of>,
    now: BTreeMap<String, Of>,
}

#[derive(Debug)]
struct Of {
    /// What the probe selects, in words: of another selection nothing is missed.
    selects: String,
    devices: Devices,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Written {
    schema: u32,
    boot_id: String,
    probes: BTreeMap<String, WrittenOf>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WrittenOf {
    selects: String,
    devices: BTreeMap<String, WrittenGood>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WrittenGood {
    name: String,
    pci: Option<String>,
}

/// What one probe knows.
#[derive(Debug, Clone)]
pub struct KnownOf {
    all: KnownDevices,
    probe: String,
}

impl KnownDevices {
    /// What `driver`'s agents have seen good since this machine's boot, kept in `folder`.
    ///
    /// # Errors
    /// When something is there that is not ours. It is set aside, and nothing is known: use [`Self::afresh`].
    pub fn load(folder: &Path, driver: &str, proc_root: &Path) -> Result<Self, LoadError> {
        let devices = Self::afresh(folder, driver, proc_root);
        if let Some(file) = &devices.file
            && let Some(text) = file.read()?
        {
            let written = parse(&text).map_err(|problem| file.set_aside(problem))?;
            if Some(&written.boot_id) == devices.boot_id.as_ref() {
                devices.lock().before = written.probes.into_iter().map(|(probe, of)| (probe, of.into())).collect();
            }
        }
        Ok(devices)
    }

    /// Nothing is known yet; it will be kept in `folder`.
    pub fn afresh(folder: &Path, driver: &str, proc_root: &Path) -> Self {
        let file = KeptFile::new(folder.join(format!("{driver}-warden-devices.json")), MAX_BYTES);
        Self { file: Some(file), boot_id: boot_id(proc_root), ..Self::default() }
    }

    /// Within this process only.
    pub fn in_memory() -> Self {
        Self::default()
    }

    /// What `probe` knows. Once it `selects` otherwise than before, that is nothing.
    pub fn of(&self, probe: &str, selects: String) -> KnownOf {
        let mut known = self.lock();
        let before = known.before.remove(probe).or_else(|| known.now.remove(probe));
        let of = before.filter(|of| of.selects == selects).unwrap_or(Of { selects, devices: Devices::new() });
        known.now.insert(probe.to_owned(), of);
        KnownOf { all: self.clone(), probe: probe.to_owned() }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Whoever panicked changed whole entries only.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KnownOf {
    /// For a probe that is alone, within this process only.
    pub fn in_memory() -> Self {
        KnownDevices::in_memory().of("", String::new())
    }

    /// The devices.
    pub fn devices(&self) -> Devices {
        self.all.lock().now.get(&self.probe).map(|of| of.devices.clone()).unwrap_or_default()
    }

    /// Takes over what the probe knows now. Whether that is news.
    pub fn learn<'a>(&self, devices: impl Iterator<Item = (&'a String, &'a Good)> + Clone) -> bool {
        let mut known = self.all.lock();
        let Some(of) = known.now.get_mut(&self.probe) else { return false };
        let mut count = 0;
        let kept = devices.clone().inspect(|_| count += 1).all(|(id, good)| of.devices.get(id) == Some(good));
        let news = !kept || count != of.devices.len();
        if news {
            of.devices = devices.map(|(id, good)| (id.clone(), good.clone())).collect();
        }
        news
    }

    /// The file, if there is one.
    pub fn path(&self) -> Option<&Path> {
        self.all.file.as_ref().map(KeptFile::path)
    }

    /// Writes what all probes know in one step. Blocks as long as the file system does.
    ///
    /// # Errors
    /// The operating system's. Nothing is lost but the memory over a restart.
    pub fn save(&self) -> io::Result<()> {
        let Some(file) = &self.all.file else { return Ok(()) };
        let boot_id = self.all.boot_id.clone();
        let boot_id = boot_id.ok_or_else(|| io::Error::other("the boot's ID is unknown"))?;
        let _saving = self.all.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let probes = self.all.lock().now.iter().map(|(probe, of)| (probe.clone(), of.into())).collect();
        let text = serde_json::to_vec_pretty(&Written { schema: SCHEMA, boot_id, probes }).map_err(io::Error::other)?;
        if u64::try_from(text.len()).is_ok_and(|length| length > MAX_BYTES) {
            return Err(io::Error::other("there are too many devices"));
        }
        file.replace(&text)
    }
}

impl From<&Of> for WrittenOf {
    fn from(of: &Of) -> Self {
        let good = |good: &Good| WrittenGood { name: good.name.clone(), pci: good.pci.clone() };
        let devices = of.devices.iter().map(|(lasting, one)| (lasting.clone(), good(one))).collect();
        Self { selects: of.selects.clone(), devices }
    }
}

impl From<WrittenOf> for Of {
    fn from(of: WrittenOf) -> Self {
        let good = |good: WrittenGood| Good { name: good.name, pci: good.pci };
        let devices = of.devices.into_iter().map(|(lasting, one)| (lasting, good(one))).collect();
        Self { selects: of.selects, devices }
    }
}

fn parse(text: &[u8]) -> Result<Written, String> {
    let written: Written = serde_json::from_slice(text).map_err(|error| format!("is no list of devices ({error})"))?;
    if written.schema != SCHEMA {
        return Err(format!("has schema {}, not {SCHEMA}", written.schema));
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn boot(root: &Path, id: &str) {
        let folder = root.join("sys/kernel/random");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("boot_id"), id).unwrap();
    }

    #[test]
    fn devices_come_back_in_the_same_boot_for_the_same_selection_and_anything_odd_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        boot(folder.path(), "first");
        let load = || KnownDevices::load(folder.path(), "x.example.com", folder.path());
        let drives = load().unwrap().of("drives", "all".into());
        let good = Good { name: "nvme0".into(), pci: Some("0000:01:00.0".into()) };
        let known = Devices::from([("nqn PHX1 0".to_owned(), good)]);
        assert!(drives.learn(known.iter()) && !drives.learn(known.iter()));
        drives.save().unwrap();
        let again = load().unwrap();
        assert_eq!(again.of("drives", "all".into()).devices(), known);
        assert_eq!(again.of("drives", "all".into()).devices(), known, "settings that changed elsewhere");
        assert_eq!(again.of("drives", "some".into()).devices(), Devices::new(), "another selection");
        assert_eq!(load().unwrap().of("others", "all".into()).devices(), Devices::new());
        boot(folder.path(), "second");
        assert_eq!(load().unwrap().of("drives", "all".into()).devices(), Devices::new(), "another boot");
        assert!(drives.path().unwrap().exists());
        for odd in ["", "{}", r#"{"schema": 2, "bootId": "second", "probes": {}}"#] {
            fs::write(drives.path().unwrap(), odd).unwrap();
            assert!(load().unwrap_err().to_string().contains("set aside"), "{odd}");
            assert!(!drives.path().unwrap().exists());
        }
    }

    #[test]
    fn what_two_probes_learn_at_once_is_kept_of_both() {
        let folder = tempfile::tempdir().unwrap();
        boot(folder.path(), "first");
        let load = || KnownDevices::load(folder.path(), "x.example.com", folder.path()).unwrap();
        let all = load();
        let probes = ["drives", "cards"].map(|probe| all.of(probe, String::new()));
        for number in 0..300 {
            let known = Devices::from([("a".to_owned(), Good { name: format!("{number}"), pci: None })]);
            std::thread::scope(|scope| {
                for probe in &probes {
                    scope.spawn(|| probe.learn(known.iter()).then(|| probe.save().unwrap()));
                }
            });
            let kept = load();
            for probe in ["drives", "cards"] {
                assert_eq!(kept.of(probe, String::new()).devices(), known, "{probe} after {number}");
            }
        }
    }
}
