//! docs/metrics.md lists every family with its type and labels, and none that is not there.

use csi_warden::metrics::Metrics;
use csi_warden::policy::outcome::{Health, Outcome, Reason};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const DOC: &str = include_str!("../docs/metrics.md");

/// Type and labels by name.
type Families = BTreeMap<String, (String, BTreeSet<String>)>;

#[test]
fn every_family_is_listed_with_its_type_and_labels_and_no_other() {
    assert_eq!(listed(), rendered(&fully_used().render()));
}

#[test]
fn every_family_of_the_examples_is_listed() {
    let examples = DOC.split("```promql").nth(1).unwrap_or_default();
    for word in examples.split(|char: char| !char.is_ascii_alphanumeric() && char != '_') {
        assert!(!word.starts_with("csi_warden_") || listed().contains_key(word), "{word}");
    }
}

fn fully_used() -> Metrics {
    let metrics = Metrics::new();
    metrics.set_driver_name("x.example.com");
    metrics.observe_call("/csi.v1.Identity/Probe", &Ok(()), Duration::from_millis(1));
    metrics.set_registered(true);
    metrics.set_verdict(Health::Healthy);
    metrics.count_transition(Health::Unhealthy, Some(&Reason::new("PortDown", "mlx5_0/1")));
    metrics.observe_round("fabric", &Outcome::Success, Duration::from_millis(1));
    metrics.count_refusal();
    metrics.count_publication();
    metrics.count_silence();
    metrics.observe_proxied("/csi.v1.Node/NodeGetInfo", tonic::Code::Ok, Duration::from_millis(1));
    metrics.set_fenced(Some("health"));
    metrics.set_bypass(false);
    metrics.set_override(Some("on"));
    metrics.count_fence_refusal("NodeStageVolume");
    drop((metrics.proxied_call(), metrics.proxy_connection()));
    metrics
}

fn listed() -> Families {
    let rows = DOC.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<String> = row.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let labels = cells[3].split(", ").filter(|label| !label.is_empty()).map(str::to_owned).collect();
        (cells[1].clone(), (cells[2].clone(), labels))
    })
    .collect()
}

fn rendered(text: &str) -> Families {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types
        .map(|(name, kind)| {
            let sample = text.lines().find(|line| {
                line.strip_prefix(name)
                    .is_some_and(|rest| ["{", " ", "_bucket{"].iter().any(|next| rest.starts_with(next)))
            });
            let labels = sample.and_then(|line| line.split_once('{')?.1.split_once('}'));
            let labels = labels
                .map(|(labels, _)| labels.split(',').filter_map(|label| Some(label.split_once('=')?.0.to_owned())))
                .into_iter()
                .flatten()
                .filter(|label| label != "le")
                .collect();
            (name.to_owned(), (kind.to_owned(), labels))
        })
        .collect()
}
