//! Test driver.
fn main() {}
