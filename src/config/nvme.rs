//! `nvme:` in a settings file.

use super::fields::{Fields, Written, duration};
use super::levels::{boolean, left_out, level, limits, some_of};
use super::probes::{HostTree, NvmeSettings, Require};
use super::written::require;
use super::yaml::{Node, echo};
use crate::policy::nvme::NvmeRule;
use crate::policy::nvme_selector::Selector;
use crate::policy::smart::{Level, Limits, SmartLimits, Warning};
use std::time::Duration;

/// The keys under `nvme`.
pub const KEYS: &[&str] = &[
    "devices",
    "exclude",
    "require",
    "grace",
    "smart",
    "criticalWarning",
    "spareBelowThreshold",
    "percentageUsed",
    "temperature",
    "mediaErrors",
    "hold",
];

/// The keys under `criticalWarning`.
pub const WARNING_KEYS: [&str; 6] =
    ["spare", "temperature", "reliability", "readOnly", "volatileBackup", "persistentMemory"];

/// Six of the kernel's attempts to reconnect, at 10 s each; it gives a fabric's controller up after 600 s.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(60);

/// What the file says; what is not there has its default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WrittenNvme {
    /// Unless every controller.
    pub devices: Option<Written<Vec<Selector>>>,
    /// Unless none.
    pub exclude: Option<Written<Vec<Selector>>>,
    /// Unless all.
    pub require: Option<Written<Require>>,
    /// Unless [`DEFAULT_GRACE`].
    pub grace: Option<Written<Duration>>,
    /// Unless false.
    pub smart: Option<Written<bool>>,
    /// By [`Warning::ALL`].
    pub critical_warning: Option<Written<[Level; 6]>>,
    /// Unless a failure.
    pub spare_below_threshold: Option<Written<Level>>,
    /// In percent of the lifetime.
    pub percentage_used: Option<Written<Limits<u8>>>,
    /// In degrees Celsius.
    pub temperature: Option<Written<Limits<i32>>>,
    /// New ones.
    pub media_errors: Option<Written<Limits<u64>>>,
    /// How long a temperature and new errors are told.
    pub hold: Option<Written<Duration>>,
}

impl WrittenNvme {
    pub(super) fn read(own: &mut Fields<'_, '_>) -> Self {
        let default = SmartLimits::default();
        let devices = own.take("devices").map(|node| {
            let texts = some_of(own, "devices", node);
            selectors(own, "devices", node, texts)
        });
        let exclude = own.take("exclude").map(|node| {
            let texts = own.texts("exclude", node);
            selectors(own, "exclude", node, texts)
        });
        left_out(own, devices.as_ref(), exclude.as_ref(), Selector::is_left_out_by);
        let written = Self {
            devices,
            exclude,
            require: own.parsed("require", require),
            grace: own.parsed("grace", duration),
            smart: own.parsed("smart", boolean),
            critical_warning: own.take("criticalWarning").map(|node| warnings(own, node, default.warnings)),
            spare_below_threshold: own.parsed("spareBelowThreshold", level),
            percentage_used: limits(
                own,
                "percentageUsed",
                default.percentage_used,
                "percent of the lifetime, 0 to 255",
            ),
            temperature: limits(own, "temperature", default.celsius, "degrees Celsius"),
            media_errors: limits(own, "mediaErrors", default.media_errors, "a number of new errors"),
            hold: own.parsed("hold", duration),
        };
        written.needs_smart(own);
        written
    }

    /// Limits for what is never read would be ignored in silence.
    fn needs_smart(&self, own: &mut Fields<'_, '_>) {
        if self.smart.as_ref().is_some_and(|smart| smart.value) {
            return;
        }
        let set = [
            ("criticalWarning", self.critical_warning.as_ref().map(|set| set.line)),
            ("spareBelowThreshold", self.spare_below_threshold.as_ref().map(|set| set.line)),
            ("percentageUsed", self.percentage_used.as_ref().map(|set| set.line)),
            ("temperature", self.temperature.as_ref().map(|set| set.line)),
            ("mediaErrors", self.media_errors.as_ref().map(|set| set.line)),
            ("hold", self.hold.as_ref().map(|set| set.line)),
        ];
        for (key, line) in set {
            if let Some(line) = line {
                own.wrong(line, key, "has no effect without smart: true".to_owned());
            }
        }
    }

    /// With the defaults filled in.
    pub fn settings(&self, host: &HostTree, timeout: Duration) -> NvmeSettings {
        let default = SmartLimits::default();
        let of = |set: &Option<Written<Vec<Selector>>>| set.as_ref().map(|set| set.value.clone()).unwrap_or_default();
        NvmeSettings {
            host: host.clone(),
            devices: of(&self.devices),
            exclude: of(&self.exclude),
            smart: self.smart.as_ref().is_some_and(|set| set.value),
            rule: NvmeRule {
                require: self.require.as_ref().map_or(Require::All, |set| set.value),
                grace: self.grace.as_ref().map_or(DEFAULT_GRACE, |set| set.value),
                timeout,
                smart: SmartLimits {
                    warnings: self.critical_warning.as_ref().map_or(default.warnings, |set| set.value),
                    spare_below_threshold: self
                        .spare_below_threshold
                        .as_ref()
                        .map_or(default.spare_below_threshold, |set| set.value),
                    percentage_used: self.percentage_used.as_ref().map_or(default.percentage_used, |set| set.value),
                    celsius: self.temperature.as_ref().map_or(default.celsius, |set| set.value),
                    media_errors: self.media_errors.as_ref().map_or(default.media_errors, |set| set.value),
                    hold: self.hold.as_ref().map_or(default.hold, |set| set.value),
                },
            },
        }
    }
}

fn selectors<'file>(
    own: &mut Fields<'file, '_>,
    key: &str,
    node: &'file Node,
    texts: Vec<Written<&'file str>>,
) -> Written<Vec<Selector>> {
    let mut selectors = Vec::new();
    for (at, text) in texts.into_iter().enumerate() {
        match Selector::parse(text.value) {
            Ok(selector) => selectors.push(selector),
            Err(message) => own.wrong(text.line, &format!("{key}[{at}]"), format!("{} {message}", echo(text.value))),
        }
    }
    Written { value: selectors, line: node.line }
}

fn warnings<'file>(own: &mut Fields<'file, '_>, node: &'file Node, default: [Level; 6]) -> Written<[Level; 6]> {
    let (file, within) = (own.file(), own.within("criticalWarning"));
    let mut fields = Fields::new(file, within, node, WARNING_KEYS.to_vec(), own.problems());
    let mut levels = default;
    for (warning, set) in Warning::ALL.into_iter().zip(&mut levels) {
        if let Some(written) = fields.parsed(warning.name(), level) {
            *set = written.value;
        }
    }
    fields.finish();
    Written { value: levels, line: node.line }
}
