//! Promise: `csi-warden` tells the truth about NVMe controllers, GPUs and what the kernel log says of them.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod bed;

use bed::Bed;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tokio::time::Instant;

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Exit code, what JSON says, stderr.
fn probe(root: &Path, flags: &[&str]) -> (Option<i32>, Value, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_csi-warden"))
        .args(["probe", "--output=json", "--timeout=20s"])
        .arg(format!("--sysfs-root={}", root.display()))
        .arg(format!("--dev-root={}", root.display()))
        .args(flags)
        .output()
        .unwrap();
    let said = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), said["probes"][0].clone(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn the_probe_command_shows_each_controller_gpu_and_fault() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "class/nvme/nvme0/state", "live\n");
    write(root, "class/nvme/nvme1/state", "dead\n");
    let (code, said, err) = probe(root, &["--type=nvme"]);
    assert_eq!((code, &said["reason"]), (Some(1), &json!("ControllerDead")), "{err}");
    assert_eq!(
        (&said["observed"]["nvme0"]["outcome"], &said["observed"]["nvme1"]["state"]),
        (&json!("success"), &json!("dead"))
    );
    assert_eq!(probe(root, &["--type=nvme", "--device=nvme0"]).0, Some(0));
    let (code, said, _) = probe(root, &["--type=nvme", "--device=nvme0,nvme7"]);
    assert_eq!((code, &said["reason"]), (Some(1), &json!("DeviceGone")));

    write(root, "bus/pci/devices/0000:18:00.0/vendor", "0x10de\n");
    write(root, "bus/pci/devices/0000:18:00.0/class", "0x030200\n");
    write(root, "kmsg", "3,5,0,-;nvme nvme1: Removing after probe failure status: -19\n");
    let (code, said, _) = probe(root, &["--type=gpu"]);
    assert_eq!((code, &said["observed"]["0000:18:00.0"]["outcome"]), (Some(0), &json!("success")));
    assert_eq!(probe(root, &["--type=gpu", "--device=0000:19:00.0"]).0, Some(1));

    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let line = format!("3,6,{},-;nvme nvme1: Removing after probe failure status: -19\n", time.tv_sec * 1_000_000);
    write(root, "kmsg", &line);
    let (code, said, _) = probe(root, &["--type=kmsg"]);
    assert_eq!((code, &said["observed"]["nvme-removed/nvme1"]["lines"]), (Some(1), &json!(1)));
    fs::remove_file(root.join("kmsg")).unwrap();
    let (code, said, _) = probe(root, &["--type=kmsg"]);
    assert_eq!((code, &said["reason"]), (Some(2), &json!("KernelLogMissing")));
    for (flags, words) in [
        (["--type=kmsg", "--device=nvme0"], "--device is not for --type kmsg"),
        (["--type=gpu", "--device=gpu0"], "--device: \"gpu0\" is no GPU"),
        (["--type=nvme", "--device=a b"], "--device: \"a b\" is no controller"),
        (["--type=smart", "--device=a"], "use rdma, nvme, gpu or kmsg"),
    ] {
        let (code, _, err) = probe(root, &flags);
        assert!(code == Some(2) && err.contains(words), "{flags:?}: {err}");
    }
}

#[tokio::test]
async fn a_fatal_line_withdraws_the_driver_at_once_and_the_recovery_brings_it_back() {
    let bed = Bed::new();
    let _driver = bed.driver();
    let dev = bed.at("dev");
    fs::create_dir(&dev).unwrap();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mkfifoat(rustix::fs::CWD, dev.join("kmsg"), mode).unwrap();
    // As the device does, it tells when there is something to read.
    let mut kernel = fs::OpenOptions::new().read(true).write(true).open(dev.join("kmsg")).unwrap();
    let mut sequence = 0;
    let mut says = move |text: &str| {
        sequence += 1;
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        kernel.write_all(format!("3,{sequence},{},-;{text}\n", time.tv_sec * 1_000_000).as_bytes()).unwrap();
    };
    let config = bed.at("warden.yaml");
    // By the period alone nothing would happen within this test.
    fs::write(&config, "probes: [{name: log, type: kmsg, period: 1h, timeout: 20s}]\n").unwrap();
    let (config, dev) = (format!("--config={}", config.display()), format!("--dev-root={}", dev.display()));
    let agent =
        bed.agent(&[&config, &dev, "--confirm-interval=50ms", "--recovery-hold=100ms", "--success-threshold=1"]);
    bed::eventually("the driver is registered", || bed.registration_socket().exists()).await;
    let began = Instant::now();
    says("mlx5_core 0000:41:00.0: poll_health:852:(pid 0): device's health compromised - reached miss count");
    bed::eventually("the driver is withdrawn", || !bed.registration_socket().exists()).await;
    assert!(began.elapsed() < Duration::from_secs(20), "{}", agent.log());
    assert!(agent.log().contains("mlx5-health"), "{}", agent.log());
    says("mlx5_core 0000:41:00.0: mlx5_health_try_recover:341:(pid 77): health recovery succeeded");
    bed::eventually("the driver is back", || bed.registration_socket().exists()).await;
}
