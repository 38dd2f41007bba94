//! A tree of the kernel's small files, as mounted somewhere: read within its root, whatever its links say, and never waiting.

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, readlinkat};
use rustix::io::{Errno, read};
use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

/// Longer than any attribute that is read here; more is cut off.
pub const MAX_ATTRIBUTE_BYTES: usize = 256;

/// A folder with more is not the kernel's.
const MAX_ENTRIES: usize = 4096;

/// As in the kernel.
const MAX_LINKS: usize = 40;

/// A rename anywhere may disturb a walk through `..`; the kernel then asks to try again.
const MAX_TRIES: usize = 16;

/// The root of a tree.
///
/// Every path is looked up as if this were `/`: absolute links and `..` stay within.
#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
    /// Whether the kernel looks paths up; Linux before 5.6, and some seccomp profiles, do not.
    by_kernel: Cell<bool>,
}

impl Tree {
    /// Opens the root.
    ///
    /// # Errors
    /// The operating system's.
    pub fn open(root: &Path) -> Result<Self, Errno> {
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        Ok(Self { root: openat(CWD, root, flags, Mode::empty())?, by_kernel: Cell::new(true) })
    }

    /// Reads a small file into `buffer`, without waiting.
    ///
    /// # Errors
    /// The operating system's; `ILSEQ` for what is no text, `INVAL` for what is no regular file.
    pub fn read<'b>(&self, path: &str, buffer: &'b mut [u8; MAX_ATTRIBUTE_BYTES]) -> Result<&'b str, Errno> {
        let length = self.read_bytes(path, buffer)?;
        std::str::from_utf8(&buffer[..length]).map_err(|_not_text| Errno::ILSEQ)
    }

    /// Reads as much of a file as there is room, without waiting.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_bytes(&self, path: &str, buffer: &mut [u8]) -> Result<usize, Errno> {
        let file = self.lookup(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        match FileType::from_raw_mode(fstat(&file)?.st_mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            FileType::Symlink
            | FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => return Err(Errno::INVAL),
        }
        let mut length = 0;
        while length < buffer.len() {
            match read(&file, &mut buffer[length..]) {
                Ok(0) => break,
                Ok(more) => length += more,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(length)
    }

    /// The names in a folder, in order.
    ///
    /// # Errors
    /// The operating system's.
    pub fn list(&self, path: &str) -> Result<Vec<String>, Errno> {
        let folder = self.lookup(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK)?;
        let mut names = Vec::new();
        for entry in Dir::new(folder)?.take(MAX_ENTRIES) {
            // What is no text is nobody's name here.
            if let Ok(name) = entry?.file_name().to_str()
                && !matches!(name, "." | "..")
            {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Whether the path leads to something. Opens nothing.
    ///
    /// # Errors
    /// What makes it impossible to tell.
    pub fn exists(&self, path: &str) -> Result<bool, Errno> {
        match self.lookup(path, OFlags::PATH) {
            Ok(_) => Ok(true),
            Err(error) if is_absence(error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What the link at `path` says; `None` if there is none. The link itself is not followed, and nothing is opened.
    pub fn link(&self, path: &str) -> Option<String> {
        let link = self.lookup(path, OFlags::PATH | OFlags::NOFOLLOW).ok()?;
        let target = readlinkat(link, c"", Vec::new()).ok()?;
        target.into_string().ok()
    }

    /// The kind and number of what is at `path`. Opens nothing.
    ///
    /// # Errors
    /// The operating system's.
    pub fn stat(&self, path: &str) -> Result<Stat, Errno> {
        fstat(self.lookup(path, OFlags::PATH)?)
    }

    /// Opens what is at `path`.
    ///
    /// # Errors
    /// The operating system's.
    pub fn lookup(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::CLOEXEC;
        if self.by_kernel.get() {
            let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            for _ in 0..MAX_TRIES {
                match openat2(&self.root, path, flags, Mode::empty(), resolve) {
                    Err(Errno::AGAIN) => {}
                    Err(Errno::NOSYS | Errno::PERM) => {
                        self.by_kernel.set(false);
                        break;
                    }
                    result => return result,
                }
            }
        }
        walk(self.root.as_fd(), Path::new(path), flags)
    }
}

/// Whether the error says that there is nothing, rather than that it cannot be told.
pub fn is_absence(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NOTDIR)
}

/// What `openat2` does with `RESOLVE_IN_ROOT`, step by step.
fn walk(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let mut opened: Vec<OwnedFd> = Vec::new();
    let mut left: Vec<OsString> = Vec::new();
    push(&mut left, path);
    let mut links = 0;
    while let Some(step) = left.pop() {
        if step == ".." {
            opened.pop();
            continue;
        }
        let here = opened.last().map_or(root, AsFd::as_fd);
        let found = openat(here, &step, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let is_last = left.is_empty();
        let is_link = FileType::from_raw_mode(fstat(&found)?.st_mode) == FileType::Symlink;
        if is_link && !(is_last && flags.contains(OFlags::NOFOLLOW)) {
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno::LOOP);
            }
            let target = readlinkat(&found, c"", Vec::new())?;
            let target = Path::new(OsStr::from_bytes(target.as_bytes()));
            if target.is_absolute() {
                opened.clear();
            }
            push(&mut left, target);
        } else if is_last {
            return openat(here, &step, flags | OFlags::NOFOLLOW, Mode::empty());
        } else {
            opened.push(found);
        }
    }
    // The path ends in `..` or names the root.
    let here = opened.last().map_or(root, AsFd::as_fd);
    openat(here, c".", flags, Mode::empty())
}

/// The next step is the last of the list.
fn push(left: &mut Vec<OsString>, path: &Path) {
    left.extend(path.components().rev().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn bed() -> (tempfile::TempDir, [Tree; 2]) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("sys");
        fs::create_dir_all(root.join("devices/pci0/ib/mlx5_0")).unwrap();
        fs::create_dir_all(root.join("class/ib")).unwrap();
        fs::write(root.join("devices/pci0/ib/mlx5_0/state"), "4: ACTIVE\n").unwrap();
        fs::write(folder.path().join("secret"), "4: SECRET\n").unwrap();
        symlink("../../devices/pci0/ib/mlx5_0", root.join("class/ib/mlx5_0")).unwrap();
        symlink("/devices/pci0/ib/mlx5_0", root.join("class/ib/absolute")).unwrap();
        symlink("../../../../../../secret", root.join("class/ib/up")).unwrap();
        symlink(folder.path().join("secret"), root.join("class/ib/out")).unwrap();
        symlink("loop", root.join("class/ib/loop")).unwrap();
        symlink("gone", root.join("class/ib/dangling")).unwrap();
        rustix::fs::mkfifoat(CWD, root.join("class/ib/fifo"), Mode::from(0o600)).unwrap();
        fs::write(root.join("class/ib/binary"), [0xff, 0xfe]).unwrap();
        let (kernel, own) = (Tree::open(&root).unwrap(), Tree::open(&root).unwrap());
        own.by_kernel.set(false);
        (folder, [kernel, own])
    }

    #[test]
    fn links_work_within_the_root_and_never_lead_out_of_it() {
        let (_folder, trees) = bed();
        for tree in trees {
            let mut buffer = [0; MAX_ATTRIBUTE_BYTES];
            let mut said = |path: &str| tree.read(path, &mut buffer).map(str::to_owned);
            for path in ["class/ib/mlx5_0/state", "class/ib/absolute/state", "/class/ib/mlx5_0/../mlx5_0/state"] {
                assert_eq!(said(path), Ok("4: ACTIVE\n".to_owned()), "{path}");
            }
            for (path, error) in [
                ("class/ib/up", Errno::NOENT),
                ("class/ib/out", Errno::NOENT),
                ("../secret", Errno::NOENT),
                ("class/ib/dangling/state", Errno::NOENT),
                ("class/ib/mlx5_0/state/x", Errno::NOTDIR),
                ("class/ib/loop", Errno::LOOP),
                ("class/ib/fifo", Errno::INVAL),
                ("class/ib/binary", Errno::ILSEQ),
                ("class/ib/mlx5_0", Errno::ISDIR),
            ] {
                assert_eq!(said(path), Err(error), "{path}");
            }
            assert_eq!(tree.link("class/ib/mlx5_0").as_deref(), Some("../../devices/pci0/ib/mlx5_0"));
            assert_eq!(tree.link("class/ib/mlx5_0/state"), None);
            assert_eq!(tree.list("class/ib/mlx5_0"), Ok(vec!["state".to_owned()]));
            assert_eq!((tree.exists("class/ib/dangling"), tree.exists("class/ib/absolute")), (Ok(false), Ok(true)));
        }
    }

    #[test]
    fn long_files_are_cut_off() {
        let (folder, [tree, _]) = bed();
        fs::write(folder.path().join("sys/long"), "x".repeat(100_000)).unwrap();
        let mut buffer = [0; MAX_ATTRIBUTE_BYTES];
        assert_eq!(tree.read("long", &mut buffer).unwrap().len(), MAX_ATTRIBUTE_BYTES);
    }
}
