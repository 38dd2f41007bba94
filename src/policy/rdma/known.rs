//! Ports that were seen good, over boots: what has worked is wanted, and what never did is not.

use super::seen::Device;
use super::selector::{Identity, Selector};
use std::collections::BTreeMap;

/// Ports by the node GUID of their device, and their number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownGood {
    ports: BTreeMap<(u64, u32), Place>,
}

/// Where the device was when it was seen last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its name then.
    pub name: String,
    /// Its PCI address then.
    pub pci: Option<String>,
}

/// More than any node has; a file with more is not ours.
pub const MAX_PORTS: usize = 1024;

impl KnownGood {
    /// Whether the port was seen good.
    pub fn has(&self, guid: u64, port: u32) -> bool {
        self.ports.contains_key(&(guid, port))
    }

    /// Remembers a good port, and where it is now. Whether that is news.
    pub fn learn(&mut self, guid: u64, port: u32, device: &Device) -> bool {
        // No device has it, yet some that are not set up say so.
        if guid == 0 || self.ports.len() >= MAX_PORTS && !self.has(guid, port) {
            return false;
        }
        match self.ports.get(&(guid, port)) {
            Some(place) if place.name == device.name && place.pci == device.pci => false,
            Some(_) | None => {
                self.insert(guid, port, Place { name: device.name.clone(), pci: device.pci.clone() });
                true
            }
        }
    }

    /// As it was kept.
    pub fn insert(&mut self, guid: u64, port: u32, place: Place) {
        self.ports.insert((guid, port), place);
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32, &Place)> {
        self.ports.iter().map(|((guid, port), place)| (*guid, *port, place))
    }

    /// The PCI functions that they were seen on last.
    pub fn functions(&self) -> Vec<String> {
        let mut functions: Vec<String> = self.ports.values().filter_map(|place| place.pci.clone()).collect();
        functions.sort_unstable();
        functions.dedup();
        functions
    }

    /// Forgets devices in whose place another one sits now: a card that was replaced. Whether there was one.
    ///
    /// The place is the PCI address; names move on to the next card when one is missing.
    pub fn forget_replaced(&mut self, present: &[&Device]) -> bool {
        let before = self.ports.len();
        let guids: Vec<u64> = present.iter().filter_map(|device| device.guid.known().copied()).collect();
        self.ports.retain(|(guid, _), place| {
            let replaced = |device: &&Device| {
                let same_place = match (&place.pci, &device.pci) {
                    (Some(then), Some(now)) => then == now,
                    (None, None) => place.name == device.name,
                    (Some(_), None) | (None, Some(_)) => false,
                };
                same_place && device.guid.known().is_some_and(|now| *now != 0 && now != guid)
            };
            guids.contains(guid) || !present.iter().any(replaced)
        });
        self.ports.len() != before
    }
}

impl Place {
    /// Whether a selector means the device that was here.
    pub fn selected_by(&self, guid: u64, selector: &Selector) -> bool {
        selector.selects(Identity { name: &self.name, pci: self.pci.as_deref(), guid: Some(guid) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::rdma::port::tests::device;

    #[test]
    fn a_replaced_card_is_forgotten_and_one_whose_name_moved_on_is_not() {
        let (first, second) = (device("mlx5_0", 1, vec![]), device("mlx5_1", 2, vec![]));
        let mut known = KnownGood::default();
        assert!(known.learn(1, 1, &first) && known.learn(2, 1, &second) && !known.learn(1, 1, &first));
        // The first is gone, and the second has its name.
        let renamed = Device { name: "mlx5_0".into(), ..second };
        assert!(!known.forget_replaced(&[&renamed]));
        assert!(known.has(1, 1));
        let new_card = Device { pci: first.pci, ..device("mlx5_1", 9, vec![]) };
        assert!(known.forget_replaced(&[&renamed, &new_card]));
        assert!(!known.has(1, 1) && known.has(2, 1));
    }

    #[test]
    fn each_function_is_named_once() {
        let mut known = KnownGood::default();
        known.learn(1, 1, &device("mlx4_0", 1, vec![]));
        known.learn(1, 2, &device("mlx4_0", 1, vec![]));
        known.learn(2, 1, &Device { pci: None, ..device("rxe0", 2, vec![]) });
        assert_eq!(known.functions(), ["0000:01:00.0"]);
    }

    #[test]
    fn a_guid_of_zeros_is_nobody() {
        assert!(!KnownGood::default().learn(0, 1, &device("x", 0, vec![])));
    }
}
