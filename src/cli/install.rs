//! `csi-warden install --to DIR`: copies this program, so that another container can run it as an exec probe.

use super::go_flags::normalise;
use super::{USAGE, complain, fail, print, usage};
use anyhow::Context;
use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Copies this program into a folder that another container mounts, too (an init container's task).
#[derive(Debug, Parser)]
#[command(name = "csi-warden install", args_override_self = true, max_term_width = 110)]
pub struct InstallFlags {
    /// The folder; it must exist. The copy is named csi-warden, and replaces an older one in one step
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
}

/// Exit codes: 0 copied, 1 not, 2 for a flag.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = InstallFlags::command();
    let normalised = normalise(&command, arguments);
    if let Some(stray) = normalised.rest.first() {
        complain(&format!("csi-warden install takes no {stray:?}; see csi-warden install --help"));
        return ExitCode::from(USAGE);
    }
    let matches =
        command.try_get_matches_from(std::iter::once(OsString::from("csi-warden install")).chain(normalised.flags));
    let flags = match matches.and_then(|matches| InstallFlags::from_arg_matches(&matches)) {
        Ok(flags) => flags,
        Err(error) => return usage(&error),
    };
    match copy_to(&flags.to) {
        Ok(path) => {
            print(&path.display().to_string());
            ExitCode::SUCCESS
        }
        Err(error) => fail(&error),
    }
}

/// A container that starts meanwhile finds the old program or the new one, never half of it.
fn copy_to(folder: &Path) -> anyhow::Result<PathBuf> {
    // Not by its name: the file may have been replaced since we started.
    let mut program = File::open("/proc/self/exe").context("cannot read this program")?;
    let path = folder.join("csi-warden");
    let mut copy_over = || -> io::Result<()> {
        let mut copy = tempfile::Builder::new().prefix(".csi-warden-").tempfile_in(folder)?;
        io::copy(&mut program, &mut copy)?;
        copy.as_file().set_permissions(fs::Permissions::from_mode(0o755))?;
        // Not open for writing any more, or it could not be run yet.
        copy.into_temp_path().persist(&path).map_err(|error| error.error)
    };
    copy_over()
        .map_err(without_temporary_name)
        .with_context(|| format!("cannot copy this program to the folder {}", folder.display()))?;
    Ok(path)
}

/// Nobody knows the file's name for the time being, and by now it is gone.
pub(super) fn without_temporary_name(error: io::Error) -> io::Error {
    match error.to_string().split_once(" at path ") {
        Some((cause, _)) => io::Error::new(error.kind(), cause),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_runs_and_replaces_an_older_one() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("csi-warden"), "old").unwrap();
        let path = copy_to(folder.path()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(fs::read(&path).unwrap(), fs::read("/proc/self/exe").unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = format!("{:#}", copy_to(Path::new("/no/such/folder")).unwrap_err());
        assert!(error.ends_with("to the folder /no/such/folder: No such file or directory (os error 2)"), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = format!("{:#}", copy_to(file.path()).unwrap_err());
        assert!(error.ends_with(&format!("{}: Not a directory (os error 20)", file.path().display())), "{error}");
    }
}
