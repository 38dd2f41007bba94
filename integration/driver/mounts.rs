//! Mounts made and taken away, each as often as one likes.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount},
};

/// Whether a volume may be written to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    ReadWrite,
    ReadOnly,
}

/// Mounts a tmpfs at `target` with the file `volume_id` in it. Already mounted is good.
pub(crate) fn mount_volume(volume_id: &str, target: &Path, access: Access) -> io::Result<()> {
    fs::create_dir_all(target)?;
    if is_mounted(target)? {
        return Ok(());
    }
    mount("tmpfs", target, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"size=1m,mode=0755")?;
    fs::write(target.join("volume_id"), volume_id)?;
    restrict(target, MountFlags::NOSUID | MountFlags::NODEV, access)
}

/// Shows what is mounted at `staged` at `target` too. Already mounted is good.
pub(crate) fn bind_volume(staged: &Path, target: &Path, access: Access) -> io::Result<()> {
    fs::create_dir_all(target)?;
    if is_mounted(target)? {
        return Ok(());
    }
    mount(staged, target, "", MountFlags::BIND, None)?;
    restrict(target, MountFlags::BIND, access)
}

/// Takes away whatever is mounted at `target`, and the folder. Nothing there is good.
pub(crate) fn unmount_volume(target: &Path) -> io::Result<()> {
    while is_mounted(target)? {
        match unmount(target, UnmountFlags::NOFOLLOW) {
            Err(Errno::BUSY) => unmount(target, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)?,
            other => other?,
        }
    }
    match fs::remove_dir(target) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Whether `path` is a mount point of this process.
pub(crate) fn is_mounted(path: &Path) -> io::Result<bool> {
    let table = fs::read("/proc/self/mountinfo")?;
    // Field 5 is the mount point (man 5 proc).
    let mut points = table.split(|&byte| byte == b'\n').filter_map(|line| line.split(|&byte| byte == b' ').nth(4));
    Ok(points.any(|point| unescape(point) == path))
}

fn restrict(target: &Path, flags: MountFlags, access: Access) -> io::Result<()> {
    match access {
        Access::ReadWrite => Ok(()),
        Access::ReadOnly => Ok(mount_remount(target, flags | MountFlags::RDONLY, c"")?),
    }
}

/// Undoes the kernel's `\ooo` for blanks, tabs, line ends and backslashes.
fn unescape(escaped: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(escaped.len());
    let mut rest = escaped;
    while let Some((&first, after)) = rest.split_first() {
        if let (b'\\', Some((octal, after))) = (first, after.split_first_chunk::<3>()) {
            plain.push(octal.iter().fold(0_u8, |byte, digit| byte.wrapping_mul(8).wrapping_add(digit & 7)));
            rest = after;
        } else {
            plain.push(first);
            rest = after;
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(plain))
}
