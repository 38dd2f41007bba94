//! What probes read on this host, at one moment. The same paths as theirs and no others, each value no longer than they take it.

mod gpu;
mod nvme;
mod rdma;

use super::entry::Entry;
use super::tree::Tree as Entries;
use crate::config::probes::ProbeKind;
use crate::probe::tree::{MAX_ATTRIBUTE_BYTES, Tree, is_absence};
use std::path::Path;

/// As in the kernel.
const MAX_LINKS: usize = 40;

/// Of a health file and of a table of routes.
const MAX_TEXT_BYTES: usize = 4096;

/// What a probe of this kind reads; nothing for those that a trace cannot hold. Blocks as long as the kernel does.
pub(super) fn take(kind: &ProbeKind) -> Entries {
    let mut entries = Entries::default();
    match kind {
        ProbeKind::Rdma(rdma) => rdma::take(rdma, &mut entries),
        ProbeKind::Nvme(nvme) => nvme::take(nvme, &mut entries),
        ProbeKind::Gpu(gpu) => gpu::take(gpu, &mut entries),
        ProbeKind::Kmsg(_) | ProbeKind::HealthFile { .. } | ProbeKind::Csi { .. } | ProbeKind::Exec { .. } => {}
    }
    entries
}

/// Looks at paths of one tree, and notes what is there under the paths that their links lead to.
struct Walk<'a> {
    tree: Tree,
    root: &'static str,
    entries: &'a mut Entries,
}

/// A folder or file behind all links, from the root of its tree on.
type Place = String;

impl<'a> Walk<'a> {
    /// `None` if there is no such tree.
    fn new(path: &Path, root: &'static str, entries: &'a mut Entries) -> Option<Self> {
        Some(Self { tree: Tree::open(path).ok()?, root, entries })
    }

    /// Follows `path` from `from`, and notes the links on the way.
    fn reach(&mut self, from: &str, path: &str) -> Option<Place> {
        let mut here = from.to_owned();
        let mut left: Vec<String> = steps(path);
        let mut links = 0;
        while let Some(step) = left.pop() {
            if step == ".." {
                here.truncate(here.rfind('/').unwrap_or_default());
                continue;
            }
            let next = join(&here, &step);
            match self.tree.link(&next) {
                Some(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return None;
                    }
                    if target.starts_with('/') {
                        here.clear();
                    }
                    left.extend(steps(&target));
                    self.note(&next, Entry::Link(target));
                }
                None => here = next,
            }
        }
        Some(here)
    }

    /// The folder at `path`, noted if it is one.
    fn folder(&mut self, from: &str, path: &str) -> Option<Place> {
        let place = self.reach(from, path)?;
        let is_folder = self.tree.exists(&join(&place, ".")) == Ok(true);
        if is_folder {
            self.note(&place, Entry::Folder);
        }
        is_folder.then_some(place)
    }

    /// The names in the folder at `path`.
    fn names(&mut self, from: &str, path: &str) -> Vec<String> {
        let Some(place) = self.reach(from, path) else { return Vec::new() };
        match self.tree.list(&place) {
            Ok(names) => {
                self.note(&place, Entry::Folder);
                names
            }
            Err(error) if is_absence(error) => Vec::new(),
            Err(error) => {
                self.note(&place, Entry::unreadable(error));
                Vec::new()
            }
        }
    }

    /// The value at `path`, noted; gives it as text.
    fn value(&mut self, from: &str, path: &str) -> Option<String> {
        self.value_up_to(from, path, MAX_ATTRIBUTE_BYTES)
    }

    fn value_up_to(&mut self, from: &str, path: &str, most: usize) -> Option<String> {
        let place = self.reach(from, path)?;
        let mut bytes = vec![0; most];
        match self.tree.read_bytes(&place, &mut bytes) {
            Ok(length) => {
                bytes.truncate(length);
                let text = String::from_utf8_lossy(&bytes).trim().to_owned();
                self.note(&place, Entry::Value(bytes));
                Some(text)
            }
            Err(error) => {
                if !is_absence(error) {
                    self.note(&place, Entry::unreadable(error));
                }
                None
            }
        }
    }

    fn values(&mut self, from: &str, names: &[&str]) {
        for name in names {
            self.value(from, name);
        }
    }

    /// The link at `path` itself, not followed.
    fn link(&mut self, from: &str, path: &str) -> Option<String> {
        let path = join(from, path);
        let target = self.tree.link(&path)?;
        self.note(&path, Entry::Link(target.clone()));
        Some(target)
    }

    fn note(&mut self, place: &str, entry: Entry) {
        let path = join(self.root, place);
        // A folder that is full already stays as it is; what cannot be told by a path of ours is left out.
        if !(entry == Entry::Folder && self.entries.at(&path).is_some()) {
            self.entries.change(&path, Some(&entry)).ok();
        }
    }
}

/// The last step first.
fn steps(path: &str) -> Vec<String> {
    path.split('/').rev().filter(|step| !matches!(*step, "" | ".")).map(str::to_owned).collect()
}

fn join(folder: &str, name: &str) -> String {
    match (folder, name) {
        ("", name) => name.to_owned(),
        (folder, "") => folder.to_owned(),
        (folder, name) => format!("{folder}/{name}"),
    }
}
