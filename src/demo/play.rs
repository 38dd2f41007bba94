//! The demo: a failure and a recovery in about twelve seconds, told as a timeline.

use super::driver::DemoDriver;
use super::kubelet::{self, KubeletEvent, KubeletOptions};
use crate::config::settings::{Settings, Typed};
use crate::daemon;
use crate::registration::socket::MAX_SOCKET_PATH_BYTES;
use anyhow::{Context, anyhow};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

const DRIVER: &str = "demo.csi.example.com";

/// Shortened for the show; its second line tells these and, in brackets, the defaults.
const HOLD: Duration = Duration::from_secs(4);
const INTERVAL: Duration = Duration::from_secs(3);

/// Every scene is given this long; a machine under load is slow.
const PATIENCE: Duration = Duration::from_secs(30);

/// So that a person can read along.
const PAUSE: Duration = Duration::from_millis(1500);

/// Plays it. With `keep`, everything goes on afterwards until `stop`.
///
/// # Errors
/// When something that should have happened did not.
pub async fn play(keep: bool, stop: CancellationToken, print: fn(&str)) -> anyhow::Result<()> {
    let folder = Folder::create()?;
    let mut stage = Stage::set(folder.0.path(), print)?;
    let played = tokio::select! {
        () = stop.cancelled() => Ok(()),
        played = stage.acts() => played,
    };
    if played.is_ok() && keep && !stop.is_cancelled() {
        stage.keep(&stop).await;
    }
    let ended = stage.end().await;
    played.and(ended)
}

/// A folder of our own in TMPDIR, removed with all in it.
struct Folder(tempfile::TempDir);

impl Folder {
    fn create() -> anyhow::Result<Self> {
        let parent = std::env::temp_dir();
        // The kubelet, ours included, wants absolute paths.
        let parent = fs::canonicalize(&parent).with_context(|| format!("cannot use {} (TMPDIR)", parent.display()))?;
        let folder = tempfile::Builder::new()
            .prefix("csi-warden-demo-")
            .tempdir_in(&parent)
            .with_context(|| format!("cannot make a folder in {}; is TMPDIR writable?", parent.display()))?;
        let registry = folder.path().join("plugins_registry");
        let longest = registry.join(format!("{DRIVER}-reg.sock")).as_os_str().len();
        if longest > MAX_SOCKET_PATH_BYTES {
            anyhow::bail!(
                "a socket in {} would have a path of {longest} bytes, and {MAX_SOCKET_PATH_BYTES} is the most: set TMPDIR to a shorter folder",
                parent.display()
            );
        }
        fs::create_dir(registry).context("cannot make a folder for the registration socket")?;
        Ok(Self(folder))
    }
}

struct Stage {
    began: Instant,
    print: fn(&str),
    health_file: PathBuf,
    events: mpsc::Receiver<KubeletEvent>,
    stop: CancellationToken,
    agent: tokio::task::JoinHandle<anyhow::Result<()>>,
    _driver: DemoDriver,
}

impl Stage {
    fn set(folder: &Path, print: fn(&str)) -> anyhow::Result<Self> {
        let registry = folder.join("plugins_registry");
        let driver_socket = folder.join("csi.sock");
        let health_file = folder.join("health");
        let settings = Settings::check(&typed(folder, &registry, &driver_socket, &health_file))?;
        print("csi-warden demo: an embedded CSI driver and an embedded kubelet, and between them the real agent.");
        print(&format!("Shortened for the show: recovery hold {HOLD:?} (30s), health interval {INTERVAL:?} (30s).\n"));
        let driver = DemoDriver::start(&driver_socket, DRIVER)
            .with_context(|| format!("cannot start the embedded driver at {}", driver_socket.display()))?;
        fs::write(&health_file, "OK\n").context("cannot write the health file")?;
        let (sender, events) = mpsc::channel(64);
        let stop = CancellationToken::new();
        #[expect(clippy::disallowed_methods, reason = "the embedded kubelet ends with the show's token")]
        tokio::spawn(kubelet::run(registry, KubeletOptions::default(), sender, stop.clone()));
        #[expect(clippy::disallowed_methods, reason = "joined at the end of the show")]
        let agent = tokio::spawn(daemon::run(settings, stop.child_token()));
        let stage = Self { began: Instant::now(), print, health_file, events, stop, agent, _driver: driver };
        stage.tell("driver", &format!("{DRIVER} listens"));
        stage.tell("prober", "writes OK: the hardware is well");
        Ok(stage)
    }

    async fn acts(&mut self) -> anyhow::Result<()> {
        self.expect_registered("the driver is registered: pods can mount").await?;
        tokio::time::sleep(PAUSE).await;
        self.write("ERROR mlx5_0 port 1 is DOWN", "writes ERROR: one bad look is no verdict, nothing happens")?;
        tokio::time::sleep(PAUSE).await;
        self.write("ERROR mlx5_0 port 1 is DOWN", "writes ERROR again: two in a row, the driver is unhealthy")?;
        self.expect_deregistered("the driver is gone: new pods are told so at once, none hangs").await?;
        tokio::time::sleep(PAUSE).await;
        self.write("OK", &format!("writes OK: recovery begins, and must hold for {HOLD:?}"))?;
        tokio::time::sleep(PAUSE).await;
        self.write("OK", "writes OK again")?;
        self.expect_registered("the driver is back, without a restart of anything").await
    }

    async fn keep(&mut self, stop: &CancellationToken) {
        (self.print)(&format!(
            "\nEverything goes on; the prober now repeats what the file says every {INTERVAL:?}. In another terminal:\n\
             \n    echo 'ERROR unplugged' > {file}\n    echo OK > {file}\n\nCtrl-C ends it.\n",
            file = self.health_file.display()
        ));
        let mut prober = tokio::time::interval(INTERVAL);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = prober.tick() => {
                    // Without the file there is nothing to repeat.
                    drop(fs::read_to_string(&self.health_file).and_then(|text| self.replace(&text)));
                }
                event = self.events.recv() => match event {
                    Some(event) => self.tell_event(&event, ""),
                    None => return,
                },
            }
        }
    }

    async fn end(self) -> anyhow::Result<()> {
        self.tell("agent", "is stopped: it unlinks its socket first");
        self.stop.cancel();
        self.agent.await.context("the agent's task ended badly")?.context("the agent failed")?;
        (self.print)("\nThat was it. `csi-warden --help` shows every setting; README.md shows the DaemonSet.");
        Ok(())
    }

    fn write(&self, line: &str, words: &str) -> anyhow::Result<()> {
        self.replace(&format!("{line}\n")).context("cannot write the health file")?;
        self.tell("prober", words);
        Ok(())
    }

    fn replace(&self, text: &str) -> std::io::Result<()> {
        let new = self.health_file.with_extension("new");
        fs::write(&new, text)?;
        fs::rename(&new, &self.health_file)
    }

    async fn expect_registered(&mut self, words: &str) -> anyhow::Result<()> {
        self.expect(words, |event| matches!(event, KubeletEvent::Registered { .. })).await
    }

    async fn expect_deregistered(&mut self, words: &str) -> anyhow::Result<()> {
        self.expect(words, |event| matches!(event, KubeletEvent::Deregistered { .. })).await
    }

    async fn expect(&mut self, words: &str, wanted: impl Fn(&KubeletEvent) -> bool) -> anyhow::Result<()> {
        match timeout(PATIENCE, self.events.recv()).await {
            Ok(Some(event)) if wanted(&event) => {
                self.tell_event(&event, words);
                Ok(())
            }
            Ok(Some(event)) => Err(anyhow!("the kubelet did something else: {event:?} instead of: {words}")),
            Ok(None) => Err(anyhow!("the embedded kubelet ended")),
            Err(_elapsed) => Err(anyhow!("did not happen within {PATIENCE:?}: {words}")),
        }
    }

    fn tell_event(&self, event: &KubeletEvent, words: &str) {
        let mut text = match event {
            KubeletEvent::Registered { driver, .. } => format!("has registered {driver}"),
            KubeletEvent::Deregistered { driver } => format!("has dropped {driver}"),
            KubeletEvent::Failed { error } => format!("could not register: {error}"),
        };
        if !words.is_empty() {
            // Writing to a String cannot fail.
            let written = write!(text, ": {words}");
            debug_assert!(written.is_ok());
        }
        self.tell("kubelet", &text);
    }

    fn tell(&self, who: &str, words: &str) {
        (self.print)(&format!("{:>6.1} s  {who:<8} {words}", self.began.elapsed().as_secs_f64()));
    }
}

fn typed(folder: &Path, registry: &Path, driver_socket: &Path, health_file: &Path) -> Typed {
    Typed {
        csi_address: driver_socket.display().to_string(),
        kubelet_registration_path: driver_socket.display().to_string(),
        plugin_registration_path: registry.to_owned(),
        timeout: Duration::from_secs(1),
        http_endpoint: String::new(),
        health_port: 0,
        enable_pprof: false,
        liveness_endpoint: String::new(),
        probe_timeout: Duration::from_secs(3),
        probe_interval: Duration::from_secs(10),
        liveness_only_flags: Vec::new(),
        health_file: Some(health_file.to_owned()),
        health_interval: INTERVAL,
        health_max_age: Duration::from_secs(90),
        health_dead_after: Duration::from_secs(600),
        failure_threshold: 2,
        success_threshold: 2,
        confirm_interval: Duration::from_secs(1),
        recovery_hold: HOLD,
        max_recovery_hold: Duration::from_secs(600),
        flap_window: Duration::from_secs(600),
        start_grace: Duration::from_secs(10),
        on_unhealthy: None,
        deregister_after: Duration::from_secs(15),
        drain_timeout: Duration::ZERO,
        // The demo's kubelet mounts nothing.
        proxy: "off".to_owned(),
        proxy_socket: None,
        refusal_code: "auto".to_owned(),
        allowed_uids: vec![0],
        topology: Vec::new(),
        topology_file: None,
        fence_max_volumes: false,
        proxy_only_flags: Vec::new(),
        drain_only_flags: Vec::new(),
        state_dir: Some(folder.to_owned()),
        status_socket: None,
        sysfs_root: PathBuf::from("/sys"),
        dev_root: PathBuf::from("/dev"),
        proc_root: PathBuf::from("/proc"),
        health_only_flags: Vec::new(),
        config: None,
    }
}
