//! Mounts that are not there, or are there in a way that never works.

use super::pod::{Container, Mount, Pod, VolumeKind, Word, plain};
use super::report::{Check, Report};
use crate::config::paths::unix_path;
use std::path::Path;

/// Whether every mount names a volume, and what our flags name is mounted.
pub(super) fn mounts(report: &mut Report, pod: &Pod) {
    for container in &pod.containers {
        let name = &container.name;
        for mount in &container.mounts {
            report.looked(Check::Mounts);
            if pod.volume(&mount.volume).is_none() {
                let seen = format!("{name}: no volume is named {}", mount.volume);
                report.fail(Check::Mounts, mount.line, &seen, "add it to the pod's volumes");
            }
        }
        if !container.is_agent() {
            continue;
        }
        // A registrar without a health source makes no socket beside the driver's.
        let watches = ["health-file", "config"].iter().any(|flag| container.flag(flag).is_some());
        if watches
            && let Some(address) = container.flag("csi-address").filter(|word| !word.is_open())
            && let Some(mount) = unix_path(&address.text).and_then(|path| container.mount_of(&path))
            && mount.read_only
        {
            let seen =
                format!("{name}: the driver socket's folder is mounted read-only, and our own socket lies in it, too");
            report.fail(Check::Mounts, mount.line, &seen, "readOnly: false, or --proxy=off and --state-dir elsewhere");
        }
        for (flag, host) in [("sysfs-root", "/sys"), ("dev-root", "/dev"), ("proc-root", "/proc")] {
            if let Some(root) = container.flag(flag).filter(|root| !root.is_open() && root.text != host) {
                tree(report, pod, container, flag, host, &root);
            }
        }
        for flag in ["config", "topology-file"] {
            if let Some(file) = container.flag(flag).filter(|file| !file.is_open())
                && let Some(mount) = container.mount_of(&plain(Path::new(&file.text)))
                && let Some(sub) = frozen(pod, mount)
            {
                let seen = format!(
                    "{name}: --{flag} is mounted by subPath {sub} of a ConfigMap, which never shows a new version"
                );
                report.fail(Check::Mounts, mount.line, &seen, "mount the whole ConfigMap as a folder, without subPath");
            }
        }
    }
}

fn tree(report: &mut Report, pod: &Pod, container: &Container, flag: &str, host: &str, root: &Word) {
    report.looked(Check::Mounts);
    let place = pod.place(container, &plain(Path::new(&root.text)));
    if place != Some(super::pod::Place::Host(host.into())) {
        let seen = format!("{}: --{flag}={} is not the host's {host}, mounted whole", container.name, root.text);
        let fix = format!("mount hostPath: {{path: {host}}} at {}, read-only", root.text);
        report.fail(Check::Mounts, root.line, &seen, &fix);
    }
}

/// The subPath of a mount that will never change.
fn frozen<'pod>(pod: &Pod, mount: &'pod Mount) -> Option<&'pod str> {
    let kind = &pod.volume(&mount.volume)?.kind;
    mount.sub_path.as_deref().filter(|_| matches!(kind, VolumeKind::ConfigMap | VolumeKind::ReadOnly))
}

/// Whether the health file can change, and be seen to change, where it is written and read.
pub(super) fn health_file(report: &mut Report, pod: &Pod) {
    let mut places = Vec::new();
    for container in &pod.containers {
        for (flag, writes) in [("health-file", false), ("write", container.runs("probe"))] {
            let Some(file) = container.flag(flag).filter(|file| !file.is_open()) else { continue };
            if flag == "write" && !writes {
                continue;
            }
            report.looked(Check::HealthFile);
            let path = plain(Path::new(&file.text));
            let name = &container.name;
            let mut wrong =
                |line, seen: &str, fix: &str| report.fail(Check::HealthFile, line, &format!("{name}: {seen}"), fix);
            let Some(mount) = container.mount_of(&path) else {
                let seen = format!("{} lies in no mount, so no other container sees it", file.text);
                wrong(file.line, &seen, "mount one emptyDir in both containers: emptyDir: {}");
                continue;
            };
            if let Some(sub) = frozen(pod, mount) {
                let seen = format!(
                    "{} is mounted by subPath {sub} of a ConfigMap: it never updates and is read-only",
                    file.text
                );
                wrong(mount.line, &seen, "use an emptyDir for the health file, mounted as a folder in both containers");
                continue;
            }
            if mount.path == path {
                let seen =
                    format!("{} itself is mounted; a new version renamed over it fails or is not seen", file.text);
                wrong(mount.line, &seen, "mount its folder, not the file");
                continue;
            }
            let kind = pod.volume(&mount.volume).map(|volume| &volume.kind);
            if writes && (mount.read_only || matches!(kind, Some(VolumeKind::ConfigMap | VolumeKind::ReadOnly))) {
                wrong(
                    mount.line,
                    &format!("{} is written here, into a mount that is read-only", file.text),
                    "use an emptyDir",
                );
                continue;
            }
            places.push((pod.place(container, &path), writes, file, name));
        }
    }
    let written: Vec<_> = places.iter().filter(|(_, writes, ..)| *writes).collect();
    for (place, _, file, name) in places.iter().filter(|(_, writes, ..)| !writes) {
        if !written.is_empty() && !written.iter().any(|(there, ..)| there == place) {
            let (_, _, other, writer) = written[0];
            let seen = format!(
                "{name} reads {}, but {writer} (line {}) writes {}, which is another file",
                file.text, other.line, other.text
            );
            report.fail(
                Check::HealthFile,
                file.line,
                &seen,
                "mount one volume in both containers, and name the same file in it",
            );
        }
    }
}
