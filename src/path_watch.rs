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
/// All that may block in the file system is in [`Target::look`], which belongs on the caller's lane and before its own look
/// at the file; what it gives is taken over by [`PathWatch::adopt`]. Writes count when the file is closed: a writer between
/// truncating and writing is not worth a look. Where inotify is not to be had, nothing is ever reported, and the caller's own
/// period has to do.
#[derive(Debug)]
pub struct PathWatch {
    target: Target,
    events: Option<EventStream<Vec<u8>>>,
    names: BTreeSet<OsString>,
    warned: bool,
}

/// The path, and the folder that is watched for its sake.
#[derive(Debug, Clone)]
pub struct Target {
    folder: PathBuf,
    file: OsString,
    watched: Option<Watched>,
}

/// The folder asked for, or its nearest ancestor that exists, and which one that was.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Watched {
    folder: PathBuf,
    identity: (u64, u64),
}

/// What a look at the folder gave.
#[derive(Debug)]
pub struct Looked {
    /// A new watch, where the old one no longer fits.
    watch: io::Result<Option<(Watched, Inotify)>>,
    names: BTreeSet<OsString>,
}

impl PathWatch {
    /// Watches `path`; its folder need not exist yet. Nothing is reported before the first [`Self::adopt`].
    pub fn new(path: &Path) -> Self {
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            Some(_) | None => PathBuf::from("."),
        };
        let target = Target { folder, file: path.file_name().unwrap_or_default().to_owned(), watched: None };
        Self { target, events: None, names: BTreeSet::new(), warned: false }
    }

    /// What to look at before each look at the file.
    pub fn target(&self) -> Target {
        self.target.clone()
    }

    /// Goes on with what the look gave.
    pub fn adopt(&mut self, looked: Looked) {
        self.names = looked.names;
        let stream = match looked.watch {
            Ok(None) => return,
            Ok(Some((watched, inotify))) => inotify.into_event_stream(vec![0; 4096]).map(|events| (watched, events)),
            Err(error) => Err(error),
        };
        match stream {
            Ok((watched, events)) => {
                self.target.watched = Some(watched);
                self.events = Some(events);
            }
            Err(error) => {
                (self.target.watched, self.events) = (None, None);
                if !std::mem::replace(&mut self.warned, true) {
                    warn!(
                        error = &error as &dyn std::error::Error,
                        path = %self.target.folder.display(),
                        "cannot watch the folder, so changes are only seen once a period"
                    );
                }
            }
        }
    }

    /// Waits until something at the path may have changed. Cancelling it loses nothing.
    pub async fn changed(&mut self) {
        let Some(events) = &mut self.events else {
            return future::pending().await;
        };
        let names = &self.names;
        let ended = future::poll_fn(|context| poll_changes(events, names, context)).await;
        if ended {
            // The next look sets up a new watch.
            (self.target.watched, self.events) = (None, None);
        }
    }
}

impl Target {
    /// Looks which folder is to be watched and which names in it matter. Notices what inotify does not tell, such as another
    /// file system mounted over the folder. Blocks as long as the file system does.
    pub fn look(&self) -> Looked {
        let nearest = nearest_folder(&self.folder);
        let names = match nearest {
            Some(folder) if folder == self.folder => names_of_interest(folder, &self.file),
            Some(folder) => next_component(folder, &self.folder),
            None => BTreeSet::new(),
        };
        let watch = match nearest {
            Some(folder) => self.watch(folder),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        Looked { watch, names }
    }

    fn watch(&self, folder: &Path) -> io::Result<Option<(Watched, Inotify)>> {
        let metadata = fs::metadata(folder)?;
        let watched = Watched { folder: folder.to_owned(), identity: (metadata.dev(), metadata.ino()) };
        if self.watched.as_ref() == Some(&watched) {
            return Ok(None);
        }
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
        Ok(Some((watched, inotify)))
    }
}

/// Ready once one of `names` was named (false), or the watch is worth nothing any more (true): the folder is gone, or events
/// were lost.
fn poll_changes(
    events: &mut EventStream<Vec<u8>>,
    names: &BTreeSet<OsString>,
    context: &mut Context<'_>,
) -> Poll<bool> {
    let ends =
        EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED | EventMask::UNMOUNT | EventMask::Q_OVERFLOW;
    let mut named = false;
    for _ in 0..MOST_EVENTS {
        match Pin::new(&mut *events).poll_next(context) {
            Poll::Ready(Some(Ok(event))) if event.mask.intersects(ends) => return Poll::Ready(true),
            Poll::Ready(Some(Ok(event))) => named |= event.name.is_some_and(|name| names.contains(&name)),
            Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(true),
            Poll::Pending if named => return Poll::Ready(false),
            Poll::Pending => return Poll::Pending,
        }
    }
    // A storm: let the others have their turn, and come back.
    context.waker().wake_by_ref();
    if named { Poll::Ready(false) } else { Poll::Pending }
}

fn nearest_folder(folder: &Path) -> Option<&Path> {
    let ancestors = folder.ancestors();
    ancestors
        .map(|ancestor| if ancestor.as_os_str().is_empty() { Path::new(".") } else { ancestor })
        .find(|it| it.is_dir())
}

/// On the way from an ancestor to the folder, the name that has to appear in it.
fn next_component(ancestor: &Path, folder: &Path) -> BTreeSet<OsString> {
    let rest = folder.strip_prefix(ancestor).unwrap_or(folder);
    rest.components()
        .find_map(|part| if let Component::Normal(name) = part { Some(name.to_owned()) } else { None })
        .into_iter()
        .collect()
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

    /// The change is seen, and looked at.
    async fn expect_change(watch: &mut PathWatch, what: &str) {
        timeout(SOON, watch.changed()).await.unwrap_or_else(|_| panic!("not seen: {what}"));
        watch.adopt(watch.target().look());
    }

    fn watching(path: &Path) -> PathWatch {
        let mut watch = PathWatch::new(path);
        watch.adopt(watch.target().look());
        watch
    }

    #[tokio::test]
    async fn every_way_a_file_changes_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health");
        let mut watch = watching(&path);
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
        let mut watch = watching(&at("health"));
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
        let mut watch = watching(&path);
        for round in 0..3 {
            fs::create_dir(root.path().join("a")).unwrap();
            expect_change(&mut watch, "the parent made").await;
            fs::create_dir(&folder).unwrap();
            expect_change(&mut watch, "the folder made").await;
            fs::write(&path, round.to_string()).unwrap();
            expect_change(&mut watch, "written").await;
            fs::remove_dir_all(root.path().join("a")).unwrap();
            // Removed piece by piece, each a change of its own.
            while watch.target().watched.is_none_or(|watched| watched.folder != root.path()) {
                expect_change(&mut watch, "removed").await;
            }
        }
    }

    #[tokio::test]
    async fn a_folder_replaced_without_an_event_is_noticed_at_the_next_look() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a");
        fs::create_dir(&folder).unwrap();
        let mut watch = watching(&folder.join("health"));
        watch.target.watched.as_mut().unwrap().identity.1 += 1;
        watch.adopt(watch.target().look());
        assert_eq!(watch.target.watched.as_ref().unwrap().identity.1, fs::metadata(&folder).unwrap().ino());
    }

    #[tokio::test]
    async fn other_files_in_the_folder_are_not_worth_a_look() {
        let folder = tempfile::tempdir().unwrap();
        let mut watch = watching(&folder.path().join("health"));
        fs::write(folder.path().join("other"), "x").unwrap();
        assert!(timeout(Duration::from_millis(300), watch.changed()).await.is_err());
    }
}
