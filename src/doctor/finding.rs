//! What one check found.

use serde::Serialize;

/// The word of one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Status {
    /// As it should be.
    Pass,
    /// Not as it should be; the fix says what to do.
    Fail,
    /// It could not be told from here.
    Unknown,
    /// It does not concern this node, or these settings.
    NotApplicable,
}

impl Status {
    /// As in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Unknown => "unknown",
            Self::NotApplicable => "notApplicable",
        }
    }
}

/// What one check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The check's stable name.
    pub check: &'static str,
    /// Its word.
    pub status: Status,
    /// What was seen, in one line.
    pub seen: String,
    /// What would mend it, or let it be told, mostly as a command.
    pub fix: Option<String>,
}

impl Finding {
    /// All is well.
    pub fn pass(check: &'static str, seen: impl Into<String>) -> Self {
        Self { check, status: Status::Pass, seen: one_line(&seen.into()), fix: None }
    }

    /// Something is wrong.
    pub fn fail(check: &'static str, seen: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, status: Status::Fail, seen: one_line(&seen.into()), fix: Some(one_line(&fix.into())) }
    }

    /// It cannot be told.
    pub fn unknown(check: &'static str, seen: impl Into<String>) -> Self {
        Self { check, status: Status::Unknown, seen: one_line(&seen.into()), fix: None }
    }

    /// There is nothing to check.
    pub fn not_applicable(check: &'static str, seen: impl Into<String>) -> Self {
        Self { check, status: Status::NotApplicable, seen: one_line(&seen.into()), fix: None }
    }

    /// With what would help.
    #[must_use]
    pub fn with_fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(one_line(&fix.into())), ..self }
    }
}

/// How all of them add up: the exit code.
pub fn verdict(findings: &[Finding]) -> u8 {
    let any = |status| findings.iter().any(|finding| finding.status == status);
    match (any(Status::Fail), any(Status::Pass), any(Status::Unknown)) {
        (true, _, _) => 1,
        // Nothing at all could be told.
        (false, false, true) => 2,
        (false, _, _) => 0,
    }
}

/// File names and attributes are foreign text.
fn one_line(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_decides_and_only_unknown_is_two() {
        let (pass, fail) = (Finding::pass("a", ""), Finding::fail("a", "", ""));
        let (unknown, none) = (Finding::unknown("a", ""), Finding::not_applicable("a", ""));
        for (findings, code) in [
            (vec![], 0),
            (vec![none.clone()], 0),
            (vec![pass.clone(), unknown.clone(), none.clone()], 0),
            (vec![unknown.clone(), none], 2),
            (vec![pass, unknown, fail], 1),
        ] {
            assert_eq!(verdict(&findings), code, "{findings:?}");
        }
    }

    #[test]
    fn foreign_text_cannot_leave_its_line() {
        let finding = Finding::fail("a", "x\n\u{1b}[31my", "z\r\n");
        assert_eq!((finding.seen.as_str(), finding.fix.as_deref()), ("x[31my", Some("z")));
    }
}
