//! Traces: any bytes are understood or refused with a line, and what is understood is written as it was.
#![no_main]

use csi_warden::trace::tree::ROOTS;
use csi_warden::trace::{Change, Trace};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    // Most bytes end at the first line.
    let headed = [b"csi-warden-trace 1\n", input].concat();
    for bytes in [input, headed.as_slice()] {
        let trace = match Trace::parse(bytes) {
            Ok(trace) => trace,
            Err(error) => {
                let lines = bytes.split(|byte| *byte == b'\n').count();
                assert!((1..=lines).contains(&error.line), "{error}");
                continue;
            }
        };
        assert!(trace.steps.windows(2).all(|two| two[0].at < two[1].at));
        for change in trace.steps.iter().flat_map(|step| &step.changes) {
            let Change::Path(path, _) = change else { continue };
            let mut steps = path.split('/');
            assert!(steps.next().is_some_and(|root| ROOTS.contains(&root)), "{path}");
            assert!(steps.all(|step| !matches!(step, "" | "." | "..")), "{path}");
        }
        assert_eq!(Trace::parse(trace.to_string().as_bytes()), Ok(trace));
    }
});
