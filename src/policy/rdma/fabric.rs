//! One round over all devices: each port's word, what is gone, and what that is worth together.

use super::known::{KnownGood, Place};
use super::merged::{is_bond, merged_into};
use super::port;
use super::rules::RdmaRules;
use super::seen::{Answer, Attr, Device, Listing, Port, Round};
use super::selector::{Identity, Selector};
use super::worth::{PortWord, Wanted, worth};
use crate::policy::outcome::{Outcome, Reason, Severity};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A driver container compiles and loads its modules within this.
const RELOAD_GRACE: Duration = Duration::from_secs(5 * 60);

/// Judges rounds, one after the other.
#[derive(Debug)]
pub struct Fabric {
    rules: RdmaRules,
    /// Ports that wait for a subnet manager, and since when.
    waiting: BTreeMap<(String, u32), Instant>,
    /// Since when every device is gone, or not all are back.
    reloading: Option<Instant>,
    seen_any: bool,
    /// By name, for devices that do not answer now.
    remembered: BTreeMap<String, Remembered>,
    default_route: Vec<String>,
}

#[derive(Debug, Clone)]
struct Remembered {
    guid: Option<u64>,
    ports: Vec<u32>,
    virtual_function: bool,
}

/// What a round says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// All in all.
    pub outcome: Outcome,
    /// Each port, and what is gone.
    pub words: Vec<PortWord>,
    /// What is known good has changed.
    pub learned: bool,
}

impl Fabric {
    /// Nothing was seen yet.
    pub fn new(rules: RdmaRules) -> Self {
        Self {
            rules,
            waiting: BTreeMap::new(),
            reloading: None,
            seen_any: false,
            remembered: BTreeMap::new(),
            default_route: Vec::new(),
        }
    }

    /// What is asserted.
    pub fn rules(&self) -> &RdmaRules {
        &self.rules
    }

    /// Takes in one round.
    pub fn judge(&mut self, round: &Round, known: &mut KnownGood, now: Instant) -> Judgement {
        if let Listing::Unreadable(why) = &round.listing {
            let outcome = Outcome::Unknown(Reason::new("NotVisible", format!("cannot list the devices: {why}")));
            return Judgement { outcome, words: Vec::new(), learned: false };
        }
        let all_gone = !matches!(round.listing, Listing::Devices(1..));
        self.seen_any |= !all_gone;
        // An interface that goes down loses its route: the last word counts.
        if !round.default_route.is_empty() {
            self.default_route.clone_from(&round.default_route);
        }
        let present: Vec<&Device> = round
            .answers
            .iter()
            .filter_map(|answer| if let Answer::Device(device) = answer { Some(device) } else { None })
            .collect();
        let mut learned = known.forget_replaced(&present);
        for device in &present {
            let ports = device.ports.known().map(|ports| ports.iter().map(|port| port.number).collect());
            let before = self.remembered.get(&device.name);
            let remembered = Remembered {
                guid: device.guid.known().copied().or_else(|| before.and_then(|before| before.guid)),
                ports: ports.or_else(|| before.map(|before| before.ports.clone())).unwrap_or_default(),
                virtual_function: device.virtual_function,
            };
            self.remembered.insert(device.name.clone(), remembered);
        }
        if !all_gone {
            self.remembered.retain(|name, _| round.answers.iter().any(|answer| answer.name() == name));
        }
        self.note_waiting(&present, now);
        let mut words = Vec::new();
        for answer in &round.answers {
            self.answer(answer, known, now, &mut words);
        }
        let real = words.iter().any(|word| word.counts);
        if !real {
            // Within a virtual machine all there is may be virtual functions.
            for word in &mut words {
                word.counts = true;
            }
        }
        for device in &present {
            learned |= self.learn(device, &mut words, known);
        }
        let gone = self.gone(round, known);
        let missing = gone.iter().any(|word| matches!(word.outcome, Outcome::Failure(..)));
        let reload = self.reload(all_gone, missing, known, now);
        words.extend(gone.into_iter().map(|word| match (&reload, &word.outcome) {
            (Some(outcome), Outcome::Failure(..)) => PortWord { outcome: outcome.clone(), ..word },
            (Some(_) | None, _) => word,
        }));
        let outcome = match (reload, words.is_empty()) {
            (Some(outcome), true) => outcome,
            (Some(_) | None, _) => worth(&words, self.rules.require, || nothing(round)),
        };
        Judgement { outcome, words, learned }
    }

    fn note_waiting(&mut self, present: &[&Device], now: Instant) {
        let waits = |device: &str, number: u32| {
            present.iter().filter(|other| other.name == device).any(|device| {
                let ports = device.ports.known().into_iter().flatten();
                // What cannot be read now may wait still.
                ports.filter(|port| port.number == number).any(|port| {
                    port::waits_for_subnet_manager(port) || port.state.known().is_none() || port.phys.known().is_none()
                })
            })
        };
        self.waiting.retain(|(device, number), _| waits(device, *number));
        for device in present {
            for port in device.ports.known().into_iter().flatten() {
                if port::waits_for_subnet_manager(port) {
                    self.waiting.entry((device.name.clone(), port.number)).or_insert(now);
                }
            }
        }
    }

    fn answer(&self, answer: &Answer, known: &KnownGood, now: Instant, words: &mut Vec<PortWord>) {
        match answer {
            Answer::Device(device) => self.device(device, known, now, words),
            Answer::Dangling { name, pci } => {
                let message = "is listed, but its folder is not there: mount all of the host's /sys, /sys/devices too";
                let outcome = Outcome::Unknown(Reason::new("NotVisible", message));
                self.unread(name, pci.as_deref(), known, &outcome, words);
            }
            Answer::Silent { name, pci, silence } => {
                let outcome = silence.in_words("no answer in time");
                self.unread(name, pci.as_deref(), known, &outcome, words);
            }
        }
    }

    /// A device that could not be read: its ports as they were seen last, or the device itself.
    fn unread(&self, name: &str, pci: Option<&str>, known: &KnownGood, outcome: &Outcome, words: &mut Vec<PortWord>) {
        let guid = self.guid_of(name, known);
        let identity = Identity { name, pci, guid };
        let remembered = self.remembered.get(name);
        let virtual_function = remembered.is_some_and(|device| device.virtual_function);
        let mut ports: Vec<u32> = remembered.map(|device| device.ports.clone()).unwrap_or_default();
        if ports.is_empty() {
            ports = known.iter().filter(|(known, ..)| Some(*known) == guid).map(|(_, port, _)| port).collect();
        }
        ports.retain(|port| self.chosen(*port));
        let word = |port: Option<u32>| PortWord {
            device: name.to_owned(),
            port,
            wanted: self.wanted(identity, virtual_function, port, None, known),
            counts: !virtual_function,
            outcome: outcome.clone(),
        };
        if ports.is_empty() { words.push(word(None)) } else { words.extend(ports.into_iter().map(Some).map(word)) }
    }

    fn device(&self, device: &Device, known: &KnownGood, now: Instant, words: &mut Vec<PortWord>) {
        let Attr::Known(ports) = &device.ports else {
            let outcome = Outcome::Unknown(Reason::new("PortUnreadable", "its ports cannot be listed"));
            return self.unread(&device.name, device.pci.as_deref(), known, &outcome, words);
        };
        let identity = self.identity(device, known);
        for port in ports.iter().filter(|port| self.chosen(port.number)) {
            let since = self.waiting.get(&(device.name.clone(), port.number));
            let waiting = since.map_or(Duration::ZERO, |since| now.saturating_duration_since(*since));
            words.push(PortWord {
                device: device.name.clone(),
                port: Some(port.number),
                wanted: self.wanted(identity, device.virtual_function, Some(port.number), netdev(port), known),
                counts: !device.virtual_function,
                outcome: port::judge(device, port, &self.rules, waiting),
            });
        }
        if self.names(identity) {
            let missing = self.rules.ports.iter().filter(|number| !ports.iter().any(|port| port.number == **number));
            words.extend(missing.map(|number| gone(&device.name, Some(*number), Wanted::Named, "has no such port")));
            if ports.is_empty() && self.rules.ports.is_empty() {
                words.push(gone(&device.name, None, Wanted::Named, "has no ports"));
            }
        }
    }

    /// What is good now is wanted from now on.
    fn learn(&self, device: &Device, words: &mut [PortWord], known: &mut KnownGood) -> bool {
        let (Attr::Known(guid), Attr::Known(ports), false) = (&device.guid, &device.ports, device.virtual_function)
        else {
            return false;
        };
        let mut learned = false;
        for word in words.iter_mut().filter(|word| word.device == device.name) {
            let Some(port) = ports.iter().find(|port| Some(port.number) == word.port) else { continue };
            let good = match &word.outcome {
                Outcome::Success => true,
                Outcome::Warning(reason) => reason.code == "Degraded",
                Outcome::Failure(..) | Outcome::Unknown(_) => false,
            };
            if good && !self.carries_default_route(netdev(port)) {
                learned |= known.learn(*guid, port.number, device);
                if word.wanted == Wanted::No && known.has(*guid, port.number) {
                    word.wanted = Wanted::KnownGood;
                }
            }
        }
        learned
    }

    /// Known-good ports and named devices that are not there.
    fn gone(&self, round: &Round, known: &KnownGood) -> Vec<PortWord> {
        let present: Vec<(&str, Option<&str>, Option<u64>)> = round
            .answers
            .iter()
            .map(|answer| match answer {
                Answer::Device(device) => {
                    (device.name.as_str(), device.pci.as_deref(), self.identity(device, known).guid)
                }
                Answer::Dangling { name, pci } | Answer::Silent { name, pci, .. } => {
                    (name.as_str(), pci.as_deref(), self.guid_of(name, known))
                }
            })
            .collect();
        // Whoever has not told its GUID may be anybody.
        let unidentified = present.iter().any(|(_, _, guid)| guid.is_none());
        let doubt = |word: PortWord| {
            if !unidentified {
                return word;
            }
            let message = "is not found, but a device could not be identified";
            PortWord { outcome: Outcome::Unknown(Reason::new("PortUnreadable", message)), ..word }
        };
        let mut words: Vec<PortWord> = Vec::new();
        for (guid, port, place) in known.iter() {
            let selected = self.rules.devices.is_empty()
                || self.rules.devices.iter().any(|selector| place.selected_by(guid, selector));
            let excluded = self.rules.exclude.iter().any(|selector| place.selected_by(guid, selector));
            if !selected || excluded || !self.chosen(port) {
                continue;
            }
            let named =
                self.rules.devices.iter().any(|selector| selector.names_one() && place.selected_by(guid, selector));
            let wanted = if named { Wanted::Named } else { Wanted::KnownGood };
            if let Some((name, ..)) = present.iter().find(|(_, _, present)| *present == Some(guid)) {
                if self.lost_port(round, name, port) {
                    words.push(gone(name, Some(port), wanted, "had this port, and has it no more"));
                }
                continue;
            }
            words.push(
                self.moved(round, place, port, wanted)
                    .unwrap_or_else(|| doubt(gone(&place.name, Some(port), wanted, "was good, and is gone"))),
            );
        }
        for selector in self.rules.devices.iter().filter(|selector| selector.names_one()) {
            let here =
                present.iter().any(|(name, pci, guid)| selector.selects(Identity { name, pci: *pci, guid: *guid }));
            let told = known.iter().any(|(guid, port, place)| {
                place.selected_by(guid, selector)
                    && words.iter().any(|word| word.device == place.name && word.port == Some(port))
            });
            if here || told {
                continue;
            }
            let word = gone(&selector.to_string(), None, Wanted::Named, "is named, and not there");
            words.push(if matches!(selector, Selector::Guid(_)) { doubt(word) } else { word });
        }
        words
    }

    /// A known-good port that is not gone, but elsewhere: in a bond, or in another network namespace.
    fn moved(&self, round: &Round, place: &Place, port: u32, wanted: Wanted) -> Option<PortWord> {
        let pci = place.pci.as_ref()?;
        let function = round.functions.iter().find(|function| function.pci == *pci);
        let bond = match function {
            Some(function) => merged_into(function, &round.seats, &round.answers),
            None => round.seats.iter().find(|seat| seat.pci.as_ref() == Some(pci) && is_bond(&seat.name)),
        };
        let word =
            |wanted, outcome| PortWord { device: place.name.clone(), port: Some(port), wanted, counts: false, outcome };
        if let Some(bond) = bond {
            let name = &bond.name;
            if wanted == Wanted::Named {
                let what = format!("was good, and is gone: it seems merged into {name}, so name that instead");
                return Some(gone(&place.name, Some(port), wanted, &what));
            }
            // Where nobody looks at the bond, its ports are not known to be fit.
            let (wanted, then) = if round.answers.iter().any(|answer| answer.name() == name) {
                (Wanted::No, "whose own ports count instead")
            } else {
                (wanted, "which `devices` and `exclude` leave out: select it")
            };
            let message = format!("is merged into {name}, {then}");
            return Some(word(wanted, Outcome::Unknown(Reason::new("Merged", message))));
        }
        let unlisted = function.filter(|function| function.bound)?.unlisted.as_ref()?;
        let message = format!("{unlisted} is in another network namespace: exclude it if it is lent to pods");
        Some(word(wanted, Outcome::Unknown(Reason::new("NotVisible", message))))
    }

    fn lost_port(&self, round: &Round, name: &str, number: u32) -> bool {
        round.answers.iter().any(|answer| {
            let Answer::Device(device) = answer else { return false };
            // Of a named device the missing port is told already.
            let told = self.names(device.identity()) && self.rules.ports.contains(&number);
            let listed = device.ports.known().is_some_and(|ports| ports.iter().all(|port| port.number != number));
            device.name == name && listed && !told
        })
    }

    /// While the driver is reloaded, what is missing is no failure yet.
    fn reload(&mut self, all_gone: bool, missing: bool, known: &KnownGood, now: Instant) -> Option<Outcome> {
        let was_there = self.seen_any || known.iter().next().is_some();
        if all_gone && was_there {
            self.reloading.get_or_insert(now);
        } else if !missing {
            self.reloading = None;
        }
        let since = self.reloading?;
        let lasted = now.saturating_duration_since(since);
        let what = if all_gone { "every device is gone" } else { "not every device is back" };
        if lasted < RELOAD_GRACE {
            let message = format!("{what}, as when a driver is loaded again: waiting up to 5 min");
            return Some(Outcome::Unknown(Reason::new("DriverReload", message)));
        }
        all_gone.then(|| {
            let message = format!("{what} for over 5 min: no driver is loaded");
            Outcome::Failure(Reason::new("DriverReload", message), Severity::Soft)
        })
    }

    fn wanted(
        &self,
        identity: Identity<'_>,
        virtual_function: bool,
        port: Option<u32>,
        netdev: Option<&str>,
        known: &KnownGood,
    ) -> Wanted {
        if self.names(identity) {
            return Wanted::Named;
        }
        if virtual_function || self.carries_default_route(netdev) {
            return Wanted::No;
        }
        let Some(guid) = identity.guid else { return Wanted::No };
        let good = match port {
            Some(port) => known.has(guid, port),
            None => known.iter().any(|(known, port, _)| known == guid && self.chosen(port)),
        };
        if good { Wanted::KnownGood } else { Wanted::No }
    }

    fn names(&self, identity: Identity<'_>) -> bool {
        self.rules.devices.iter().any(|selector| selector.names_one() && selector.selects(identity))
    }

    fn chosen(&self, port: u32) -> bool {
        self.rules.ports.is_empty() || self.rules.ports.contains(&port)
    }

    fn carries_default_route(&self, netdev: Option<&str>) -> bool {
        netdev.is_some_and(|netdev| self.default_route.iter().any(|carrier| carrier == netdev))
    }

    fn identity<'a>(&self, device: &'a Device, known: &KnownGood) -> Identity<'a> {
        let guid = device.guid.known().copied().or_else(|| self.guid_of(&device.name, known));
        Identity { guid, ..device.identity() }
    }

    /// As it was told before, by us or by a run before us.
    fn guid_of(&self, name: &str, known: &KnownGood) -> Option<u64> {
        let remembered = self.remembered.get(name).and_then(|device| device.guid);
        remembered.or_else(|| known.iter().find(|(_, _, place)| place.name == name).map(|(guid, ..)| guid))
    }
}

fn netdev(port: &Port) -> Option<&str> {
    port.netdev.as_ref().map(|netdev| netdev.name.as_str())
}

fn gone(device: &str, port: Option<u32>, wanted: Wanted, what: &str) -> PortWord {
    let outcome = Outcome::Failure(Reason::new("DeviceGone", what), Severity::Soft);
    PortWord { device: device.to_owned(), port, wanted, counts: true, outcome }
}

fn nothing(round: &Round) -> String {
    match round.listing {
        Listing::Devices(0) | Listing::NoClass => {
            "there is no RDMA device: no driver is loaded, or the host's /sys is not mounted".to_owned()
        }
        Listing::Devices(count) => format!("none of {count} devices has a port that is selected"),
        Listing::Unreadable(_) => "the devices cannot be listed".to_owned(),
    }
}

#[cfg(test)]
mod tests;
