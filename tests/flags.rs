//! Promise: a manifest made for the replaced registrar works with only the image changed: its flags, forms and exit codes.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::{Agent, Bed, free_port, get_later, is_root, status_becomes};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_csi-warden")).args(arguments).output().unwrap()
}

fn code_and_words(arguments: &[&str]) -> (i32, String) {
    let output = run(arguments);
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn exit_codes_are_the_replaced_registrars() {
    let required = "--kubelet-registration-path=/k/csi.sock";
    for (arguments, code) in [
        (&["--version"][..], 0),
        (&["-version"], 0),
        (&["--help"], 0),
        (&["-h"], 0),
        (&["--mode=kubelet-registration-probe", required], 0),
        (&["-mode", "kubelet-registration-probe", required], 0),
        (&["--mode=kubelet-registration-probe"], 1),
        (&[], 1),
        (&["--nonsense"], 2),
        (&["--v=x"], 2),
        (&["--timeout=1"], 2),
        (&["--timeout=-1s"], 2),
        (&["--enable-pprof=yes"], 2),
        (&["--health-port=x"], 2),
        (&["--v"], 2),
        (&["--logtostderr"], 2),
        (&["--feature-gates=x"], 2),
        (&["--logging-format=xml", "--version"], 1),
        (&["--logging-format=json", "--vmodule=a=1", "--version"], 1),
        (&["--log-flush-frequency=0", "--version"], 1),
        (&["--log-text-split-stream", "--version"], 1),
        (&["--log-json-info-buffer-size=1Mi", "--version"], 1),
        (&["--log-text-split-stream=false", "--log-json-info-buffer-size=0", "--version"], 0),
        (&["--vmodule=a", "--version"], 2),
        (&["--logging-format=json", "--v=4", "--log-flush-frequency=1s", "--automaxprocs", "--version"], 0),
    ] {
        let (seen, words) = code_and_words(arguments);
        assert_eq!(seen, code, "{arguments:?}: {words}");
    }
}

#[test]
fn usage_errors_name_the_flag_and_settings_errors_what_to_do() {
    assert!(code_and_words(&["--nonsense"]).1.contains("--nonsense"));
    assert!(code_and_words(&["--health-interval=5"]).1.contains("--health-interval"));
    let required = "--kubelet-registration-path=/k/csi.sock";
    for (flags, words) in [
        (&["--http-endpoint=:1", "--health-port=2"][..], "only one of --http-endpoint and --health-port"),
        (&["--http-endpoint=9809"], "--http-endpoint"),
        (&["--health-port=70000"], "--health-port"),
        (&["--on-unhealthy=fence", "--proxy=off"], "--on-unhealthy=fence needs the proxy, and --proxy=off"),
        (
            &["--on-unhealthy=fence-then-deregister", "--proxy=off"],
            "--on-unhealthy=fence-then-deregister needs the proxy",
        ),
        (&["--on-unhealthy=nonsense"], "nonsense"),
        (&["--proxy=yes"], "--proxy=\"yes\" is unknown: use auto, on or off"),
        (&["--refusal-code=internal"], "--refusal-code=\"internal\" is unknown"),
        (&["--proxy=off", "--topology=a.io/x=1"], "--topology needs the proxy, and --proxy=off"),
        (&["--proxy=off", "--fence-max-volumes"], "--fence-max-volumes needs the proxy, and --proxy=off"),
        (&["--drain-timeout=5s"], "--drain-timeout=5s must be 0 (wait for ever) or at least --deregister-after=15s"),
        (&["--proxy-socket=/elsewhere/x.sock"], "must be another file in the folder of --csi-address=/run/csi/socket"),
        (&["--proxy-socket=/run/csi/socket"], "must be another file in the folder"),
        (&["--topology=topology.rdma.kubernetes.io/switch=a"], "NodeRestriction"),
        (&["--topology=a.io/x"], "--topology: \"a.io/x\": must be key=value"),
        (&["--topology-file=/nowhere/t"], "--topology-file=/nowhere/t: cannot read it"),
        (&["--failure-threshold=0"], "--failure-threshold must be above zero"),
        (&["--success-threshold=0"], "--success-threshold must be above zero"),
        (&["--health-interval=0"], "--health-interval must be above zero"),
        (&["--health-max-age=10m", "--health-dead-after=5m"], "--health-dead-after"),
        (&["--recovery-hold=1h"], "--max-recovery-hold"),
        (&["--health-file=/health/"], "names no file"),
        (&["--health-file=.."], "names no file"),
        (&["--timeout=0"], "--timeout must be above zero"),
        (&["--health-interval=1ns"], "--health-interval=1ns is too short"),
        (&["--health-max-age=1ms"], "--health-max-age=1ms is too short"),
    ] {
        let mut all = vec![required, "--plugin-registration-path=/tmp"];
        all.extend(flags);
        let (code, said) = code_and_words(&all);
        assert_eq!(code, 1, "{flags:?}: {said}");
        assert!(said.contains(words), "{flags:?}: {said}");
    }
}

#[test]
fn version_goes_to_stdout_and_names_the_program_as_it_was_called() {
    let output = run(&["--version"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.trim_end(), format!("{} {}", env!("CARGO_BIN_EXE_csi-warden"), env!("CARGO_PKG_VERSION")));
    assert!(output.stderr.is_empty());
}

#[test]
fn under_the_registrars_name_a_positional_is_no_subcommand() {
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
        .arg0("/csi-node-driver-registrar")
        .args(["demo"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--kubelet-registration-path is required"));
    assert_eq!(code_and_words(&["nonsense"]).0, 2);
}

#[tokio::test]
async fn every_flag_of_a_known_manifest_is_taken_in_both_styles_and_the_last_one_wins() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let port = free_port();
    let agent = bed.agent(&[
        "-v=5",
        "--v",
        "0",
        "-timeout=30s",
        "--connection-timeout=10s",
        "--enable-pprof=true",
        "--automaxprocs",
        "--mode=node-register",
        &format!("-health-port={port}"),
        "--log-flush-frequency=1s",
        "--vmodule=server=4",
        "ignored",
        "--nonsense",
    ]);
    kubelet.registered().await;
    agent.logs("--connection-timeout is deprecated").await;
    agent.logs("maxprocs:").await;
    agent.logs("Received GetInfo call").await;
    let address = format!("127.0.0.1:{port}");
    status_becomes(&address, "/healthz", 200).await;
    assert_eq!(get_later(&address, "/healthz").await.unwrap(), (200, "ok".into()));
    assert_eq!(get_later(&address, "/debug/pprof/cmdline").await.unwrap().0, 200);
    assert_eq!(get_later(&address, "/nonsense").await.unwrap().0, 404);
}

#[tokio::test]
async fn json_lines_are_json_with_the_known_keys() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let mut kubelet = bed.kubelet();
    let mut agent = bed.agent(&["--logging-format=json", "--v=4"]);
    kubelet.registered().await;
    agent.terminate().await;
    let log = agent.log();
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(
            line["ts"].as_f64().unwrap() > 1.7e12
                && line["msg"].is_string()
                && line["caller"].as_str().unwrap().contains(".rs:")
        );
    }
    assert!(log.contains(r#""msg":"Received NotifyRegistrationStatus call""#), "{log}");
}

/// Report 15: ports and address families.
#[tokio::test]
async fn a_taken_port_ends_it_before_anything_is_created() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut agent = bed.agent(&[&format!("--http-endpoint={address}")]);
    assert_eq!(agent.exit().await.code(), Some(1));
    assert!(agent.log().contains(&address), "{}", agent.log());
    assert!(bed.registration_folder().is_empty());
}

#[tokio::test]
async fn every_form_of_the_http_address_is_reached() {
    let bed = Bed::new();
    let _driver = bed.driver();
    for (form, reached) in [
        (":PORT", &["127.0.0.1:PORT", "[::1]:PORT"][..]),
        ("0.0.0.0:PORT", &["127.0.0.1:PORT", "[::1]:PORT"]),
        ("[::1]:PORT", &["[::1]:PORT"]),
        ("localhost:PORT", &["127.0.0.1:PORT"]),
        ("127.0.0.1:PORT", &["127.0.0.1:PORT"]),
    ] {
        let port = free_port().to_string();
        let mut agent = bed.agent(&[&format!("--http-endpoint={}", form.replace("PORT", &port))]);
        for address in reached {
            status_becomes(&address.replace("PORT", &port), "/healthz", 200).await;
        }
        agent.terminate().await;
    }
}

/// Report 15d: without IPv6, IPv4 works.
#[tokio::test]
async fn without_ipv6_a_wildcard_listens_on_ipv4() {
    if !is_root() || Command::new("ip").arg("-V").output().is_err() {
        // A network namespace needs root, and its loopback needs ip; CI has both.
        return;
    }
    let bed = Bed::new();
    let _driver = bed.driver();
    let agent = bed.command(&["--http-endpoint=:9809"]);
    let mut command = Command::new("unshare");
    let script = "ip link set lo up && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 && exec \"$@\"";
    command.args(["--net", "sh", "-c", script, "sh"]).arg(agent.get_program()).args(agent.get_args());
    let agent = Agent::start(command, bed.at("agent.log"));
    agent.logs("CSI driver name").await;
    let ask =
        "exec 3<>/dev/tcp/127.0.0.1/9809 && printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3 && timeout 10 head -1 <&3";
    let pid = agent.child.id().to_string();
    let asked = Command::new("nsenter").args(["-t", &pid, "-n", "bash", "-c", ask]).output().unwrap();
    let said = String::from_utf8_lossy(&asked.stdout);
    assert!(said.starts_with("HTTP/1.0 200"), "{said}\n{}", String::from_utf8_lossy(&asked.stderr));
    let ask = ask.replace("127.0.0.1", "::1");
    let asked = Command::new("nsenter").args(["-t", &pid, "-n", "bash", "-c", &ask]).output().unwrap();
    assert!(!asked.status.success(), "the namespace has IPv6 after all, so this proves nothing");
}

/// A value that is no UTF-8 is named by its flag.
#[test]
fn a_value_that_is_not_utf_8_is_named_by_its_flag() {
    use std::os::unix::ffi::OsStrExt;
    let value = std::ffi::OsStr::from_bytes(b"--csi-address=/t/\xff.sock");
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden")).arg(value).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--csi-address"), "{output:?}");
}
