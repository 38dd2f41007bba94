//! Attributes by the parts of their path; what cannot be read is unknown, and nothing else.

use crate::policy::rdma::seen::Attr;
use crate::probe::tree::{MAX_ATTRIBUTE_BYTES, Tree, is_absence};
use rustix::io::Errno;

/// Enough for the routes of any node; defaults stand first.
const MAX_TABLE_BYTES: usize = 64 * 1024;

/// A tree, and buffers that are used again and again.
#[derive(Debug)]
pub(super) struct Attributes {
    tree: Tree,
    path: String,
    buffer: [u8; MAX_ATTRIBUTE_BYTES],
}

impl Attributes {
    pub(super) fn new(tree: Tree) -> Self {
        Self { tree, path: String::new(), buffer: [0; MAX_ATTRIBUTE_BYTES] }
    }

    fn at(&mut self, parts: &[&str]) -> &str {
        self.path.clear();
        for part in parts {
            if !self.path.is_empty() {
                self.path.push('/');
            }
            self.path.push_str(part);
        }
        &self.path
    }

    fn read(&mut self, parts: &[&str]) -> Result<&str, Errno> {
        self.at(parts);
        self.tree.read(&self.path, &mut self.buffer).map(str::trim)
    }

    /// One attribute, by `parse`; what it makes nothing of is unreadable.
    pub(super) fn parsed<T>(&mut self, parts: &[&str], parse: impl FnOnce(&str) -> Option<T>) -> Attr<T> {
        match self.read(parts) {
            Ok(text) => parse(text).map_or(Attr::Unreadable, Attr::Known),
            Err(error) if is_absence(error) => Attr::Absent,
            Err(_error) => Attr::Unreadable,
        }
    }

    /// As [`Self::parsed`], where the kernel says of an empty slot that it is invalid or has no data.
    pub(super) fn slot<T>(&mut self, parts: &[&str], parse: impl FnOnce(&str) -> Option<T>) -> Attr<T> {
        match self.read(parts) {
            Ok("") => Attr::Absent,
            Ok(text) => parse(text).map_or(Attr::Unreadable, Attr::Known),
            Err(Errno::INVAL | Errno::NODATA) => Attr::Absent,
            Err(error) if is_absence(error) => Attr::Absent,
            Err(_error) => Attr::Unreadable,
        }
    }

    /// The text of one attribute; an empty one says nothing.
    pub(super) fn text(&mut self, parts: &[&str]) -> Attr<String> {
        self.parsed(parts, |text| (!text.is_empty() && !text.contains(char::is_control)).then(|| text.to_owned()))
    }

    /// A longer file, as far as is needed.
    pub(super) fn bytes(&mut self, parts: &[&str]) -> Option<Vec<u8>> {
        self.bytes_within(parts, MAX_TABLE_BYTES)
    }

    pub(super) fn bytes_within(&mut self, parts: &[&str], most: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; most];
        self.at(parts);
        let length = self.tree.read_bytes(&self.path, &mut bytes).ok()?;
        bytes.truncate(length);
        Some(bytes)
    }

    /// The names in a folder; none where it cannot be listed.
    pub(super) fn list(&mut self, parts: &[&str]) -> Vec<String> {
        self.listed(parts).unwrap_or_default()
    }

    pub(super) fn listed(&mut self, parts: &[&str]) -> Result<Vec<String>, Errno> {
        self.at(parts);
        self.tree.list(&self.path)
    }

    /// Whether the path leads to something.
    pub(super) fn has(&mut self, parts: &[&str]) -> bool {
        self.at(parts);
        self.tree.exists(&self.path) == Ok(true)
    }

    /// Which folder it is, as long as it lives; `None` where there is none.
    pub(super) fn inode(&mut self, parts: &[&str]) -> Option<u64> {
        self.at(parts);
        self.tree.stat(&self.path).ok().map(|stat| stat.st_ino)
    }

    /// What the link says.
    pub(super) fn link(&mut self, parts: &[&str]) -> Option<String> {
        self.at(parts);
        self.tree.link(&self.path)
    }

    /// Whether there is a link, wherever it leads.
    pub(super) fn links(&mut self, parts: &[&str]) -> bool {
        self.link(parts).is_some()
    }
}
