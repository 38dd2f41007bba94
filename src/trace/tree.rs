//! The tree of a trace at one moment: the same rules for whoever writes one and whoever reads it.

use super::Change;
use super::entry::{Entry, MAX_PATH_BYTES, Problem};
use std::collections::BTreeMap;
use std::ops::Bound;

/// What a path begins with: the host's `/sys`, `/dev` and `/proc`, and health files by their probes' names.
pub const ROOTS: [&str; 4] = ["sys", "dev", "proc", "health"];

/// More is no host's.
const MAX_ENTRIES: usize = 50_000;

/// Entries by their path. What has something below it is a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tree {
    entries: BTreeMap<String, Entry>,
}

impl Tree {
    /// Takes in a change of what is at a path.
    ///
    /// # Errors
    /// Why it cannot be.
    pub fn change(&mut self, path: &str, entry: Option<&Entry>) -> Result<(), Problem> {
        check(path, entry)?;
        let Some(entry) = entry else {
            return if self.remove(path) { Ok(()) } else { Err("there is nothing that could be gone") };
        };
        for (at, _) in path.match_indices('/') {
            match self.entries.get(&path[..at]) {
                None | Some(Entry::Folder) => {}
                Some(Entry::Link(_)) => return Err("it lies behind a link: write the path that the link leads to"),
                Some(_) => return Err("it lies below what is no folder"),
            }
        }
        if !(*entry == Entry::Folder && self.entries.get(path) == Some(&Entry::Folder)) {
            self.remove(path);
        }
        for (at, _) in path.match_indices('/') {
            self.entries.entry(path[..at].to_owned()).or_insert(Entry::Folder);
        }
        self.entries.insert(path.to_owned(), entry.clone());
        if self.entries.len() > MAX_ENTRIES { Err("the tree has over 50000 entries") } else { Ok(()) }
    }

    /// The changes that make this tree of `before`. Health files are left out: they are written again without a change.
    pub fn changes_since(&self, before: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut gone: Option<&str> = None;
        for path in before.entries.keys().filter(|path| !self.entries.contains_key(*path)) {
            if gone.is_none_or(|gone| !is_below(path, gone)) {
                gone = Some(path);
                changes.push(Change::Path(path.clone(), None));
            }
        }
        for (path, entry) in &self.entries {
            let is_new = before.entries.get(path) != Some(entry);
            // A folder is told by what is in it, unless something else was there.
            let told = *entry == Entry::Folder && self.has_below(path) && !before.entries.contains_key(path);
            if is_new && !told {
                changes.push(Change::Path(path.clone(), Some(entry.clone())));
            }
        }
        changes
    }

    /// Its entries.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    /// What is at a path.
    pub fn at(&self, path: &str) -> Option<&Entry> {
        self.entries.get(path)
    }

    fn remove(&mut self, path: &str) -> bool {
        let below: Vec<String> = self.below(path).cloned().collect();
        for below in &below {
            self.entries.remove(below);
        }
        self.entries.remove(path).is_some()
    }

    fn has_below(&self, path: &str) -> bool {
        self.below(path).next().is_some()
    }

    fn below<'a>(&'a self, path: &str) -> impl Iterator<Item = &'a String> {
        let first = format!("{path}/");
        let from: (Bound<String>, Bound<String>) = (Bound::Included(first.clone()), Bound::Unbounded);
        self.entries.range(from).map(|(path, _)| path).take_while(move |path| path.starts_with(&first))
    }
}

fn is_below(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
}

fn check(path: &str, entry: Option<&Entry>) -> Result<(), Problem> {
    if path.len() > MAX_PATH_BYTES {
        return Err("the path is longer than 1024 bytes");
    }
    let mut steps = path.split('/');
    let root = steps.next().unwrap_or_default();
    if !ROOTS.contains(&root) {
        return Err("a path begins with sys/, dev/, proc/ or health/");
    }
    let mut depth = 0;
    for step in steps {
        depth += 1;
        if matches!(step, "" | "." | "..") || step.contains('\0') || step.len() > 255 {
            return Err("a path has plain names between its slashes, of at most 255 bytes, and no `.` or `..`");
        }
    }
    match (root, depth, entry) {
        ("health", 1, Some(Entry::Value(_)) | None) => Ok(()),
        ("health", ..) => Err("a health file is written `health/PROBE = TEXT`, or `gone`"),
        (_, 0, Some(Entry::Folder) | None) => Ok(()),
        (_, 0, _) => Err("the root of a tree is a folder"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Entry {
        Entry::Value(text.into())
    }

    #[test]
    fn what_is_removed_takes_what_is_below_with_it_and_nothing_beside_it() {
        let mut tree = Tree::default();
        for path in ["sys/a/b", "sys/a/c/d", "sys/a-b", "sys/a.b"] {
            tree.change(path, Some(&value("x"))).unwrap();
        }
        tree.change("sys/a", None).unwrap();
        let left: Vec<_> = tree.entries().map(|(path, _)| path).collect();
        assert_eq!(left, ["sys", "sys/a-b", "sys/a.b"]);
        assert!(tree.change("sys/a", None).is_err());
    }

    #[test]
    fn the_difference_of_two_trees_leads_from_one_to_the_other() {
        let tree = |paths: &[(&str, Entry)]| {
            let mut tree = Tree::default();
            for (path, entry) in paths {
                tree.change(path, Some(entry)).unwrap();
            }
            tree
        };
        let trees = [
            tree(&[]),
            tree(&[("sys/a/b", value("1")), ("sys/a/c", Entry::Link("../b".into())), ("sys/a.b", value("2"))]),
            tree(&[("sys/a/b", value("3")), ("sys/a.b", Entry::Folder)]),
            tree(&[("sys/a/b/c", value("3")), ("dev/x", Entry::Unreadable("EIO".into()))]),
            tree(&[("sys/a", value("3"))]),
        ];
        for from in &trees {
            for to in &trees {
                let mut made = from.clone();
                for change in to.changes_since(from) {
                    let Change::Path(path, entry) = change else { panic!("{change:?}") };
                    made.change(&path, entry.as_ref()).unwrap_or_else(|problem| panic!("{path}: {problem}"));
                }
                assert_eq!(made, *to);
            }
        }
    }

    #[test]
    fn nothing_lies_behind_a_link_or_outside_of_the_roots() {
        let mut tree = Tree::default();
        tree.change("sys/a", Some(&Entry::Link("/etc".into()))).unwrap();
        for path in
            ["sys/a/b", "sys/../x", "/sys/x", "etc/x", "sys//x", "sys/./x", "sys/x/", "", "health", "health/a/b", "sys"]
        {
            assert!(tree.change(path, Some(&value("x"))).is_err(), "{path}");
        }
        assert!(tree.change("health/a", Some(&Entry::Link("/etc/shadow".into()))).is_err());
        assert!(tree.change("sys/a", Some(&Entry::Folder)).is_ok(), "the link itself may go");
    }
}
