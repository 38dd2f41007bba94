//! When an RDMA port is fit for use, and what a set of ports is worth. Pure: what was read comes in, an outcome goes out.

pub mod fabric;
pub mod gid;
pub mod known;
pub mod merged;
pub mod port;
pub mod rules;
pub mod seen;
pub mod selector;
pub mod worth;
