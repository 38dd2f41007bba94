//! What was seen of each port, for people and machines.

use crate::policy::outcome::{Outcome, Reason};
use crate::policy::rdma::gid::GidFound;
use crate::policy::rdma::seen::{Answer, Attr, Coded, Device, LinkLayer, Port, Round, Verbs};
use crate::policy::rdma::selector::show_guid;
use crate::policy::rdma::worth::{PortWord, Wanted};
use crate::probe::observed::{Observed, judged};
use serde_json::{Map, Value, json};

/// By port, such as `mlx5_0/1`.
pub(super) fn observed(round: &Round, words: &[PortWord]) -> Observed {
    words.iter().map(|word| (word.to_string(), Value::Object(subject(round, word)))).collect()
}

fn subject(round: &Round, word: &PortWord) -> Map<String, Value> {
    let mut map = judged(&own(word));
    map.insert("wanted".to_owned(), json!(word.wanted.name()));
    let device = round.answers.iter().find_map(|answer| match answer {
        Answer::Device(device) if device.name == word.device => Some(device),
        Answer::Device(_) | Answer::Dangling { .. } | Answer::Silent { .. } => None,
    });
    let Some(device) = device else { return map };
    of_device(&mut map, device);
    let ports = device.ports.known().into_iter().flatten();
    if let Some(port) = ports.into_iter().find(|port| Some(port.number) == word.port) {
        of_port(&mut map, port);
    }
    map
}

/// What nobody wants has no verdict, but is shown.
fn own(word: &PortWord) -> Outcome {
    match (&word.outcome, word.wanted) {
        (Outcome::Failure(reason, _), Wanted::No) => {
            let message = format!("never seen good and not named; {reason}");
            Outcome::Unknown(Reason::new("NotRequired", message))
        }
        (outcome, Wanted::Named | Wanted::KnownGood | Wanted::No) => outcome.clone(),
    }
}

fn of_device(map: &mut Map<String, Value>, device: &Device) {
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    if let Attr::Known(guid) = device.guid {
        put("nodeGuid", json!(show_guid(guid)));
    }
    if let Some(pci) = &device.pci {
        put("pci", json!(pci));
    }
    if device.virtual_function {
        put("virtualFunction", json!(true));
    }
    if let Verbs::NotOurs(what) | Verbs::Unknown(what) = &device.verbs {
        put("verbs", json!(what));
    }
}

fn of_port(map: &mut Map<String, Value>, port: &Port) {
    let mut put = |key: &str, value: Value| map.insert(key.to_owned(), value);
    put("state", coded(&port.state));
    put("physState", coded(&port.phys));
    put("linkLayer", port.link_layer.known().map_or(Value::Null, |layer| json!(layer.name())));
    match &port.netdev {
        Some(netdev) => put("netdev", json!(netdev.name)),
        None if port.link_layer.known() == Some(&LinkLayer::Ethernet) => put("netdev", json!("none")),
        None => None,
    };
    match &port.gid {
        GidFound::Usable(index) => put("gidIndex", json!(index)),
        GidFound::None | GidFound::NotVisible(_) => put("gidIndex", json!("none")),
        GidFound::Unknown => put("gidIndex", json!("not readable")),
        GidFound::NotAsked => None,
    };
    if let Attr::Known(rate) = port.rate {
        put("rate", json!(format!("{} Gb/s", rate.gigabits())));
    }
    for (key, value) in [("lid", &port.lid), ("smLid", &port.sm_lid)] {
        if let Attr::Known(text) = value {
            put(key, json!(text));
        }
    }
}

fn coded(code: &Attr<Coded>) -> Value {
    match code {
        Attr::Known(code) => json!(code.text),
        Attr::Absent => Value::Null,
        Attr::Unreadable => json!("not readable"),
    }
}
