//! Writes the shared health file: one line, replaced in one step.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A reader sees the old line or the new one, never half of it. Readable for all: the agent may run as another user.
///
/// Anything but a regular file is left alone: it is somebody's device, folder or link.
pub(super) fn write_atomically(file: &Path, line: &str) -> io::Result<()> {
    match fs::symlink_metadata(file) {
        Ok(metadata) if !metadata.is_file() => {
            return Err(io::Error::other("something that is not a regular file is there; it is left untouched"));
        }
        Ok(_) | Err(_) => {}
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut new = tempfile::Builder::new()
        .prefix(".health-")
        .permissions(fs::Permissions::from_mode(0o644))
        .tempfile_in(folder)?;
    writeln!(new, "{line}")?;
    // The umask may have taken something away.
    new.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    new.persist(file).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn the_file_is_replaced_in_one_step_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("health");
        write_atomically(&file, "OK").unwrap();
        write_atomically(&file, "ERROR x").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "ERROR x\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
        assert!(write_atomically(&folder.path().join("no/health"), "OK").is_err());
    }

    #[test]
    fn what_is_no_regular_file_is_left_untouched() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::write(&precious, "p").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        let sub = folder.path().join("folder");
        fs::create_dir(&sub).unwrap();
        for path in [&link, &sub, &PathBuf::from("/dev/full")] {
            assert!(write_atomically(path, "OK").unwrap_err().to_string().contains("not a regular file"), "{path:?}");
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "p");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
