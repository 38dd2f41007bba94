//! What the container keeps from us: another network, another label.

use super::finding::Finding;
use super::place::{Place, text};
use crate::probe::tree::Tree;

/// Whether link events of the kernel reach us: they stay within a network namespace.
pub(super) fn network(place: &Place) -> Vec<Finding> {
    const CHECK: &str = "network-namespace";
    if !place.watches("rdma") {
        return vec![Finding::not_applicable(CHECK, "no probe of type rdma, which alone looks at interfaces")];
    }
    let hosts = Tree::open(&place.host.proc).ok().and_then(|proc| proc.link("1/ns/net"));
    let same = match (&hosts, &place.own.network) {
        // Without the host's /proc, process 1 is our own container's.
        (Some(first), Some(own)) if first != own || !place.own.in_pod || is_a_mount(place) => Some(first == own),
        _ => None,
    };
    let polled = "link events do not come here; ports are read each period all the same";
    vec![match (&place.own.netlink_trouble, same) {
        (Some(why), _) => Finding::not_applicable(CHECK, format!("netlink cannot be opened ({why}): {polled}"))
            .with_fix("securityContext: {seccompProfile: {type: RuntimeDefault}}, which allows it"),
        (None, Some(true)) => Finding::pass(CHECK, "the host's: link events by netlink come here"),
        (None, Some(false)) => Finding::not_applicable(CHECK, format!("not the host's: {polled}"))
            .with_fix("hostNetwork: true, to see a cut cable at once"),
        (None, None) => Finding::unknown(CHECK, "cannot see the host's process 1, to compare")
            .with_fix("mount the host's /proc and name it: --proc-root; or hostPID: true"),
    }]
}

/// Whether `--proc-root` is another `/proc` than our own.
fn is_a_mount(place: &Place) -> bool {
    place.host.proc != std::path::Path::new("/proc")
}

/// Whether SELinux may keep us from the host's sockets.
pub(super) fn selinux(place: &Place, denied: bool) -> Finding {
    const CHECK: &str = "selinux";
    // Before or after what a label would forbid, this is where it would be seen.
    const AUDIT: &str = "on the node: ausearch -m avc -ts recent | grep -E 'csi|warden'";
    let enforces = Tree::open(&place.host.sysfs).and_then(|sysfs| text(&sysfs, "fs/selinux/enforce"));
    let enforces = enforces.is_ok_and(|text| text.trim() == "1");
    match &place.own.context {
        Some(context) if enforces || denied => {
            let kind = context.split(':').nth(2).unwrap_or_default();
            let free = matches!(kind, "spc_t" | "unconfined_t" | "kubernetes_t" | "super_t");
            match (free, denied) {
                (true, _) => Finding::pass(CHECK, format!("we run as {kind}, which is not confined")),
                (false, true) => Finding::fail(
                    CHECK,
                    format!("we run as {context}, and were denied the driver's socket"),
                    "securityContext: {seLinuxOptions: {type: spc_t}}, or the driver's level in both containers",
                ),
                (false, false) => {
                    Finding::unknown(CHECK, format!("we run as {kind}, which may be kept from the host's folders"))
                        .with_fix(AUDIT)
                }
            }
        }
        Some(_) => Finding::not_applicable(CHECK, "SELinux does not enforce here, as far as can be seen"),
        None => Finding::not_applicable(CHECK, "no SELinux here"),
    }
}
