//! What people and other programs write for us to read: durations, listen addresses, vmodule, flags, the health file.
#![no_main]

use clap::CommandFactory;
use csi_warden::cli::go_flags::normalise;
use csi_warden::cli::run::RunFlags;
use csi_warden::config::go_duration::GoDuration;
use csi_warden::config::listen::ListenAddress;
use csi_warden::probe::health_file;
use csi_warden::telemetry::VModule;
use libfuzzer_sys::fuzz_target;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

fuzz_target!(|input: &[u8]| {
    if let Some((_, detail)) = health_file::parse(input) {
        assert!(detail.len() <= 1024 && !detail.contains(char::is_control));
    }
    let arguments = input.split(|byte| *byte == 0).map(|argument| OsStr::from_bytes(argument).to_owned());
    let normalised = normalise(&RunFlags::command(), arguments);
    assert!(normalised.flags.iter().all(|flag| flag.as_bytes().starts_with(b"--")));
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(duration) = text.parse::<GoDuration>() {
        assert_eq!(duration.to_string().parse(), Ok(duration));
    }
    if let Ok(address) = text.parse::<ListenAddress>() {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
    drop(text.parse::<VModule>());
});
