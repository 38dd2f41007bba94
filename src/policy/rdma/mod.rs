//! When an RDMA port is fit for use, and what a set of ports is worth. Pure: what was read comes in, an outcome goes out.

pub mod rules;
pub mod selector;
