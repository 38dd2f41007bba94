//! The file of the registration socket: published in one step, withdrawn by its inode, and nobody else's touched.

use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags, renameat_with, statat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, io};
use tokio::net::UnixListener;

/// Longest path of a unix socket: `sun_path` has 108 bytes, one of them the final NUL.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// What the kubelet's plugin watcher may queue while we are busy; it dials once.
const BACKLOG: i32 = 128;

/// Why a driver's registration socket can have no path.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// The driver's name cannot be a file name that the kubelet's watcher sees.
    #[error(
        "the driver calls itself {name:?}, which cannot name a registration socket: it must not be empty, hold '/' or a control character, or begin with '.'"
    )]
    Unfit {
        /// The name.
        name: String,
    },
    /// The path has no room in a socket address.
    #[error("the socket path {} has {} bytes; a unix socket's path holds {MAX_SOCKET_PATH_BYTES}: choose a shorter folder", .path.display(), .path.as_os_str().len())]
    TooLong {
        /// The path.
        path: PathBuf,
    },
}

/// Why the socket could not be shown.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// Something that is not a socket holds the path. It is left untouched.
    #[error("{} exists and is not a socket; it is left untouched: move it away", .path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refuses.
    #[error("cannot {step} {}", .path.display())]
    Os {
        /// What we were about to do.
        step: &'static str,
        /// To which path.
        path: PathBuf,
        /// Its word.
        source: io::Error,
    },
}

/// Which file it is, whatever it is called. Cannot be reused while the socket is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

/// What is at the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// A socket.
    Socket(FileId),
    /// Something else.
    NotASocket,
}

/// Where a driver's registration socket lives: `<folder>/<driver>-reg.sock`.
#[derive(Debug, Clone)]
pub struct SocketPath {
    folder: PathBuf,
    path: PathBuf,
}

impl SocketPath {
    /// The path for a driver's name.
    ///
    /// # Errors
    /// [`NameError`] when the name or the length of the whole forbids it.
    pub fn new(folder: &Path, driver_name: &str) -> Result<Self, NameError> {
        let unfit = driver_name.is_empty()
            || driver_name.starts_with('.')
            || driver_name.chars().any(|char| char == '/' || char.is_control());
        if unfit {
            return Err(NameError::Unfit { name: driver_name.to_owned() });
        }
        let path = folder.join(format!("{driver_name}-reg.sock"));
        if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            return Err(NameError::TooLong { path });
        }
        Ok(Self { folder: folder.to_owned(), path })
    }

    /// A socket of another purpose, published and withdrawn by the same rules.
    ///
    /// # Errors
    /// [`NameError::TooLong`].
    pub fn at(path: &Path) -> Result<Self, NameError> {
        if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            return Err(NameError::TooLong { path: path.to_owned() });
        }
        Ok(Self { folder: path.parent().unwrap_or(Path::new(".")).to_owned(), path: path.to_owned() })
    }

    /// The path itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder that the kubelet watches.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What is at the path now.
    ///
    /// # Errors
    /// When the folder cannot be searched.
    pub fn found(&self) -> io::Result<Found> {
        match statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {
                Ok(Found::Socket(FileId { device: stat.st_dev, inode: stat.st_ino }))
            }
            Ok(_) => Ok(Found::NotASocket),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Ok(Found::Nothing),
            Err(error) => Err(error.into()),
        }
    }

    /// Puts a new listening socket at the path, over any socket that is there, in one step.
    ///
    /// It is made under a dot-name, which the kubelet's watcher ignores, with mode 0600 from its first moment, and renamed:
    /// the kubelet never sees a socket that does not listen yet.
    ///
    /// # Errors
    /// [`PublishError::NotASocket`] if something else holds the path; it is never removed.
    pub fn publish(&self) -> Result<(UnixListener, FileId), PublishError> {
        let before = self.found().map_err(|source| self.os("look at", source))?;
        if before == Found::NotASocket {
            return Err(PublishError::NotASocket { path: self.path.clone() });
        }
        let hidden = self.hidden_path();
        let (listener, id) = listen(&hidden).map_err(|source| PublishError::Os {
            step: "listen on a new socket at",
            path: hidden.clone(),
            source,
        })?;
        let moved = match before {
            Found::Nothing => match renameat_with(CWD, &hidden, CWD, &self.path, RenameFlags::NOREPLACE) {
                // Not every file system has it; then a plain rename.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => fs::rename(&hidden, &self.path),
                result => result.map_err(io::Error::from),
            },
            Found::Socket(_) | Found::NotASocket => fs::rename(&hidden, &self.path),
        };
        if let Err(source) = moved {
            remove(&hidden);
            return Err(self.os("rename the new socket to", source));
        }
        Ok((listener, id))
    }

    /// Unlinks the path if it is the file `id`; returns whether it was.
    ///
    /// The caller keeps the listener open until this returns, so that no new file can carry the same inode number.
    ///
    /// # Errors
    /// When the folder cannot be read or written.
    pub fn withdraw(&self, id: FileId) -> io::Result<bool> {
        if self.found()? != Found::Socket(id) {
            return Ok(false);
        }
        match fs::remove_file(&self.path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A dot-name in the same folder, exactly as long as the final one, so that a path of 107 bytes works.
    fn hidden_path(&self) -> PathBuf {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let length = self.path.file_name().unwrap_or_default().len();
        let mut unique = u64::from(std::process::id()) << 32 | u64::from(SERIAL.fetch_add(1, Ordering::Relaxed));
        // Process ids repeat between containers that share the folder; the address of a local differs (ASLR).
        unique ^= (std::ptr::from_ref(&unique) as u64).rotate_left(17);
        let mut name = String::from(".");
        while name.len() < length {
            let digit = u32::try_from(unique % 36).unwrap_or_default();
            name.push(char::from_digit(digit, 36).unwrap_or('w'));
            unique = unique / 36 + 7;
        }
        self.folder.join(name)
    }

    fn os(&self, step: &'static str, source: io::Error) -> PublishError {
        PublishError::Os { step, path: self.path.clone(), source }
    }
}

/// Listens at `path` with mode 0600. On Linux a socket's mode before `bind` is the file's mode after it, umask applied.
fn listen(path: &Path) -> io::Result<(UnixListener, FileId)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)?;
    let shown = || -> io::Result<(UnixListener, FileId)> {
        rustix::net::listen(&socket, BACKLOG)?;
        let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?;
        let listener = UnixListener::from_std(std::os::unix::net::UnixListener::from(socket.try_clone()?))?;
        Ok((listener, FileId { device: stat.st_dev, inode: stat.st_ino }))
    };
    shown().inspect_err(|_| remove(path))
}

/// Removes a file of our own that nobody has seen; if it cannot be, a dot-file stays, which nobody looks at.
fn remove(path: &Path) {
    drop(fs::remove_file(path));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn at(folder: &Path) -> SocketPath {
        SocketPath::new(folder, "x.example.com").unwrap()
    }

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[tokio::test]
    async fn published_socket_is_private_and_alone_in_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let socket = at(folder.path());
        let (_listener, id) = socket.publish().unwrap();
        assert_eq!(names(folder.path()), ["x.example.com-reg.sock"]);
        assert_eq!(fs::metadata(socket.path()).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(socket.found().unwrap(), Found::Socket(id));
        assert!(socket.withdraw(id).unwrap());
        assert!(names(folder.path()).is_empty());
    }

    #[tokio::test]
    async fn another_ones_socket_is_not_withdrawn() {
        let folder = tempfile::tempdir().unwrap();
        let socket = at(folder.path());
        let (_old, old_id) = socket.publish().unwrap();
        let (_new, new_id) = socket.publish().unwrap();
        assert!(!socket.withdraw(old_id).unwrap());
        assert_eq!(socket.found().unwrap(), Found::Socket(new_id));
    }

    #[tokio::test]
    async fn file_folder_and_link_in_the_sockets_place_are_left_untouched() {
        let folder = tempfile::tempdir().unwrap();
        let socket = at(folder.path());
        fs::write(socket.path(), "precious").unwrap();
        assert!(matches!(socket.publish(), Err(PublishError::NotASocket { .. })));
        assert_eq!(fs::read_to_string(socket.path()).unwrap(), "precious");
        fs::remove_file(socket.path()).unwrap();
        fs::create_dir(socket.path()).unwrap();
        assert!(matches!(socket.publish(), Err(PublishError::NotASocket { .. })));
        fs::remove_dir(socket.path()).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", socket.path()).unwrap();
        assert!(matches!(socket.publish(), Err(PublishError::NotASocket { .. })));
        assert_eq!(names(folder.path()), ["x.example.com-reg.sock"], "nothing of ours is left behind");
    }

    #[tokio::test]
    async fn a_path_of_107_bytes_works_and_one_more_is_refused_by_length() {
        let folder = tempfile::tempdir().unwrap();
        let name_bytes = |total: usize| "n".repeat(total - folder.path().as_os_str().len() - "/-reg.sock".len());
        let longest = SocketPath::new(folder.path(), &name_bytes(107)).unwrap();
        assert_eq!(longest.path().as_os_str().len(), 107);
        let (_listener, id) = longest.publish().unwrap();
        tokio::net::UnixStream::connect(longest.path()).await.unwrap();
        assert!(longest.withdraw(id).unwrap());
        let error = SocketPath::new(folder.path(), &name_bytes(108)).unwrap_err().to_string();
        assert!(error.contains("108 bytes") && error.contains("107"), "{error}");
    }

    #[test]
    fn names_that_would_leave_the_folder_or_hide_are_refused() {
        for name in ["", "../evil", "a/b", ".hidden", "a\0b", "a\nb"] {
            assert!(matches!(SocketPath::new(Path::new("/r"), name), Err(NameError::Unfit { .. })), "{name:?}");
        }
    }
}
