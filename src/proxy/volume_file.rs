//! The file that keeps the table of volumes over restarts: its form, what a run may believe of what the run before left, and
//! whose the file is when two agents of one driver overlap. Who writes it and when is said in `volumes.rs`.

use crate::kept_file::{KeptFile, LoadError, Version, boot_id, since_boot};
use crate::policy::crashes::Crashes;
use crate::policy::followed::{self, Before};
use crate::policy::volume_place::{Kind, Place, Presence};
use crate::policy::volumes::{Completeness, Gap};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The form's version. A file of another version is set aside.
const SCHEMA: u32 = 1;

/// The table's own bound of 16 MiB, with room for JSON's quotes and escapes.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Written {
    schema: u32,
    driver: String,
    boot_id: String,
    /// The run that wrote it; two agents of one driver overlap in a surge update.
    #[serde(default)]
    owner: String,
    /// When the run ended in good order; missing while it goes on, and after a crash.
    ended_boot_seconds: Option<u64>,
    /// It ended because a part of it failed: the table is whole, and the run counts as a crash.
    #[serde(default)]
    failed: bool,
    crashes_boot_seconds: Vec<u64>,
    gap: Option<String>,
    /// By volume ID, kind and path.
    volumes: BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>>,
}

/// Where the table is kept, and for whom.
#[derive(Debug, Clone)]
pub struct VolumeFile {
    file: KeptFile,
    driver: String,
    boot_id: Option<String>,
    /// This run, unlike any other.
    owner: String,
    held: Arc<Mutex<Held>>,
}

/// Whose the file is, as far as this run knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// Not ours yet. The newest agent takes it from whoever has it.
    NotYet,
    /// Ours, and this is what we wrote last.
    Ours(Option<Version>),
}

/// How far a run has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// It goes on.
    On,
    /// It ends in good order, at this time since the boot in seconds.
    Ended(u64),
    /// Likewise, but because a part of it failed.
    Failed(u64),
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// It is done.
    Ours,
    /// The file is another agent's now, and was left alone.
    Theirs,
}

/// What a previous run left, judged.
#[derive(Debug)]
pub struct Loaded {
    pub(super) places: Vec<Place>,
    pub(super) completeness: Completeness,
    /// Ours in this boot; they decide about a bypass.
    pub crashes: Crashes,
    /// What was set aside, for the log.
    pub trouble: Option<LoadError>,
}

/// What lies at the proxy socket's path before we listen there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing, as after an end in good order.
    Nothing,
    /// A socket that nobody serves: whoever had it was killed.
    Dead,
    /// One that is served: another agent is still there, and hands over to us.
    Served,
}

impl VolumeFile {
    /// The file for `driver` in `folder`.
    pub fn new(folder: &Path, driver: &str, proc_root: &Path) -> Self {
        let file = KeptFile::new(folder.join(format!("{driver}-warden-volumes.json")), MAX_BYTES);
        // Nobody else has this moment, this process number and this address for a local.
        let here = std::ptr::from_ref(&file) as usize;
        let owner = format!("{:x}-{:x}-{here:x}", since_boot().as_nanos(), std::process::id());
        let held = Arc::new(Mutex::new(Held::NotYet));
        Self { file, driver: driver.to_owned(), boot_id: boot_id(proc_root), owner, held }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// What the previous run left. Never fails: what is odd is set aside, and the table is then not complete. Blocks as long as
    /// the file system does.
    pub fn load(&self, left: Left) -> Loaded {
        self.judge(since_boot().as_secs(), left)
    }

    /// What the previous run left, as [`Self::load`], and the file is ours from then on: an agent that had it writes it no
    /// more, and none of its writes comes after what is read here.
    pub fn take_over(&self, left: Left) -> Loaded {
        let _lock = self.file.lock();
        let loaded = self.load(left);
        // If it cannot be written, the next write takes it.
        drop(self.write(&loaded.places, loaded.completeness, &loaded.crashes, Run::On));
        loaded
    }

    /// Takes the file back from an agent that had taken it from us; what it left. `None` if nobody had it.
    pub(super) fn take_back(&self, crashes: &Crashes) -> Option<Vec<Place>> {
        let _lock = self.file.lock();
        if self.is_ours() {
            return None;
        }
        // Whatever its end, it may have heard more than it wrote.
        let Loaded { places, .. } = self.load(Left::Nothing);
        drop(self.write(&places, Completeness::Incomplete(Gap::NotFollowed), crashes, Run::On));
        Some(places)
    }

    /// Whether nobody else has written the file since we did. To be asked with the folder locked.
    fn is_ours(&self) -> bool {
        let Held::Ours(known) = *self.held() else { return true };
        match self.file.version() {
            None => true,
            version if version == known => true,
            // Somebody may have put our own back, or something odd, which is set aside.
            Some(_) => self.read().ok().flatten().is_none_or(|written| written.owner == self.owner),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn judge(&self, now: u64, left: Left) -> Loaded {
        let loaded = |before, places, crashes, trouble| Loaded {
            places,
            // Without a boot ID an older boot's word could pass for this one's.
            completeness: match self.boot_id {
                Some(_) => followed::completeness(before, now),
                None => Completeness::Incomplete(Gap::NotFollowed),
            },
            crashes,
            trouble,
        };
        let written = match self.read() {
            Ok(Some(written)) => written,
            Ok(None) => return loaded(Before::Nothing, Vec::new(), Crashes::default(), None),
            Err(trouble) => return loaded(Before::Odd, Vec::new(), Crashes::default(), Some(trouble)),
        };
        if Some(&written.boot_id) != self.boot_id.as_ref() {
            return loaded(Before::OtherBoot, Vec::new(), Crashes::default(), None);
        }
        let Some((places, completeness)) = written.table() else {
            let trouble = self.file.set_aside("has words of another version".to_owned());
            return loaded(Before::Odd, Vec::new(), Crashes::default(), Some(trouble));
        };
        let ended = written.ended_boot_seconds;
        let crashed = ended.is_none() && left != Left::Served || written.failed;
        let crashed = crashed.then_some(written.crashes_boot_seconds.as_slice());
        let before = match (ended, left) {
            // An end in good order removes the socket: this is the word of a run before the last, which could write none of its own.
            (Some(_), Left::Dead | Left::Served) => Before::Odd,
            (_, Left::Nothing | Left::Dead | Left::Served) => Before::ThisBoot { ended, completeness },
        };
        loaded(before, places, Crashes::at_start(crashed, now), None)
    }

    fn read(&self) -> Result<Option<Written>, LoadError> {
        let Some(text) = self.file.read()? else { return Ok(None) };
        let written: Written = serde_json::from_slice(&text)
            .map_err(|error| self.file.set_aside(format!("is no table of volumes ({error})")))?;
        if written.schema != SCHEMA {
            return Err(self.file.set_aside(format!("has schema {}, not {SCHEMA}", written.schema)));
        }
        if written.driver != self.driver {
            return Err(self.file.set_aside(format!("is of the driver {:?}", written.driver)));
        }
        Ok(Some(written))
    }

    /// Writes in a file of an earlier run that volumes were not followed since, before a run that does not proxy. Makes none.
    ///
    /// # Errors
    /// The operating system's.
    pub fn leave_gap(&self) -> io::Result<()> {
        let _lock = self.file.lock();
        let Loaded { places, crashes, .. } = match self.read() {
            Ok(None) => return Ok(()),
            Ok(Some(_)) | Err(_) => self.load(Left::Nothing),
        };
        let ended = Run::Ended(since_boot().as_secs());
        self.write(&places, Completeness::Incomplete(Gap::NotFollowed), &crashes, ended)
    }

    /// Gives a file that could not be kept up to date another name, if there is one and it is not another agent's.
    pub(super) fn distrust(&self) {
        let _lock = self.file.lock();
        if self.path().exists() && self.is_ours() {
            drop(self.file.set_aside("could not be kept up to date".to_owned()));
        }
    }

    pub(super) fn save(
        &self,
        places: &[Place],
        completeness: Completeness,
        crashes: &Crashes,
        run: Run,
    ) -> io::Result<Saved> {
        let _lock = self.file.lock();
        if !self.is_ours() {
            return Ok(Saved::Theirs);
        }
        self.write(places, completeness, crashes, run).map(|()| Saved::Ours)
    }

    fn write(&self, places: &[Place], completeness: Completeness, crashes: &Crashes, run: Run) -> io::Result<()> {
        let Some(boot_id) = self.boot_id.clone() else {
            return Err(io::Error::other(
                "the boot's ID is unknown, so the table could not be told from an older boot's",
            ));
        };
        let mut volumes: BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>> = BTreeMap::new();
        for place in places {
            let kinds = volumes.entry(place.volume.clone()).or_default();
            let paths = kinds.entry(place.kind.name().to_owned()).or_default();
            paths.insert(place.path.clone(), place.presence.name().to_owned());
        }
        let written = Written {
            schema: SCHEMA,
            driver: self.driver.clone(),
            boot_id,
            owner: self.owner.clone(),
            ended_boot_seconds: match run {
                Run::On => None,
                Run::Ended(at) | Run::Failed(at) => Some(at),
            },
            failed: matches!(run, Run::Failed(_)),
            crashes_boot_seconds: crashes.seconds().to_vec(),
            gap: match completeness {
                Completeness::Complete => None,
                Completeness::Incomplete(gap) => Some(gap.name().to_owned()),
            },
            volumes,
        };
        self.file.replace(&serde_json::to_vec_pretty(&written).map_err(io::Error::other)?)?;
        *self.held() = Held::Ours(self.file.version());
        Ok(())
    }
}

impl Written {
    /// `None` if a word is not known.
    fn table(&self) -> Option<(Vec<Place>, Completeness)> {
        let completeness = match self.gap.as_deref() {
            None => Completeness::Complete,
            Some(gap) => Completeness::Incomplete(Gap::named(gap)?),
        };
        let mut places = Vec::new();
        for (volume, kinds) in &self.volumes {
            for (kind, paths) in kinds {
                for (path, presence) in paths {
                    let (kind, presence) = (Kind::named(kind)?, Presence::named(presence)?);
                    places.push(Place { volume: volume.clone(), kind, path: path.clone(), presence });
                }
            }
        }
        Some((places, completeness))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::kubelet_records::Records;
    use super::super::volumes::{Volumes, begin};
    use super::*;
    use crate::policy::volumes::{InUse, VolumeTable};
    use std::fs;
    use std::os::unix::fs::symlink;
    use tokio_util::sync::CancellationToken;

    pub(crate) const DRIVER: &str = "x.example.com";
    const DAY: u64 = 86_400;

    pub(crate) struct Bed(pub(crate) tempfile::TempDir);

    impl Bed {
        pub(crate) fn new() -> Self {
            let bed = Self(tempfile::tempdir().unwrap());
            bed.boot("first");
            bed
        }

        fn boot(&self, id: &str) {
            let folder = self.0.path().join("sys/kernel/random");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("boot_id"), id).unwrap();
        }

        pub(crate) fn file(&self) -> VolumeFile {
            VolumeFile::new(self.0.path(), DRIVER, self.0.path())
        }

        fn save(&self, ended: Option<u64>) {
            let ended = ended.map_or(Run::On, Run::Ended);
            self.file().save(&[place()], Completeness::Complete, &Crashes::default(), ended).unwrap();
        }
    }

    fn place() -> Place {
        Place { volume: "v\u{0}\"".into(), kind: Kind::Staged, path: "/s".into(), presence: Presence::Leaving }
    }

    #[test]
    fn table_comes_back_after_a_good_end_and_is_not_complete_after_any_other() {
        let bed = Bed::new();
        for (ended, completeness, crashes) in
            [(Some(DAY), Completeness::Complete, 0), (None, Completeness::Incomplete(Gap::AgentDied), 1)]
        {
            bed.save(ended);
            let loaded = bed.file().judge(DAY + 5, Left::Nothing);
            assert_eq!((&loaded.places, loaded.completeness), (&vec![place()], completeness));
            assert_eq!(loaded.crashes.seconds().len(), crashes);
            assert!(loaded.trouble.is_none());
        }
    }

    #[test]
    fn a_run_that_ends_by_a_failure_of_its_own_counts_as_a_crash_and_leaves_a_whole_table() {
        let bed = Bed::new();
        let mut crashes = Crashes::default();
        for number in 1..=3 {
            let at = DAY + number;
            bed.file().write(&[place()], Completeness::Complete, &crashes, Run::Failed(at)).unwrap();
            let loaded = bed.file().judge(at, Left::Nothing);
            assert_eq!((loaded.completeness, loaded.crashes.bypass()), (Completeness::Complete, number == 3));
            crashes = loaded.crashes;
        }
    }

    #[test]
    fn after_a_reboot_nothing_is_in_use() {
        let bed = Bed::new();
        bed.save(None);
        bed.boot("second");
        let loaded = bed.file().judge(60, Left::Nothing);
        assert!(!loaded.crashes.bypass() && loaded.crashes.seconds().is_empty());
        assert_eq!(begin(loaded, &Records::default(), Some(true)).in_use(), InUse::No);
        let late = bed.file().judge(DAY, Left::Nothing);
        assert_eq!(begin(late, &Records::default(), Some(true)).in_use(), InUse::Unknown);
    }

    #[test]
    fn a_socket_that_was_left_behind_belies_a_good_end_and_one_that_is_served_is_no_crash() {
        let bed = Bed::new();
        bed.save(Some(DAY));
        let in_use = |left| begin(bed.file().judge(DAY, left), &Records::default(), Some(true)).completeness();
        assert_eq!(in_use(Left::Nothing), Completeness::Complete);
        for left in [Left::Dead, Left::Served] {
            assert_eq!(in_use(left), Completeness::Incomplete(Gap::NotFollowed), "{left:?}");
        }
        bed.save(None);
        assert_eq!(bed.file().judge(DAY, Left::Dead).crashes.seconds().len(), 1);
        assert!(bed.file().judge(DAY, Left::Served).crashes.seconds().is_empty(), "a surge update");
    }

    #[test]
    fn of_two_agents_only_the_one_that_took_the_file_last_writes_it() {
        let bed = Bed::new();
        let (old, new) = (bed.file(), bed.file());
        let save = |file: &VolumeFile, places: &[Place]| {
            file.save(places, Completeness::Complete, &Crashes::default(), Run::Ended(since_boot().as_secs())).unwrap()
        };
        let text = || fs::read_to_string(bed.file().path()).unwrap();
        old.take_over(Left::Nothing);
        assert_eq!(save(&old, &[place()]), Saved::Ours);
        assert_eq!(new.take_over(Left::Served).places, [place()]);
        let before = text();
        assert!(before.contains("\"endedBootSeconds\": null"), "it goes on: {before}");
        assert_eq!(save(&old, &[]), Saved::Theirs, "the last words of the one that handed over");
        old.distrust();
        assert_eq!(text(), before);
        assert_eq!(save(&new, &[place(), Place { path: "/t".into(), ..place() }]), Saved::Ours);

        assert_eq!(new.take_back(&Crashes::default()), None, "nobody had it");
        assert_eq!(old.take_back(&Crashes::default()).unwrap().len(), 2, "with what the other one saw");
        assert!(text().contains("notFollowed"));
        assert_eq!(save(&new, &[]), Saved::Theirs);
        let copy = fs::read(old.path()).unwrap();
        fs::remove_file(old.path()).unwrap();
        fs::write(old.path(), copy).unwrap();
        assert_eq!(save(&old, &[]), Saved::Ours, "its own words, put back by somebody");
        fs::remove_file(old.path()).unwrap();
        assert_eq!(save(&old, &[]), Saved::Ours, "gone, and nobody's");
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_kept_up_to_date_is_set_aside() {
        let bed = Bed::new();
        bed.save(Some(DAY));
        // It cannot be written without the boot's ID.
        let lost = VolumeFile { boot_id: None, ..bed.file() };
        let stop = CancellationToken::new();
        stop.cancel();
        Volumes::new(VolumeTable::new(Completeness::Complete)).keep(lost, Crashes::default(), stop, || false).await;
        assert!(!bed.file().path().exists());
        assert!(bed.file().path().with_extension("json.odd-1").exists(), "and nothing is lost");
    }

    #[test]
    fn without_a_boot_id_nothing_is_believed() {
        let bed = Bed::new();
        bed.save(Some(DAY));
        let lost = VolumeFile { boot_id: None, ..bed.file() };
        assert_eq!(lost.judge(DAY, Left::Nothing).completeness, Completeness::Incomplete(Gap::NotFollowed));
        assert!(lost.save(&[], Completeness::Complete, &Crashes::default(), Run::On).is_err());
    }

    #[test]
    fn odd_files_are_set_aside_never_followed_and_never_fatal() {
        let bed = Bed::new();
        let path = bed.file().path().to_owned();
        let precious = bed.0.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        let text = |from: &str, to: &str| {
            bed.save(Some(DAY));
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(from), "{text}");
            fs::write(&path, text.replace(from, to)).unwrap();
        };
        type Make<'a> = Box<dyn Fn() + 'a>;
        let odd: [(&str, Make<'_>); 8] = [
            ("is no table", Box::new(|| fs::write(&path, "{\"schema\":").unwrap())),
            ("is no table", Box::new(|| text("\"gap\"", "\"gab\""))),
            ("has schema 2", Box::new(|| text("\"schema\": 1", "\"schema\": 2"))),
            ("is of the driver", Box::new(|| text(DRIVER, "y.example.com"))),
            ("words of another version", Box::new(|| text("leaving", "flying"))),
            ("over 67108864 bytes", Box::new(|| fs::File::create(&path).unwrap().set_len(MAX_BYTES + 1).unwrap())),
            ("is a link", Box::new(|| symlink(&precious, &path).unwrap())),
            ("not a regular file", Box::new(|| fs::create_dir(&path).unwrap())),
        ];
        for (problem, make) in odd {
            make();
            let loaded = bed.file().judge(60, Left::Nothing);
            let trouble = loaded.trouble.as_ref().unwrap().to_string();
            assert!(trouble.contains(problem) && trouble.contains(".json.odd-"), "{trouble}");
            assert!(loaded.places.is_empty());
            assert_eq!(loaded.completeness, Completeness::Incomplete(Gap::NotFollowed));
            assert!(!path.exists());
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn a_run_that_does_not_proxy_leaves_a_gap_but_no_file_of_its_own() {
        let bed = Bed::new();
        bed.file().leave_gap().unwrap();
        assert!(!bed.file().path().exists());
        bed.save(Some(since_boot().as_secs()));
        bed.file().leave_gap().unwrap();
        let loaded = bed.file().load(Left::Nothing);
        assert_eq!((loaded.completeness, loaded.places.len()), (Completeness::Incomplete(Gap::NotFollowed), 1));
    }

    #[test]
    fn the_kubelets_records_do_not_tell_of_inline_volumes_so_what_nobody_followed_is_not_complete() {
        let bed = Bed::new();
        let records = Records { all: true, ..Records::default() };
        assert_eq!(begin(bed.file().judge(DAY, Left::Nothing), &records, Some(true)).in_use(), InUse::Unknown);
        bed.save(Some(1));
        let table = begin(bed.file().judge(DAY, Left::Nothing), &records, Some(true));
        assert_eq!(table.completeness(), Completeness::Incomplete(Gap::NotFollowed), "away for a day");
    }
}
