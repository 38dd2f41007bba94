//! The rules, pure: std and itself, no clock, no I/O, no log. Every function takes `now`; a test keeps it so.

pub mod admission;
pub mod backoff;
pub mod crashes;
pub mod damping;
pub mod devices;
pub mod fence;
pub mod fence_override;
pub mod followed;
pub mod gpu;
pub mod group;
pub mod health;
pub mod health_file;
pub mod kernel_log;
pub mod kernel_log_rules;
pub mod line_pattern;
pub mod nvme;
pub mod nvme_selector;
pub mod outcome;
pub mod pace;
pub mod probe_verdict;
pub mod rdma;
pub mod reaction;
pub mod registration;
pub mod repeats;
pub mod rereads;
pub mod round;
pub mod smart;
pub mod smi;
pub mod topology;
pub mod volume_call;
pub mod volume_place;
pub mod volumes;
pub mod xid;

/// A fixed point in time for tests: rules only ever look at differences.
#[cfg(test)]
pub(crate) fn some_instant() -> std::time::Instant {
    #[expect(
        clippy::disallowed_methods,
        reason = "std offers no other way to make an Instant; its value is irrelevant"
    )]
    std::time::Instant::now()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    #[test]
    fn policy_imports_nothing_but_std_and_itself() {
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src/policy")];
        let mut paths = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { &mut folders } else { &mut paths }.push(path);
            }
        }
        let mut files = 0;
        for path in paths {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            for line in code.lines().map(str::trim).filter(|line| line.starts_with("use ") || line.contains("::")) {
                let import = line.strip_prefix("use ").or_else(|| line.strip_prefix("pub use "));
                if let Some(import) = import {
                    // A file of tests may make up its cases; what is banned below is banned there, too.
                    let cases = path.ends_with("tests.rs") && import.starts_with("proptest::");
                    assert!(
                        cases
                            || ["std::", "super::", "crate::policy", "self::"].iter().any(|ok| import.starts_with(ok)),
                        "{}: {line}",
                        path.display()
                    );
                }
                for banned in [
                    "std::fs",
                    "std::net",
                    "std::io",
                    "std::process",
                    "SystemTime",
                    "Instant::now",
                    "tokio::",
                    "tracing::",
                ] {
                    assert!(!line.contains(banned) || line.starts_with("//"), "{}: {line}", path.display());
                }
            }
            files += 1;
        }
        assert!(files > 5, "the folder moved, and this test with it");
    }
}
