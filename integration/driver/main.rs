//! A CSI driver that really mounts, for the runs against a real kubelet.
//!
//! A volume is a tmpfs that holds one file, `volume_id`. Every call leaves one line in `--log`, so that a check can see
//! what the kubelet asked for, when, and what it was told.

mod call_log;
mod identity;
mod mounts;
mod node;
mod server;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use csi_warden::api::csi::{NodeGetInfoResponse, Topology};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    call_log::CallLog,
    identity::Driver,
    node::{Capability, MountingNode},
};

/// A CSI driver for tests: every volume is a tmpfs with one file in it.
#[derive(Parser)]
#[command(args_override_self = true)]
struct Args {
    /// The socket to serve; a stale one is replaced.
    #[arg(long)]
    endpoint: PathBuf,
    /// The driver's name.
    #[arg(long)]
    name: String,
    /// What NodeGetInfo gives as the node's id.
    #[arg(long)]
    node_id: String,
    /// A topology segment, `KEY=VALUE`; may be repeated.
    #[arg(long, value_parser = segment)]
    topology: Vec<(String, String)>,
    /// How many volumes the node takes; 0 is no limit.
    #[arg(long, default_value_t = 0)]
    max_volumes: i64,
    /// Announces STAGE_UNSTAGE_VOLUME.
    #[arg(long)]
    stage: bool,
    /// How long a NodeStageVolume takes, in milliseconds. It goes on when its caller hangs up, as a Go driver's does, and leaves
    /// one more line in the log when it begins: method `NodeStageVolume-begun`.
    #[arg(long, default_value_t = 0)]
    stage_takes: u64,
    /// Where each call leaves a line: milliseconds since 1970, method, volume, code.
    #[arg(long)]
    log: Option<PathBuf>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut terminated = signal(SignalKind::terminate())?;
    let log = CallLog::open(args.log.as_deref()).context("cannot open the call log")?;
    let driver = Driver::new(args.name, log.clone());
    let info = NodeGetInfoResponse {
        node_id: args.node_id,
        max_volumes_per_node: args.max_volumes,
        accessible_topology: Some(Topology { segments: args.topology.into_iter().collect() }),
    };
    let mut capabilities = vec![Capability::GetVolumeStats];
    capabilities.extend(args.stage.then_some(Capability::StageUnstageVolume));
    let node = MountingNode::new(info, capabilities, Duration::from_millis(args.stage_takes), log);
    let listener = server::bind(&args.endpoint)?;
    tokio::select! {
        ended = server::serve(listener, driver, node) => ended?,
        _ = terminated.recv() => {}
    }
    std::fs::remove_file(&args.endpoint).context("cannot remove the socket")
}

/// Reads `KEY=VALUE`.
fn segment(text: &str) -> Result<(String, String), String> {
    text.split_once('=').map(|(key, value)| (key.into(), value.into())).ok_or_else(|| "not KEY=VALUE".into())
}
