//! What an `nvme` probe reads.

use super::super::entry::Entry;
use super::super::tree::Tree as Entries;
use super::{Walk, join};
use crate::config::probes::NvmeSettings;
use crate::probe::nvme::read::{list, smart_to_record};

const CLASS: &str = "class/nvme";

/// As the probe shows them.
const MAX_NAMESPACES: usize = 64;

pub(super) fn take(settings: &NvmeSettings, entries: &mut Entries) {
    let (sysfs, dev) = (&settings.host.sysfs, &settings.host.dev);
    let listed = list(sysfs, &settings.devices, &settings.exclude);
    let selected: Vec<String> =
        listed.iter().flat_map(|listed| &listed.selected).map(|(identity, _)| identity.name.clone()).collect();
    let mut live = Vec::new();
    if let Some(mut walk) = Walk::new(sysfs, "sys", entries) {
        walk.folder("", "class");
        for name in walk.names("", CLASS) {
            // One that is excluded by its name is not read at all.
            if settings.exclude.iter().any(|selector| selector.selects_name(&name)) {
                continue;
            }
            let Some(controller) = walk.folder("", &join(CLASS, &name)) else { continue };
            walk.values(&controller, &["serial", "subsysnqn", "address", "cntlid"]);
            walk.link(&controller, "device");
            if !selected.contains(&name) {
                continue;
            }
            walk.values(&controller, &["transport", "model", "firmware_rev"]);
            if walk.value(&controller, "state").as_deref() == Some("live") {
                live.push(name.clone());
            }
            let is_namespace = |entry: &&String| {
                let rest = entry.strip_prefix(name.as_str());
                rest.is_some_and(|rest| rest.starts_with('n') || rest.starts_with('c') && rest.contains('n'))
            };
            let entries = walk.names(&controller, "");
            for entry in entries.iter().filter(is_namespace).take(MAX_NAMESPACES) {
                if let Some(namespace) = walk.folder(&controller, entry) {
                    walk.value(&namespace, "ana_state");
                }
            }
        }
    }
    if settings.smart
        && let Some(mut walk) = Walk::new(dev, "dev", entries)
    {
        // A controller that is being reset would keep the command until it is done.
        for name in live {
            let entry = match smart_to_record(sysfs, dev, &name) {
                Ok(page) => Entry::Value(page),
                Err(error) => Entry::unreadable(error),
            };
            walk.note(&name, entry);
        }
    }
}
