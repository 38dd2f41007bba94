//! Whether all in a pod speak of one driver socket, and the kubelet finds it.

use super::pod::{Container, Place, Pod, VolumeKind, Word, plain};
use super::report::{Check, Report};
use crate::config::paths::unix_path;
use std::path::{Path, PathBuf};

/// Where `--plugin-registration-path` is unless it says so.
const REGISTRATION_FOLDER: &str = "/registration";

/// Where `--csi-address` is unless it says so.
const CSI_ADDRESS: &str = "/run/csi/socket";

/// What the kubelet's watcher looks into, in its root folder.
const PLUGINS_REGISTRY: &str = "plugins_registry";

/// Whether each `--csi-address` is the socket that the driver is told to make, and the one that the kubelet is told of.
pub(super) fn endpoints(report: &mut Report, pod: &Pod) {
    let mut drivers: Vec<_> =
        pod.containers.iter().filter_map(|driver| Some((driver, driver.driver_endpoint()?))).collect();
    // Other programs have an --endpoint, too, that is no socket's.
    drivers.sort_by_key(|(_, endpoint)| unix_path(&endpoint.text).is_none() && !endpoint.is_open());
    let driver = drivers.into_iter().next();
    for container in &pod.containers {
        let typed = container.flag("csi-address");
        let agent = container.is_agent();
        let address = match typed {
            Some(address) => address,
            None if agent && container.flag("config").is_none() => {
                Word { text: CSI_ADDRESS.to_owned(), line: container.line }
            }
            None => continue,
        };
        let Some(here) = place(report, pod, container, "--csi-address", &address) else { continue };
        if let Some((driver, endpoint)) = &driver
            && let Some(there) = place(report, pod, driver, "the driver's endpoint", endpoint)
        {
            report.looked(Check::Endpoint);
            if here != there {
                let seen = format!(
                    "{}: --csi-address {} is {}, but {} (line {}) listens at {}, which is {}",
                    container.name,
                    address.text,
                    shown(&here),
                    driver.name,
                    endpoint.line,
                    endpoint.text,
                    shown(&there),
                );
                let fix = "mount the folder of the driver's endpoint in both containers, and name the same file in both flags";
                report.fail(Check::Endpoint, address.line, &seen, fix);
            }
        }
        if agent {
            announced(report, container, &address, &here);
        }
    }
}

/// Whether `--kubelet-registration-path` is the same file, seen from the host.
fn announced(report: &mut Report, container: &Container, address: &Word, here: &Place) {
    let Some(path) = container.flag("kubelet-registration-path") else { return };
    if path.is_open() {
        let seen = format!("{}: --kubelet-registration-path has a variable without a written value", container.name);
        return report.unknown(Check::Endpoint, path.line, &seen);
    }
    report.looked(Check::Endpoint);
    let told = plain(&unix_path(&path.text).unwrap_or_else(|| PathBuf::from(&path.text)));
    match here {
        Place::Host(host) if *host == told => {}
        Place::Host(host) => {
            let seen = format!(
                "{}: the kubelet is told {}, but --csi-address {} is {} on the host",
                container.name,
                told.display(),
                address.text,
                host.display(),
            );
            report.fail(Check::Endpoint, path.line, &seen, &format!("--kubelet-registration-path={}", host.display()));
        }
        Place::Volume(volume, _) => {
            let seen = format!(
                "{}: --csi-address lies in the volume {volume}, which the kubelet cannot reach",
                container.name
            );
            let folder = told.parent().unwrap_or(Path::new("/")).display().to_string();
            let fix = format!("make the volume {volume} a hostPath: {{path: {folder}, type: DirectoryOrCreate}}");
            report.fail(Check::Endpoint, address.line, &seen, &fix);
        }
    }
}

fn place(report: &mut Report, pod: &Pod, container: &Container, what: &str, word: &Word) -> Option<Place> {
    if word.is_open() {
        let seen = format!("{}: {what} has a variable without a written value: {}", container.name, word.text);
        report.unknown(Check::Endpoint, word.line, &seen);
        return None;
    }
    let Some(path) = unix_path(&word.text) else {
        let seen = format!("{}: {what} {} is no path of a unix socket", container.name, word.text);
        report.unknown(Check::Endpoint, word.line, &seen);
        return None;
    };
    let place = pod.place(container, &plain(&path));
    if place.is_none() {
        report.looked(Check::Endpoint);
        let seen = format!("{}: {what} {} lies in no mount, so no other container sees it", container.name, word.text);
        let folder = path.parent().unwrap_or(Path::new("/")).display().to_string();
        report.fail(Check::Endpoint, word.line, &seen, &format!("mount the driver socket's folder at {folder}"));
    }
    place
}

fn shown(place: &Place) -> String {
    match place {
        Place::Host(path) => format!("{} on the host", path.display()),
        Place::Volume(volume, path) => format!("{} in the volume {volume}", path.display()),
    }
}

/// Whether the registration folder is the kubelet's, mounted whole and to be written.
pub(super) fn registration(report: &mut Report, pod: &Pod) {
    for container in pod.containers.iter().filter(|container| container.is_agent()) {
        let typed = container.flag("plugin-registration-path");
        if typed.is_none() && container.flag("config").is_some() {
            continue;
        }
        let (path, line) =
            typed.map_or((REGISTRATION_FOLDER.to_owned(), container.line), |word| (word.text, word.line));
        report.looked(Check::RegistrationFolder);
        let name = &container.name;
        let mut wrong =
            |line, seen: &str, fix: &str| report.fail(Check::RegistrationFolder, line, &format!("{name}: {seen}"), fix);
        let Some(mount) = container.mount_of(&plain(Path::new(&path))) else {
            let fix = format!("mount a hostPath volume of the kubelet's {PLUGINS_REGISTRY} folder at {path}");
            wrong(line, &format!("nothing is mounted at {path}"), &fix);
            continue;
        };
        if mount.sub_path.is_some() {
            wrong(mount.line, &format!("{path} is mounted by subPath"), "mount the whole folder, without subPath");
            continue;
        }
        if mount.read_only {
            wrong(mount.line, &format!("{path} is mounted read-only"), "readOnly: false");
        }
        let told = container.flag("kubelet-registration-path").filter(|word| !word.is_open());
        let host = match pod.volume(&mount.volume).map(|volume| &volume.kind) {
            Some(VolumeKind::Host(host)) => {
                host.join(plain(Path::new(&path)).strip_prefix(&mount.path).unwrap_or(Path::new("")))
            }
            // That is another check's.
            None => continue,
            Some(VolumeKind::ConfigMap | VolumeKind::ReadOnly | VolumeKind::Other) => {
                let fix = format!("hostPath: {{path: /var/lib/kubelet/{PLUGINS_REGISTRY}, type: Directory}}");
                wrong(mount.line, &format!("the volume {} at {path} is no hostPath", mount.volume), &fix);
                continue;
            }
        };
        let host = plain(&host);
        if !host.ends_with(PLUGINS_REGISTRY) {
            let seen = format!(
                "{path} is {} on the host; the kubelet looks into {PLUGINS_REGISTRY} in its root folder",
                host.display()
            );
            wrong(mount.line, &seen, &format!("hostPath: {{path: /var/lib/kubelet/{PLUGINS_REGISTRY}}}"));
        } else if let (Some(root), Some(told)) = (host.parent(), told)
            && !Path::new(&told.text).starts_with(root)
        {
            // Both work where the kubelet's root folder is the second one; mostly one of them was forgotten.
            let seen = format!(
                "{name}: {} is not below {}, that {path} is mounted from: which of them is the kubelet's root folder?",
                told.text,
                root.display(),
            );
            report.unknown(Check::RegistrationFolder, told.line, &seen);
        }
    }
}
