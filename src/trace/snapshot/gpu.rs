//! What a `gpu` probe reads of PCI.

use super::super::tree::Tree as Entries;
use super::{Walk, join};
use crate::config::probes::GpuSettings;
use crate::policy::rdma::selector::{matches_glob, parse_pci};
use crate::probe::gpu::bus::list;

const DEVICES: &str = "bus/pci/devices";

pub(super) fn take(settings: &GpuSettings, entries: &mut Entries) {
    let selected = list(&settings.host.sysfs, &settings.select).map(|listed| listed.selected).unwrap_or_default();
    let Some(mut walk) = Walk::new(&settings.host.sysfs, "sys", entries) else { return };
    for address in walk.names("", DEVICES) {
        let matches = |word: &String| matches_glob(word.as_bytes(), address.as_bytes());
        // One that is left out by its address is not read at all.
        if parse_pci(&address).as_ref() != Some(&address) || settings.select.exclude.iter().any(matches) {
            continue;
        }
        // What is no GPU would only fill the trace.
        if !selected.contains(&address) {
            continue;
        }
        let Some(device) = walk.folder("", &join(DEVICES, &address)) else { continue };
        walk.values(&device, &["vendor", "class"]);
        walk.link(&device, "driver");
        let asleep = walk.value(&device, "power/runtime_status").as_deref() == Some("suspended");
        if !asleep {
            walk.value_up_to(&device, "config", 2);
        }
    }
}
