//! `gpu:` in a settings file.

use super::fields::{Fields, Written, positive_duration};
use super::kmsg::since;
use super::levels::{boolean, left_out, limits, some_of};
use super::probes::{GpuSelect, GpuSettings, HostTree, Require, SmiTool, XidSettings};
use super::written::{command, require};
use super::yaml::{Node, Value, echo};
use crate::policy::gpu::GpuRule;
use crate::policy::kernel_log::{Class, Since};
use crate::policy::rdma::selector::{matches_glob, parse_pci};
use crate::policy::smart::Limits;
use crate::policy::xid::{HOLDS, XidTable};
use crate::probe::exec::Command;
use std::time::Duration;

/// The keys under `gpu`.
pub const KEYS: &[&str] = &["vendors", "devices", "exclude", "count", "require", "memoryUsed", "nvidiaSmi", "xid"];

/// The keys under `nvidiaSmi`.
pub const SMI_KEYS: [&str; 3] = ["command", "env", "recoveryAction"];

/// The keys under `xid`.
pub const XID_KEYS: [&str; 5] = ["fatal", "warn", "ignore", "for", "since"];

/// NVIDIA's.
const DEFAULT_VENDOR: u16 = 0x10de;

/// No machine has more.
const MAX_COUNT: usize = 256;

/// Nothing is too much, unless the file says so: a busy GPU is full.
pub const MEMORY_USED: Limits<u8> = Limits { warn: None, fail: None };

/// What the file says; what is not there has its default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrittenGpu {
    /// Unless NVIDIA.
    pub vendors: Option<Written<Vec<u16>>>,
    /// Unless every one.
    pub devices: Option<Written<Vec<String>>>,
    /// Unless none.
    pub exclude: Option<Written<Vec<String>>>,
    /// Unless nobody knows.
    pub count: Option<Written<usize>>,
    /// Unless all.
    pub require: Option<Written<Require>>,
    /// In percent.
    pub memory_used: Option<Written<Limits<u8>>>,
    /// Unless it is not run.
    pub tool: Option<Written<WrittenSmi>>,
    /// Unless the default table.
    pub xid: Option<Written<WrittenXid>>,
}

/// `nvidiaSmi`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenSmi {
    /// The command, to which the query is added.
    pub command: Command,
    /// Whether something is to be asked that older drivers do not know.
    pub recovery_action: bool,
}

/// `xid`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WrittenXid {
    /// `off`: the kernel log is not read.
    Off,
    /// The table.
    Table {
        /// Numbers that are in another class than they would be.
        moved: Vec<(u32, Class)>,
        /// Unless [`HOLDS`].
        holds: Option<Duration>,
        /// Unless now.
        since: Option<Since>,
    },
}

impl WrittenGpu {
    pub(super) fn read(own: &mut Fields<'_, '_>) -> Self {
        let vendors = own.take("vendors").map(|node| {
            let texts = some_of(own, "vendors", node);
            let hex = |text: &str| u16::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16);
            each(own, "vendors", node, texts, |text| {
                hex(text).map_err(|_| format!("{} is no PCI vendor: use four hex digits, such as 10de", echo(text)))
            })
        });
        let devices = own.take("devices").map(|node| {
            let texts = some_of(own, "devices", node);
            each(own, "devices", node, texts, address)
        });
        let exclude = own.take("exclude").map(|node| {
            let texts = own.texts("exclude", node);
            each(own, "exclude", node, texts, address)
        });
        let glob = |device: &String, exclude: &String| {
            device == exclude || names_one(device) && matches_glob(exclude.as_bytes(), device.as_bytes())
        };
        left_out(own, devices.as_ref(), exclude.as_ref(), glob);
        let written = Self {
            vendors,
            devices,
            exclude,
            count: own.parsed("count", |text| {
                let count = text.parse().ok().filter(|count| *count <= MAX_COUNT);
                count.ok_or_else(|| format!("{} is no count: use 0 to {MAX_COUNT}", echo(text)))
            }),
            require: own.parsed("require", require),
            memory_used: limits(own, "memoryUsed", MEMORY_USED, "percent of the memory, 0 to 100"),
            tool: own.take("nvidiaSmi").and_then(|node| smi(own, node)),
            xid: own.take("xid").map(|node| Written { value: xid(own, node), line: node.line }),
        };
        if let (Some(count), Some(devices)) = (&written.count, &written.devices)
            && devices.value.iter().all(|device| names_one(device))
            && count.value > devices.value.len()
        {
            let message = format!(
                "is above the number of devices that are named, {}: it could never be reached",
                devices.value.len()
            );
            own.wrong(count.line, "count", message);
        }
        if let (Some(memory), None) = (&written.memory_used, &written.tool) {
            own.wrong(memory.line, "memoryUsed", "has no effect without nvidiaSmi".to_owned());
        }
        written
    }

    /// With the defaults filled in.
    pub fn settings(&self, host: &HostTree, timeout: Duration) -> GpuSettings {
        let words = |set: &Option<Written<Vec<String>>>| set.as_ref().map(|set| set.value.clone()).unwrap_or_default();
        let xid = match self.xid.as_ref().map(|set| &set.value) {
            Some(WrittenXid::Off) => None,
            Some(WrittenXid::Table { moved, holds, since }) => {
                let mut table = XidTable::default();
                for (number, class) in moved {
                    table.set(*number, *class);
                }
                let (holds, since) = (Some(holds.unwrap_or(HOLDS)), since.unwrap_or(Since::Now));
                Some(XidSettings { table, holds, since })
            }
            None => Some(XidSettings { table: XidTable::default(), holds: Some(HOLDS), since: Since::Now }),
        };
        GpuSettings {
            host: host.clone(),
            select: GpuSelect {
                vendors: self.vendors.as_ref().map_or_else(|| vec![DEFAULT_VENDOR], |set| set.value.clone()),
                devices: words(&self.devices),
                exclude: words(&self.exclude),
            },
            rule: GpuRule {
                count: self.count.as_ref().map(|set| set.value),
                require: self.require.as_ref().map_or(Require::All, |set| set.value),
                memory_used: self.memory_used.as_ref().map_or(MEMORY_USED, |set| set.value),
                timeout,
            },
            tool: self
                .tool
                .as_ref()
                .map(|set| SmiTool { command: set.value.command.clone(), recovery_action: set.value.recovery_action }),
            xid,
        }
    }
}

fn each<'file, T>(
    own: &mut Fields<'file, '_>,
    key: &str,
    node: &'file Node,
    texts: Vec<Written<&'file str>>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Written<Vec<T>> {
    let mut values = Vec::new();
    for (at, text) in texts.into_iter().enumerate() {
        match parse(text.value) {
            Ok(value) => values.push(value),
            Err(message) => own.wrong(text.line, &format!("{key}[{at}]"), message),
        }
    }
    Written { value: values, line: node.line }
}

/// What no GPU is called.
pub const NO_ADDRESS: &str = "is no GPU: use a PCI address (0000:18:00.0), or a pattern (0000:1*)";

/// A PCI address, or a pattern of some.
///
/// # Errors
/// When it is neither.
pub fn address(text: &str) -> Result<String, String> {
    if let Some(address) = parse_pci(text) {
        return Ok(address);
    }
    let fits = |byte: u8| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.' | b'*' | b'?');
    let is_pattern = text.contains(['*', '?']) && text.len() <= 16 && text.bytes().all(fits);
    if is_pattern {
        return Ok(text.to_ascii_lowercase());
    }
    Err(format!("{} {NO_ADDRESS}", echo(text)))
}

fn names_one(address: &str) -> bool {
    !address.contains(['*', '?'])
}

fn smi(own: &mut Fields<'_, '_>, node: &Node) -> Option<Written<WrittenSmi>> {
    let (file, within) = (own.file(), own.within("nvidiaSmi"));
    let mut fields = Fields::new(file, within, node, SMI_KEYS.to_vec(), own.problems());
    if !matches!(node.value, Value::Map(_)) {
        return None;
    }
    let recovery_action = fields.parsed("recoveryAction", boolean).is_some_and(|set| set.value);
    let command = command(file, &mut fields, "a list of the program and its arguments, such as [nvidia-smi]");
    fields.finish();
    let (command, _) = command?;
    Some(Written { value: WrittenSmi { command: command.value, recovery_action }, line: node.line })
}

fn xid(own: &mut Fields<'_, '_>, node: &Node) -> WrittenXid {
    if matches!(&node.value, Value::Text(text) if text == "off") {
        return WrittenXid::Off;
    }
    if !matches!(&node.value, Value::Map(_)) {
        let message = format!("must be off, or a map with the keys {}", XID_KEYS.join(", "));
        own.wrong(node.line, "xid", message);
        return WrittenXid::Off;
    }
    let (file, within) = (own.file(), own.within("xid"));
    let mut fields = Fields::new(file, within, node, XID_KEYS.to_vec(), own.problems());
    let mut moved: Vec<(u32, Class)> = Vec::new();
    for (key, class) in [("fatal", Class::Fatal), ("warn", Class::Warn), ("ignore", Class::Ignore)] {
        let Some(node) = fields.take(key) else { continue };
        for (at, text) in fields.texts(key, node).into_iter().enumerate() {
            let field = format!("{key}[{at}]");
            match text.value.parse() {
                Ok(number) if moved.iter().any(|(other, _)| *other == number) => {
                    fields.wrong(text.line, &field, format!("{number} is listed twice: keep one"));
                }
                Ok(number) => moved.push((number, class)),
                Err(_) => fields.wrong(text.line, &field, format!("{} is no Xid: use its number", echo(text.value))),
            }
        }
    }
    let holds = fields.parsed("for", positive_duration).map(|set| set.value);
    let since = fields.parsed("since", since).map(|set| set.value);
    fields.finish();
    WrittenXid::Table { moved, holds, since }
}
