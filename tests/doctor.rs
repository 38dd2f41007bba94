//! Promise: `csi-warden doctor` finds what is wrong, says how to mend it, and changes nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;
#[path = "../src/probe/rdma/fixture.rs"]
#[expect(dead_code, reason = "the probe's own tests use the rest")]
mod fixture;

use bed::Bed;
use fixture::{Host, INFINIBAND};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

/// Exit code, and the status of each check.
fn doctor(flags: &[String]) -> (Option<i32>, BTreeMap<String, String>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
        .args(["doctor", "--output=json"])
        .args(flags)
        .env_remove("KUBERNETES_SERVICE_HOST")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    let said: Value = serde_json::from_str(&text).unwrap_or_default();
    let word = |check: &Value, key: &str| check[key].as_str().unwrap().to_owned();
    let checks = said["checks"].as_array().cloned().unwrap_or_default();
    (output.status.code(), checks.iter().map(|check| (word(check, "check"), word(check, "status"))).collect(), text)
}

/// While driver, kubelet and agent run in this test.
async fn doctor_beside(flags: Vec<String>) -> (Option<i32>, BTreeMap<String, String>, String) {
    tokio::task::spawn_blocking(move || doctor(&flags)).await.unwrap()
}

fn roots(host: &Host) -> Vec<String> {
    fs::create_dir_all(host.at("etc")).unwrap();
    let root = |flag: &str, folder: &str| format!("--{flag}-root={}", host.at(folder).display());
    vec![root("sysfs", "sys"), root("dev", "dev"), root("proc", "proc"), root("etc", "etc")]
}

fn paths(bed: &Bed) -> Vec<String> {
    vec![
        format!("--csi-address={}", bed.driver_socket().display()),
        format!("--kubelet-registration-path={}", bed.driver_socket().display()),
        format!("--plugin-registration-path={}", bed.at("reg").display()),
    ]
}

#[tokio::test]
async fn a_driver_that_listens_elsewhere_is_found_with_the_name_of_its_socket() {
    let bed = Bed::new();
    let host = Host::new();
    let flags = [paths(&bed), roots(&host)].concat();
    let (code, checks, text) = doctor_beside(flags.clone()).await;
    assert_eq!((code, checks["driver-socket"].as_str()), (Some(1), "fail"), "{text}");
    let _driver = csi_warden::demo::driver::DemoDriver::start(&bed.at("drv/other.sock"), bed::DRIVER).unwrap();
    let (_, _, text) = doctor_beside(flags.clone()).await;
    assert!(text.contains("drv/other.sock, if that is the driver's endpoint"), "{text}");
    let _driver = bed.driver();
    let (_, checks, text) = doctor_beside(flags.clone()).await;
    assert_eq!((checks["driver-socket"].as_str(), checks["endpoint"].as_str()), ("pass", "pass"), "{text}");
    assert_eq!(checks["registration"], "notApplicable", "no agent runs: {text}");
}

#[tokio::test]
async fn a_running_agent_is_asked_and_nothing_is_changed() {
    let bed = Bed::new();
    let host = Host::new();
    let (_driver, mut kubelet) = (bed.driver(), bed.kubelet());
    bed.health("OK");
    let agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    let state = format!("--state-dir={}", bed.at("state").display());
    let file = format!("--health-file={}", bed.health_file().display());
    let before = (bed.identity(), bed::names(&bed.at("reg")), bed::names(&bed.at("drv")), bed::names(&bed.at("state")));
    let (_, checks, text) = doctor_beside([paths(&bed), roots(&host), vec![state, file]].concat()).await;
    for check in ["registration", "last-probe", "health-file", "state-folder", "driver-socket", "settings"] {
        assert_eq!(checks[check], "pass", "{check}: {text}\n{}", agent.log());
    }
    let after = (bed.identity(), bed::names(&bed.at("reg")), bed::names(&bed.at("drv")), bed::names(&bed.at("state")));
    assert_eq!(before, after);
}

#[test]
fn a_node_is_checked_by_the_trees_that_the_flags_name() {
    let host = Host::new();
    if !host.has_device_files() {
        // Not in this container.
        return;
    }
    host.pci_device("mlx5_0", 1, &[INFINIBAND]);
    host.write("proc/modules", "mlx5_ib 1\nmlx5_core 1\nib_uverbs 1\nib_core 1\n");
    let (code, checks, text) = doctor(&roots(&host));
    assert_eq!(code, Some(0), "{text}");
    for check in ["rdma-modules", "rdma-module-order", "rdma-gids", "rdma-device-nodes", "sysfs-whole"] {
        assert_eq!(checks[check], "pass", "{check}: {text}");
    }
    host.remove("dev/infiniband/uverbs1");
    let (code, checks, text) = doctor(&roots(&host));
    assert_eq!((code, checks["rdma-device-nodes"].as_str()), (Some(1), "fail"), "{text}");
}

#[test]
fn manifests_are_checked_on_any_machine_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.yaml");
    let manifest = format!("--manifest={}", path.display());
    let node = "apiVersion: v1\nkind: Node\nspec: {taints: [{key: a, effect: NoSchedule}]}\n";
    for (text, code) in [(node.to_owned(), 0), (node.replace("NoSch", "noSch"), 1), ("a: [".to_owned(), 2)] {
        fs::write(&path, &text).unwrap();
        let (seen, checks, said) = doctor(std::slice::from_ref(&manifest));
        assert_eq!(seen, Some(code), "{text}: {said}");
        assert!(checks.keys().all(|check| check.starts_with("manifest")), "{said}");
    }
    fs::write(&path, node).unwrap();
    let bad = folder.path().join("bad.yaml");
    fs::write(&bad, node.replace("NoSch", "noSch")).unwrap();
    assert_eq!(doctor(&[manifest, format!("--manifest={}", bad.display())]).0, Some(1), "each file counts");
}

#[test]
fn a_settings_file_that_cannot_be_read_is_a_finding_and_bad_flags_are_refused() {
    let host = Host::new();
    let config = host.at("warden.yaml");
    fs::write(&config, "probes: [{name: a, type: csj}]\n").unwrap();
    let (code, checks, text) = doctor(&[roots(&host), vec![format!("--config={}", config.display())]].concat());
    assert_eq!((code, checks["settings"].as_str()), (Some(1), "fail"), "{text}");
    assert!(text.contains("warden.yaml:1"), "{text}");
    for (flag, words) in [("--output=xml", "use table or json"), ("--nonsense", "--nonsense"), ("stray", "takes no")] {
        let (code, _, text) = doctor(&[flag.to_owned()]);
        assert!(code == Some(2) && text.contains(words), "{flag}: {text}");
    }
}

#[test]
fn every_check_is_documented_and_no_other() {
    let host = Host::new();
    let path = host.at("m.yaml");
    fs::write(&path, "apiVersion: v1\nkind: Node\n").unwrap();
    let said = [doctor(&roots(&host)).1, doctor(&[format!("--manifest={}", path.display())]).1];
    let mut checks: Vec<String> = said.iter().flat_map(BTreeMap::keys).cloned().collect();
    checks.sort();
    let doc = include_str!("../docs/doctor.md");
    let mut documented: Vec<String> = doc
        .lines()
        .skip_while(|line| *line != "## The pod's paths")
        .take_while(|line| *line != "## JSON")
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name.to_owned())
        .filter(|name| !name.starts_with("--"))
        .collect();
    documented.sort();
    assert_eq!(documented, checks);
}
