//! The proxy: any gRPC call between the kubelet and the driver, byte for byte.
//!
//! `listener.rs` is the proxy socket, `downstream.rs` one connection of the kubelet's, `idle.rs` those without a call, `upstream.rs` the connections to the
//! driver, `forward.rs` one call, `body.rs` what it carries, `gate.rs` the fence that calls about volumes pass, `volumes.rs` the volumes
//! in use, `volume_file.rs` the file that keeps them over restarts, `kubelet_records.rs` what the kubelet has on disk of them,
//! `answer.rs` what we say ourselves when the driver cannot.

mod answer;
mod body;
mod downstream;
mod forward;
pub mod gate;
mod idle;
pub mod kubelet_records;
pub mod listener;
mod message;
pub mod node_info;
mod timeout;
mod upstream;
pub mod volume_file;
pub mod volumes;

use h2::Reason;

/// How much one stream may send before its reader takes it. This alone bounds what one call can hold here.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;

/// The window of a whole connection, as wide as it can be: a call whose reader is slow must not stop the others on its connection.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// What is queued for the socket of one connection before its calls wait.
const SEND_BUFFER_BYTES: usize = 256 * 1024;

/// A client that cancels calls quickly is no attack here: only who may mount volumes gets this far.
const CANCELLED_BEFORE_SEEN: usize = 1 << 16;

/// The peer's word for why a stream ended, if it said one about this stream.
fn reset_by_peer(error: &h2::Error) -> Option<Reason> {
    if error.is_reset() && error.is_remote() { error.reason() } else { None }
}
