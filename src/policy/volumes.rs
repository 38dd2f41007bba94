//! Which volumes are in use here, by the calls seen: what a fence must let out before the driver may be withdrawn.
//!
//! Careful in one direction only: what may be there counts as there. The kubelet is heard as it hears the driver: a final
//! error means "surely not in progress", any other that it may still happen.

use super::volume_call::{End, Verb, VolumeCall, Word};
use super::volume_place::{Entry, Kind, Place, Presence, is_kubelets_target};
use std::collections::BTreeMap;

/// Far above what a node can mount; beyond it the table says that it is not complete.
const MOST_PLACES: usize = 100_000;

/// All texts together. A node with 500 volumes has below 1 MiB.
const MOST_BYTES: usize = 16 * 1024 * 1024;

/// The longest volume ID or path that is kept: PATH_MAX.
const MOST_TEXT_BYTES: usize = 4096;

/// One call between its begin and its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(u64);

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
        let under_way = || self.flights.values().any(|flight| flight.call.subject().0 == volume);
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
        let (volume, place) = flight.call.subject();
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
        let (volume, place) = flight.call.subject();
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
            let (volume, there) = flight.call.subject();
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

fn published(target: &str) -> (Kind, String) {
    (Kind::Published, target.to_owned())
}

#[cfg(test)]
mod tests;
