//! The table of volumes in use, shared between the calls that change it, whoever reads it, and its record on disk.

use crate::policy::volumes::{InUse, Place, VolumeTable};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// The table. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Volumes(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    table: Mutex<VolumeTable>,
    in_use: watch::Sender<InUse>,
    /// How often the table has changed in a way that is worth a record.
    changes: watch::Sender<u64>,
    /// Up to which change the record is; `None` if nobody keeps one.
    recorded: watch::Sender<Option<u64>>,
}

impl Volumes {
    /// Shares a table of which nobody keeps a record yet.
    pub fn new(table: VolumeTable) -> Self {
        Self(Arc::new(Shared {
            in_use: watch::channel(table.in_use()).0,
            table: Mutex::new(table),
            changes: watch::channel(0).0,
            recorded: watch::channel(None).0,
        }))
    }

    /// Changes the table.
    pub fn change<T>(&self, change: impl FnOnce(&mut VolumeTable) -> T) -> T {
        let mut table = self.table();
        let result = change(&mut table);
        let in_use = table.in_use();
        self.0.in_use.send_if_modified(|before| std::mem::replace(before, in_use) != in_use);
        if table.take_dirty() {
            self.0.changes.send_modify(|changes| *changes += 1);
        }
        result
    }

    /// Looks at the table.
    pub fn look<T>(&self, look: impl FnOnce(&VolumeTable) -> T) -> T {
        look(&self.table())
    }

    /// Whether volumes are in use, now and whenever that changes.
    pub fn in_use(&self) -> watch::Receiver<InUse> {
        self.0.in_use.subscribe()
    }

    /// Every place of a volume.
    pub fn places(&self) -> Vec<Place> {
        self.table().places().collect()
    }

    /// Waits until what has changed up to now is on record; at once if nobody keeps one.
    pub async fn recorded(&self) {
        let until = *self.0.changes.borrow();
        // It is dropped only with the table.
        drop(self.0.recorded.subscribe().wait_for(|at| at.is_none_or(|at| at >= until)).await);
    }

    fn table(&self) -> MutexGuard<'_, VolumeTable> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
