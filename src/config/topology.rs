//! `--topology` and `--topology-file`: segments for NodeGetInfo's answer.

use super::settings_error::SettingsError;
use super::yaml::{self, Value, echo};
use crate::policy::topology::check_segment;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Some 500 segments; a node has a handful.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// Reads both; where both name a key, the flag's value counts.
///
/// # Errors
/// Every segment that cannot be, and a file that cannot be read.
pub(super) fn segments(typed: &[String], file: Option<&Path>) -> Result<BTreeMap<String, String>, Vec<SettingsError>> {
    let mut segments = Segments::default();
    for text in typed.iter().filter(|text| !text.is_empty()) {
        match text.split_once('=') {
            Some((key, value)) => segments.add("--topology", None, key, value),
            None => segments.wrong("--topology", None, text, "must be key=value"),
        }
    }
    if let Some(path) = file {
        let flag = format!("--topology-file={}", path.display());
        let mut from_file = Segments::default();
        match read(path) {
            Ok(text) => from_file.add_all(&flag, &text),
            Err(problem) => from_file.errors.push(SettingsError::TopologyFile { flag, line: None, problem }),
        }
        segments.errors.append(&mut from_file.errors);
        for (key, value) in from_file.map {
            if !segments.has(&key) {
                segments.map.insert(key, value);
            }
        }
    }
    if segments.errors.is_empty() { Ok(segments.map) } else { Err(segments.errors) }
}

#[derive(Default)]
struct Segments {
    map: BTreeMap<String, String>,
    errors: Vec<SettingsError>,
}

impl Segments {
    /// A YAML map, or lines of `key=value` with `#` before comments.
    fn add_all(&mut self, flag: &str, text: &str) {
        let looks_like_lines =
            lines(text).next().is_none_or(|(_, line)| line.split_once('=').is_some_and(|(key, _)| !key.contains(':')));
        if looks_like_lines {
            for (number, line) in lines(text) {
                match line.split_once('=') {
                    Some((key, value)) => self.add(flag, Some(number), key.trim(), value.trim()),
                    None => self.wrong(flag, Some(number), line, "must be key=value"),
                }
            }
            return;
        }
        let problem =
            |line, problem: String| SettingsError::TopologyFile { flag: flag.to_owned(), line: Some(line), problem };
        match yaml::parse(text) {
            Ok(node) => match node.value {
                Value::Map(entries) => {
                    for entry in entries {
                        match &entry.node.value {
                            Value::Text(value) => self.add(flag, Some(entry.line), &entry.key, value),
                            other @ (Value::Nothing | Value::List(_) | Value::Map(_)) => {
                                let message = format!("{} must have one value, not {}", echo(&entry.key), other.kind());
                                self.errors.push(problem(entry.line, message));
                            }
                        }
                    }
                }
                Value::Nothing | Value::Text(_) | Value::List(_) => {
                    let message = "must be lines of key=value, or a YAML map `key: value`".to_owned();
                    self.errors.push(problem(node.line, message));
                }
            },
            Err(error) => self.errors.push(problem(error.line, error.message)),
        }
    }

    fn add(&mut self, flag: &str, line: Option<usize>, key: &str, value: &str) {
        if let Err(found) = check_segment(key, value) {
            return self.wrong(flag, line, &format!("{key}={value}"), found.text());
        }
        if self.has(key) && self.map.get(key).is_none_or(|before| before != value) {
            return self.wrong(flag, line, &format!("{key}={value}"), "the key has another value before; give one");
        }
        self.map.insert(key.to_owned(), value.to_owned());
    }

    /// CSI's keys are the same in either case.
    fn has(&self, key: &str) -> bool {
        self.map.keys().any(|known| known.eq_ignore_ascii_case(key))
    }

    fn wrong(&mut self, flag: &str, line: Option<usize>, text: &str, problem: &str) {
        let problem = format!("{}: {problem}", echo(text));
        self.errors.push(SettingsError::TopologyFile { flag: flag.to_owned(), line, problem });
    }
}

/// Lines that say something, numbered from 1.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

/// Follows links: a ConfigMap is made of them.
fn read(path: &Path) -> Result<String, String> {
    let read = || -> io::Result<Vec<u8>> {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        let mut bytes = Vec::new();
        File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| format!("cannot read it: {error}"))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("it has more than {} KiB: that is no topology file", MAX_FILE_BYTES / 1024));
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn of(typed: &[&str], file: Option<&str>) -> Result<Vec<String>, Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("topology");
        if let Some(text) = file {
            fs::write(&path, text).unwrap();
        }
        let typed: Vec<String> = typed.iter().map(ToString::to_string).collect();
        match segments(&typed, file.map(|_| path.as_path())) {
            Ok(map) => Ok(map.into_iter().map(|(key, value)| format!("{key}={value}")).collect()),
            Err(errors) => {
                let name = path.display().to_string();
                Err(errors.into_iter().map(|error| error.to_string().replace(&name, "F")).collect())
            }
        }
    }

    #[test]
    fn flags_lines_and_maps_are_read_and_the_flag_counts() {
        let all = ["a.io/x=1", "b.io/y=2"];
        assert_eq!(of(&["b.io/y=2", "a.io/x=1"], None).unwrap(), all);
        assert_eq!(of(&[], Some("# racks\n\na.io/x=1\n b.io/y = 2 \n")).unwrap(), all);
        assert_eq!(of(&[], Some("a.io/x: 1\nb.io/y: '2'\n")).unwrap(), all);
        assert_eq!(of(&["A.io/x=3"], Some("b.io/y=2")).unwrap_err().len(), 1, "no upper case in a domain");
        assert_eq!(of(&["a.io/x=1"], Some("a.io/X: 9\nb.io/y: 2\n")).unwrap(), all);
        assert_eq!(of(&[""], Some("# nothing\n")).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn each_segment_that_cannot_be_is_told_with_flag_and_line() {
        for (typed, file, expected) in [
            (vec!["a.io/x"], None, r#"--topology: "a.io/x": must be key=value"#),
            (vec!["topology.rdma.kubernetes.io/switch=a"], None, "NodeRestriction"),
            (vec!["a.io/x=1", "a.io/x=2"], None, "another value before"),
            (vec!["a.io/x="], None, "the value must be"),
            (vec![], Some("a.io/x=1\nnonsense\n"), r#"--topology-file=F: line 2: "nonsense": must be key=value"#),
            (vec![], Some("a.io/x: 1\nb.io/y: [2]\n"), r#"--topology-file=F: line 2: "b.io/y" must have one value"#),
            (vec![], Some("- a\n"), "--topology-file=F: line 1: must be lines of key=value, or a YAML map"),
            (vec![], Some("a.io/x: 1\na.io/x: 2\n"), "--topology-file=F: line 2"),
        ] {
            let errors = of(&typed, file).unwrap_err();
            assert!(errors.len() == 1 && errors[0].contains(expected), "{errors:?}");
        }
        let errors = segments(&[], Some(Path::new("/nowhere/x"))).unwrap_err();
        assert!(errors[0].to_string().starts_with("--topology-file=/nowhere/x: cannot read it: "), "{errors:?}");
        assert!(segments(&[], Some(Path::new("/dev/zero"))).is_err());
        assert!(of(&[], Some(&"x".repeat(70_000))).unwrap_err()[0].contains("more than 64 KiB"));
    }
}
