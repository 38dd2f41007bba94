//! Promise: several probes are one steady verdict; each keeps its own thresholds and limits, and no bad command harms the agent.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, eventually, names, steadily};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// How far a recovery is from the last good round; the start waits for a word of each probe.
const FLAGS: [&str; 5] = [
    "--on-unhealthy=deregister",
    "--confirm-interval=20ms",
    "--recovery-hold=100ms",
    "--flap-window=1ms",
    "--start-grace=30s",
];

/// A round is written down as `good` or `bad`. It is bad while `down-NAME` is there, or as often as `budget-NAME` says.
const SCRIPT: &str = r#"
budget=$(cat "$BED/budget-$NAME" 2>/dev/null || echo 0)
if [ -e "$BED/down-$NAME" ] || [ "$budget" -gt 0 ]; then
    [ "$budget" -gt 0 ] && echo $((budget - 1)) >"$BED/budget-$NAME"
    echo bad >>"$BED/rounds-$NAME"
    echo "$NAME has no link"
    exit 1
fi
echo good >>"$BED/rounds-$NAME"
"#;

/// What its processes are found by, and where its files lie.
fn exec(bed: &Bed, name: &str, script: &str, more: &str) -> String {
    let words = serde_json::json!(["sh", "-c", script]);
    let folder = bed.folder.path().display();
    format!(
        "- {{name: {name}, type: exec, {more}, exec: {{command: {words}, env: {{BED: {folder}, NAME: {name}}}}}}}\n"
    )
}

/// A probe that is switched by files.
fn switched(bed: &Bed, name: &str, more: &str) -> String {
    exec(bed, name, SCRIPT, &format!("period: 100ms, timeout: 30s, {more}"))
}

fn down(bed: &Bed, name: &str) {
    fs::write(bed.at(&format!("down-{name}")), "").unwrap();
}

fn up(bed: &Bed, name: &str) {
    fs::remove_file(bed.at(&format!("down-{name}"))).unwrap();
}

/// The next so many rounds are bad.
fn fail(bed: &Bed, name: &str, times: u32) {
    fs::write(bed.at("budget"), times.to_string()).unwrap();
    fs::rename(bed.at("budget"), bed.at(&format!("budget-{name}"))).unwrap();
}

fn rounds(bed: &Bed, name: &str) -> Vec<String> {
    let text = fs::read_to_string(bed.at(&format!("rounds-{name}"))).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

async fn more_rounds(bed: &Bed, name: &str, count: usize) {
    let before = rounds(bed, name).len();
    eventually("more rounds", || rounds(bed, name).len() >= before + count).await;
}

fn agent_with(bed: &Bed, probes: &str, flags: &[&str]) -> Agent {
    fs::write(bed.at("warden.yaml"), probes).unwrap();
    let config = format!("--config={}", bed.at("warden.yaml").display());
    let state = format!("--state-dir={}", bed.at("state").display());
    let mut all = vec![config.as_str(), state.as_str()];
    all.extend(FLAGS);
    all.extend(flags);
    bed.agent(&all)
}

fn ask(bed: &Bed, output: &str) -> Option<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
        .args(["status", &format!("--output={output}"), "--status-socket"])
        .arg(bed.status_socket())
        .output()
        .unwrap();
    (output.status.code() != Some(2)).then(|| String::from_utf8(output.stdout).unwrap())
}

/// `None` while nobody answers.
fn status(bed: &Bed) -> Option<Value> {
    Some(serde_json::from_str(&ask(bed, "json")?).unwrap())
}

fn probe_now(bed: &Bed, name: &str) -> Value {
    let status = status(bed).unwrap_or_default();
    let probes = status["probes"].as_array().cloned().unwrap_or_default();
    probes.into_iter().find(|probe| probe["name"] == name).unwrap_or_default()
}

/// Processes that a probe of this bed has started.
fn processes(bed: &Bed) -> Vec<String> {
    let mark = format!("BED={}", bed.folder.path().display());
    let ours = |pid: &String| {
        let environment = fs::read(Path::new("/proc").join(pid).join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    };
    names(Path::new("/proc")).into_iter().filter(|name| name.parse::<u32>().is_ok()).filter(ours).collect()
}

/// What the log of `--v=4` says of each round of a probe that counts: on a busy machine some do not.
fn outcomes(agent: &Agent, probe: &str) -> Vec<String> {
    let mark = format!("\"probe round\" probe=\"{probe}\" probe.outcome=\"");
    let log = agent.log();
    let counting = log.lines().filter(|line| !line.contains("ClockLate"));
    counting.filter_map(|line| Some(line.split_once(&mark)?.1.split_once('"')?.0.to_owned())).collect()
}

/// Report 40: the last writer does not win, the first verdict is no guess, and a fault that is gone is gone without a restart.
#[tokio::test]
async fn one_that_fails_beside_one_that_passes_is_steadily_unhealthy_until_it_passes() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let probes =
        format!("probes:\n{}{}", switched(&bed, "a", "successThreshold: 5"), switched(&bed, "b", "onFailure: fail"));
    down(&bed, "a");
    let mut agent = agent_with(&bed, &probes, &[]);
    for restart in [true, false] {
        let mut seen = Vec::new();
        let enough = rounds(&bed, "b").len() + 60;
        eventually("60 rounds", || {
            assert!(bed.registration_folder().is_empty(), "never shown");
            if let Some(health) = status(&bed).map(|status| status["health"].clone()) {
                seen.push(health);
            }
            rounds(&bed, "b").len() >= enough && rounds(&bed, "a").len() >= 60
        })
        .await;
        let decided = seen.iter().position(|health| health["verdict"] != "unknown").unwrap();
        for health in &seen[decided..] {
            assert_eq!(health["verdict"], "unhealthy", "{seen:?}");
            assert!(health["causeProbe"] == "a" || health["causeReason"].as_str().unwrap().contains("HeldFromBefore"));
        }
        assert_eq!(seen.last().unwrap()["causeProbe"], "a", "the evidence is named");
        assert!(rounds(&bed, "b").iter().all(|word| word == "good"));
        assert!(!agent.log().contains("health.to=\"healthy\""), "never a false healthy:\n{}", agent.log());
        let told = agent.log().matches("\"driver health changed\"").count();
        assert_eq!(told, 1, "told once, and held over the restart:\n{}", agent.log());
        if restart {
            agent.kill().await;
            agent = agent_with(&bed, &probes, &[]);
        }
    }
    assert!(kubelet.since().is_empty());
    up(&bed, "a");
    kubelet.registered().await;
    let good = rounds(&bed, "a").iter().rev().take_while(|word| *word == "good").count();
    assert!(good >= 5, "believed after {good} good rounds");
    assert!(agent.running());
}

/// The same with nothing kept: a restart begins as not known, never as healthy.
#[tokio::test]
async fn a_restart_without_state_while_one_fails_shows_nothing() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let probes =
        format!("probes:\n{}{}", switched(&bed, "b", "onFailure: fail"), switched(&bed, "a", "failureThreshold: 10"));
    down(&bed, "a");
    let mut agent = agent_with(&bed, &probes, &[]);
    for _ in 0..2 {
        more_rounds(&bed, "a", 15).await;
        assert!(bed.registration_folder().is_empty());
        agent.kill().await;
        fs::remove_dir_all(bed.at("state")).unwrap();
        fs::create_dir(bed.at("state")).unwrap();
        agent = agent_with(&bed, &probes, &[]);
    }
    assert!(kubelet.since().is_empty());
    assert!(!agent.log().contains("health.to=\"healthy\""), "{}", agent.log());
    up(&bed, "a");
    kubelet.registered().await;
}

#[tokio::test]
async fn of_two_rails_one_is_enough_and_none_is_too_few() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let probes = format!(
        "probes:\n{}{}groups: [{{name: rails, probes: [rail0, rail1], require: any}}]\n",
        switched(&bed, "rail0", "onFailure: fail"),
        switched(&bed, "rail1", "onFailure: fail")
    );
    let _agent = agent_with(&bed, &probes, &[]);
    kubelet.registered().await;
    let before = bed.identity();
    for (one, other) in [("rail0", "rail1"), ("rail1", "rail0")] {
        down(&bed, one);
        more_rounds(&bed, one, 15).await;
        eventually("its own verdict", || probe_now(&bed, one)["verdict"] == "unhealthy").await;
        assert_eq!(probe_now(&bed, other)["verdict"], "healthy");
        assert_eq!(status(&bed).unwrap()["health"]["verdict"], "healthy");
        assert_eq!(bed.identity(), before);
        up(&bed, one);
        eventually("well again", || probe_now(&bed, one)["verdict"] == "healthy").await;
    }
    assert!(kubelet.since().is_empty());
    down(&bed, "rail0");
    down(&bed, "rail1");
    kubelet.deregistered().await;
    let words = ask(&bed, "table").unwrap();
    assert!(words.contains("withdrawn") && words.contains("has no link"), "{words}");
    up(&bed, "rail1");
    kubelet.registered().await;
    assert_eq!(probe_now(&bed, "rail0")["verdict"], "unhealthy");
}

#[tokio::test]
async fn a_probe_that_only_warns_is_told_and_withdraws_nothing() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let probes =
        format!("probes:\n{}{}", switched(&bed, "a", "onFailure: warn"), switched(&bed, "b", "onFailure: fail"));
    down(&bed, "a");
    let agent = agent_with(&bed, &probes, &[]);
    kubelet.registered().await;
    let before = bed.identity();
    more_rounds(&bed, "a", 40).await;
    assert_eq!(bed.identity(), before);
    agent.logs("the probe does not succeed").await;
    let told = agent.log().matches("a has no link").count();
    assert!((1..=3).contains(&told), "once, and at a bounded rate:\n{}", agent.log());
    assert_eq!(status(&bed).unwrap()["health"]["verdict"], "healthy");
    let probe = probe_now(&bed, "a");
    assert!(probe["onFailure"] == "warn" && probe["outcome"] == "failure", "{probe}");
    assert!(ask(&bed, "table").unwrap().contains("a has no link (only warns)"));
    down(&bed, "b");
    kubelet.deregistered().await;
    up(&bed, "b");
    kubelet.registered().await;
}

#[tokio::test]
async fn each_probe_has_its_own_thresholds() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let probes = format!(
        "probes:\n{}{}",
        switched(&bed, "patient", "failureThreshold: 5, successThreshold: 4"),
        switched(&bed, "strict", "failureThreshold: 1, successThreshold: 1")
    );
    let _agent = agent_with(&bed, &probes, &[]);
    kubelet.registered().await;
    let before = bed.identity();
    for _ in 0..3 {
        fail(&bed, "patient", 4);
        eventually("four bad rounds", || fs::read_to_string(bed.at("budget-patient")).unwrap().trim() == "0").await;
        more_rounds(&bed, "patient", 3).await;
    }
    assert_eq!(bed.identity(), before, "four are no verdict");
    assert!(kubelet.since().is_empty());
    fail(&bed, "patient", 5);
    kubelet.deregistered().await;
    kubelet.registered().await;
    let good = rounds(&bed, "patient").iter().rev().take_while(|word| *word == "good").count();
    assert!(good >= 4, "believed after {good}");
    fail(&bed, "strict", 1);
    kubelet.deregistered().await;
    kubelet.registered().await;
}

/// Report 5, whole: a driver that is away for long is withdrawn, and asked afresh when it is back; the agent stays.
#[tokio::test]
async fn a_driver_that_dies_is_withdrawn_past_the_threshold_and_registered_afresh_when_it_is_back() {
    let bed = Bed::new();
    let driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let probes = "probes: [{name: driver, type: csi, period: 100ms, timeout: 30s, failureThreshold: 50}]\n";
    let mut agent = agent_with(&bed, probes, &[]);
    kubelet.registered().await;
    let before = bed.identity();
    eventually("probed", || driver.behaviour().probe_calls > 3).await;
    // Below the threshold: away for ten periods of fifty.
    drop(driver);
    steadily("kept", Duration::from_secs(1), || bed.identity() == before).await;
    let mut driver = bed.driver();
    eventually("probed again", || driver.behaviour().probe_calls > 3).await;
    assert!(kubelet.since().is_empty() && bed.identity() == before);
    assert_eq!(driver.behaviour().node_info_calls, 0, "nobody had a reason to ask");
    // Above it; the second time the folder goes, too.
    for whole_folder in [false, true] {
        drop(driver);
        if whole_folder {
            fs::remove_dir_all(bed.at("drv")).unwrap();
        }
        kubelet.deregistered().await;
        assert!(agent.running() && bed.registration_folder().is_empty());
        assert_eq!(probe_now(&bed, "driver")["reason"], "DriverGone");
        steadily("withdrawn", Duration::from_millis(500), || !bed.shown()).await;
        if whole_folder {
            fs::create_dir(bed.at("drv")).unwrap();
        }
        driver = bed.driver();
        kubelet.registered().await;
        // Ours before showing it, and the kubelet's.
        assert!(driver.behaviour().node_info_calls >= 2);
    }
    assert!(agent.running());
    let changes = agent.log().matches("\"driver health changed\"").count();
    assert_eq!(changes, 5, "{}", agent.log());
}

#[tokio::test]
async fn a_driver_that_is_not_ready_is_withdrawn_and_one_with_errors_of_its_own_is_not() {
    let bed = Bed::new();
    let driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let probes = "probes: [{name: driver, type: csi, period: 100ms, timeout: 30s, failureThreshold: 3}]\n";
    let _agent = agent_with(&bed, probes, &[]);
    kubelet.registered().await;
    let before = bed.identity();
    for code in [tonic::Code::Unimplemented, tonic::Code::NotFound, tonic::Code::Internal] {
        driver.behaviour().probe_error = Some(code);
        let asked = driver.behaviour().probe_calls;
        eventually("ten rounds", || driver.behaviour().probe_calls >= asked + 10).await;
        assert_eq!(bed.identity(), before, "{code:?}");
    }
    driver.behaviour().probe_error = None;
    driver.behaviour().ready = Some(false);
    kubelet.deregistered().await;
    assert_eq!(probe_now(&bed, "driver")["reason"], "DriverNotReady");
    driver.behaviour().ready = None;
    kubelet.registered().await;
}

#[tokio::test]
async fn a_command_that_hangs_is_unknown_twice_then_fails_softly_and_leaves_no_process() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let script =
        r#"[ -e "$BED/down-hang" ] || exit 0; trap '' TERM HUP INT; sleep 1000 & while :; do sleep 1000; done"#;
    let probes = format!(
        "probes:\n{}{}",
        exec(&bed, "hang", script, "period: 100ms, timeout: 2s"),
        switched(&bed, "b", "onFailure: fail")
    );
    let mut agent = agent_with(&bed, &probes, &["--v=4"]);
    kubelet.registered().await;
    down(&bed, "hang");
    kubelet.deregistered().await;
    let said = outcomes(&agent, "hang");
    // Even the command that ends at once may have been late on a busy machine.
    let last_success = said.iter().rposition(|outcome| outcome == "success").unwrap();
    let after: Vec<&str> = said[last_success + 1..].iter().map(String::as_str).collect();
    let silent = after.iter().take_while(|outcome| **outcome == "unknown").count();
    assert!(silent >= 2 && after[silent..].iter().all(|outcome| *outcome == "failure"), "{said:?}");
    eventually("two failures", || outcomes(&agent, "hang").iter().filter(|word| *word == "failure").count() >= 2).await;
    let silent = |probe: &Value| probe["reason"] == "NotAnswering" && probe["outcome"] == "failure";
    eventually("silence is why", || silent(&probe_now(&bed, "hang"))).await;
    eventually("the others go on", || probe_now(&bed, "b")["outcome"] == "success").await;
    up(&bed, "hang");
    kubelet.registered().await;
    down(&bed, "hang");
    eventually("it hangs", || !processes(&bed).is_empty()).await;
    assert!(agent.terminate().await.success());
    eventually("no process is left", || processes(&bed).is_empty()).await;
}

#[tokio::test]
async fn a_command_that_is_missing_is_unknown_and_holds_either_verdict() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let program = bed.at("check");
    let put = |code: u32| {
        fs::write(bed.at("new"), format!("#!/bin/sh\nexit {code}\n")).unwrap();
        fs::set_permissions(bed.at("new"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(bed.at("new"), &program).unwrap();
    };
    put(0);
    let probes = format!(
        "probes:\n{}- {{name: a, type: exec, period: 100ms, timeout: 30s, exec: {{command: [{}]}}}}\n",
        switched(&bed, "b", "onFailure: fail"),
        program.display()
    );
    let mut agent = agent_with(&bed, &probes, &[]);
    kubelet.registered().await;
    for code in [1, 0] {
        let before = bed.identity();
        fs::remove_file(&program).unwrap();
        eventually("not known", || probe_now(&bed, "a")["reason"] == "ExecNotStarted").await;
        more_rounds(&bed, "b", 15).await;
        assert_eq!(bed.identity(), before, "held");
        assert_eq!(probe_now(&bed, "a")["outcome"], "unknown");
        put(code);
        if code == 1 { kubelet.deregistered().await } else { kubelet.registered().await }
    }
    assert!(agent.running());
    agent.logs("has known nothing for 3 periods").await;
    agent.logs("the probe knows again").await;
}

/// Bad input: all at once, beside one good probe.
#[tokio::test]
async fn commands_that_misbehave_are_bounded_told_apart_and_harm_nobody() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let (quick, patient) =
        ("period: 200ms, timeout: 300ms, onFailure: warn", "period: 200ms, timeout: 30s, onFailure: warn");
    let probes = [
        switched(&bed, "good", "onFailure: fail"),
        exec(&bed, "stubborn", "trap '' TERM; while :; do sleep 1000; done", quick),
        exec(&bed, "orphan", "sleep 1000 & exit 0", patient),
        exec(&bed, "orphan-hang", "sleep 1000 & sleep 1000", quick),
        exec(&bed, "flood", "yes floods; yes floods >&2", quick),
        exec(&bed, "flood-fails", "head -c 20000000 /dev/zero | tr '\\0' x; exit 1", patient),
        exec(&bed, "odd", "echo what; exit 77", patient),
        exec(&bed, "killed", "kill -9 $$", patient),
        format!("- {{name: missing, type: exec, {patient}, exec: {{command: [/no/such/program]}}}}\n"),
    ];
    let mut agent = agent_with(&bed, &format!("probes:\n{}", probes.concat()), &[]);
    kubelet.registered().await;
    let before = bed.identity();
    for (name, outcome, reason) in [
        ("stubborn", "failure", "NotAnswering"),
        ("orphan-hang", "failure", "NotAnswering"),
        ("flood", "failure", "NotAnswering"),
        ("flood-fails", "failure", "ExecFailed"),
        ("odd", "unknown", "ExecUnknown"),
        ("killed", "unknown", "ExecUnknown"),
        ("missing", "unknown", "ExecNotStarted"),
    ] {
        eventually(&format!("{name} is {reason}"), || {
            let probe = probe_now(&bed, name);
            probe["outcome"] == outcome && probe["reason"] == reason
        })
        .await;
    }
    assert_eq!(probe_now(&bed, "orphan")["outcome"], "success", "a grandchild that keeps the pipe is not waited for");
    eventually("a bounded reason", || {
        probe_now(&bed, "flood-fails")["message"].as_str().is_some_and(|text| (1..=1024).contains(&text.len()))
    })
    .await;
    more_rounds(&bed, "good", 50).await;
    assert!(processes(&bed).len() < 40, "what a round started went with it: {:?}", processes(&bed));
    assert!(agent.running() && bed.identity() == before && kubelet.since().is_empty());
    assert!(agent.log().len() < 64 * 1024, "{}", agent.log().len());
    let table = ask(&bed, "table").unwrap();
    for name in ["good", "stubborn", "orphan", "orphan-hang", "flood", "flood-fails", "odd", "killed", "missing"] {
        assert!(table.lines().any(|line| line.split_whitespace().next() == Some(name)), "{name}\n{table}");
    }
    assert!(agent.terminate().await.success());
    eventually("no process is left", || processes(&bed).is_empty()).await;
}
