//! The table of volumes: told of every call, and kept over restarts in a file (`volume_file.rs`) that is written beside the calls,
//! never before one.

use super::kubelet_records::Records;
use super::volume_file::{Loaded, Run, Saved, VolumeFile};
use crate::kept_file::since_boot;
use crate::policy::crashes::Crashes;
use crate::policy::volume_call::{End, VolumeCall};
use crate::policy::volume_place::Place;
use crate::policy::volumes::{CallId, Completeness, Gap, VolumeTable};
use crate::probe::lane::{Abandoned, Lane};
use crate::quiet::Quiet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// How long a write may take before it is left alone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Between two writes: a pod's start changes the table about eight times.
const PAUSE: Duration = Duration::from_millis(50);

/// After a write that failed.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(5);

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
    use super::super::volume_file::Left;
    use super::super::volume_file::tests::{Bed, DRIVER};
    use super::*;
    use crate::policy::volume_place::Presence;
    use crate::policy::volumes::InUse;
    use std::fs;

    fn stage() -> VolumeCall {
        VolumeCall::Stage { volume: "v".into(), path: "/s".into() }
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
