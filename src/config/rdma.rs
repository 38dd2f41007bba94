//! `rdma:` in a settings file.

use super::fields::{Fields, Written};
use super::levels::left_out;
use super::probes::Require;
use super::written::require;
use super::yaml::{Node, Value, echo};
use crate::policy::rdma::rules::{DeviceNode, Rate, RdmaRules};
use crate::policy::rdma::selector::Selector;

/// The keys under `rdma`.
pub const KEYS: &[&str] = &["devices", "exclude", "ports", "require", "minRate", "deviceNodes", "details"];

/// The highest port number of any device so far is 2; switches have more.
const MAX_PORT: u32 = 255;

/// No device so far has more ports of its own.
const MOST_PORTS: usize = 2;

/// What the file says; what is not there has its default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrittenRdma {
    /// Unless every device.
    pub devices: Option<Written<Vec<Selector>>>,
    /// Unless none.
    pub exclude: Option<Written<Vec<Selector>>>,
    /// Unless all; empty is all.
    pub ports: Option<Written<Vec<u32>>>,
    /// Unless all.
    pub require: Option<Written<Require>>,
    /// Unless any.
    pub min_rate: Option<Written<Rate>>,
    /// Unless both.
    pub device_nodes: Option<Written<Vec<DeviceNode>>>,
    /// Unless false.
    pub details: Option<Written<bool>>,
}

impl WrittenRdma {
    pub(super) fn read(own: &mut Fields<'_, '_>) -> Self {
        let devices = own.take("devices").map(|node| {
            if matches!(&node.value, Value::List(items) if items.is_empty()) {
                own.wrong(
                    node.line,
                    "devices",
                    "is empty: list some, or leave the key out for every device".to_owned(),
                );
            }
            selectors(own, "devices", node)
        });
        let exclude = own.take("exclude").map(|node| selectors(own, "exclude", node));
        left_out(own, devices.as_ref(), exclude.as_ref(), Selector::is_left_out_by);
        let ports = own.take("ports").and_then(|node| ports(own, node));
        let require = own.parsed("require", require);
        if let (Some(require), Some(devices)) = (&require, &devices) {
            too_many(own, require, &devices.value, ports.as_ref().map_or(&[], |ports| ports.value.as_slice()));
        }
        Self {
            devices,
            exclude,
            ports,
            require,
            min_rate: own.parsed("minRate", |text| {
                let rate = Rate::parse(text).filter(|rate| rate.megabits > 0 && !text.contains(char::is_whitespace));
                rate.ok_or_else(|| format!("{} is no rate: use a number of Gb/s above zero, such as 400", echo(text)))
            }),
            device_nodes: own.take("deviceNodes").map(|node| device_nodes(own, node)),
            details: own.parsed("details", |text| match text {
                "true" => Ok(true),
                "false" => Ok(false),
                other => Err(format!("{} is not a boolean: use true or false", echo(other))),
            }),
        }
    }

    /// With the defaults filled in.
    pub fn rules(&self) -> RdmaRules {
        let default = RdmaRules::default();
        let of = |set: &Option<Written<Vec<Selector>>>| set.as_ref().map(|set| set.value.clone()).unwrap_or_default();
        RdmaRules {
            devices: of(&self.devices),
            exclude: of(&self.exclude),
            ports: self.ports.as_ref().map(|set| set.value.clone()).unwrap_or_default(),
            require: self.require.as_ref().map_or(default.require, |set| set.value),
            min_rate: self.min_rate.as_ref().map(|set| set.value),
            device_nodes: self.device_nodes.as_ref().map_or(default.device_nodes, |set| set.value.clone()),
            details: self.details.as_ref().is_some_and(|set| set.value),
        }
    }
}

/// A number of ports that the named devices do not have could never be reached.
fn too_many(own: &mut Fields<'_, '_>, require: &Written<Require>, devices: &[Selector], ports: &[u32]) {
    let Require::AtLeast(count) = require.value else { return };
    let each = if ports.is_empty() { MOST_PORTS } else { ports.len() };
    let most = devices.len().saturating_mul(each);
    if !devices.is_empty() && devices.iter().all(Selector::names_one) && u64::from(count.get()) > most as u64 {
        let message = format!(
            "is above the number of ports that the {} named devices can have, {most}: it could never be reached",
            devices.len()
        );
        own.wrong(require.line, "require", message);
    }
}

fn selectors<'file>(own: &mut Fields<'file, '_>, key: &str, node: &'file Node) -> Written<Vec<Selector>> {
    let mut selectors = Vec::new();
    for (at, text) in own.texts(key, node).into_iter().enumerate() {
        match Selector::parse(text.value) {
            Ok(selector) => selectors.push(selector),
            Err(message) => own.wrong(text.line, &format!("{key}[{at}]"), format!("{} {message}", echo(text.value))),
        }
    }
    Written { value: selectors, line: node.line }
}

fn ports<'file>(own: &mut Fields<'file, '_>, node: &'file Node) -> Option<Written<Vec<u32>>> {
    if matches!(&node.value, Value::Text(text) if text == "all") {
        return Some(Written { value: Vec::new(), line: node.line });
    }
    if !matches!(&node.value, Value::List(items) if !items.is_empty()) {
        own.wrong(node.line, "ports", "must be all, or a list of port numbers such as [1]".to_owned());
        return None;
    }
    let mut ports = Vec::new();
    for (at, text) in own.texts("ports", node).into_iter().enumerate() {
        match text.value.parse() {
            Ok(port @ 1..=MAX_PORT) => ports.push(port),
            Ok(_) | Err(_) => {
                let message = format!("{} is no port: they are numbered from 1", echo(text.value));
                own.wrong(text.line, &format!("ports[{at}]"), message);
            }
        }
    }
    ports.sort_unstable();
    ports.dedup();
    Some(Written { value: ports, line: node.line })
}

fn device_nodes<'file>(own: &mut Fields<'file, '_>, node: &'file Node) -> Written<Vec<DeviceNode>> {
    let mut nodes = Vec::new();
    for (at, text) in own.texts("deviceNodes", node).into_iter().enumerate() {
        match DeviceNode::ALL.into_iter().find(|known| known.name() == text.value) {
            Some(known) => nodes.push(known),
            None => {
                let known = DeviceNode::ALL.map(DeviceNode::name).join(", ");
                let message = format!("{} is unknown: use some of {known}, or [] for none", echo(text.value));
                own.wrong(text.line, &format!("deviceNodes[{at}]"), message);
            }
        }
    }
    Written { value: nodes, line: node.line }
}
