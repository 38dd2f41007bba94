//! Promise: livenessprobe's duty, under its name or within `run`: true in every state of the driver, one question at a time, no growth.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, PATIENCE, free_port, get, get_later, status_becomes};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};
use tokio::time::{Instant, sleep};
use tonic::Code;

/// One that no busy machine exceeds.
const LONG: &str = "--probe-timeout=20s";

impl Bed {
    /// `csi-warden livenessprobe` at a port of its own.
    fn livenessprobe(&self, flags: &[&str]) -> Agent {
        let port = free_port();
        let mut command = Command::new(env!("CARGO_BIN_EXE_csi-warden"));
        command
            .arg("livenessprobe")
            .arg(format!("--csi-address={}", self.driver_socket().display()))
            .arg(format!("--http-endpoint=127.0.0.1:{port}"))
            .args(flags);
        let mut agent = Agent::start(command, self.at("liveness.log"));
        agent.port = Some(port);
        agent
    }

    /// `csi-warden run --liveness-endpoint`.
    fn agent_with_liveness(&self, flags: &[&str]) -> Agent {
        let port = free_port();
        let endpoint = format!("--liveness-endpoint=127.0.0.1:{port}");
        let mut agent = self.agent(&[&[endpoint.as_str()], flags].concat());
        agent.port = Some(port);
        agent
    }
}

fn address(agent: &Agent) -> String {
    format!("127.0.0.1:{}", agent.port.unwrap())
}

/// The body of `/healthz` once it gives 500.
async fn sick(agent: &Agent) -> String {
    status_becomes(&address(agent), "/healthz", 500).await
}

async fn well(agent: &Agent) {
    assert_eq!(status_becomes(&address(agent), "/healthz", 200).await, "ok");
}

async fn body_becomes(agent: &Agent, words: &str) {
    let until = Instant::now() + PATIENCE;
    loop {
        let (_, body) = get_later(&address(agent), "/healthz").await.unwrap();
        if body.contains(words) {
            return;
        }
        assert!(Instant::now() < until, "never {words:?}, last {body:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn it_listens_only_once_the_driver_has_given_its_name() {
    let bed = Bed::new();
    let mut agent = bed.livenessprobe(&[LONG]);
    agent.logs("Still connecting").await;
    assert_eq!(get_later(&address(&agent), "/healthz").await, None);
    let _driver = bed.driver();
    well(&agent).await;
    for line in ["Calling CSI driver to discover driver name", "CSI driver name", "ServeMux listening"] {
        assert!(agent.log().contains(line), "{line}");
    }
    assert_eq!(agent.terminate().await.code(), Some(0));
}

#[tokio::test]
async fn ready_is_what_the_driver_says_and_silence_about_it_is_ready() {
    let bed = Bed::new();
    let driver = bed.driver();
    let agent = bed.livenessprobe(&[LONG]);
    well(&agent).await;
    driver.behaviour().ready = None;
    well(&agent).await;
    driver.behaviour().ready = Some(false);
    assert_eq!(sick(&agent).await, "driver responded but is not ready");
    driver.behaviour().probe_error = Some(Code::Internal);
    assert_eq!(sick(&agent).await, "rpc error: code = Internal desc = as told");
    for (path, status) in [("/metrics", 200), ("/", 404), ("/healthz/", 404), ("/readyz", 404)] {
        assert_eq!(get_later(&address(&agent), path).await.unwrap().0, status, "{path}");
    }
}

#[tokio::test]
async fn a_dead_driver_a_busy_one_and_a_full_one_are_told_apart() {
    let bed = Bed::new();
    let driver = bed.driver();
    let agent = bed.livenessprobe(&["--probe-timeout=300ms"]);
    well(&agent).await;
    driver.behaviour().delay = Duration::from_secs(3600);
    let text = sick(&agent).await;
    assert!(
        text.starts_with("rpc error: code = DeadlineExceeded desc = context deadline exceeded: the driver is busy")
    );
    drop(driver);
    let text = sick(&agent).await;
    assert!(text.starts_with("context deadline exceeded: nobody listens: "), "{text}");
    let silent = UnixListener::bind(bed.driver_socket()).unwrap();
    let text = sick(&agent).await;
    assert!(text.starts_with("context deadline exceeded: the driver is busy or stuck: "), "{text}");
    drop(silent);
    let text = sick(&agent).await;
    assert!(text.starts_with("context deadline exceeded: nobody listens: "), "a dead socket file: {text}");
    fs::remove_file(bed.driver_socket()).unwrap();
    let full = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    full.bind(&socket2::SockAddr::unix(bed.driver_socket()).unwrap()).unwrap();
    full.listen(0).unwrap();
    body_becomes(&agent, "its queue of connections is full").await;
}

/// The kubelet opens a connection for each call, so one that is open already proves nothing.
#[tokio::test]
async fn a_driver_whose_socket_is_gone_is_gone_however_alive_it_is() {
    let bed = Bed::new();
    let driver = bed.driver();
    let on_demand = bed.livenessprobe(&["--probe-timeout=1s"]);
    let in_background = bed.agent_with_liveness(&["--probe-timeout=1s", "--probe-interval=50ms"]);
    well(&on_demand).await;
    well(&in_background).await;
    fs::remove_file(bed.driver_socket()).unwrap();
    assert!(sick(&on_demand).await.contains("nobody listens"));
    assert!(sick(&in_background).await.contains("nobody listens"));
    drop(driver);
}

/// As upstream, which connects again and again until its timeout.
#[tokio::test]
async fn a_driver_that_comes_back_within_the_timeout_was_never_away() {
    let bed = Bed::new();
    let driver = bed.driver();
    let agent = bed.livenessprobe(&[LONG]);
    well(&agent).await;
    drop(driver);
    let address = address(&agent);
    let asked = tokio::task::spawn_blocking(move || get(&address, "/healthz"));
    sleep(Duration::from_millis(300)).await;
    let _driver = bed.driver();
    assert_eq!(asked.await.unwrap(), Some((200, "ok".to_owned())));
}

#[tokio::test]
async fn many_clients_are_one_question() {
    let bed = Bed::new();
    let driver = bed.driver();
    let agent = bed.livenessprobe(&[LONG]);
    well(&agent).await;
    (driver.behaviour().delay, driver.behaviour().probe_calls) = (Duration::from_millis(200), 0);
    let clients: Vec<_> = (0..200)
        .map(|_| {
            let address = address(&agent);
            thread::spawn(move || get(&address, "/healthz"))
        })
        .collect();
    let answers = tokio::task::spawn_blocking(|| clients.into_iter().map(|client| client.join().unwrap()).collect());
    let answers: Vec<_> = answers.await.unwrap();
    assert!(answers.iter().all(|answer| *answer == Some((200, "ok".to_owned()))), "{answers:?}");
    // 64 are served at a time.
    let calls = driver.behaviour().probe_calls;
    assert!((1..=20).contains(&calls), "{calls} questions for 200 clients");
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels_nothing_for_the_others() {
    let bed = Bed::new();
    let driver = bed.driver();
    let agent = bed.livenessprobe(&[LONG]);
    well(&agent).await;
    (driver.behaviour().delay, driver.behaviour().probe_calls) = (Duration::from_secs(1), 0);
    let mut first = TcpStream::connect(address(&agent)).unwrap();
    first.write_all(b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    bed::eventually("the driver is asked", || driver.behaviour().probe_calls == 1).await;
    let later = address(&agent);
    let later = tokio::task::spawn_blocking(move || get(&later, "/healthz"));
    sleep(Duration::from_millis(100)).await;
    drop(first);
    assert_eq!(later.await.unwrap(), Some((200, "ok".to_owned())));
    assert_eq!(driver.behaviour().probe_calls, 1);
}

/// Report 17: all that went wrong for others, at once.
#[tokio::test]
async fn it_survives_every_bad_driver_and_every_bad_client_and_turns_well_again() {
    const PERIOD: Duration = Duration::from_secs(1);
    let bed = Bed::new();
    let driver = bed.driver();
    let on_demand = bed.livenessprobe(&["--probe-timeout=200ms"]);
    let in_background = bed.agent_with_liveness(&["--probe-timeout=200ms", "--probe-interval=100ms"]);
    well(&on_demand).await;
    well(&in_background).await;
    drop(driver);
    sick(&on_demand).await;
    sick(&in_background).await;
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = [address(&on_demand), address(&in_background)]
        .into_iter()
        .flat_map(|address| {
            let impatient = (address.clone(), Arc::clone(&over));
            let patient = (address, Arc::clone(&over));
            [
                thread::spawn(move || {
                    while !impatient.1.load(Ordering::Relaxed) {
                        let mut stream = TcpStream::connect(&impatient.0).unwrap();
                        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
                        thread::sleep(Duration::from_millis(10));
                    }
                }),
                thread::spawn(move || {
                    while !patient.1.load(Ordering::Relaxed) {
                        assert_eq!(get(&patient.0, "/healthz").unwrap().0, 500);
                    }
                }),
            ]
        })
        .collect();
    let socket = bed.driver_socket();
    let drivers = tokio::task::spawn_blocking(move || {
        for _ in 0..3 {
            // Nobody; accepts and closes at once; accepts and never answers.
            thread::sleep(Duration::from_millis(700));
            let closing = UnixListener::bind(&socket).unwrap();
            closing.set_nonblocking(true).unwrap();
            for _ in 0..70 {
                drop(closing.accept());
                thread::sleep(Duration::from_millis(10));
            }
            drop(closing);
            fs::remove_file(&socket).unwrap();
            let silent = UnixListener::bind(&socket).unwrap();
            thread::sleep(Duration::from_millis(700));
            drop(silent);
            fs::remove_file(&socket).unwrap();
        }
    });
    drivers.await.unwrap();
    over.store(true, Ordering::Relaxed);
    tokio::task::spawn_blocking(|| clients.into_iter().for_each(|client| client.join().unwrap())).await.unwrap();
    let _driver = bed.driver();
    let back = Instant::now();
    well(&on_demand).await;
    well(&in_background).await;
    assert!(back.elapsed() < PERIOD * 3, "well again only after {:?}", back.elapsed());
    for mut agent in [on_demand, in_background] {
        assert!(!agent.log().contains("panic"), "{}", agent.log());
        // A line per trouble would be some hundred.
        assert!(agent.log().lines().count() < 40, "{}", agent.log());
        assert_eq!(agent.terminate().await.code(), Some(0));
    }
}

/// Anonymous memory in KiB, open descriptors, threads.
fn footprint(pid: u32) -> (u64, usize, usize) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    let memory = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    (memory, count("fd"), count("task"))
}

/// `GET /healthz` on one kept connection, `times` times: as many rounds, one after the other.
async fn rounds(agent: &Agent, times: usize, status: u16) {
    let address = address(agent);
    let asked = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let wanted = format!("HTTP/1.1 {status}");
        let mut buffer = [0; 4096];
        for _ in 0..times {
            stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
            let read = stream.read(&mut buffer).unwrap();
            assert!(buffer[..read].starts_with(wanted.as_bytes()), "{}", String::from_utf8_lossy(&buffer[..read]));
        }
    });
    asked.await.unwrap();
}

/// Report 16, with a good driver and with a dead one.
#[tokio::test]
async fn thousands_of_rounds_leave_memory_descriptors_and_threads_alone() {
    for (flags, dead, status) in [(&[LONG, "--v=2"][..], false, 200), (&["--probe-timeout=3ms", "--v=2"], true, 500)] {
        let bed = Bed::new();
        let driver = bed.driver();
        let agent = bed.livenessprobe(flags);
        agent.logs("ServeMux listening").await;
        let driver = if dead {
            drop(driver);
            None
        } else {
            Some(driver)
        };
        rounds(&agent, 500, status).await;
        let asked = driver.as_ref().map(|driver| driver.behaviour().probe_calls);
        let ((memory, descriptors, threads), log) = (footprint(agent.child.id()), agent.log().len());
        rounds(&agent, 2_000, status).await;
        let (memory_after, descriptors_after, threads_after) = footprint(agent.child.id());
        assert!(memory_after <= memory + 256, "{memory} KiB grew to {memory_after} KiB (dead driver: {dead})");
        assert!(descriptors_after <= descriptors + 2, "{descriptors} descriptors grew to {descriptors_after}");
        assert_eq!(threads_after, threads);
        assert!(agent.log().len() <= log + 1000, "{}", agent.log());
        if let (Some(driver), Some(asked)) = (driver, asked) {
            assert_eq!(driver.behaviour().probe_calls - asked, 2_000, "each request was a round");
        }
    }
}

#[tokio::test]
async fn in_the_background_the_driver_is_asked_by_the_clock_and_not_by_the_clients() {
    let bed = Bed::new();
    let driver = bed.driver();
    let agent = bed.livenessprobe(&[LONG, "--probe-interval=1h"]);
    well(&agent).await;
    rounds(&agent, 100, 200).await;
    assert_eq!(driver.behaviour().probe_calls, 1);
}

#[tokio::test]
async fn run_answers_before_the_driver_is_there_and_sees_it_come_and_go() {
    let bed = Bed::new();
    let mut kubelet = bed.kubelet();
    let http = format!("127.0.0.1:{}", free_port());
    let agent =
        bed.agent_with_liveness(&["--probe-timeout=1s", "--probe-interval=50ms", &format!("--http-endpoint={http}")]);
    let first = sick(&agent).await;
    assert!(first == "the driver has not answered yet" || first.contains("nobody listens"), "{first}");
    body_becomes(&agent, "nobody listens").await;
    let driver = bed.driver();
    kubelet.registered().await;
    well(&agent).await;
    driver.behaviour().ready = Some(false);
    body_becomes(&agent, "driver responded but is not ready").await;
    agent.logs("Driver responded but is not ready").await;
    driver.behaviour().ready = Some(true);
    well(&agent).await;
    agent.logs("the driver is ready again").await;
    status_becomes(&http, "/registered", 200).await;
    let (status, metrics) = get_later(&http, "/metrics").await.unwrap();
    assert_eq!(status, 200);
    for line in [
        "csi_warden_registered{driver_name=\"x.example.com\"} 1\n",
        "csi_warden_publications_total 1\n",
        "csi_sidecar_operations_seconds_count{driver_name=\"x.example.com\",grpc_status_code=\"OK\",method_name=\"/csi.v1.Node/NodeGetInfo\"} 1\n",
    ] {
        assert!(metrics.contains(line), "no {line:?} in\n{metrics}");
    }
    assert!(get_later(&address(&agent), "/metrics").await.unwrap().1.contains("csi_warden_registered"));
}

#[tokio::test]
async fn metrics_are_upstreams_and_failed_connects_are_not_counted() {
    let bed = Bed::new();
    let driver = bed.driver();
    let agent = bed.livenessprobe(&["--probe-timeout=1s", "--metrics-path=/m"]);
    well(&agent).await;
    driver.behaviour().probe_error = Some(Code::Internal);
    rounds(&agent, 1, 500).await;
    drop(driver);
    rounds(&agent, 1, 500).await;
    let metrics = get_later(&address(&agent), "/m").await.unwrap().1;
    let counts: Vec<&str> =
        metrics.lines().filter(|line| line.starts_with("csi_sidecar_operations_seconds_count")).collect();
    let count = |name: &str, code: &str, method: &str| {
        format!(
            "csi_sidecar_operations_seconds_count{{driver_name=\"{name}\",grpc_status_code=\"{code}\",method_name=\"/csi.v1.Identity/{method}\"}} 1"
        )
    };
    let expected = [
        count("unknown-driver", "OK", "GetPluginInfo"),
        count("x.example.com", "Internal", "Probe"),
        count("x.example.com", "OK", "Probe"),
    ];
    assert!(expected.iter().all(|line| counts.contains(&line.as_str())), "{counts:#?}");
    assert_eq!(counts.len(), 3, "{counts:#?}");
    assert!(metrics.contains("\nprocess_start_time_seconds 1"), "{metrics}");
    assert!(!metrics.contains("csi_warden_registered"), "who registers nothing must not look like a lost registration");
    let mut raw = TcpStream::connect(address(&agent)).unwrap();
    raw.write_all(b"GET /m HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    raw.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{answer}");
}

#[tokio::test]
async fn deprecated_addresses_work_and_metrics_are_only_where_they_are_wanted() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let (health, metrics) = (free_port(), free_port());
    let start = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_csi-warden"));
        command
            .arg0("/livenessprobe")
            .arg(format!("-csi-address=unix://{}", bed.driver_socket().display()))
            .args(flags);
        Agent::start(command, bed.at("liveness.log"))
    };
    let health_port = format!("--health-port={health}");
    let metrics_address = format!("--metrics-address=127.0.0.1:{metrics}");
    let (health, metrics) = (format!("127.0.0.1:{health}"), format!("127.0.0.1:{metrics}"));
    let mut agent =
        start(&["-health-port", &health_port["--health-port=".len()..], "-v", "5", "ignored", "--nonsense"]);
    status_becomes(&health, "/healthz", 200).await;
    assert_eq!(get_later(&health, "/metrics").await.unwrap().0, 404);
    agent.logs("Health check succeeded").await;
    assert_eq!(agent.terminate().await.code(), Some(0));
    let mut agent = start(&[&health_port, &metrics_address]);
    status_becomes(&health, "/healthz", 200).await;
    assert_eq!(get_later(&health, "/metrics").await.unwrap().0, 404);
    assert_eq!(get_later(&metrics, "/healthz").await.unwrap().0, 404);
    status_becomes(&metrics, "/metrics", 200).await;
    assert_eq!(agent.terminate().await.code(), Some(0));
}

#[tokio::test]
async fn a_taken_port_is_exit_1_with_the_address() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let mut agent = bed.livenessprobe(&[&format!("--http-endpoint={taken}")]);
    assert_eq!(agent.exit().await.code(), Some(1));
    assert!(agent.log().contains(&taken), "{}", agent.log());
}

#[tokio::test]
async fn it_stops_promptly_whatever_it_waits_for() {
    let bed = Bed::new();
    let mut waiting = bed.livenessprobe(&[]);
    waiting.logs("Still connecting").await;
    assert_eq!(waiting.terminate().await.code(), Some(0));
    let driver = bed.driver();
    let mut asking = bed.livenessprobe(&["--probe-timeout=1h"]);
    asking.logs("ServeMux listening").await;
    driver.behaviour().delay = Duration::from_secs(3600);
    let mut client = TcpStream::connect(address(&asking)).unwrap();
    client.write_all(b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n").unwrap();
    bed::eventually("the driver is asked", || driver.behaviour().probe_calls > 0).await;
    assert_eq!(asking.terminate().await.code(), Some(0));
}

/// Exit code and words; one that does not end by itself is ended, and has none.
fn ends(name: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_csi-warden"));
    command.arg0(name).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn flags_and_exit_codes_are_the_replaced_livenessprobes() {
    for (arguments, code, words) in [
        (&["--help"][..], 0, ""),
        (&["-h"], 0, ""),
        (&["--version"], 2, "--version"),
        (&["--nonsense"], 2, "--nonsense"),
        (&["--probe-timeout=1"], 2, "--probe-timeout"),
        (&["--kubelet-registration-path=/x"], 2, "--kubelet-registration-path"),
        (&["--http-endpoint=:1", "--health-port=2"], 1, "only one of --health-port and --http-endpoint"),
        (&["--http-endpoint=:1", "--metrics-address=:2"], 1, "only one of --metrics-address and --http-endpoint"),
        (&["--http-endpoint=1"], 1, "--http-endpoint"),
        (&["--health-port=http"], 1, "--health-port"),
        (&["--metrics-address=1"], 1, "--metrics-address"),
        (&["--metrics-path=m"], 1, "--metrics-path"),
        (&["--metrics-path=/healthz"], 1, "--metrics-path"),
        (&["--probe-timeout=0"], 1, "--probe-timeout must be above zero"),
        (&["--csi-address=tcp://x"], 1, "--csi-address"),
        (&["--logging-format=xml"], 1, "--logging-format"),
        (&["--logging-format=json", "--vmodule=a=1"], 1, "--vmodule"),
        (&["--log-json-split-stream"], 1, "--log-json-split-stream"),
    ] {
        let (seen, said) = ends("/livenessprobe", arguments);
        assert_eq!(seen, Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
        let as_command: Vec<&str> = std::iter::once("livenessprobe").chain(arguments.iter().copied()).collect();
        assert_eq!(ends("csi-warden", &as_command), (seen, said), "{arguments:?}");
    }
}

#[test]
fn run_refuses_one_address_for_two_things() {
    let required = ["--kubelet-registration-path=/k/csi.sock", "--plugin-registration-path=/tmp"];
    for (flags, words) in [
        (
            &["--http-endpoint=:9808", "--liveness-endpoint=127.0.0.1:9808"][..],
            "--liveness-endpoint=127.0.0.1:9808 and",
        ),
        (&["--health-port=9808", "--liveness-endpoint=:9808"], "--liveness-endpoint=:9808 and"),
        (&["--liveness-endpoint=9808"], "--liveness-endpoint"),
        (&["--probe-timeout=0"], "--probe-timeout must be above zero"),
        (&["--probe-interval=0"], "--probe-interval must be above zero"),
    ] {
        let (code, said) = ends("csi-warden", &[&required[..], flags].concat());
        assert_eq!(code, Some(1), "{flags:?}: {said}");
        assert!(said.contains(words), "{flags:?}: {said}");
    }
}
