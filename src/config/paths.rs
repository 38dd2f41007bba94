//! Paths that flags give: of sockets, which must fit an address and may be typed as URLs, and of folders. Each check has its own
//! error; only the one for the registration folder looks at the machine.

use super::settings_error::SettingsError;
use crate::registration::socket::MAX_SOCKET_PATH_BYTES;
use rustix::fs::{Access, access};
use std::io;
use std::path::{Component, Path, PathBuf};

/// `--kubelet-registration-path`: what the kubelet is told to dial.
pub(super) fn endpoint(typed: &str, warnings: &mut Vec<String>) -> Result<String, SettingsError> {
    let path = match typed.strip_prefix("unix:") {
        Some(rest) => {
            let path = rest.strip_prefix("//").unwrap_or(rest);
            warnings.push(format!(
                "--kubelet-registration-path={typed} is a URL; the kubelet wants the plain path, so {path} is announced"
            ));
            path
        }
        None => typed,
    };
    match path {
        "" => Err(SettingsError::NoRegistrationPath),
        path if !path.starts_with('/') => Err(SettingsError::RelativeRegistrationPath(typed.to_owned())),
        path => {
            fits("--kubelet-registration-path", Path::new(path))?;
            Ok(path.to_owned())
        }
    }
}

/// `--csi-address`, which every command has: the path of a unix socket.
///
/// # Errors
/// When it is none, or longer than a socket's address.
pub fn driver_socket(csi_address: &str) -> Result<PathBuf, SettingsError> {
    let path = unix_path(csi_address).ok_or_else(|| SettingsError::NotAUnixSocket(csi_address.to_owned()))?;
    fits("--csi-address", &path)?;
    Ok(path)
}

/// A unix socket's path, typed as one or as `unix:///path`.
pub fn unix_path(typed: &str) -> Option<PathBuf> {
    let path = match typed.strip_prefix("unix:") {
        Some(rest) => rest.strip_prefix("//").unwrap_or(rest),
        None if typed.starts_with('/') => typed,
        None => return None,
    };
    (!path.is_empty()).then(|| PathBuf::from(path))
}

/// Not a folder, by its looks alone.
pub(super) fn names_a_file(path: &Path) -> bool {
    matches!(path.components().next_back(), Some(Component::Normal(_)))
        && !path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

/// Whether a socket can have that path.
pub(super) fn fits(flag: &'static str, path: &Path) -> Result<(), SettingsError> {
    if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
        return Err(SettingsError::PathTooLong { flag, path: path.to_owned() });
    }
    Ok(())
}

/// Where the state lies: `--state-dir`, or beside the driver's socket.
pub fn state_folder(typed: Option<&Path>, driver_socket: &Path) -> PathBuf {
    let parent = driver_socket.parent().filter(|parent| !parent.as_os_str().is_empty());
    typed.or(parent).unwrap_or(Path::new(".")).to_owned()
}

/// The folder of the registration socket, which must be there before us.
pub(super) fn writable_folder(path: &Path) -> Result<(), SettingsError> {
    let wrong = |problem: String| SettingsError::RegistrationFolder { path: path.to_owned(), problem };
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Err(wrong("it is not a folder".to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(wrong("it does not exist".to_owned())),
        Err(error) => return Err(wrong(format!("it cannot be looked at: {error}"))),
    }
    match access(path, Access::WRITE_OK | Access::EXEC_OK) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::ROFS) => Err(wrong("it is on a read-only file system".to_owned())),
        Err(error) => {
            let uid = rustix::process::geteuid().as_raw();
            Err(wrong(format!("it is not writable for uid {uid}: {error}")))
        }
    }
}
