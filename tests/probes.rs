//! Promise: `csi-warden probe` asks every kind of probe, and says in words, JSON and exit codes how it went.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, eventually};
use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use tokio::time::Instant;

fn probe(flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_csi-warden"));
    command.arg("probe").args(flags);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exit code, stdout, stderr.
fn run(flags: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = probe(flags).output().unwrap();
    (status.code(), text(&stdout), text(&stderr))
}

fn json_of(flags: &[&str]) -> (Option<i32>, Value) {
    let mut all = vec!["--output=json"];
    all.extend(flags);
    let (code, out, err) = run(&all);
    (code, serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}")))
}

/// Two commands, of which one is enough, and one that only warns.
fn config(bed: &Bed, rail0: &str, rail1: &str) -> String {
    let path = bed.at("warden.yaml");
    let exec = |name: &str, script: &str| {
        format!("  - {{name: {name}, type: exec, exec: {{command: [sh, -c, {script:?}]}}}}\n")
    };
    let text = format!(
        "probes:\n{}{}  - {{name: odd, type: exec, onFailure: warn, exec: {{command: [sh, -c, \"exit 1\"]}}}}\n\
         groups:\n  - {{name: rails, probes: [rail0, rail1], require: any}}\n",
        exec("rail0", rail0),
        exec("rail1", rail1),
    );
    fs::write(&path, text).unwrap();
    format!("--config={}", path.display())
}

#[tokio::test]
async fn every_source_gives_its_exit_code() {
    let bed = Bed::new();
    let driver_gone = format!("--csi-address={}", bed.driver_socket().display());
    let file = format!("--health-file={}", bed.health_file().display());
    for (flags, once, liveness) in [
        (vec!["--", "true"], 0, 0),
        (vec!["--", "false"], 1, 1),
        (vec!["--", "sh", "-c", "exit 3"], 2, 0),
        (vec!["--", "/no/such/program"], 2, 0),
        (vec!["--timeout=200ms", "--", "sleep", "60"], 2, 0),
        (vec![&driver_gone], 1, 1),
    ] {
        assert_eq!(run(&flags).0, Some(once), "{flags:?}");
        let with_liveness: Vec<&str> = ["--liveness"].into_iter().chain(flags.iter().copied()).collect();
        assert_eq!(run(&with_liveness).0, Some(liveness), "{with_liveness:?}");
    }
    assert_eq!(run(&[&file]).0, Some(2), "no file yet");
    bed.health("ERROR cut\n");
    assert_eq!(run(&[&file]).0, Some(1));
    assert_eq!(run(&[&file, "--liveness"]).0, Some(1));
    bed.health("OK\n");
    assert_eq!(run(&[&file]).0, Some(0));
}

#[tokio::test]
async fn the_driver_is_asked_over_its_socket() {
    let bed = Bed::new();
    let driver = bed.driver();
    let address = format!("--csi-address=unix://{}", bed.driver_socket().display());
    let ask = |flags: &'static [&'static str]| {
        let address = address.clone();
        let all = move || {
            let mut all = vec![address.as_str()];
            all.extend(flags);
            run(&all)
        };
        tokio::task::spawn_blocking(all)
    };
    let (code, out, _) = ask(&[]).await.unwrap();
    assert_eq!(code, Some(0));
    assert!(out.starts_with("health  healthy\n\nPROBE"), "{out}");
    driver.behaviour().ready = Some(false);
    let (code, out, _) = ask(&["--output=json"]).await.unwrap();
    let said: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &said["probes"][0]["reason"]), (Some(1), &json!("DriverNotReady")), "{out}");
    driver.behaviour().ready = Some(true);
    driver.behaviour().probe_error = Some(tonic::Code::Internal);
    let (code, out, _) = ask(&["--output=json"]).await.unwrap();
    assert_eq!(code, Some(0), "a warning is healthy: {out}");
    assert!(out.contains("\"warning\""), "{out}");
}

#[tokio::test]
async fn a_csi_probe_of_a_file_asks_the_driver_where_it_is_told_to() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let file = bed.at("warden.yaml");
    let config = format!("--config={}", file.display());
    let address = format!("--csi-address={}", bed.driver_socket().display());
    let ask = |flags: Vec<String>| {
        tokio::task::spawn_blocking(move || run(&flags.iter().map(String::as_str).collect::<Vec<_>>()))
    };
    let probes = "probes: [{name: driver, type: csi}]\n";
    fs::write(&file, probes).unwrap();
    assert_eq!(ask(vec![config.clone()]).await.unwrap().0, Some(1), "nobody is at the default socket");
    let (code, _, err) = ask(vec![config.clone(), address.clone()]).await.unwrap();
    assert_eq!((code, err.as_str()), (Some(0), ""));
    fs::write(&file, format!("csiAddress: {}\n{probes}", bed.driver_socket().display())).unwrap();
    assert_eq!(ask(vec![config.clone()]).await.unwrap().0, Some(0), "the file's own address counts");
    let nowhere = "--csi-address=/no/such.sock".to_owned();
    assert_eq!(ask(vec![config.clone(), nowhere]).await.unwrap().0, Some(1), "the command line wins");
    fs::write(&file, "probes: [{name: c, type: exec, exec: {command: [\"true\"]}}]\n").unwrap();
    let (code, _, err) = ask(vec![config, address]).await.unwrap();
    assert!(code == Some(0) && err.starts_with("warning: --csi-address has no effect"), "{err}");
}

#[test]
fn a_variable_without_a_name_is_refused() {
    for env in ["=x", "A=b,=x"] {
        let (code, _, err) = run(&[&format!("--env={env}"), "--", "true"]);
        assert!(code == Some(2) && err.contains("--env: \"=x\" names no variable"), "{code:?}: {err}");
    }
}

#[test]
fn json_has_the_settled_shape_and_groups_decide() {
    let bed = Bed::new();
    let file = config(&bed, "echo port 1 DOWN; exit 1", "exit 0");
    let (code, mut said) = json_of(&[&file]);
    assert_eq!(code, Some(0));
    for probe in said["probes"].as_array_mut().unwrap() {
        assert!(probe["durationMs"].take().is_u64());
    }
    let probe = |name: &str, outcome: &str, reason: Value, message: Value| json!({"name": name, "type": "exec", "outcome": outcome, "reason": reason, "message": message, "durationMs": null, "observed": {}});
    assert_eq!(
        said,
        json!({"health": "healthy", "probes": [
            probe("rail0", "failure", json!("ExecFailed"), json!("port 1 DOWN")),
            probe("rail1", "success", Value::Null, Value::Null),
            probe("odd", "failure", json!("ExecFailed"), json!("")),
        ]})
    );
    let (code, said) = json_of(&[&file, "--probe=rail0"]);
    assert_eq!((code, &said["health"]), (Some(1), &json!("unhealthy")), "alone, it is all there is of its group");
    assert_eq!(said["probes"].as_array().unwrap().len(), 1);
    let (code, said) = json_of(&[&file, "--probe=rail1,odd"]);
    assert_eq!((code, said["probes"].as_array().unwrap().len()), (Some(0), 2));
    let (code, said) = json_of(&[&config(&bed, "exit 1", "exit 7")]);
    assert_eq!((code, &said["health"]), (Some(2), &json!("unknown")));
    let (code, out, _) = run(&[&config(&bed, "exit 1", "exit 1")]);
    assert_eq!(code, Some(1));
    assert!(out.contains("(only warns)") && out.lines().all(|line| line.chars().count() <= 80), "{out}");
}

#[test]
fn a_bad_settings_file_is_told_with_line_and_field_and_fails_no_liveness_probe() {
    let bed = Bed::new();
    let path = bed.at("warden.yaml");
    let file = format!("--config={}", path.display());
    for (text, words) in [
        ("probes: [{name: a, tpye: csi}]\n", "warden.yaml:1: probes[0].tpye: unknown key; did you mean type?"),
        ("healthInterval: 10s\n", "it has no probes"),
    ] {
        fs::write(&path, text).unwrap();
        let (code, out, err) = run(&[&file]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
        assert!(err.contains(words), "{err}");
        assert_eq!(run(&[&file, "--liveness"]).0, Some(0));
    }
    fs::remove_file(&path).unwrap();
    let (code, _, err) = run(&[&file]);
    assert_eq!(code, Some(2));
    assert!(err.contains("No such file"), "{err}");
    let (code, _, err) = run(&[&config(&bed, "exit 0", "exit 0"), "--probe=rail2"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("no probe \"rail2\"; it has rail0, rail1, odd"), "{err}");
}

#[test]
fn what_cannot_be_meant_is_refused_with_both_flags_named() {
    let bed = Bed::new();
    let file = config(&bed, "exit 0", "exit 0");
    let health = format!("--health-file={}", bed.health_file().display());
    let write = format!("--write={}", bed.health_file().display());
    for (flags, words) in [
        (vec!["--wait", &write, "--", "true"], ["--wait", "--write"]),
        (vec!["--wait", "--watch", "--", "true"], ["--wait", "--watch"]),
        (vec!["--watch", &write, "--", "true"], ["--watch", "--write"]),
        (vec!["--liveness", "--wait=1s", "--", "true"], ["--wait", "--liveness"]),
        (vec!["--liveness", "--watch", "--", "true"], ["--watch", "--liveness"]),
        (vec!["--liveness", &write, "--", "true"], ["--write", "--liveness"]),
        (vec!["--output=json", &write, "--", "true"], ["--output", "--write"]),
        (vec![&file, "--", "true"], ["-- COMMAND", "--config"]),
        (vec!["--csi-address=/csi.sock", "--", "true"], ["-- COMMAND", "--csi-address"]),
        (vec![&health, "--csi-address=/csi.sock"], ["--csi-address", "--health-file"]),
        (vec![&file, &health], ["--config", "--health-file"]),
        (vec!["--probe=a", "--", "true"], ["--probe", "--config"]),
        (vec!["--env=A", &file], ["--env", "-- COMMAND"]),
        (vec!["--timeout=1s", &file], ["--timeout", "--config"]),
        (vec![&health, &write], ["--write", "--health-file"]),
        (vec!["--wait", "5s", "--", "true"], ["--wait", "--wait=5s"]),
        (vec!["--wait=0", "--", "true"], ["--wait", "above zero"]),
        (vec!["--wait=soon", "--", "true"], ["--wait", "soon"]),
        (vec!["--output=xml", "--", "true"], ["--output", "xml"]),
        (vec!["--csi-address=tcp://1"], ["--csi-address", "unix"]),
        (vec!["--health-file=/"], ["--health-file", "names no file"]),
        (vec![], ["nothing to ask", "--csi-address"]),
    ] {
        let (code, out, err) = run(&flags);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{flags:?}: {err}");
        assert!(words.iter().all(|word| err.contains(word)), "{flags:?}: {err}");
    }
    assert!(!bed.health_file().exists(), "nothing was written");
}

#[tokio::test]
async fn waiting_ends_when_all_is_well() {
    let bed = Bed::new();
    let flag = bed.at("plugged");
    let script = format!("test -e {} || {{ echo unplugged; exit 1; }}", flag.display());
    let command = probe(&["--wait", "--period=50ms", "--", "sh", "-c", &script]);
    let mut waiting = Agent::start(command, bed.at("wait.log"));
    waiting.logs("waiting for command: ExecFailed: unplugged\n").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(waiting.running());
    assert_eq!(waiting.log().matches("waiting").count(), 1, "once a change:\n{}", waiting.log());
    fs::write(&flag, "").unwrap();
    assert_eq!(waiting.exit().await.code(), Some(0));
}

#[test]
fn waiting_ends_at_its_deadline_with_the_last_verdict() {
    for (script, code, words) in [
        ("echo cut; exit 1", 1, "not healthy within 300ms: command: ExecFailed: cut"),
        ("exit 9", 2, "not healthy within 300ms: command: ExecUnknown"),
        ("sleep 60", 2, "not healthy within 300ms: command: no round has ended yet"),
    ] {
        let started = Instant::now();
        let (exit, _, err) = run(&["--wait=300ms", "--period=50ms", "--timeout=30s", "--", "sh", "-c", script]);
        assert_eq!(exit, Some(code), "{script}: {err}");
        assert!(err.contains(words), "{script}: {err}");
        assert!(started.elapsed() < Duration::from_secs(20), "{script}");
    }
}

#[tokio::test]
async fn waiting_counts_successes_in_a_row_after_a_failure() {
    let bed = Bed::new();
    let (path, rounds) = (bed.at("warden.yaml"), bed.at("rounds"));
    let script = format!("echo >>{0}; test $(wc -l <{0}) -gt 1", rounds.display());
    let text =
        format!("probes: [{{name: a, type: exec, successThreshold: 3, exec: {{command: [sh, -c, {script:?}]}}}}]\n");
    fs::write(&path, text).unwrap();
    let (code, _, err) = run(&["--wait=20s", "--period=20ms", &format!("--config={}", path.display())]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(fs::read_to_string(&rounds).unwrap().lines().count(), 4);
    assert!(err.contains("waiting for a: 2 of 3 successes in a row"), "{err}");
}

#[tokio::test]
async fn sigterm_in_the_middle_kills_the_commands() {
    let bed = Bed::new();
    for (mode, code) in
        [(vec![], 2), (vec!["--liveness"], 0), (vec!["--wait"], 2), (vec!["--watch"], 0), (vec!["--write", "h"], 0)]
    {
        let pid_file = bed.at("pid");
        let script = format!("echo $$ >{}.new; mv {0}.new {0}; sleep 600", pid_file.display());
        let mut flags = mode.clone();
        flags.extend(["--timeout=10m", "--period=10m", "--", "sh", "-c", &script]);
        let mut command = probe(&flags);
        command.current_dir(bed.at(""));
        let mut running = Agent::start(command, bed.at("term.log"));
        eventually("the command runs", || pid_file.exists()).await;
        let pid = fs::read_to_string(&pid_file).unwrap().trim().to_owned();
        assert_eq!(running.terminate().await.code(), Some(code), "{mode:?}");
        let gone = || !Path::new("/proc").join(&pid).exists() || is_zombie(&pid);
        eventually("the command is gone", gone).await;
        fs::remove_file(&pid_file).unwrap();
    }
}

/// Holds a write lease on a program: whoever starts it waits, says so here, and gets it a moment later.
const LEASE: &str = "use Fcntl; $| = 1; my $set_lease = 1024; open(my $file, '<', $ARGV[0]) or die $!; \
    $SIG{IO} = sub { print 'a'; select(undef, undef, undef, 0.3); fcntl($file, $set_lease, F_UNLCK); exit }; \
    for (1..100) { if (fcntl($file, $set_lease, F_WRLCK)) { print 'h'; sleep 60 while 1 } select(undef, undef, undef, 0.05) } die $!";

#[tokio::test]
#[expect(clippy::print_stderr, reason = "a test that tests nothing says so")]
async fn a_command_that_is_being_started_at_the_end_does_not_outlive_it() {
    let bed = Bed::new();
    let program = bed.at("program");
    fs::copy("/bin/sleep", &program).unwrap();
    let mut holder = Command::new("perl");
    holder.args(["-e", LEASE]).arg(&program).stdout(Stdio::piped());
    let Ok(mut holder) = holder.spawn() else { return eprintln!("SKIPPED: there is no perl to hold a lease") };
    let mut told = holder.stdout.take().unwrap();
    let mut next = || told.read_exact(&mut [0]).is_ok();
    if !next() {
        holder.wait().unwrap();
        return eprintln!("SKIPPED: no lease on {}", program.display());
    }
    let mut prober =
        Agent::start(probe(&["--timeout=20s", "--", program.to_str().unwrap(), "60"]), bed.at("probe.log"));
    assert!(next(), "the program is wanted");
    prober.terminate().await;
    holder.wait().unwrap();
    let runs = |entry: fs::DirEntry| fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == program);
    let left = || fs::read_dir("/proc").unwrap().flatten().filter(|entry| entry.file_name() != "self").any(runs);
    for _ in 0..20 {
        assert!(!left(), "it outlived who started it");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn is_zombie(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

#[tokio::test]
async fn watching_prints_each_change_once_with_its_time() {
    let bed = Bed::new();
    let (flag, shown) = (bed.at("broken"), bed.at("shown"));
    let script = format!("test ! -e {} || {{ echo unplugged; exit 1; }}", flag.display());
    let mut command = probe(&["--watch", "--period=50ms", "--", "sh", "-c", &script]);
    command.stdout(fs::File::create(&shown).unwrap()).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let lines = || fs::read_to_string(&shown).unwrap().lines().map(str::to_owned).collect::<Vec<_>>();
    eventually("the first round is shown", || lines().len() == 2).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(lines().len(), 2, "nothing changed");
    fs::write(&flag, "").unwrap();
    eventually("the change is shown", || lines().len() == 4).await;
    child.kill().unwrap();
    child.wait().unwrap();
    let (times, words): (Vec<String>, Vec<String>) = lines()
        .iter()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(time, words)| (time.to_owned(), words.to_owned()))
        .unzip();
    assert!(times.iter().all(|time| time.len() == 20 && time.ends_with('Z')), "{times:?}");
    assert_eq!(
        words,
        ["command success", "health healthy", "command failure ExecFailed: unplugged", "health unhealthy"]
    );
}

#[tokio::test]
async fn watching_shows_a_change_long_before_the_period_is_over() {
    let bed = Bed::new();
    let (file, shown) = (bed.health_file(), bed.at("shown"));
    fs::write(&file, "OK\n").unwrap();
    let mut command = probe(&["--watch", "--period=1h", &format!("--health-file={}", file.display())]);
    command.stdout(fs::File::create(&shown).unwrap()).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let text = || fs::read_to_string(&shown).unwrap();
    eventually("the first round is shown", || text().contains(" success")).await;
    fs::write(&file, "ERROR port 1 DOWN\n").unwrap();
    eventually("the change is shown", || text().contains("port 1 DOWN")).await;
    fs::write(&file, "OK\n").unwrap();
    eventually("and the next", || text().matches(" success").count() == 2).await;
    child.kill().unwrap();
    child.wait().unwrap();
}

#[tokio::test]
async fn several_probes_are_written_as_one_word() {
    let bed = Bed::new();
    let written = bed.at("written");
    for (rail0, rail1, words) in [
        ("exit 1", "exit 0", "OK\n"),
        ("echo port 1 DOWN; exit 1", "exit 1", "ERROR rail0: port 1 DOWN\n"),
        ("exit 1", "echo odd; exit 3", "UNKNOWN rail1: ExecUnknown: sh exited with 3: odd\n"),
    ] {
        let command = probe(&["--write", written.to_str().unwrap(), "--period=5s", &config(&bed, rail0, rail1)]);
        let mut writing = Agent::start(command, bed.at("write.log"));
        eventually("the file is written", || written.exists()).await;
        assert_eq!(fs::read_to_string(&written).unwrap(), words);
        assert_eq!(writing.terminate().await.code(), Some(0));
        fs::remove_file(&written).unwrap();
    }
}
