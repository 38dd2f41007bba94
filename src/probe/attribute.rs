//! Small files of the kernel: one value each, read whole and bounded. Blocks as long as the driver behind the file does.

use rustix::fs::{CWD, Mode, OFlags, openat};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// As much as the kernel gives of one attribute.
const MAX_BYTES: u64 = 4096;

/// The value without the blanks around it, and without control characters.
///
/// # Errors
/// That of the system; what is no file has no value.
pub fn attribute(path: &Path) -> io::Result<String> {
    let text = bytes(path)?;
    let text = String::from_utf8_lossy(&text);
    Ok(text
        .trim_matches(|char: char| char.is_whitespace() || char == '\0')
        .chars()
        .filter(|char| !char.is_control())
        .collect())
}

/// The first bytes of the file, at most 4 KiB.
///
/// # Errors
/// That of the system.
pub fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    // A pipe or a device in its place must not hold us.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut bytes = Vec::new();
    File::from(openat(CWD, path, flags, Mode::empty())?).take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The names in a folder, sorted.
///
/// # Errors
/// That of the system.
pub fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        // A name that is no text is none of the kernel's.
        names.extend(entry?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_without_its_padding_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        for (text, value) in
            [("QEMU NVMe Ctrl      \n", "QEMU NVMe Ctrl"), ("\0\0", ""), ("a\u{1b}[31mb\n", "a[31mb"), ("", "")]
        {
            std::fs::write(&path, text).unwrap();
            assert_eq!(attribute(&path).unwrap(), value, "{text:?}");
        }
        std::fs::write(&path, "x".repeat(100_000)).unwrap();
        assert_eq!(attribute(&path).unwrap().len(), 4096);
        assert!(attribute(folder.path()).is_err(), "a folder has no value");
        assert_eq!(names(folder.path()).unwrap(), ["model"]);
    }
}
