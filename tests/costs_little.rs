//! Promise: standing still costs nothing: no growth, no flood of lines.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, free_port, status_becomes};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use tokio::time::sleep;

/// Enough that 100 bytes lost with each would be seen.
const REQUESTS: usize = 6_000;

/// Anonymous memory in KiB, open descriptors, threads.
fn footprint(pid: u32) -> (u64, usize, usize) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    let memory = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    (memory, count("fd"), count("task"))
}

/// `GET path` on one kept connection, `times` times; each must be 200.
fn ask(address: &str, path: &str, times: usize) {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: t\r\n\r\n");
    let mut buffer = [0; 4096];
    for _ in 0..times {
        stream.write_all(request.as_bytes()).unwrap();
        let read = stream.read(&mut buffer).unwrap();
        assert!(buffer[..read].starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&buffer[..read]));
    }
}

/// Report 16.
#[tokio::test]
async fn thousands_of_health_requests_and_probe_rounds_leave_memory_descriptors_and_log_alone() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("OK");
    let mut kubelet = bed.kubelet();
    let address = format!("127.0.0.1:{}", free_port());
    let agent =
        bed.watching_agent(&["--v=2", "--health-interval=1ms", "--timeout=10s", &format!("--http-endpoint={address}")]);
    kubelet.registered().await;
    status_becomes(&address, "/registered", 200).await;
    let asked = |times| {
        let address = address.clone();
        tokio::task::spawn_blocking(move || ask(&address, "/healthz", times))
    };
    asked(1_000).await.unwrap();
    let (memory, descriptors, threads) = footprint(agent.child.id());
    let log = agent.log().len();
    asked(REQUESTS).await.unwrap();
    let (memory_after, descriptors_after, threads_after) = footprint(agent.child.id());
    assert!(memory_after <= memory + 512, "{memory} KiB grew to {memory_after} KiB over {REQUESTS} requests");
    assert!(descriptors_after <= descriptors + 4, "{descriptors} descriptors grew to {descriptors_after}");
    assert_eq!(threads_after, threads);
    assert_eq!(agent.log().len(), log, "success is silent:\n{}", agent.log());
}

/// Seconds of CPU so far. The kernel counts in hundredths.
fn cpu_seconds(agent: &Agent) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", agent.child.id())).unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    let ticks: Vec<f64> = after_name.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse().unwrap()).collect();
    ticks.iter().sum::<f64>() / 100.0
}

/// Waiting is sleeping, whatever is waited for: deadlines that lie in the past would make a loop of it.
#[tokio::test]
async fn no_way_of_waiting_spins() {
    const WATCHED: Duration = Duration::from_secs(3);
    let slow = ["--health-interval=1m", "--start-grace=100ms", "--recovery-hold=100ms"];
    let waits: [(&str, &[&str], &[&str]); 5] = [
        ("nothing known, observing", &["--on-unhealthy=observe"], &[]),
        ("nothing known, registered after the grace", &[], &[]),
        ("an undecided first failure, past the grace", &[], &["ERROR"]),
        ("unhealthy", &[], &["ERROR", "ERROR"]),
        ("unhealthy, hold over, one success too few", &["--success-threshold=5"], &["ERROR", "ERROR", "OK"]),
    ];
    for (wait, flags, writes) in waits {
        let bed = Bed::new();
        let _driver = bed.driver();
        if let Some(first) = writes.first() {
            bed.health(first);
        }
        let _kubelet = bed.kubelet();
        let all: Vec<&str> = slow.iter().chain(flags).copied().collect();
        let agent = bed.watching_agent(&all);
        agent.logs("CSI driver name").await;
        for word in writes.iter().skip(1) {
            sleep(Duration::from_millis(100)).await;
            bed.health(word);
        }
        sleep(Duration::from_millis(500)).await;
        let before = cpu_seconds(&agent);
        sleep(WATCHED).await;
        let spent = cpu_seconds(&agent) - before;
        assert!(spent < WATCHED.as_secs_f64() / 10.0, "{wait}: {spent} s of CPU in {WATCHED:?}");
    }
}

/// A log reader that is stuck must stop nothing; what was lost is counted.
#[tokio::test]
async fn a_full_log_pipe_stops_nothing() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let (reader, writer) = std::io::pipe().unwrap();
    let capacity = rustix::pipe::fcntl_getpipe_size(&writer).unwrap();
    (&writer).write_all(&vec![b'.'; capacity]).unwrap();
    let mut kubelet = bed.kubelet();
    let mut child = bed.command(&["--v=5"]).stderr(writer).spawn().unwrap();
    kubelet.registered().await;
    fs::remove_file(bed.registration_socket()).unwrap();
    kubelet.deregistered().await;
    kubelet.registered().await;
    let mut reader = reader;
    reader.read_exact(&mut vec![0; capacity]).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let (status, rest) = tokio::task::spawn_blocking(move || {
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        (child.wait().unwrap(), rest)
    })
    .await
    .unwrap();
    assert!(status.success());
    assert!(rest.contains("log lines were lost") && rest.contains("SIGTERM"), "{rest}");
    assert!(bed.registration_folder().is_empty());
}

/// Report 16: a lasting trouble is told at a fixed rate.
#[tokio::test]
async fn running_out_of_descriptors_does_not_flood_the_log() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let agent = bed.command(&[]);
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -n 16 && exec \"$@\"", "sh"]).arg(agent.get_program()).args(agent.get_args());
    let agent = Agent::start(limited, bed.at("agent.log"));
    kubelet.registered().await;
    let held: Vec<_> = (0..40).map(|_| std::os::unix::net::UnixStream::connect(bed.registration_socket())).collect();
    agent.logs("cannot accept a connection").await;
    sleep(Duration::from_secs(3)).await;
    assert_eq!(agent.log().matches("cannot accept a connection").count(), 1, "{}", agent.log());
    drop(held);
}

/// Nobody can keep the kubelet's liveness probe out by holding connections, reading nothing.
#[tokio::test]
async fn clients_that_hold_their_connections_do_not_keep_others_out() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let address = format!("127.0.0.1:{}", free_port());
    // The answer needs a call of its own, which queues with 200 000 requests on a machine that may be slow.
    let _agent = bed.agent(&[&format!("--http-endpoint={address}"), "--timeout=25s"]);
    kubelet.registered().await;
    let mut held = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let requests = "GET /registered HTTP/1.1\r\nHost: t\r\n\r\n".repeat(1_000);
        // As much as goes; the answers pile up unread.
        drop(stream.write(requests.as_bytes()));
        held.push(stream);
    }
    assert_eq!(bed::get_later(&address, "/healthz").await.unwrap().0, 200);
    drop(held);
}
