//! What the agent knows, for people: a snapshot over a unix socket, and what would happen next, in words.

pub mod next;
pub mod order;
pub mod server;
pub mod snapshot;
