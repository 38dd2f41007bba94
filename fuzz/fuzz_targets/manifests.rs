//! Manifests for the doctor: any text is understood or refused, each finding is one line, and what is not understood fails nobody.
#![no_main]

use csi_warden::doctor::finding::Status;
use csi_warden::doctor::manifest::of_text;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let findings = of_text("x.yaml", text);
    assert!(!findings.is_empty());
    // To YAML a carriage return alone ends a line, too.
    let lines = text.bytes().filter(|byte| matches!(byte, b'\n' | b'\r')).count() + 1;
    for finding in &findings {
        let shown = format!("{finding:?}");
        assert!(!finding.seen.contains(char::is_control), "{shown}");
        let line = finding.seen.strip_prefix("x.yaml:").and_then(|rest| rest.split(':').next()).map(str::parse);
        match (finding.status, line) {
            (Status::Fail, Some(Ok(line))) => assert!((1..=lines).contains(&line), "{shown}"),
            (Status::Fail, _) => panic!("without a line: {shown}"),
            (Status::Pass | Status::Unknown | Status::NotApplicable, _) => {}
        }
    }
});
