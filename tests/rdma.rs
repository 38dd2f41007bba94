//! Promise: `csi-warden` tells the truth about RDMA ports, and keeps the driver from registering where none is fit.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;
#[path = "../src/probe/rdma/fixture.rs"]
#[expect(dead_code, reason = "the probe's own tests use the rest")]
mod fixture;

use bed::Bed;
use fixture::{Host, INFINIBAND, Link};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use std::time::Duration;

const CUT: Link = Link { state: "1: DOWN", phys: "2: Polling", ..INFINIBAND };

fn roots(host: &Host) -> [String; 3] {
    let root = |flag: &str, folder: &str| format!("--{flag}-root={}", host.at(folder).display());
    [root("sysfs", "sys"), root("dev", "dev"), root("proc", "proc")]
}

/// Exit code, stdout, stderr.
fn probe(host: &Host, flags: &[&str]) -> (Option<i32>, String, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_csi-warden")).arg("probe").args(roots(host)).args(flags).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_probe_command_shows_each_port_and_what_is_made_of_it() {
    let host = Host::new();
    if !host.has_device_files() {
        // Not in this container.
        return;
    }
    host.pci_device("mlx5_0", 1, &[INFINIBAND]);
    host.pci_device("mlx5_1", 2, &[CUT]);
    let (code, out, err) = probe(&host, &["--type=rdma"]);
    assert_eq!(code, Some(0), "nobody has named the second: {out}{err}");
    assert!(out.contains("\n  mlx5_0/1 success"), "{out}");
    assert!(out.contains("\n  mlx5_1/1 unknown NotRequired: never seen good and not named; PortDown"), "{out}");
    assert!(out.lines().all(|line| line.chars().count() <= 80), "{out}");
    let (code, out, err) = probe(&host, &["--type=rdma", "--device=mlx5_*,mlx5_1", "--output=json"]);
    assert_eq!(code, Some(1), "{err}");
    let said: Value = serde_json::from_str(&out).unwrap();
    let said = &said["probes"][0];
    assert_eq!((&said["name"], &said["type"], &said["reason"]), (&json!("rdma"), &json!("rdma"), &json!("PortDown")));
    let port = &said["observed"]["mlx5_1/1"];
    assert_eq!((&port["outcome"], &port["state"]), (&json!("failure"), &json!("1: DOWN")));
    assert_eq!(said["observed"]["mlx5_0/1"]["rate"], json!("400 Gb/s"));
    assert_eq!(probe(&Host::new(), &["--type=rdma"]).0, Some(1), "no device at all");
}

#[test]
fn a_settings_file_s_probe_reads_the_tree_that_the_flags_name() {
    let host = Host::new();
    host.pci_device("mlx5_0", 1, &[CUT]);
    let path = host.at("warden.yaml");
    fs::write(&path, "probes: [{name: fabric, type: rdma, rdma: {devices: [mlx5_0], deviceNodes: []}}]\n").unwrap();
    let config = format!("--config={}", path.display());
    let (code, out, err) = probe(&host, &[&config]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(out.contains("PortDown: mlx5_0/1: state 1: DOWN") && err.is_empty(), "{out}{err}");
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let host = Host::new();
    for (flags, words) in [
        (vec!["--type=nvme9"], "--type=\"nvme9\" is unknown"),
        (vec!["--type=rdma", "--device=a/b"], "--device: \"a/b\" is no device"),
        (vec!["--type=rdma", "--device=,"], "--device names no device"),
        (vec!["--device=mlx5_0", "--", "true"], "--device chooses among the devices of --type"),
        (vec!["--type=rdma", "--csi-address=/c"], "--csi-address and --type exclude each other"),
    ] {
        let (code, _, err) = probe(&host, &flags);
        assert_eq!(code, Some(2), "{flags:?}");
        assert!(err.contains(words), "{flags:?}: {err}");
    }
}

#[tokio::test]
async fn a_node_whose_only_port_is_dead_at_boot_does_not_register_until_it_is_well() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let host = Host::new();
    host.pci_device("mlx5_0", 1, &[CUT]);
    let config = bed.at("warden.yaml");
    // The time-out is long: the machine may be busy.
    let text = "probes: [{name: fabric, type: rdma, period: 100ms, timeout: 20s, rdma: {deviceNodes: []}}]\n";
    fs::write(&config, text).unwrap();
    let mut flags = vec![
        format!("--config={}", config.display()),
        "--confirm-interval=50ms".to_owned(),
        "--start-grace=300ms".to_owned(),
        "--recovery-hold=200ms".to_owned(),
    ];
    flags.extend(roots(&host));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let agent = bed.agent(&flags);
    agent.logs("NoUsablePort").await;
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert!(!bed.registration_socket().exists(), "{}", agent.log());
    host.write(&host.port("mlx5_0", 1, "state"), "4: ACTIVE\n");
    host.write(&host.port("mlx5_0", 1, "phys_state"), "5: LinkUp\n");
    bed::eventually("the driver is registered", || bed.registration_socket().exists()).await;
    let known = bed.at("drv/x.example.com-warden-ports.json");
    bed::eventually("the good port is kept", || known.exists()).await;
    host.write(&host.port("mlx5_0", 1, "state"), "1: DOWN\n");
    bed::eventually("the driver is withdrawn", || !bed.registration_socket().exists()).await;
}
