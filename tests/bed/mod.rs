//! What every promise is tried on: a folder, an embedded driver, an embedded kubelet, and the real program as a process.

#![allow(
    clippy::allow_attributes,
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test file uses its part of the bed"
)]

use csi_warden::demo::driver::DemoDriver;
use csi_warden::demo::kubelet::{self, KubeletEvent, KubeletOptions};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

pub const DRIVER: &str = "x.example.com";

/// Generous: the machine may be busy. Nothing is asserted to be quick.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Health settings in which a test does not grow old.
pub const QUICK: [&str; 6] = [
    // The tests of the fence say otherwise.
    "--on-unhealthy=deregister",
    "--health-interval=200ms",
    "--confirm-interval=20ms",
    "--recovery-hold=300ms",
    "--start-grace=500ms",
    "--flap-window=1ms",
];

pub struct Bed {
    pub folder: tempfile::TempDir,
    stop: CancellationToken,
}

impl Bed {
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("w").tempdir().unwrap();
        for name in ["reg", "drv", "health", "state"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        Self { folder, stop: CancellationToken::new() }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn driver_socket(&self) -> PathBuf {
        self.at("drv/csi.sock")
    }

    pub fn registration_socket(&self) -> PathBuf {
        self.at("reg").join(format!("{DRIVER}-reg.sock"))
    }

    /// Where `csi-warden status` asks an agent that keeps its state in `state`.
    pub fn status_socket(&self) -> PathBuf {
        self.at("state").join(format!("{DRIVER}-warden-status.sock"))
    }

    pub fn health_file(&self) -> PathBuf {
        self.at("health/health")
    }

    pub fn driver(&self) -> DemoDriver {
        DemoDriver::start(&self.driver_socket(), DRIVER).unwrap()
    }

    /// Written as our own prober writes it: a new file renamed over the old one.
    pub fn health(&self, text: &str) {
        fs::write(self.at("health/.new"), text).unwrap();
        fs::rename(self.at("health/.new"), self.health_file()).unwrap();
    }

    /// A quick kubelet.
    pub fn kubelet(&self) -> Kubelet {
        self.kubelet_with(KubeletOptions { pass: Duration::from_millis(100), ..KubeletOptions::default() })
    }

    pub fn kubelet_with(&self, options: KubeletOptions) -> Kubelet {
        let (sender, events) = mpsc::channel(1000);
        let stop = self.stop.child_token();
        #[expect(clippy::disallowed_methods, reason = "ends with the bed")]
        tokio::spawn(kubelet::run(self.at("reg"), options, sender, stop.clone()));
        Kubelet { events, _stop: stop.drop_guard() }
    }

    /// The program with the flags that every run needs, and these.
    pub fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_csi-warden"));
        command
            .arg(format!("--csi-address={}", self.driver_socket().display()))
            .arg(format!("--kubelet-registration-path={}", self.driver_socket().display()))
            .arg(format!("--plugin-registration-path={}", self.at("reg").display()))
            .args(flags);
        command
    }

    pub fn agent(&self, flags: &[&str]) -> Agent {
        Agent::start(self.command(flags), self.at("agent.log"))
    }

    /// With the health file watched, quickly.
    pub fn watching_command(&self, flags: &[&str]) -> Command {
        let file = format!("--health-file={}", self.health_file().display());
        let state = format!("--state-dir={}", self.at("state").display());
        let mut all = vec![file.as_str(), state.as_str()];
        all.extend(QUICK);
        all.extend(flags);
        self.command(&all)
    }

    pub fn watching_agent(&self, flags: &[&str]) -> Agent {
        Agent::start(self.watching_command(flags), self.at("agent.log"))
    }

    /// Which registration socket is there, if any: its inode, which the next one may be given again, and its birth.
    pub fn identity(&self) -> Option<(u64, i64, i64)> {
        let socket = fs::symlink_metadata(self.registration_socket()).ok()?;
        Some((socket.ino(), socket.mtime(), socket.mtime_nsec()))
    }

    pub fn shown(&self) -> bool {
        self.identity().is_some()
    }

    /// The folder's entries, for whoever must not have left any.
    pub fn registration_folder(&self) -> Vec<String> {
        names(&self.at("reg"))
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub struct Kubelet {
    pub events: mpsc::Receiver<KubeletEvent>,
    _stop: tokio_util::sync::DropGuard,
}

impl Kubelet {
    pub async fn next(&mut self) -> KubeletEvent {
        timeout(PATIENCE, self.events.recv()).await.expect("the kubelet did nothing").unwrap()
    }

    pub async fn registered(&mut self) {
        let event = self.next().await;
        assert!(matches!(&event, KubeletEvent::Registered { driver, .. } if driver == DRIVER), "{event:?}");
    }

    pub async fn deregistered(&mut self) {
        let event = self.next().await;
        assert!(matches!(&event, KubeletEvent::Deregistered { driver } if driver == DRIVER), "{event:?}");
    }

    /// What it has done and nobody has looked at.
    pub fn since(&mut self) -> Vec<KubeletEvent> {
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }
}

pub struct Agent {
    pub child: Child,
    log: PathBuf,
    pub port: Option<u16>,
}

impl Agent {
    pub fn start(mut command: Command, log: PathBuf) -> Self {
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let child = command.stdin(Stdio::null()).stderr(file).stdout(Stdio::null()).spawn().unwrap();
        Self { child, log, port: None }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub fn running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub async fn exit(&mut self) -> ExitStatus {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "the agent does not end:\n{}", self.log());
            sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn terminate(&mut self) -> ExitStatus {
        self.signal(rustix::process::Signal::TERM);
        self.exit().await
    }

    pub async fn kill(&mut self) {
        self.child.kill().unwrap();
        self.exit().await;
    }

    pub async fn logs(&self, words: &str) {
        eventually(&format!("a log line with {words:?}; the log:\n{}", self.log()), || self.log().contains(words))
            .await;
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
        if thread::panicking() {
            drop(writeln!(std::io::stderr(), "the agent's log:\n{}", self.log()));
        }
    }
}

pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "never happened: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// For a while, the condition holds.
pub async fn steadily(what: &str, period: Duration, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + period;
    while Instant::now() < until {
        assert!(condition(), "no longer: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// A port that is free now.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Status and body of GET; `None` while nobody listens.
pub fn get(address: &str, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let status = answer.split(' ').nth(1)?.parse().ok()?;
    Some((status, answer.split_once("\r\n\r\n")?.1.to_owned()))
}

/// GET off the runtime's thread, on which the embedded kubelet and driver run, too.
pub async fn get_later(address: &str, path: &str) -> Option<(u16, String)> {
    let (address, path) = (address.to_owned(), path.to_owned());
    tokio::task::spawn_blocking(move || get(&address, &path)).await.unwrap()
}

pub async fn status_becomes(address: &str, path: &str, wanted: u16) -> String {
    let until = Instant::now() + PATIENCE;
    loop {
        let answer = get_later(address, path).await;
        match answer {
            Some((status, body)) if status == wanted => return body,
            other => assert!(Instant::now() < until, "GET {path} never gave {wanted}, last {other:?}"),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// Dead sockets are what a crash leaves: bound, and nobody listens.
pub fn dead_socket(path: &Path) {
    drop(std::os::unix::net::UnixListener::bind(path).unwrap());
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
