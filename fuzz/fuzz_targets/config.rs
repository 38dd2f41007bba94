//! Settings files: any text is understood or refused, and what is understood holds.
#![no_main]

use clap::CommandFactory;
use csi_warden::cli::run::RunFlags;
use csi_warden::config::file;
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::LazyLock;

static FLAGS: LazyLock<clap::Command> = LazyLock::new(RunFlags::command);

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let Ok((file, problems)) = file::understand(Path::new("warden.yaml"), text, &FLAGS) else { return };
    // To YAML a carriage return alone ends a line, too.
    let lines = text.bytes().filter(|byte| matches!(byte, b'\n' | b'\r')).count() + 1;
    for problem in &problems {
        assert!((1..=lines).contains(&problem.line), "{problem}");
        assert!(!problem.to_string().contains('\n'), "{problem}");
    }
    let arguments = std::iter::once("csi-warden".into()).chain(file.arguments(&[]));
    assert!(FLAGS.clone().try_get_matches_from(arguments).is_ok());
    if problems.is_empty() {
        for member in file.groups.iter().flat_map(|group| &group.probes.value) {
            assert!(file.probes.iter().any(|probe| probe.name.value == *member));
        }
    }
});
