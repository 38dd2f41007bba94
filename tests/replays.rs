//! Promise: `csi-warden replay` tells what would have happened on the node of a trace, and `csi-warden record` writes such traces.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use csi_warden::trace::host::Host;
use csi_warden::trace::{Change, Trace};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tokio::time::Instant;

fn trace(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces").join(name).with_extension("trace")
}

fn warden(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden")).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Each happening as `SECONDS WHAT`.
fn played(name: &str, flags: &[&str]) -> (Option<i32>, Vec<String>) {
    let path = trace(name);
    let (code, said, error) = warden(&[&["replay", path.to_str().unwrap(), "--output=json"], flags].concat());
    let said: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{error}"));
    let words = said["timeline"].as_array().unwrap().iter().map(|happening| {
        let text = |key: &str| happening[key].as_str().unwrap_or_default().to_owned();
        let what = match happening["event"].as_str().unwrap() {
            "outcome" => format!("{} {} {}", text("probe"), text("outcome"), text("reason")),
            "verdict" => format!(
                "{} {} {}",
                text("to"),
                text("reason"),
                happening["holdSeconds"].as_f64().map_or(String::new(), |hold| format!("hold {hold}"))
            ),
            "fence" => (if happening["up"] == true { "fence up" } else { "fence down" }).to_owned(),
            "registration" => (if happening["registered"] == true { "registered" } else { "withdrawn" }).to_owned(),
            other => panic!("{other}"),
        };
        format!("{} {}", happening["seconds"], what.split_whitespace().collect::<Vec<_>>().join(" "))
    });
    (code, words.collect())
}

const UP: [&str; 3] = ["0.0 fabric success", "0.0 healthy", "0.0 registered"];

#[test]
fn a_cable_that_is_pulled_and_put_back() {
    let (code, happened) = played("cable-pull", &[]);
    let rest = [
        "11.0 fabric failure PortDown",
        "12.0 unhealthy PortDown hold 30",
        "12.0 fence up",
        "27.0 withdrawn",
        "43.0 fabric warning NoSubnetManager",
        "44.0 fabric success",
        "73.0 healthy",
        "73.0 fence down",
        "73.0 registered",
    ];
    assert_eq!((code, happened), (Some(0), [&UP[..], &rest].concat().into_iter().map(str::to_owned).collect()));
}

#[test]
fn what_the_kernel_tells_of_wakes_the_probe_as_on_the_node() {
    let (code, happened) = played("roce-cable-pull", &[]);
    // The looks between the first and the one that confirms it are of the same event.
    let rest = [
        "10.2 fabric failure NoUsableGid",
        "11.2 fabric failure PortDown",
        "11.2 unhealthy PortDown hold 30",
        "11.2 fence up",
        "26.2 withdrawn",
        "40.62 fabric success",
        "70.62 healthy",
        "70.62 fence down",
        "70.62 registered",
    ];
    assert_eq!((code, happened), (Some(0), [&UP[..], &rest].concat().into_iter().map(str::to_owned).collect()));
    let (_, happened) = played("roce-cable-pull", &["--confirm-interval=0s"]);
    assert!(happened.contains(&"10.2 unhealthy NoUsableGid hold 30".to_owned()), "{happened:#?}");
}

#[test]
fn other_settings_give_another_story_of_the_same_incident() {
    let withdrawn = |flags: &[&str]| {
        let (_, happened) = played("cable-pull", flags);
        happened.into_iter().find(|what| what.ends_with("withdrawn"))
    };
    assert_eq!(withdrawn(&["--on-unhealthy=deregister"]).as_deref(), Some("12.0 withdrawn"));
    assert_eq!(withdrawn(&["--on-unhealthy=fence"]), None);
    assert_eq!(withdrawn(&["--volumes-in-use"]), None, "volumes are waited for");
    assert_eq!(withdrawn(&["--volumes-in-use", "--drain-timeout=20s"]).as_deref(), Some("32.0 withdrawn"));
    assert_eq!(withdrawn(&["--failure-threshold=40"]), None);
}

#[test]
fn a_flapping_port_is_damped() {
    let (code, happened) = played("flapping-port", &[]);
    let of = |end: &str| happened.iter().filter(|what| what.ends_with(end)).cloned().collect::<Vec<_>>();
    let holds: Vec<_> = happened.iter().filter_map(|what| what.split_once("hold ")).map(|(_, hold)| hold).collect();
    assert_eq!((code, holds), (Some(0), vec!["30", "60", "120", "240"]));
    assert_eq!(
        of("registered"),
        ["0.0 registered", "56.0 registered", "146.0 registered", "306.0 registered", "586.0 registered"]
    );
}

#[test]
fn one_bad_read_changes_nothing() {
    let (code, happened) = played("one-bad-read", &[]);
    let rest = [
        "10.0 fabric failure PortDown",
        "11.0 fabric success",
        "31.0 fabric unknown PortUnreadable",
        "35.0 fabric success",
    ];
    assert_eq!((code, happened), (Some(0), [&UP[..], &rest].concat().into_iter().map(str::to_owned).collect()));
}

#[test]
fn a_node_that_boots_with_a_dead_port_is_not_registered_before_it_is_up() {
    let (code, happened) = played("boots-with-dead-port", &[]);
    let registered: Vec<&str> = happened
        .iter()
        .map(String::as_str)
        .filter(|what| what.contains("registered") || what.contains("withdrawn"))
        .collect();
    assert_eq!((code, registered), (Some(0), vec!["56.0 registered"]));
    assert_eq!(happened[..2], ["0.0 fabric failure NoUsablePort", "1.0 unhealthy NoUsablePort hold 30"]);
}

#[test]
fn a_firmware_reset_is_a_failure_and_a_driver_that_is_loaded_again_is_none() {
    let (code, happened) = played("firmware-reset", &[]);
    for what in
        ["20.3 kernel failure KernelLogFatal", "21.2 fabric failure DeviceGone", "240.1 fabric unknown DriverReload"]
    {
        assert!(happened.iter().any(|happening| happening == what), "{what}: {happened:#?}");
    }
    let verdicts: Vec<&str> = happened.iter().map(String::as_str).filter(|what| what.contains("healthy")).collect();
    assert_eq!(
        (code, verdicts),
        (Some(0), vec!["0.0 healthy", "21.3 unhealthy KernelLogFatal hold 30", "111.6 healthy"]),
        "{happened:#?}"
    );
}

#[test]
fn a_drive_that_goes_read_only_or_dies_is_a_failure() {
    let (code, happened) = played("nvme-read-only", &[]);
    assert_eq!(
        (code, &happened[3..5]),
        (Some(1), &["40.0 drives failure ReadOnly".to_owned(), "41.0 unhealthy ReadOnly hold 30".to_owned()][..])
    );
    let (code, happened) = played("nvme-dead", &[]);
    let verdicts: Vec<&str> = happened.iter().map(String::as_str).filter(|what| what.contains("healthy")).collect();
    assert_eq!(
        (code, verdicts),
        (Some(0), vec!["0.0 healthy", "41.7 unhealthy KernelLogFatal hold 30", "151.0 healthy"])
    );
}

#[test]
fn a_writer_that_dies_changes_no_verdict_until_it_is_said_to_be_dead() {
    let (code, happened) = played("dead-writer", &[]);
    assert_eq!((code, happened.last().unwrap().as_str()), (Some(0), "126.0 health-file unknown HealthFileStale"));
    let (code, happened) = played("dead-writer", &["--health-file=/anywhere", "--health-dead-after=2m"]);
    assert_eq!(code, Some(1));
    assert!(happened.iter().any(|what| what == "156.0 health-file failure HealthFileDead"), "{happened:#?}");
}

#[test]
fn a_settings_file_is_played_and_what_no_trace_holds_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("warden.yaml");
    fs::write(
        &config,
        "confirmInterval: 200ms\nprobes:\n- {name: rails, type: rdma, period: 5s}\n- {name: check, type: exec, exec: {command: [/check]}}\n- {name: drives, type: nvme}\n",
    )
    .unwrap();
    let config = format!("--config={}", config.display());
    let (code, happened) = played("cable-pull", &[&config]);
    assert_eq!(code, Some(0));
    assert!(happened.contains(&"15.2 unhealthy PortDown hold 30".to_owned()), "{happened:#?}");
    let (_, said, _) = warden(&["replay", trace("cable-pull").to_str().unwrap(), &config]);
    for note in ["probe check is left out", "probe drives is left out"] {
        assert!(said.contains(note), "{said}");
    }
    fs::write(folder.path().join("warden.yaml"), "probes:\n- {name: rails, type: rdmma}\n").unwrap();
    let (code, _, error) = warden(&["replay", trace("cable-pull").to_str().unwrap(), &config]);
    assert!(code == Some(2) && error.contains("warden.yaml:2"), "{error}");
}

#[test]
fn a_bad_trace_is_told_with_its_line_and_nothing_is_written_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.trace");
    let outside = folder.path().join("outside");
    let shown = outside.display();
    for (text, says) in [
        ("", "bad.trace: line 1: no trace"),
        ("csi-warden-trace 1\nprobe a rdma\n@0\nsys/a = 1", "line 4: the trace is cut off"),
        ("csi-warden-trace 1\n@0\nsys/../../outside = 1\nend 1\n", "line 3:"),
        (&format!("csi-warden-trace 1\n@0\n{shown} = 1\nend 1\n"), "line 3:"),
        (
            &format!("csi-warden-trace 1\n@0\nsys/a -> {}\nsys/a/outside = 1\nend 1\n", folder.path().display()),
            "line 4:",
        ),
        ("csi-warden-trace 1\n@5\n@4\nend 9\n", "line 3: time goes on"),
        ("csi-warden-trace 1\n@0\nend 9\n", "names no probes"),
    ] {
        fs::write(&path, text).unwrap();
        let (code, said, error) = warden(&["replay", path.to_str().unwrap()]);
        assert_eq!((code, said.as_str()), (Some(2), ""), "{text}");
        assert!(error.contains(says), "{text}: {error}");
        assert!(!outside.exists());
    }
    for flags in [&["replay"][..], &["replay", "/none"], &["replay", "a", "b"], &["replay", "a", "--no-such"]] {
        assert_eq!(warden(flags).0, Some(2), "{flags:?}");
    }
}

#[test]
fn ten_minutes_pass_in_a_moment() {
    let begun = Instant::now();
    played("flapping-port", &[]);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

/// The state of a trace on disk, and the flags that lead there.
fn host_of(name: &str) -> (Host, Trace, Vec<String>) {
    let trace = Trace::parse(&fs::read(trace(name)).unwrap()).unwrap();
    let host = Host::new().unwrap();
    for change in &trace.steps[0].changes {
        if let Change::Path(path, entry) = change {
            host.put(path, entry.as_ref(), trace.steps[0].at).unwrap();
        }
    }
    let tree = host.tree();
    let flag = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
    let flags = vec![flag("sysfs-root", &tree.sysfs), flag("dev-root", &tree.dev), flag("proc-root", &tree.proc)];
    (host, trace, flags)
}

#[test]
fn what_is_recorded_is_what_was_there_and_each_change_by_its_time() {
    let (host, from, mut flags) = host_of("flapping-port");
    let out = host.path().join("out.trace");
    flags.extend(["--type=rdma".to_owned(), "--period=50ms".to_owned(), format!("--out={}", out.display())]);
    let mut recording = Command::new(env!("CARGO_BIN_EXE_csi-warden")).arg("record").args(&flags).spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&recording);
    let begun = Instant::now();
    let recorded = || fs::read_to_string(&out).unwrap_or_default();
    let until = |what: &str| {
        while !recorded().contains(what) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what}: {}", recorded());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    until("ports/1/state = 4: ACTIVE");
    for change in &from.steps[1].changes {
        let Change::Path(path, entry) = change else { panic!() };
        host.put(path, entry.as_ref(), from.steps[1].at).unwrap();
    }
    until("ports/1/state = 1: DOWN");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(recording.wait().unwrap().success());
    let trace = Trace::parse(recorded().as_bytes()).unwrap();
    let of = |trace: &Trace, step: usize| {
        let mut lines: Vec<String> = trace.steps[step].changes.iter().map(ToString::to_string).collect();
        // Device files cannot be made by everybody, and the one of a trace is none.
        lines.retain(|line| !line.starts_with("dev/"));
        lines.sort();
        lines
    };
    assert_eq!(of(&trace, 0), of(&from, 0));
    let changed: Vec<String> = trace.steps[1..].iter().enumerate().flat_map(|(at, _)| of(&trace, at + 1)).collect();
    assert!(of(&from, 1).iter().all(|line| changed.contains(line)), "{changed:?}");
    let (code, _, error) = {
        let refused = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
            .arg("record")
            .args(&flags)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        (refused.status.code(), (), String::from_utf8(refused.stderr).unwrap())
    };
    assert!(code == Some(1) && error.contains("--overwrite"), "{error}");
    assert_eq!(Trace::parse(recorded().as_bytes()), Ok(trace), "and it is left as it was");
}

#[test]
fn a_recording_is_refused_what_it_cannot_do() {
    for (flags, says) in [
        (&["record", "--type=rdma"][..], "--out is missing"),
        (&["record", "--out=/tmp/none/x"], "nothing to record"),
        (&["record", "--out=/tmp/none/x", "--type=rdma", "--config=x"], "exclude each other"),
        (&["record", "--out=/tmp/none/x", "--type=csi"], "has no such type"),
        (&["record", "--out=/tmp/none/x", "--type=rdma", "--period=1ms"], "--period"),
        (&["record", "--out=/tmp/none/x", "--type=rdma", "--for=0s"], "--for"),
        (&["record", "stray"], "stray"),
    ] {
        let (code, _, error) = warden(flags);
        assert!(code == Some(2) && error.contains(says), "{flags:?}: {error}");
    }
}

#[test]
fn a_health_file_is_recorded_with_its_age_and_each_write_and_never_a_secret() {
    let folder = tempfile::tempdir().unwrap();
    let (health, out) = (folder.path().join("health"), folder.path().join("out.trace"));
    fs::write(&health, "OK\n").unwrap();
    let old = std::time::SystemTime::now() - Duration::from_secs(600);
    fs::File::options().write(true).open(&health).unwrap().set_modified(old).unwrap();
    let flags = [format!("--health-file={}", health.display()), format!("--out={}", out.display())];
    let mut recording = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
        .args(["record", "--period=20ms", "--for=1500ms"])
        .args(&flags)
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    fs::write(&health, "OK\n").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    fs::write(&health, "password: hunter2\n").unwrap();
    assert!(recording.wait().unwrap().success());
    let text = fs::read_to_string(&out).unwrap();
    assert!(!text.contains("hunter2"), "{text}");
    let trace = Trace::parse(text.as_bytes()).unwrap();
    assert!(trace.steps.len() >= 3 && (-601_000..=-599_000).contains(&trace.steps[0].at.0), "{text}");
    assert_eq!(text.matches("= OK\\n").count(), 2, "a write of the same word is a write: {text}");
}
