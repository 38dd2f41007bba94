//! Checks of Kubernetes manifests, before they reach a cluster: what the API server would take and nothing would work with.

mod pod;
mod report;
mod sockets;
mod storage;
mod taints;

use super::finding::Finding;
use crate::config::yaml::{self, Node, Value};
use pod::Pod;
use report::Report;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Far above any honest bundle.
const MAX_BYTES: u64 = 16 * 1024 * 1024;

/// Their schemas have fields named like those that are looked for.
const SCHEMA: &str = "CustomResourceDefinition";

/// Every check over the file at `path`. A pipe is read to its end, so that `kubectl get -o yaml` can be piped in.
pub fn check(path: &Path) -> Vec<Finding> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
    let name = path.display().to_string();
    let unread = |why: String| vec![Finding::unknown("manifest", format!("{name}: {why}"))];
    if let Err(error) = read {
        return unread(error.to_string());
    }
    if bytes.len() as u64 > MAX_BYTES {
        return unread(format!("more than {} MiB", MAX_BYTES / 1024 / 1024));
    }
    match String::from_utf8(bytes) {
        Ok(text) => of_text(&name, &text),
        Err(_) => unread("not UTF-8".to_owned()),
    }
}

/// Every check over `text`; `name` is the file's, for messages.
pub fn of_text(name: &str, text: &str) -> Vec<Finding> {
    let documents = match yaml::parse_manifests(text) {
        Ok(documents) => documents,
        Err(error) => {
            let seen = format!("{name}:{}: {error}", error.line);
            let template = text.contains("{{").then_some("helm template RELEASE CHART > rendered.yaml");
            let finding = Finding::unknown("manifest", seen);
            return vec![match template {
                Some(fix) => finding.with_fix(format!("render it first: {fix}")),
                None => finding,
            }];
        }
    };
    let mut found = Parts::default();
    documents.iter().for_each(|document| found.look(document));
    if found.objects == 0 {
        return vec![Finding::unknown("manifest", format!("{name}: no Kubernetes object in it"))];
    }
    let pods: Vec<Pod> = found.pods.into_iter().map(Pod::read).collect();
    let mut report = Report::new(name);
    taints::effects(&mut report, &found.taints, &found.tolerations, &pods);
    taints::tolerations(&mut report, &found.tolerations);
    for pod in &pods {
        sockets::endpoints(&mut report, pod);
        sockets::registration(&mut report, pod);
        storage::mounts(&mut report, pod);
        storage::health_file(&mut report, pod);
    }
    report.findings()
}

/// What is looked for, wherever it lies: in a workload, a list of objects, a kubelet's or kubeadm's configuration.
#[derive(Default)]
struct Parts<'node> {
    objects: usize,
    pods: Vec<&'node Node>,
    taints: Vec<&'node Node>,
    tolerations: Vec<&'node Node>,
}

impl<'node> Parts<'node> {
    fn look(&mut self, node: &'node Node) {
        match &node.value {
            Value::Nothing | Value::Text(_) => {}
            Value::List(items) => items.iter().for_each(|item| self.look(item)),
            Value::Map(entries) => {
                let kind = node.get("kind").and_then(Node::text);
                if kind.is_some() && node.get("apiVersion").is_some() {
                    self.objects += 1;
                }
                if kind == Some(SCHEMA) {
                    return;
                }
                if node.get("containers").is_some_and(|containers| !containers.items().is_empty()) {
                    self.pods.push(node);
                }
                for entry in entries {
                    match entry.key.as_str() {
                        "taints" | "registerWithTaints" => self.taints.extend(entry.node.items()),
                        "tolerations" => self.tolerations.extend(entry.node.items()),
                        _ => self.look(&entry.node),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
