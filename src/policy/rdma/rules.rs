//! What an `rdma` probe asserts.

use super::selector::Selector;
use crate::policy::group::Require;

/// Which devices and ports are watched, and what is wanted of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaRules {
    /// Empty: every device. One that is named must be there.
    pub devices: Vec<Selector>,
    /// Never opened, whatever else selects them.
    pub exclude: Vec<Selector>,
    /// Port numbers, from 1. Empty: every port.
    pub ports: Vec<u32>,
    /// How many of the ports must be fit for use.
    pub require: Require,
    /// A slower port is a warning.
    pub min_rate: Option<Rate>,
    /// Device files without which user space has no verbs.
    pub device_nodes: Vec<DeviceNode>,
    /// Read what is only of use to people: rate, LID and subnet manager. Some drivers ask their firmware for each.
    pub details: bool,
}

impl Default for RdmaRules {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            exclude: Vec::new(),
            ports: Vec::new(),
            require: Require::All,
            min_rate: None,
            device_nodes: DeviceNode::ALL.to_vec(),
            details: false,
        }
    }
}

/// A device file under `<dev-root>/infiniband`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceNode {
    /// `uverbsN`: verbs of one device.
    Uverbs,
    /// `rdma_cm`: the connection manager, one for all devices.
    RdmaCm,
}

impl DeviceNode {
    /// All that can be asked for.
    pub const ALL: [Self; 2] = [Self::Uverbs, Self::RdmaCm];

    /// As in the settings file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uverbs => "uverbs",
            Self::RdmaCm => "rdma_cm",
        }
    }
}

/// A port's speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate {
    /// Millions of bits a second.
    pub megabits: u64,
}

/// Above any that will be built in this program's life.
const MAX_GIGABITS: u64 = 1_000_000;

impl Rate {
    /// Reads the number of `400`, `2.5` or `400 Gb/sec (4X NDR)`: Gb/s.
    pub fn parse(text: &str) -> Option<Self> {
        let number = text.split_whitespace().next()?;
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || !digits(whole) || !digits(part) {
            return None;
        }
        let gigabits: u64 = whole.parse().ok().filter(|gigabits| *gigabits <= MAX_GIGABITS)?;
        let thousandths = part.bytes().chain(std::iter::repeat(b'0')).take(3);
        let thousandths = thousandths.fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
        Some(Self { megabits: gigabits * 1000 + thousandths })
    }

    /// In Gb/s, as a person writes it.
    pub fn gigabits(self) -> String {
        let text = format!("{}.{:03}", self.megabits / 1000, self.megabits % 1000);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_with_their_fractions_and_anything_else_is_none() {
        for (text, megabits) in [
            ("400 Gb/sec (4X NDR)", Some(400_000)),
            ("2.5 Gb/sec (1X SDR)\n", Some(2_500)),
            ("400", Some(400_000)),
            ("0.0625", Some(62)),
            ("", None),
            ("fast", None),
            ("-1", None),
            (".5", None),
            ("1e3", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(Rate::parse(text).map(|rate| rate.megabits), megabits, "{text:?}");
        }
        for text in ["400", "2.5", "0.062"] {
            assert_eq!(Rate::parse(text).map(Rate::gigabits).as_deref(), Some(text));
        }
    }
}
