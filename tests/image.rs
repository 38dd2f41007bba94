//! Promise: the Dockerfile builds what the rest of the tree states. Building it takes Docker; reading it does not.

use std::collections::BTreeSet;

const DOCKERFILE: &str = include_str!("../Dockerfile");
const IGNORE: &str = include_str!("../.dockerignore");
const TOOLCHAIN: &str = include_str!("../rust-toolchain.toml");

/// The default of a build argument.
fn argument(name: &str) -> &'static str {
    let start = format!("ARG {name}=");
    DOCKERFILE.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or("missing")
}

#[test]
fn the_image_is_built_with_the_pinned_toolchain_and_says_our_version() {
    assert!(TOOLCHAIN.contains(&format!("channel = \"{}\"", argument("RUST_VERSION"))));
    assert_eq!(argument("VERSION"), env!("CARGO_PKG_VERSION"));
}

/// A folder that the Dockerfile copies and `.dockerignore` keeps away fails the build, and only there.
#[test]
fn the_build_sees_just_what_it_copies() {
    let copies =
        DOCKERFILE.lines().filter_map(|line| line.strip_prefix("COPY ")).filter(|rest| !rest.starts_with("--"));
    let copied: BTreeSet<&str> =
        copies.flat_map(|rest| rest.rsplit_once(' ').map_or("", |(sources, _)| sources).split(' ')).collect();
    let seen: BTreeSet<&str> = IGNORE.lines().filter_map(|line| line.strip_prefix('!')).collect();
    assert_eq!(copied, seen);
    for path in copied {
        assert!(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists(), "{path}");
    }
}
