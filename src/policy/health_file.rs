//! What a reading of the shared health file is worth: when it counts again, when it is stale, when its writer is dead.

use super::outcome::{Outcome, Reason, Severity};
use std::time::{Duration, Instant};

/// The file's first word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// `OK`
    Ok,
    /// `ERROR`
    Error,
}

/// Tells one write of the file from another. Only ever compared for equality, so a stepped clock does no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteId {
    /// Device number.
    pub device: u64,
    /// Inode number: a rename over or a swapped link changes it.
    pub inode: u64,
    /// Modification time, nanoseconds.
    pub modified_ns: i128,
    /// Bytes.
    pub size: u64,
}

/// A write, and how old it is by the wall clock, which is only used at first sight, and only to doubt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// Which write it is.
    pub id: WriteId,
    /// How long ago, by the wall clock.
    pub age_by_clock: Duration,
}

/// What a look at the file gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// There is no such file.
    Absent(Reason),
    /// Something is there that says neither OK nor ERROR, or cannot be read.
    Unusable(Reason, Option<Write>),
    /// It says a word.
    Text {
        /// The first word.
        word: Word,
        /// What follows it.
        detail: String,
        /// Which write this is.
        write: Write,
    },
}

/// The settings of [`HealthFilePolicy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthFileLimits {
    /// A reading that has stood this long counts again.
    pub period: Duration,
    /// Two writes of the same word closer than this are one.
    pub confirm_interval: Duration,
    /// Older is Unknown.
    pub max_age: Duration,
    /// From this age on the writer is dead, which is a failure; `None` never.
    pub dead_after: Option<Duration>,
}

/// Judges the readings of one health file.
///
/// One bad write is one failure, however often it is read: a reading counts again only after a new write, or once it has
/// stood for a whole period. Writes of the same word within the confirm interval are one write, so that
/// `echo ERROR >f; echo why >>f` is one failure too.
#[derive(Debug)]
pub struct HealthFilePolicy {
    limits: HealthFileLimits,
    last_write: Option<WriteId>,
    /// When we saw the file change last; `None` until we have.
    changed_at: Option<Instant>,
    counted: Option<Counted>,
}

#[derive(Debug, Clone, Copy)]
struct Counted {
    word: Word,
    write: WriteId,
    at: Instant,
}

impl HealthFilePolicy {
    /// Nothing was read yet.
    pub fn new(limits: HealthFileLimits) -> Self {
        Self { limits, last_write: None, changed_at: None, counted: None }
    }

    /// What this look says; `None` if it says nothing that was not counted already.
    pub fn judge(&mut self, seen: Seen, now: Instant) -> Option<Outcome> {
        self.note_change(&seen, now);
        let age = self.changed_at.map(|at| now.saturating_duration_since(at));
        if let (Some(age), Some(dead_after)) = (age, self.limits.dead_after)
            && age >= dead_after
        {
            let message = format!("no new write for {}, so its writer is taken for dead", whole_seconds(age));
            return Some(Outcome::Failure(Reason::new("HealthFileDead", message), Severity::Soft));
        }
        let (word, detail, write) = match seen {
            Seen::Absent(reason) | Seen::Unusable(reason, _) => return Some(Outcome::Unknown(reason)),
            Seen::Text { word, detail, write } => (word, detail, write.id),
        };
        match age {
            None => {
                let message = format!(
                    "written over {} before we started; waiting for a new write",
                    whole_seconds(self.limits.max_age)
                );
                return Some(Outcome::Unknown(Reason::new("HealthFileStale", message)));
            }
            Some(age) if age >= self.limits.max_age => {
                let message = format!("no new write for {}; is its writer running?", whole_seconds(age));
                return Some(Outcome::Unknown(Reason::new("HealthFileStale", message)));
            }
            Some(_) => {}
        }
        if !self.counts(word, write, now) {
            return None;
        }
        self.counted = Some(Counted { word, write, at: now });
        Some(match word {
            Word::Ok => Outcome::Success,
            Word::Error => Outcome::Failure(Reason::new("HealthFileError", detail), Severity::Hard),
        })
    }

    fn note_change(&mut self, seen: &Seen, now: Instant) {
        let (Seen::Unusable(_, Some(write)) | Seen::Text { write, .. }) = seen else {
            return;
        };
        if self.last_write == Some(write.id) {
            return;
        }
        let old_at_first_sight = self.last_write.is_none() && write.age_by_clock >= self.limits.max_age;
        if !old_at_first_sight {
            self.changed_at = Some(now);
        }
        self.last_write = Some(write.id);
    }

    fn counts(&self, word: Word, write: WriteId, now: Instant) -> bool {
        let Some(counted) = self.counted else { return true };
        let stood = now.saturating_duration_since(counted.at);
        word != counted.word
            || (write != counted.write && stood >= self.limits.confirm_interval)
            || stood >= self.limits.period
    }
}

fn whole_seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::some_instant;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);
    const LIMITS: HealthFileLimits = HealthFileLimits {
        period: Duration::from_secs(30),
        confirm_interval: SECOND,
        max_age: Duration::from_secs(90),
        dead_after: Some(Duration::from_secs(600)),
    };

    fn write_id(modified_ns: i128) -> WriteId {
        WriteId { device: 1, inode: 2, modified_ns, size: 5 }
    }

    fn text(word: Word, write: i128) -> Seen {
        Seen::Text { word, detail: String::new(), write: Write { id: write_id(write), age_by_clock: Duration::ZERO } }
    }

    fn absent() -> Seen {
        Seen::Absent(Reason::new("HealthFileMissing", ""))
    }

    fn name(outcome: Option<Outcome>) -> &'static str {
        outcome.map_or("nothing", |outcome| outcome.name())
    }

    fn code(outcome: Option<Outcome>) -> &'static str {
        outcome.and_then(|outcome| outcome.reason().map(|reason| reason.code)).unwrap_or("")
    }

    #[test]
    fn one_bad_write_is_one_failure_however_often_it_is_read() {
        let now = some_instant();
        let mut policy = HealthFilePolicy::new(LIMITS);
        assert_eq!(name(policy.judge(text(Word::Error, 1), now)), "failure");
        for second in 1..30 {
            assert_eq!(name(policy.judge(text(Word::Error, 1), now + second * SECOND)), "nothing");
        }
        assert_eq!(
            name(policy.judge(text(Word::Error, 1), now + 30 * SECOND)),
            "failure",
            "it stood for a whole period"
        );
    }

    #[test]
    fn a_new_write_counts_at_once() {
        let now = some_instant();
        let mut policy = HealthFilePolicy::new(LIMITS);
        policy.judge(text(Word::Error, 1), now);
        assert_eq!(name(policy.judge(text(Word::Error, 2), now + SECOND)), "failure");
        assert_eq!(name(policy.judge(text(Word::Ok, 3), now + SECOND)), "success", "another word needs no interval");
    }

    #[test]
    fn writes_of_one_word_within_the_confirm_interval_are_one() {
        let now = some_instant();
        let mut policy = HealthFilePolicy::new(LIMITS);
        policy.judge(text(Word::Error, 1), now);
        assert_eq!(name(policy.judge(text(Word::Error, 2), now + SECOND / 2)), "nothing");
        assert_eq!(
            name(policy.judge(text(Word::Error, 2), now + SECOND)),
            "failure",
            "seen again by the confirming run"
        );
    }

    #[test]
    fn an_old_reading_is_unknown_then_its_writer_is_dead() {
        let now = some_instant();
        let mut policy = HealthFilePolicy::new(LIMITS);
        policy.judge(text(Word::Ok, 1), now);
        assert_eq!(name(policy.judge(text(Word::Ok, 1), now + 89 * SECOND)), "success");
        assert_eq!(code(policy.judge(text(Word::Ok, 1), now + 90 * SECOND)), "HealthFileStale");
        assert_eq!(name(policy.judge(text(Word::Ok, 1), now + 599 * SECOND)), "unknown");
        assert_eq!(code(policy.judge(text(Word::Ok, 1), now + 600 * SECOND)), "HealthFileDead");
        assert_eq!(code(policy.judge(absent(), now + 601 * SECOND)), "HealthFileDead");
        assert_eq!(name(policy.judge(text(Word::Ok, 2), now + 602 * SECOND)), "success", "a new write ends it");
    }

    #[test]
    fn a_file_never_seen_is_unknown_for_as_long_as_it_takes() {
        let now = some_instant();
        let mut policy = HealthFilePolicy::new(LIMITS);
        for hour in 0..100 {
            assert_eq!(name(policy.judge(absent(), now + hour * 3600 * SECOND)), "unknown");
        }
    }

    #[test]
    fn without_dead_after_an_old_file_stays_unknown() {
        let now = some_instant();
        let mut policy = HealthFilePolicy::new(HealthFileLimits { dead_after: None, ..LIMITS });
        policy.judge(text(Word::Error, 1), now);
        assert_eq!(name(policy.judge(text(Word::Error, 1), now + 100_000 * SECOND)), "unknown");
    }

    #[test]
    fn a_file_left_by_a_dead_writer_does_not_look_healthy_after_our_restart() {
        let now = some_instant();
        let mut policy = HealthFilePolicy::new(LIMITS);
        let write = Write { id: write_id(1), age_by_clock: Duration::from_secs(3 * 86_400) };
        let old = Seen::Text { word: Word::Ok, detail: String::new(), write };
        assert_eq!(code(policy.judge(old.clone(), now)), "HealthFileStale");
        assert_eq!(name(policy.judge(old, now + 86_400 * SECOND)), "unknown", "nor dead: we never saw it written");
        assert_eq!(name(policy.judge(text(Word::Ok, 2), now + 86_400 * SECOND)), "success");
    }

    #[test]
    fn garbage_is_unknown() {
        let now = some_instant();
        let mut policy = HealthFilePolicy::new(LIMITS);
        let write = |age_by_clock| Some(Write { id: write_id(3), age_by_clock });
        let garbage = |age| Seen::Unusable(Reason::new("HealthFileGarbage", ""), write(age));
        assert_eq!(name(policy.judge(garbage(Duration::ZERO), now)), "unknown");
        // An old one that nobody writes is not a writer that died while we looked.
        let mut policy = HealthFilePolicy::new(LIMITS);
        for hour in 0..10 {
            assert_eq!(name(policy.judge(garbage(3 * 86_400 * SECOND), now + hour * 3600 * SECOND)), "unknown");
        }
    }

    proptest! {
        /// However a file is written and whenever it is looked at, failures never outnumber the bad writes plus the whole
        /// periods a bad write stood.
        #[test]
        fn failures_never_outnumber_bad_writes_and_periods(
            steps in proptest::collection::vec((0_u64..40_000, proptest::option::of(proptest::bool::ANY)), 1..300)
        ) {
            let start = some_instant();
            let limits = HealthFileLimits { dead_after: None, ..LIMITS };
            let mut policy = HealthFilePolicy::new(limits);
            let (mut elapsed, mut write, mut word) = (Duration::ZERO, 0, Word::Ok);
            let (mut bad_writes, mut failures) = (0_u64, 0_u64);
            for (gap_ms, written) in steps {
                elapsed += Duration::from_millis(gap_ms);
                if let Some(bad) = written {
                    write += 1;
                    word = if bad { Word::Error } else { Word::Ok };
                    bad_writes += u64::from(bad);
                }
                if name(policy.judge(text(word, write), start + elapsed)) == "failure" { failures += 1; }
                prop_assert!(failures <= bad_writes + elapsed.as_secs() / limits.period.as_secs());
            }
        }
    }
}
