//! Go's rules for flags, which the manifests of the replaced sidecars are written by.
//!
//! `-x` is `--x`; a value comes after `=` or as the next argument; a boolean takes none unless after `=`; the last one wins; the
//! first positional argument, or `--`, ends the flags.

use clap::Command;
use clap::builder::ValueParser;
use clap::error::ErrorKind;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Arguments in the one form that clap is asked to read, and those after the flags.
#[derive(Debug, PartialEq, Eq)]
pub struct Normalised {
    /// Each as `--name=value`, or `--help`.
    pub flags: Vec<OsString>,
    /// From the first positional on; a `--` before them is dropped.
    pub rest: Vec<OsString>,
}

/// Rewrites `arguments` by Go's rules. Which flags are booleans is read from `command`. Unknown flags are left to clap, which
/// names them.
pub fn normalise(command: &Command, arguments: impl IntoIterator<Item = OsString>) -> Normalised {
    let mut arguments = arguments.into_iter();
    let mut flags = Vec::new();
    while let Some(argument) = arguments.next() {
        let bytes = argument.as_bytes();
        let name_and_value = match bytes {
            b"--" => {
                return Normalised { flags, rest: arguments.collect() };
            }
            [b'-', b'-', rest @ ..] | [b'-', rest @ ..] if !rest.is_empty() => rest,
            _ => {
                let rest = std::iter::once(argument).chain(arguments).collect();
                return Normalised { flags, rest };
            }
        };
        let (name, value) = match name_and_value.iter().position(|byte| *byte == b'=') {
            Some(at) => (&name_and_value[..at], Some(OsStr::from_bytes(&name_and_value[at + 1..]).to_owned())),
            None => (name_and_value, None),
        };
        if name == b"h" || name == b"help" {
            flags.push("--help".into());
            continue;
        }
        let value = match (value, kind(command, name)) {
            (Some(value), _) => Some(value),
            (None, Kind::Boolean) => Some("true".into()),
            (None, Kind::Valued) => arguments.next(),
            (None, Kind::Optional | Kind::Unknown) => None,
        };
        flags.push(joined(name, value.as_deref()));
    }
    Normalised { flags, rest: Vec::new() }
}

enum Kind {
    Boolean,
    Valued,
    /// It has a value only after `=`.
    Optional,
    Unknown,
}

fn kind(command: &Command, name: &[u8]) -> Kind {
    let flag = command.get_arguments().find(|flag| flag.get_long().is_some_and(|long| long.as_bytes() == name));
    match flag {
        Some(flag) if flag.get_value_names().is_some_and(|names| names == ["BOOL"]) => Kind::Boolean,
        Some(flag) if flag.is_require_equals_set() => Kind::Optional,
        Some(_) => Kind::Valued,
        None => Kind::Unknown,
    }
}

fn joined(name: &[u8], value: Option<&OsStr>) -> OsString {
    let mut flag = b"--".to_vec();
    flag.extend_from_slice(name);
    if let Some(value) = value {
        flag.push(b'=');
        flag.extend_from_slice(value.as_bytes());
    }
    OsString::from_vec(flag)
}

/// The first flag whose value is not UTF-8, though a text is wanted: clap does not say which.
///
/// # Errors
/// A sentence that names the flag.
pub fn texts_are_utf_8(command: &mut Command, flags: &[OsString]) -> Result<(), clap::Error> {
    let bad = flags.iter().filter(|flag| flag.to_str().is_none()).find_map(|flag| {
        let name = flag.as_bytes().strip_prefix(b"--")?.split(|byte| *byte == b'=').next()?;
        let argument =
            command.get_arguments().find(|known| known.get_long().is_some_and(|long| long.as_bytes() == name))?;
        let takes_any_bytes = argument.get_value_parser().type_id() == ValueParser::path_buf().type_id();
        (!takes_any_bytes).then(|| String::from_utf8_lossy(name).into_owned())
    });
    match bad {
        Some(name) => Err(command.error(ErrorKind::InvalidUtf8, format!("the value of --{name} is not UTF-8"))),
        None => Ok(()),
    }
}

/// A boolean as Go's `strconv.ParseBool` reads it.
///
/// # Errors
/// The text, if it is none of Go's words.
pub fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        other => Err(format!("{other:?} is not a boolean: use true or false")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;

    fn normalised(arguments: &[&str]) -> (Vec<String>, Vec<String>) {
        let command = Command::new("test")
            .arg(Arg::new("v").long("v").value_name("LEVEL"))
            .arg(Arg::new("p").long("enable-pprof").value_name("BOOL"));
        let normalised = normalise(&command, arguments.iter().map(OsString::from));
        let strings = |list: Vec<OsString>| list.into_iter().map(|text| text.into_string().unwrap()).collect();
        (strings(normalised.flags), strings(normalised.rest))
    }

    #[test]
    fn both_dash_styles_and_both_value_forms_are_one() {
        for form in [&["-v=5"][..], &["--v=5"], &["-v", "5"], &["--v", "5"]] {
            assert_eq!(normalised(form).0, ["--v=5"], "{form:?}");
        }
    }

    #[test]
    fn a_boolean_takes_no_separate_value() {
        assert_eq!(normalised(&["-enable-pprof"]).0, ["--enable-pprof=true"]);
        assert_eq!(normalised(&["--enable-pprof=false"]).0, ["--enable-pprof=false"]);
        let (flags, rest) = normalised(&["--enable-pprof", "false", "--v=3"]);
        assert_eq!(
            (flags, rest.len()),
            (vec!["--enable-pprof=true".to_owned()], 2),
            "as in Go, the positional ends the flags"
        );
    }

    #[test]
    fn a_value_may_look_like_a_flag() {
        assert_eq!(normalised(&["--v", "-1"]).0, ["--v=-1"]);
        assert_eq!(normalised(&["--v=a=b"]).0, ["--v=a=b"]);
    }

    #[test]
    fn flags_end_at_the_first_positional_and_at_two_dashes() {
        assert_eq!(normalised(&["--v=1", "x", "--v=2"]), (vec!["--v=1".into()], vec!["x".into(), "--v=2".into()]));
        assert_eq!(normalised(&["--v=1", "--", "--v=2"]), (vec!["--v=1".into()], vec!["--v=2".into()]));
        assert_eq!(normalised(&["-"]), (vec![], vec!["-".into()]));
    }

    #[test]
    fn unknown_and_valueless_flags_are_left_for_clap_to_name() {
        assert_eq!(normalised(&["--nonsense"]).0, ["--nonsense"]);
        assert_eq!(normalised(&["--v"]).0, ["--v"]);
    }

    #[test]
    fn booleans_are_gos() {
        for (text, value) in [("1", true), ("T", true), ("True", true), ("0", false), ("f", false), ("FALSE", false)] {
            assert_eq!(parse_bool(text), Ok(value));
        }
        for text in ["", "yes", "on", "tRUE", "2"] {
            assert!(parse_bool(text).is_err(), "{text:?}");
        }
    }
}
