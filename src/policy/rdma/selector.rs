//! Which devices are meant: by name, by a pattern of names, by GUID, or by PCI address.

use std::fmt;

/// One word of `devices` or `exclude`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// `mlx5_0`
    Name(String),
    /// `mlx5_*`: `*` is any letters, `?` one.
    Glob(String),
    /// `0c42:a103:001d:d12a`, the node GUID: stays when names change.
    Guid(u64),
    /// `0000:3b:00.0`: stays when names change, until the card is moved.
    Pci(String),
}

/// What a selector looks at.
#[derive(Debug, Clone, Copy)]
pub struct Identity<'a> {
    /// The device's name.
    pub name: &'a str,
    /// Its PCI address, if it has one.
    pub pci: Option<&'a str>,
    /// Its node GUID, if it was read.
    pub guid: Option<u64>,
}

/// As long as a name in the kernel.
const MAX_BYTES: usize = 64;

impl Selector {
    /// Reads one word.
    ///
    /// # Errors
    /// Why it can select nothing.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(guid) = parse_guid(text) {
            return match guid {
                0 => Err("an all-zero GUID is no device's".to_owned()),
                guid => Ok(Self::Guid(guid)),
            };
        }
        if let Some(pci) = parse_pci(text) {
            return Ok(Self::Pci(pci));
        }
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'*' | b'?');
        if text.is_empty() || text.len() > MAX_BYTES || text == "." || text == ".." || !text.bytes().all(fits) {
            return Err(
                "is no device: use a name (mlx5_0), a pattern (mlx5_*), a node GUID (0c42:a103:001d:d12a) or a PCI address (0000:3b:00.0)"
                    .to_owned(),
            );
        }
        let glob = text.contains(['*', '?']);
        Ok(if glob { Self::Glob(text.to_owned()) } else { Self::Name(text.to_owned()) })
    }

    /// Whether it names one device, which then must be there. A pattern takes what it finds.
    pub fn names_one(&self) -> bool {
        match self {
            Self::Name(_) | Self::Guid(_) | Self::Pci(_) => true,
            Self::Glob(_) => false,
        }
    }

    /// Whether `exclude` leaves out whatever this one names, so that it can select nothing.
    pub fn is_left_out_by(&self, exclude: &Self) -> bool {
        let nobody = Identity { name: "", pci: None, guid: None };
        match self {
            Self::Name(name) => exclude.selects(Identity { name, ..nobody }),
            Self::Pci(pci) => exclude.selects(Identity { pci: Some(pci), ..nobody }),
            Self::Guid(guid) => exclude.selects(Identity { guid: Some(*guid), ..nobody }),
            Self::Glob(_) => self == exclude,
        }
    }

    /// Whether it selects the device.
    pub fn selects(&self, device: Identity<'_>) -> bool {
        match self {
            Self::Name(name) => name == device.name,
            Self::Glob(pattern) => matches_glob(pattern.as_bytes(), device.name.as_bytes()),
            Self::Guid(guid) => device.guid == Some(*guid),
            Self::Pci(pci) => device.pci == Some(pci.as_str()),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(text) | Self::Glob(text) | Self::Pci(text) => f.write_str(text),
            Self::Guid(guid) => f.write_str(&show_guid(*guid)),
        }
    }
}

/// Four groups of four hex digits.
pub fn parse_guid(text: &str) -> Option<u64> {
    let mut guid = 0;
    let mut groups = 0;
    for group in text.split(':') {
        if group.len() != 4 || !group.bytes().all(|byte| byte.is_ascii_hexdigit()) || groups == 4 {
            return None;
        }
        guid = guid << 16 | u64::from_str_radix(group, 16).ok()?;
        groups += 1;
    }
    (groups == 4).then_some(guid)
}

/// As the kernel writes it.
pub fn show_guid(guid: u64) -> String {
    format!("{:04x}:{:04x}:{:04x}:{:04x}", guid >> 48, guid >> 32 & 0xffff, guid >> 16 & 0xffff, guid & 0xffff)
}

/// `0000:3b:00.0`, or `3b:00.0` in domain 0, in the kernel's small letters and with the kernel's four digits of domain: tools write
/// eight.
pub fn parse_pci(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let (domain, rest) = match text.split(':').count() {
        2 => ("0000", text.as_str()),
        3 => text.split_once(':')?,
        _ => return None,
    };
    let (bus, device) = rest.split_once(':')?;
    let (device, function) = device.split_once('.')?;
    let hex = |text: &str, lengths: std::ops::RangeInclusive<usize>| {
        lengths.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    // Virtual domains behind VMD have more than four digits.
    let is_address = hex(domain, 4..=8) && hex(bus, 2..=2) && hex(device, 2..=2) && hex(function, 1..=1);
    let domain = u32::from_str_radix(domain, 16).ok().filter(|_| is_address)?;
    Some(format!("{domain:04x}:{bus}:{device}.{function}"))
}

/// `*` is any bytes, `?` one. Linear but for one step back, so that no pattern is slow.
pub fn matches_glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut star) = ((0, 0), None);
    while at.1 < name.len() {
        match pattern.get(at.0) {
            Some(b'*') => {
                star = Some(at);
                at.0 += 1;
            }
            Some(letter) if *letter == b'?' || *letter == name[at.1] => at = (at.0 + 1, at.1 + 1),
            Some(_) | None => {
                let Some((pattern_at, name_at)) = star else { return false };
                star = Some((pattern_at, name_at + 1));
                at = (pattern_at + 1, name_at + 1);
            }
        }
    }
    pattern[at.0..].iter().all(|letter| *letter == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_selects_its_device_and_no_other() {
        let device = Identity { name: "mlx5_0", pci: Some("0000:3b:00.0"), guid: Some(0x0c42_a103_001d_d12a) };
        for (text, selects) in [
            ("mlx5_0", true),
            ("mlx5_1", false),
            ("mlx5_", false),
            ("mlx5_*", true),
            ("mlx5_?", true),
            ("*", true),
            ("*_0", true),
            ("m*5*0", true),
            ("m*5*1", false),
            ("mlx?", false),
            ("0c42:a103:001d:d12a", true),
            ("0C42:A103:001D:D12A", true),
            ("0c42:a103:001d:d12b", false),
            ("0000:3b:00.0", true),
            ("3B:00.0", true),
            ("00000000:3B:00.0", true),
            ("0000:3b:00.1", false),
        ] {
            assert_eq!(Selector::parse(text).unwrap().selects(device), selects, "{text}");
        }
        let unread = Identity { pci: None, guid: None, ..device };
        for text in ["0c42:a103:001d:d12a", "0000:3b:00.0"] {
            assert!(!Selector::parse(text).unwrap().selects(unread), "{text}: what is not known is not selected");
        }
    }

    #[test]
    fn only_patterns_name_nobody() {
        for (text, names) in [("mlx5_0", true), ("mlx5_*", false), ("0c42:a103:001d:d12a", true), ("3b:00.0", true)] {
            assert_eq!(Selector::parse(text).unwrap().names_one(), names, "{text}");
        }
    }

    #[test]
    fn what_can_select_nothing_is_refused() {
        for text in ["", ".", "..", "a/b", "mlx5 0", "0000:0000:0000:0000", "0c42:a103:001d", "0000:3b:00", "é"] {
            assert!(Selector::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn selectors_are_shown_as_they_are_read() {
        for text in ["mlx5_0", "mlx5_*", "0c42:a103:001d:d12a", "0000:3b:00.0"] {
            assert_eq!(Selector::parse(text).unwrap().to_string(), text);
        }
    }
}
