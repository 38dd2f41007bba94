//! Promise: a restart, whatever has changed meanwhile, neither invents a verdict nor forgets one that still means something.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, QUICK, eventually, status_becomes, steadily};
use csi_warden::demo::kubelet::KubeletEvent;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::time::Duration;
use tokio::time::sleep;

/// A probe of this name that reads the health file of this name.
fn settings(bed: &Bed, name: &str) -> String {
    let path = bed.at("health").join(name);
    format!(
        "probes:\n  - {{name: {name}, type: health-file, period: 200ms, healthFile: {{path: {}}}}}\n",
        path.display()
    )
}

fn says(bed: &Bed, name: &str, words: &str) {
    fs::write(bed.at("health/.new"), words).unwrap();
    fs::rename(bed.at("health/.new"), bed.at("health").join(name)).unwrap();
}

/// Two writes that are two.
async fn twice(bed: &Bed, name: &str, words: &str) {
    says(bed, name, words);
    sleep(Duration::from_millis(60)).await;
    says(bed, name, words);
}

fn agent(bed: &Bed, settings: &str) -> Agent {
    fs::write(bed.at("warden.yaml"), settings).unwrap();
    let config = format!("--config={}", bed.at("warden.yaml").display());
    let state = format!("--state-dir={}", bed.at("state").display());
    let mut flags = vec![config.as_str(), state.as_str()];
    flags.extend(QUICK);
    bed.agent(&flags)
}

async fn kept(bed: &Bed, words: &str) {
    let file = bed.at("state/x.example.com-warden.json");
    eventually("the verdict is kept", || fs::read_to_string(&file).is_ok_and(|text| text.contains(words))).await;
}

/// A renamed device must not leave an outage behind that nobody can end.
#[tokio::test]
async fn a_probe_that_was_renamed_leaves_no_verdict_behind() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    says(&bed, "mlx5_0", "OK");
    let name = |device: &str| settings(&bed, device).replace(&format!("name: {device}"), "name: fabric");
    let mut first = agent(&bed, &name("mlx5_0"));
    kubelet.registered().await;
    twice(&bed, "mlx5_0", "ERROR").await;
    kubelet.deregistered().await;
    kept(&bed, "unhealthy").await;
    first.kill().await;
    // The same name asks another question now.
    says(&bed, "ibp3s0", "OK");
    let second = agent(&bed, &name("ibp3s0"));
    kubelet.registered().await;
    assert!(!second.log().contains("holding the verdict"), "{}", second.log());
}

/// A typing error must not turn into a node without checks, nor lose what was known.
#[tokio::test]
async fn a_typo_at_a_restart_ends_it_and_the_mended_file_goes_on_from_the_verdict_before() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    says(&bed, "a", "OK");
    let good = settings(&bed, "a");
    let mut first = agent(&bed, &good);
    kubelet.registered().await;
    twice(&bed, "a", "ERROR").await;
    kubelet.deregistered().await;
    kept(&bed, "unhealthy").await;
    first.kill().await;
    for (right, wrong, words) in [
        ("period: 200ms", "perod: 200ms", "warden.yaml:2: probes[0].perod: unknown key; did you mean period?"),
        ("period: 200ms", "period: 0s", "warden.yaml:2: probes[0].period: must be above zero"),
        ("probes:", "prbes:", "warden.yaml:1: prbes: unknown key"),
    ] {
        let mut bad = agent(&bed, &good.replace(right, wrong));
        assert_eq!(bad.exit().await.code(), Some(1));
        assert!(bad.log().contains(words), "{words}\n{}", bad.log());
        assert!(bed.registration_folder().is_empty());
    }
    fs::remove_file(bed.at("health/a")).unwrap();
    let mended = agent(&bed, &good);
    mended.logs("holding the verdict of the previous run").await;
    steadily("withdrawn", Duration::from_secs(1), || bed.registration_folder().is_empty()).await;
    assert!(kubelet.since().is_empty());
    twice(&bed, "a", "OK").await;
    kubelet.registered().await;
}

/// The tenth outage is protected like the first, crashes between them or not.
#[tokio::test]
async fn ten_outages_are_ten_withdrawals_and_ten_returns() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    says(&bed, "a", "OK");
    let mut agent_now = agent(&bed, &settings(&bed, "a"));
    kubelet.registered().await;
    for outage in 1..=10 {
        twice(&bed, "a", &format!("ERROR outage {outage}")).await;
        kubelet.deregistered().await;
        if outage % 4 == 0 {
            kept(&bed, "unhealthy").await;
            agent_now.kill().await;
            agent_now = agent(&bed, &settings(&bed, "a"));
            agent_now.logs("holding the verdict of the previous run").await;
        }
        twice(&bed, "a", "OK").await;
        kubelet.registered().await;
    }
    assert!(kubelet.since().is_empty());
}

/// A crash loop while the hardware is broken: no start shows the driver, not even for a moment.
#[tokio::test]
async fn a_crash_loop_during_an_outage_never_shows_the_driver() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    says(&bed, "a", "OK");
    let mut agent_now = agent(&bed, &settings(&bed, "a"));
    kubelet.registered().await;
    twice(&bed, "a", "ERROR").await;
    kubelet.deregistered().await;
    kept(&bed, "unhealthy").await;
    for life in [0, 5, 20, 100, 300] {
        agent_now.kill().await;
        agent_now = agent(&bed, &settings(&bed, "a"));
        steadily("not shown", Duration::from_millis(life), || bed.registration_folder().is_empty()).await;
    }
    assert!(bed.registration_folder().is_empty() && kubelet.since().is_empty());
    twice(&bed, "a", "OK").await;
    kubelet.registered().await;
}

/// Liveness must be answered before anything that may wait, or the kubelet kills what only waits.
#[tokio::test]
async fn health_is_answered_while_the_driver_and_the_state_keep_it_waiting() {
    let bed = Bed::new();
    let path = bed.at("state/x.example.com-warden.json");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let address = format!("127.0.0.1:{}", bed::free_port());
    let mut agent = bed.watching_agent(&[&format!("--http-endpoint={address}")]);
    let body = status_becomes(&address, "/healthz", 200).await;
    assert!(body.contains("waiting for the driver"), "{body}");
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let _driver = bed.driver();
    kubelet.registered().await;
    status_becomes(&address, "/healthz", 200).await;
    assert!(agent.running());
}

/// Reports 9 and 10: nothing but the registration folder may be written, and the announced path is on no host.
#[tokio::test]
async fn an_endpoint_that_nobody_can_dial_is_told_whole_and_waited_out() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let elsewhere = "/var/lib/kubelet/plugins/no-such-driver/csi.sock";
    let mut command = bed.command(&[&format!("--kubelet-registration-path={elsewhere}")]);
    if bed::is_root() {
        fs::set_permissions(bed.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(bed.driver_socket(), fs::Permissions::from_mode(0o666)).unwrap();
        chown(bed.at("reg"), Some(65534), None).unwrap();
        command.uid(65534).gid(65534);
    }
    let mut agent = Agent::start(command, bed.at("agent.log"));
    for _ in 0..2 {
        let event = kubelet.next().await;
        assert!(matches!(&event, KubeletEvent::Failed { error } if error.contains(elsewhere)), "{event:?}");
    }
    agent.logs("the kubelet could not register the driver; it will try again by itself").await;
    let log = agent.log();
    let told = log.lines().filter(|line| line.starts_with('E') && line.contains(elsewhere)).count();
    assert_eq!(told, 1, "{log}");
    assert!(agent.running() && bed.shown());
    assert_eq!(bed.registration_folder().len(), 1);
}
