//! An operator's word about the fence, kept over our own restarts: one small JSON file, until the word is over.
//!
//! Unlike the other files it can make us less careful. Whoever can write it, root or our own user, could say the same over the status
//! socket beside it.

use crate::kept_file::{KeptFile, LoadError, Version, boot_id, since_boot};
use crate::policy::fence_override::{Clocks, Forced, Order, Override, left};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// The form's version. A file of another version is set aside.
const SCHEMA: u32 = 1;

/// Ours is below 8 KiB: an order has at most 4.
const MAX_BYTES: u64 = 64 * 1024;

/// Where the word is kept.
#[derive(Debug, Clone)]
pub struct OverrideFile {
    file: KeptFile,
    driver: String,
    boot_id: Option<String>,
    /// What we took over or wrote last: another agent's word is not removed. Shared by clones, as a write that nobody waits for
    /// any more may still be done.
    ours: Arc<Mutex<Option<Version>>>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Written {
    schema: u32,
    driver: String,
    boot_id: Option<String>,
    fence: String,
    reason: String,
    by: String,
    at: String,
    written_boot_seconds: f64,
    written_unix_seconds: f64,
    until_boot_seconds: f64,
    until_unix_seconds: f64,
}

impl OverrideFile {
    /// The file for `driver` in `folder`.
    pub fn new(folder: &Path, driver: &str, proc_root: &Path) -> Self {
        let file = KeptFile::new(folder.join(format!("{driver}-warden-override.json")), MAX_BYTES);
        Self { file, driver: driver.to_owned(), boot_id: boot_id(proc_root), ours: Arc::default() }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The word that holds at `now`, if there is one. It is ours from then on.
    ///
    /// # Errors
    /// When something is there that is not a file of ours. It is set aside; the caller goes on without.
    pub fn load(&self, now: Instant) -> Result<Option<Override>, LoadError> {
        let version = self.file.version();
        let word = self.judge(now, clocks())?;
        if word.is_some() {
            *self.ours() = version;
        } else {
            // It is over. One that stays is over the next time, too.
            drop(self.file.remove());
        }
        Ok(word)
    }

    /// The word that another agent left since we wrote; `None` if none has written or removed anything.
    pub fn of_another(&self, now: Instant) -> Option<Option<Override>> {
        let _lock = self.file.lock();
        let known = *self.ours();
        if self.file.version() == known { None } else { self.load(now).ok() }
    }

    fn ours(&self) -> MutexGuard<'_, Option<Version>> {
        self.ours.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn judge(&self, now: Instant, clocks: Clocks) -> Result<Option<Override>, LoadError> {
        let Some(text) = self.file.read()? else { return Ok(None) };
        let odd = |problem: String| self.file.set_aside(problem);
        let written: Written =
            serde_json::from_slice(&text).map_err(|error| odd(format!("is no override of the fence ({error})")))?;
        if written.schema != SCHEMA {
            return Err(odd(format!("has schema {}, not {SCHEMA}", written.schema)));
        }
        if written.driver != self.driver {
            return Err(odd(format!("is of the driver {:?}", written.driver)));
        }
        let moment = |boot: f64, wall: f64| {
            let duration = |seconds| Duration::try_from_secs_f64(seconds).ok();
            Some(Clocks { boot: duration(boot)?, wall: duration(wall)? })
        };
        let moments = (
            Forced::named(&written.fence),
            moment(written.written_boot_seconds, written.written_unix_seconds),
            moment(written.until_boot_seconds, written.until_unix_seconds),
        );
        let (Some(forced), Some(from), Some(until)) = moments else {
            return Err(odd("has words or times that cannot be".to_owned()));
        };
        let same_boot = self.boot_id.is_some() && written.boot_id == self.boot_id;
        let Some(left) = left(from, until, clocks, same_boot) else { return Ok(None) };
        let order = Order { by: written.by, at_utc: written.at };
        let kept = Override::new(forced, left, &written.reason, order, now);
        kept.map(|kept| Some(Override { from_before: true, ..kept })).map_err(|_| odd("has no reason".to_owned()))
    }

    /// Writes the word down, as of `now`; without one, removes what we wrote. Blocks as long as the file system does.
    ///
    /// # Errors
    /// The operating system's.
    pub fn keep(&self, word: Option<&Override>, now: Instant) -> io::Result<()> {
        let _lock = self.file.lock();
        match word {
            Some(word) => self.write(word, now, clocks()),
            None => {
                let known = *self.ours();
                if known.is_some() && self.file.version() == known {
                    self.file.remove()?;
                }
                *self.ours() = None;
                Ok(())
            }
        }
    }

    fn write(&self, word: &Override, now: Instant, clocks: Clocks) -> io::Result<()> {
        let until = clocks.after(word.until.saturating_duration_since(now));
        let written = Written {
            schema: SCHEMA,
            driver: self.driver.clone(),
            boot_id: self.boot_id.clone(),
            fence: word.forced.name().to_owned(),
            reason: word.reason.clone(),
            by: word.order.by.clone(),
            at: word.order.at_utc.clone(),
            written_boot_seconds: clocks.boot.as_secs_f64(),
            written_unix_seconds: clocks.wall.as_secs_f64(),
            until_boot_seconds: until.boot.as_secs_f64(),
            until_unix_seconds: until.wall.as_secs_f64(),
        };
        self.file.replace(&serde_json::to_vec_pretty(&written).map_err(io::Error::other)?)?;
        *self.ours() = self.file.version();
        Ok(())
    }
}

fn clocks() -> Clocks {
    Clocks { boot: since_boot(), wall: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use std::fs;
    use std::os::unix::fs::symlink;

    const HOUR: Duration = Duration::from_secs(3600);

    struct Bed(tempfile::TempDir);

    impl Bed {
        fn new() -> Self {
            let bed = Self(tempfile::tempdir().unwrap());
            bed.boot("first");
            bed
        }

        fn boot(&self, id: &str) {
            let folder = self.0.path().join("sys/kernel/random");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("boot_id"), id).unwrap();
        }

        fn file(&self) -> OverrideFile {
            OverrideFile::new(self.0.path(), "x.example.com", self.0.path())
        }
    }

    fn word(forced: Forced, lasts: Duration, now: Instant) -> Override {
        let order = Order { by: "uid 0 pid 7".into(), at_utc: "2026-11-30T22:38:37Z".into() };
        Override::new(forced, lasts, "cable \"swap\"", order, now).unwrap()
    }

    #[test]
    fn a_word_comes_back_as_it_was_until_it_is_over_or_taken_back() {
        let (bed, now) = (Bed::new(), some_instant());
        let given = word(Forced::Off, HOUR, now);
        let file = bed.file();
        file.keep(Some(&given), now).unwrap();
        for boot in ["first", "second"] {
            bed.boot(boot);
            let back = bed.file().load(now).unwrap().unwrap();
            assert!(given.until.duration_since(back.until) < Duration::from_secs(10), "{boot}");
            assert!(back.from_before && (&back.reason, &back.order) == (&given.reason, &given.order), "{back:?}");
            assert_eq!(back.forced, Forced::Off);
        }
        file.keep(None, now).unwrap();
        assert!(!file.path().exists());
        file.keep(None, now).unwrap();
        file.keep(Some(&word(Forced::On, Duration::from_millis(1), now)), now).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(bed.file().load(now).unwrap(), None, "over");
        assert!(!file.path().exists());
    }

    #[test]
    fn a_clock_that_was_set_changes_nothing_within_a_boot_and_adds_nothing_over_one() {
        let (bed, now) = (Bed::new(), some_instant());
        let at = |boot, wall| Clocks { boot: Duration::from_secs(boot), wall: Duration::from_secs(wall) };
        bed.file().write(&word(Forced::On, HOUR, now), now, at(1_000, 1_800_000_000)).unwrap();
        let left = |clocks| bed.file().judge(now, clocks).unwrap().map(|word| word.until - now);
        for wall in [0, 1_800_000_000, 4_000_000_000] {
            assert_eq!(left(at(2_800, wall)), Some(HOUR / 2));
        }
        assert_eq!(left(at(4_600, 0)), None);
        bed.boot("second");
        assert_eq!(left(at(60, 1_800_001_800)), Some(HOUR / 2));
        assert_eq!(left(at(60, 0)), Some(HOUR));
        assert_eq!(left(at(60, 1_800_003_600)), None);
    }

    /// As on a disk that is full: what is there can be removed, and nothing written.
    #[test]
    fn a_word_of_the_run_before_can_be_taken_back_though_nothing_was_written() {
        let (bed, now) = (Bed::new(), some_instant());
        bed.file().keep(Some(&word(Forced::Off, HOUR, now)), now).unwrap();
        let file = bed.file();
        assert!(file.load(now).unwrap().is_some());
        assert_eq!(file.of_another(now), None);
        file.keep(None, now).unwrap();
        assert!(!file.path().exists());
    }

    #[test]
    fn another_agents_word_is_not_removed() {
        let (bed, now) = (Bed::new(), some_instant());
        let (old, new) = (bed.file(), bed.file());
        old.keep(Some(&word(Forced::On, HOUR, now)), now).unwrap();
        new.keep(Some(&word(Forced::Off, HOUR, now)), now).unwrap();
        assert_eq!(new.of_another(now), None);
        old.keep(None, now).unwrap();
        assert_eq!(old.of_another(now).unwrap().unwrap().forced, Forced::Off);
        assert_eq!(old.of_another(now), None, "heard, and ours now");
        old.keep(Some(&word(Forced::On, HOUR, now)), now).unwrap();
        fs::remove_file(new.path()).unwrap();
        assert_eq!(old.of_another(now), Some(None), "taken back there");
    }

    #[test]
    fn odd_files_are_set_aside_never_followed_and_never_fatal() {
        let (bed, now) = (Bed::new(), some_instant());
        let path = bed.file().path().to_owned();
        let precious = bed.0.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        let text = |from: &str, to: &str| {
            bed.file().write(&word(Forced::Off, HOUR, now), now, Clocks::default()).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(from), "{text}");
            fs::write(&path, text.replace(from, to)).unwrap();
        };
        type Make<'a> = Box<dyn Fn() + 'a>;
        let odd: [(&str, Make<'_>); 9] = [
            ("is no override", Box::new(|| fs::write(&path, "{").unwrap())),
            ("is no override", Box::new(|| text("\"by\"", "\"buy\""))),
            ("has schema 2", Box::new(|| text("\"schema\": 1", "\"schema\": 2"))),
            ("is of the driver", Box::new(|| text("x.example.com", "y.example.com"))),
            ("words or times", Box::new(|| text("\"off\"", "\"open\""))),
            ("words or times", Box::new(|| text("3600.0", "-1.0"))),
            ("has no reason", Box::new(|| text("cable \\\"swap\\\"", ""))),
            ("is a link", Box::new(|| symlink(&precious, &path).unwrap())),
            ("not a regular file", Box::new(|| fs::create_dir(&path).unwrap())),
        ];
        for (problem, make) in odd {
            make();
            let error = bed.file().judge(now, Clocks::default()).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains(".json.odd-"), "{error}");
            assert!(!path.exists());
        }
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }
}
