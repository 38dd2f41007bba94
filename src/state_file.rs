//! The verdict, kept over our own restarts: one small JSON file, valid for this boot and these probes only.

use crate::kept_file::{KeptFile, LoadError};
use crate::policy::health::Past;
use crate::policy::outcome::Health;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// The form's version. A file of another version is set aside.
const SCHEMA: u32 = 1;

/// Where the verdict is kept, and what it is valid for.
#[derive(Debug, Clone)]
pub struct StateFile {
    file: KeptFile,
    driver: String,
    boot_id: Option<String>,
    /// What the probes assert, in words. Another set of probes is another verdict.
    probes: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Written {
    schema: u32,
    driver: String,
    boot_id: String,
    probes: String,
    health: String,
    /// Seconds since boot; the wall clock may be stepped.
    since_boot_seconds: f64,
    verdicts: BTreeMap<String, String>,
    outages_boot_seconds: Vec<f64>,
    reason: Option<String>,
}

impl StateFile {
    /// The file for `driver` in `folder`. `probes` says what is watched, and how.
    pub fn new(folder: &Path, driver: &str, probes: String, proc_root: &Path) -> Self {
        let boot_id = fs::read_to_string(proc_root.join("sys/kernel/random/boot_id")).ok();
        let boot_id = boot_id.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        let file = KeptFile::new(folder.join(format!("{driver}-warden.json")));
        Self { file, driver: driver.to_owned(), boot_id, probes }
    }

    /// Other probes from now on: what is saved next is valid for them.
    pub fn watch_others(&mut self, probes: String) {
        self.probes = probes;
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The verdict of our previous run, if it was in this boot, for this driver and with the same probes.
    ///
    /// # Errors
    /// When something is there that is not a state file of ours. It is set aside; the caller goes on without.
    pub fn load(&self, now: Instant) -> Result<Option<Past>, LoadError> {
        let Some(text) = self.file.load()? else { return Ok(None) };
        let written: Written = match serde_json::from_slice(&text) {
            Ok(written) => written,
            Err(error) => return Err(self.file.set_aside(format!("is no state file ({error})"))),
        };
        if written.schema != SCHEMA {
            return Err(self.file.set_aside(format!("has schema {}, not {SCHEMA}", written.schema)));
        }
        let same = Some(&written.boot_id) == self.boot_id.as_ref()
            && written.driver == self.driver
            && written.probes == self.probes;
        if !same {
            return Ok(None);
        }
        let Some(health) = health(&written.health) else {
            return Err(self.file.set_aside(format!("has the unknown verdict {:?}", written.health)));
        };
        let clock = BootClock::read(now);
        Ok(Some(Past {
            health,
            since: clock.instant(written.since_boot_seconds),
            probes: written
                .verdicts
                .into_iter()
                .filter_map(|(name, word)| Some((name, self::health(&word)?)))
                .collect(),
            falls: written.outages_boot_seconds.into_iter().map(|seconds| clock.instant(seconds)).collect(),
        }))
    }

    /// Writes the verdict in one step, and makes the folder if only it is missing. Blocks as long as the file system does.
    ///
    /// # Errors
    /// The operating system's. Nothing is lost but the memory of this verdict.
    pub fn save(&self, past: &Past, reason: Option<String>, now: Instant) -> io::Result<()> {
        let Some(boot_id) = self.boot_id.clone() else {
            return Err(io::Error::other(
                "the boot's ID is unknown, so the verdict could not be told from an older boot's",
            ));
        };
        let clock = BootClock::read(now);
        let written = Written {
            schema: SCHEMA,
            driver: self.driver.clone(),
            boot_id,
            probes: self.probes.clone(),
            health: past.health.name().to_owned(),
            since_boot_seconds: clock.seconds(past.since),
            verdicts: past.probes.iter().map(|(name, health)| (name.clone(), health.name().to_owned())).collect(),
            outages_boot_seconds: past.falls.iter().map(|fall| clock.seconds(*fall)).collect(),
            reason,
        };
        let text = serde_json::to_vec_pretty(&written).map_err(io::Error::other)?;
        self.file.save(&text)
    }
}

fn health(word: &str) -> Option<Health> {
    [Health::Unknown, Health::Healthy, Health::Unhealthy].into_iter().find(|health| health.name() == word)
}

/// Both clocks at one moment. The boot clock goes on over our restarts, the monotonic one has no zero that a file could name.
struct BootClock {
    now: Instant,
    boot: Duration,
}

impl BootClock {
    fn read(now: Instant) -> Self {
        let time = clock_gettime(ClockId::Boottime);
        let boot = Duration::new(
            u64::try_from(time.tv_sec).unwrap_or_default(),
            u32::try_from(time.tv_nsec).unwrap_or_default(),
        );
        Self { now, boot }
    }

    /// A moment in the future, or nonsense, is now: it can only make us wait longer.
    fn instant(&self, boot_seconds: f64) -> Instant {
        let then = Duration::try_from_secs_f64(boot_seconds).unwrap_or(self.boot);
        self.now.checked_sub(self.boot.saturating_sub(then)).unwrap_or(self.now)
    }

    fn seconds(&self, instant: Instant) -> f64 {
        self.boot.saturating_sub(self.now.saturating_duration_since(instant)).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use std::os::unix::fs::symlink;

    struct Bed {
        folder: tempfile::TempDir,
        now: Instant,
    }

    impl Bed {
        fn new() -> Self {
            let bed = Self { folder: tempfile::tempdir().unwrap(), now: some_instant() };
            bed.boot("first");
            bed
        }

        fn boot(&self, id: &str) {
            let folder = self.folder.path().join("sys/kernel/random");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("boot_id"), format!("{id}\n")).unwrap();
        }

        fn state(&self, probes: &str) -> StateFile {
            StateFile::new(self.folder.path(), "x.example.com", probes.to_owned(), self.folder.path())
        }

        fn past(&self) -> Past {
            Past {
                health: Health::Unhealthy,
                since: self.now,
                probes: vec![("health-file".into(), Health::Unhealthy)],
                falls: vec![self.now],
            }
        }

        fn names(&self) -> Vec<String> {
            let mut names: Vec<String> = fs::read_dir(self.folder.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        }
    }

    #[test]
    fn verdict_comes_back_in_the_same_boot_with_the_same_probes() {
        let bed = Bed::new();
        bed.state("p").save(&bed.past(), Some("PortDown".into()), bed.now).unwrap();
        let back = bed.state("p").load(bed.now).unwrap().unwrap();
        assert_eq!((back.health, back.probes), (Health::Unhealthy, bed.past().probes));
        assert!(bed.now.saturating_duration_since(back.falls[0]) < Duration::from_secs(5));
        assert_eq!(bed.names(), ["sys", "x.example.com-warden.json"], "nothing is left beside it");
    }

    #[test]
    fn a_missing_folder_is_made_but_not_its_parents() {
        let bed = Bed::new();
        let state = |folder: &str| StateFile::new(&bed.folder.path().join(folder), "x", "p".into(), bed.folder.path());
        state("made").save(&bed.past(), None, bed.now).unwrap();
        assert!(state("made").load(bed.now).unwrap().is_some());
        assert!(state("no/parent").save(&bed.past(), None, bed.now).is_err());
    }

    #[test]
    fn another_boot_other_probes_or_another_driver_begin_afresh() {
        let bed = Bed::new();
        bed.state("p").save(&bed.past(), None, bed.now).unwrap();
        assert_eq!(bed.state("q").load(bed.now).unwrap(), None);
        let other = StateFile { driver: "y".into(), ..bed.state("p") };
        assert_eq!(other.load(bed.now).unwrap(), None);
        bed.boot("second");
        assert_eq!(bed.state("p").load(bed.now).unwrap(), None);
    }

    #[test]
    fn odd_files_are_set_aside_and_never_followed() {
        let bed = Bed::new();
        let state = bed.state("p");
        let precious = bed.folder.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        type Make<'a> = Box<dyn Fn() + 'a>;
        let odd: [(&str, Make<'_>); 5] = [
            ("is no state file", Box::new(|| fs::write(state.path(), "{\"schema\":").unwrap())),
            ("is no state file", Box::new(|| fs::write(state.path(), "").unwrap())),
            ("over 65536 bytes", Box::new(|| fs::write(state.path(), vec![b' '; 70_000]).unwrap())),
            ("is a link", Box::new(|| symlink(&precious, state.path()).unwrap())),
            ("not a regular file", Box::new(|| fs::create_dir(state.path()).unwrap())),
        ];
        for (number, (problem, make)) in odd.iter().enumerate() {
            make();
            let error = state.load(bed.now).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
            assert!(
                bed.names().contains(&format!("x.example.com-warden.json.odd-{}", number + 1)),
                "{:?}",
                bed.names()
            );
            state.save(&bed.past(), None, bed.now).unwrap();
            assert!(state.load(bed.now).unwrap().is_some());
            fs::remove_file(state.path()).unwrap();
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn without_a_boot_id_nothing_is_kept_and_nothing_is_believed() {
        let bed = Bed::new();
        bed.state("p").save(&bed.past(), None, bed.now).unwrap();
        let lost = StateFile { boot_id: None, ..bed.state("p") };
        assert_eq!(lost.load(bed.now).unwrap(), None);
        assert!(lost.save(&bed.past(), None, bed.now).is_err());
    }

    #[test]
    fn moments_that_cannot_be_are_now() {
        let bed = Bed::new();
        let clock = BootClock { now: bed.now, boot: Duration::from_secs(100) };
        for seconds in [f64::NAN, f64::INFINITY, -1.0, 1e300, 101.0] {
            assert_eq!(clock.instant(seconds), bed.now, "{seconds}");
        }
    }
}
