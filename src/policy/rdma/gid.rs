//! Is there an address that others can reach this port by?

use super::seen::{Attr, LinkLayer};

/// iWARP: its addresses are not RoCE's.
const NODE_TYPE_IWARP: u32 = 4;

/// One entry of a port's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    /// All-zero is an empty slot.
    pub gid: Attr<u128>,
    /// What the entry is for; absent in kernels before 4.5.
    pub kind: Attr<GidKind>,
    /// The interface it belongs to.
    pub netdev: Attr<EntryNetdev>,
}

/// What an entry is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// Over UDP, as everybody uses today.
    RoceV2,
    /// InfiniBand, or RoCE's first version.
    Other,
}

impl GidKind {
    /// Reads the kernel's words; an empty one says nothing.
    pub fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "RoCE v2" => Some(Self::RoceV2),
            "" => None,
            _ => Some(Self::Other),
        }
    }
}

/// An entry's interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryNetdev {
    /// Its name.
    pub name: String,
    /// Whether it is there for us.
    pub visible: bool,
    /// Whether it can carry anything.
    pub up: Attr<bool>,
}

/// Eight groups of four hex digits.
pub fn parse_gid(text: &str) -> Option<u128> {
    let mut gid = 0;
    let mut groups = 0;
    for group in text.trim().split(':') {
        if group.len() != 4 || groups == 8 || !group.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        gid = gid << 16 | u128::from_str_radix(group, 16).ok()?;
        groups += 1;
    }
    (groups == 8).then_some(gid)
}

/// What the search has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GidFound {
    /// The entry's number.
    Usable(u32),
    /// There is none, and every entry was read.
    None,
    /// There may be one: something could not be read.
    Unknown,
    /// There is one, of an interface that is not there for us.
    NotVisible(String),
    /// Nothing to look for: this kind of port has no such addresses, or what kind it is cannot be told.
    NotAsked,
}

/// Looks through a table, entry by entry, until one is usable.
#[derive(Debug)]
pub struct GidSearch {
    rule: Rule,
    unreadable: bool,
    not_visible: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The subnet prefix is there before there is a port; the lower half is the port's GUID.
    PortGuid,
    /// RoCE v2, with an interface that is up.
    RoceV2,
    /// Any address.
    Any,
    Nothing,
}

impl GidSearch {
    /// By what lies under the port. `has_kinds` is false where the kernel tells no entry's kind.
    pub fn new(link_layer: &Attr<LinkLayer>, node_type: &Attr<u32>, has_kinds: bool) -> Self {
        let rule = match link_layer.known() {
            Some(LinkLayer::InfiniBand) => Rule::PortGuid,
            Some(LinkLayer::Ethernet) if !has_kinds || node_type.known() == Some(&NODE_TYPE_IWARP) => Rule::Any,
            Some(LinkLayer::Ethernet) => Rule::RoceV2,
            Some(LinkLayer::Other) | None => Rule::Nothing,
        };
        Self { rule, unreadable: false, not_visible: None }
    }

    /// How many entries need looking at, of a table with so many.
    pub fn entries(&self, table: u32) -> u32 {
        match self.rule {
            Rule::PortGuid => table.min(1),
            Rule::RoceV2 | Rule::Any => table,
            Rule::Nothing => 0,
        }
    }

    /// Whether an entry's kind and interface matter.
    pub fn needs_kinds(&self) -> bool {
        self.rule == Rule::RoceV2
    }

    /// Whether the entry is usable.
    pub fn take(&mut self, entry: &GidEntry) -> bool {
        let filled = match (&entry.gid, self.rule) {
            (Attr::Known(gid), Rule::PortGuid) => gid & u128::from(u64::MAX) != 0,
            (Attr::Known(gid), Rule::RoceV2 | Rule::Any) => *gid != 0,
            (Attr::Known(_) | Attr::Absent, _) => false,
            (Attr::Unreadable, _) => {
                self.unreadable = true;
                false
            }
        };
        if !filled || self.rule != Rule::RoceV2 {
            return filled;
        }
        match (&entry.kind, &entry.netdev) {
            (Attr::Known(GidKind::Other) | Attr::Absent, _) | (Attr::Known(GidKind::RoceV2), Attr::Absent) => false,
            (Attr::Unreadable, _) | (Attr::Known(GidKind::RoceV2), Attr::Unreadable) => {
                self.unreadable = true;
                false
            }
            (Attr::Known(GidKind::RoceV2), Attr::Known(netdev)) if !netdev.visible => {
                self.not_visible.get_or_insert_with(|| netdev.name.clone());
                false
            }
            (Attr::Known(GidKind::RoceV2), Attr::Known(netdev)) => match netdev.up {
                Attr::Known(up) => up,
                Attr::Absent | Attr::Unreadable => {
                    self.unreadable = true;
                    false
                }
            },
        }
    }

    /// What it is worth that the search came to its end.
    pub fn nothing_usable(self) -> GidFound {
        match (self.rule, self.not_visible) {
            (Rule::Nothing, _) => GidFound::NotAsked,
            (_, Some(netdev)) => GidFound::NotVisible(netdev),
            (_, None) if self.unreadable => GidFound::Unknown,
            (_, None) => GidFound::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn netdev(visible: bool, up: Attr<bool>) -> Attr<EntryNetdev> {
        Attr::Known(EntryNetdev { name: "eth2".into(), visible, up })
    }

    fn found(link_layer: LinkLayer, node_type: u32, has_kinds: bool, entries: &[GidEntry]) -> GidFound {
        let mut search = GidSearch::new(&Attr::Known(link_layer), &Attr::Known(node_type), has_kinds);
        let looked_at = search.entries(u32::try_from(entries.len()).unwrap());
        match (0..looked_at).find(|index| search.take(&entries[*index as usize])) {
            Some(index) => GidFound::Usable(index),
            None => search.nothing_usable(),
        }
    }

    #[test]
    fn infiniband_wants_a_port_guid_and_not_only_a_prefix() {
        let entry = |text: &str| GidEntry {
            gid: Attr::Known(parse_gid(text).unwrap()),
            kind: Attr::Absent,
            netdev: Attr::Absent,
        };
        let judge = |entry| found(LinkLayer::InfiniBand, 1, true, &[entry]);
        assert_eq!(judge(entry("fe80:0000:0000:0000:0c42:a103:001d:d12a")), GidFound::Usable(0));
        assert_eq!(judge(entry("fe80:0000:0000:0000:0000:0000:0000:0000")), GidFound::None);
        assert_eq!(judge(entry("0000:0000:0000:0000:0000:0000:0000:0000")), GidFound::None, "it has colons");
        let unreadable = GidEntry { gid: Attr::Unreadable, kind: Attr::Absent, netdev: Attr::Absent };
        assert_eq!(judge(unreadable), GidFound::Unknown);
        assert_eq!(found(LinkLayer::InfiniBand, 1, true, &[]), GidFound::None);
    }

    #[test]
    fn ethernet_wants_roce_v2_with_an_interface_that_is_up_anywhere_in_the_table() {
        let entry = |kind: GidKind, netdev: Attr<EntryNetdev>| GidEntry {
            gid: Attr::Known(7),
            kind: Attr::Known(kind),
            netdev,
        };
        let up = || netdev(true, Attr::Known(true));
        let empty = || GidEntry { gid: Attr::Known(0), kind: Attr::Absent, netdev: Attr::Absent };
        let judge = |entries: &[GidEntry]| found(LinkLayer::Ethernet, 1, true, entries);
        assert_eq!(judge(&[empty(), entry(GidKind::Other, up()), entry(GidKind::RoceV2, up())]), GidFound::Usable(2));
        assert_eq!(judge(&[entry(GidKind::Other, up())]), GidFound::None);
        assert_eq!(judge(&[entry(GidKind::RoceV2, netdev(true, Attr::Known(false)))]), GidFound::None);
        assert_eq!(judge(&[entry(GidKind::RoceV2, Attr::Absent)]), GidFound::None);
        assert_eq!(judge(&[empty()]), GidFound::None);
        assert_eq!(judge(&[entry(GidKind::RoceV2, Attr::Unreadable)]), GidFound::Unknown);
        assert_eq!(judge(&[entry(GidKind::RoceV2, netdev(true, Attr::Unreadable))]), GidFound::Unknown);
        let foreign = entry(GidKind::RoceV2, netdev(false, Attr::Absent));
        assert_eq!(judge(&[foreign]), GidFound::NotVisible("eth2".into()));
    }

    #[test]
    fn iwarp_and_old_kernels_want_any_address_and_efa_none() {
        let bare = |gid| GidEntry { gid: Attr::Known(gid), kind: Attr::Absent, netdev: Attr::Absent };
        assert_eq!(found(LinkLayer::Ethernet, 4, true, &[bare(0), bare(7)]), GidFound::Usable(1));
        assert_eq!(found(LinkLayer::Ethernet, 1, false, &[bare(7)]), GidFound::Usable(0));
        assert_eq!(found(LinkLayer::Ethernet, 1, false, &[bare(0)]), GidFound::None);
        assert_eq!(found(LinkLayer::Other, 7, true, &[bare(0)]), GidFound::NotAsked);
    }

    #[test]
    fn gids_are_eight_groups() {
        for text in ["", "fe80::1", "0:0:0:0:0:0:0:0", "0000:0000:0000:0000", "zzzz:0000:0000:0000:0000:0000:0000:0000"]
        {
            assert_eq!(parse_gid(text), None, "{text}");
        }
        assert_eq!(parse_gid("0000:0000:0000:0000:0000:ffff:0a09:0001\n"), Some(0xffff_0a09_0001));
    }
}
