//! What was looked at in one file, and what was odd: one finding for each, or one word that all is well.

use crate::doctor::finding::Finding;

/// A check of manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    Effects,
    Tolerations,
    Endpoint,
    RegistrationFolder,
    Mounts,
    HealthFile,
}

impl Check {
    const ALL: [Self; 6] =
        [Self::Effects, Self::Tolerations, Self::Endpoint, Self::RegistrationFolder, Self::Mounts, Self::HealthFile];

    fn name(self) -> &'static str {
        match self {
            Self::Effects => "manifest-taint-effect",
            Self::Tolerations => "manifest-tolerations",
            Self::Endpoint => "manifest-endpoint",
            Self::RegistrationFolder => "manifest-registration-folder",
            Self::Mounts => "manifest-mounts",
            Self::HealthFile => "manifest-health-file",
        }
    }

    fn subject(self) -> &'static str {
        match self {
            Self::Effects => "effect of a taint or toleration",
            Self::Tolerations => "toleration",
            Self::Endpoint => "pair of --csi-address and endpoint",
            Self::RegistrationFolder => "registration folder",
            Self::Mounts => "mount",
            Self::HealthFile => "health file",
        }
    }
}

/// Collects what the checks of one file see.
#[derive(Debug)]
pub(super) struct Report {
    file: String,
    looked: Vec<Check>,
    odd: Vec<(Check, Finding)>,
}

impl Report {
    pub(super) fn new(file: &str) -> Self {
        Self { file: file.to_owned(), looked: Vec::new(), odd: Vec::new() }
    }

    /// One more thing was looked at.
    pub(super) fn looked(&mut self, check: Check) {
        self.looked.push(check);
    }

    pub(super) fn fail(&mut self, check: Check, line: usize, seen: &str, fix: &str) {
        let seen = format!("{}:{line}: {seen}", self.file);
        self.odd.push((check, Finding::fail(check.name(), seen, fix)));
    }

    pub(super) fn unknown(&mut self, check: Check, line: usize, seen: &str) {
        let seen = format!("{}:{line}: {seen}", self.file);
        self.odd.push((check, Finding::unknown(check.name(), seen)));
    }

    pub(super) fn findings(mut self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for check in Check::ALL {
            let looked = self.looked.iter().filter(|looked| **looked == check).count();
            let odd: Vec<_> = self.odd.extract_if(.., |(of, _)| *of == check).map(|(_, finding)| finding).collect();
            let all = format!("{}: {looked} × {}", self.file, check.subject());
            match (looked, odd.is_empty()) {
                (0, true) => findings.push(Finding::not_applicable(
                    check.name(),
                    format!("{}: no {} in it", self.file, check.subject()),
                )),
                (_, true) => findings.push(Finding::pass(check.name(), all)),
                (_, false) => findings.extend(odd),
            }
        }
        findings
    }
}
