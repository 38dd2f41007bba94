//! csi-warden: registers a CSI driver with the kubelet and withdraws it while the node's storage hardware is gone.
//!
//! The folders are the parts of ARCHITECTURE.md; dependencies point from `probe` and the kubelet's side towards `policy`,
//! which depends on nothing.

pub mod api;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod demo;
pub mod doctor;
pub mod driver_name;
pub mod driver_ready;
pub mod grpc;
pub mod health_view;
pub mod http;
pub mod kept_file;
pub mod known_devices;
pub mod known_ports;
pub mod liveness;
pub mod metrics;
pub mod override_file;
pub mod parts;
pub mod path_watch;
pub mod policy;
pub mod probe;
pub mod proxy;
pub mod quiet;
pub mod registration;
pub mod shutdown;
pub mod state_file;
pub mod status;
pub mod telemetry;
pub mod trace;
