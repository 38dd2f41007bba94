//! csi-warden's entry point.

use std::process::ExitCode;

fn main() -> ExitCode {
    csi_warden::cli::main(std::env::args_os())
}
