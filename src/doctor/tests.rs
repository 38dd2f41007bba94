use super::*;
use crate::config::probes::HostTree;
use crate::config::watched::{Defaults, Watched};
use crate::doctor::finding::Status;
use crate::doctor::place::{Mounted, Own};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A host in a folder, and what a check says of it.
struct Host {
    folder: tempfile::TempDir,
    place: Place,
}

const MODULES: &str =
    "mlx5_ib 1 0 - Live 0x0\nmlx5_core 1 1 mlx5_ib, Live 0x0\nib_uverbs 1 1 - Live 0x0\nib_core 1 2 - Live 0x0\n";

impl Host {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["sys/class", "dev/infiniband", "proc", "etc", "csi", "plugins_registry"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        let place = Place {
            host: HostTree { sysfs: at("sys"), dev: at("dev"), proc: at("proc") },
            etc: at("etc"),
            etc_is_doubtful: false,
            sockets: None,
            probes: Vec::new(),
            own: Own::default(),
        };
        Self { folder, place }
    }

    /// With a Mellanox card, its modules, an IPoIB interface and NetworkManager.
    fn with_fabric() -> Self {
        let host = Self::new();
        host.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x15b3\n");
        host.write("sys/bus/pci/devices/0000:01:00.0/class", "0x020700\n");
        host.write("sys/devices/ib/mlx5_0/ports/1/gids/0", "fe80::1\n");
        host.write("sys/devices/net/ib0/type", "32\n");
        for (class, name, target) in [("infiniband", "mlx5_0", "ib/mlx5_0"), ("net", "ib0", "net/ib0")] {
            host.link(&format!("../../devices/{target}"), &format!("sys/class/{class}/{name}"));
        }
        host.write("proc/modules", MODULES);
        host.write("etc/NetworkManager/conf.d/10-rdma.conf", "[keyfile]\nunmanaged-devices=interface-name:ib*\n");
        host
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), text).unwrap();
    }

    fn link(&self, target: &str, path: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        symlink(target, self.at(path)).unwrap();
    }

    fn watches(mut self, yaml: &str) -> Self {
        use clap::CommandFactory;
        let text = format!("probes: [{yaml}]");
        let flags = crate::cli::run::RunFlags::command();
        let (file, problems) = crate::config::file::understand(Path::new("t.yaml"), &text, &flags).unwrap();
        assert!(problems.is_empty(), "{problems:?}");
        let two = std::num::NonZeroU32::new(2).unwrap();
        let defaults = Defaults {
            driver_socket: "/csi/csi.sock".into(),
            health_file: None,
            health_interval: Duration::from_secs(30),
            health_max_age: Duration::from_secs(90),
            health_dead_after: None,
            thresholds: crate::policy::probe_verdict::Thresholds { failure: two, success: two },
            confirm_interval: Duration::from_secs(1),
            host: self.place.host.clone(),
        };
        self.place.probes = Watched::new(&defaults, Some(&file)).unwrap().probes;
        self
    }

    /// The agent's paths; the driver socket's folder is `csi` here and `<root>/plugins/x` for the kubelet.
    fn with_sockets(mut self, told: &str, mounted: &[(&str, &str)]) -> Self {
        self.place.sockets = Some(Sockets {
            driver: self.at("csi/csi.sock"),
            told: told.into(),
            registration_folder: self.at("plugins_registry"),
            state_folder: Some(self.at("csi")),
        });
        let mount = |root: &str, at: PathBuf| Mounted { root: root.into(), at, kind: "ext4".into(), read_only: false };
        let mut mounts = vec![mount("/", "/".into())];
        mounts.extend(mounted.iter().map(|(root, at)| mount(root, self.at(at))));
        self.place.own.mounts = mounts;
        self
    }

    fn says(&self, job: Job) -> (Status, String, String) {
        let findings = job(&self.place);
        let worst = findings.iter().max_by_key(|finding| match finding.status {
            Status::Fail => 3,
            Status::Unknown => 2,
            Status::Pass => 1,
            Status::NotApplicable => 0,
        });
        let worst = worst.unwrap();
        (worst.status, worst.seen.clone(), worst.fix.clone().unwrap_or_default())
    }

    fn path(&self, check: &str) -> (Status, String, String) {
        let (_, job) = PATHS.into_iter().find(|(name, _)| *name == check).unwrap();
        self.says(job)
    }
}

#[track_caller]
fn assert_says(said: &(Status, String, String), status: Status, seen: &str, fix: &str) {
    assert!(said.0 == status && said.1.contains(seen) && said.2.contains(fix), "{said:#?}");
    assert!(status != Status::Fail || !said.2.is_empty(), "a failure has a fix");
}

#[test]
fn a_node_without_such_hardware_is_left_alone() {
    let host = Host::new();
    for job in [
        modules::check,
        rdma::gids,
        rdma::device_nodes,
        rdma::udev,
        network_manager::check,
        hardware::smart,
        hardware::kernel_log,
        confinement::network,
    ] as [Job; 8]
    {
        assert_says(&host.says(job), Status::NotApplicable, "", "");
    }
    assert!(PATHS.iter().all(|(check, _)| host.path(check).0 == Status::NotApplicable));
}

#[test]
fn a_fabric_as_it_should_be_passes() {
    let host = Host::with_fabric();
    assert!(
        modules::check(&host.place).iter().all(|finding| finding.status == Status::Pass),
        "{:?}",
        modules::check(&host.place)
    );
    assert_says(&host.says(rdma::gids), Status::Pass, "GID 0 of 1 port can be read", "");
    assert_says(&host.says(network_manager::check), Status::Pass, "leaves ib0 alone", "");
    assert_says(&host.says(hardware::sysfs_whole), Status::Pass, "2 links", "");
}

#[test]
fn a_device_that_a_probe_leaves_out_is_not_looked_at() {
    let host = Host::with_fabric().watches("{name: r, type: rdma, rdma: {exclude: [mlx5_0]}}");
    for check in [rdma::gids, rdma::device_nodes] {
        assert_says(&host.says(check), Status::Unknown, "no RDMA device", "");
    }
}

#[test]
fn modules_that_are_missing_kept_away_or_in_the_wrong_order_fail() {
    let modules = modules::check as Job;
    let with = |table: &str, conf: &str| {
        let host = Host::with_fabric();
        host.write("proc/modules", table);
        host.write("etc/modprobe.d/x.conf", conf);
        host.says(modules)
    };
    assert_says(
        &with("mlx5_core 1\nib_core 1\n", ""),
        Status::Fail,
        "not loaded: ib_uverbs, mlx5_ib",
        "modprobe -a ib_uverbs mlx5_ib",
    );
    assert_says(
        &with("mlx5_core 1\nib_core 1\n", "# x\nblacklist ib-uverbs\n"),
        Status::Fail,
        "x.conf:2 says \"blacklist ib_uverbs\"",
        "remove the line",
    );
    assert_says(
        &with("mlx5_core 1\nib_core 1\n", "install mlx5_ib /bin/false\n"),
        Status::Fail,
        "install mlx5_ib",
        "remove the line",
    );
    assert_says(
        &with("ib_uverbs 1\nmlx5_ib 1\nmlx5_core 1\nib_core 1\n", ""),
        Status::Fail,
        "loaded ib_uverbs after mlx5_ib",
        "softdep mlx5_ib pre: ib_core ib_uverbs mlx5_core",
    );
    assert_says(
        &with(MODULES, "softdep ib_uverbs pre: mlx5_ib\n"),
        Status::Fail,
        "x.conf:1 turns the order of mlx5_ib and ib_uverbs round",
        "remove",
    );
    assert_says(
        &with(MODULES, "softdep mlx5_ib post: ib_core\n"),
        Status::Fail,
        "turns the order of ib_core and mlx5_ib round",
        "remove",
    );
    let good = with(MODULES, "softdep mlx5_ib pre: ib_core ib_uverbs mlx5_core\n");
    assert_eq!(good.0, Status::Pass, "{good:?}");
    // The driver on PCI before the core is how most nodes boot.
    assert_eq!(with("mlx5_ib 1\nib_uverbs 1\nib_core 1\nmlx5_core 1\n", "").0, Status::Pass);
    let built_in = Host::with_fabric();
    fs::remove_file(built_in.at("proc/modules")).unwrap();
    let unlisted = &modules::check(&built_in.place)[0];
    assert!(unlisted.status == Status::Unknown && unlisted.seen.contains("no list of modules"), "{unlisted:?}");
    for trace in ["module/ib_core", "class/infiniband_verbs", "bus/pci/drivers/mlx5_core", "module/mlx5_ib"] {
        fs::create_dir_all(built_in.at(&format!("sys/{trace}"))).unwrap();
    }
    assert_eq!(modules::check(&built_in.place)[0].status, Status::Pass);
    assert_eq!(modules::check(&built_in.place)[1].status, Status::Unknown);
}

#[test]
fn network_manager_on_an_interface_over_infiniband_fails_and_the_containers_own_etc_says_nothing() {
    let mut host = Host::with_fabric();
    host.write("etc/NetworkManager/conf.d/99.conf", "[keyfile]\nunmanaged-devices=interface-name:eth*\n");
    assert_says(
        &host.says(network_manager::check),
        Status::Fail,
        "may manage ib0",
        "unmanaged-devices+=interface-name:ib*",
    );
    host.place.etc_is_doubtful = true;
    assert_says(&host.says(network_manager::check), Status::Unknown, "may be the container's own", "--etc-root");
    host.place.etc_is_doubtful = false;
    fs::remove_dir_all(host.at("etc/NetworkManager")).unwrap();
    assert_says(&host.says(network_manager::check), Status::NotApplicable, "no ", "");
}

#[test]
fn a_device_without_its_files_fails_and_the_wrong_number_too() {
    let host = Host::with_fabric();
    assert_says(&host.says(rdma::device_nodes), Status::Fail, "module ib_uverbs is not loaded", "udevadm trigger");
    host.write("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n");
    host.write("sys/class/infiniband_verbs/uverbs0/dev", "231:192\n");
    assert_says(&host.says(rdma::device_nodes), Status::Fail, "infiniband/uverbs0", "udevadm trigger");
    host.write("dev/infiniband/uverbs0", "");
    assert_says(&host.says(rdma::device_nodes), Status::Fail, "is no character device", "udevadm trigger");
}

#[test]
fn udev_before_the_kubelet_is_told_by_its_unit_or_not_at_all() {
    let host = Host::with_fabric();
    assert_says(&host.says(rdma::udev), Status::Unknown, "", "systemctl cat kubelet");
    host.write(
        "etc/systemd/system/kubelet.service.d/10.conf",
        "[Unit]\nAfter=network.target systemd-udev-settle.service\n",
    );
    assert_says(&host.says(rdma::udev), Status::Pass, "10.conf starts the kubelet after", "");
    host.write("etc/systemd/system/kubelet.service.d/10.conf", "[Unit]\n#After=systemd-udev-settle.service\n");
    assert_eq!(host.says(rdma::udev).0, Status::Unknown);
}

#[test]
fn device_files_younger_than_the_kubelet_fail() {
    let kind = rustix::fs::FileType::CharacterDevice;
    let host = Host::with_fabric();
    let (mode, number) = (rustix::fs::Mode::from(0o666), rustix::fs::makedev(1, 3));
    if rustix::fs::mknodat(rustix::fs::CWD, host.at("dev/infiniband/uverbs0"), kind, mode, number).is_err() {
        // Not in this container.
        return;
    }
    host.write("proc/77/comm", "kubelet\n");
    host.write("proc/77/stat", "77 (kubelet) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 12 0 4200 99 1");
    host.write("proc/stat", "btime 1000\n");
    assert_says(&host.says(rdma::udev), Status::Fail, "s after the kubelet started", "systemd-udev-settle.service");
    host.write("proc/stat", "btime 99999999999\n");
    assert_says(&host.says(rdma::udev), Status::Pass, "in this boot", "");
}

#[test]
fn probes_of_hardware_need_their_capabilities() {
    let nvme = || Host::new().watches("{name: d, type: nvme, nvme: {smart: true}}");
    let mut host = nvme();
    assert_says(&host.says(hardware::smart), Status::Unknown, "capabilities", "");
    host.place.own.capabilities = Some(0);
    assert_says(&host.says(hardware::smart), Status::Fail, "CAP_SYS_ADMIN is missing", "add: [SYS_ADMIN]");
    host.place.own.capabilities = Some(1 << 21);
    assert_says(&host.says(hardware::smart), Status::Pass, "", "");
    host.write("sys/class/nvme/nvme0/state", "live\n");
    assert_says(&host.says(hardware::smart), Status::Fail, "there is no", "--dev-root");
    let mut other = Host::new().watches("{name: d, type: nvme, nvme: {smart: true, exclude: [nvme0]}}");
    other.place.own.capabilities = Some(1 << 21);
    other.write("sys/class/nvme/nvme0/state", "live\n");
    assert_says(&other.says(hardware::smart), Status::Pass, "", "");
    let off = Host::new().watches("{name: d, type: nvme}");
    assert_eq!(off.says(hardware::smart).0, Status::NotApplicable);
    let log = Host::new().watches("{name: k, type: kmsg}");
    assert_says(&log.says(hardware::kernel_log), Status::Fail, "there is no", "/dev/kmsg");
    log.write("dev/kmsg", "");
    assert_says(&log.says(hardware::kernel_log), Status::Fail, "is not the kernel log", "/dev/kmsg");
}

#[test]
fn a_restricted_kernel_log_fails_without_its_capability() {
    let mut host = Host::new().watches("{name: k, type: kmsg}");
    let (mode, number) = (rustix::fs::Mode::from(0o666), rustix::fs::makedev(1, 11));
    let kind = rustix::fs::FileType::CharacterDevice;
    if rustix::fs::mknodat(rustix::fs::CWD, host.at("dev/kmsg"), kind, mode, number).is_err()
        || fs::File::open(host.at("dev/kmsg")).is_err()
    {
        // Not in this container.
        return;
    }
    host.write("proc/sys/kernel/dmesg_restrict", "1\n");
    host.place.own.capabilities = Some(0);
    assert_says(&host.says(hardware::kernel_log), Status::Fail, "dmesg_restrict is 1", "add: [SYSLOG]");
    host.place.own.capabilities = Some(1 << 34);
    assert_eq!(host.says(hardware::kernel_log).0, Status::Pass);
}

#[test]
fn a_sys_that_is_mounted_in_part_fails() {
    let host = Host::new();
    assert_says(&host.says(hardware::sysfs_whole), Status::Unknown, "no device", "");
    host.link("../../devices/pci/nvme/nvme0", "sys/class/nvme/nvme0");
    assert_says(&host.says(hardware::sysfs_whole), Status::Fail, "class/nvme/nvme0", "path: /sys");
    fs::remove_dir_all(host.at("sys/class")).unwrap();
    assert_says(&host.says(hardware::sysfs_whole), Status::Fail, "no class folder", "path: /sys");
}

const TOLD: &str = "/var/lib/kubelet/plugins/x/csi.sock";

#[test]
fn a_driver_socket_that_is_another_file_for_the_kubelet_is_found() {
    let endpoint = |told: &str, root: &str| Host::new().with_sockets(told, &[(root, "csi")]).path("endpoint");
    assert_says(&endpoint(TOLD, "/var/lib/kubelet/plugins/x"), Status::Pass, "on the host", "");
    // `/var` is a file system of its own.
    assert_says(&endpoint(TOLD, "/lib/kubelet/plugins/x"), Status::Pass, "on the host", "");
    assert_says(
        &endpoint("/var/lib/kubelet/plugins/x/csi2.sock", "/lib/kubelet/plugins/x"),
        Status::Fail,
        "but the kubelet is told",
        "plugins/x/csi.sock",
    );
    assert_says(
        &endpoint(TOLD, "/var/lib/kubelet/plugins/y"),
        Status::Fail,
        "plugins/y",
        "path: /var/lib/kubelet/plugins/x}",
    );
    assert_says(
        &endpoint(TOLD, "/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/d"),
        Status::Fail,
        "empty-dir",
        "mount hostPath",
    );
    // The root folder may be a link.
    assert_says(&endpoint(TOLD, "/data/kubelet/plugins/x"), Status::Unknown, "/data/kubelet", "ls -l");
    assert_says(&endpoint(TOLD, "/"), Status::Unknown, "/ of a ext4", "ls -l");
    assert_eq!(Host::new().with_sockets(TOLD, &[]).path("endpoint").0, Status::Unknown, "no mount at all");
}

#[test]
fn the_registration_folder_is_the_kubelets_and_can_be_written() {
    let registry = "/var/lib/kubelet/plugins_registry";
    let at = |root: &str| Host::new().with_sockets(TOLD, &[(root, "plugins_registry")]);
    assert_says(&at(registry).path("registration-folder"), Status::Pass, "can be written", "");
    assert_says(
        &at("/var/lib/kubelet/plugins").path("registration-folder"),
        Status::Fail,
        "/var/lib/kubelet/plugins;",
        registry,
    );
    assert_says(&at("/").path("registration-folder"), Status::Unknown, "a file system of its own", registry);
    let mut read_only = at(registry);
    read_only.place.own.mounts[1].read_only = true;
    assert_says(&read_only.path("registration-folder"), Status::Fail, "read-only", "readOnly: false");
    let gone = at(registry);
    fs::remove_dir(gone.at("plugins_registry")).unwrap();
    assert_says(&gone.path("registration-folder"), Status::Fail, "there is no folder", registry);
}

#[test]
fn another_root_folder_of_the_kubelet_is_found_where_its_process_is_seen() {
    let host = Host::new().with_sockets(TOLD, &[("/var/lib/kubelet/plugins_registry", "plugins_registry")]);
    assert_says(&host.path("kubelet-root"), Status::Unknown, "cannot be seen", "--root-dir");
    host.write("proc/77/comm", "kubelet\n");
    host.write("proc/77/cmdline", "/usr/bin/kubelet\0");
    assert_says(&host.path("kubelet-root"), Status::Pass, "/var/lib/kubelet", "");
    host.write("proc/77/cmdline", "/usr/bin/kubelet\0--root-dir=/data/kubelet\0");
    assert_says(&host.path("kubelet-root"), Status::Unknown, "/data/kubelet", "/data/kubelet/plugins_registry");
    // What the kubelet itself sees decides.
    fs::create_dir_all(host.at("proc/77/root/data/kubelet/plugins_registry")).unwrap();
    assert_says(&host.path("kubelet-root"), Status::Fail, "/data/kubelet", "/data/kubelet/plugins_registry");
    fs::remove_dir(host.at("proc/77/root/data/kubelet/plugins_registry")).unwrap();
    host.link(&host.at("plugins_registry").display().to_string(), "proc/77/root/data/kubelet/plugins_registry");
    assert_says(&host.path("kubelet-root"), Status::Pass, "is the kubelet's /data/kubelet/plugins_registry", "");
}

#[test]
fn what_the_kubelet_itself_sees_decides_about_the_endpoint() {
    let host = Host::new().with_sockets(TOLD, &[("/data/kubelet/plugins/x", "csi")]);
    host.write("proc/77/comm", "kubelet\n");
    assert_eq!(host.path("endpoint").0, Status::Unknown);
    fs::create_dir_all(host.at("proc/77/root/var/lib/kubelet/plugins/x")).unwrap();
    assert_says(&host.path("endpoint"), Status::Fail, "but the kubelet is told", "path: /var/lib/kubelet/plugins/x}");
    fs::remove_dir(host.at("proc/77/root/var/lib/kubelet/plugins/x")).unwrap();
    host.link(&host.at("csi").display().to_string(), "proc/77/root/var/lib/kubelet/plugins/x");
    assert_eq!(host.path("endpoint").0, Status::Pass);
}

#[test]
fn a_health_file_that_cannot_change_fails() {
    let host = Host::new();
    let file = host.at("csi/health").display().to_string();
    let mut host = host
        .watches(&format!("{{name: h, type: health-file, healthFile: {{path: {file}}}}}"))
        .with_sockets(TOLD, &[("/x", "csi")]);
    assert_says(&host.path("health-file"), Status::Unknown, "not written yet", "probe --write");
    host.write("csi/health", "OK\n");
    assert_says(&host.path("health-file"), Status::Pass, "", "");
    host.place.own.mounts.push(Mounted { root: "/x".into(), at: file.into(), kind: "ext4".into(), read_only: false });
    assert_says(&host.path("health-file"), Status::Fail, "itself is mounted", "folder");
    host.place.own.mounts.truncate(1);
    host.place.own.in_pod = true;
    assert_says(&host.path("health-file"), Status::Fail, "lies in no mount", "emptyDir");
}

#[test]
fn link_events_come_only_in_the_hosts_network() {
    let mut host = Host::new().watches("{name: f, type: rdma}");
    assert_says(&host.says(confinement::network), Status::Unknown, "", "--proc-root");
    host.link("net:[1]", "proc/1/ns/net");
    host.place.own.network = Some("net:[1]".into());
    assert_says(&host.says(confinement::network), Status::Pass, "the host's", "");
    host.place.own.network = Some("net:[2]".into());
    assert_says(&host.says(confinement::network), Status::NotApplicable, "do not come here", "hostNetwork: true");
    host.place.own.netlink_trouble = Some("operation not permitted".into());
    assert_says(&host.says(confinement::network), Status::NotApplicable, "netlink cannot be opened", "seccompProfile");
}

#[test]
fn selinux_is_named_only_where_it_may_be_the_cause() {
    let mut host = Host::new();
    let said = |host: &Host, denied| {
        let finding = confinement::selinux(&host.place, denied);
        (finding.status, finding.seen, finding.fix.unwrap_or_default())
    };
    assert_says(&said(&host, true), Status::NotApplicable, "no SELinux", "");
    host.place.own.context = Some("system_u:system_r:container_t:s0:c1,c2".into());
    assert_says(&said(&host, false), Status::NotApplicable, "does not enforce", "");
    host.write("sys/fs/selinux/enforce", "1");
    assert_says(&said(&host, false), Status::Unknown, "container_t", "ausearch");
    assert_says(&said(&host, true), Status::Fail, "denied", "spc_t");
    host.place.own.context = Some("system_u:system_r:spc_t:s0".into());
    assert_says(&said(&host, true), Status::Pass, "spc_t", "");
}

#[tokio::test]
async fn a_tree_that_is_not_there_costs_its_own_checks_alone() {
    let mut host = Host::with_fabric();
    host.place.host.proc = "/nowhere".into();
    let agent = Agent::Absent { why: "none".into(), is_named: false };
    let findings = node(host.place.clone(), &agent).await;
    let of = |check: &str| findings.iter().find(|finding| finding.check == check).unwrap().status;
    assert_eq!(
        (of("rdma-module-order"), of("rdma-gids"), of("registration")),
        (Status::Unknown, Status::Pass, Status::NotApplicable)
    );
    let names: Vec<_> = NODE.iter().chain(&PATHS).map(|(check, _)| *check).collect();
    assert!(names.iter().all(|name| findings.iter().any(|finding| finding.check == *name)), "{findings:#?}");
}

#[tokio::test(start_paused = true)]
async fn a_check_that_hangs_is_unknown() {
    let place = Arc::new(Host::new().place);
    let hangs: Job = |_| {
        std::thread::sleep(Duration::from_secs(60));
        Vec::new()
    };
    let findings = on_a_lane("x", hangs, place).await;
    assert_eq!(findings, [Finding::unknown("x", "no answer within 5s")]);
}

#[test]
fn an_agent_that_waits_too_long_or_hears_nothing_of_a_probe_fails() {
    let answer = |phase: &str, seconds: f64, age: Option<f64>| {
        let probe = serde_json::json!({
            "name": "f", "type": "rdma", "outcome": "success", "reason": null, "message": null, "ageSeconds": age, "verdict": "healthy",
            "failures": 0, "successes": 1, "failureThreshold": 2, "successThreshold": 2, "onFailure": "fail", "nextInSeconds": 1.0,
        });
        let registration = serde_json::json!({"phase": phase, "forSeconds": seconds, "confirmed": true, "socket": null, "trouble": null});
        let whole = serde_json::json!({"version": "0", "driver": "x", "registration": registration, "health": null, "probes": [probe], "next": ""});
        let snapshot: Snapshot = serde_json::from_value(whole).unwrap();
        let probes = Host::new().watches("{name: f, type: rdma}").place.probes;
        let findings = agent::check(&snapshot, &probes);
        assert_eq!((findings[0].check, findings[1].check), ("registration", "last-probe"));
        (findings[0].status, findings[1].status)
    };
    for (phase, seconds, age, words) in [
        ("registered", 1.0, Some(0.5), (Status::Pass, Status::Pass)),
        // Three periods of a second, and the time-out of three.
        ("registered", 1.0, Some(5.9), (Status::Pass, Status::Pass)),
        ("registered", 1.0, Some(6.1), (Status::Pass, Status::Fail)),
        ("registered", 1.0, None, (Status::Pass, Status::Unknown)),
        ("waitingForKubelet", 1.0, Some(0.5), (Status::Unknown, Status::Pass)),
        ("waitingForKubelet", 31.0, Some(0.5), (Status::Fail, Status::Pass)),
        ("refused", 1.0, Some(0.5), (Status::Fail, Status::Pass)),
        ("withdrawn", 100.0, Some(0.5), (Status::Unknown, Status::Pass)),
    ] {
        assert_eq!(answer(phase, seconds, age), words, "{phase} {seconds} {age:?}");
    }
    assert!(agent::absent("none", false).iter().all(|finding| finding.status == Status::NotApplicable));
    assert!(agent::absent("none", true).iter().all(|finding| finding.status == Status::Unknown));
}
