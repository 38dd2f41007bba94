//! csi-warden's entry point: a table of contents.
fn main() {}
