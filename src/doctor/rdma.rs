//! What an RDMA node needs besides its modules: addresses that can be read, device files in time, and no NetworkManager on `ib*`.

use super::finding::Finding;
use super::kubelet::{self, Kubelet};
use super::place::{Place, text, words};
use crate::config::probes::{ProbeKind, RdmaSettings};
use crate::policy::rdma::rules::{DeviceNode, RdmaRules};
use crate::policy::rdma::seen::Verbs;
use crate::probe::rdma::{device_files, selected};
use crate::probe::tree::{Tree, is_absence};
use rustix::fs::FileType;
use rustix::io::Errno;

/// Where RDMA devices are listed.
const CLASS: &str = "class/infiniband";

/// Opens each GID 0 for all to read, whatever a distribution's rules say.
const GID_RULE: &str = "echo 'SUBSYSTEM==\"infiniband\", ACTION==\"add\", RUN+=\"/bin/sh -c \\'chmod a+r /sys%p/ports/*/gids/*\\'\"' \
                        > /etc/udev/rules.d/99-rdma-gids.rules && udevadm control --reload && udevadm trigger -s infiniband -c add";

/// Makes the device files again.
const UDEV_TRIGGER: &str =
    "modprobe -a ib_uverbs rdma_ucm && udevadm trigger -s infiniband_verbs -c add && udevadm settle";

/// The devices, or the finding that there are none to look at.
fn devices(place: &Place, check: &'static str) -> Result<(Tree, Vec<String>), Finding> {
    let shown = place.host.sysfs.display();
    let sysfs =
        Tree::open(&place.host.sysfs).map_err(|error| Finding::unknown(check, format!("{shown}: {}", words(error))))?;
    let mut names = match sysfs.list(CLASS) {
        Ok(names) => names,
        Err(error) if is_absence(error) => Vec::new(),
        Err(error) => return Err(Finding::unknown(check, format!("{shown}/{CLASS}: {}", words(error)))),
    };
    for probe in &place.probes {
        if let ProbeKind::Rdma(settings) = &probe.kind {
            // What a probe leaves out is not opened here either.
            let rules = RdmaRules { exclude: settings.rules.exclude.clone(), ..RdmaRules::default() };
            let left = selected(&RdmaSettings { host: place.host.clone(), rules });
            names.retain(|name| left.contains(name));
        }
    }
    if !names.is_empty() {
        return Ok((sysfs, names));
    }
    let seen = format!("no RDMA device in {shown}/{CLASS}");
    Err(if place.watches("rdma") { Finding::unknown(check, seen) } else { Finding::not_applicable(check, seen) })
}

/// Whether this user may read GID 0 of each port.
pub(super) fn gids(place: &Place) -> Vec<Finding> {
    const CHECK: &str = "rdma-gids";
    let (sysfs, devices) = match devices(place, CHECK) {
        Ok(found) => found,
        Err(finding) => return vec![finding],
    };
    let (mut good, mut denied, mut odd) = (0, Vec::new(), Vec::new());
    for device in &devices {
        for port in sysfs.list(&format!("{CLASS}/{device}/ports")).unwrap_or_default() {
            let path = format!("{CLASS}/{device}/ports/{port}/gids/0");
            match text(&sysfs, &path) {
                Ok(_) => good += 1,
                Err(Errno::ACCESS | Errno::PERM) => denied.push(format!("{device}/{port}")),
                Err(error) => odd.push(format!("{device}/{port}: {}", words(error))),
            }
        }
    }
    vec![match (denied.as_slice(), odd.as_slice()) {
        ([], []) if good == 0 => Finding::unknown(CHECK, "the devices show no port"),
        ([], []) => {
            Finding::pass(CHECK, format!("GID 0 of {good} port{} can be read", if good == 1 { "" } else { "s" }))
        }
        ([], odd) => Finding::unknown(CHECK, format!("GID 0 of {}", odd.join(", "))),
        (denied, _) => Finding::fail(CHECK, format!("we may not read GID 0 of {}", denied.join(", ")), GID_RULE),
    }]
}

/// Whether each device's files are there, with the kernel's numbers, and can be opened.
pub(super) fn device_nodes(place: &Place) -> Vec<Finding> {
    const CHECK: &str = "rdma-device-nodes";
    let devices = match devices(place, CHECK) {
        Ok((_, devices)) => devices,
        Err(finding) => return vec![finding],
    };
    let rules = RdmaRules { device_nodes: DeviceNode::ALL.to_vec(), ..RdmaRules::default() };
    let (mut good, mut findings) = (Vec::new(), Vec::new());
    for device in devices {
        match device_files(&place.host, &rules, &device) {
            Verbs::Usable => good.push(device),
            Verbs::Missing(why) => findings.push(Finding::fail(CHECK, format!("{device}: {why}"), UDEV_TRIGGER)),
            Verbs::NotOurs(why) => findings.push(Finding::unknown(CHECK, format!("{device}: {why}")).with_fix(
                "run it in the driver's container, which is to use it, or with securityContext: {privileged: true}",
            )),
            Verbs::Unknown(why) => findings.push(Finding::unknown(CHECK, format!("{device}: {why}"))),
        }
    }
    if findings.is_empty() {
        findings.push(Finding::pass(
            CHECK,
            format!("device files of {} are there, with the kernel's numbers", good.join(", ")),
        ));
    }
    findings
}

/// Whether the device files were made before the kubelet started, in this boot or by order.
pub(super) fn udev(place: &Place) -> Vec<Finding> {
    const CHECK: &str = "rdma-udev-before-kubelet";
    const SETTLE: &str = "systemd-udev-settle.service";
    if let Err(finding) = devices(place, CHECK) {
        return vec![finding];
    }
    let fix = "mkdir -p /etc/systemd/system/kubelet.service.d && printf '[Unit]\\nWants=systemd-udev-settle.service\\n\
               After=systemd-udev-settle.service\\n' > /etc/systemd/system/kubelet.service.d/10-udev-settle.conf && systemctl daemon-reload";
    if let Some(file) = drop_in(place, SETTLE) {
        return vec![Finding::pass(CHECK, format!("{file} starts the kubelet after {SETTLE}"))];
    }
    let (Some(started), Some(late)) = (kubelet_start(place), youngest_node(place)) else {
        let seen = "neither the kubelet's unit nor its process can be seen from here";
        return vec![Finding::unknown(CHECK, seen).with_fix("on the node: systemctl cat kubelet | grep udev-settle")];
    };
    let (name, made) = late;
    vec![if made <= started {
        Finding::pass(CHECK, "in this boot the device files were there before the kubelet started")
    } else {
        let seen = format!("{name} was made {} s after the kubelet started", made - started);
        Finding::fail(CHECK, seen, fix)
    }]
}

fn drop_in(place: &Place, settle: &str) -> Option<String> {
    if place.etc_is_doubtful {
        return None;
    }
    let etc = Tree::open(&place.etc).ok()?;
    let folder = "systemd/system/kubelet.service.d";
    let mut files = vec!["systemd/system/kubelet.service".to_owned()];
    files.extend(
        etc.list(folder)
            .unwrap_or_default()
            .iter()
            .filter(|name| name.ends_with(".conf"))
            .map(|name| format!("{folder}/{name}")),
    );
    let orders = |path: &String| {
        let whole = text(&etc, path).unwrap_or_default();
        whole.lines().any(|line| {
            line.trim().strip_prefix("After=").is_some_and(|units| units.split_whitespace().any(|unit| unit == settle))
        })
    };
    files.into_iter().find(orders).map(|path| place.etc.join(path).display().to_string())
}

/// In seconds of the wall clock.
fn kubelet_start(place: &Place) -> Option<i64> {
    match kubelet::find(&place.host.proc) {
        Kubelet::Found(process) => process.started,
        Kubelet::Unseen => None,
    }
}

/// The device file that was made last, and when.
fn youngest_node(place: &Place) -> Option<(String, i64)> {
    let dev = Tree::open(&place.host.dev).ok()?;
    let made = |name: String| {
        let stat = dev.stat(&format!("infiniband/{name}")).ok()?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        is_device.then(|| (place.host.dev.join("infiniband").join(name).display().to_string(), stat.st_mtime))
    };
    dev.list("infiniband")
        .ok()?
        .into_iter()
        .filter(|name| name.starts_with("uverbs"))
        .filter_map(made)
        .max_by_key(|(_, at)| *at)
}
