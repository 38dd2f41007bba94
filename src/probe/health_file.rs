//! The `health-file` probe: a file shared between containers that says `OK` or `ERROR`.

use super::Probe;
use super::lane::{Abandoned, Lane};
use crate::path_watch::PathWatch;
use crate::policy::health_file::{HealthFileLimits, HealthFilePolicy, Seen, Word, Write, WriteId};
use crate::policy::outcome::{Outcome, Reason};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2, statat};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Read no further: the verdict is the first word.
const MAX_READ_BYTES: u64 = 4096;

/// The reason is kept up to here; it ends up in logs and events.
const MAX_DETAIL_BYTES: usize = 1024;

/// What our own writer says when its check told it nothing.
pub const UNKNOWN: &str = "UNKNOWN";

/// The probe.
#[derive(Debug)]
pub struct HealthFile {
    path: PathBuf,
    policy: HealthFilePolicy,
    watch: PathWatch,
    lane: Lane,
}

impl HealthFile {
    /// Reads `path`, which need not exist yet.
    pub fn new(path: &Path, limits: HealthFileLimits) -> Self {
        Self {
            path: path.to_owned(),
            policy: HealthFilePolicy::new(limits),
            watch: PathWatch::new(path),
            lane: Lane::new("health-file"),
        }
    }
}

impl Probe for HealthFile {
    type Seen = Seen;

    async fn look(&mut self, timeout: Duration) -> Result<Seen, Abandoned> {
        let (target, path) = (self.watch.target(), self.path.clone());
        // The watch first: what changes after the look is then an event.
        let (looked, seen) = self.lane.run(timeout, move || (target.look(), read(&path))).await?;
        self.watch.adopt(looked);
        Ok(seen)
    }

    fn judge(&mut self, seen: Seen, now: Instant) -> Option<Outcome> {
        self.policy.judge(seen, now)
    }

    async fn changed(&mut self) {
        self.watch.changed().await;
    }
}

/// Looks at the file once. Blocks as long as its file system does.
///
/// Only a regular file is read, without waiting, at most 4 KiB of it, and only if its path, links included, stays within its
/// folder. What does not say OK or ERROR is never shown to anybody: a link could have led to a secret.
fn read(path: &Path) -> Seen {
    match look(path) {
        Ok(seen) => seen,
        Err(Errno::NOENT | Errno::NOTDIR) => {
            Seen::Absent(Reason::new("HealthFileMissing", format!("{} does not exist", path.display())))
        }
        Err(error) => {
            let error = io::Error::from(error);
            Seen::Unusable(
                Reason::new("HealthFileUnreadable", format!("cannot read {}: {error}", path.display())),
                None,
            )
        }
    }
}

fn look(path: &Path) -> Result<Seen, Errno> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or(Errno::ISDIR)?;
    let folder = openat(CWD, folder, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    // Some devices act on being opened, so the kind is looked at first, and again once it is open.
    let stat = statat(&folder, name, AtFlags::empty())?;
    if let Some(unusable) = refuse_kind(path, &stat) {
        return Ok(unusable);
    }
    let file = open_beneath(&folder, name)?;
    let stat = fstat(&file)?;
    if let Some(unusable) = refuse_kind(path, &stat) {
        return Ok(unusable);
    }
    let mut text = Vec::new();
    let read = File::from(file).take(MAX_READ_BYTES).read_to_end(&mut text);
    if let Err(error) = read {
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    let write = Write { id: write_id(&stat), age_by_clock: age_by_clock(&stat) };
    Ok(match parse(&text) {
        Some((word, detail)) => Seen::Text { word, detail, write },
        None => Seen::Unusable(unusable(path, &text), Some(write)),
    })
}

/// Why the text says nothing. Only our own word is recognised; whatever else it is, it may be a secret.
fn unusable(path: &Path, text: &[u8]) -> Reason {
    if text.starts_with(UNKNOWN.as_bytes()) {
        let message = format!("the writer of {} says that it knows nothing; see its log", path.display());
        return Reason::new("HealthFileUnknown", message);
    }
    Reason::new("HealthFileGarbage", format!("{} begins with neither OK nor ERROR", path.display()))
}

fn refuse_kind(path: &Path, stat: &Stat) -> Option<Seen> {
    (FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile).then(|| {
        let message = format!("{} is not a regular file", path.display());
        Seen::Unusable(Reason::new("HealthFileNotRegular", message), None)
    })
}

/// Opens `name` without leaving `folder`; links within it, as in ConfigMap volumes, work.
fn open_beneath(folder: &OwnedFd, name: &std::ffi::OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    match openat2(folder, name, flags, Mode::empty(), resolve) {
        // Linux before 5.6, or a seccomp profile that does not know openat2 yet: no links at all then.
        Err(Errno::NOSYS | Errno::PERM) => openat(folder, name, flags | OFlags::NOFOLLOW, Mode::empty()),
        result => result,
    }
}

fn write_id(stat: &Stat) -> WriteId {
    WriteId {
        device: stat.st_dev,
        inode: stat.st_ino,
        modified_ns: i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec),
        size: u64::try_from(stat.st_size).unwrap_or_default(),
    }
}

/// Zero when the clock says that the write lies in the future: a clock proves nothing.
fn age_by_clock(stat: &Stat) -> Duration {
    let seconds = u64::try_from(stat.st_mtime).unwrap_or_default();
    let nanos = u32::try_from(stat.st_mtime_nsec).unwrap_or_default();
    let modified = UNIX_EPOCH + Duration::new(seconds, nanos);
    SystemTime::now().duration_since(modified).unwrap_or_default()
}

/// The first word, if it is OK or ERROR, and what follows it, made fit for a log line.
pub fn parse(text: &[u8]) -> Option<(Word, String)> {
    let text = text.trim_ascii_start();
    let length =
        text.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_' || !byte.is_ascii()).count();
    let (word, rest) = text.split_at(length);
    let word = match word {
        b"OK" => Word::Ok,
        b"ERROR" => Word::Error,
        _ => return None,
    };
    let rest = String::from_utf8_lossy(rest);
    let mut detail: String = rest
        .trim_start_matches([':', '-', ','])
        .split(char::is_control)
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    let mut end = MAX_DETAIL_BYTES.min(detail.len());
    while !detail.is_char_boundary(end) {
        end -= 1;
    }
    detail.truncate(end);
    Some((word, detail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn code(seen: &Seen) -> &'static str {
        match seen {
            Seen::Absent(reason) | Seen::Unusable(reason, _) => reason.code,
            Seen::Text { word: Word::Ok, .. } => "OK",
            Seen::Text { word: Word::Error, .. } => "ERROR",
        }
    }

    fn text_of(bytes: &[u8]) -> Option<(Word, String)> {
        parse(bytes)
    }

    #[test]
    fn first_word_decides_and_the_rest_is_the_reason() {
        assert_eq!(text_of(b"OK\n"), Some((Word::Ok, String::new())));
        assert_eq!(text_of(b"ERROR"), Some((Word::Error, String::new())));
        assert_eq!(
            text_of(b"  ERROR: mlx5_0 port 1\tis DOWN\nsince noon\n").unwrap().1,
            "mlx5_0 port 1 is DOWN since noon"
        );
        for garbage in ["", "ERR", "OKAY", "ok", "OK_", "error", "ERRORS", "\u{feff}OK", "0K", "NOT OK", "OKÄ"] {
            assert_eq!(text_of(garbage.as_bytes()), None, "{garbage:?}");
        }
    }

    #[test]
    fn reason_is_bounded_and_free_of_control_characters() {
        let (_, detail) = text_of(format!("ERROR \x1b[31m{}", "ü".repeat(4000)).as_bytes()).unwrap();
        assert!(detail.len() <= MAX_DETAIL_BYTES && !detail.contains(char::is_control));
    }

    proptest! {
        #[test]
        fn no_content_panics_and_only_our_words_count(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            if let Some((_, detail)) = parse(&bytes) {
                let text = bytes.trim_ascii_start();
                prop_assert!(text.starts_with(b"OK") || text.starts_with(b"ERROR"));
                prop_assert!(detail.len() <= MAX_DETAIL_BYTES && !detail.contains(char::is_control));
            }
        }
    }

    #[test]
    fn only_regular_files_are_read_and_nothing_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health");
        assert_eq!(code(&read(&path)), "HealthFileMissing");
        assert_eq!(code(&read(&folder.path().join("no/such/folder"))), "HealthFileMissing");
        fs::create_dir(&path).unwrap();
        assert_eq!(code(&read(&path)), "HealthFileNotRegular");
        fs::remove_dir(&path).unwrap();
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(code(&read(&path)), "HealthFileNotRegular");
        assert_eq!(code(&read(Path::new("/dev/zero"))), "HealthFileNotRegular");
    }

    #[test]
    fn an_endless_file_is_read_up_to_its_first_page() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        assert_eq!(code(&read(&path)), "HealthFileGarbage");
        fs::write(&path, "ERROR ").unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(code(&read(&path)), "ERROR");
    }

    #[test]
    fn links_within_the_folder_work_and_links_out_of_it_do_not() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("health.d");
        fs::create_dir_all(folder.join("..v1")).unwrap();
        fs::write(folder.join("..v1/health"), "OK").unwrap();
        symlink("..v1", folder.join("..data")).unwrap();
        symlink("..data/health", folder.join("health")).unwrap();
        assert_eq!(code(&read(&folder.join("health"))), "OK");
        fs::write(root.path().join("token"), "ERROR secret-token").unwrap();
        for target in [root.path().join("token"), PathBuf::from("../token")] {
            symlink(target, folder.join("leak")).unwrap();
            let seen = read(&folder.join("leak"));
            assert_eq!(code(&seen), "HealthFileUnreadable");
            assert!(!format!("{seen:?}").contains("secret-token"));
            fs::remove_file(folder.join("leak")).unwrap();
        }
    }

    #[test]
    fn garbage_is_never_echoed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health");
        fs::write(&path, "eyJhbGciOi secret").unwrap();
        let seen = read(&path);
        assert_eq!(code(&seen), "HealthFileGarbage");
        assert!(!format!("{seen:?}").contains("eyJ"));
        fs::write(&path, "UNKNOWN secret").unwrap();
        let seen = read(&path);
        assert_eq!(code(&seen), "HealthFileUnknown");
        assert!(!format!("{seen:?}").contains("secret"));
    }

    #[test]
    fn an_unreadable_file_is_named_with_its_cause() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health");
        fs::write(&path, "OK").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        let seen = read(&path);
        if rustix::process::geteuid().is_root() {
            assert_eq!(code(&seen), "OK", "root reads everything");
        } else {
            assert_eq!(code(&seen), "HealthFileUnreadable");
        }
    }

    #[test]
    fn rewriting_the_same_words_is_a_new_write() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health");
        let write_of = |seen: Seen| match seen {
            Seen::Text { write, .. } => write.id,
            Seen::Absent(_) | Seen::Unusable(..) => panic!("{seen:?}"),
        };
        fs::write(&path, "OK").unwrap();
        let first = write_of(read(&path));
        assert_eq!(first, write_of(read(&path)));
        fs::write(folder.path().join("new"), "OK").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        assert_ne!(first, write_of(read(&path)));
    }
}
