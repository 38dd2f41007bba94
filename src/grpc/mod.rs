//! gRPC over unix sockets: what hyper and tonic lack for talking with a kubelet and a CSI driver.

pub mod authority;
pub mod code;
pub mod connect;
pub mod corked;
pub mod driver;
pub mod patient_acks;
pub mod read_driven;
pub mod serve;
pub mod spoken;
