//! Promise: other probes in the settings file are watched at once, and a bad new file changes nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, eventually, steadily};
use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

/// An exec probe that fails while the flag file is there.
fn probe(bed: &Bed, name: &str) -> String {
    format!(
        "{{name: {name}, type: exec, period: 100ms, timeout: 2s, confirmInterval: 10ms, exec: {{command: [test, \"!\", -e, {}]}}}}",
        bed.at(name).display()
    )
}

fn write(bed: &Bed, text: &str) {
    fs::write(bed.at("new"), text).unwrap();
    fs::rename(bed.at("new"), bed.at("warden.yaml")).unwrap();
}

fn start(bed: &Bed) -> Agent {
    let flags = [
        format!("--config={}", bed.at("warden.yaml").display()),
        format!("--state-dir={}", bed.at("state").display()),
        "--on-unhealthy=deregister".to_owned(),
        "--recovery-hold=100ms".to_owned(),
        "--start-grace=300ms".to_owned(),
    ];
    bed.agent(&flags.each_ref().map(String::as_str))
}

#[tokio::test]
async fn probes_come_go_and_change_without_a_restart() {
    let bed = Bed::new();
    let _driver = bed.driver();
    write(&bed, &format!("probes: [{}]\n", probe(&bed, "fabric")));
    let mut kubelet = bed.kubelet();
    let agent = start(&bed);
    kubelet.registered().await;
    fs::write(bed.at("disk"), "").unwrap();
    steadily("nobody watches the disk yet", Duration::from_millis(500), || bed.shown()).await;
    write(&bed, &format!("probes: [{}, {}]\n", probe(&bed, "fabric"), probe(&bed, "disk")));
    kubelet.deregistered().await;
    agent.logs("watching by the new settings").await;
    // The verdict of a probe that is gone goes with it.
    write(&bed, &format!("probes: [{}]\n", probe(&bed, "fabric")));
    kubelet.registered().await;
    fs::write(bed.at("fabric"), "").unwrap();
    kubelet.deregistered().await;
    fs::remove_file(bed.at("fabric")).unwrap();
    kubelet.registered().await;
}

#[tokio::test]
async fn a_bad_new_file_keeps_the_old_settings_and_says_so_once() {
    let bed = Bed::new();
    let _driver = bed.driver();
    write(&bed, &format!("probes: [{}]\n", probe(&bed, "fabric")));
    let mut kubelet = bed.kubelet();
    let agent = start(&bed);
    kubelet.registered().await;
    write(&bed, "probes:\n  - {name: fabric, tpye: exec}\n");
    agent.logs("warden.yaml:2: probes[0].tpye").await;
    fs::remove_file(bed.at("warden.yaml")).unwrap();
    steadily("registered", Duration::from_millis(500), || bed.shown()).await;
    fs::write(bed.at("fabric"), "").unwrap();
    kubelet.deregistered().await;
    assert_eq!(agent.log().matches("probes[0].tpye").count(), 1, "{}", agent.log());
    fs::remove_file(bed.at("fabric")).unwrap();
    kubelet.registered().await;
    write(&bed, &format!("flapWindow: 1m\nprobes: [{}]\n", probe(&bed, "fabric")));
    agent.logs("flapWindow (warden.yaml:1)").await;
}

#[tokio::test]
async fn a_configmap_swap_is_followed() {
    let bed = Bed::new();
    let _driver = bed.driver();
    for (version, text) in [
        ("..v1", format!("probes: [{}]\n", probe(&bed, "fabric"))),
        ("..v2", format!("probes: [{}, {}]\n", probe(&bed, "fabric"), probe(&bed, "disk"))),
    ] {
        fs::create_dir(bed.at(version)).unwrap();
        fs::write(bed.at(version).join("warden.yaml"), text).unwrap();
    }
    symlink("..v1", bed.at("..data")).unwrap();
    symlink("..data/warden.yaml", bed.at("warden.yaml")).unwrap();
    fs::write(bed.at("disk"), "").unwrap();
    let mut kubelet = bed.kubelet();
    let _agent = start(&bed);
    kubelet.registered().await;
    symlink("..v2", bed.at("..data_tmp")).unwrap();
    fs::rename(bed.at("..data_tmp"), bed.at("..data")).unwrap();
    kubelet.deregistered().await;
    eventually("gone", || !bed.shown()).await;
}
