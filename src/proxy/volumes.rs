//! The table of volumes: told of every call, and kept over restarts in a file that is written beside the calls, never before one.

use super::kubelet_records::Records;
use crate::kept_file::{KeptFile, LoadError, Version, boot_id, since_boot};
use crate::policy::followed::{self, Before};
use crate::policy::reaction::Crashes;
use crate::policy::volumes::{CallId, Completeness, End, Gap, Kind, Place, Presence, VolumeCall, VolumeTable};
use crate::probe::lane::{Abandoned, Lane};
use crate::quiet::Quiet;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// The form's version. A file of another version is set aside.
const SCHEMA: u32 = 1;

/// The table's own bound of 16 MiB, with room for JSON's quotes and escapes.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

/// How long a write may take before it is left alone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Between two writes: a pod's start changes the table about eight times.
const PAUSE: Duration = Duration::from_millis(50);

/// After a write that failed.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(5);

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
    places: Vec<Place>,
    completeness: Completeness,
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
    fn take_back(&self, crashes: &Crashes) -> Option<Vec<Place>> {
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
    fn distrust(&self) {
        let _lock = self.file.lock();
        if self.path().exists() && self.is_ours() {
            drop(self.file.set_aside("could not be kept up to date".to_owned()));
        }
    }

    fn save(&self, places: &[Place], completeness: Completeness, crashes: &Crashes, run: Run) -> io::Result<Saved> {
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

/// The table to begin with.
///
/// The kubelet's records add what it lacks. They make a table complete that the agent before us could not finish; not one of volumes
/// that nobody followed, since of inline volumes there are no records, and a driver that is withdrawn while a pod has one keeps
/// that pod from ever ending. Of a driver that does not stage (`stages`, from NodeGetCapabilities; `None`: not known) the
/// kubelet keeps records, too, but lets go of them without a call: they count only where there are none.
pub fn begin(loaded: Loaded, records: &Records, stages: Option<bool>) -> VolumeTable {
    let recorded_all = records.all && (stages == Some(true) || records.staged.is_empty());
    let completeness = match loaded.completeness {
        // An inline volume of the last moment, before it was written down, could still be missing: 50 ms. A file that could
        // not be kept up to date is set aside as soon as that is seen.
        Completeness::Incomplete(Gap::AgentDied) if recorded_all => Completeness::Complete,
        Completeness::Complete
        | Completeness::Incomplete(Gap::NotFollowed | Gap::AgentDied | Gap::Undecodable | Gap::Full) => {
            loaded.completeness
        }
    };
    let mut table = VolumeTable::with(loaded.places, completeness);
    if stages == Some(true) {
        table.add_recorded(records.staged.iter().cloned());
    }
    table
}

/// The table, for all who see calls. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Volumes {
    table: Arc<Mutex<VolumeTable>>,
    changed: watch::Sender<u64>,
    /// Counts the times at which the proxy socket was put back: another agent may have had the calls before.
    put_back: watch::Sender<u64>,
}

/// A call between its begin and its end. Dropped without [`Self::ended`], its answer counts as lost.
#[derive(Debug)]
#[must_use = "a call that is dropped counts as lost"]
pub struct CallUnderWay {
    volumes: Volumes,
    id: Option<CallId>,
    /// A volume, a target and a mark: a good answer tells that it is published there.
    asked: Option<(String, String, u64)>,
}

impl CallUnderWay {
    /// The driver answered with this gRPC status code.
    pub fn ended(mut self, code: i32) {
        self.tell(End::Code(code));
        if code == 0
            && let Some((volume, target, mark)) = self.asked.take()
        {
            self.volumes.change(|table| table.answered_at(volume, target, mark));
        }
    }

    fn tell(&mut self, end: End) {
        if let Some(id) = self.id.take() {
            self.volumes.change(|table| table.end(id, end));
        }
    }
}

impl Drop for CallUnderWay {
    fn drop(&mut self) {
        self.tell(End::Lost);
    }
}

impl Volumes {
    /// Handles to `table`.
    pub fn new(table: VolumeTable) -> Self {
        Self { table: Arc::new(Mutex::new(table)), changed: watch::channel(0).0, put_back: watch::channel(0).0 }
    }

    /// Takes note of a call that is about to be forwarded; never waits.
    pub fn begin(&self, call: &VolumeCall) -> CallUnderWay {
        let id = self.change(|table| table.begin(call));
        CallUnderWay { volumes: self.clone(), id: Some(id), asked: None }
    }

    /// Whether the driver's answers about volumes could tell the table something.
    pub fn can_learn(&self) -> bool {
        self.look(VolumeTable::can_learn)
    }

    /// A question about a volume published at `target` is about to be forwarded.
    pub fn ask(&self, volume: String, target: String) -> Option<CallUnderWay> {
        let mark = self.look(|table| table.could_learn(&volume, &target))?;
        Some(CallUnderWay { volumes: self.clone(), id: None, asked: Some((volume, target, mark)) })
    }

    /// Changes the table, and has it written if a file would show that.
    pub fn change<T>(&self, change: impl FnOnce(&mut VolumeTable) -> T) -> T {
        let value = change(&mut self.lock());
        self.changed.send_modify(|changes| *changes = changes.wrapping_add(1));
        value
    }

    /// Looks at the table.
    pub fn look<T>(&self, look: impl FnOnce(&VolumeTable) -> T) -> T {
        look(&self.lock())
    }

    /// Tells of every change, also of those that a file would not show. The value means nothing.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Another agent has the calls now.
    pub fn handed_over(&self) {
        if self.look(|table| table.completeness() == Completeness::Complete) {
            self.change(VolumeTable::not_followed);
        }
    }

    /// Calls come to us again, after another agent may have had them.
    pub fn came_back(&self) {
        self.put_back.send_modify(|times| *times = times.wrapping_add(1));
    }

    /// Tells that calls came back, once the table is as the other agent left it.
    pub fn returns(&self) -> watch::Receiver<u64> {
        self.put_back.subscribe()
    }

    /// Keeps the table in `file` until `stop`, which must come after the last call, as long as the file is not another agent's.
    /// Ends with the word that all is written, and whether the run `failed`.
    pub async fn keep(
        self,
        file: VolumeFile,
        crashes: Crashes,
        stop: CancellationToken,
        failed: impl Fn() -> bool + Send,
    ) {
        let (mut lane, mut quiet) = (Lane::new("volumes"), Quiet::default());
        let (mut changes, mut returns) = (self.changes(), self.put_back.subscribe());
        let mut theirs = false;
        loop {
            let stopped = stop.is_cancelled();
            let mut pause = PAUSE;
            if returns.has_changed().unwrap_or(false) {
                returns.mark_unchanged();
                self.take_back(&file, &crashes, &mut lane).await;
                theirs = false;
            }
            if !theirs && (self.lock().take_dirty() || stopped) {
                let run = match stopped {
                    false => Run::On,
                    true if failed() => Run::Failed(since_boot().as_secs()),
                    true => Run::Ended(since_boot().as_secs()),
                };
                match self.save(&file, &crashes, run, &mut lane).await {
                    Ok(Saved::Ours) => {
                        if quiet.end() {
                            info!(state.path = %file.path().display(), "the table of volumes is kept again");
                        }
                    }
                    Ok(Saved::Theirs) => {
                        theirs = true;
                        self.handed_over();
                        info!(state.path = %file.path().display(), "another agent keeps the table of volumes from now on");
                    }
                    Err(trouble) => {
                        pause = PAUSE_AFTER_FAILURE;
                        if quiet.begin_or_repeat(&trouble, Instant::now()) {
                            warn!(
                                state.path = %file.path().display(),
                                error = trouble,
                                "cannot keep the table of volumes over a restart of ours; all else goes on"
                            );
                        }
                    }
                }
            }
            if stopped {
                return;
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = stop.cancelled() => continue,
            }
            let nothing = |returns: &watch::Receiver<u64>| {
                (theirs || !self.look(VolumeTable::is_dirty)) && !returns.has_changed().unwrap_or(false)
            };
            while nothing(&returns) && !stop.is_cancelled() {
                tokio::select! {
                    // Neither can be closed: we hold the senders.
                    _ = changes.changed() => {}
                    _ = returns.changed() => returns.mark_changed(),
                    () = stop.cancelled() => {}
                }
            }
        }
    }

    /// Writes the table as it is now. What is on disk when that fails is old, would be believed after a crash, and is set aside.
    async fn save(&self, file: &VolumeFile, crashes: &Crashes, run: Run, lane: &mut Lane) -> Result<Saved, String> {
        let (places, completeness): (Vec<Place>, _) =
            self.look(|table| (table.places().collect(), table.completeness()));
        let (keeper, past) = (file.clone(), crashes.clone());
        let saved = lane.run(WRITE_TIMEOUT, move || keeper.save(&places, completeness, &past, run)).await;
        let trouble = match saved {
            Ok(Ok(saved)) => return Ok(saved),
            Ok(Err(error)) => error.to_string(),
            Err(Abandoned::Late) => format!("no answer from its file system within {WRITE_TIMEOUT:?}"),
            Err(no_thread @ Abandoned::NoThread(_)) => no_thread.to_string(),
        };
        let stale = file.clone();
        lane.run(WRITE_TIMEOUT, move || stale.distrust()).await.ok();
        self.lock().mark_dirty();
        Err(trouble)
    }

    /// Goes on from what another agent left, if one had the file.
    async fn take_back(&self, file: &VolumeFile, crashes: &Crashes, lane: &mut Lane) {
        let (keeper, past) = (file.clone(), crashes.clone());
        match lane.run(WRITE_TIMEOUT, move || keeper.take_back(&past)).await {
            Ok(None) => {}
            Ok(Some(places)) => {
                warn!(
                    state.path = %file.path().display(),
                    volumes = places.len(),
                    "another agent had the calls for a while: going on from its table of volumes, which may lack some"
                );
                self.change(|table| table.taken_back(places));
            }
            // What it left is not known.
            Err(_abandoned) => self.change(VolumeTable::not_followed),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VolumeTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::volumes::InUse;
    use std::fs;
    use std::os::unix::fs::symlink;

    const DRIVER: &str = "x.example.com";
    const DAY: u64 = 86_400;

    struct Bed(tempfile::TempDir);

    impl Bed {
        fn new() -> Self {
            let bed = Self(tempfile::tempdir().unwrap());
            bed.boot("first");
            bed
        }

        fn boot(&self, id: &str) {
            let folder = self.0.path().join("sys/kernel/random");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("boot_id"), id).unwrap();
        }

        fn file(&self) -> VolumeFile {
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

    fn stage() -> VolumeCall {
        VolumeCall::Stage { volume: "v".into(), path: "/s".into() }
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
    fn the_kubelets_records_complete_a_table_only_of_a_driver_that_stages() {
        let loaded = || Loaded {
            places: Vec::new(),
            completeness: Completeness::Incomplete(Gap::AgentDied),
            crashes: Crashes::default(),
            trouble: None,
        };
        let records = |all, staged: &[&str]| Records {
            staged: staged.iter().map(|volume| ((*volume).to_owned(), "/s".to_owned())).collect(),
            all,
            troubles: Vec::new(),
        };
        for (records, stages, in_use) in [
            (records(true, &[]), Some(true), InUse::No),
            (records(true, &[]), None, InUse::No),
            (records(false, &[]), Some(true), InUse::Unknown),
            (records(true, &["v"]), Some(true), InUse::Yes(1)),
            (records(true, &["v"]), Some(false), InUse::Unknown),
            (records(true, &["v"]), None, InUse::Unknown),
        ] {
            let mut table = begin(loaded(), &records, stages);
            assert_eq!(table.in_use(), in_use, "{records:?} {stages:?}");
            if in_use == InUse::Yes(1) {
                let id = table.begin(&VolumeCall::Unstage { volume: "v".into(), path: "/s".into() });
                table.end(id, End::Code(0));
                assert_eq!(table.in_use(), InUse::No, "complete, and the last one is out");
            }
        }
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

    #[tokio::test]
    async fn what_changes_is_written_and_a_call_that_is_dropped_counts_as_lost() {
        let bed = Bed::new();
        let volumes = Volumes::new(VolumeTable::new(Completeness::Complete));
        let stop = CancellationToken::new();
        let keeping = volumes.clone().keep(bed.file(), Crashes::default(), stop.clone(), || false);
        let calls = async {
            let call = volumes.begin(&stage());
            wait_for(&bed, |places| places.len() == 1).await;
            let loaded = bed.file().load(Left::Nothing);
            assert_eq!(loaded.completeness, Completeness::Incomplete(Gap::AgentDied), "as long as we live");
            drop(call);
            assert_eq!(volumes.look(VolumeTable::in_use), InUse::Yes(1));
            volumes.begin(&stage()).ended(0);
            wait_for(&bed, |places| places[0].presence == Presence::There).await;
            volumes.begin(&VolumeCall::Unstage { volume: "v".into(), path: "/s".into() }).ended(0);
            stop.cancel();
        };
        tokio::join!(keeping, calls);
        let loaded = bed.file().load(Left::Nothing);
        assert!(loaded.places.is_empty(), "the last change is written before the end");
        assert_eq!((loaded.completeness, loaded.crashes.seconds().len()), (Completeness::Complete, 0));
    }

    #[tokio::test]
    async fn a_write_that_fails_is_tried_again_and_delays_no_call() {
        let bed = Bed::new();
        let folder = bed.0.path().join("no/parent");
        let file = VolumeFile::new(&folder, DRIVER, bed.0.path());
        let volumes = Volumes::new(VolumeTable::new(Completeness::Complete));
        let stop = CancellationToken::new();
        let keeping = volumes.clone().keep(file.clone(), Crashes::default(), stop.clone(), || false);
        let calls = async {
            volumes.begin(&stage()).ended(0);
            sleep(Duration::from_millis(200)).await;
            assert!(volumes.look(VolumeTable::is_dirty), "not forgotten");
            fs::create_dir_all(&folder).unwrap();
            stop.cancel();
        };
        tokio::join!(keeping, calls);
        assert_eq!(file.load(Left::Nothing).places.len(), 1);
    }

    async fn wait_for(bed: &Bed, done: impl Fn(&[Place]) -> bool) {
        for _ in 0..500 {
            let loaded = bed.file().load(Left::Nothing);
            if !loaded.places.is_empty() && done(&loaded.places) {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("nothing was written");
    }
}
