//! What was read of devices and ports. One attribute that cannot be read is one thing unknown, and nothing else.

use super::gid::GidFound;
use super::merged::{Function, Seat};
use super::rules::Rate;
use super::selector::Identity;
use crate::policy::round::Silence;

/// One attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attr<T> {
    /// What it says.
    Known(T),
    /// There is no such file: this driver does not have it.
    Absent,
    /// It is there, and cannot be read or makes no sense.
    Unreadable,
}

impl<T> Attr<T> {
    /// What it says, if it does.
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Absent | Self::Unreadable => None,
        }
    }

    /// Its sense by `parse`; what makes none is unreadable.
    pub fn and_then<U>(self, parse: impl FnOnce(T) -> Option<U>) -> Attr<U> {
        match self {
            Self::Known(value) => parse(value).map_or(Attr::Unreadable, Attr::Known),
            Self::Absent => Attr::Absent,
            Self::Unreadable => Attr::Unreadable,
        }
    }
}

/// `4: ACTIVE`: the number is the contract, the words are for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coded {
    /// The leading integer.
    pub number: u32,
    /// All of it, without blanks around it.
    pub text: String,
}

impl Coded {
    /// Reads it; words without a number say nothing.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = text.split_at(digits);
        let ends = rest.is_empty() || rest.starts_with(':') || rest.starts_with(char::is_whitespace);
        let number = number.parse().ok().filter(|_| ends)?;
        Some(Self { number, text: printable(text) })
    }
}

/// Without control characters: it ends up in logs and events.
pub fn printable(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).collect()
}

/// What lies under the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// With a subnet manager.
    InfiniBand,
    /// RoCE or iWARP.
    Ethernet,
    /// Neither, as EFA: nothing but the states can be judged.
    Other,
}

impl LinkLayer {
    /// Reads the kernel's word.
    pub fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "InfiniBand" => Some(Self::InfiniBand),
            "Ethernet" => Some(Self::Ethernet),
            "" => None,
            _ => Some(Self::Other),
        }
    }

    /// As the kernel writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
            Self::Other => "Unknown",
        }
    }
}

/// The network interface of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netdev {
    /// Its name; of a bond, the bond's.
    pub name: String,
    /// Whether it is there for us. Another network namespace's is not.
    pub visible: bool,
    /// Whether its administrator wants it up.
    pub admin_up: Attr<bool>,
    /// Whether it can carry anything.
    pub running: Attr<bool>,
}

/// One port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// From 1.
    pub number: u32,
    /// The logical state.
    pub state: Attr<Coded>,
    /// The physical state.
    pub phys: Attr<Coded>,
    /// What lies under it.
    pub link_layer: Attr<LinkLayer>,
    /// Its network interface, where it was found.
    pub netdev: Option<Netdev>,
    /// What the search for an address found.
    pub gid: GidFound,
    /// Read on request only.
    pub rate: Attr<Rate>,
    /// Read on request only.
    pub lid: Attr<String>,
    /// Read on request only.
    pub sm_lid: Attr<String>,
}

/// What user space finds of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verbs {
    /// All that was asked for is there.
    Usable,
    /// It is there, but we may not open it; whoever uses it may.
    NotOurs(String),
    /// What is missing.
    Missing(String),
    /// It cannot be told.
    Unknown(String),
}

/// One device that answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// Where it sits, if it sits on PCI.
    pub pci: Option<String>,
    /// Its identity over renames and boots.
    pub guid: Attr<u64>,
    /// What it is: 1 is a channel adapter, 4 iWARP.
    pub node_type: Attr<u32>,
    /// A virtual function, whose ports are down until somebody gets it.
    pub virtual_function: bool,
    /// Its ports in order; not known if the list cannot be read.
    pub ports: Attr<Vec<Port>>,
    /// Device files.
    pub verbs: Verbs,
}

impl Device {
    /// What selectors look at.
    pub fn identity(&self) -> Identity<'_> {
        let guid = self.guid.known().copied();
        Identity { name: &self.name, pci: self.pci.as_deref(), guid }
    }
}

/// What one selected device gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It answered.
    Device(Device),
    /// It is listed, but cannot be entered: a folder of links without what they point to.
    Dangling {
        /// Its name.
        name: String,
        /// Where it sits.
        pci: Option<String>,
    },
    /// It gave no answer.
    Silent {
        /// Its name.
        name: String,
        /// Where it sits.
        pci: Option<String>,
        /// Why not.
        silence: Silence,
    },
}

impl Answer {
    /// The device's name.
    pub fn name(&self) -> &str {
        match self {
            Self::Device(device) => &device.name,
            Self::Dangling { name, .. } | Self::Silent { name, .. } => name,
        }
    }
}

/// The list of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listing {
    /// How many there are, the unselected included.
    Devices(usize),
    /// There is no list: the kernel's InfiniBand core is not loaded, or its folder not mounted.
    NoClass,
    /// It cannot be read.
    Unreadable(String),
}

/// One round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// What is there.
    pub listing: Listing,
    /// The selected devices.
    pub answers: Vec<Answer>,
    /// Network interfaces that carry a default route.
    pub default_route: Vec<String>,
    /// PCI functions of known-good ports that have no device now.
    pub functions: Vec<Function>,
    /// With such functions: every device there is.
    pub seats: Vec<Seat>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_decides_and_words_alone_say_nothing() {
        for (text, number) in [
            ("4: ACTIVE\n", Some(4)),
            ("4: ACTIVE", Some(4)),
            ("4: ACTIVE   \n", Some(4)),
            (" 4:active", Some(4)),
            ("4", Some(4)),
            ("0: <unknown>", Some(0)),
            ("Active", None),
            ("ACTIVE: 4", None),
            ("4ACTIVE", None),
            ("-4: ACTIVE", None),
            ("99999999999: X", None),
            ("", None),
        ] {
            assert_eq!(Coded::parse(text).map(|coded| coded.number), number, "{text:?}");
        }
        assert_eq!(Coded::parse("5: Link\u{1b}Up\n").unwrap().text, "5: LinkUp");
    }
}
