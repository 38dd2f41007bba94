//! Compiles `proto/` into `OUT_DIR` with protox, so that a machine needs cargo and nothing else.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["proto/registration.proto", "proto/csi.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
