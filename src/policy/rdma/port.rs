//! What one port is worth: the causes, row by row.

use super::gid::GidFound;
use super::rules::RdmaRules;
use super::seen::{Attr, Coded, Device, LinkLayer, Port, Verbs};
use crate::policy::outcome::{Outcome, Reason, Severity};
use std::time::Duration;

const STATE_INIT: u32 = 2;
const STATE_ARMED: u32 = 3;
const STATE_ACTIVE: u32 = 4;
const PHYS_DISABLED: u32 = 3;
const PHYS_LINK_UP: u32 = 5;

/// A subnet manager that restarts is back within this.
const SUBNET_MANAGER_GRACE: Duration = Duration::from_secs(60);

/// Whether the link is up and waits for a subnet manager.
pub fn waits_for_subnet_manager(port: &Port) -> bool {
    let state = port.state.known().map(|state| state.number);
    let phys = port.phys.known().map(|phys| phys.number);
    matches!(state, Some(STATE_INIT | STATE_ARMED)) && phys == Some(PHYS_LINK_UP)
}

/// The port's own outcome, whatever is wanted of it. `waiting` is how long it has waited for a subnet manager.
pub fn judge(device: &Device, port: &Port, rules: &RdmaRules, waiting: Duration) -> Outcome {
    match wrong(device, port, waiting) {
        Err(outcome) => outcome,
        Ok(()) => match (rules.min_rate, port.rate.known()) {
            (Some(wanted), Some(rate)) if *rate < wanted => {
                let message = format!("runs at {} Gb/s, below {}", rate.gigabits(), wanted.gigabits());
                Outcome::Warning(Reason::new("Degraded", message))
            }
            (Some(_) | None, _) => Outcome::Success,
        },
    }
}

fn wrong(device: &Device, port: &Port, waiting: Duration) -> Result<(), Outcome> {
    let Attr::Known(state) = &port.state else { return Err(unreadable("its state cannot be read")) };
    let ethernet = port.link_layer.known() == Some(&LinkLayer::Ethernet);
    if ethernet
        && let Some(netdev) = &port.netdev
        && netdev.admin_up == Attr::Known(false)
    {
        return Err(hard("AdminDown", format!("{} is not up; {}", netdev.name, states(state, &port.phys))));
    }
    let Attr::Known(phys) = &port.phys else {
        return Err(match state.number {
            STATE_INIT | STATE_ARMED | STATE_ACTIVE => {
                unreadable(&format!("state {}, but its physical state cannot be read", state.text))
            }
            _ => hard("PortDown", states(state, &port.phys)),
        });
    };
    match (state.number, phys.number) {
        (STATE_ACTIVE, PHYS_LINK_UP) => {}
        (_, PHYS_DISABLED) => return Err(hard("AdminDown", states(state, &port.phys))),
        (STATE_INIT | STATE_ARMED, PHYS_LINK_UP) if waiting < SUBNET_MANAGER_GRACE => {
            let message = format!("{}: waiting for a subnet manager", states(state, &port.phys));
            return Err(Outcome::Warning(Reason::new("NoSubnetManager", message)));
        }
        (STATE_INIT | STATE_ARMED, PHYS_LINK_UP) => {
            let message =
                format!("{}: no subnet manager for {}", states(state, &port.phys), whole_seconds(SUBNET_MANAGER_GRACE));
            return Err(hard("NoSubnetManager", message));
        }
        _ => return Err(hard("PortDown", states(state, &port.phys))),
    }
    address(port, ethernet)?;
    match &device.verbs {
        Verbs::Usable | Verbs::NotOurs(_) | Verbs::Unknown(_) => Ok(()),
        Verbs::Missing(what) => Err(Outcome::Failure(Reason::new("VerbsMissing", what.clone()), Severity::Soft)),
    }
}

fn address(port: &Port, ethernet: bool) -> Result<(), Outcome> {
    let message = match (&port.gid, &port.netdev) {
        (GidFound::NotVisible(netdev), _) => {
            let message = format!(
                "its interface {netdev} is in another network namespace: use the host's network, or mount the host's /sys"
            );
            return Err(Outcome::Unknown(Reason::new("NotVisible", message)));
        }
        (GidFound::Usable(_) | GidFound::Unknown | GidFound::NotAsked, _) => return Ok(()),
        (GidFound::None, Some(netdev)) if ethernet => {
            format!("no RoCE v2 address with an interface that is up; {} is its interface", netdev.name)
        }
        (GidFound::None, None) if ethernet => {
            "no RoCE v2 address with an interface that is up, and no interface".to_owned()
        }
        (GidFound::None, _) => "GID 0 has no port GUID".to_owned(),
    };
    Err(hard("NoUsableGid", message))
}

fn states(state: &Coded, phys: &Attr<Coded>) -> String {
    match phys {
        Attr::Known(phys) => format!("state {}, physical state {}", state.text, phys.text),
        Attr::Absent | Attr::Unreadable => format!("state {}", state.text),
    }
}

fn whole_seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs())
}

fn hard(code: &'static str, message: String) -> Outcome {
    Outcome::Failure(Reason::new(code, message), Severity::Hard)
}

fn unreadable(message: &str) -> Outcome {
    Outcome::Unknown(Reason::new("PortUnreadable", message))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::policy::rdma::rules::Rate;
    use crate::policy::rdma::seen::Netdev;

    fn coded(text: &str) -> Attr<Coded> {
        Attr::Known(text).and_then(Coded::parse)
    }

    pub(crate) fn port(state: &str, phys: &str) -> Port {
        Port {
            number: 1,
            state: coded(state),
            phys: coded(phys),
            link_layer: Attr::Known(LinkLayer::InfiniBand),
            netdev: None,
            gid: GidFound::Usable(0),
            rate: Attr::Absent,
            lid: Attr::Absent,
            sm_lid: Attr::Absent,
        }
    }

    pub(crate) fn device(name: &str, guid: u64, ports: Vec<Port>) -> Device {
        Device {
            name: name.into(),
            pci: Some(format!("0000:{guid:02x}:00.0")),
            guid: Attr::Known(guid),
            node_type: Attr::Known(1),
            virtual_function: false,
            ports: Attr::Known(ports),
            verbs: Verbs::Usable,
        }
    }

    fn up() -> Port {
        port("4: ACTIVE", "5: LinkUp")
    }

    fn ethernet(admin_up: bool) -> Port {
        let netdev = Netdev {
            name: "eth2".into(),
            visible: true,
            admin_up: Attr::Known(admin_up),
            running: Attr::Known(admin_up),
        };
        Port { link_layer: Attr::Known(LinkLayer::Ethernet), netdev: Some(netdev), ..up() }
    }

    /// `failure PortDown hard`
    fn word(port: &Port, device: &Device, rules: &RdmaRules, waiting: u64) -> String {
        let outcome = judge(device, port, rules, Duration::from_secs(waiting));
        let severity = match &outcome {
            Outcome::Failure(_, Severity::Hard) => "hard",
            Outcome::Failure(_, Severity::Soft) => "soft",
            Outcome::Success | Outcome::Warning(_) | Outcome::Unknown(_) => "",
        };
        let code = outcome.reason().map_or("", |reason| reason.code);
        format!("{} {code} {severity}", outcome.name()).trim().to_owned()
    }

    fn plain(port: &Port) -> String {
        word(port, &device("mlx5_0", 1, vec![]), &RdmaRules::default(), 0)
    }

    #[test]
    fn only_active_with_link_up_is_healthy_and_the_number_decides() {
        for (state, phys, said) in [
            ("4: ACTIVE", "5: LinkUp", "success"),
            ("4: ACTIVE   ", "5: LinkUp", "success"),
            ("4: active", "5: linkup", "success"),
            ("4: DOWN", "5: Polling", "success"),
            ("1: DOWN", "2: Polling", "failure PortDown hard"),
            ("1: DOWN", "4: PortConfigurationTraining", "failure PortDown hard"),
            ("1: DOWN", "5: LinkUp", "failure PortDown hard"),
            ("1: ACTIVE", "5: LinkUp", "failure PortDown hard"),
            ("1: DOWN", "3: Disabled", "failure AdminDown hard"),
            ("4: ACTIVE", "3: Disabled", "failure AdminDown hard"),
            ("4: ACTIVE", "6: LinkErrorRecovery", "failure PortDown hard"),
            ("4: ACTIVE", "0: <unknown>", "failure PortDown hard"),
            ("5: ACTIVE_DEFER", "5: LinkUp", "failure PortDown hard"),
            ("0: NOP", "5: LinkUp", "failure PortDown hard"),
            ("9: NEW", "5: LinkUp", "failure PortDown hard"),
            ("2: INIT", "5: LinkUp", "warning NoSubnetManager"),
            ("3: ARMED", "5: LinkUp", "warning NoSubnetManager"),
            ("2: INIT", "2: Polling", "failure PortDown hard"),
            ("Active", "5: LinkUp", "unknown PortUnreadable"),
            ("", "5: LinkUp", "unknown PortUnreadable"),
            ("4: ACTIVE", "LinkUp", "unknown PortUnreadable"),
            ("Active", "3: Disabled", "unknown PortUnreadable"),
        ] {
            assert_eq!(plain(&port(state, phys)), said, "{state}, {phys}");
        }
        let outcome = judge(
            &device("mlx5_0", 1, vec![]),
            &port("4: ACTIVE", "6: LinkErrorRecovery"),
            &RdmaRules::default(),
            Duration::ZERO,
        );
        let message = &outcome.reason().unwrap().message;
        assert!(message.contains("4: ACTIVE") && message.contains("6: LinkErrorRecovery"), "{message}");
    }

    #[test]
    fn a_missing_subnet_manager_is_warned_of_for_a_minute() {
        let waits = port("2: INIT", "5: LinkUp");
        let judge = |seconds| word(&waits, &device("mlx5_0", 1, vec![]), &RdmaRules::default(), seconds);
        assert_eq!(judge(59), "warning NoSubnetManager");
        assert_eq!(judge(60), "failure NoSubnetManager hard");
    }

    #[test]
    fn an_interface_that_is_not_wanted_up_is_its_administrators_act() {
        assert_eq!(plain(&ethernet(true)), "success");
        assert_eq!(plain(&ethernet(false)), "failure AdminDown hard");
        assert_eq!(plain(&Port { state: coded("1: DOWN"), ..ethernet(false) }), "failure AdminDown hard");
        // IPoIB is no part of the port.
        let infiniband = Port { link_layer: Attr::Known(LinkLayer::InfiniBand), ..ethernet(false) };
        assert_eq!(plain(&infiniband), "success");
    }

    #[test]
    fn active_without_an_address_fails_and_without_an_interface_only_on_ethernet() {
        assert_eq!(plain(&Port { gid: GidFound::None, ..up() }), "failure NoUsableGid hard");
        assert_eq!(plain(&Port { gid: GidFound::None, ..ethernet(true) }), "failure NoUsableGid hard");
        assert_eq!(plain(&Port { netdev: None, ..up() }), "success");
        assert_eq!(plain(&Port { gid: GidFound::Unknown, ..up() }), "success", "one thing unknown, nothing else");
        assert_eq!(plain(&Port { gid: GidFound::NotVisible("eth2".into()), ..ethernet(true) }), "unknown NotVisible");
        let efa = Port { link_layer: Attr::Known(LinkLayer::Other), gid: GidFound::NotAsked, ..up() };
        assert_eq!(plain(&efa), "success");
    }

    #[test]
    fn what_user_space_needs_is_missing_softly() {
        for (verbs, said) in [
            (Verbs::Missing("no uverbs".into()), "failure VerbsMissing soft"),
            (Verbs::NotOurs("EACCES".into()), "success"),
            (Verbs::Unknown("EIO".into()), "success"),
        ] {
            let device = Device { verbs, ..device("mlx5_0", 1, vec![]) };
            assert_eq!(word(&up(), &device, &RdmaRules::default(), 0), said);
        }
    }

    #[test]
    fn a_slow_port_is_a_warning_and_an_unknown_rate_is_nothing() {
        let rules = RdmaRules { min_rate: Rate::parse("400"), ..RdmaRules::default() };
        let at = |rate: Attr<Rate>| word(&Port { rate, ..up() }, &device("mlx5_0", 1, vec![]), &rules, 0);
        assert_eq!(at(Attr::Known(Rate::parse("200").unwrap())), "warning Degraded");
        assert_eq!(at(Attr::Known(Rate::parse("400").unwrap())), "success");
        assert_eq!((at(Attr::Unreadable), at(Attr::Absent)), ("success".into(), "success".into()));
    }
}
