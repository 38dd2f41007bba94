//! README.md names every flag with its default, no flag that is not there, and the commands a newcomer types first.

use clap::{Arg, Command, CommandFactory};
use csi_warden::cli::doctor;
use csi_warden::cli::livenessprobe::LivenessprobeFlags;
use csi_warden::cli::probe::ProbeFlags;
use csi_warden::cli::record::RecordFlags;
use csi_warden::cli::run::RunFlags;
use std::collections::BTreeMap;

const README: &str = include_str!("../README.md");

#[test]
fn every_flag_of_run_is_listed_with_its_default_and_no_other() {
    assert_eq!(listed("## Flags"), defined(&RunFlags::command()));
}

#[test]
fn every_flag_of_probe_is_listed_with_its_default_and_no_other() {
    assert_eq!(listed("### The probe command"), defined(&ProbeFlags::command()));
}

#[test]
fn every_flag_of_record_is_listed_with_its_default_and_no_other() {
    assert_eq!(listed("### The record and replay commands"), defined(&RecordFlags::command()));
}

#[test]
fn every_flag_of_livenessprobe_is_listed_with_its_default_and_no_other() {
    assert_eq!(listed("### The livenessprobe command"), defined(&LivenessprobeFlags::command()));
}

#[test]
fn every_flag_that_only_the_doctor_has_is_listed_with_its_default_and_no_other() {
    let mut own = defined(&doctor::flags());
    own.retain(|flag, default| flag == "--output" || defined(&RunFlags::command()).get(flag) != Some(default));
    assert_eq!(listed("### The doctor command"), own);
}

#[test]
fn both_first_commands_are_there() {
    for command in ["$ cargo run --release -- demo\n", "$ cargo test\n"] {
        assert!(README.contains(command), "{command:?}");
    }
}

/// Flag and default of each row of the first table under `heading`, as a reader sees them.
fn listed(heading: &str) -> BTreeMap<String, String> {
    let rows = README
        .lines()
        .skip_while(|line| *line != heading)
        .skip(1)
        .take_while(|line| !line.starts_with('#'))
        .filter(|line| line.starts_with("| `--"));
    let mut flags = BTreeMap::new();
    for row in rows {
        let cells: Vec<String> = row.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let twice = flags.insert(cells[1].clone(), cells[2].clone());
        assert_eq!(twice, None, "{} is listed twice", cells[1]);
    }
    flags
}

/// Flag and default as the program has them; hidden flags are left out.
fn defined(command: &Command) -> BTreeMap<String, String> {
    command
        .get_arguments()
        .filter(|flag| !flag.is_hide_set())
        .filter_map(|flag| Some((format!("--{}", flag.get_long()?), default(flag))))
        .collect()
}

/// Some defaults are made at run time or are none at all; then the help text names them.
fn default(flag: &Arg) -> String {
    let value = flag.get_default_values().first().map(|value| value.to_string_lossy());
    if let Some(value) = value.filter(|value| !value.is_empty()) {
        return value.into_owned();
    }
    let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
    match help.rsplit_once("[default: ") {
        Some((_, text)) => text.trim_end_matches(']').to_owned(),
        None if help.ends_with("(required)") => "required".to_owned(),
        None => "none".to_owned(),
    }
}
