//! Promise: standing still costs nothing: no growth, no flood of lines.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Bed, free_port, status_becomes};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

const REQUESTS: usize = 20_000;

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
    asked(2_000).await.unwrap();
    let (memory, descriptors, threads) = footprint(agent.child.id());
    let log = agent.log().len();
    asked(REQUESTS).await.unwrap();
    let (memory_after, descriptors_after, threads_after) = footprint(agent.child.id());
    assert!(memory_after <= memory + 512, "{memory} KiB grew to {memory_after} KiB over {REQUESTS} requests");
    assert!(descriptors_after <= descriptors + 4, "{descriptors} descriptors grew to {descriptors_after}");
    assert_eq!(threads_after, threads);
    assert_eq!(agent.log().len(), log, "success is silent:\n{}", agent.log());
}
