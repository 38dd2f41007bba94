//! A call about a volume, in words: what it asks for, and what its end says about whether it was done. The table of volumes
//! and the fence ask it which place it is about; the proxy makes it from bytes.

use super::volume_place::Kind;

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

/// Which way a call changes its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Add,
    Remove,
}

impl VolumeCall {
    /// The volume, and which of its places the call changes, and how.
    pub(super) fn subject(&self) -> (&str, Option<(Kind, &str, Verb)>) {
        match self {
            Self::Stage { volume, path } => (volume, Some((Kind::Staged, path, Verb::Add))),
            Self::Unstage { volume, path } => (volume, Some((Kind::Staged, path, Verb::Remove))),
            Self::Publish { volume, target } => (volume, Some((Kind::Published, target, Verb::Add))),
            Self::Unpublish { volume, target } => (volume, Some((Kind::Published, target, Verb::Remove))),
            Self::Expand { volume } => (volume, None),
        }
    }
}

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
pub(super) enum Word {
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
    pub(super) fn word(self) -> Word {
        match self {
            Self::Code(0) => Word::Done,
            Self::Code(1 | 4 | 8 | 10 | 14) | Self::Lost => Word::Open,
            Self::Code(_) => Word::NotDone,
        }
    }
}
