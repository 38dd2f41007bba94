//! Between the kubelet and the driver.

pub mod kubelet_records;
pub mod volumes;
