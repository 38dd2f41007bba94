//! Promise: the kubelet gets the driver, whatever the driver, the folder or the manifest are like.

mod bed;

use bed::{Agent, Bed, DRIVER, PATIENCE, dead_socket, eventually, get_later, names, status_becomes, steadily};
use csi_warden::demo::kubelet::{KubeletEvent, KubeletOptions};
use csi_warden::grpc::connect::CallError;
use csi_warden::grpc::driver;
use csi_warden::registration::check;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::time::Duration;
use tokio::time::{Instant, sleep};

#[tokio::test]
async fn a_kubelet_that_sends_its_encoded_path_as_authority_registers_the_driver() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let agent = bed.agent(&[]);
    let event = kubelet.next().await;
    let endpoint = bed.driver_socket().display().to_string();
    assert_eq!(event, KubeletEvent::Registered { driver: DRIVER.into(), endpoint });
    agent.logs("Received NotifyRegistrationStatus call").await;
    assert_eq!(fs::metadata(bed.registration_socket()).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(bed.registration_folder(), [format!("{DRIVER}-reg.sock")]);
}

#[tokio::test]
async fn without_a_health_source_nothing_but_the_socket_is_written() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let mut agent = bed.agent(&[]);
    kubelet.registered().await;
    assert_eq!(names(&bed.at("drv")), ["csi.sock"]);
    assert!(agent.terminate().await.success());
    assert!(bed.registration_folder().is_empty());
}

/// Report 13: ready, alive and registered are three things.
#[tokio::test]
async fn registered_is_told_only_after_the_kubelet_confirmed() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let address = format!("127.0.0.1:{}", bed::free_port());
    let notify_delay = Duration::from_secs(2);
    let mut kubelet = bed.kubelet_with(KubeletOptions { pass: Duration::from_millis(100), notify_delay, refuse: None });
    let _agent = bed.agent(&[&format!("--http-endpoint={address}")]);
    status_becomes(&address, "/healthz", 200).await;
    eventually("shown", || bed.shown()).await;
    let shown_at = Instant::now();
    while shown_at.elapsed() < notify_delay / 2 {
        assert_eq!(get_later(&address, "/registered").await.unwrap().0, 503);
        assert_eq!(get_later(&address, "/readyz").await.unwrap().0, 503);
        assert_eq!(get_later(&address, "/healthz").await.unwrap().0, 200);
        sleep(Duration::from_millis(100)).await;
    }
    kubelet.registered().await;
    assert_eq!(status_becomes(&address, "/registered", 200).await, "registered");
    status_becomes(&address, "/readyz", 200).await;
    fs::remove_file(bed.registration_socket()).unwrap();
    status_becomes(&address, "/registered", 503).await;
    assert_eq!(get_later(&address, "/readyz").await.unwrap().0, 200, "a rollout is not frozen by a lost socket");
    kubelet.deregistered().await;
    kubelet.registered().await;
    status_becomes(&address, "/registered", 200).await;
}

/// Report 8a: a driver slower than --timeout, at first or for ever.
#[tokio::test]
async fn a_driver_slower_than_the_timeout_is_waited_for() {
    let bed = Bed::new();
    let driver = bed.driver();
    driver.behaviour().delay = Duration::from_millis(700);
    let mut kubelet = bed.kubelet();
    let mut agent = bed.agent(&["--timeout=200ms"]);
    steadily("no socket before the name is known", Duration::from_millis(600), || !bed.shown()).await;
    kubelet.registered().await;
    assert!(agent.running());
    assert!(agent.log().matches("Still connecting").count() <= 2, "{}", agent.log());
}

/// Report 8b, 8c: a driver that comes late, and gives an empty name first.
#[tokio::test]
async fn a_late_driver_with_an_empty_name_at_first_is_waited_for() {
    let bed = Bed::new();
    let mut kubelet = bed.kubelet();
    let mut agent = bed.agent(&[]);
    agent.logs("Still connecting").await;
    let driver = bed.driver();
    driver.behaviour().name = String::new();
    sleep(Duration::from_secs(1)).await;
    assert!(!bed.shown() && agent.running());
    driver.behaviour().name = DRIVER.into();
    kubelet.registered().await;
}

/// Report 8d: the deadline of the start must not outlive it, and a stopped process is not a sick one.
#[tokio::test]
async fn health_stays_good_long_after_the_timeout_and_through_a_stop() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let address = format!("127.0.0.1:{}", bed::free_port());
    let mut kubelet = bed.kubelet();
    let agent = bed.agent(&["--timeout=300ms", &format!("--http-endpoint={address}")]);
    kubelet.registered().await;
    for round in 0..30 {
        if round == 15 {
            agent.signal(rustix::process::Signal::STOP);
            sleep(Duration::from_millis(800)).await;
            agent.signal(rustix::process::Signal::CONT);
        }
        let (status, body) = get_later(&address, "/healthz").await.unwrap();
        assert_eq!(status, 200, "round {round}: {body}");
        sleep(Duration::from_millis(100)).await;
    }
    assert!(kubelet.since().is_empty());
}

/// Report 2a, 2b: strict drivers, and every spelling of the address.
#[tokio::test]
async fn a_driver_that_serves_only_localhost_is_reached_by_every_spelling_of_its_address() {
    let bed = Bed::new();
    let driver = bed.driver();
    driver.behaviour().only_authority = Some("localhost".into());
    let mut kubelet = bed.kubelet();
    let path = bed.driver_socket().display().to_string();
    for address in [path.clone(), format!("unix://{path}"), format!("unix:{path}")] {
        let mut agent = bed.agent(&[&format!("--csi-address={address}")]);
        kubelet.registered().await;
        assert!(agent.terminate().await.success());
        kubelet.deregistered().await;
    }
}

/// Report 2c: the URL form is never announced.
#[tokio::test]
async fn a_registration_path_written_as_a_url_is_announced_as_a_path() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let path = bed.driver_socket().display().to_string();
    let agent = bed.agent(&[&format!("--kubelet-registration-path=unix://{path}")]);
    assert_eq!(kubelet.next().await, KubeletEvent::Registered { driver: DRIVER.into(), endpoint: path });
    assert_eq!(agent.log().matches("is a URL").count(), 1, "{}", agent.log());
}

/// Report 3: what a crash left is replaced; what is somebody's stays.
#[tokio::test]
async fn a_dead_socket_is_replaced_and_other_drivers_files_stay() {
    let bed = Bed::new();
    let _driver = bed.driver();
    dead_socket(&bed.registration_socket());
    let other = bed.at("reg/other.example.com-reg.sock");
    dead_socket(&other);
    let (old, others) = (bed.identity(), fs::metadata(&other).unwrap().ino());
    let mut kubelet = bed.kubelet();
    let _agent = bed.agent(&[]);
    eventually("replaced", || bed.identity().is_some() && bed.identity() != old).await;
    while !matches!(kubelet.next().await, KubeletEvent::Registered { .. }) {}
    assert_eq!(fs::metadata(&other).unwrap().ino(), others);
}

/// Report 3: a file or folder in the socket's place.
#[tokio::test]
async fn a_file_or_folder_in_the_sockets_place_ends_it_with_the_path_named() {
    let bed = Bed::new();
    let _driver = bed.driver();
    fs::write(bed.registration_socket(), "precious").unwrap();
    let mut agent = bed.agent(&[]);
    assert_eq!(agent.exit().await.code(), Some(1));
    assert!(agent.log().contains(&bed.registration_socket().display().to_string()), "{}", agent.log());
    assert_eq!(fs::read_to_string(bed.registration_socket()).unwrap(), "precious");
    fs::remove_file(bed.registration_socket()).unwrap();
    fs::create_dir(bed.registration_socket()).unwrap();
    assert_eq!(bed.agent(&[]).exit().await.code(), Some(1));
    assert_eq!(bed.registration_folder(), [format!("{DRIVER}-reg.sock")]);
}

/// A file that takes the socket's place later is not removed either.
#[tokio::test]
async fn a_file_that_takes_the_sockets_place_later_is_left_untouched() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let mut agent = bed.agent(&[]);
    kubelet.registered().await;
    fs::write(bed.at("reg/new"), "precious").unwrap();
    fs::rename(bed.at("reg/new"), bed.registration_socket()).unwrap();
    assert_eq!(agent.exit().await.code(), Some(1));
    assert_eq!(fs::read_to_string(bed.registration_socket()).unwrap(), "precious");
}

/// Report 5, first half: the driver goes for a while and its folder with it.
#[tokio::test]
async fn a_driver_that_goes_and_comes_back_keeps_its_registration() {
    let bed = Bed::new();
    let driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let mut agent = bed.agent(&[]);
    kubelet.registered().await;
    drop(driver);
    fs::remove_dir(bed.at("drv")).unwrap();
    sleep(Duration::from_secs(1)).await;
    assert!(agent.running() && bed.shown());
    fs::create_dir(bed.at("drv")).unwrap();
    let _driver = bed.driver();
    assert!(kubelet.since().is_empty());
    // And a lost socket is shown again only after the new driver was asked.
    fs::remove_file(bed.registration_socket()).unwrap();
    kubelet.deregistered().await;
    kubelet.registered().await;
}

/// Report 9: what is permission trouble is called so, and cured without a restart.
#[tokio::test]
async fn permission_denied_is_named_with_path_and_uid_and_cured_by_chmod() {
    if !bed::is_root() {
        // Nobody but root can start a process as another user; the same is tried as root in CI.
        return;
    }
    let bed = Bed::new();
    let _driver = bed.driver();
    fs::set_permissions(bed.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(bed.driver_socket(), fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(bed.at("reg"), Some(65534), Some(65534)).unwrap();
    let mut kubelet = bed.kubelet();
    let mut command = bed.command(&[]);
    command.uid(65534).gid(65534);
    let mut agent = Agent::start(command, bed.at("agent.log"));
    agent.logs("permission denied connecting to").await;
    assert!(agent.log().contains("as uid 65534") && agent.log().contains("csi.sock"), "{}", agent.log());
    assert!(agent.running() && !bed.shown());
    fs::set_permissions(bed.driver_socket(), fs::Permissions::from_mode(0o666)).unwrap();
    kubelet.registered().await;
}

/// Report 10: the kubelet's text is the only clue; it is told once, whole, and the process lives on.
#[tokio::test]
async fn a_refusal_is_told_once_and_whole_and_the_kubelets_retries_are_awaited() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let refuse = Some("detected topology value collision\nsecond line".to_owned());
    let mut kubelet =
        bed.kubelet_with(KubeletOptions { pass: Duration::from_millis(100), refuse, ..Default::default() });
    let address = format!("127.0.0.1:{}", bed::free_port());
    let mut agent = bed.agent(&[&format!("--http-endpoint={address}")]);
    for _ in 0..3 {
        assert!(matches!(kubelet.next().await, KubeletEvent::Failed { .. }));
    }
    let before = bed.identity();
    assert!(agent.running() && before.is_some());
    let told = agent
        .log()
        .lines()
        .filter(|line| line.starts_with('E') && line.contains(r"value collision\nsecond line"))
        .count();
    assert_eq!(told, 1, "{}", agent.log());
    assert!(status_becomes(&address, "/registered", 503).await.contains("second line"));
    assert_eq!(get_later(&address, "/healthz").await.unwrap().0, 200);
    drop(kubelet);
    let mut kubelet = bed.kubelet();
    kubelet.registered().await;
    assert_eq!(bed.identity(), before, "the socket stayed for the kubelet's own retry");
    status_becomes(&address, "/registered", 200).await;
}

/// Labels outlive the driver, so a changed topology is refused for ever; the kubelet's words do not say what helps.
#[tokio::test]
async fn a_topology_that_differs_from_the_nodes_label_is_explained_with_the_command_that_helps() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let collision = r#"driver reported "x.io/rack":"r2" but existing label is "x.io/rack":"r1""#;
    let refuse = Some(format!("detected topology value collision: {collision}"));
    let _kubelet = bed.kubelet_with(KubeletOptions { pass: Duration::from_millis(100), refuse, ..Default::default() });
    let address = format!("127.0.0.1:{}", bed::free_port());
    let agent = bed.agent(&[&format!("--http-endpoint={address}")]);
    let help = "kubectl label node NODE --overwrite x.io/rack=r2";
    eventually("refused", || agent.log().contains("detected topology value collision")).await;
    assert!(status_becomes(&address, "/registered", 503).await.contains(help));
    assert!(agent.log().contains(help), "{}", agent.log());
}

/// A driver that the kubelet would refuse is not shown to it: the kubelet's back-off would outlast the trouble.
#[tokio::test]
async fn a_driver_whose_node_info_fails_is_not_shown() {
    let bed = Bed::new();
    let driver = bed.driver();
    driver.behaviour().node_info_error = Some("no such node".into());
    let mut kubelet = bed.kubelet();
    let agent = bed.agent(&[]);
    agent.logs("no such node").await;
    steadily("not shown", Duration::from_secs(1), || !bed.shown()).await;
    driver.behaviour().node_info_error = None;
    driver.behaviour().node_id = String::new();
    agent.logs("empty node ID").await;
    assert!(!bed.shown() && kubelet.since().is_empty());
    driver.behaviour().node_id = "node1".into();
    kubelet.registered().await;
}

/// Report 11, and every other path that cannot be: told before anything waits or is created.
#[tokio::test]
async fn paths_that_cannot_be_are_refused_before_any_waiting() {
    let bed = Bed::new();
    let long = |prefix: &str, bytes: usize| format!("{prefix}{}", "x".repeat(bytes - prefix.len()));
    let file = bed.at("file");
    fs::write(&file, "").unwrap();
    let cases = [
        (format!("--csi-address={}", long("/", 120)), "120 bytes"),
        ("--csi-address=dns:///driver:10000".to_owned(), "--csi-address"),
        (format!("--kubelet-registration-path={}", long("/", 108)), "108 bytes"),
        ("--kubelet-registration-path=csi.sock".to_owned(), "not an absolute path"),
        ("--kubelet-registration-path=".to_owned(), "--kubelet-registration-path is required"),
        (format!("--plugin-registration-path={}", long("/", 98)), "bytes"),
        ("--plugin-registration-path=/no/such/folder".to_owned(), "does not exist"),
        (format!("--plugin-registration-path={}", file.display()), "not a folder"),
    ];
    for (flag, words) in cases {
        let mut agent = bed.agent(&[&flag]);
        assert_eq!(agent.exit().await.code(), Some(1), "{flag}");
        assert!(agent.log().contains(words), "{flag}: {}", agent.log());
        let named = flag.split('=').next().unwrap();
        assert!(agent.log().contains(named), "{flag}: {}", agent.log());
        fs::remove_file(bed.at("agent.log")).unwrap();
    }
    assert!(bed.registration_folder().is_empty());
}

#[tokio::test]
async fn a_read_only_folder_is_named_with_what_to_do() {
    let bed = Bed::new();
    let agent = bed.command(&[]);
    let (mut command, words) = if bed::is_root() {
        let mut command = std::process::Command::new("unshare");
        let script = "mount -t tmpfs -o ro none \"$0\" && exec \"$@\"";
        command
            .args(["--mount", "sh", "-c", script])
            .arg(bed.at("reg"))
            .arg(agent.get_program())
            .args(agent.get_args());
        (command, "read-only file system")
    } else {
        fs::set_permissions(bed.at("reg"), fs::Permissions::from_mode(0o555)).unwrap();
        (agent, "not writable")
    };
    command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
    let mut agent = Agent::start(command, bed.at("agent.log"));
    assert_eq!(agent.exit().await.code(), Some(1));
    assert!(agent.log().contains(words) && agent.log().contains("--plugin-registration-path="), "{}", agent.log());
}

/// Report 11: 107 bytes are a path.
#[tokio::test]
async fn a_registration_socket_of_107_bytes_registers_and_one_of_108_is_refused() {
    let bed = Bed::new();
    let fixed = bed.at("reg").as_os_str().len() + "/-reg.sock".len();
    let driver = bed.driver();
    driver.behaviour().name = "n".repeat(107 - fixed);
    let mut kubelet = bed.kubelet();
    let mut agent = bed.agent(&[]);
    assert!(matches!(kubelet.next().await, KubeletEvent::Registered { .. }));
    agent.terminate().await;
    driver.behaviour().name = "n".repeat(108 - fixed);
    let mut agent = bed.agent(&[]);
    assert_eq!(agent.exit().await.code(), Some(1));
    assert!(agent.log().contains("108 bytes"), "{}", agent.log());
}

/// Bad drivers: nobody is harmed, the cause is named, and a good one later is taken.
#[tokio::test]
async fn drivers_that_do_not_speak_are_named_and_outlived() {
    let bed = Bed::new();
    let mut kubelet = bed.kubelet();
    let mut agent = bed.agent(&["--timeout=200ms"]);
    agent.logs("cannot connect to").await;
    // Accepts, and never answers.
    let silent = std::os::unix::net::UnixListener::bind(bed.driver_socket()).unwrap();
    sleep(Duration::from_millis(1500)).await;
    assert!(agent.running());
    drop(silent);
    fs::remove_file(bed.driver_socket()).unwrap();
    // The wrong service: our own registration server speaks gRPC and no CSI. A file is no socket at all.
    fs::write(bed.driver_socket(), "").unwrap();
    sleep(Duration::from_millis(500)).await;
    assert!(agent.running() && !bed.shown());
    fs::remove_file(bed.driver_socket()).unwrap();
    let driver = bed.driver();
    driver.behaviour().name = "../evil".into();
    sleep(Duration::from_millis(1500)).await;
    assert!(agent.running() && names(&bed.at("reg")).is_empty());
    driver.behaviour().name = DRIVER.into();
    kubelet.registered().await;
}

/// The kubelet's folder is not where we think: the one hint that can be given, and the socket stays to be found.
#[tokio::test]
async fn a_kubelet_that_never_asks_is_hinted_at_and_the_socket_is_shown_again() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let agent = bed.agent(&[]);
    eventually("shown", || bed.shown()).await;
    let first = bed.identity();
    eventually("shown again", || bed.identity().is_some() && bed.identity() != first).await;
    assert!(agent.log().contains("the kubelet does not ask for the driver"), "{}", agent.log());
    let _kubelet = bed.kubelet();
    agent.logs("the kubelet has registered the driver").await;
}

/// Report 12: a service that is not there is answered as such, to whoever asks, and changes nothing.
#[tokio::test]
async fn calls_of_unknown_services_are_unimplemented_and_change_nothing() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let agent = bed.agent(&[]);
    kubelet.registered().await;
    let log = agent.log().len();
    for _ in 0..50 {
        for socket in [bed.registration_socket(), bed.driver_socket()] {
            let wrong = if socket == bed.driver_socket() {
                check::plugin_name(&socket, PATIENCE).await.map(drop)
            } else {
                driver::node_info(&socket, PATIENCE).await.map(drop)
            };
            let Err(CallError::Status { source, .. }) = wrong else { panic!("{wrong:?}") };
            assert_eq!(source.code(), tonic::Code::Unimplemented);
        }
    }
    assert_eq!(agent.log().len(), log);
    assert!(kubelet.since().is_empty());
}

/// A kubelet that restarts finds the socket by itself: nothing of ours changes.
#[tokio::test]
async fn a_restarted_kubelet_registers_the_same_socket() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let _agent = bed.agent(&[]);
    kubelet.registered().await;
    let before = bed.identity();
    drop(kubelet);
    bed.kubelet().registered().await;
    assert_eq!(bed.identity(), before);
}
