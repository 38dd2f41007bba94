//! Topology segments of our own: which keys and values can be node labels that the kubelet may set, and what it says when it may not.

/// Why a segment cannot be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SegmentProblem {
    /// The key is no label's key.
    Key,
    /// The value is no label's value, or empty.
    Value,
    /// The API server lets no kubelet set it, so the driver would never be registered.
    Forbidden,
}

impl SegmentProblem {
    /// What is wrong, and what to do.
    pub fn text(&self) -> &'static str {
        match self {
            Self::Key => {
                "the key must be a label's: an optional lower-case DNS prefix and a slash, then at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
            }
            Self::Value => {
                "the value must be a label's: 1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
            }
            Self::Forbidden => {
                "the NodeRestriction admission forbids kubelets to set labels under kubernetes.io and k8s.io, so the driver would never be registered: use a domain of your own, or node.kubernetes.io/…, kubelet.kubernetes.io/…, topology.kubernetes.io/zone or region"
            }
        }
    }
}

/// Keys under kubernetes.io that a kubelet may set.
///
/// Source: <https://github.com/kubernetes/kubernetes/blob/v1.36.2/staging/src/k8s.io/kubelet/pkg/apis/well_known_labels.go>
const KUBELET_KEYS: [&str; 11] = [
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
];

/// Domains in which a kubelet may set any key, and in those below them.
const KUBELET_DOMAINS: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];

/// Whether the kubelet can label its node so.
///
/// # Errors
/// Why not.
pub fn check_segment(key: &str, value: &str) -> Result<(), SegmentProblem> {
    let (domain, name) = match key.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, key),
    };
    if !is_label_word(name) || domain.is_some_and(|domain| !is_dns_subdomain(domain)) {
        return Err(SegmentProblem::Key);
    }
    if !is_label_word(value) {
        return Err(SegmentProblem::Value);
    }
    let within = |of: &str| {
        domain.is_some_and(|domain| domain == of || domain.strip_suffix(of).is_some_and(|rest| rest.ends_with('.')))
    };
    let reserved = within("kubernetes.io") || within("k8s.io");
    let allowed = KUBELET_KEYS.contains(&key) || KUBELET_DOMAINS.into_iter().any(within);
    if reserved && !allowed { Err(SegmentProblem::Forbidden) } else { Ok(()) }
}

/// A label's name or value. Empty is a value by Kubernetes' rules, but no topology's by CSI's.
fn is_label_word(word: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    word.len() <= 63
        && ends(word.chars().next())
        && ends(word.chars().next_back())
        && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn is_dns_subdomain(domain: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('-')
            && !part.ends_with('-')
            && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    domain.len() <= 253 && domain.split('.').all(part)
}

/// A label of the node that has another value than the driver's topology.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collision {
    /// The label's key.
    pub key: String,
    /// The value of the topology, as NodeGetInfo gave it.
    pub reported: String,
    /// The label's value.
    pub existing: String,
}

impl Collision {
    /// Finds it in what the kubelet says about a failed registration.
    ///
    /// Source: <https://github.com/kubernetes/kubernetes/blob/v1.36.2/pkg/volume/csi/nodeinfomanager/nodeinfomanager.go>
    pub fn find(kubelet_error: &str) -> Option<Self> {
        let rest = kubelet_error.split_once("detected topology value collision: driver reported ")?.1;
        let (reported, existing) = rest.split_once(" but existing label is ")?;
        let (key, reported) = pair(reported)?;
        let (same, existing) = pair(existing)?;
        (key == same).then(|| Self {
            key: key.to_owned(),
            reported: reported.to_owned(),
            existing: existing.to_owned(),
        })
    }

    /// What it means and what helps. `ours`: the value is one of `--topology`.
    pub fn explanation(&self, ours: bool) -> String {
        let Self { key, reported, existing } = self;
        let other = if ours {
            format!("or set --topology={key}={existing}")
        } else {
            "or find out why the driver reports another value than before; that value is the driver's, not ours"
                .to_owned()
        };
        format!(
            "the node's label {key}={existing} differs from the topology {key}={reported}, and the kubelet registers no driver until they agree: kubectl label node NODE --overwrite {key}={reported} (volumes bound to {existing} then no longer fit this node), {other}"
        )
    }
}

/// `"key":"value"`, at the beginning. Neither can contain a quote.
fn pair(text: &str) -> Option<(&str, &str)> {
    let (key, rest) = text.strip_prefix('"')?.split_once("\":\"")?;
    let (value, _) = rest.split_once('"')?;
    Some((key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_kubelets_may_not_set_are_refused_and_others_not() {
        for key in [
            "rack",
            "topology.rdma.example.com/switch",
            "topology.kubernetes.io/zone",
            "topology.kubernetes.io/region",
            "kubernetes.io/hostname",
            "node.kubernetes.io/switch",
            "rdma.node.kubernetes.io/switch",
            "kubelet.kubernetes.io/x",
            "notkubernetes.io/x",
            "a.xk8s.io/x",
            "kubernetes.io.example.com/x",
        ] {
            assert_eq!(check_segment(key, "a"), Ok(()), "{key}");
        }
        for key in [
            "topology.rdma.kubernetes.io/switch",
            "topology.kubernetes.io/switch",
            "kubernetes.io/x",
            "k8s.io/x",
            "rdma.k8s.io/x",
            "node-restriction.kubernetes.io/x",
            "xnode.kubernetes.io/x",
        ] {
            assert_eq!(check_segment(key, "a"), Err(SegmentProblem::Forbidden), "{key}");
        }
    }

    #[test]
    fn keys_and_values_must_be_labels() {
        let long = "x".repeat(64);
        let prefix = format!("{}.io/x", "x".repeat(251));
        for key in [
            "", "/x", "a/", "a//b", "a/b/c", "A.io/x", "a..b/x", "-a/x", "a-/x", "-x", "x.", "x y", "é", &long, &prefix,
        ] {
            assert_eq!(check_segment(key, "a"), Err(SegmentProblem::Key), "{key}");
        }
        for value in ["", "-a", "a_", "a b", "a=b", "a/b", "é", &long] {
            assert_eq!(check_segment("x.io/x", value), Err(SegmentProblem::Value), "{value}");
        }
        for value in ["a", "A-b_c.9", &long[1..]] {
            assert_eq!(check_segment("x.io/X_y", value), Ok(()), "{value}");
        }
    }

    #[test]
    fn collision_is_found_in_the_kubelets_words_and_explained() {
        let error = r#"RegisterPlugin error -- plugin registration failed with err: error updating Node object with CSI driver node info: error updating node: timed out waiting for the condition; caused by: detected topology value collision: driver reported "x.io/switch":"leaf2" but existing label is "x.io/switch":"leaf1""#;
        let collision = Collision::find(error).unwrap();
        assert_eq!(
            collision,
            Collision { key: "x.io/switch".into(), reported: "leaf2".into(), existing: "leaf1".into() }
        );
        let ours = collision.explanation(true);
        assert!(ours.contains("kubectl label node NODE --overwrite x.io/switch=leaf2"), "{ours}");
        assert!(ours.ends_with("or set --topology=x.io/switch=leaf1"), "{ours}");
        assert!(collision.explanation(false).ends_with("the driver's, not ours"));
        for other in [
            "",
            "rpc error: code = Unavailable",
            "detected topology value collision: driver reported x",
            r#"detected topology value collision: driver reported "a":"b" but existing label is "c":"d""#,
        ] {
            assert_eq!(Collision::find(other), None, "{other}");
        }
    }
}
