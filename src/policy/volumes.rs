//! Which volumes are in use here, by the calls seen: what a fence must let out before the driver may be withdrawn.
//!
//! Careful in one direction only: what may be there counts as there. The kubelet is heard as it hears the driver: a final
//! error means "surely not in progress", any other that it may still happen.

use std::collections::BTreeMap;

/// Far above what a node can mount; beyond it the table says that it is not complete.
const MOST_PLACES: usize = 100_000;

/// All texts together. A node with 500 volumes has below 1 MiB.
const MOST_BYTES: usize = 16 * 1024 * 1024;

/// The longest volume ID or path that is kept: PATH_MAX.
const MOST_TEXT_BYTES: usize = 4096;

/// A call that changes what is in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeCall {
    /// NodeStageVolume
    Stage {
        /// volume_id
        volume: String,
        /// staging_target_path
        path: String,
    },
    /// NodeUnstageVolume
    Unstage {
        /// volume_id
        volume: String,
        /// staging_target_path
        path: String,
    },
    /// NodePublishVolume
    Publish {
        /// volume_id
        volume: String,
        /// target_path
        target: String,
    },
    /// NodeUnpublishVolume
    Unpublish {
        /// volume_id
        volume: String,
        /// target_path
        target: String,
    },
    /// NodeExpandVolume
    Expand {
        /// volume_id
        volume: String,
    },
}

/// One call between its begin and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(u64);

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The driver answered with this gRPC status code; 0 is OK.
    Code(i32),
    /// Nobody saw an answer: the call was cancelled, or a connection broke.
    Lost,
}

/// What an end says about the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Done,
    /// Not done, and surely not in progress.
    NotDone,
    /// It may still happen.
    Open,
}

impl End {
    /// As the kubelet's `isFinalError`: cancelled, deadline exceeded, resource exhausted, aborted and unavailable decide nothing.
    ///
    /// Source: <https://github.com/kubernetes/kubernetes/blob/v1.36.2/pkg/volume/csi/csi_client.go>
    fn word(self) -> Word {
        match self {
            Self::Code(0) => Word::Done,
            Self::Code(1 | 4 | 8 | 10 | 14) | Self::Lost => Word::Open,
            Self::Code(_) => Word::NotDone,
        }
    }
}

/// Where a volume can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Staged at a staging path.
    Staged,
    /// Published at a target path.
    Published,
}

impl Kind {
    /// Its name in JSON and the state file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Staged => "staged",
            Self::Published => "published",
        }
    }

    /// The kind of that name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Staged, Self::Published].into_iter().find(|kind| kind.name() == name)
    }
}

/// How sure it is that a volume is at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// The driver said so.
    There,
    /// It is there, and a repeated stage or publish was not answered for good.
    Renewing,
    /// A first stage or publish was not answered for good.
    Coming,
    /// An unstage or unpublish did not succeed, whatever its code: the kubelet will come again.
    Leaving,
}

impl Presence {
    /// Its name in JSON and the state file.
    pub fn name(self) -> &'static str {
        match self {
            Self::There => "there",
            Self::Renewing => "renewing",
            Self::Coming => "coming",
            Self::Leaving => "leaving",
        }
    }

    /// The presence of that name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::There, Self::Renewing, Self::Coming, Self::Leaving].into_iter().find(|it| it.name() == name)
    }
}

/// A volume at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The volume's ID.
    pub volume: String,
    /// Staged or published.
    pub kind: Kind,
    /// Where.
    pub path: String,
    /// How sure that is; a call in flight counts as one that was lost.
    pub presence: Presence,
}

/// Why there may be volumes that the table does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gap {
    /// Volumes may have been mounted since the boot without us.
    NotFollowed,
    /// The agent ended without a word, and its last entries may be missing.
    AgentDied,
    /// A call could not be understood.
    Undecodable,
    /// More volumes than the table holds, or texts too long for it.
    Full,
}

impl Gap {
    /// A clause for people.
    pub fn text(self) -> &'static str {
        match self {
            Self::NotFollowed => "volumes may have been mounted since the boot without this agent",
            Self::AgentDied => "the agent before this one ended without saving its last entries",
            Self::Undecodable => "a call could not be understood",
            Self::Full => "there are more volumes than the table holds",
        }
    }

    /// Its name in JSON and the state file.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFollowed => "notFollowed",
            Self::AgentDied => "agentDied",
            Self::Undecodable => "undecodable",
            Self::Full => "full",
        }
    }

    /// The gap of that name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::NotFollowed, Self::AgentDied, Self::Undecodable, Self::Full].into_iter().find(|it| it.name() == name)
    }
}

/// Whether the table has every volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completeness {
    /// It has.
    Complete,
    /// There may be more.
    Incomplete(Gap),
}

/// The answer to "may the driver be withdrawn?".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InUse {
    /// No volume is here, and nothing is under way.
    No,
    /// So many volumes are here; at least so many if the table is not complete.
    Yes(usize),
    /// None is known, and the table is not complete. Counts as in use.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Add,
    Remove,
}

/// What is believed of one place, and what is under way there.
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    /// `None`: not there; the entry lives as long as calls are in flight.
    presence: Option<Presence>,
    adding: usize,
    removing: usize,
    /// The newest call that has ended.
    decided: u64,
}

impl Entry {
    /// As it would be if the answers to all calls in flight were lost.
    fn at_worst(&self) -> Option<Presence> {
        match self.presence {
            _ if self.removing > 0 => Some(Presence::Leaving),
            Some(Presence::There) if self.adding > 0 => Some(Presence::Renewing),
            None if self.adding > 0 => Some(Presence::Coming),
            presence => presence,
        }
    }

    fn ended(&mut self, verb: Verb, word: Word, newest: bool, crossed: bool) {
        use self::Presence::{Coming, Leaving, Renewing, There};
        self.presence = match (verb, word, self.presence) {
            // An older call's late word can only make us more careful.
            (Verb::Add, Word::Done | Word::Open, None) if !newest => Some(Coming),
            (_, _, presence) if !newest => presence,
            (Verb::Add, Word::Done, _) => Some(There),
            (Verb::Add, Word::NotDone, None | Some(Coming)) => None,
            (Verb::Add, Word::NotDone, Some(There | Renewing)) => Some(There),
            (Verb::Add, Word::Open, None | Some(Coming)) => Some(Coming),
            (Verb::Add, Word::Open, Some(There | Renewing)) => Some(Renewing),
            (Verb::Add, Word::NotDone | Word::Open, Some(Leaving)) => Some(Leaving),
            // Which of the two the driver did last is unknown.
            (Verb::Remove, Word::Done, _) if crossed => Some(Leaving),
            (Verb::Remove, Word::Done, _) => None,
            (Verb::Remove, Word::NotDone | Word::Open, _) => Some(Leaving),
        };
    }
}

#[derive(Debug, Default)]
struct Volume {
    places: BTreeMap<(Kind, String), Entry>,
    expanding: usize,
    expansion_open: bool,
}

impl Volume {
    fn in_use(&self) -> bool {
        !self.places.is_empty() || self.expanding > 0
    }
}

#[derive(Debug)]
struct Flight {
    call: VolumeCall,
    /// A call that does the opposite was under way at the same time, and may have been done after this one.
    crossed: bool,
}

/// The volumes staged and published on this node, as far as the calls tell.
#[derive(Debug)]
pub struct VolumeTable {
    volumes: BTreeMap<String, Volume>,
    flights: BTreeMap<u64, Flight>,
    next: u64,
    completeness: Completeness,
    places: usize,
    bytes: usize,
    dirty: bool,
}

impl VolumeTable {
    /// An empty table.
    pub fn new(completeness: Completeness) -> Self {
        Self {
            volumes: BTreeMap::new(),
            flights: BTreeMap::new(),
            next: 1,
            completeness,
            places: 0,
            bytes: 0,
            dirty: true,
        }
    }

    /// A table with places known from before.
    pub fn with(places: impl IntoIterator<Item = Place>, completeness: Completeness) -> Self {
        let mut table = Self::new(completeness);
        for place in places {
            table.insert(place);
        }
        table
    }

    /// Adds staged volumes that the kubelet has on record, where the table knows nothing yet. A record is written before the
    /// call, so it may be there or not: a repeated stage passes a fence, and nothing about the volume counts as settled.
    pub fn add_recorded(&mut self, staged: impl IntoIterator<Item = (String, String)>) {
        for (volume, path) in staged {
            self.insert(Place { volume, kind: Kind::Staged, path, presence: Presence::Renewing });
        }
    }

    /// Whether the driver's answer about a volume published there could tell the table something that it lacks; then a mark for
    /// [`Self::answered_at`]. Nobody tells of volumes from before us but the kubelet, which asks for the usage of each.
    pub fn could_learn(&self, volume: &str, target: &str) -> Option<u64> {
        let worth = match self.volumes.get(volume).and_then(|known| known.places.get(&published(target))) {
            None => self.completeness != Completeness::Complete,
            // The kubelet has it mounted: it got the answer that we, or the run before us, did not write down.
            Some(entry) => entry.presence == Some(Presence::Coming),
        };
        let under_way = || self.flights.values().any(|flight| subject(&flight.call).0 == volume);
        (worth && is_kubelets_target(target) && !under_way()).then_some(self.next)
    }

    /// Whether there is anything that could be learnt so.
    pub fn can_learn(&self) -> bool {
        let coming = |entry: &Entry| entry.presence == Some(Presence::Coming);
        self.completeness != Completeness::Complete
            || self.volumes.values().any(|known| known.places.values().any(coming))
    }

    /// The driver answered OK about the volume at this target: it is published there, unless anything was asked for meanwhile.
    pub fn answered_at(&mut self, volume: String, target: String, mark: u64) {
        if self.next != mark {
            return;
        }
        if self.volumes.get(&volume).is_some_and(|known| known.places.contains_key(&published(&target))) {
            self.change(&volume, Kind::Published, &target, |entry| entry.presence = Some(Presence::There));
        } else {
            self.insert(Place { volume, kind: Kind::Published, path: target, presence: Presence::There });
        }
    }

    /// Takes note of a call that is about to be forwarded.
    pub fn begin(&mut self, call: &VolumeCall) -> CallId {
        let id = self.next;
        self.next += 1;
        self.enter(id, Flight { call: call.clone(), crossed: false });
        CallId(id)
    }

    fn enter(&mut self, id: u64, flight: Flight) {
        let (volume, place) = subject(&flight.call);
        if !self.has_room(volume, place.map(|(kind, path, _)| (kind, path))) {
            return self.leave_gap(Gap::Full);
        }
        match place {
            Some((kind, path, verb)) => {
                self.change(volume, kind, path, |entry| match verb {
                    Verb::Add => entry.adding += 1,
                    Verb::Remove => entry.removing += 1,
                });
            }
            None => self.volumes.entry(volume.to_owned()).or_default().expanding += 1,
        }
        self.flights.insert(id, flight);
    }

    /// Takes note of its end. A second end of one call is not heard.
    pub fn end(&mut self, id: CallId, end: End) {
        let Some(flight) = self.flights.remove(&id.0) else { return };
        let word = end.word();
        let (volume, place) = subject(&flight.call);
        match place {
            Some((kind, path, verb)) => {
                let mut crossing = false;
                self.change(volume, kind, path, |entry| {
                    match verb {
                        Verb::Add => entry.adding -= 1,
                        Verb::Remove => entry.removing -= 1,
                    }
                    crossing = verb == Verb::Add && entry.removing > 0 && word != Word::NotDone;
                    let newest = id.0 > entry.decided;
                    entry.decided = entry.decided.max(id.0);
                    entry.ended(verb, word, newest, flight.crossed);
                });
                if crossing {
                    self.cross((volume, kind, path));
                }
            }
            None => {
                if let Some(known) = self.volumes.get_mut(volume) {
                    known.expanding -= 1;
                    known.expansion_open = word == Word::Open;
                }
            }
        }
        if self.volumes.get(volume).is_some_and(|known| !known.in_use()) {
            self.volumes.remove(volume);
        }
    }

    /// Takes note of a call, about to be forwarded, that could not be understood.
    pub fn undecodable(&mut self) {
        self.leave_gap(Gap::Undecodable);
    }

    /// Calls go to the driver without us from now on.
    pub fn not_followed(&mut self) {
        self.leave_gap(Gap::NotFollowed);
    }

    /// Another agent followed the volumes meanwhile, and this is what it left: that goes over what was known before, and there
    /// may be more. Calls of ours that are under way stay so; which of them came before what it saw, nobody knows.
    pub fn taken_back(&mut self, places: impl IntoIterator<Item = Place>) {
        let flights = std::mem::take(&mut self.flights);
        self.volumes.clear();
        (self.places, self.bytes, self.dirty) = (0, 0, true);
        self.leave_gap(Gap::NotFollowed);
        for place in places {
            self.insert(place);
        }
        for (id, Flight { call, .. }) in flights {
            self.enter(id, Flight { call, crossed: true });
        }
    }

    /// Whether it has every volume.
    pub fn completeness(&self) -> Completeness {
        self.completeness
    }

    /// Whether volumes are in use here.
    pub fn in_use(&self) -> InUse {
        match (self.volumes.len(), self.completeness) {
            (0, Completeness::Complete) => InUse::No,
            (0, Completeness::Incomplete(_)) => InUse::Unknown,
            (count, _) => InUse::Yes(count),
        }
    }

    /// Whether the driver said that the volume is staged or published there, and was not asked since to take it away.
    pub fn is_at(&self, volume: &str, kind: Kind, path: &str) -> bool {
        let entry = self.volumes.get(volume).and_then(|known| known.places.get(&(kind, path.to_owned())));
        entry.is_some_and(|entry| {
            entry.removing == 0 && matches!(entry.presence, Some(Presence::There | Presence::Renewing))
        })
    }

    /// Whether the volume was surely staged before us, wherever: it is published here, and nobody saw it staged.
    pub fn was_staged_before(&self, volume: &str) -> bool {
        let Some(known) = self.volumes.get(volume) else { return false };
        let published = |entry: &Entry| matches!(entry.presence, Some(Presence::There | Presence::Renewing));
        self.completeness != Completeness::Complete
            && known.places.keys().all(|(kind, _)| *kind == Kind::Published)
            && known.places.values().any(published)
    }

    /// Whether the volume is, or may be, staged anywhere.
    pub fn may_be_staged(&self, volume: &str) -> bool {
        self.volumes.get(volume).is_some_and(|known| known.places.keys().any(|(kind, _)| *kind == Kind::Staged))
    }

    /// Whether every call about the volume was answered for good, and no unstage or unpublish failed. True of a volume
    /// that the table does not know.
    pub fn is_settled(&self, volume: &str) -> bool {
        self.volumes.get(volume).is_none_or(|known| {
            known.expanding == 0
                && !known.expansion_open
                && known.places.values().all(|entry| entry.at_worst() == Some(Presence::There))
        })
    }

    /// Calls under way.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Every place, by volume.
    pub fn places(&self) -> impl Iterator<Item = Place> + '_ {
        self.volumes.iter().flat_map(|(volume, known)| {
            known.places.iter().filter_map(move |((kind, path), entry)| {
                let presence = entry.at_worst()?;
                Some(Place { volume: volume.clone(), kind: *kind, path: path.clone(), presence })
            })
        })
    }

    /// Whether [`Self::places`] or the completeness changed since this was asked last.
    pub fn take_dirty(&mut self) -> bool {
        std::mem::take(&mut self.dirty)
    }

    /// Whether there is something to write.
    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// What was taken as written was not.
    pub fn mark_dirty(&mut self) {
        self.dirty = true;
    }

    fn insert(&mut self, place: Place) {
        if !self.has_room(&place.volume, Some((place.kind, &place.path))) {
            self.leave_gap(Gap::Full);
            return;
        }
        self.change(&place.volume, place.kind, &place.path, |entry| {
            entry.presence.get_or_insert(place.presence);
        });
    }

    /// Changes an entry, made if need be, and drops it when nothing is left of it.
    fn change(&mut self, volume: &str, kind: Kind, path: &str, change: impl FnOnce(&mut Entry)) {
        let known = self.volumes.entry(volume.to_owned()).or_default();
        let key = (kind, path.to_owned());
        let before = known.places.get(&key).copied();
        let mut entry = before.unwrap_or_default();
        change(&mut entry);
        let after = entry.at_worst();
        self.dirty |= before.and_then(|entry| entry.at_worst()) != after;
        let bytes = volume.len() + path.len();
        match (before, after) {
            (None, None) => {}
            (Some(_), Some(_)) => drop(known.places.insert(key, entry)),
            (None, Some(_)) => {
                known.places.insert(key, entry);
                self.places += 1;
                self.bytes += bytes;
            }
            (Some(_), None) => {
                known.places.remove(&key);
                self.places -= 1;
                self.bytes -= bytes;
            }
        }
    }

    /// Removals under way there may be done before what has just been done.
    fn cross(&mut self, place: (&str, Kind, &str)) {
        for flight in self.flights.values_mut() {
            let (volume, there) = subject(&flight.call);
            flight.crossed |=
                there.is_some_and(|(kind, path, verb)| verb == Verb::Remove && (volume, kind, path) == place);
        }
    }

    fn has_room(&self, volume: &str, place: Option<(Kind, &str)>) -> bool {
        let path = place.map_or("", |(_, path)| path);
        volume.len() <= MOST_TEXT_BYTES
            && path.len() <= MOST_TEXT_BYTES
            && self.flights.len() < MOST_PLACES
            && self.places < MOST_PLACES
            && self.bytes + volume.len() + path.len() <= MOST_BYTES
    }

    /// The first gap is the one that is told.
    fn leave_gap(&mut self, gap: Gap) {
        if self.completeness == Completeness::Complete {
            self.completeness = Completeness::Incomplete(gap);
            self.dirty = true;
        }
    }
}

fn subject(call: &VolumeCall) -> (&str, Option<(Kind, &str, Verb)>) {
    match call {
        VolumeCall::Stage { volume, path } => (volume, Some((Kind::Staged, path, Verb::Add))),
        VolumeCall::Unstage { volume, path } => (volume, Some((Kind::Staged, path, Verb::Remove))),
        VolumeCall::Publish { volume, target } => (volume, Some((Kind::Published, target, Verb::Add))),
        VolumeCall::Unpublish { volume, target } => (volume, Some((Kind::Published, target, Verb::Remove))),
        VolumeCall::Expand { volume } => (volume, None),
    }
}

fn published(target: &str) -> (Kind, String) {
    (Kind::Published, target.to_owned())
}

/// Whether the kubelet publishes volumes at such a path, as files or as a block device, and will unpublish it there.
///
/// Source: <https://github.com/kubernetes/kubernetes/blob/v1.36.2/pkg/volume/csi/csi_mounter.go>, and csi_block.go
fn is_kubelets_target(path: &str) -> bool {
    let files = path.ends_with("/mount") && path.contains("/volumes/kubernetes.io~csi/");
    files || path.contains("/kubernetes.io/csi/volumeDevices/publish/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OK: End = End::Code(0);
    const INTERNAL: End = End::Code(13);
    const UNAVAILABLE: End = End::Code(14);

    fn table() -> VolumeTable {
        VolumeTable::new(Completeness::Complete)
    }

    fn stage(volume: &str) -> VolumeCall {
        VolumeCall::Stage { volume: volume.into(), path: "/stage".into() }
    }

    fn unstage(volume: &str) -> VolumeCall {
        VolumeCall::Unstage { volume: volume.into(), path: "/stage".into() }
    }

    fn publish(target: &str) -> VolumeCall {
        VolumeCall::Publish { volume: "v".into(), target: target.into() }
    }

    fn unpublish(target: &str) -> VolumeCall {
        VolumeCall::Unpublish { volume: "v".into(), target: target.into() }
    }

    fn run(table: &mut VolumeTable, call: &VolumeCall, end: End) {
        let id = table.begin(call);
        table.end(id, end);
    }

    fn presence(table: &VolumeTable) -> Option<Presence> {
        table.places().next().map(|place| place.presence)
    }

    #[test]
    fn a_volume_from_before_us_is_learnt_from_an_answer_about_it() {
        let target = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount";
        let learn = |table: &mut VolumeTable, mark: Option<u64>| {
            table.answered_at("v".into(), target.into(), mark.unwrap());
            table.is_at("v", Kind::Published, target)
        };
        let mut table = VolumeTable::new(Completeness::Incomplete(Gap::NotFollowed));
        let mark = table.could_learn("v", target);
        let unpublish = VolumeCall::Unpublish { volume: "v".into(), target: target.into() };
        let id = table.begin(&unpublish);
        assert_eq!(table.could_learn("v", target), None, "it is on its way out");
        table.end(id, End::Code(0));
        assert!(!learn(&mut table, mark), "it went meanwhile");
        let mark = table.could_learn("v", target);
        assert!(learn(&mut table, mark));
        assert_eq!((table.could_learn("v", target), table.in_use()), (None, InUse::Yes(1)), "known");
        assert!(table.was_staged_before("v") && !table.was_staged_before("w"));
        let id = table.begin(&unpublish);
        table.end(id, End::Code(0));
        assert_eq!(table.in_use(), InUse::Unknown, "out again");
        assert!(!table.was_staged_before("v"));
        assert_eq!(table.could_learn("v", "/var/lib/kubelet/plugins/kubernetes.io/csi/d/x/globalmount"), None);
        assert_eq!(VolumeTable::new(Completeness::Complete).could_learn("v", target), None, "nothing to learn");
    }

    /// The driver published it, and the agent was killed before it had written that down.
    #[test]
    fn a_publish_whose_end_was_lost_is_known_by_an_answer_about_the_volume() {
        let target = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount";
        let mut table = table();
        assert!(!table.can_learn());
        run(&mut table, &publish(target), End::Lost);
        assert!(table.can_learn() && !table.is_at("v", Kind::Published, target));
        let mark = table.could_learn("v", target).unwrap();
        table.answered_at("v".into(), target.into(), mark);
        assert!(table.is_at("v", Kind::Published, target) && table.is_settled("v"));
        assert_eq!((table.can_learn(), table.could_learn("v", target)), (false, None));
        run(&mut table, &unpublish(target), INTERNAL);
        assert_eq!(table.could_learn("v", target), None, "it is on its way out");
        run(&mut table, &unpublish(target), OK);
        assert_eq!((table.in_use(), table.places, table.bytes), (InUse::No, 0, 0));
    }

    #[test]
    fn a_volume_is_in_use_from_the_begin_of_its_stage_to_the_good_end_of_its_unstage() {
        let mut table = table();
        assert_eq!(table.in_use(), InUse::No);
        let id = table.begin(&stage("v"));
        assert_eq!(table.in_use(), InUse::Yes(1));
        assert!(!table.is_settled("v") && !table.is_at("v", Kind::Staged, "/stage"));
        table.end(id, OK);
        assert!(table.is_settled("v") && table.is_at("v", Kind::Staged, "/stage"));
        assert!(!table.is_at("v", Kind::Staged, "/other") && !table.is_at("v", Kind::Published, "/stage"));
        let id = table.begin(&unstage("v"));
        assert_eq!(table.in_use(), InUse::Yes(1));
        assert!(!table.is_at("v", Kind::Staged, "/stage"), "it is leaving");
        table.end(id, OK);
        assert_eq!(table.in_use(), InUse::No);
        assert_eq!((table.places, table.bytes, table.flights.len()), (0, 0, 0), "nothing is left behind");
    }

    #[test]
    fn a_first_stage_with_a_final_error_is_forgotten_and_with_any_other_remembered() {
        for code in 1..=16 {
            let mut table = table();
            run(&mut table, &stage("v"), End::Code(code));
            let open = [1, 4, 8, 10, 14].contains(&code);
            assert_eq!(presence(&table), open.then_some(Presence::Coming), "code {code}");
            assert_eq!(table.in_use() == InUse::Yes(1), open, "code {code}");
            run(&mut table, &stage("v"), INTERNAL);
            assert_eq!(table.in_use(), InUse::No, "the driver has decided now");
        }
        let mut table = table();
        run(&mut table, &stage("v"), End::Lost);
        assert_eq!(presence(&table), Some(Presence::Coming));
    }

    #[test]
    fn a_repeated_stage_that_fails_leaves_the_volume_staged() {
        for (end, settled) in [(INTERNAL, true), (UNAVAILABLE, false), (End::Lost, false)] {
            let mut table = table();
            run(&mut table, &stage("v"), OK);
            run(&mut table, &stage("v"), end);
            assert!(table.is_at("v", Kind::Staged, "/stage"));
            assert_eq!(table.is_settled("v"), settled, "{end:?}");
        }
    }

    #[test]
    fn a_failed_unstage_keeps_the_volume_in_use_and_unsettled_whatever_its_code() {
        for end in [INTERNAL, UNAVAILABLE, End::Lost] {
            let mut table = table();
            run(&mut table, &stage("v"), OK);
            run(&mut table, &unstage("v"), end);
            assert_eq!((presence(&table), table.is_settled("v")), (Some(Presence::Leaving), false), "{end:?}");
            run(&mut table, &stage("v"), INTERNAL);
            assert_eq!(table.in_use(), InUse::Yes(1), "a stage that failed does not take away");
            run(&mut table, &unstage("v"), OK);
            assert_eq!(table.in_use(), InUse::No);
        }
    }

    #[test]
    fn targets_of_one_volume_are_counted_as_one_volume_and_end_one_by_one() {
        let mut table = table();
        run(&mut table, &stage("v"), OK);
        run(&mut table, &publish("/a"), OK);
        run(&mut table, &publish("/b"), OK);
        run(&mut table, &stage("w"), OK);
        assert_eq!(table.in_use(), InUse::Yes(2));
        for call in [unpublish("/a"), unstage("v"), unstage("w")] {
            run(&mut table, &call, OK);
        }
        assert!(table.is_at("v", Kind::Published, "/b"));
        run(&mut table, &unpublish("/b"), OK);
        assert_eq!(table.in_use(), InUse::No);
    }

    #[test]
    fn a_late_end_of_an_older_call_does_not_overwrite_the_newer_ones() {
        let mut table = table();
        let (old, new) = (table.begin(&unstage("v")), table.begin(&stage("v")));
        table.end(new, OK);
        table.end(old, OK);
        assert!(table.is_at("v", Kind::Staged, "/stage"), "the stage is the newer one");

        let mut table = VolumeTable::new(Completeness::Complete);
        let (old, new) = (table.begin(&stage("v")), table.begin(&unstage("v")));
        table.end(new, OK);
        assert_eq!(table.in_use(), InUse::Yes(1), "the stage is still under way");
        table.end(old, INTERNAL);
        assert_eq!(table.in_use(), InUse::No, "and did nothing");
    }

    #[test]
    fn an_unstage_that_a_stage_overtook_may_have_been_done_first() {
        for end in [OK, UNAVAILABLE] {
            let mut table = table();
            let (stage, unstage) = (table.begin(&stage("v")), table.begin(&unstage("v")));
            table.end(stage, end);
            table.end(unstage, OK);
            assert_eq!(presence(&table), Some(Presence::Leaving), "{end:?}");
        }
    }

    #[test]
    fn an_expansion_under_way_or_unanswered_keeps_its_volume_unsettled() {
        let mut table = table();
        let expand = VolumeCall::Expand { volume: "v".into() };
        run(&mut table, &expand, UNAVAILABLE);
        assert_eq!(table.in_use(), InUse::No, "an expansion alone puts nothing here");
        run(&mut table, &stage("v"), OK);
        let id = table.begin(&expand);
        assert!(!table.is_settled("v"));
        table.end(id, UNAVAILABLE);
        assert!(!table.is_settled("v"));
        run(&mut table, &expand, INTERNAL);
        assert!(table.is_settled("v"));
    }

    #[test]
    fn an_incomplete_table_never_says_no() {
        for gap in [Gap::NotFollowed, Gap::AgentDied] {
            let mut table = VolumeTable::new(Completeness::Incomplete(gap));
            assert_eq!(table.in_use(), InUse::Unknown);
            run(&mut table, &stage("v"), OK);
            assert_eq!(table.in_use(), InUse::Yes(1));
            run(&mut table, &unstage("v"), OK);
            assert_eq!(table.in_use(), InUse::Unknown);
        }
        let mut table = table();
        table.undecodable();
        assert_eq!(table.completeness(), Completeness::Incomplete(Gap::Undecodable));
    }

    #[test]
    fn too_much_makes_it_incomplete_and_no_larger() {
        let long = "x".repeat(MOST_TEXT_BYTES + 1);
        for call in [stage(&long), publish(&long), VolumeCall::Expand { volume: long.clone() }] {
            let mut table = table();
            run(&mut table, &call, OK);
            assert_eq!((table.in_use(), table.bytes), (InUse::Unknown, 0));
            assert_eq!(table.completeness(), Completeness::Incomplete(Gap::Full));
        }
        let mut many = table();
        for number in 0..MOST_PLACES {
            run(&mut many, &stage(&number.to_string()), OK);
        }
        assert_eq!(many.completeness(), Completeness::Complete);
        run(&mut many, &stage("one more"), OK);
        assert_eq!(many.completeness(), Completeness::Incomplete(Gap::Full));
        assert_eq!(many.in_use(), InUse::Yes(MOST_PLACES));
        let mut wide = table();
        for number in 0..MOST_BYTES / MOST_TEXT_BYTES + 1 {
            run(&mut wide, &publish(&format!("{number:04096}")), OK);
        }
        assert_eq!(wide.completeness(), Completeness::Incomplete(Gap::Full));
        assert!(wide.bytes <= MOST_BYTES);
    }

    #[test]
    fn what_is_restored_is_what_was_there_with_calls_in_flight_counted_as_lost() {
        let mut table = table();
        run(&mut table, &stage("v"), OK);
        table.begin(&publish("/a"));
        table.begin(&unstage("v"));
        let places: Vec<Place> = table.places().collect();
        assert_eq!(
            places.iter().map(|place| place.presence).collect::<Vec<_>>(),
            [Presence::Leaving, Presence::Coming]
        );
        let back = VolumeTable::with(places.clone(), Completeness::Complete);
        assert_eq!(back.places().collect::<Vec<_>>(), places);
        for place in places {
            assert_eq!(Kind::named(place.kind.name()), Some(place.kind));
            assert_eq!(Presence::named(place.presence.name()), Some(place.presence));
        }
    }

    #[test]
    fn what_the_kubelet_recorded_may_be_staged_again_and_is_not_settled() {
        let mut table = table();
        run(&mut table, &stage("v"), OK);
        table.add_recorded([("v".into(), "/stage".into()), ("w".into(), "/stage".into())]);
        assert!(table.is_settled("v"), "what is known better stays");
        assert!(table.is_at("w", Kind::Staged, "/stage") && !table.is_settled("w"));
        assert_eq!(table.in_use(), InUse::Yes(2));
    }

    #[test]
    fn what_another_agent_left_goes_over_what_was_known_and_calls_under_way_stay_so() {
        let mut table = table();
        run(&mut table, &stage("out"), OK);
        run(&mut table, &stage("here"), OK);
        let (removing, adding) = (table.begin(&unstage("here")), table.begin(&stage("new")));
        let there = |volume: &str| Place {
            volume: volume.into(),
            kind: Kind::Staged,
            path: "/stage".into(),
            presence: Presence::There,
        };
        table.taken_back([there("here"), there("theirs")]);
        assert_eq!(table.in_use(), InUse::Yes(3), "here, theirs, new");
        assert!(!table.is_at("out", Kind::Staged, "/stage"), "the other one let it out");
        assert!(table.is_at("theirs", Kind::Staged, "/stage") && !table.is_at("here", Kind::Staged, "/stage"));
        table.end(removing, OK);
        assert_eq!(table.in_use(), InUse::Yes(3), "the other one may have staged it after that");
        table.end(adding, INTERNAL);
        assert_eq!((table.in_use(), table.flights.len()), (InUse::Yes(2), 0));
        for volume in ["here", "theirs"] {
            run(&mut table, &unstage(volume), OK);
        }
        assert_eq!((table.in_use(), table.places, table.bytes), (InUse::Unknown, 0, 0), "there may be more");
    }

    #[test]
    fn only_what_a_file_would_show_makes_it_dirty() {
        let mut table = table();
        assert!(table.take_dirty(), "a new table is not on disk yet");
        let id = table.begin(&stage("v"));
        assert!(table.take_dirty() && !table.take_dirty());
        table.end(id, UNAVAILABLE);
        assert!(!table.take_dirty(), "a lost call is written as one in flight is");
        run(&mut table, &VolumeCall::Expand { volume: "v".into() }, OK);
        assert!(!table.take_dirty());
        table.undecodable();
        assert!(table.take_dirty());
    }

    #[test]
    fn a_second_end_is_not_heard() {
        let mut table = table();
        let id = table.begin(&stage("v"));
        table.end(id, OK);
        table.end(id, INTERNAL);
        assert!(table.is_at("v", Kind::Staged, "/stage"));
    }

    /// A call in a driver that does what it is asked at some moment between begin and end.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Begin(bool),
        /// The driver does the call, numbered among those under way.
        Do(usize),
        Answer(usize, u8),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            any::<bool>().prop_map(Step::Begin),
            any::<usize>().prop_map(Step::Do),
            (any::<usize>(), 0_u8..3).prop_map(|(call, end)| Step::Answer(call, end)),
        ];
        proptest::collection::vec(step, 0..60)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn a_volume_that_is_there_is_never_called_gone(steps in steps()) {
            let (mut table, mut there) = (table(), false);
            let mut under_way: Vec<(CallId, bool, bool)> = Vec::new();
            let mut overlapped = false;
            for step in steps {
                match step {
                    Step::Begin(adds) => {
                        let call = if adds { stage("v") } else { unstage("v") };
                        overlapped |= !under_way.is_empty();
                        under_way.push((table.begin(&call), adds, false));
                    }
                    Step::Do(number) if !under_way.is_empty() => {
                        let number = number % under_way.len();
                        let (_, adds, done) = &mut under_way[number];
                        *done = true;
                        there = *adds;
                    }
                    Step::Answer(number, end) if !under_way.is_empty() => {
                        let (id, adds, done) = under_way.remove(number % under_way.len());
                        // What was done is not denied, nor a stage of what is staged; what is lost may have been done or not.
                        let end = match (end, done) {
                            (0, _) => { if !done { there = adds; } OK }
                            (1, false) if !(adds && there) => INTERNAL,
                            _ => End::Lost,
                        };
                        table.end(id, end);
                        if !overlapped && end == OK {
                            prop_assert_eq!(table.in_use() == InUse::No, !adds, "and one after the other, never too late");
                        }
                    }
                    Step::Do(_) | Step::Answer(..) => {}
                }
                prop_assert!(!there || table.in_use() == InUse::Yes(1), "there, and called gone");
                prop_assert!(overlapped || there || !table.is_settled("v") || table.in_use() == InUse::No);
            }
        }
    }
}
