//! csi-warden: registers a CSI driver with the kubelet and withdraws it while the node's storage hardware is gone.
//!
//! The folders are the parts of ARCHITECTURE.md; dependencies point from `probe` and the kubelet's side towards `policy`,
//! which depends on nothing.

pub mod api;
pub mod policy;
