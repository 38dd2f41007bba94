//! Between the kubelet and the driver.

pub mod kubelet_records;
pub mod node_info;
pub mod volumes;
