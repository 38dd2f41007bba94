//! Promise: the README's first command shows the whole story, anywhere, and leaves nothing behind.

use std::process::Command;

#[test]
fn demo_plays_to_its_end_and_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_csi-warden")).arg("demo").env("TMPDIR", folder.path()).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}\n{}", String::from_utf8_lossy(&output.stderr));
    let order = ["has registered", "writes ERROR", "has dropped", "writes OK: recovery", "has registered"];
    let mut rest = told.as_ref();
    for words in order {
        rest =
            rest.split_once(words).unwrap_or_else(|| panic!("{words:?} is missing, or in the wrong place:\n{told}")).1;
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn demo_names_what_it_cannot_have() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_csi-warden")).arg("demo").env("TMPDIR", "/no/such/folder").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/folder"));
    let long = tempfile::Builder::new().prefix(&"x".repeat(100)).tempdir().unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_csi-warden")).arg("demo").env("TMPDIR", long.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("TMPDIR"));
    assert_eq!(std::fs::read_dir(long.path()).unwrap().count(), 0);
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden")).args(["demo", "--nonsense"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
