//! A volume at a place, in words: staged or published, where, and how sure that is; and the rule by which the end of a call
//! changes it. The table of volumes has many of these; the file that keeps the table has their names.

use super::volume_call::{Verb, Word};

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

/// What is believed of one place, and what is under way there.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Entry {
    /// `None`: not there; the entry lives as long as calls are in flight.
    pub(super) presence: Option<Presence>,
    pub(super) adding: usize,
    pub(super) removing: usize,
    /// The newest call that has ended.
    pub(super) decided: u64,
}

impl Entry {
    /// As it would be if the answers to all calls in flight were lost.
    pub(super) fn at_worst(&self) -> Option<Presence> {
        match self.presence {
            _ if self.removing > 0 => Some(Presence::Leaving),
            Some(Presence::There) if self.adding > 0 => Some(Presence::Renewing),
            None if self.adding > 0 => Some(Presence::Coming),
            presence => presence,
        }
    }

    pub(super) fn ended(&mut self, verb: Verb, word: Word, newest: bool, crossed: bool) {
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

/// Whether the kubelet publishes volumes at such a path, as files or as a block device, and will unpublish it there.
///
/// Source: <https://github.com/kubernetes/kubernetes/blob/v1.36.2/pkg/volume/csi/csi_mounter.go>, and csi_block.go
pub(super) fn is_kubelets_target(path: &str) -> bool {
    let files = path.ends_with("/mount") && path.contains("/volumes/kubernetes.io~csi/");
    files || path.contains("/kubernetes.io/csi/volumeDevices/publish/")
}
