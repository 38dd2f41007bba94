//! Promise: unhealthy refuses new volumes and lets those in use out, and only then the driver is withdrawn.

#![allow(clippy::allow_attributes, clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, DRIVER, Kubelet, eventually, steadily};
use csi_warden::api::csi::node_client::NodeClient;
use csi_warden::api::csi::{
    NodeExpandVolumeRequest, NodeGetCapabilitiesRequest, NodeGetInfoRequest, NodeGetVolumeStatsRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
};
use csi_warden::api::registration::InfoRequest;
use csi_warden::api::registration::registration_client::RegistrationClient;
use csi_warden::demo::driver::DemoDriver;
use csi_warden::grpc::connect::{Connection, origin};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use tonic::{Code, Status};

const PATIENT: [&str; 1] = ["--deregister-after=300ms"];

fn driver_socket(bed: &Bed) -> PathBuf {
    bed.at("plugins").join(DRIVER).join("csi.sock")
}

/// What an agent leaves that has just ended: it knows of no volume, with this gap in JSON.
fn agent_before(bed: &Bed, gap: &str) {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let uptime = fs::read_to_string("/proc/uptime").unwrap();
    let now = uptime.split('.').next().unwrap();
    let text = format!(
        r#"{{"schema":1,"driver":"{DRIVER}","bootId":"{}","endedBootSeconds":{now},"crashesBootSeconds":[],"gap":{gap},"volumes":{{}}}}"#,
        boot.trim()
    );
    fs::write(table(bed), text).unwrap();
}

fn table(bed: &Bed) -> PathBuf {
    bed.at("state").join(format!("{DRIVER}-warden-volumes.json"))
}

fn agent(bed: &Bed, flags: &[&str]) -> Agent {
    agent_that_logs_to(bed, flags, "agent.log")
}

/// A second agent of the same driver, as a surge update starts it beside the first.
fn successor(bed: &Bed, flags: &[&str]) -> Agent {
    agent_that_logs_to(bed, flags, "successor.log")
}

fn agent_that_logs_to(bed: &Bed, flags: &[&str], log: &str) -> Agent {
    Agent::start(command(bed, flags), bed.at(log))
}

fn command(bed: &Bed, flags: &[&str]) -> Command {
    let socket = driver_socket(bed);
    let mut all = vec![
        format!("--csi-address={}", socket.display()),
        format!("--kubelet-registration-path={}", socket.display()),
        "--on-unhealthy=fence-then-deregister".to_owned(),
    ];
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    bed.watching_command(&all.iter().map(String::as_str).collect::<Vec<_>>())
}

fn proxy_socket(bed: &Bed) -> PathBuf {
    driver_socket(bed).with_file_name(format!("{DRIVER}-warden.sock"))
}

/// One call on one connection, as the kubelet makes them.
async fn node(bed: &Bed) -> NodeClient<Connection> {
    NodeClient::with_origin(Connection::open(&proxy_socket(bed)).await.unwrap(), origin())
}

async fn stage(bed: &Bed, volume: &str) -> Result<(), Status> {
    let request = NodeStageVolumeRequest {
        volume_id: volume.into(),
        staging_target_path: format!("/staging/{volume}"),
        ..Default::default()
    };
    node(bed).await.node_stage_volume(request).await.map(drop)
}

async fn publish(bed: &Bed, volume: &str) -> Result<(), Status> {
    let request = NodePublishVolumeRequest {
        volume_id: volume.into(),
        target_path: format!("/target/{volume}"),
        ..Default::default()
    };
    node(bed).await.node_publish_volume(request).await.map(drop)
}

async fn expand(bed: &Bed, volume: &str) -> Result<(), Status> {
    let request = NodeExpandVolumeRequest { volume_id: volume.into(), ..Default::default() };
    node(bed).await.node_expand_volume(request).await.map(drop)
}

async fn let_out(bed: &Bed, volume: &str) {
    let (volume_id, target_path) = (volume.to_owned(), format!("/target/{volume}"));
    node(bed).await.node_unpublish_volume(NodeUnpublishVolumeRequest { volume_id, target_path }).await.unwrap();
    let (volume_id, staging_target_path) = (volume.to_owned(), format!("/staging/{volume}"));
    node(bed).await.node_unstage_volume(NodeUnstageVolumeRequest { volume_id, staging_target_path }).await.unwrap();
}

/// Two ERRORs that count.
async fn break_and_tell(bed: &Bed) {
    bed.health("ERROR mlx5_0 port 1 is DOWN");
    tokio::time::sleep(Duration::from_millis(60)).await;
    bed.health("ERROR mlx5_0 port 1 is DOWN");
}

async fn break_it(bed: &Bed) {
    break_and_tell(bed).await;
    eventually("the fence", || status(bed).contains("\"up\":true")).await;
}

fn status(bed: &Bed) -> String {
    ask(bed, "status", &["--output=json"]).1
}

fn ask(bed: &Bed, command: &str, flags: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
        .arg(command)
        .args(flags)
        .arg(format!("--status-socket={}", bed.status_socket().display()))
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8_lossy(&text).into_owned())
}

async fn registered(bed: &Bed, flags: &[&str]) -> (DemoDriver, Kubelet, Agent) {
    registered_after(bed, "null", flags).await
}

async fn registered_after(bed: &Bed, gap: &str, flags: &[&str]) -> (DemoDriver, Kubelet, Agent) {
    agent_before(bed, gap);
    fs::create_dir_all(driver_socket(bed).parent().unwrap()).unwrap();
    let driver = DemoDriver::start(&driver_socket(bed), DRIVER).unwrap();
    driver.behaviour().volumes = Code::Ok;
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = agent(bed, flags);
    kubelet.registered().await;
    (driver, kubelet, agent)
}

/// In a pod the kubelet is no process that we can see: its credentials have no process id.
#[tokio::test]
async fn a_caller_outside_our_process_namespace_may_call() {
    if !bed::is_root() {
        // A process namespace needs root; CI is root.
        return;
    }
    let bed = Bed::new();
    fs::create_dir_all(driver_socket(&bed).parent().unwrap()).unwrap();
    let driver = DemoDriver::start(&driver_socket(&bed), DRIVER).unwrap();
    driver.behaviour().volumes = Code::Ok;
    bed.health("OK");
    let (agent, mut kubelet) = (command(&bed, &[]), bed.kubelet());
    let mut elsewhere = Command::new("unshare");
    elsewhere.args(["--pid", "--fork", "--kill-child", "--"]).arg(agent.get_program()).args(agent.get_args());
    let _agent = Agent::start(elsewhere, bed.at("agent.log"));
    kubelet.registered().await;
    stage(&bed, "v").await.unwrap();
}

#[tokio::test]
async fn unhealthy_refuses_new_volumes_and_lets_the_old_ones_out() {
    let bed = Bed::new();
    let (driver, mut kubelet, _agent) = registered(&bed, &PATIENT).await;
    stage(&bed, "a").await.unwrap();
    publish(&bed, "a").await.unwrap();
    break_it(&bed).await;
    driver.behaviour().volume_calls.clear();
    for refused in [stage(&bed, "b").await, publish(&bed, "b").await, expand(&bed, "a").await] {
        let refused = refused.unwrap_err();
        assert!(matches!(refused.code(), Code::Unavailable | Code::FailedPrecondition));
        for word in ["csi-warden", DRIVER, "mlx5_0 port 1 is DOWN", "since 2", "csi-warden fence off"] {
            assert!(refused.message().contains(word), "no {word:?} in {:?}", refused.message());
        }
    }
    assert_eq!(expand(&bed, "a").await.unwrap_err().code(), Code::Unavailable, "or the kubelet gives up on it");
    assert!(driver.behaviour().volume_calls.is_empty(), "the driver saw a refused call");
    // What the kubelet needs to let go, and to look after running pods when it starts anew.
    node(&bed).await.node_get_info(NodeGetInfoRequest {}).await.unwrap();
    node(&bed).await.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.unwrap();
    stage(&bed, "a").await.unwrap();
    publish(&bed, "a").await.unwrap();
    // Registered as long as the volume is here, however long that takes.
    let before = bed.identity();
    steadily("in use", Duration::from_secs(1), || bed.identity() == before).await;
    assert!(kubelet.since().is_empty());
    let_out(&bed, "a").await;
    kubelet.deregistered().await;
    bed.health("OK");
    tokio::time::sleep(Duration::from_millis(60)).await;
    bed.health("OK");
    eventually("the fence is down", || status(&bed).contains("\"up\":false")).await;
    kubelet.registered().await;
    stage(&bed, "b").await.unwrap();
}

/// The kubelet's records can be seen here, and are none: an inline volume has none.
#[tokio::test]
async fn volumes_that_nobody_followed_keep_a_sick_driver_registered() {
    let bed = Bed::new();
    let (_driver, mut kubelet, _agent) = registered_after(&bed, "\"notFollowed\"", &PATIENT).await;
    let before = bed.identity();
    break_it(&bed).await;
    assert_eq!(stage(&bed, "a").await.unwrap_err().code(), Code::Unavailable, "something of it may be here");
    steadily("registered", Duration::from_secs(1), || bed.identity() == before).await;
    assert!(kubelet.since().is_empty());
}

/// After its own restart the kubelet publishes what running pods have, and looks after them only then.
#[tokio::test]
async fn a_volume_from_before_us_is_not_refused_once_the_kubelet_has_asked_about_it() {
    let bed = Bed::new();
    let (_driver, _kubelet, _agent) = registered_after(&bed, "\"notFollowed\"", &PATIENT).await;
    let target = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/data/mount".to_owned();
    let request = NodeGetVolumeStatsRequest {
        volume_id: "old".into(),
        volume_path: target.clone(),
        staging_target_path: String::new(),
    };
    node(&bed).await.node_get_volume_stats(request).await.unwrap();
    eventually("known", || status(&bed).contains("\"volume\":\"old\"")).await;
    break_it(&bed).await;
    let again = |volume: &str| NodePublishVolumeRequest {
        volume_id: volume.into(),
        target_path: target.clone(),
        ..Default::default()
    };
    stage(&bed, "old").await.unwrap();
    node(&bed).await.node_publish_volume(again("old")).await.unwrap();
    assert!(stage(&bed, "new").await.is_err());
    assert!(node(&bed).await.node_publish_volume(again("new")).await.is_err());
}

#[tokio::test]
async fn a_drain_timeout_withdraws_in_spite_of_volumes() {
    let bed = Bed::new();
    let (_driver, mut kubelet, _agent) = registered(&bed, &["--deregister-after=100ms", "--drain-timeout=600ms"]).await;
    stage(&bed, "a").await.unwrap();
    break_it(&bed).await;
    kubelet.deregistered().await;
}

#[tokio::test]
async fn fence_alone_never_withdraws() {
    let bed = Bed::new();
    let (_driver, mut kubelet, _agent) = registered(&bed, &["--on-unhealthy=fence", "--deregister-after=1ms"]).await;
    break_it(&bed).await;
    assert!(stage(&bed, "a").await.is_err());
    let before = bed.identity();
    steadily("registered", Duration::from_secs(1), || bed.identity() == before).await;
    assert!(kubelet.since().is_empty());
}

#[tokio::test]
async fn an_operator_goes_over_the_verdict_and_back() {
    let bed = Bed::new();
    let (_driver, _kubelet, _agent) = registered(&bed, &["--deregister-after=1h"]).await;
    assert_eq!(ask(&bed, "fence", &["on", "--for=10m"]).0, 2, "without a reason");
    assert_eq!(ask(&bed, "fence", &["on", "--for=10m", "--reason=cable swap"]).0, 0);
    let refused = stage(&bed, "a").await.unwrap_err();
    assert!(refused.message().contains("cable swap"), "{refused}");
    let shown = ask(&bed, "status", &[]).1;
    assert!(shown.contains("cable swap") && shown.contains("override"), "{shown}");
    assert_eq!(ask(&bed, "fence", &["auto"]).0, 0);
    stage(&bed, "a").await.unwrap();
    break_it(&bed).await;
    assert!(stage(&bed, "b").await.is_err());
    assert_eq!(ask(&bed, "fence", &["off", "--for=400ms", "--reason", "it is only the probe"]).0, 0);
    stage(&bed, "b").await.unwrap();
    eventually("the override ends by itself", || status(&bed).contains("\"up\":true")).await;
    assert!(stage(&bed, "c").await.is_err());
    assert_eq!(ask(&bed, "fence", &["on", "--for=25h", "--reason=x"]).0, 1, "longer than a day");
}

#[tokio::test]
async fn the_table_of_volumes_survives_a_restart() {
    let bed = Bed::new();
    let (_driver, mut kubelet, mut agent) = registered(&bed, &PATIENT).await;
    stage(&bed, "a").await.unwrap();
    publish(&bed, "a").await.unwrap();
    agent.terminate().await;
    kubelet.deregistered().await;
    assert!(!proxy_socket(&bed).exists(), "nobody would answer there");
    bed.health("ERROR mlx5_0 port 1 is DOWN");
    let _agent = self::agent(&bed, &PATIENT);
    kubelet.registered().await;
    eventually("the fence", || status(&bed).contains("\"up\":true")).await;
    publish(&bed, "a").await.unwrap();
    assert!(stage(&bed, "b").await.is_err());
    assert!(status(&bed).contains("\"volume\":\"a\""));
}

#[tokio::test]
async fn a_call_in_flight_finishes_although_we_are_told_to_stop() {
    let bed = Bed::new();
    let (driver, mut kubelet, mut agent) = registered(&bed, &[]).await;
    driver.behaviour().delay = Duration::from_secs(3);
    let call = stage(&bed, "a");
    let stop = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        agent.terminate().await;
    };
    let (staged, ()) = tokio::join!(call, stop);
    staged.unwrap();
    kubelet.deregistered().await;
}

#[tokio::test]
async fn without_a_health_source_there_is_no_proxy() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let _agent = bed.agent(&[]);
    kubelet.registered().await;
    assert!(!proxy_socket(&bed).exists());
    assert_eq!(fs::read_dir(bed.at("state")).unwrap().count(), 0);
}

/// Report 12: the kubelet looks for a registration service on every socket that it finds.
#[tokio::test]
async fn calls_of_unknown_services_pass_and_change_nothing() {
    let bed = Bed::new();
    let (_driver, mut kubelet, _agent) = registered(&bed, &[]).await;
    for _ in 0..50 {
        let connection = Connection::open(&proxy_socket(&bed)).await.unwrap();
        let answer = RegistrationClient::with_origin(connection, origin()).get_info(InfoRequest {}).await;
        assert_eq!(answer.unwrap_err().code(), Code::Unimplemented);
    }
    assert!(kubelet.since().is_empty());
    assert!(status(&bed).contains("\"verdict\":\"healthy\""));
}

fn announced(agent: &Agent) -> String {
    let log = agent.log();
    let line = log.lines().rfind(|line| line.contains("Registration Server started")).unwrap_or_default();
    line.split("endpoint=").nth(1).unwrap_or_default().trim_matches('"').to_owned()
}

#[tokio::test]
async fn after_three_crashes_it_stays_out_of_the_way_for_one_run() {
    let bed = Bed::new();
    let (_driver, _kubelet, mut agent) = registered(&bed, &PATIENT).await;
    assert_eq!(announced(&agent), proxy_socket(&bed).display().to_string());
    for _ in 0..3 {
        agent.kill().await;
        fs::remove_file(bed.at("agent.log")).unwrap();
        agent = self::agent(&bed, &PATIENT);
        agent.logs("the kubelet has registered the driver").await;
    }
    assert_eq!(announced(&agent), driver_socket(&bed).display().to_string(), "{}", agent.log());
    assert!(agent.log().contains("stays out of the way"), "{}", agent.log());
    let shown = ask(&bed, "status", &[]).1;
    assert!(shown.contains("after three crashes of this agent"), "{shown}");
    // It observes, whatever it sees.
    for _ in 0..2 {
        bed.health("ERROR broken");
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    eventually("unhealthy", || status(&bed).contains("\"verdict\":\"unhealthy\"")).await;
    steadily("registered", Duration::from_millis(500), || bed.shown()).await;
    bed.health("OK");
    agent.terminate().await;
    fs::remove_file(bed.at("agent.log")).unwrap();
    let agent = self::agent(&bed, &PATIENT);
    agent.logs("the kubelet has registered the driver").await;
    assert_eq!(announced(&agent), proxy_socket(&bed).display().to_string(), "the next run proxies again");
}

#[tokio::test]
async fn where_the_proxy_socket_cannot_be_auto_goes_on_without_it_and_on_does_not_start() {
    let bed = Bed::new();
    // The driver's socket fits into an address, and the longer name of ours does not.
    let room = 100 - bed.at("").as_os_str().len() - "/csi.sock".len();
    let socket = bed.at(&"d".repeat(room)).join("csi.sock");
    fs::create_dir(socket.parent().unwrap()).unwrap();
    let _driver = DemoDriver::start(&socket, DRIVER).unwrap();
    bed.health("OK");
    let address = format!("--csi-address={}", socket.display());
    let endpoint = format!("--kubelet-registration-path={}", socket.display());
    let flags = [address.as_str(), endpoint.as_str()];
    let mut refused = bed.watching_agent(&[&flags[..], &["--proxy=on"]].concat());
    assert_eq!(refused.exit().await.code(), Some(1), "{}", refused.log());
    assert!(refused.log().contains("107"), "{}", refused.log());
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&[&flags[..], &["--on-unhealthy=deregister"]].concat());
    kubelet.registered().await;
    assert_eq!(announced(&agent), socket.display().to_string());
    assert!(agent.log().contains("no proxy"), "{}", agent.log());
}

#[tokio::test]
async fn the_drivers_socket_is_never_taken_for_one_of_ours() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let link = bed.at("drv/link.sock");
    std::os::unix::fs::symlink(bed.driver_socket(), &link).unwrap();
    let before = fs::metadata(bed.driver_socket()).unwrap();
    let address = format!("--csi-address={}", link.display());
    let ours = format!("--proxy-socket={}", bed.driver_socket().display());
    let mut refused = bed.watching_agent(&[&address, &ours, "--proxy=on"]);
    assert_eq!(refused.exit().await.code(), Some(1), "{}", refused.log());
    assert!(refused.log().contains("the driver's own"), "{}", refused.log());
    let status = format!("--status-socket={}", link.display());
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&[&status]);
    kubelet.registered().await;
    assert!(agent.log().contains("no status socket"), "{}", agent.log());
    agent.terminate().await;
    let after = fs::metadata(bed.driver_socket()).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::ino(&before), std::os::unix::fs::MetadataExt::ino(&after));
    assert!(fs::symlink_metadata(link).unwrap().is_symlink());
}

#[tokio::test]
async fn the_end_of_an_agent_that_handed_over_leaves_its_successors_table_alone() {
    let bed = Bed::new();
    let (_driver, _kubelet, mut old) = registered(&bed, &PATIENT).await;
    stage(&bed, "a").await.unwrap();
    let mut new = successor(&bed, &PATIENT);
    new.logs("the kubelet has registered the driver").await;
    stage(&bed, "b").await.unwrap();
    eventually("kept", || fs::read_to_string(table(&bed)).unwrap().contains("\"b\"")).await;
    assert!(old.terminate().await.success());
    new.kill().await;
    let third = agent(&bed, &PATIENT);
    third.logs("volumes in use at the start").await;
    eventually("both", || status(&bed).matches("\"volume\":").count() == 2).await;
}

#[tokio::test]
async fn an_agent_that_gets_the_calls_back_knows_what_its_successor_let_in_and_out() {
    let bed = Bed::new();
    let (_driver, _kubelet, old) = registered(&bed, &PATIENT).await;
    stage(&bed, "a").await.unwrap();
    publish(&bed, "a").await.unwrap();
    let mut new = successor(&bed, &PATIENT);
    new.logs("the kubelet has registered the driver").await;
    let_out(&bed, "a").await;
    stage(&bed, "b").await.unwrap();
    eventually("kept", || status(&bed).contains("\"volume\":\"b\"") && !status(&bed).contains("\"volume\":\"a\""))
        .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    new.kill().await;
    old.logs("another agent had the calls for a while").await;
    break_and_tell(&bed).await;
    eventually("the fence", || old.log().contains("the fence is up")).await;
    assert!(stage(&bed, "a").await.is_err(), "it went out by way of the other agent");
    stage(&bed, "b").await.unwrap();
    eventually("an operator is heard again", || ask(&bed, "fence", &["auto"]).0 == 0).await;
    // A dead socket of the other one's may be at the path for some seconds.
    eventually("registered again", || old.log().matches("the kubelet has registered the driver").count() >= 2).await;
    let before = bed.identity();
    steadily("registered, as b is in use", Duration::from_secs(1), || bed.identity() == before).await;
}

/// In the middle of a repair the agent is killed for its memory, or a rollout replaces it.
#[tokio::test]
async fn an_override_outlives_the_agent_and_its_end_does_too() {
    let bed = Bed::new();
    let (_driver, _kubelet, mut agent) = registered(&bed, &PATIENT).await;
    assert_eq!(ask(&bed, "fence", &["on", "--for=10m", "--reason=cable swap"]).0, 0);
    agent.kill().await;
    agent = self::agent(&bed, &PATIENT);
    agent.logs("override kept from before the restart").await;
    eventually("asked", || status(&bed).contains("\"fromBefore\":true")).await;
    assert!(stage(&bed, "a").await.unwrap_err().message().contains("cable swap"));
    let shown = ask(&bed, "status", &[]).1;
    // Long ones are wrapped anywhere.
    for words in ["on for another 9m", "cable swap", "uid ", "restart"] {
        assert!(shown.contains(words), "no {words:?} in\n{shown}");
    }
    assert_eq!(ask(&bed, "fence", &["auto"]).0, 0);
    stage(&bed, "a").await.unwrap();
    let_out(&bed, "a").await;
    // Broken, and so repaired: it must not be withdrawn meanwhile.
    break_it(&bed).await;
    assert_eq!(ask(&bed, "fence", &["off", "--for=10m", "--reason=trying it out"]).0, 0);
    assert!(agent.terminate().await.success());
    agent = self::agent(&bed, &PATIENT);
    eventually("the override", || status(&bed).contains("\"fence\":\"off\"")).await;
    eventually("shown", || bed.shown()).await;
    stage(&bed, "a").await.unwrap();
    let before = bed.identity();
    steadily("registered", Duration::from_secs(1), || bed.identity() == before).await;
    // Its time goes on while nobody is there.
    assert_eq!(ask(&bed, "fence", &["off", "--for=1500ms", "--reason=trying it out"]).0, 0);
    agent.kill().await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let _agent = self::agent(&bed, &PATIENT);
    eventually("the fence", || status(&bed).contains("\"up\":true")).await;
    assert!(!bed.at("state").join(format!("{DRIVER}-warden-override.json")).exists());
}

#[tokio::test]
async fn an_override_that_cannot_be_written_down_holds_and_the_operator_is_told() {
    let bed = Bed::new();
    let (_driver, _kubelet, agent) = registered(&bed, &[]).await;
    // A rename does not go over a folder.
    fs::create_dir(bed.at("state").join(format!("{DRIVER}-warden-override.json"))).unwrap();
    let (code, told) = ask(&bed, "fence", &["on", "--for=10m", "--reason=cable swap"]);
    assert_eq!(code, 0);
    assert!(told.contains("if the agent restarts, the override ends with it"), "{told}");
    assert!(stage(&bed, "a").await.is_err());
    assert!(agent.log().contains("cannot keep the operator's override"), "{}", agent.log());
}

#[tokio::test]
async fn what_an_operator_told_the_successor_holds_when_the_calls_come_back() {
    let bed = Bed::new();
    let (_driver, _kubelet, old) = registered(&bed, &PATIENT).await;
    assert_eq!(ask(&bed, "fence", &["on", "--for=10m", "--reason=cable swap"]).0, 0);
    let mut new = successor(&bed, &PATIENT);
    new.logs("the kubelet has registered the driver").await;
    eventually("kept", || status(&bed).contains("cable swap")).await;
    assert_eq!(ask(&bed, "fence", &["auto"]).0, 0);
    stage(&bed, "a").await.unwrap();
    new.kill().await;
    old.logs("the operator's override was ended while another agent had the calls").await;
    eventually("nothing is refused", || !old.log().rsplit("the fence is").next().unwrap().starts_with(" up")).await;
    stage(&bed, "b").await.unwrap();
}

/// Our crashes say nothing against what needs no proxy, and a driver that was withdrawn must not come back by them.
#[tokio::test]
async fn after_three_crashes_a_deregister_that_was_asked_for_goes_on() {
    let bed = Bed::new();
    let flags = ["--on-unhealthy=deregister"];
    let (_driver, mut kubelet, mut agent) = registered(&bed, &flags).await;
    break_and_tell(&bed).await;
    kubelet.deregistered().await;
    for _ in 0..3 {
        agent.kill().await;
        fs::remove_file(bed.at("agent.log")).unwrap();
        agent = self::agent(&bed, &flags);
        agent.logs("status socket open").await;
    }
    assert!(agent.log().contains("stays out of the way"), "{}", agent.log());
    steadily("withdrawn", Duration::from_secs(1), || !bed.shown()).await;
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(60)).await;
        bed.health("OK");
    }
    kubelet.registered().await;
    assert_eq!(announced(&agent), driver_socket(&bed).display().to_string());
}

/// A part that fails ends the agent in good order, which is a crash for whoever needs its calls answered.
#[tokio::test]
async fn failures_of_its_own_count_as_crashes() {
    let bed = Bed::new();
    let (_driver, _kubelet, mut agent) = registered(&bed, &PATIENT).await;
    for _ in 0..3 {
        eventually("shown", || bed.shown()).await;
        // It is left untouched, and the agent ends.
        fs::write(bed.at("reg/.file"), "not a socket").unwrap();
        fs::rename(bed.at("reg/.file"), bed.registration_socket()).unwrap();
        assert_eq!(agent.exit().await.code(), Some(1), "{}", agent.log());
        fs::remove_file(bed.registration_socket()).unwrap();
        agent = self::agent(&bed, &PATIENT);
    }
    agent.logs("stays out of the way").await;
}
