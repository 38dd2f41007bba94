//! Promise: the kubelet loses the driver when the hardware is gone, keeps it when nothing is known, and gets it back.

mod bed;

use bed::{Agent, Bed, eventually, get_later, names, status_becomes, steadily};
use csi_warden::api::registration::registration_client::RegistrationClient;
use csi_warden::api::registration::{InfoRequest, RegistrationStatus};
use csi_warden::grpc::authority::{AuthorityAs, percent_encode_path};
use csi_warden::grpc::connect::{Connection, origin};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::time::Duration;
use tokio::time::sleep;

/// More than the confirm interval of the bed, so that two writes are two.
const APART: Duration = Duration::from_millis(60);

async fn twice(bed: &Bed, text: &str) {
    bed.health(text);
    sleep(APART).await;
    bed.health(text);
}

#[tokio::test]
async fn two_errors_in_a_row_deregister_and_recovery_registers_again() {
    let bed = Bed::new();
    let driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let address = format!("127.0.0.1:{}", bed::free_port());
    let agent = bed.watching_agent(&[&format!("--http-endpoint={address}")]);
    for _ in 0..3 {
        kubelet.registered().await;
        let asked = driver.behaviour().node_info_calls;
        twice(&bed, "ERROR mlx5_0 port 1 is DOWN").await;
        kubelet.deregistered().await;
        let body = status_becomes(&address, "/healthz", 200).await;
        assert!(body.contains("withdrawn on purpose"), "{body}");
        assert_eq!(get_later(&address, "/registered").await.unwrap().0, 503);
        assert_eq!(get_later(&address, "/readyz").await.unwrap().0, 200, "a sick node must not freeze a rollout");
        bed.health("OK");
        kubelet.registered().await;
        // Ours before showing it, and the kubelet's.
        assert!(driver.behaviour().node_info_calls >= asked + 2);
        status_becomes(&address, "/registered", 200).await;
        // The event that was just eaten is the next round's first.
        twice(&bed, "ERROR again").await;
        kubelet.deregistered().await;
        bed.health("OK");
    }
    assert!(agent.log().contains("mlx5_0 port 1 is DOWN"));
}

/// What the log of `--v=4` says of the last round.
fn last_outcome(agent: &Agent) -> Option<String> {
    let log = agent.log();
    let said = log.lines().rev().find(|line| line.contains("\"probe round\""))?;
    Some(said.split_once("probe.outcome=\"")?.1.split_once('"')?.0.to_owned())
}

#[tokio::test]
async fn one_error_between_good_words_is_no_verdict() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&["--health-interval=30s", "--v=4"]);
    kubelet.registered().await;
    let before = bed.identity();
    for _ in 0..20 {
        // On a busy machine a word may be gone before it is read, and two errors then follow each other.
        for (word, outcome) in [("ERROR once", "failure"), ("OK", "success")] {
            bed.health(word);
            eventually("the word is read", || last_outcome(&agent) == Some(outcome.to_owned())).await;
            sleep(APART).await;
        }
    }
    assert_eq!(bed.identity(), before);
    assert!(kubelet.since().is_empty());
}

#[tokio::test]
async fn an_error_that_stands_for_a_whole_period_counts_again() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let _agent = bed.watching_agent(&["--health-interval=1s"]);
    kubelet.registered().await;
    bed.health("ERROR written once");
    steadily("one failure is none", Duration::from_millis(500), || bed.shown()).await;
    kubelet.deregistered().await;
}

/// Promise 8 of the design: a dead port at boot does not register.
#[tokio::test]
async fn a_node_that_starts_with_an_error_never_registers() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("ERROR dead at boot");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&["--health-interval=1s", "--start-grace=200ms"]);
    steadily("never shown", Duration::from_secs(3), || bed.registration_folder().is_empty()).await;
    assert!(kubelet.since().is_empty());
    agent.logs("dead at boot").await;
    bed.health("OK");
    kubelet.registered().await;
}

#[tokio::test]
async fn without_any_word_the_driver_is_registered_after_the_grace_and_not_before() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&["--start-grace=1500ms"]);
    agent.logs("CSI driver name").await;
    steadily("the grace", Duration::from_secs(1), || !bed.shown()).await;
    kubelet.registered().await;
}

#[tokio::test]
async fn a_file_that_is_deleted_stale_or_garbage_holds_the_verdict() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&["--health-max-age=1s", "--health-dead-after=0"]);
    kubelet.registered().await;
    let before = bed.identity();
    let waits = Duration::from_secs(2);
    steadily("stale", waits, || bed.identity() == before).await;
    fs::remove_file(bed.health_file()).unwrap();
    steadily("deleted", waits, || bed.identity() == before).await;
    for garbage in ["", "\0\0\0", "maybe", "ERRO", "{\"status\":\"ERROR\"}"] {
        bed.health(garbage);
        sleep(APART).await;
        bed.health(garbage);
        sleep(APART).await;
    }
    steadily("garbage", waits, || bed.identity() == before).await;
    fs::remove_dir_all(bed.at("health")).unwrap();
    steadily("no folder", waits, || bed.identity() == before).await;
    assert!(agent.running() && kubelet.since().is_empty());
    assert!(agent.log().contains("has known nothing for 3 periods"), "{}", agent.log());
    assert!(!agent.log().contains("maybe"), "garbage is never echoed");
    // And a folder that is there again is followed again.
    fs::create_dir(bed.at("health")).unwrap();
    twice(&bed, "ERROR back").await;
    kubelet.deregistered().await;
}

/// The same while unhealthy: silence brings nothing back.
#[tokio::test]
async fn silence_after_an_error_holds_the_withdrawal() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let _agent = bed.watching_agent(&["--health-max-age=500ms", "--health-dead-after=0"]);
    kubelet.registered().await;
    twice(&bed, "ERROR").await;
    kubelet.deregistered().await;
    fs::remove_file(bed.health_file()).unwrap();
    steadily("withdrawn", Duration::from_secs(3), || !bed.shown()).await;
}

#[tokio::test]
async fn a_writer_that_stays_silent_past_the_dead_age_is_a_failure() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&["--health-max-age=500ms", "--health-dead-after=2s"]);
    kubelet.registered().await;
    kubelet.deregistered().await;
    agent.logs("HealthFileDead").await;
    bed.health("OK");
    kubelet.registered().await;
}

#[tokio::test]
async fn a_file_that_flaps_every_50_ms_around_the_threshold_costs_one_deregistration() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&["--recovery-hold=2s", "--health-interval=30s"]);
    kubelet.registered().await;
    for _ in 0..20 {
        for word in ["ERROR a", "ERROR b", "OK"] {
            bed.health(word);
            sleep(Duration::from_millis(50)).await;
        }
    }
    kubelet.deregistered().await;
    assert!(kubelet.since().is_empty());
    twice(&bed, "OK").await;
    kubelet.registered().await;
    assert!(agent.log().lines().count() < 40, "{}", agent.log());
}

/// Bad files: each is Unknown, none blocks, none is harmed.
#[tokio::test]
async fn health_files_that_are_no_files_hold_the_verdict_and_block_nothing() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    let before = bed.identity();
    let path = bed.health_file();
    fs::remove_file(&path).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    steadily("a pipe", Duration::from_secs(1), || bed.identity() == before).await;
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    steadily("a folder", Duration::from_secs(1), || bed.identity() == before).await;
    fs::remove_dir(&path).unwrap();
    fs::write(bed.at("token"), "ERROR top-secret").unwrap();
    symlink("../token", &path).unwrap();
    steadily("a link out of the folder", Duration::from_secs(1), || bed.identity() == before).await;
    assert!(!agent.log().contains("top-secret"));
    fs::remove_file(&path).unwrap();
    symlink("/dev/zero", &path).unwrap();
    steadily("an endless device", Duration::from_secs(1), || bed.identity() == before).await;
    assert!(agent.running());
    fs::remove_file(&path).unwrap();
    twice(&bed, "ERROR now real").await;
    kubelet.deregistered().await;
}

#[tokio::test]
async fn a_configmap_like_swap_of_links_is_seen_at_once() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let at = |name: &str| bed.at("health").join(name);
    for (version, word) in [("..v1", "OK"), ("..v2", "ERROR one"), ("..v3", "ERROR two")] {
        fs::create_dir(at(version)).unwrap();
        fs::write(at(version).join("health"), word).unwrap();
    }
    symlink("..v1", at("..data")).unwrap();
    symlink("..data/health", at("health")).unwrap();
    let mut kubelet = bed.kubelet();
    let _agent = bed.watching_agent(&["--health-interval=10m"]);
    kubelet.registered().await;
    for version in ["..v2", "..v3"] {
        symlink(version, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        sleep(Duration::from_millis(200)).await;
    }
    kubelet.deregistered().await;
}

#[tokio::test]
async fn observing_tells_and_touches_nothing() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&["--on-unhealthy=observe"]);
    kubelet.registered().await;
    twice(&bed, "ERROR seen").await;
    agent.logs("health.to=\"unhealthy\"").await;
    steadily("registered", Duration::from_secs(1), || bed.shown()).await;
    assert!(kubelet.since().is_empty());
}

/// Restarts: kill -9 in both states, and a restart in good order.
#[tokio::test]
async fn an_unhealthy_verdict_survives_a_crash_and_nothing_is_shown_even_for_a_moment() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    twice(&bed, "ERROR").await;
    kubelet.deregistered().await;
    agent.logs("health.to=\"unhealthy\"").await;
    eventually("the verdict is kept", || {
        fs::read_to_string(bed.at("state/x.example.com-warden.json")).is_ok_and(|text| text.contains("unhealthy"))
    })
    .await;
    agent.kill().await;
    // Even with nothing to read.
    fs::remove_file(bed.health_file()).unwrap();
    let _agent = bed.watching_agent(&["--start-grace=100ms"]);
    steadily("not shown", Duration::from_secs(2), || bed.registration_folder().is_empty()).await;
    twice(&bed, "OK").await;
    kubelet.registered().await;
}

#[tokio::test]
async fn a_healthy_agent_that_crashed_costs_one_registration() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    agent.kill().await;
    assert!(bed.shown(), "a crash leaves the socket");
    sleep(Duration::from_secs(1)).await;
    assert!(kubelet.since().is_empty(), "and the kubelet does not notice");
    let _agent = bed.watching_agent(&[]);
    kubelet.deregistered().await;
    kubelet.registered().await;
    sleep(Duration::from_secs(1)).await;
    assert!(kubelet.since().is_empty());
}

#[tokio::test]
async fn a_dead_socket_left_by_a_crash_is_withdrawn_when_the_hardware_died_meanwhile() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    agent.kill().await;
    bed.health("ERROR died meanwhile");
    let old = bed.identity();
    let _agent = bed.watching_agent(&[]);
    eventually("withdrawn", || {
        let now = bed.identity();
        assert!(now.is_none() || now == old, "never shown anew");
        now.is_none()
    })
    .await;
    kubelet.deregistered().await;
}

#[tokio::test]
async fn a_reboot_begins_afresh() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let boot = bed.at("proc/sys/kernel/random");
    fs::create_dir_all(&boot).unwrap();
    fs::write(boot.join("boot_id"), "first").unwrap();
    let proc = format!("--proc-root={}", bed.at("proc").display());
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&[&proc]);
    kubelet.registered().await;
    twice(&bed, "ERROR").await;
    kubelet.deregistered().await;
    sleep(Duration::from_millis(500)).await;
    agent.terminate().await;
    fs::remove_file(bed.health_file()).unwrap();
    fs::write(boot.join("boot_id"), "second").unwrap();
    let _agent = bed.watching_agent(&[&proc]);
    kubelet.registered().await;
}

#[tokio::test]
async fn a_state_folder_that_cannot_be_written_is_a_warning() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&["--state-dir=/proc/self/no-such-folder"]);
    kubelet.registered().await;
    agent.logs("cannot keep the verdict").await;
    twice(&bed, "ERROR").await;
    kubelet.deregistered().await;
    assert!(agent.running());
}

#[tokio::test]
async fn nothing_but_our_own_files_is_ever_left_or_removed() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    fs::write(bed.at("state/precious"), "p").unwrap();
    fs::write(bed.at("reg/precious"), "p").unwrap();
    fs::write(bed.at("state/x.example.com-warden.json"), "not ours").unwrap();
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    twice(&bed, "ERROR").await;
    kubelet.deregistered().await;
    bed.health("OK");
    kubelet.registered().await;
    assert!(agent.terminate().await.success());
    assert_eq!(names(&bed.at("reg")), ["precious"]);
    assert_eq!(names(&bed.at("health")), ["health"]);
    assert_eq!(
        names(&bed.at("state")),
        [
            "precious",
            "x.example.com-warden-volumes.json",
            "x.example.com-warden.json",
            "x.example.com-warden.json.odd-1"
        ]
    );
    assert_eq!(names(&bed.at("drv")), ["csi.sock"], "the driver's own, and ours is gone");
    assert_eq!(fs::read_to_string(bed.at("state/x.example.com-warden.json.odd-1")).unwrap(), "not ours");
}

/// Report 5, second half: while the driver is gone a recovery waits for it, and asks it afresh.
#[tokio::test]
async fn recovery_with_the_driver_away_waits_for_the_driver() {
    let bed = Bed::new();
    let driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    drop(driver);
    twice(&bed, "ERROR").await;
    kubelet.deregistered().await;
    twice(&bed, "OK").await;
    agent.logs("does not answer NodeGetInfo").await;
    assert!(!bed.shown());
    let driver = bed.driver();
    kubelet.registered().await;
    assert!(driver.behaviour().node_info_calls >= 2);
}

/// A process that was stopped for long must not take its own lateness for the hardware's.
#[tokio::test]
async fn a_stopped_and_continued_agent_holds_its_verdict() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&["--health-max-age=1s", "--health-dead-after=1h"]);
    kubelet.registered().await;
    let before = bed.identity();
    for _ in 0..2 {
        agent.signal(rustix::process::Signal::STOP);
        sleep(Duration::from_secs(2)).await;
        agent.signal(rustix::process::Signal::CONT);
        sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(bed.identity(), before);
    assert!(kubelet.since().is_empty());
}

/// A withdrawal that fails is tried again until the socket is gone, and nobody is told that it is.
#[tokio::test]
async fn a_socket_that_cannot_be_unlinked_is_unlinked_as_soon_as_it_can() {
    if !bed::is_root() {
        // The agent must run as a user whom the folder can be taken from; CI is root.
        return;
    }
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    fs::set_permissions(bed.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(bed.driver_socket(), fs::Permissions::from_mode(0o666)).unwrap();
    chown(bed.at("reg"), Some(65534), None).unwrap();
    chown(bed.at("state"), Some(65534), None).unwrap();
    let mut kubelet = bed.kubelet();
    let address = format!("127.0.0.1:{}", bed::free_port());
    let mut command = bed.watching_command(&[&format!("--http-endpoint={address}")]);
    command.uid(65534).gid(65534);
    let agent = Agent::start(command, bed.at("agent.log"));
    kubelet.registered().await;
    chown(bed.at("reg"), Some(0), None).unwrap();
    twice(&bed, "ERROR").await;
    agent.logs("cannot unlink the registration socket").await;
    assert!(bed.shown());
    assert!(status_becomes(&address, "/readyz", 503).await.contains("cannot unlink"));
    chown(bed.at("reg"), Some(65534), None).unwrap();
    kubelet.deregistered().await;
    status_becomes(&address, "/readyz", 200).await;
}

#[tokio::test]
async fn a_socket_whose_other_agent_dies_while_we_are_unhealthy_is_withdrawn() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let mut unaware = bed.agent(&[]);
    kubelet.registered().await;
    bed.health("ERROR");
    let aware = bed.watching_agent(&[]);
    aware.logs("unhealthy, but another agent serves the registration socket").await;
    assert!(bed.shown());
    unaware.kill().await;
    kubelet.deregistered().await;
}

/// The kubelet's last word on a registration that was withdrawn meanwhile says nothing about the next one.
#[tokio::test]
async fn a_late_notification_on_an_old_connection_confirms_nothing() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let address = format!("127.0.0.1:{}", bed::free_port());
    let _agent = bed.watching_agent(&[&format!("--http-endpoint={address}")]);
    eventually("shown", || bed.shown()).await;
    let stream = tokio::net::UnixStream::connect(bed.registration_socket()).await.unwrap();
    let authority = percent_encode_path(&bed.registration_socket());
    let connection = Connection::over(AuthorityAs::new(stream, authority)).await.unwrap();
    let mut slow_kubelet = RegistrationClient::with_origin(connection, origin());
    slow_kubelet.get_info(InfoRequest {}).await.unwrap();
    twice(&bed, "ERROR").await;
    eventually("withdrawn", || !bed.shown()).await;
    twice(&bed, "OK").await;
    eventually("shown again", || bed.shown()).await;
    let accepted = RegistrationStatus { plugin_registered: true, error: String::new() };
    slow_kubelet.notify_registration_status(accepted).await.unwrap();
    sleep(Duration::from_millis(300)).await;
    assert_eq!(get_later(&address, "/registered").await.unwrap().0, 503);
    let _kubelet = bed.kubelet();
    status_becomes(&address, "/registered", 200).await;
}
