//! Which controllers are meant: by name, serial number, address or subsystem.

use super::nvme::Place;
use super::rdma::selector::{matches_glob, parse_pci};
use std::fmt;

/// As long as an NQN, the longest of what it may be.
const MAX_BYTES: usize = 223;

/// One word of `devices` or `exclude`; `*` is any letters, `?` one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selector {
    word: String,
}

/// What a selector looks at. What could not be read is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// `nvme0`
    pub name: String,
    /// `S4EVNX0R`
    pub serial: String,
    /// The PCI address, if it has one.
    pub pci: String,
    /// `traddr` of a fabric's controller.
    pub traddr: String,
    /// The subsystem's NQN.
    pub subsysnqn: String,
}

impl Identity {
    /// Where the controller is.
    pub fn place(&self) -> Place {
        match (self.pci.as_str(), self.traddr.as_str()) {
            ("", "") => Place::Unknown,
            ("", _) => Place::Fabric,
            (pci, _) => Place::Slot(pci.to_owned()),
        }
    }
}

impl Selector {
    /// Reads one word.
    ///
    /// # Errors
    /// Why it can select nothing.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(controller) = device_file_or_namespace(text) {
            return Err(format!("is no controller's name: that is {controller}"));
        }
        if text.is_empty() || text.len() > MAX_BYTES || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(
                "is no controller: use a name (nvme0), a serial number, a PCI address (0000:01:00.0), a fabric's address or a subsystem's NQN; * and ? stand for letters"
                    .to_owned(),
            );
        }
        Ok(Self { word: parse_pci(text).unwrap_or_else(|| text.to_owned()) })
    }

    /// Whether it names a controller, which then must be there. A pattern takes what it finds.
    pub fn names_one(&self) -> bool {
        !self.word.contains(['*', '?'])
    }

    /// Whether `exclude` leaves out whatever this one names, so that it can select nothing.
    pub fn is_left_out_by(&self, exclude: &Self) -> bool {
        self == exclude || self.names_one() && matches_glob(exclude.word.as_bytes(), self.word.as_bytes())
    }

    /// Whether it selects the controller by its name alone: then nothing else of it needs to be read.
    pub fn selects_name(&self, name: &str) -> bool {
        matches_glob(self.word.as_bytes(), name.as_bytes())
    }

    /// Whether it selects the controller.
    pub fn selects(&self, identity: &Identity) -> bool {
        let fields = [&identity.name, &identity.serial, &identity.pci, &identity.traddr, &identity.subsysnqn];
        fields.into_iter().any(|field| !field.is_empty() && matches_glob(self.word.as_bytes(), field.as_bytes()))
    }
}

/// `/dev/nvme0`, `nvme0n1` and `nvme0n1p2` are meant as the controller `nvme0`, and would never be found.
fn device_file_or_namespace(text: &str) -> Option<&str> {
    let name = text.strip_prefix("/dev/").unwrap_or(text);
    let number = name.strip_prefix("nvme")?;
    let digits = number.bytes().take_while(u8::is_ascii_digit).count();
    let (controller, rest) = name.split_at("nvme".len() + digits);
    let is_namespace = rest.strip_prefix('n').is_some_and(|rest| rest.starts_with(|char: char| char.is_ascii_digit()));
    (digits > 0 && (is_namespace || name != text)).then_some(controller)
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_selects_and_nothing_unread_does() {
        let identity = Identity {
            name: "nvme0".into(),
            serial: "PHX1".into(),
            pci: "0000:3b:00.0".into(),
            traddr: String::new(),
            subsysnqn: "nqn.2014-08.org.nvmexpress:uuid:1b4e28ba".into(),
        };
        for (word, selects, names) in [
            ("nvme0", true, true),
            ("nvme1", false, true),
            ("nvme*", true, false),
            ("nvme?", true, false),
            ("PHX1", true, true),
            ("3B:00.0", true, true),
            ("nqn.2014-08.org.nvmexpress:*", true, false),
            ("192.168.*", false, false),
            ("*", true, false),
        ] {
            let selector = Selector::parse(word).unwrap();
            assert_eq!((selector.selects(&identity), selector.names_one()), (selects, names), "{word}");
        }
        assert!(!Selector::parse("*").unwrap().selects(&Identity::default()));
        for word in ["", "a b", "é", &"x".repeat(224)] {
            assert!(Selector::parse(word).is_err(), "{word}");
        }
    }
}
