//! docs/tested-cases.md names tests that are there, and at least one in each row.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

const DOC: &str = include_str!("../docs/tested-cases.md");

#[test]
fn every_named_test_is_there() {
    let rows = DOC.lines().filter(|line| line.starts_with("| ") && !line.contains("| tests |"));
    let mut count = 0;
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, _, tests] = cells[..] else { panic!("{row}") };
        let names: Vec<&str> = tests.split(", ").collect();
        for name in &names {
            let name = name.strip_prefix('`').and_then(|name| name.strip_suffix('`'));
            let (file, test) = name.and_then(|name| name.split_once("::")).unwrap_or_else(|| panic!("{row}"));
            assert!(is_test(file, test), "{file}::{test} is not there");
            count += 1;
        }
    }
    assert!(count > 50, "{count}");
}

fn is_test(file: &str, test: &str) -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places: [PathBuf; 2] = [root.join("tests").join(file), root.join("src").join(file)];
    let text = places.iter().find_map(|place| fs::read_to_string(place.with_extension("rs")).ok()).unwrap_or_default();
    let head = format!("fn {test}() {{");
    let Some((before, _)) = text.split_once(&head) else { return false };
    let attribute = before.trim_end().trim_end_matches("async").trim_end().lines().next_back().unwrap();
    attribute.trim().starts_with("#[test]") || attribute.trim().starts_with("#[tokio::test")
}
