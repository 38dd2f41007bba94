//! A pod's containers, their command lines and mounts, as far as sockets and folders go.

use crate::config::yaml::{Node, Value};
use std::path::{Component, Path, PathBuf};

/// Images by whose name a container is known to register the driver.
const AGENT_IMAGES: [&str; 2] = ["csi-warden", "csi-node-driver-registrar"];

/// Subcommands that register nothing.
const OTHER_COMMANDS: [&str; 14] = [
    "livenessprobe",
    "config",
    "demo",
    "probe",
    "status",
    "doctor",
    "fence",
    "install",
    "record",
    "replay",
    "maintain",
    "taints",
    "help",
    "version",
];

/// A pod's specification.
#[derive(Debug)]
pub(super) struct Pod {
    pub(super) volumes: Vec<Volume>,
    pub(super) containers: Vec<Container>,
}

#[derive(Debug)]
pub(super) struct Volume {
    pub(super) name: String,
    pub(super) kind: VolumeKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum VolumeKind {
    Host(PathBuf),
    ConfigMap,
    /// Secret, projected, downwardAPI: read-only, too.
    ReadOnly,
    Other,
}

#[derive(Debug)]
pub(super) struct Container {
    pub(super) name: String,
    pub(super) line: usize,
    image: String,
    /// Command and arguments, variables filled in.
    words: Vec<Word>,
    /// `CSI_ENDPOINT`
    endpoint_variable: Option<Word>,
    pub(super) mounts: Vec<Mount>,
}

/// A word of a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) text: String,
    pub(super) line: usize,
}

impl Word {
    /// Whether a variable is in it whose value the manifest does not tell.
    pub(super) fn is_open(&self) -> bool {
        self.text.contains("$(")
    }
}

#[derive(Debug)]
pub(super) struct Mount {
    pub(super) volume: String,
    pub(super) path: PathBuf,
    pub(super) sub_path: Option<String>,
    pub(super) read_only: bool,
    pub(super) line: usize,
}

/// Where a path of a container really lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    Host(PathBuf),
    Volume(String, PathBuf),
}

impl Pod {
    pub(super) fn read(spec: &Node) -> Self {
        let items = |key: &str| spec.get(key).map(Node::items).unwrap_or_default();
        let containers = items("initContainers").iter().chain(items("containers"));
        Self {
            volumes: items("volumes").iter().filter_map(volume).collect(),
            containers: containers.map(Container::read).collect(),
        }
    }

    pub(super) fn volume(&self, name: &str) -> Option<&Volume> {
        self.volumes.iter().find(|volume| volume.name == name)
    }

    /// Where `path` of a container lies; `None` if no mount holds it.
    pub(super) fn place(&self, container: &Container, path: &Path) -> Option<Place> {
        let mount = container.mount_of(path)?;
        let mut within = PathBuf::from(mount.sub_path.clone().unwrap_or_default());
        within.extend(path.strip_prefix(&mount.path).ok()?);
        Some(match self.volume(&mount.volume).map(|volume| &volume.kind) {
            Some(VolumeKind::Host(host)) => Place::Host(plain(&host.join(within))),
            Some(VolumeKind::ConfigMap | VolumeKind::ReadOnly | VolumeKind::Other) | None => {
                Place::Volume(mount.volume.clone(), plain(&within))
            }
        })
    }
}

impl Container {
    fn read(node: &Node) -> Self {
        let text = |key: &str| node.get(key).and_then(Node::text).unwrap_or_default().to_owned();
        let items = |key: &str| node.get(key).map(Node::items).unwrap_or_default();
        let variables: Vec<(&str, &Node)> =
            items("env").iter().filter_map(|entry| Some((entry.get("name")?.text()?, entry.get("value")?))).collect();
        let word = |node: &Node| Some(Word { text: expanded(node.text()?, &variables), line: node.line });
        let words = items("command").iter().chain(items("args")).filter_map(word).collect();
        let endpoint = variables.iter().find(|(name, _)| *name == "CSI_ENDPOINT").and_then(|(_, value)| word(value));
        Self {
            name: text("name"),
            line: node.line,
            image: text("image"),
            words,
            endpoint_variable: endpoint,
            mounts: items("volumeMounts").iter().filter_map(Mount::read).collect(),
        }
    }

    /// The value of a flag, by Go's rules as far as they matter: one dash or two, `=` or the next word; the last one wins.
    pub(super) fn flag(&self, name: &str) -> Option<Word> {
        let mut found = None;
        for (at, word) in self.words.iter().enumerate() {
            let Some(flag) = word.text.strip_prefix("--").or_else(|| word.text.strip_prefix('-')) else { continue };
            match flag.strip_prefix(name) {
                Some("") => found = self.words.get(at + 1).cloned(),
                Some(rest) => {
                    if let Some(value) = rest.strip_prefix('=') {
                        found = Some(Word { text: value.to_owned(), line: word.line });
                    }
                }
                None => {}
            }
        }
        found
    }

    /// Whether it is said to run this subcommand of ours.
    pub(super) fn runs(&self, command: &str) -> bool {
        self.words.iter().any(|word| word.text == command)
    }

    /// Whether it registers the driver.
    pub(super) fn is_agent(&self) -> bool {
        let image = self.image.rsplit('/').next().unwrap_or_default();
        let image = image.split(['@', ':']).next().unwrap_or_default();
        self.flag("kubelet-registration-path").is_some()
            || AGENT_IMAGES.contains(&image) && !OTHER_COMMANDS.iter().any(|command| self.runs(command))
    }

    /// Where the driver is told to listen, if this is the driver.
    pub(super) fn driver_endpoint(&self) -> Option<Word> {
        if self.flag("csi-address").is_some() || self.is_agent() {
            return None;
        }
        ["endpoint", "csi-endpoint", "csi-endpoints"]
            .iter()
            .find_map(|name| self.flag(name))
            .or_else(|| self.endpoint_variable.clone())
    }

    /// The mount that holds `path`.
    pub(super) fn mount_of(&self, path: &Path) -> Option<&Mount> {
        let holding = self.mounts.iter().filter(|mount| path.starts_with(&mount.path));
        holding.max_by_key(|mount| mount.path.components().count())
    }
}

impl Mount {
    fn read(node: &Node) -> Option<Self> {
        let text = |key: &str| node.get(key).and_then(Node::text);
        Some(Self {
            volume: text("name")?.to_owned(),
            path: plain(Path::new(text("mountPath")?)),
            sub_path: text("subPath")
                .or_else(|| text("subPathExpr"))
                .filter(|path| !path.is_empty())
                .map(str::to_owned),
            read_only: text("readOnly") == Some("true"),
            line: node.line,
        })
    }
}

fn volume(node: &Node) -> Option<Volume> {
    let name = node.get("name")?.text()?.to_owned();
    let host = node.at(&["hostPath", "path"]).and_then(Node::text);
    let has = |key: &str| node.get(key).is_some();
    let kind = match host {
        Some(path) => VolumeKind::Host(plain(Path::new(path))),
        None if has("configMap") => VolumeKind::ConfigMap,
        None if ["secret", "projected", "downwardAPI"].into_iter().any(has) => VolumeKind::ReadOnly,
        None => VolumeKind::Other,
    };
    Some(Volume { name, kind })
}

/// `$(NAME)` as Kubernetes fills it in; a name without a written value stays.
fn expanded(text: &str, variables: &[(&str, &Node)]) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("$(") {
        let Some((name, behind)) = after.split_once(')') else { break };
        let value = variables.iter().find(|(known, _)| *known == name).map(|(_, value)| &value.value);
        out.push_str(before);
        match value {
            Some(Value::Text(value)) => out.push_str(value),
            Some(Value::Nothing) => {}
            Some(Value::List(_) | Value::Map(_)) | None => {
                out.push_str("$(");
                out.push_str(name);
                out.push(')');
            }
        }
        rest = behind;
    }
    out + rest
}

/// Without `.`, `..` and doubled slashes.
pub(super) fn plain(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            Component::RootDir | Component::Normal(_) | Component::Prefix(_) => out.push(component),
        }
    }
    out
}
