//! What became of a known-good port whose RDMA device is gone while its PCI function still works: RoCE bonding makes one device
//! of two functions, and a network namespace may take a device to itself.

use super::seen::{Answer, LinkLayer};

/// A PCI function where a known-good port was, and where no RDMA device is seen now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its address.
    pub pci: String,
    /// Whether a driver is bound to it.
    pub bound: bool,
    /// PCI functions whose interfaces are in one bond with an interface of this one.
    pub bonded_with: Vec<String>,
    /// An RDMA device that user space has verbs of here, and that is in no list of ours.
    pub unlisted: Option<String>,
}

/// An RDMA device, selected or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    /// Its name.
    pub name: String,
    /// Where it sits.
    pub pci: Option<String>,
}

/// The device that `function`'s has become a part of, if there is one.
///
/// It sits on another function of the same card, and is the driver's bond by its name, or its interface and that of `function` are
/// members of one bond on Ethernet: InfiniBand has bonds of interfaces, and none of devices.
pub fn merged_into<'a>(function: &Function, seats: &'a [Seat], answers: &[Answer]) -> Option<&'a Seat> {
    if !function.bound {
        return None;
    }
    let other_function =
        |seat: &&Seat| seat.pci.as_deref().is_some_and(|pci| pci != function.pci && card(pci) == card(&function.pci));
    seats.iter().filter(other_function).find(|seat| {
        let in_one_bond = seat.pci.as_ref().is_some_and(|pci| function.bonded_with.contains(pci));
        is_bond(&seat.name) || in_one_bond && !is_infiniband(&seat.name, answers)
    })
}

/// `0000:03:00` of `0000:03:00.1`.
fn card(pci: &str) -> &str {
    pci.rsplit_once('.').map_or(pci, |(card, _)| card)
}

/// Whether it is called as the driver calls a bond: `mlx5_bond_0`.
pub fn is_bond(name: &str) -> bool {
    name.split('_').any(|word| word == "bond")
}

fn is_infiniband(name: &str, answers: &[Answer]) -> bool {
    answers.iter().any(|answer| match answer {
        Answer::Device(device) if device.name == name => {
            let mut ports = device.ports.known().into_iter().flatten();
            ports.any(|port| port.link_layer.known() == Some(&LinkLayer::InfiniBand))
        }
        Answer::Device(_) | Answer::Dangling { .. } | Answer::Silent { .. } => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::rdma::port::tests::{device, port};
    use crate::policy::rdma::seen::{Attr, Port};

    fn seat(name: &str, pci: &str) -> Seat {
        Seat { name: name.into(), pci: Some(pci.into()) }
    }

    #[test]
    fn only_another_function_of_the_card_that_is_a_bond_has_taken_the_port() {
        let lone = Function { pci: "0000:03:00.1".into(), bound: true, bonded_with: vec![], unlisted: None };
        let unbound = Function { bound: false, ..lone.clone() };
        let bonded = Function { bonded_with: vec!["0000:03:00.0".into()], ..lone.clone() };
        let far = Function { bonded_with: vec!["0000:05:00.0".into()], ..lone.clone() };
        for (function, seat, merged) in [
            (&lone, seat("mlx5_bond_0", "0000:03:00.0"), true),
            (&lone, seat("mlx5_bond_0", "0000:05:00.0"), false),
            (&lone, seat("mlx5_bond_0", "0001:03:00.0"), false),
            (&lone, seat("mlx5_bond_0", "0000:03:00.1"), false),
            (&lone, seat("mlx5_0", "0000:03:00.0"), false),
            (&lone, seat("vagabond_0", "0000:03:00.0"), false),
            (&lone, Seat { name: "mlx5_bond_0".into(), pci: None }, false),
            (&unbound, seat("mlx5_bond_0", "0000:03:00.0"), false),
            (&bonded, seat("rocep3s0f0", "0000:03:00.0"), true),
            (&far, seat("rocep5s0f0", "0000:05:00.0"), false),
        ] {
            assert_eq!(
                merged_into(function, std::slice::from_ref(&seat), &[]).is_some(),
                merged,
                "{function:?} {seat:?}"
            );
        }
    }

    #[test]
    fn interfaces_of_infiniband_in_one_bond_make_no_bond_of_devices() {
        let function = Function {
            pci: "0000:03:00.1".into(),
            bound: true,
            bonded_with: vec!["0000:03:00.0".into()],
            unlisted: None,
        };
        let seats = [seat("mlx5_0", "0000:03:00.0")];
        for (layer, merged) in [(LinkLayer::InfiniBand, false), (LinkLayer::Ethernet, true)] {
            let port = Port { link_layer: Attr::Known(layer), ..port("4: ACTIVE", "5: LinkUp") };
            let answers = [Answer::Device(device("mlx5_0", 1, vec![port]))];
            assert_eq!(merged_into(&function, &seats, &answers).is_some(), merged, "{layer:?}");
        }
    }
}
