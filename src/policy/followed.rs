//! Whether the volumes have been followed since the boot without a gap: a table is complete only then, or when the kubelet's
//! own records show all.

use super::volumes::{Completeness, Gap};

/// Without us for longer than this, and another registrar may have stood in our place; a container that restarts, an update or a
/// reboot takes less.
pub const MOST_ABSENCE_SECONDS: u64 = 15 * 60;

/// Where no agent of ours ever was, a node that was booted no longer ago than this is new. Later, pods may run that another registrar
/// let in, before the image was swapped.
pub const MOST_FIRST_START_SECONDS: u64 = 5 * 60;

/// What the previous run left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Nothing: the first run on this node, or its files are gone.
    Nothing,
    /// A word of an earlier boot, since which nothing is mounted.
    OtherBoot,
    /// A word of this boot.
    ThisBoot {
        /// When it ended in good order, in seconds since the boot. `None`: it did not, and its last entries may be missing.
        ended: Option<u64>,
        /// What it knew of itself.
        completeness: Completeness,
    },
    /// Something that cannot be read.
    Odd,
}

/// Whether a table is complete that goes on from there, `now` seconds after the boot.
///
/// Not seen: another registrar that stood in our place for less than 15 minutes within one boot.
pub fn completeness(before: Before, now: u64) -> Completeness {
    let incomplete = Completeness::Incomplete;
    match before {
        Before::Nothing if now <= MOST_FIRST_START_SECONDS => Completeness::Complete,
        Before::OtherBoot if now <= MOST_ABSENCE_SECONDS => Completeness::Complete,
        Before::Nothing | Before::OtherBoot | Before::Odd => incomplete(Gap::NotFollowed),
        Before::ThisBoot { completeness: Completeness::Incomplete(gap), .. } => incomplete(gap),
        Before::ThisBoot { ended: None, .. } => incomplete(Gap::AgentDied),
        Before::ThisBoot { ended: Some(at), .. } if now.saturating_sub(at) <= MOST_ABSENCE_SECONDS => {
            Completeness::Complete
        }
        Before::ThisBoot { ended: Some(_), .. } => incomplete(Gap::NotFollowed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400;
    const NOT_FOLLOWED: Completeness = Completeness::Incomplete(Gap::NotFollowed);

    #[test]
    fn who_is_there_from_the_boot_on_knows_all() {
        for (before, most) in [(Before::Nothing, MOST_FIRST_START_SECONDS), (Before::OtherBoot, MOST_ABSENCE_SECONDS)] {
            assert_eq!(completeness(before, most), Completeness::Complete);
            assert_eq!(completeness(before, most + 1), NOT_FOLLOWED);
        }
        assert_eq!(completeness(Before::Odd, 1), NOT_FOLLOWED);
    }

    #[test]
    fn who_left_in_good_order_and_came_back_soon_still_does() {
        let left = |ended, completeness| Before::ThisBoot { ended, completeness };
        let complete = Completeness::Complete;
        let back = DAY + MOST_ABSENCE_SECONDS;
        assert_eq!(completeness(left(Some(DAY), complete), back), complete);
        assert_eq!(completeness(left(Some(DAY), complete), back + 1), NOT_FOLLOWED);
        assert_eq!(completeness(left(None, complete), DAY), Completeness::Incomplete(Gap::AgentDied));
        for gap in [Gap::Undecodable, Gap::Full, Gap::AgentDied, Gap::NotFollowed] {
            let incomplete = Completeness::Incomplete(gap);
            assert_eq!(completeness(left(Some(DAY), incomplete), DAY), incomplete, "a gap stays until the next boot");
        }
    }
}
