//! A CSI driver and a kubelet in small, for the demo and for tests: the same protocol, the same order, the same traps.

pub mod driver;
pub mod kubelet;
pub mod play;
