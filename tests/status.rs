//! Promise: a person on the node can ask what is known and what comes next, and nobody else can.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, eventually, names};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use tokio::time::sleep;

/// Exit code, standard output, standard error.
fn ask(socket: &Path, flags: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_csi-warden"));
    command.args(["status", "--status-socket"]).arg(socket).args(flags);
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[tokio::test]
async fn the_whole_story_is_told_in_words_and_json() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&["--health-interval=1m", "--recovery-hold=1m"]);
    kubelet.registered().await;
    eventually("registered", || ask(&bed.status_socket(), &[]).0 == 0).await;
    assert_eq!(fs::metadata(bed.status_socket()).unwrap().permissions().mode() & 0o777, 0o600);
    let (_, text, _) = ask(&bed.status_socket(), &[]);
    assert!(text.contains("registered for") && text.contains("nothing while the probes pass"), "{text}");
    assert!(!text.contains('\x1b'), "piped, it is plain");
    bed.health("ERROR mlx5_0 port 1 is DOWN");
    eventually("one failure", || ask(&bed.status_socket(), &[]).1.contains("1 more failure of health-file")).await;
    sleep(Duration::from_millis(60)).await;
    bed.health("ERROR mlx5_0 port 1 is DOWN");
    kubelet.deregistered().await;
    let (code, text, _) = ask(&bed.status_socket(), &[]);
    assert_eq!(code, 1);
    assert!(
        text.contains("withdrawn") && text.contains("2 more successes") && text.contains("port 1 is DOWN"),
        "{text}"
    );
    for _ in 0..2 {
        sleep(Duration::from_millis(60)).await;
        bed.health("OK");
    }
    eventually("the hold", || ask(&bed.status_socket(), &[]).1.contains("if all stays well")).await;
    let (_, json, _) = ask(&bed.status_socket(), &["--output=json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["registration"]["phase"], "withdrawn");
    assert_eq!(json["health"]["verdict"], "unhealthy");
    assert_eq!(json["probes"][0]["outcome"], "success");
    assert!(json["health"]["recoveryInSeconds"].as_f64().unwrap() > 1.0);
    agent.terminate().await;
    let left = names(&bed.at("state"));
    assert_eq!(
        left,
        ["x.example.com-warden-volumes.json", "x.example.com-warden.json"],
        "the socket goes with the agent"
    );
    let (code, _, complaint) = ask(&bed.status_socket(), &[]);
    assert_eq!(code, 2);
    assert!(complaint.contains("x.example.com-warden-status.sock"), "{complaint}");
}

#[tokio::test]
async fn without_a_health_source_there_is_no_status_socket() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let _agent = bed.agent(&[&format!("--state-dir={}", bed.at("state").display())]);
    kubelet.registered().await;
    assert!(names(&bed.at("state")).is_empty());
}

/// As the program asks, without the program: one request, and all of the answer.
fn asked(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(b"GET /status HTTP/1.1\r\nhost: t\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn descriptors(agent: &Agent) -> usize {
    fs::read_dir(format!("/proc/{}/fd", agent.child.id())).unwrap().count()
}

#[tokio::test]
async fn two_hundred_ask_at_once_and_each_is_answered() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    eventually("registered", || ask(&bed.status_socket(), &[]).0 == 0).await;
    let before = descriptors(&agent);
    let together = Arc::new(Barrier::new(200));
    let clients: Vec<_> = (0..200)
        .map(|_| {
            let (socket, together) = (bed.status_socket(), Arc::clone(&together));
            std::thread::spawn(move || {
                together.wait();
                asked(&socket)
            })
        })
        .collect();
    let answers = tokio::task::spawn_blocking(|| clients.into_iter().map(|client| client.join().unwrap()).collect());
    let answers: Vec<String> = answers.await.unwrap();
    let good = answers.iter().filter(|answer| answer.starts_with("HTTP/1.1 200") && answer.contains("\"registered\""));
    assert_eq!(good.count(), 200, "{}", answers[0]);
    eventually("nothing is left of them", || descriptors(&agent) <= before).await;
}

/// They send nothing, half a request, or a thousand requests without reading a word.
#[tokio::test]
async fn slow_clients_cost_nothing_and_keep_nobody_out() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&["--health-interval=1m"]);
    kubelet.registered().await;
    eventually("registered", || ask(&bed.status_socket(), &[]).0 == 0).await;
    let before = descriptors(&agent);
    let held: Vec<UnixStream> = (0..150)
        .map(|number| {
            let mut stream = UnixStream::connect(bed.status_socket()).unwrap();
            stream.set_nonblocking(true).unwrap();
            let requests = "GET /status HTTP/1.1\r\nhost: t\r\n\r\n".repeat(1_000);
            let words = [&b""[..], b"GET /status HT", requests.as_bytes()][number % 3];
            // Whatever fits; the agent may have closed it already.
            drop(stream.write(words));
            stream
        })
        .collect();
    let socket_path = bed.status_socket();
    let (code, text, complaint) = tokio::task::spawn_blocking(move || ask(&socket_path, &[])).await.unwrap();
    assert!(code == 0 && text.contains("registered for"), "{code}: {text}{complaint}");
    assert!(descriptors(&agent) <= before + 70, "{} descriptors, before them {before}", descriptors(&agent));
    bed.health("ERROR cut");
    agent.logs("the probe does not succeed").await;
    // Still held by them, and no longer by the agent.
    eventually("nothing is left of them", || descriptors(&agent) <= before).await;
    drop(held);
}

#[tokio::test]
async fn something_in_the_sockets_way_is_left_alone_and_harms_nothing() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    fs::write(bed.status_socket(), "precious").unwrap();
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    agent.logs("no status socket").await;
    assert_eq!(fs::read_to_string(bed.status_socket()).unwrap(), "precious");
}

#[tokio::test]
async fn a_socket_left_by_a_crash_is_replaced_and_the_newest_agent_answers() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let mut agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    agent.kill().await;
    assert!(fs::metadata(bed.status_socket()).unwrap().file_type().is_socket());
    let _agent = bed.watching_agent(&[]);
    eventually("registered again", || ask(&bed.status_socket(), &[]).0 == 0).await;
}

#[tokio::test]
async fn other_users_are_refused() {
    if !bed::is_root() {
        // Nobody but root can ask as another user.
        return;
    }
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let _agent: Agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    // Even where somebody has opened the way for them.
    fs::set_permissions(bed.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(bed.status_socket(), fs::Permissions::from_mode(0o666)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_csi-warden"));
    let program = bed.at("csi-warden");
    fs::copy(command.get_program(), &program).unwrap();
    command = Command::new(program);
    command.args(["status", "--status-socket"]).arg(bed.status_socket()).uid(65534).gid(65534);
    // Another test's child may hold the new file open for writing for a moment.
    let mut output = command.output();
    while output.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ExecutableFileBusy) {
        sleep(Duration::from_millis(10)).await;
        output = command.output();
    }
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("403"), "{output:?}");
}

#[test]
fn bad_flags_and_missing_sockets_are_named() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_csi-warden")).arg("status").args(arguments).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(run(&["--nonsense"]).0, 2);
    assert_eq!(run(&["stray"]).0, 2);
    assert_eq!(run(&["--output=xml"]).0, 2);
    let (code, words) = run(&["--status-socket=/no/such/socket"]);
    assert_eq!(code, 2);
    assert!(words.contains("/no/such/socket"), "{words}");
}

/// A pipe that ends, `| head` say, ends the watching, too.
#[test]
fn watching_ends_with_its_reader() {
    let script = format!(
        "{} status --watch --period=50ms --status-socket=/no/such/socket | head -1",
        env!("CARGO_BIN_EXE_csi-warden")
    );
    let output = Command::new("timeout").args(["30", "bash", "-o", "pipefail", "-c", &script]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}
