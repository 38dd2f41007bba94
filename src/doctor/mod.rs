//! `csi-warden doctor`: whether a node, and a pod on it, are as a driver's registration and the probes need them.
//!
//! One file a theme. A check reads, and turns what it saw into a [`Finding`]; it changes nothing. Each reads on a thread of its own, so that a
//! file that hangs costs its own check's word.

mod agent;
mod confinement;
pub mod finding;
mod hardware;
mod kubelet;
pub mod manifest;
mod modules;
mod network_manager;
pub mod place;
mod rdma;
mod registration;

#[cfg(test)]
mod tests;

use crate::grpc::connect::CallError;
use crate::grpc::driver;
use crate::probe::join::join_all;
use crate::probe::lane::{Abandoned, Lane};
use crate::status::snapshot::Snapshot;
use finding::Finding;
use place::{Place, Sockets};
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

/// Reading small files takes milliseconds; sick firmware may take a minute.
const LIMIT: Duration = Duration::from_secs(5);

/// A read may list processes and hold a file of a quarter of a mebibyte.
const STACK_BYTES: usize = 1024 * 1024;

/// The running agent.
#[derive(Debug)]
pub enum Agent {
    /// What it says.
    Answers(Box<Snapshot>),
    /// It could not be asked.
    Absent {
        /// Why.
        why: String,
        /// Whether its socket was named.
        is_named: bool,
    },
}

type Job = fn(&Place) -> Vec<Finding>;

/// Checks of the node, in the order in which they are shown.
const NODE: [(&str, Job); 9] = [
    ("rdma-modules", modules::check),
    ("rdma-gids", rdma::gids),
    ("rdma-device-nodes", rdma::device_nodes),
    ("rdma-udev-before-kubelet", rdma::udev),
    ("rdma-networkmanager", network_manager::check),
    ("nvme-smart", hardware::smart),
    ("kernel-log", hardware::kernel_log),
    ("sysfs-whole", hardware::sysfs_whole),
    ("network-namespace", confinement::network),
];

/// Checks of the pod's paths.
const PATHS: [(&str, Job); 5] = [
    ("endpoint", |place| of_sockets(place, "endpoint", registration::endpoint)),
    ("registration-folder", |place| of_sockets(place, "registration-folder", registration::registration_folder)),
    ("kubelet-root", |place| of_sockets(place, "kubelet-root", registration::root_folder)),
    ("state-folder", |place| of_sockets(place, "state-folder", registration::state_folder)),
    ("health-file", registration::health_files),
];

fn of_sockets(place: &Place, check: &'static str, look: fn(&Place, &Sockets) -> Finding) -> Vec<Finding> {
    vec![place.sockets.as_ref().map_or_else(|| not_told(check), |sockets| look(place, sockets))]
}

fn not_told(check: &'static str) -> Finding {
    Finding::not_applicable(check, "no --kubelet-registration-path is given, so no registration is checked")
}

/// Every check of this node, all at once. None takes longer than some seconds.
pub async fn node(place: Place, agent: &Agent) -> Vec<Finding> {
    let place = Arc::new(place);
    let runs = PATHS.into_iter().chain(NODE).map(|(check, job)| Box::pin(on_a_lane(check, job, Arc::clone(&place))));
    let driver = async {
        match &place.sockets {
            Some(sockets) => Some(driver::plugin_name(&sockets.driver, LIMIT).await),
            None => None,
        }
    };
    let (found, driver) = tokio::join!(join_all(runs.collect()), driver);
    let mut findings = match (&place.sockets, &driver) {
        (Some(sockets), Some(answer)) => vec![registration::driver_socket(sockets, answer)],
        _ => vec![not_told("driver-socket")],
    };
    findings.extend(found.into_iter().flatten());
    let is_denied = |error: &CallError| matches!(error, CallError::Connect { source, .. } if source.kind() == ErrorKind::PermissionDenied);
    let denied = driver.as_ref().is_some_and(|answer| answer.as_ref().err().is_some_and(is_denied));
    findings.push(confinement::selinux(&place, denied));
    findings.extend(match agent {
        Agent::Answers(snapshot) => agent::check(snapshot, &place.probes),
        Agent::Absent { why, is_named } => agent::absent(why, *is_named),
    });
    findings
}

async fn on_a_lane(check: &'static str, job: Job, place: Arc<Place>) -> Vec<Finding> {
    let mut lane = Lane::with_stack(check, STACK_BYTES);
    let found = lane.run(LIMIT, move || job(&place)).await;
    found.unwrap_or_else(|abandoned| {
        let why = match abandoned {
            Abandoned::Late => format!("no answer within {LIMIT:?}"),
            Abandoned::NoThread(_) => abandoned.to_string(),
        };
        vec![Finding::unknown(check, why)]
    })
}
