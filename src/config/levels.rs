//! Settings that probes of hardware share: two limits, and what something means.

use super::fields::{Fields, Written};
use super::yaml::{Node, echo};
use crate::policy::smart::{Level, Limits};
use std::fmt::Display;
use std::str::FromStr;

/// Keys of two limits.
pub const LIMIT_KEYS: [&str; 2] = ["warn", "fail"];

/// `{warn: 90, fail: never}`; what is not written is as in `default`.
pub(super) fn limits<T: FromStr + PartialOrd + Copy + Display>(
    own: &mut Fields<'_, '_>,
    key: &str,
    default: Limits<T>,
    what: &str,
) -> Option<Written<Limits<T>>> {
    let node = own.take(key)?;
    let (file, within) = (own.file(), own.within(key));
    let mut fields = Fields::new(file, within, node, LIMIT_KEYS.to_vec(), own.problems());
    let limit = |text: &str| match text {
        "never" => Ok(None),
        number => number.parse().map(Some).map_err(|_| format!("{} is no limit: use {what}, or never", echo(number))),
    };
    let (warn, fail) = (fields.parsed("warn", limit), fields.parsed("fail", limit));
    let limits = Limits {
        warn: warn.as_ref().map_or(default.warn, |warn| warn.value),
        fail: fail.as_ref().map_or(default.fail, |fail| fail.value),
    };
    if let (Some(warn), Some(below)) = (limits.warn, limits.fail)
        && below < warn
    {
        let line = fail.as_ref().map_or(node.line, |fail| fail.line);
        fields.wrong(line, "fail", format!("{below} is below warn, which is {warn}: it would never only warn"));
    }
    fields.finish();
    Some(Written { value: limits, line: node.line })
}

/// `ignore`, `warn` or `fail`.
pub(super) fn level(text: &str) -> Result<Level, String> {
    match text {
        "ignore" => Ok(Level::Ignore),
        "warn" => Ok(Level::Warn),
        "fail" => Ok(Level::Fail),
        other => Err(format!("{} is unknown: use ignore, warn or fail", echo(other))),
    }
}

/// `true` or `false`.
pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        other => Err(format!("{} is not a boolean: use true or false", echo(other))),
    }
}

/// Notes what `devices` names and `exclude` leaves out: it would be missed for ever.
pub(super) fn left_out<T: Display>(
    own: &mut Fields<'_, '_>,
    devices: Option<&Written<Vec<T>>>,
    exclude: Option<&Written<Vec<T>>>,
    is_left_out: impl Fn(&T, &T) -> bool,
) {
    let (Some(devices), Some(exclude)) = (devices, exclude) else { return };
    for device in &devices.value {
        if let Some(by) = exclude.value.iter().find(|exclude| is_left_out(device, exclude)) {
            own.wrong(
                exclude.line,
                "exclude",
                format!("{by} leaves out {device}, which devices names: remove one of them"),
            );
        }
    }
}

/// A list in which something must stand.
pub(super) fn some_of<'file>(own: &mut Fields<'file, '_>, key: &str, node: &'file Node) -> Vec<Written<&'file str>> {
    let texts = own.texts(key, node);
    if matches!(&node.value, super::yaml::Value::List(items) if items.is_empty()) {
        own.wrong(node.line, key, "is empty: list some, or leave the key out".to_owned());
    }
    texts
}
