//! Settings: checked before anything starts.

pub mod go_duration;
pub mod listen;
pub mod probes;
pub mod settings;
pub mod yaml;
