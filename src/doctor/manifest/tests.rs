use super::*;
use crate::doctor::finding::Status;

/// As README has it: nothing to be said against it.
const GOOD: &str = r#"
apiVersion: v1
kind: ServiceAccount
metadata: {name: x}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: x-node}
spec:
  template:
    spec:
      tolerations:
        - {key: rdma.unavailable, operator: Equal, value: "true", effect: NoSchedule}
        - {operator: Exists}
      containers:
        - name: driver
          image: registry.example.com/driver:1
          args: [--endpoint=$(CSI_ENDPOINT), --nodeid=x]
          env:
            - {name: CSI_ENDPOINT, value: "unix:///plugin/csi.sock"}
          volumeMounts:
            - {name: plugin-dir, mountPath: /plugin}
        - name: node-driver-registrar
          image: registry.example.com:5000/csi-warden:0.1.0@sha256:abc
          args:
            - --csi-address=/csi/csi.sock
            - --kubelet-registration-path=/var/lib/kubelet/plugins/x.example.com/csi.sock
            - --health-file=/health/health
            - --sysfs-root=/host/sys
          volumeMounts:
            - {name: plugin-dir, mountPath: /csi}
            - {name: registration-dir, mountPath: /registration}
            - {name: health, mountPath: /health}
            - {name: sys, mountPath: /host/sys, readOnly: true}
        - name: prober
          image: registry.example.com/prober:1
          command: [/csi-warden, probe, --write, /shared/health, --period, 10s, --, /check]
          volumeMounts:
            - {name: health, mountPath: /shared}
      volumes:
        - {name: plugin-dir, hostPath: {path: /var/lib/kubelet/plugins/x.example.com/}}
        - {name: registration-dir, hostPath: {path: /var/lib/kubelet/plugins_registry}}
        - {name: health, emptyDir: {}}
        - {name: sys, hostPath: {path: /sys}}
"#;

fn failed(text: &str) -> Vec<String> {
    let findings = of_text("m.yaml", text);
    let failed = findings.iter().filter(|finding| finding.status == Status::Fail);
    failed.map(|finding| format!("{} {} -> {}", finding.check, finding.seen, finding.fix.as_deref().unwrap())).collect()
}

#[test]
fn a_manifest_as_it_should_be_passes_every_check() {
    let findings = of_text("m.yaml", GOOD);
    let statuses: Vec<_> = findings.iter().map(|finding| (finding.check, finding.status)).collect();
    assert_eq!(
        statuses,
        [
            ("manifest-taint-effect", Status::Pass),
            ("manifest-tolerations", Status::Pass),
            ("manifest-endpoint", Status::Pass),
            ("manifest-registration-folder", Status::Pass),
            ("manifest-mounts", Status::Pass),
            ("manifest-health-file", Status::Pass),
        ],
        "{findings:#?}"
    );
}

/// Each row breaks one thing of the good manifest, and only that is told, with its line.
#[test]
fn each_mistake_is_told_with_its_line_and_how_to_mend_it() {
    for (from, to, check, words, fix) in [
        (
            "effect: NoSchedule",
            "effect: Noschedule",
            "manifest-taint-effect",
            "m.yaml:13: \"Noschedule\" is no effect",
            "effect: NoSchedule",
        ),
        (
            "effect: NoSchedule",
            "effect: no-execute",
            "manifest-taint-effect",
            "\"no-execute\" is no effect",
            "effect: NoExecute",
        ),
        (
            "operator: Equal, value: \"true\"",
            "operator: Exists, value: \"true\"",
            "manifest-tolerations",
            "Exists with the value \"true\"",
            "operator: Equal",
        ),
        (
            "operator: Equal, value: \"true\"",
            "operator: equal, value: \"true\"",
            "manifest-tolerations",
            "\"equal\" is no operator",
            "operator: Equal",
        ),
        (
            "key: rdma.unavailable, operator: Equal, value: \"true\"",
            "key: rdma., operator: Exists",
            "manifest-tolerations",
            "does not match by prefix",
            "whole key",
        ),
        (
            "{operator: Exists}",
            "{operator: Equal}",
            "manifest-tolerations",
            "m.yaml:14: no key",
            "operator: Exists tolerates everything",
        ),
        (
            "unix:///plugin/csi.sock",
            "unix:///plugin/other.sock",
            "manifest-endpoint",
            "driver (line 18) listens at unix:///plugin/other.sock, which is /var/lib/kubelet/plugins/x.example.com/other.sock on the host",
            "same file",
        ),
        ("unix:///plugin/csi.sock", "unix:///tmp/csi.sock", "manifest-endpoint", "lies in no mount", "at /tmp"),
        (
            "--csi-address=/csi/csi.sock",
            "--csi-address=/csj/csi.sock",
            "manifest-endpoint",
            "--csi-address /csj/csi.sock lies in no mount",
            "at /csj",
        ),
        (
            "plugins/x.example.com/csi.sock",
            "plugins/y.example.com/csi.sock",
            "manifest-endpoint",
            "the kubelet is told /var/lib/kubelet/plugins/y.example.com/csi.sock",
            "--kubelet-registration-path=/var/lib/kubelet/plugins/x.example.com/csi.sock",
        ),
        (
            "{name: plugin-dir, hostPath: {path: /var/lib/kubelet/plugins/x.example.com/}}",
            "{name: plugin-dir, emptyDir: {}}",
            "manifest-endpoint",
            "which the kubelet cannot reach",
            "hostPath: {path: /var/lib/kubelet/plugins/x.example.com,",
        ),
        (
            "path: /var/lib/kubelet/plugins_registry",
            "path: /var/lib/kubelet/plugins",
            "manifest-registration-folder",
            "/registration is /var/lib/kubelet/plugins on the host",
            "plugins_registry",
        ),
        (
            "{name: registration-dir, hostPath: {path: /var/lib/kubelet/plugins_registry}}",
            "{name: registration-dir, emptyDir: {}}",
            "manifest-registration-folder",
            "is no hostPath",
            "plugins_registry",
        ),
        (
            "            - {name: registration-dir, mountPath: /registration}\n",
            "",
            "manifest-registration-folder",
            "nothing is mounted at /registration",
            "mount a hostPath",
        ),
        (
            "mountPath: /registration",
            "mountPath: /registration, readOnly: true",
            "manifest-registration-folder",
            "read-only",
            "readOnly: false",
        ),
        (
            "mountPath: /csi}",
            "mountPath: /csi, readOnly: true}",
            "manifest-mounts",
            "driver socket's folder is mounted read-only",
            "readOnly: false",
        ),
        ("{name: sys, mountPath", "{name: sis, mountPath", "manifest-mounts", "no volume is named sis", "volumes"),
        (
            "path: /sys}",
            "path: /sys/class}",
            "manifest-mounts",
            "--sysfs-root=/host/sys is not the host's /sys",
            "path: /sys",
        ),
        (
            "{name: health, mountPath: /health}",
            "{name: health, mountPath: /health/health, subPath: health}",
            "manifest-health-file",
            "itself is mounted",
            "its folder",
        ),
        (
            "{name: health, mountPath: /shared}",
            "{name: health, mountPath: /shared, readOnly: true}",
            "manifest-health-file",
            "read-only",
            "emptyDir",
        ),
        (
            "/shared/health",
            "/shared/elf",
            "manifest-health-file",
            "writes /shared/elf, which is another file",
            "same file",
        ),
        (
            "            - {name: health, mountPath: /shared}\n",
            "            []\n",
            "manifest-health-file",
            "lies in no mount",
            "emptyDir",
        ),
    ] {
        assert!(GOOD.contains(from), "{from}");
        let told = failed(&GOOD.replacen(from, to, 1));
        // A mount of a volume that is not there may break others, too.
        let told = if to.contains("sis") { told[..1].to_vec() } else { told };
        assert_eq!(told.len(), 1, "{to}: {told:#?}");
        assert!(told[0].starts_with(check) && told[0].contains(words), "{to}: {told:#?}");
        assert!(told[0].split(" -> ").nth(1).unwrap().contains(fix), "{to}: {told:#?}");
    }
}

#[test]
fn a_sub_path_of_a_config_map_is_told_for_what_must_change() {
    let mounted = "{name: health, mountPath: /health/health, subPath: health}";
    let text = GOOD
        .replace("{name: health, emptyDir: {}}", "{name: health, configMap: {name: health}}")
        .replace("{name: health, mountPath: /health}", mounted);
    let told = failed(&text);
    assert!(
        told[0].contains("mounted by subPath health of a ConfigMap: it never updates and is read-only"),
        "{told:#?}"
    );
    assert!(told[1].contains("prober: /shared/health is written here, into a mount that is read-only"), "{told:#?}");
    let config = GOOD
        .replace("--health-file=/health/health", "--config=/health/w.yaml")
        .replace("{name: health, emptyDir: {}}", "{name: health, configMap: {name: h}}")
        .replace("{name: health, mountPath: /health}", "{name: health, mountPath: /health/w.yaml, subPath: w.yaml}");
    assert!(
        failed(&config)[0].contains("--config is mounted by subPath w.yaml of a ConfigMap"),
        "{:#?}",
        failed(&config)
    );
}

#[test]
fn taints_are_found_wherever_they_are_written() {
    for (text, line) in [
        ("apiVersion: v1\nkind: Node\nspec:\n  taints:\n  - {key: a, effect: noSchedule}\n", 5),
        (
            "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Node\n  spec: {taints: [{key: a, effect: NoSchedul}]}\n",
            6,
        ),
        (
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nregisterWithTaints:\n- {key: a, effect: Noexecute}\n",
            4,
        ),
        (
            "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - name: a\n    args: [--set-taint=rdma.unavailable=true:noschedule]\n",
            6,
        ),
        ("apiVersion: v1\nkind: Node\nspec:\n  taints:\n  - key: a\n", 5),
    ] {
        let told = failed(text);
        assert_eq!(told.len(), 1, "{text}: {told:#?}");
        assert!(told[0].starts_with(&format!("manifest-taint-effect m.yaml:{line}: ")), "{told:#?}");
        assert_eq!(
            failed(
                &text
                    .replace("noSchedule", "NoSchedule")
                    .replace("NoSchedul}", "NoSchedule}")
                    .replace("Noexecute", "NoExecute")
                    .replace("noschedule", "PreferNoSchedule")
                    .replace("key: a\n", "key: a\n    effect: NoExecute\n")
            ),
            Vec::<String>::new()
        );
    }
    let schema =
        "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nspec: {taints: [{key: a, effect: x}]}\n";
    assert_eq!(failed(schema), Vec::<String>::new());
}

#[test]
fn what_cannot_be_told_is_unknown_and_never_failed() {
    let unknown = |text: &str| {
        let findings = of_text("m.yaml", text);
        assert!(findings.iter().all(|finding| finding.status != Status::Fail), "{findings:#?}");
        let unknown = findings.into_iter().filter(|finding| finding.status == Status::Unknown);
        unknown.map(|finding| format!("{} {:?}", finding.seen, finding.fix)).collect::<Vec<_>>().join("\n")
    };
    assert!(unknown("a: {{ .Values.x }}\n").contains("helm template"));
    assert!(unknown("a: [\n").contains("m.yaml:2: not YAML"));
    assert!(unknown("just: words\n").contains("no Kubernetes object"));
    let open =
        GOOD.replace("{name: CSI_ENDPOINT, value: \"unix:///plugin/csi.sock\"}", "{name: CSI_ENDPOINT, valueFrom: {}}");
    assert!(unknown(&open).contains("variable without a written value"), "{}", unknown(&open));
    let moved = GOOD.replace("/var/lib/kubelet/plugins_registry", "/data/kubelet/plugins_registry");
    assert!(unknown(&moved).contains("which of them is the kubelet's root folder?"), "{}", unknown(&moved));
    let tcp = GOOD.replace("unix:///plugin/csi.sock", "tcp://127.0.0.1:1");
    assert!(unknown(&tcp).contains("no path of a unix socket"));
    assert_eq!(check(Path::new("/nowhere.yaml"))[0].status, Status::Unknown);
}

#[test]
fn a_registrar_that_watches_nothing_may_see_the_drivers_folder_read_only() {
    let text = GOOD
        .replace("            - --health-file=/health/health\n", "")
        .replace("mountPath: /csi}", "mountPath: /csi, readOnly: true}");
    assert_eq!(failed(&text), Vec::<String>::new());
}

#[test]
fn an_endpoint_of_another_program_is_not_taken_for_the_drivers() {
    let other = "      containers:\n        - {name: proxy, args: [--endpoint=https://storage.example.com]}\n";
    let text = GOOD.replacen("      containers:\n", other, 1);
    assert_ne!(text, GOOD);
    let findings = of_text("m.yaml", &text);
    assert!(findings.iter().all(|finding| finding.status == Status::Pass), "{findings:#?}");
}

#[test]
fn other_pods_are_left_alone() {
    let text = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - name: a\n    image: nginx\n    volumeMounts: [{name: v, mountPath: /etc/x, subPath: x}]\n  volumes: [{name: v, configMap: {name: c}}]\n";
    let findings = of_text("m.yaml", text);
    assert!(
        findings.iter().all(|finding| matches!(finding.status, Status::Pass | Status::NotApplicable)),
        "{findings:#?}"
    );
}
