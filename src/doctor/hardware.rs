//! What probes of disks, GPUs and the kernel log need of us, and whether the host's `/sys` is there whole.

use super::finding::Finding;
use super::place::{Place, text, words};
use crate::config::probes::ProbeKind;
use crate::probe::kmsg::log::KMSG;
use crate::probe::nvme::read::list;
use crate::probe::tree::{Tree, is_absence};
use rustix::fs::{FileType, OFlags, major, minor};
use rustix::io::Errno;
use std::collections::BTreeSet;

/// Numbers of capabilities, as in `linux/capability.h`.
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYSLOG: u32 = 34;

/// Whether a drive may be asked for its SMART log.
pub(super) fn smart(place: &Place) -> Vec<Finding> {
    const CHECK: &str = "nvme-smart";
    let asks = |kind: &ProbeKind| matches!(kind, ProbeKind::Nvme(nvme) if nvme.smart);
    if !place.probes.iter().any(|probe| asks(&probe.kind)) {
        return vec![Finding::not_applicable(CHECK, "no probe with nvme.smart: true")];
    }
    let fix = "securityContext: {capabilities: {add: [SYS_ADMIN]}}";
    let capability = match place.own.has_capability(CAP_SYS_ADMIN) {
        Some(true) => Finding::pass(CHECK, "we have CAP_SYS_ADMIN"),
        Some(false) => Finding::fail(CHECK, "CAP_SYS_ADMIN is missing, which a drive's SMART log needs", fix),
        None => Finding::unknown(CHECK, "cannot read our capabilities"),
    };
    let mut findings = vec![capability];
    let mut names = BTreeSet::new();
    for probe in &place.probes {
        if let ProbeKind::Nvme(nvme) = &probe.kind
            && nvme.smart
            && let Ok(listed) = list(&place.host.sysfs, &nvme.devices, &nvme.exclude)
        {
            names.extend(listed.selected.into_iter().map(|(controller, _)| controller.name));
        }
    }
    findings.extend(names.iter().filter_map(|name| nvme_file(place, CHECK, name)));
    findings
}

/// What is wrong with a controller's file. It is not opened.
fn nvme_file(place: &Place, check: &'static str, name: &str) -> Option<Finding> {
    let shown = place.host.dev.join(name).display().to_string();
    match Tree::open(&place.host.dev).and_then(|dev| dev.stat(name)) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice => None,
        Ok(_) => Some(Finding::fail(
            check,
            format!("{shown} is no character device"),
            "mount the host's /dev and name it: --dev-root",
        )),
        Err(error) if is_absence(error) => {
            let fix =
                "mount the host's /dev, name it by --dev-root, and let us use it: securityContext: {privileged: true}";
            Some(Finding::fail(check, format!("there is no {shown}"), fix))
        }
        Err(error) => Some(Finding::unknown(check, format!("{shown}: {}", words(error)))),
    }
}

/// Whether the kernel log may be read.
pub(super) fn kernel_log(place: &Place) -> Vec<Finding> {
    const CHECK: &str = "kernel-log";
    let reads = |kind: &ProbeKind| match kind {
        ProbeKind::Kmsg(_) => true,
        ProbeKind::Gpu(gpu) => gpu.xid.is_some(),
        ProbeKind::HealthFile { .. }
        | ProbeKind::Csi { .. }
        | ProbeKind::Exec { .. }
        | ProbeKind::Rdma(_)
        | ProbeKind::Nvme(_) => false,
    };
    if !place.probes.iter().any(|probe| reads(&probe.kind)) {
        return vec![Finding::not_applicable(CHECK, "no probe reads the kernel log")];
    }
    let shown = place.host.dev.join("kmsg").display().to_string();
    let restricted = Tree::open(&place.host.proc).and_then(|proc| text(&proc, "sys/kernel/dmesg_restrict"));
    let restricted = restricted.map(|text| text.trim() != "0");
    let capability = place.own.has_capability(CAP_SYSLOG);
    let opened = Tree::open(&place.host.dev).and_then(|dev| {
        let stat = dev.stat("kmsg")?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
        if !is_device || (major(stat.st_rdev), minor(stat.st_rdev)) != KMSG {
            return Err(Errno::NODEV);
        }
        // For reading, which waits for nothing, and closed at once.
        dev.lookup("kmsg", OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)
    });
    let add = "securityContext: {capabilities: {add: [SYSLOG]}}";
    vec![match (opened, restricted, capability) {
        (Ok(_), Ok(true), Some(false)) => Finding::fail(
            CHECK,
            format!("{shown} opens, but kernel.dmesg_restrict is 1 and CAP_SYSLOG is missing"),
            add,
        ),
        (Ok(_), _, _) => Finding::pass(CHECK, format!("{shown} can be read")),
        (Err(Errno::PERM), _, Some(false)) => {
            Finding::fail(CHECK, format!("{shown} cannot be opened: CAP_SYSLOG is missing"), add)
        }
        (Err(Errno::PERM | Errno::ACCESS), _, _) => {
            let fix = "securityContext: {privileged: true}, or a device plugin that gives /dev/kmsg to the container";
            Finding::fail(CHECK, format!("{shown} may not be opened in this container"), fix)
        }
        (Err(Errno::NODEV), _, _) => Finding::fail(
            CHECK,
            format!("{shown} is not the kernel log"),
            "mount hostPath: {path: /dev/kmsg, type: CharDevice} at that path",
        ),
        (Err(error), _, _) if is_absence(error) => Finding::fail(
            CHECK,
            format!("there is no {shown}"),
            "mount hostPath: {path: /dev/kmsg, type: CharDevice} at that path",
        ),
        (Err(error), _, _) => Finding::unknown(CHECK, format!("{shown}: {}", words(error))),
    }]
}

/// Whether the links of the classes that probes read lead to devices.
pub(super) fn sysfs_whole(place: &Place) -> Vec<Finding> {
    const CHECK: &str = "sysfs-whole";
    const CLASSES: [&str; 3] = ["class/infiniband", "class/nvme", "class/net"];
    let shown = place.host.sysfs.display().to_string();
    let mount = "mount hostPath: {path: /sys} whole, not /sys/class, and name it: --sysfs-root";
    let sysfs = match Tree::open(&place.host.sysfs) {
        Ok(sysfs) => sysfs,
        Err(error) if is_absence(error) => return vec![Finding::fail(CHECK, format!("there is no {shown}"), mount)],
        Err(error) => return vec![Finding::unknown(CHECK, format!("{shown}: {}", words(error)))],
    };
    if sysfs.exists("class") == Ok(false) {
        return vec![Finding::fail(CHECK, format!("{shown} has no class folder: it is no /sys"), mount)];
    }
    let (mut good, mut dangling) = (0, Vec::new());
    for class in CLASSES {
        for name in sysfs.list(class).unwrap_or_default() {
            let path = format!("{class}/{name}");
            match (sysfs.link(&path), sysfs.exists(&path)) {
                (Some(_), Ok(true)) => good += 1,
                (Some(_), Ok(false)) => dangling.push(path),
                (Some(_), Err(_)) | (None, _) => {}
            }
        }
    }
    vec![match (dangling.as_slice(), good) {
        ([], 0) => Finding::unknown(CHECK, format!("{shown} shows no device")),
        ([], good) => Finding::pass(CHECK, format!("{good} links of {shown}/class lead to devices")),
        (dangling, _) => Finding::fail(CHECK, format!("links of {shown} lead nowhere: {}", dangling.join(", ")), mount),
    }]
}
