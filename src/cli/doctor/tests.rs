use super::*;

fn findings() -> Vec<Finding> {
    vec![
        Finding::pass("driver-socket", "the driver x.example.com answers at /csi/csi.sock"),
        Finding::fail(
            "endpoint",
            "--csi-address is /csi/csi.sock, but the kubelet is told /var/lib/kubelet/plugins/x.example.com/other.sock",
            "--kubelet-registration-path=/var/lib/kubelet/plugins/x.example.com/csi.sock",
        ),
        Finding::unknown("kubelet-root", "the kubelet's process cannot be seen from here").with_fix("hostPID: true"),
        Finding::not_applicable("nvme-smart", "no probe with nvme.smart: true"),
    ]
}

fn shown(columns: usize) -> String {
    table(&findings(), Look { terminal: false, colours: false, columns })
}

#[test]
fn the_table_reads_well() {
    insta::assert_snapshot!(shown(80), @r"
    CHECK          STATUS
    endpoint       FAIL
      --csi-address is /csi/csi.sock, but the kubelet is told
      /var/lib/kubelet/plugins/x.example.com/other.sock
      fix: --kubelet-registration-path=/var/lib/kubelet/plugins/x.example.com/csi.sock
    kubelet-root   unknown
      the kubelet's process cannot be seen from here
      fix: hostPID: true
    driver-socket  pass
      the driver x.example.com answers at /csi/csi.sock
    nvme-smart     not applicable
      no probe with nvme.smart: true

    1 passed, 1 failed, 1 unknown, 1 not applicable
    ");
    insta::assert_snapshot!(shown(40), @r"
    CHECK          STATUS
    endpoint       FAIL
      --csi-address is /csi/csi.sock, but
      the kubelet is told
      /var/lib/kubelet/plugins/x.example.com
      /other.sock
      fix: --kubelet-registration-path=/var/lib/kubelet/plugins/x.example.com/csi.sock
    kubelet-root   unknown
      the kubelet's process cannot be seen
      from here
      fix: hostPID: true
    driver-socket  pass
      the driver x.example.com answers at
      /csi/csi.sock
    nvme-smart     not applicable
      no probe with nvme.smart: true

    1 passed, 1 failed, 1 unknown, 1 not
    applicable
    ");
}

#[test]
fn only_a_fix_is_wider_than_the_terminal_and_stands_in_one_line() {
    for columns in 20..130 {
        for line in shown(columns).lines() {
            assert!(line.starts_with("  fix: ") || width(line) <= columns, "{columns}: {line}");
        }
        assert!(
            shown(columns)
                .contains("  fix: --kubelet-registration-path=/var/lib/kubelet/plugins/x.example.com/csi.sock\n")
        );
    }
}

#[test]
fn json_has_every_check_and_their_sum() {
    let said: serde_json::Value = serde_json::from_str(&as_json(&findings())).unwrap();
    assert_eq!(said["summary"], serde_json::json!({"pass": 1, "fail": 1, "unknown": 1, "notApplicable": 1}));
    assert_eq!(
        said["checks"][0],
        serde_json::json!({
            "check": "driver-socket", "status": "pass", "fix": null,
            "seen": "the driver x.example.com answers at /csi/csi.sock",
        })
    );
    assert_eq!(said["checks"][3]["status"], "notApplicable");
}

#[test]
fn flags_are_well_formed() {
    flags().debug_assert();
}
