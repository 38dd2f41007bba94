//! Promise: a settings file that is wrong stops the start, quickly, and says where and what to do; one that is right is in force.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::Bed;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

/// Two flags that every start needs, then the file by a relative name, as it is to be shown.
fn call(folder: &Path, command: &[&str], more: &[&str]) -> Output {
    let began = SystemTime::now();
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
        .current_dir(folder)
        .args(command)
        .args(["--plugin-registration-path=/tmp", "--kubelet-registration-path=/k/csi.sock", "--config=warden.yaml"])
        .args(more)
        .output()
        .unwrap();
    let took = began.elapsed().unwrap_or_default();
    assert!(took < Duration::from_secs(5), "{took:?}");
    output
}

fn code_and_words(output: &Output) -> (i32, String) {
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// What `run` and `config check` say of the text; they must agree.
fn refused(text: impl AsRef<[u8]>) -> String {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("warden.yaml"), text).unwrap();
    refused_in(folder.path())
}

fn refused_in(folder: &Path) -> String {
    let (run, check) = (call(folder, &["run"], &[]), call(folder, &["config", "check"], &[]));
    let (code, words) = code_and_words(&run);
    assert_eq!(code, 1, "{words}");
    let (code, checked) = code_and_words(&check);
    assert_eq!(code, 1, "{checked}");
    assert_eq!(words.trim_start_matches("csi-warden: "), checked.trim_start_matches("csi-warden: "));
    assert!(words.len() < 4096, "{words}");
    words
}

/// Report 40, and the bugs of peers: a typo must not switch a check off in silence.
#[test]
fn what_cannot_be_is_refused_by_file_line_and_field() {
    let probe = |more: &str| format!("probes:\n  - name: a\n    type: csi\n    {more}\n");
    let exec = |exec: &str| format!("probes:\n  - name: a\n    type: exec\n    exec: {exec}\n");
    let nvme = |nvme: &str| format!("probes:\n  - name: a\n    type: nvme\n    nvme: {nvme}\n");
    let gpu = |gpu: &str| format!("probes:\n  - name: a\n    type: gpu\n    gpu: {gpu}\n");
    let kmsg = |kmsg: &str| format!("probes:\n  - name: a\n    type: kmsg\n    kmsg: {kmsg}\n");
    let rdma = |rdma: &str| format!("probes:\n  - name: a\n    type: rdma\n    rdma: {rdma}\n");
    let file =
        |more: &str| format!("probes:\n  - name: a\n    type: health-file\n    healthFile: {{path: /h/a{more}}}\n");
    let groups = |groups: &str| {
        format!("probes: [{{name: a, type: csi}}, {{name: b, type: csi}}, {{name: c, type: csi}}]\ngroups: {groups}\n")
    };
    for (text, words) in [
        ("healthFlie: /h/x\n".to_owned(), "warden.yaml:1: healthFlie: unknown key; did you mean healthFile?"),
        ("health-file: /h/x\n".to_owned(), "warden.yaml:1: health-file: unknown key; did you mean healthFile?"),
        ("quux: 1\n".to_owned(), "warden.yaml:1: quux: unknown key; known are probes, groups and the flags"),
        ("config: x\n".to_owned(), "warden.yaml:1: config: --config can only be given on the command line"),
        ("version: true\n".to_owned(), "warden.yaml:1: version: --version can only be given on the command line"),
        ("\ntimeout: 3\n".to_owned(), "warden.yaml:2: timeout: \"3\" is not a duration: use a number with a unit"),
        ("timeout:\n".to_owned(), "warden.yaml:1: timeout: has no value"),
        ("timeout: [1s]\n".to_owned(), "warden.yaml:1: timeout: must be a single value, not a list"),
        ("failureThreshold: two\n".to_owned(), "warden.yaml:1: failureThreshold: \"two\" is not a whole number"),
        ("failureThreshold: 0\n".to_owned(), "warden.yaml:1: failureThreshold: --failure-threshold must be above zero"),
        ("enablePprof: yes\n".to_owned(), "warden.yaml:1: enablePprof: \"yes\" is not a boolean: use true or false"),
        ("onUnhealthy: panic\n".to_owned(), "warden.yaml:1: onUnhealthy: --on-unhealthy=\"panic\" is unknown"),
        ("proxy: maybe\n".to_owned(), "warden.yaml:1: proxy: --proxy=\"maybe\" is unknown"),
        (
            "proxy: off\nonUnhealthy: fence\n".to_owned(),
            "warden.yaml:2: onUnhealthy: --on-unhealthy=fence needs the proxy",
        ),
        (
            "topology: k8s.io/x=1\n".to_owned(),
            "warden.yaml:1: topology: --topology: \"k8s.io/x=1\": the NodeRestriction",
        ),
        ("allowedUids: root\n".to_owned(), "warden.yaml:1: allowedUids: \"root\": "),
        ("recoveryHold: 1h\n".to_owned(), "warden.yaml:1: recoveryHold: --recovery-hold="),
        ("healthMaxAge: 1h\n".to_owned(), "warden.yaml:1: healthMaxAge: --health-dead-after="),
        ("probes:\n".to_owned(), "warden.yaml:1: probes: is empty"),
        ("probes: []\n".to_owned(), "warden.yaml:1: probes: is empty"),
        ("probes: {a: b}\n".to_owned(), "warden.yaml:1: probes: must be a list"),
        ("probes: [a]\n".to_owned(), "warden.yaml:1: probes[0]: must be a map with the keys name, type,"),
        ("probes: [{type: csi}]\n".to_owned(), "warden.yaml:1: probes[0].name: is missing"),
        (
            "probes: [{name: a}]\n".to_owned(),
            "warden.yaml:1: probes[0].type: is missing: use one of health-file, csi, exec, rdma, nvme, gpu, kmsg",
        ),
        ("probes: [{name: A, type: csi}]\n".to_owned(), "warden.yaml:1: probes[0].name: \"A\" is no name"),
        ("probes: [{name: a, type: smart}]\n".to_owned(), "probes[0].type: \"smart\" is unknown"),
        (
            "probes:\n- {name: a, type: csi}\n- {name: a, type: csi}\n".to_owned(),
            "warden.yaml:3: probes[1].name: another probe",
        ),
        (probe("timeout: 3"), "warden.yaml:4: probes[0].timeout: \"3\" is not a duration"),
        (probe("period: 0s"), "warden.yaml:4: probes[0].period: must be above zero"),
        (probe("period: 1ns"), "warden.yaml:4: probes[0].period: \"1ns\" is too short"),
        (probe("timeout: 0"), "warden.yaml:4: probes[0].timeout: must be above zero"),
        (probe("failureThreshold: 0"), "warden.yaml:4: probes[0].failureThreshold: \"0\" is no threshold"),
        (probe("successThreshold: -1"), "warden.yaml:4: probes[0].successThreshold: \"-1\" is no threshold"),
        (probe("onFailure: ignore"), "warden.yaml:4: probes[0].onFailure: \"ignore\" is unknown: use fail or warn"),
        (probe("timeOut: 3s"), "warden.yaml:4: probes[0].timeOut: unknown key; did you mean timeout?"),
        (probe("csi: {socket: tcp://x}"), "warden.yaml:4: probes[0].csi.socket: \"tcp://x\" is not a unix socket"),
        (probe(&format!("csi: {{socket: /{}}}", "x".repeat(107))), "probes[0].csi.socket: the path has 108 bytes"),
        (probe("exec: {command: [x]}"), "warden.yaml:4: probes[0].exec: belongs to type exec, but the type is csi"),
        ("probes: [{name: a, type: exec}]\n".to_owned(), "probes[0].exec: is missing: type exec needs it"),
        (rdma("{devices: []}"), "warden.yaml:4: probes[0].rdma.devices: is empty"),
        (rdma("{devices: mlx5_0}"), "warden.yaml:4: probes[0].rdma.devices: must be a list such as [a, b]"),
        (rdma("{devices: [a/b]}"), "warden.yaml:4: probes[0].rdma.devices[0]: \"a/b\" is no device: use a name"),
        (
            rdma("{devices: [mlx5_0], exclude: ['mlx5_*']}"),
            "warden.yaml:4: probes[0].rdma.exclude: mlx5_* leaves out mlx5_0, which devices names",
        ),
        (
            rdma("{exclude: [\"0000:0000:0000:0000\"]}"),
            "probes[0].rdma.exclude[0]: \"0000:0000:0000:0000\" an all-zero",
        ),
        (rdma("{ports: 1}"), "warden.yaml:4: probes[0].rdma.ports: must be all, or a list of port numbers such as [1]"),
        (rdma("{ports: [0]}"), "warden.yaml:4: probes[0].rdma.ports[0]: \"0\" is no port"),
        (rdma("{require: 0}"), "warden.yaml:4: probes[0].rdma.require: \"0\" is unknown: use all, any, or"),
        (
            rdma("{devices: [mlx5_0, mlx5_1], require: 9}"),
            "warden.yaml:4: probes[0].rdma.require: is above the number of ports that the 2 named devices can have, 4",
        ),
        (rdma("{devices: [mlx5_0, mlx5_1], ports: [1], require: 3}"), "probes[0].rdma.require: is above the number"),
        (rdma("{minRate: fast}"), "warden.yaml:4: probes[0].rdma.minRate: \"fast\" is no rate"),
        (rdma("{minRate: 0}"), "warden.yaml:4: probes[0].rdma.minRate: \"0\" is no rate"),
        (
            rdma("{deviceNodes: [umad]}"),
            "probes[0].rdma.deviceNodes[0]: \"umad\" is unknown: use some of uverbs, rdma_cm",
        ),
        (rdma("{details: yes}"), "warden.yaml:4: probes[0].rdma.details: \"yes\" is not a boolean"),
        (rdma("{device: [mlx5_0]}"), "warden.yaml:4: probes[0].rdma.device: unknown key; did you mean devices?"),
        (nvme("{device: [nvme0]}"), "warden.yaml:4: probes[0].nvme.device: unknown key; did you mean devices?"),
        (nvme("{devices: []}"), "warden.yaml:4: probes[0].nvme.devices: is empty"),
        (nvme("{exclude: ['a b']}"), "probes[0].nvme.exclude[0]: \"a b\" is no controller: use a name (nvme0)"),
        (nvme("{devices: [PHX1], exclude: ['PHX*']}"), "probes[0].nvme.exclude: PHX* leaves out PHX1"),
        (nvme("{devices: [nvme0n1]}"), "devices[0]: \"nvme0n1\" is no controller's name: that is nvme0"),
        (nvme("{devices: [/dev/nvme0]}"), "devices[0]: \"/dev/nvme0\" is no controller's name: that is nvme0"),
        (nvme("{grace: soon}"), "probes[0].nvme.grace: \"soon\" is not a duration"),
        (nvme("{percentageUsed: {warn: 95}}"), "probes[0].nvme.percentageUsed: has no effect without smart: true"),
        (nvme("{smart: true, percentageUsed: {warn: 256}}"), "percentageUsed.warn: \"256\" is no limit: use percent"),
        (
            nvme("{smart: true, percentageUsed: {warn: 95, fail: 94}}"),
            "warden.yaml:4: probes[0].nvme.percentageUsed.fail: 94 is below warn, which is 95",
        ),
        (nvme("{smart: true, temperature: {hot: 90}}"), "probes[0].nvme.temperature.hot: unknown key"),
        (nvme("{smart: true, criticalWarning: {readonly: warn}}"), "unknown key; did you mean readOnly?"),
        (nvme("{smart: true, spareBelowThreshold: bad}"), "\"bad\" is unknown: use ignore, warn or fail"),
        (gpu("{count: many}"), "probes[0].gpu.count: \"many\" is no count: use 0 to 256"),
        (gpu("{devices: [gpu0]}"), "probes[0].gpu.devices[0]: \"gpu0\" is no GPU: use a PCI address"),
        (gpu("{devices: ['18:00.0'], exclude: ['0000:*']}"), "probes[0].gpu.exclude: 0000:* leaves out 0000:18:00.0"),
        (
            gpu("{devices: ['18:00.0'], count: 2}"),
            "probes[0].gpu.count: is above the number of devices that are named, 1",
        ),
        (gpu("{vendors: [nvidia]}"), "probes[0].gpu.vendors[0]: \"nvidia\" is no PCI vendor"),
        (gpu("{nvidiaSmi: {}}"), "probes[0].gpu.nvidiaSmi.command: is missing"),
        (gpu("{memoryUsed: {warn: 90}}"), "probes[0].gpu.memoryUsed: has no effect without nvidiaSmi"),
        (gpu("{xid: {fatal: [79], warn: [79]}}"), "probes[0].gpu.xid.warn[0]: 79 is listed twice: keep one"),
        (gpu("{xid: {fatal: [x]}}"), "probes[0].gpu.xid.fatal[0]: \"x\" is no Xid: use its number"),
        (gpu("{xid: on}"), "probes[0].gpu.xid: must be off, or a map with the keys fatal, warn"),
        (kmsg("{since: ever}"), "probes[0].kmsg.since: \"ever\" is unknown: use now or boot"),
        (kmsg("{builtIn: false}"), "probes[0].kmsg.builtIn: leaves no rule"),
        (kmsg("{rules: []}"), "probes[0].kmsg.rules: is empty"),
        (kmsg("{rules: [{name: a, class: warn}]}"), "rules[0].match: is missing: write the text of the line"),
        (kmsg("{rules: [{name: a, match: x}]}"), "rules[0].class: is missing: say what such a line means"),
        (kmsg("{rules: [{name: a, match: '*', class: warn}]}"), "rules[0].match: \"*\" would be found in every line"),
        (kmsg("{rules: [{name: a, match: x, class: bad}]}"), "\"bad\" is unknown: use fatal, warn or ignore"),
        (
            kmsg("{rules: [{name: a, match: x, class: warn, for: recovery}]}"),
            "rules[0].for: recovery needs until, the line that tells of it",
        ),
        (exec("{}"), "warden.yaml:4: probes[0].exec.command: is missing"),
        (exec("{command: []}"), "warden.yaml:4: probes[0].exec.command: is empty"),
        (exec("{command: ['']}"), "warden.yaml:4: probes[0].exec.command[0]: is empty"),
        (exec("{command: ls -l}"), "warden.yaml:4: probes[0].exec.command: must be a list such as [a, b]"),
        (exec("{command: [ls], env: [A]}"), "probes[0].exec.env: must be a map such as {NAME: value}"),
        (exec("{command: [ls], env: {A=B: c}}"), "probes[0].exec.env: \"A=B\" cannot be a variable's name"),
        ("probes: [{name: a, type: health-file}]\n".to_owned(), "probes[0].healthFile: is missing"),
        (file("/"), "warden.yaml:4: probes[0].healthFile.path: \"/h/a/\" names no file"),
        (
            file(", maxAge: 10m"),
            "warden.yaml:4: probes[0].healthFile.deadAfter: 10m must be longer than maxAge, which is 10m",
        ),
        (file("}\n    timeout: 2m\n    #"), "warden.yaml:5: probes[0].timeout: 2m must be below healthFile.maxAge"),
        (
            "healthFile: /h/a\nprobes: [{name: health-file, type: csi}]\n".to_owned(),
            "warden.yaml:2: probes[0].name: \"health-file\" is the name",
        ),
        ("groups: [{name: g, probes: [a]}]\n".to_owned(), "groups[0].probes[0]: no probe of this file is named \"a\""),
        (groups("[{name: g, probes: []}]"), "warden.yaml:2: groups[0].probes: is empty"),
        (
            groups("[{name: g, probes: [a, d]}]"),
            "warden.yaml:2: groups[0].probes[1]: no probe of this file is named \"d\"",
        ),
        (groups("[{name: g, probes: [a, a]}]"), "groups[0].probes[1]: \"a\" is already in group \"g\""),
        (
            groups("[{name: g, probes: [a]}, {name: h, probes: [b, a]}]"),
            "groups[1].probes[1]: \"a\" is already in group \"g\"",
        ),
        (
            groups("[{name: g, probes: [a]}, {name: g, probes: [b]}]"),
            "groups[1].name: another group or probe is named \"g\"",
        ),
        (groups("[{name: a, probes: [a]}]"), "groups[0].name: another group or probe is named \"a\""),
        (groups("[{name: g, probes: [a, b], require: 3}]"), "groups[0].require: 3 cannot be had of 2 probes"),
        (groups("[{name: g, probes: [a, b], require: 0}]"), "groups[0].require: \"0\" is unknown"),
        (
            groups("[{name: g, probes: [a, b], require: most}]"),
            "groups[0].require: \"most\" is unknown: use all, any, or",
        ),
    ] {
        let said = refused(&text);
        assert!(said.contains(words), "{text}\n{said}");
    }
}

#[test]
fn what_is_no_settings_text_is_refused_quickly() {
    let laughs: String = std::iter::once("a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned())
        .chain(
            (1..12).map(|level| format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 9].join(", "))),
        )
        .collect();
    for (text, words) in [
        (b"".to_vec(), "warden.yaml:1: the file sets nothing"),
        (b"# nothing\n".to_vec(), "warden.yaml:1: the file sets nothing"),
        (b"{}".to_vec(), "the file sets nothing"),
        (b"[a]".to_vec(), "warden.yaml:1: the file must be a map of keys"),
        (b"eyJhbGciOi.secret.token".to_vec(), "warden.yaml:1: the file must be a map of keys"),
        (b"v: 1\n---\nv: 2\n".to_vec(), "warden.yaml:2: a second document begins"),
        (b"v: 1\nv: 2\n".to_vec(), "warden.yaml:2: the key \"v\" is written twice"),
        (b"probes:\n\t- name: a\n".to_vec(), "warden.yaml:2: a tab in the indentation"),
        (b"v: 1\nvmodule: \xff\xfe\n".to_vec(), "warden.yaml:2: not UTF-8 text"),
        (b"v: &v [*v]\n".to_vec(), "warden.yaml:1: an alias stands within what it refers to"),
        (laughs.into_bytes(), "the file becomes too large here"),
        (vec![b'x'; 10 * 1024 * 1024], "has more than 64 KiB"),
        (vec![b'['; 20], "lies deeper than"),
        (vec![b'['; 64 * 1024], "not YAML"),
    ] {
        let said = refused(&text);
        assert!(said.contains(words), "{words}\n{said}");
        assert!(!said.contains("secret"), "{said}");
    }
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("warden.yaml");
    assert!(refused_in(folder.path()).contains("--config=warden.yaml: cannot read it: No such file"));
    fs::create_dir(&path).unwrap();
    assert!(refused_in(folder.path()).contains("--config=warden.yaml is a folder"));
    fs::remove_dir(&path).unwrap();
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert!(refused_in(folder.path()).contains("--config=warden.yaml is a pipe"));
    fs::remove_file(&path).unwrap();
    let _listener = UnixListener::bind(&path).unwrap();
    assert!(refused_in(folder.path()).contains("--config=warden.yaml is a socket"));
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
    assert!(refused_in(folder.path()).contains("--config=warden.yaml is a device"));
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("warden.yaml", &path).unwrap();
    assert!(refused_in(folder.path()).contains("symbolic links"));
}

#[test]
fn every_problem_is_told_at_once_and_no_secret() {
    let said = refused(
        "timeout: 0\nstartGrace: soon\nprobes:\n  - {name: a, type: exec, exec: {command: [x], env: {TOKEN: [sekrit]}}}\n  \
         - {name: b, type: csi, period: often}\n",
    );
    for line in
        ["warden.yaml:2: startGrace", "warden.yaml:4: probes[0].exec.env.TOKEN", "warden.yaml:5: probes[1].period"]
    {
        assert!(said.lines().any(|said| said.contains(line)), "{line}\n{said}");
    }
    assert!(!said.contains("sekrit"));
}

#[test]
fn the_command_line_wins_and_print_says_where_each_value_is_from() {
    let folder = tempfile::tempdir().unwrap();
    let text = "startGrace: 5s\nfailureThreshold: 3\nhealthFile: /h/health\nprobes:\n  - name: fabric\n    type: exec\n    \
                exec: {command: [check, \"1\"], env: {TOKEN: sekrit}}\n  - {name: driver, type: csi, timeout: 1m}\n\
                groups:\n  - {name: g, probes: [fabric, driver], require: 1}\n";
    fs::write(folder.path().join("warden.yaml"), text).unwrap();
    let print = |more: &[&str]| {
        let output = call(folder.path(), &["config", "print"], more);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let typed = ["--start-grace=7s", "--csi-address", "/csi/csi.sock", "--topology=b.io/y=2", "--topology", "c.io/z=3"];
    let all: Value = serde_json::from_str(&print(&[&typed[..], &["--output=json"]].concat())).unwrap();
    for (pointer, value, from) in [
        ("/startGrace", json!("7s"), "flag"),
        ("/failureThreshold", json!(3), "warden.yaml:2"),
        ("/successThreshold", json!(2), "default"),
        ("/enablePprof", json!(false), "default"),
        ("/onUnhealthy", json!("fence-then-deregister"), "default"),
        ("/topology", json!("b.io/y=2,c.io/z=3"), "flag"),
        ("/allowedUids", json!("0"), "default"),
        ("/stateDir", json!("/csi"), "default"),
        ("/probes/0/name", json!("health-file"), "warden.yaml:3"),
        ("/probes/0/healthFile/path", json!("/h/health"), "warden.yaml:3"),
        ("/probes/0/timeout", json!("3s"), "default"),
        ("/probes/1/name", json!("fabric"), "warden.yaml:5"),
        ("/probes/1/type", json!("exec"), "warden.yaml:6"),
        ("/probes/1/exec/command", json!(["check", "1"]), "warden.yaml:7"),
        ("/probes/1/exec/env", json!({"TOKEN": "(hidden)"}), "warden.yaml:7"),
        ("/probes/1/failureThreshold", json!(3), "warden.yaml:2"),
        ("/probes/2/timeout", json!("1m"), "warden.yaml:8"),
        ("/probes/2/period", json!("10s"), "default"),
        ("/probes/2/csi/socket", json!("/csi/csi.sock"), "flag --csi-address"),
        ("/groups/0/require", json!(1), "warden.yaml:10"),
    ] {
        assert_eq!(all.pointer(pointer), Some(&json!({"value": value, "from": from})), "{pointer}");
    }
    let table = print(&typed);
    assert!(table.lines().any(|line| line.split_whitespace().eq(["startGrace", "7s", "flag"])), "{table}");
    assert!(!table.contains("sekrit"));

    // What is printed as a file is refused while a value is hidden, and then means the same.
    let yaml = print(&[&typed[..], &["--output=yaml"]].concat());
    assert!(yaml.starts_with("# Values of env are hidden") && !yaml.contains("sekrit"), "{yaml}");
    fs::write(folder.path().join("warden.yaml"), &yaml).unwrap();
    let (code, words) = code_and_words(&call(folder.path(), &["config", "check"], &[]));
    assert!(code == 1 && words.contains("probes[0].exec.env.TOKEN: has no value"), "{code}: {words}");
    let filled = yaml.replace("\"TOKEN\":", "\"TOKEN\": sekrit");
    fs::write(folder.path().join("warden.yaml"), filled).unwrap();
    let again: Value = serde_json::from_str(&print(&["--output=json"])).unwrap();
    let values = |all: &Value| without_origins(all.clone());
    assert_eq!(values(&again), values(&all), "{yaml}");
}

fn without_origins(value: Value) -> Value {
    match value {
        Value::Object(mut entries) if entries.contains_key("from") => entries.remove("value").unwrap(),
        Value::Object(entries) => entries.into_iter().map(|(key, value)| (key, without_origins(value))).collect(),
        Value::Array(items) => items.into_iter().map(without_origins).collect(),
        other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => other,
    }
}

#[test]
fn odd_settings_are_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let text = "probes:\n  - {name: a, type: csi, onFailure: warn, period: 1s}\n";
    fs::write(folder.path().join("warden.yaml"), text).unwrap();
    let output = call(folder.path(), &["config", "check"], &[]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "good: 1 probe, 0 groups\n");
    let (code, words) = code_and_words(&output);
    assert_eq!(code, 0);
    assert!(words.contains("warning: warden.yaml:2: probes[0]: timeout 3s is above period 1s"), "{words}");
    assert!(words.contains("warning: warden.yaml: every probe has onFailure: warn"), "{words}");
}

#[test]
fn a_warning_speaks_of_one_flag_and_of_several() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("warden.yaml"), "v: 0\n").unwrap();
    for (flags, words) in [
        (&["--probe-timeout=1s"][..], "so --probe-timeout has no effect"),
        (&["--probe-timeout=1s", "--probe-interval=2s"], "so --probe-timeout, --probe-interval have no effect"),
        (&["--state-dir=/s", "--flap-window=1m"], "so --flap-window, --state-dir have no effect"),
    ] {
        let (_, said) = code_and_words(&call(folder.path(), &["config", "check"], flags));
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn numbers_may_have_gos_forms() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("warden.yaml"), "failureThreshold: 0b11\n").unwrap();
    let typed = ["--health-port=0x2648", "-v=0x2", "--success-threshold=0_7", "--output=json"];
    let output = call(folder.path(), &["config", "print"], &typed);
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    for (key, number) in [("healthPort", 9800), ("v", 2), ("successThreshold", 7), ("failureThreshold", 3)] {
        assert_eq!(all[key]["value"], json!(number), "{key}");
    }
    let (code, words) = code_and_words(&call(folder.path(), &["config", "print"], &["--health-port=0x"]));
    assert!(code == 2 && words.contains("--health-port") && words.contains("\"0x\" is not a whole number"), "{words}");
}

#[test]
fn usage_is_exit_2_and_help_exit_0() {
    let folder = tempfile::tempdir().unwrap();
    for (command, code) in [
        (&["config"][..], 2),
        (&["config", "chekc"], 2),
        (&["config", "check", "--nonsense"], 2),
        (&["config", "print", "--output=xml"], 2),
        (&["config", "--help"], 0),
        (&["config", "check", "--help"], 0),
        (&["config", "print", "--help"], 0),
    ] {
        let output = call(folder.path(), command, &[]);
        assert_eq!(output.status.code(), Some(code), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(call(folder.path(), &["run"], &["--version"]).status.code(), Some(0), "the file is not read");
}

#[tokio::test]
async fn a_file_takes_the_place_of_flags() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.health("ERROR no link");
    let mut kubelet = bed.kubelet();
    let config = bed.at("warden.yaml");
    fs::write(
        &config,
        format!("healthFile: {}\nonUnhealthy: observe\nfailureThreshold: 1\nv: 4\n", bed.health_file().display()),
    )
    .unwrap();
    let agent = bed.agent(&[&format!("--config={}", config.display())]);
    kubelet.registered().await;
    agent.logs("Received GetInfo call").await;
    agent.logs("driver health changed").await;
    assert!(bed.shown(), "observing leaves the registration alone");
}
