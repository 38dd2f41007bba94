//! The kernel-log lines that are known to tell of storage hardware, and what each means.

use super::kernel_log::{Class, LogRule};
use super::line_pattern::LinePattern;
use std::time::Duration;

/// A line holds for this long unless its rule says otherwise. A fault that lasts is written again, or seen by another probe.
pub const HOLDS: Duration = Duration::from_secs(600);

/// Written at each look at a module by some firmware: it says the same for a day.
const REPEATED_HOLDS: Duration = Duration::from_secs(24 * 3600);

/// The nvme driver begins with a controller.
const NVME_FOUND: Option<&str> = Some("nvme {device}: pci function");

/// The mlx5 driver's word that it has reset a sick device.
const MLX5_RECOVERED: Option<&str> = Some("mlx5_core {device}*health recovery succeeded");

/// Name, what is looked for, class, how long it holds, what ends it before.
type Written = (&'static str, &'static str, Class, Duration, Option<&'static str>);

/// The first that matches a line decides. One line at a time: the stack below a soft lockup is lines of its own, so what hung
/// there is not told.
const RULES: [Written; 20] = [
    (
        "mlx5-command-timeout",
        "mlx5_core {device}*timeout. Will cause a leak of a command resource",
        Class::Fatal,
        HOLDS,
        MLX5_RECOVERED,
    ),
    ("mlx5-health", "mlx5_core {device}*health compromised - reached miss count", Class::Fatal, HOLDS, MLX5_RECOVERED),
    ("mlx5-hardware", "mlx5_core {device}*unrecoverable hardware error", Class::Fatal, HOLDS, MLX5_RECOVERED),
    ("mlx5-recovery-failed", "mlx5_core {device}*health recovery failed", Class::Fatal, HOLDS, MLX5_RECOVERED),
    ("mlx5-pci-dead", "mlx5_core {device}*PCI reads still not working", Class::Fatal, HOLDS, MLX5_RECOVERED),
    ("mlx5-tx-timeout", "mlx5_core {device}*TX timeout detected", Class::Warn, HOLDS, None),
    ("mlx5-slot-power", "mlx5_core {device}*Detected insufficient power on the PCIe slot", Class::Warn, HOLDS, None),
    ("mlx5-module-hot", "mlx5_core {device}*Port module event*High Temperature", Class::Warn, HOLDS, None),
    (
        "mlx5-cable-unplugged",
        "mlx5_core {device}*Port module event*Cable unplugged",
        Class::Warn,
        HOLDS,
        Some("mlx5_core {device}*Port module event*Cable plugged"),
    ),
    ("mlx5-register", "mlx5_core {device}*ACCESS_REG*failed", Class::Warn, REPEATED_HOLDS, None),
    ("efa-admin-timeout", "efa {device}*didn't send any completion for admin cmd", Class::Fatal, HOLDS, None),
    ("efa-admin-timeout", "infiniband {device}: *didn't send any completion for admin cmd", Class::Fatal, HOLDS, None),
    ("efa-admin-closed", "efa {device}*Admin queue is closed", Class::Fatal, HOLDS, None),
    ("efa-admin-closed", "infiniband {device}: Admin queue is closed", Class::Fatal, HOLDS, None),
    ("nvme-removed", "nvme {device}: Removing after probe failure", Class::Fatal, HOLDS, NVME_FOUND),
    ("nvme-timeout", "nvme {device}: I/O*timeout, ", Class::Warn, HOLDS, None),
    ("nvme-down", "nvme {device}: controller is down; will reset", Class::Warn, HOLDS, None),
    ("netdev-watchdog", "NETDEV WATCHDOG: {device}*transmit queue", Class::Warn, HOLDS, None),
    ("soft-lockup", "BUG: soft lockup", Class::Warn, HOLDS, None),
    ("gpu-off-the-bus", "NVRM: GPU {device}: GPU has fallen off the bus", Class::Warn, HOLDS, None),
];

/// The built-in rules.
pub fn built_in() -> Vec<LogRule> {
    let pattern = |text: &str| LinePattern::new(text).ok();
    let rules = RULES.into_iter().filter_map(|(name, look_for, class, holds, until)| {
        let (name, pattern_found) = (name.to_owned(), pattern(look_for)?);
        Some(LogRule { name, pattern: pattern_found, class, holds: Some(holds), until: until.and_then(pattern) })
    });
    rules.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::kernel_log::{KernelLogPolicy, Message};
    use crate::policy::some_instant;

    /// As kernels wrote them.
    const LINES: [(&str, Option<(&str, Class)>); 23] = [
        (
            "mlx5_core 0000:01:00.0: wait_func_handle_exec_timeout:1113:(pid 3122): cmd[0]: DESTROY_EQ(0x302) timeout. Will cause a leak of a command resource",
            Some(("mlx5-command-timeout", Class::Fatal)),
        ),
        (
            "mlx5_core 0000:41:00.0: poll_health:852:(pid 0): device's health compromised - reached miss count",
            Some(("mlx5-health", Class::Fatal)),
        ),
        (
            "mlx5_core 0000:41:00.0: print_health_info:458:(pid 0): synd 0x8: unrecoverable hardware error.",
            Some(("mlx5-hardware", Class::Fatal)),
        ),
        (
            "mlx5_core 0000:00:00.1: mlx5_health_try_recover:338:(pid 5553): health recovery flow aborted, PCI reads still not working",
            Some(("mlx5-pci-dead", Class::Fatal)),
        ),
        (
            "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 268269): Detected insufficient power on the PCIe slot (27W).",
            Some(("mlx5-slot-power", Class::Warn)),
        ),
        (
            "mlx5_core 0000:63:00.1: Port module event: module 1, Cable unplugged",
            Some(("mlx5-cable-unplugged", Class::Warn)),
        ),
        (
            "mlx5_core 0000:63:00.1: Port module event[error]: module 0, Cable error, High Temperature",
            Some(("mlx5-module-hot", Class::Warn)),
        ),
        (
            "mlx5_core 0000:5c:00.0: mlx5_cmd_out_err:839:(pid 1441871): ACCESS_REG(0x805) op_mod(0x1) failed, status bad operation(0x2), syndrome (0x305684), err(-22)",
            Some(("mlx5-register", Class::Warn)),
        ),
        ("NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out", Some(("netdev-watchdog", Class::Warn))),
        ("mlx5_core 0000:08:00.0 eth2: TX timeout detected", Some(("mlx5-tx-timeout", Class::Warn))),
        (
            "efa 0000:00:06.0 rdmap0s6: The device didn't send any completion for admin cmd ALLOC_PD(5) status 0 (ctx 0x0, sq producer: 1, sq consumer: 0, cq consumer: 0)",
            Some(("efa-admin-timeout", Class::Fatal)),
        ),
        ("infiniband rdmap0s6: Admin queue is closed", Some(("efa-admin-closed", Class::Fatal))),
        ("nvme nvme1: Removing after probe failure status: -19", Some(("nvme-removed", Class::Fatal))),
        ("nvme nvme0: I/O 24 QID 0 timeout, reset controller", Some(("nvme-timeout", Class::Warn))),
        (
            "nvme nvme0: I/O tag 12 (100c) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller",
            Some(("nvme-timeout", Class::Warn)),
        ),
        ("nvme nvme0: I/O 643 (I/O Cmd) QID 1 timeout, completion polled", Some(("nvme-timeout", Class::Warn))),
        (
            "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
            Some(("nvme-down", Class::Warn)),
        ),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [ksoftirqd/3:28]", Some(("soft-lockup", Class::Warn))),
        ("NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", Some(("gpu-off-the-bus", Class::Warn))),
        ("mlx5_core 0000:0b:00.0: Port module event: module 0, Cable plugged", None),
        ("mlx5_core 0000:00:02.0: mlx5_cmd_eq_recover:247:(pid 3122): Recovered 1 EQEs on cmd_eq", None),
        ("nvme nvme0: 8/0/0 default/read/poll queues", None),
        ("mlx5_core 0000:0b:00.0: Rate limit: 127 rates are supported, range: 0Mbps to 97656Mbps", None),
    ];

    #[test]
    fn every_line_of_real_kernels_is_classed_as_meant() {
        let now = some_instant();
        for (text, meant) in LINES {
            let mut policy = KernelLogPolicy::new(built_in());
            policy.read(Message { age: Duration::ZERO, history: false, text }, now);
            let held = policy.held(now).first().cloned();
            assert_eq!(held.as_ref().map(|held| (held.rule.as_str(), held.class)), meant, "{text}");
            assert!(held.is_none_or(|held| held.device.is_some() || held.rule == "soft-lockup"), "{text}");
        }
    }

    #[test]
    fn every_rule_is_well_formed() {
        assert_eq!(built_in().len(), RULES.len());
        for (rule, (name, .., until)) in built_in().iter().zip(RULES) {
            assert_eq!((rule.name.as_str(), rule.until.is_some()), (name, until.is_some()));
        }
    }

    #[test]
    fn the_drivers_word_of_recovery_ends_what_it_told_before() {
        let now = some_instant();
        let mut policy = KernelLogPolicy::new(built_in());
        for text in [
            "mlx5_core 0000:41:00.0: poll_health:852:(pid 0): device's health compromised - reached miss count",
            "mlx5_core 0000:41:00.0: mlx5_health_try_recover:341:(pid 77): health recovery succeeded",
        ] {
            policy.read(Message { age: Duration::ZERO, history: false, text }, now);
        }
        assert!(policy.held(now).is_empty());
    }
}
