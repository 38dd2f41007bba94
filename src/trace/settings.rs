//! Settings as a trace can be played by: each probe reads the made-up host, and what a trace cannot hold is left out and told.

use super::host::Host;
use super::{Change, Trace};
use crate::config::probes::{ProbeKind, ProbeSettings};
use crate::config::watched::Watched;

/// Types of probes that a trace can hold.
pub const KINDS: [&str; 5] = ["rdma", "nvme", "gpu", "kmsg", "health-file"];

/// A settings file with the defaults of each type, and SMART logs where there are some.
pub fn of_types<'a>(probes: impl IntoIterator<Item = (&'a str, &'a str)>, smart: bool) -> String {
    let probe = |(name, kind): (&str, &str)| {
        let own = match kind {
            "health-file" => ", healthFile: {path: /health/health}",
            "nvme" if smart => ", nvme: {smart: true}",
            _ => "",
        };
        format!("  - {{name: {name:?}, type: {kind}{own}}}\n")
    };
    std::iter::once("probes:\n".to_owned()).chain(probes.into_iter().map(probe)).collect()
}

/// Leads each probe to `host`. Gives what is left out, in words.
pub fn lead(watched: &mut Watched, trace: &Trace, host: &Host) -> Vec<String> {
    let mut notes = Vec::new();
    watched.probes.retain_mut(|probe| match redirect(probe, trace, host, &mut notes) {
        Ok(()) => true,
        Err(why) => {
            notes.push(format!("probe {} is left out: {why}", probe.name));
            false
        }
    });
    let probes = &watched.probes;
    for group in &mut watched.groups {
        group.probes.retain(|name| probes.iter().any(|probe| probe.name == *name));
    }
    watched.groups.retain(|group| !group.probes.is_empty());
    notes
}

fn redirect(probe: &mut ProbeSettings, trace: &Trace, host: &Host, notes: &mut Vec<String>) -> Result<(), String> {
    let kind = probe.kind.name();
    if !KINDS.contains(&kind) {
        return Err(format!("a trace has nothing that a probe of type {kind} could ask"));
    }
    if !trace.probes.is_empty() && trace.probes.iter().all(|recorded| recorded.kind != kind) {
        return Err(format!("the trace was recorded without a probe of type {kind}"));
    }
    match &mut probe.kind {
        ProbeKind::Rdma(rdma) => rdma.host = host.tree(),
        ProbeKind::Nvme(nvme) => {
            nvme.host = host.tree();
            if nvme.smart && !has_smart(trace) {
                nvme.smart = false;
                notes.push(format!("probe {}: the trace has no SMART logs, so only states count", probe.name));
            }
        }
        ProbeKind::Gpu(gpu) => {
            gpu.host = host.tree();
            if gpu.tool.take().is_some() {
                notes.push(format!("probe {}: a trace has no answers of nvidia-smi, so it is not asked", probe.name));
            }
        }
        ProbeKind::Kmsg(kmsg) => kmsg.host = host.tree(),
        ProbeKind::HealthFile { path, .. } => {
            let mut files = trace.probes.iter().filter(|recorded| recorded.kind == kind).map(|recorded| &recorded.name);
            let name = match (files.clone().find(|name| **name == probe.name), files.next(), files.next()) {
                (Some(same), ..) => same,
                (None, Some(only), None) => only,
                (None, None, _) => &probe.name,
                (None, Some(_), Some(_)) => {
                    return Err("the trace has several health files, none of this name".to_owned());
                }
            };
            *path = host.health_file(name);
        }
        ProbeKind::Csi { .. } | ProbeKind::Exec { .. } => {}
    }
    Ok(())
}

/// Whether the trace has SMART logs. They lie where the device files were.
pub fn has_smart(trace: &Trace) -> bool {
    let changes = trace.steps.iter().flat_map(|step| &step.changes);
    changes.into_iter().any(|change| matches!(change, Change::Path(path, Some(_)) if path.starts_with("dev/nvme")))
}
