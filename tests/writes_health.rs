//! Promise: `csi-warden probe` turns any command into a health source.

mod bed;

use bed::{Bed, eventually};
use std::fs;
use std::process::Command;

fn probe() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_csi-warden"));
    command.arg("probe");
    command
}

#[test]
fn one_run_prints_the_outcome_and_exits_accordingly() {
    for (script, code, words) in [
        ("exit 0", 0, "OK\n"),
        ("echo port 1 is DOWN; exit 1", 1, "ERROR port 1 is DOWN\n"),
        ("exit 5", 2, "UNKNOWN ExecUnknown: sh exited with 5\n"),
        ("sleep 60", 2, "UNKNOWN NotAnswering: sh did not end within 500ms and was killed\n"),
    ] {
        let output = probe().args(["--timeout=500ms", "--", "sh", "-c", script]).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{script}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), words, "{script}");
    }
    assert_eq!(probe().output().unwrap().status.code(), Some(2));
    assert_eq!(probe().args(["--period=0", "--", "true"]).output().unwrap().status.code(), Some(2));
}

/// What a parent left open, a secret perhaps, does not reach the command.
#[test]
fn commands_inherit_no_descriptors() {
    let script =
        format!("exec 9</etc/passwd; {} probe -- sh -c 'test ! -e /proc/self/fd/9'", env!("CARGO_BIN_EXE_csi-warden"));
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "OK\n");
}

#[test]
fn a_missing_folder_ends_it_with_the_file_named() {
    let output = probe().args(["--write", "/no/such/folder/health", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/folder/health"));
}

#[tokio::test]
async fn what_the_prober_writes_the_agent_acts_on() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let flag = bed.at("broken");
    let mut prober = probe()
        .arg(format!("--write={}", bed.health_file().display()))
        .args(["--period=100ms", "--", "sh", "-c"])
        .arg(format!("test ! -e {} || {{ echo unplugged; exit 1; }}", flag.display()))
        .spawn()
        .unwrap();
    let mut kubelet = bed.kubelet();
    let agent = bed.watching_agent(&[]);
    kubelet.registered().await;
    fs::write(&flag, "").unwrap();
    kubelet.deregistered().await;
    agent.logs("unplugged").await;
    fs::remove_file(&flag).unwrap();
    kubelet.registered().await;
    prober.kill().unwrap();
    prober.wait().unwrap();
    eventually("nothing is left beside the file", || bed::names(&bed.at("health")).len() == 1).await;
}

/// In a container we are process 1, and inherit what commands leave behind.
#[test]
fn what_commands_leave_behind_is_buried_by_process_1() {
    if !bed::is_root() {
        // A process namespace needs root; CI is root.
        return;
    }
    let bed = Bed::new();
    let mut unshare = Command::new("unshare");
    unshare
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .arg(env!("CARGO_BIN_EXE_csi-warden"))
        .args(["probe", "--period=20ms", "--timeout=2s", "--write"])
        .arg(bed.health_file())
        .args(["--", "sh", "-c", "sleep 100 & sleep 100 & exit 0"]);
    let mut prober = unshare.spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_secs(3));
    let children = |pid: u32| fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let process_1: u32 = children(prober.id()).trim().parse().unwrap();
    let left = children(process_1).split_whitespace().count();
    prober.kill().unwrap();
    prober.wait().unwrap();
    assert!(left < 10, "{left} processes are left after some hundred rounds");
}
