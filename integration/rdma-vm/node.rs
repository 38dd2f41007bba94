//! What a node has besides the agent, for the virtual machine: a CSI driver that mounts nothing, and a kubelet in small.
//!
//! `node DRIVER_SOCKET REGISTRY NAME` prints a line for each thing the kubelet does, until it is killed.

use anyhow::Context as _;
use csi_warden::demo::driver::DemoDriver;
use csi_warden::demo::kubelet::{KubeletEvent, KubeletOptions, run};
use std::path::Path;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

#[tokio::main(flavor = "current_thread")]
#[expect(clippy::print_stdout, reason = "its log")]
#[expect(clippy::disallowed_methods, reason = "it ends with the process")]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, registry, name] = &arguments[..] else {
        anyhow::bail!("usage: node DRIVER_SOCKET REGISTRY NAME");
    };
    let _driver = DemoDriver::start(Path::new(socket), name).with_context(|| format!("cannot listen at {socket}"))?;
    let (sender, mut events) = mpsc::channel(64);
    tokio::spawn(run(registry.into(), KubeletOptions::default(), sender, CancellationToken::new()));
    while let Some(event) = events.recv().await {
        match event {
            KubeletEvent::Registered { driver, .. } => println!("registered {driver}"),
            KubeletEvent::Deregistered { driver } => println!("deregistered {driver}"),
            KubeletEvent::Failed { error } => println!("failed: {error}"),
        }
    }
    anyhow::bail!("the kubelet ended")
}
