//! The paths of the registration: whether driver, agent and kubelet mean the same files.

use super::finding::Finding;
use super::kubelet::{self, Kubelet};
use super::place::{Mounted, Place, Sockets};
use crate::grpc::connect::{CallError, chain};
use crate::proxy::kubelet_records::kubelet_root;
use rustix::fs::{Access, access};
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

const PLUGINS_REGISTRY: &str = "plugins_registry";

/// How an operator finds the kubelet's root folder.
const TELL_ROOT: &str =
    "on the node: ps -o args= -C kubelet | grep -o -- '--root-dir[= ][^ ]*' (none: /var/lib/kubelet)";

/// Whether a driver answers at `--csi-address`. `answer` is its name, or why there is none.
pub(super) fn driver_socket(sockets: &Sockets, answer: &Result<String, CallError>) -> Finding {
    const CHECK: &str = "driver-socket";
    let shown = sockets.driver.display();
    let error = match answer {
        Ok(name) => return Finding::pass(CHECK, format!("the driver {name} answers at {shown}")),
        Err(error) => error,
    };
    let seen = chain(error);
    match error {
        CallError::Connect { source, .. } if source.kind() == ErrorKind::PermissionDenied => Finding::fail(
            CHECK,
            seen,
            "securityContext: {runAsUser: 0}; with SELinux the same level in both containers",
        ),
        CallError::Connect { source, .. } if source.kind() == ErrorKind::NotFound => {
            let others = other_sockets(&sockets.driver);
            match others.as_slice() {
                [] => Finding::fail(
                    CHECK,
                    seen,
                    "make the driver's --endpoint and our --csi-address one file in one mounted folder",
                ),
                [one] => Finding::fail(
                    CHECK,
                    format!("{seen}; {one} is there"),
                    format!("--csi-address={one}, if that is the driver's endpoint"),
                ),
                several => Finding::fail(
                    CHECK,
                    format!("{seen}; there are {}", several.join(", ")),
                    "set --csi-address to the driver's endpoint",
                ),
            }
        }
        CallError::Connect { .. } => Finding::fail(CHECK, seen, "kubectl logs POD -c DRIVER: nobody listens there"),
        CallError::Closed { .. } | CallError::Status { .. } => {
            Finding::fail(CHECK, seen, "set --csi-address to the driver's endpoint: something else answers there")
        }
        CallError::Deadline { .. } => {
            Finding::unknown(CHECK, seen).with_fix("kubectl logs POD -c DRIVER: it listens and hangs")
        }
    }
}

/// Other sockets in the same folder, without our own.
fn other_sockets(socket: &Path) -> Vec<String> {
    let Some(entries) = socket.parent().and_then(|folder| std::fs::read_dir(folder).ok()) else { return Vec::new() };
    let mut others: Vec<String> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        .map(|entry| entry.path().display().to_string())
        .filter(|path| !path.ends_with("-warden.sock") && !path.ends_with("-warden-status.sock"))
        .take(10)
        .collect();
    others.sort();
    others
}

/// Whether the driver's socket is where the kubelet is told that it is.
pub(super) fn endpoint(place: &Place, sockets: &Sockets) -> Finding {
    const CHECK: &str = "endpoint";
    let (driver, told) = (&sockets.driver, &sockets.told);
    if driver.file_name() != told.file_name() {
        let right = told.with_file_name(driver.file_name().unwrap_or_default());
        let seen = format!("--csi-address is {}, but the kubelet is told {}", driver.display(), told.display());
        return Finding::fail(
            CHECK,
            seen,
            format!("--kubelet-registration-path={}, or another --csi-address", right.display()),
        );
    }
    let (Some(mount), Some(folder), Some(host)) = (place.own.mount_of(driver), driver.parent(), told.parent()) else {
        return Finding::unknown(CHECK, "cannot tell what is mounted");
    };
    let mount_fix = format!("mount hostPath: {{path: {}}} at {}", host.display(), folder.display());
    let inside = inside(mount, folder);
    let pass =
        || Finding::pass(CHECK, format!("{} is {}/{} on the host", driver.display(), host.display(), name(driver)));
    let seen = || {
        format!(
            "{} is {} of a {}, but the kubelet is told {}",
            folder.display(),
            inside.display(),
            mount.kind,
            told.display()
        )
    };
    match kubelets_word(place, host, folder) {
        Some(true) => return pass(),
        Some(false) => return Finding::fail(CHECK, seen(), mount_fix),
        None => {}
    }
    if mount.at == Path::new("/") {
        // No container, or no mount for it.
        return if folder == host {
            Finding::pass(CHECK, format!("{} by the path that the kubelet is told", driver.display()))
        } else {
            Finding::unknown(CHECK, format!("{} lies in no mount of its own", folder.display()))
                .with_fix("mount the driver socket's folder from the host")
        };
    }
    if same_end(&inside, host) {
        return pass();
    }
    if inside.file_name() == host.file_name() || inside.file_name().is_none() {
        // Behind a link, or on a file system of its own, the right folder looks so, too.
        return Finding::unknown(CHECK, seen()).with_fix(format!("on the node: ls -l {}", told.display()));
    }
    Finding::fail(CHECK, seen(), mount_fix)
}

/// Whether the kubelet's `path` is our `own`, by its own view of the host; `None` where we may not look.
fn kubelets_word(place: &Place, path: &Path, own: &Path) -> Option<bool> {
    match kubelet::find(&place.host.proc) {
        Kubelet::Found(kubelet) => kubelet.sees(path, own),
        Kubelet::Unseen => None,
    }
}

/// A mount shows the path within its file system: the host's path, or its end.
fn same_end(inside: &Path, host: &Path) -> bool {
    host.ends_with(inside.strip_prefix("/").unwrap_or(inside)) && inside != Path::new("/")
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether the registration folder is the kubelet's, and can be written.
pub(super) fn registration_folder(place: &Place, sockets: &Sockets) -> Finding {
    const CHECK: &str = "registration-folder";
    let folder = &sockets.registration_folder;
    let shown = folder.display();
    let registry = kubelet_root(&sockets.told)
        .map_or_else(|| Path::new("/var/lib/kubelet").join(PLUGINS_REGISTRY), |root| root.join(PLUGINS_REGISTRY));
    let mount_fix = format!("mount hostPath: {{path: {}}} at {shown}", registry.display());
    if !folder.is_dir() {
        return Finding::fail(CHECK, format!("there is no folder {shown}"), mount_fix);
    }
    if let Some(finding) = unwritable(CHECK, place, folder) {
        return finding;
    }
    let inside = match place.own.mount_of(folder) {
        Some(mount) if mount.at != Path::new("/") => inside(mount, folder),
        Some(_) => folder.clone(),
        None => return Finding::unknown(CHECK, "cannot tell what is mounted"),
    };
    if inside.file_name().is_none() {
        let seen = format!("{shown} is a file system of its own");
        Finding::unknown(CHECK, seen).with_fix(mount_fix)
    } else if inside.file_name().is_some_and(|name| name == PLUGINS_REGISTRY) {
        Finding::pass(CHECK, format!("{shown} is {} and can be written", inside.display()))
    } else {
        let seen =
            format!("{shown} is {}; the kubelet looks into {PLUGINS_REGISTRY} in its root folder", inside.display());
        Finding::fail(CHECK, seen, mount_fix)
    }
}

/// Which folder of the mounted file system `folder` is.
fn inside(mount: &Mounted, folder: &Path) -> PathBuf {
    let below = folder.strip_prefix(&mount.at).unwrap_or(Path::new(""));
    mount.root.components().chain(below.components()).collect()
}

fn unwritable(check: &'static str, place: &Place, folder: &Path) -> Option<Finding> {
    if place.own.mount_of(folder).is_some_and(|mount| mount.read_only) {
        return Some(Finding::fail(
            check,
            format!("{} is mounted read-only", folder.display()),
            "readOnly: false in its volumeMount",
        ));
    }
    let error = access(folder, Access::WRITE_OK | Access::EXEC_OK).err()?;
    let seen = format!("{}: {}", folder.display(), super::place::words(error));
    Some(Finding::fail(check, seen, "securityContext: {runAsUser: 0}"))
}

/// Whether the paths lie below the root folder that the kubelet runs with.
pub(super) fn root_folder(place: &Place, sockets: &Sockets) -> Finding {
    const CHECK: &str = "kubelet-root";
    let Kubelet::Found(kubelet) = kubelet::find(&place.host.proc) else {
        let seen = "the kubelet's process cannot be seen from here";
        return Finding::unknown(CHECK, seen).with_fix(TELL_ROOT);
    };
    let root = kubelet.root.display();
    let registry = kubelet.root.join(PLUGINS_REGISTRY);
    let folder = &sockets.registration_folder;
    let mount_fix = format!("mount hostPath: {{path: {}}} at {}", registry.display(), folder.display());
    let inside = match place.own.mount_of(folder) {
        Some(mount) if mount.at != Path::new("/") => inside(mount, folder),
        Some(_) | None => folder.clone(),
    };
    let seen = format!("the kubelet's root folder is {root}; {} is {}", folder.display(), inside.display());
    match kubelet.sees(&registry, folder) {
        Some(true) => Finding::pass(CHECK, format!("{} is the kubelet's {}", folder.display(), registry.display())),
        Some(false) => Finding::fail(CHECK, seen, mount_fix),
        None if same_end(&inside, &registry) => Finding::pass(CHECK, format!("{root}, as the kubelet runs with")),
        // Behind a link the right folder looks so, too.
        None => Finding::unknown(CHECK, seen).with_fix(mount_fix),
    }
}

/// Whether state can be kept.
pub(super) fn state_folder(place: &Place, sockets: &Sockets) -> Finding {
    const CHECK: &str = "state-folder";
    let Some(folder) = &sockets.state_folder else {
        return Finding::not_applicable(CHECK, "nothing is watched, so no state is kept");
    };
    if !folder.is_dir() {
        let fix = "mount it, or name another one: --state-dir";
        return Finding::fail(CHECK, format!("there is no folder {}", folder.display()), fix);
    }
    unwritable(CHECK, place, folder)
        .unwrap_or_else(|| Finding::pass(CHECK, format!("{} can be written", folder.display())))
}

/// Whether each health file can change, and be seen to change.
pub(super) fn health_files(place: &Place) -> Vec<Finding> {
    const CHECK: &str = "health-file";
    let finding = |file: &Path| {
        let shown = file.display();
        let folder = file.parent().unwrap_or(Path::new("/"));
        match place.own.mount_of(file) {
            Some(mount) if mount.at == file => {
                let seen = format!("{shown} itself is mounted; a version renamed over it is never seen");
                return Finding::fail(CHECK, seen, "mount its folder in both containers, without subPath");
            }
            Some(mount) if mount.at == Path::new("/") && place.own.in_pod => {
                let seen = format!("{shown} lies in no mount, so no other container can write it");
                return Finding::fail(
                    CHECK,
                    seen,
                    format!("mount one emptyDir at {} in both containers", folder.display()),
                );
            }
            Some(_) | None => {}
        }
        match std::fs::symlink_metadata(file) {
            Ok(_) => Finding::pass(CHECK, format!("{shown} is there, in a folder that may change")),
            Err(error) if error.kind() == ErrorKind::NotFound && folder.is_dir() => {
                Finding::unknown(CHECK, format!("{shown} was not written yet"))
                    .with_fix(format!("csi-warden probe --write {shown} --period 10s -- /check, in a container beside"))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Finding::fail(
                CHECK,
                format!("there is no folder {}", folder.display()),
                "mount one emptyDir there in both containers",
            ),
            Err(error) => Finding::unknown(CHECK, format!("{shown}: {error}")),
        }
    };
    let findings: Vec<_> = place.health_files().map(finding).collect();
    if findings.is_empty() { vec![Finding::not_applicable(CHECK, "no health file is watched")] } else { findings }
}
