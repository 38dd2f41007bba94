//! Tells when the file at a path may have changed: written, renamed over, removed, its link swapped, its folder gone or back.

use inotify::{EventMask, EventStream, Inotify, WatchMask};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::{fs, future, io};
use tokio_stream::Stream;
use tracing::warn;

/// Links in a chain that are followed to learn which names matter; the kernel itself stops at 40.
const MOST_LINKS: usize = 8;

/// Events taken in one go, so that a storm in the folder cannot hold up everything else.
const MOST_EVENTS: usize = 1024;

/// Watches one path through its folder.
///
/// Writes count when the file is closed: a writer between truncating and writing is not worth a look. Where inotify is not
/// to be had, nothing is ever reported, and the caller's own period has to do.
#[derive(Debug)]
pub struct PathWatch {
    folder: PathBuf,
    file: OsString,
    watch: Option<Watch>,
    warned: bool,
}

impl PathWatch {
    /// Watches `path`; its folder need not exist yet.
    pub fn new(path: &Path) -> Self {
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            Some(_) | None => PathBuf::from("."),
        };
        Self {
            folder,
            file: path.file_name().unwrap_or_default().to_owned(),
            watch: None,
            warned: false,
        }
    }

    /// Waits until something at the path may have changed. Returns at once the first time, and whenever a new watch had to
    /// be set up, because what happened before it is unknown. Cancelling it loses nothing.
    pub async fn changed(&mut self) {
        if self.watch.is_none() {
            match Watch::nearest(&self.folder) {
                Ok(watch) => {
                    self.watch = Some(watch);
                    return;
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.warned, true) {
                        warn!(
                            error = &error as &dyn std::error::Error,
                            path = %self.folder.display(),
                            "cannot watch the folder, so changes are only seen once a period"
                        );
                    }
                    return future::pending().await;
                }
            }
        }
        loop {
            let Some(watch) = &mut self.watch else { return };
            let changes = watch.changes().await;
            let asked_for = watch.folder == self.folder;
            if changes.ended || (!asked_for && self.nearest_moved()) {
                self.watch = None;
                return;
            }
            if asked_for && !changes.names.is_disjoint(&names_of_interest(&self.folder, &self.file)) {
                return;
            }
        }
    }

    /// Call once in a while: notices what inotify does not tell, such as another file system mounted over the folder.
    pub fn recheck(&mut self) {
        if self
            .watch
            .as_ref()
            .is_some_and(|watch| !watch.is_current() || (watch.folder != self.folder && self.nearest_moved()))
        {
            self.watch = None;
        }
    }

    fn nearest_moved(&self) -> bool {
        self.watch
            .as_ref()
            .is_none_or(|watch| nearest_folder(&self.folder) != Some(watch.folder.as_path()))
    }
}

#[derive(Debug)]
struct Watch {
    /// The folder asked for, or its nearest ancestor that exists.
    folder: PathBuf,
    identity: (u64, u64),
    events: EventStream<Vec<u8>>,
}

#[derive(Debug, Default)]
struct Changes {
    names: BTreeSet<OsString>,
    /// The folder is gone, or events were lost: look afresh.
    ended: bool,
}

impl Watch {
    fn nearest(folder: &Path) -> io::Result<Self> {
        let folder = nearest_folder(folder).ok_or(io::ErrorKind::NotFound)?;
        let inotify = Inotify::init()?;
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::CREATE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        inotify.watches().add(folder, mask)?;
        let identity = identity(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            identity,
            events: inotify.into_event_stream(vec![0; 4096])?,
        })
    }

    fn is_current(&self) -> bool {
        identity(&self.folder).is_ok_and(|identity| identity == self.identity)
    }

    /// Everything that has happened, as soon as something has.
    async fn changes(&mut self) -> Changes {
        future::poll_fn(|context| self.poll_changes(context)).await
    }

    fn poll_changes(&mut self, context: &mut Context<'_>) -> Poll<Changes> {
        let mut changes = Changes::default();
        for _ in 0..MOST_EVENTS {
            match Pin::new(&mut self.events).poll_next(context) {
                Poll::Ready(Some(Ok(event))) => {
                    let ends = EventMask::DELETE_SELF
                        | EventMask::MOVE_SELF
                        | EventMask::IGNORED
                        | EventMask::UNMOUNT
                        | EventMask::Q_OVERFLOW;
                    changes.ended |= event.mask.intersects(ends);
                    changes.names.extend(event.name);
                }
                Poll::Ready(Some(Err(_)) | None) => changes.ended = true,
                Poll::Pending => break,
            }
            if changes.ended {
                break;
            }
        }
        if changes.ended || !changes.names.is_empty() {
            Poll::Ready(changes)
        } else {
            Poll::Pending
        }
    }
}

fn identity(folder: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::metadata(folder)?;
    Ok((metadata.dev(), metadata.ino()))
}

fn nearest_folder(folder: &Path) -> Option<&Path> {
    folder
        .ancestors()
        .map(|ancestor| {
            if ancestor.as_os_str().is_empty() {
                Path::new(".")
            } else {
                ancestor
            }
        })
        .find(|ancestor| ancestor.is_dir())
}

/// The names in the folder whose change may change what the path shows: its own, and those its links go through
/// (`health -> ..data/health`, `..data -> ..2026_11_30`, as ConfigMap volumes are laid out).
fn names_of_interest(folder: &Path, file: &OsStr) -> BTreeSet<OsString> {
    let mut names = BTreeSet::from([file.to_owned()]);
    let mut name = file.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(target) = fs::read_link(folder.join(&name)) else {
            break;
        };
        let Some(Component::Normal(first)) = target.components().next() else {
            break;
        };
        name = first.to_owned();
        names.insert(name.clone());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::time::Duration;
    use tokio::time::timeout;

    /// Generous: inotify itself needs microseconds.
    const SOON: Duration = Duration::from_secs(10);

    async fn expect_change(watch: &mut PathWatch, what: &str) {
        timeout(SOON, watch.changed())
            .await
            .unwrap_or_else(|_| panic!("not seen: {what}"));
    }

    async fn settled(path: &Path) -> PathWatch {
        let mut watch = PathWatch::new(path);
        expect_change(&mut watch, "the first look").await;
        watch
    }

    #[tokio::test]
    async fn every_way_a_file_changes_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health");
        let mut watch = settled(&path).await;
        fs::write(&path, "OK").unwrap();
        expect_change(&mut watch, "created").await;
        fs::write(&path, "ERROR").unwrap();
        expect_change(&mut watch, "written again").await;
        fs::OpenOptions::new().write(true).truncate(true).open(&path).unwrap();
        expect_change(&mut watch, "truncated").await;
        fs::write(folder.path().join("new"), "OK").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        expect_change(&mut watch, "renamed over").await;
        fs::remove_file(&path).unwrap();
        expect_change(&mut watch, "removed").await;
    }

    #[tokio::test]
    async fn a_swapped_configmap_link_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for version in ["..v1", "..v2"] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("health"), version).unwrap();
        }
        symlink("..v1", at("..data")).unwrap();
        symlink("..data/health", at("health")).unwrap();
        let mut watch = settled(&at("health")).await;
        symlink("..v2", at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        expect_change(&mut watch, "swapped").await;
        assert_eq!(fs::read_to_string(at("health")).unwrap(), "..v2");
    }

    #[tokio::test]
    async fn a_folder_that_appears_goes_and_comes_back_is_followed() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b");
        let path = folder.join("health");
        let mut watch = settled(&path).await;
        for round in 0..3 {
            fs::create_dir_all(&folder).unwrap();
            expect_change(&mut watch, "folder made").await;
            // Setting up the watch on the new folder may be a change of its own.
            while timeout(Duration::from_millis(200), watch.changed()).await.is_ok() {}
            fs::write(&path, round.to_string()).unwrap();
            expect_change(&mut watch, "written").await;
            fs::remove_dir_all(root.path().join("a")).unwrap();
            expect_change(&mut watch, "folder removed").await;
            while timeout(Duration::from_millis(200), watch.changed()).await.is_ok() {}
        }
    }

    #[tokio::test]
    async fn other_files_in_the_folder_are_not_worth_a_look() {
        let folder = tempfile::tempdir().unwrap();
        let mut watch = settled(&folder.path().join("health")).await;
        fs::write(folder.path().join("other"), "x").unwrap();
        assert!(timeout(Duration::from_millis(300), watch.changed()).await.is_err());
    }
}
