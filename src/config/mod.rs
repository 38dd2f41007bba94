//! Settings: checked before anything starts.

pub mod fields;
pub mod file;
pub mod go_duration;
pub mod go_integer;
pub mod gpu;
pub mod kmsg;
pub mod levels;
pub mod listen;
pub mod nvme;
pub mod paths;
pub mod probes;
pub mod proxy;
pub mod rdma;
pub mod settings;
mod settings_error;
pub mod source;
mod topology;
mod typed;
pub mod watched;
pub mod written;
pub mod yaml;
