//! One value of the kernel as text that can be shown.

use super::tree::{MAX_ATTRIBUTE_BYTES, Tree};
use rustix::io::Errno;

/// The value without the blanks around it and without control characters.
///
/// # Errors
/// As [`Tree::read_bytes`].
pub fn attribute(tree: &Tree, path: &str) -> Result<String, Errno> {
    let mut buffer = [0; MAX_ATTRIBUTE_BYTES];
    let length = tree.read_bytes(path, &mut buffer)?;
    let text = String::from_utf8_lossy(&buffer[..length]);
    let text = text.trim_matches(|char: char| char.is_whitespace() || char == '\0');
    Ok(text.chars().filter(|char| !char.is_control()).collect())
}

/// The last part of the link at `path`, such as a driver's name.
pub fn link_name(tree: &Tree, path: &str) -> Option<String> {
    tree.link(path)?.rsplit('/').next().filter(|name| !name.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_without_its_padding_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let tree = Tree::open(folder.path()).unwrap();
        for (text, value) in
            [("QEMU NVMe Ctrl      \n", "QEMU NVMe Ctrl"), ("\0\0", ""), ("a\u{1b}[31mb\n", "a[31mb"), ("", "")]
        {
            std::fs::write(folder.path().join("model"), text).unwrap();
            assert_eq!(attribute(&tree, "model"), Ok(value.to_owned()), "{text:?}");
        }
        std::fs::write(folder.path().join("model"), "x".repeat(100_000)).unwrap();
        assert_eq!(attribute(&tree, "model").unwrap().len(), MAX_ATTRIBUTE_BYTES);
        assert!(attribute(&tree, ".").is_err(), "a folder has no value");
    }
}
