//! RDMA ports that were seen good, over restarts and boots: one small JSON file beside the state file, shared by all probes.

use crate::kept_file::{KeptFile, LoadError};
use crate::policy::rdma::known::{KnownGood, MAX_PORTS, Place};
use crate::policy::rdma::selector::{parse_guid, show_guid};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The form's version. A file of another version is set aside.
const SCHEMA: u32 = 1;

/// The most ports that are known take less.
const MAX_BYTES: u64 = 256 * 1024;

/// What is known good, and where it is kept.
#[derive(Debug, Clone, Default)]
pub struct KnownPorts {
    known: Arc<Mutex<KnownGood>>,
    file: Option<KeptFile>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Written {
    schema: u32,
    ports: Vec<WrittenPort>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WrittenPort {
    node_guid: String,
    port: u32,
    device: String,
    pci: Option<String>,
}

impl KnownPorts {
    /// What `driver`'s agents have seen good on this node, kept in `folder`.
    ///
    /// # Errors
    /// When something is there that is not ours. It is set aside, and nothing is known: use [`Self::afresh`].
    pub fn load(folder: &Path, driver: &str) -> Result<Self, LoadError> {
        let ports = Self::afresh(folder, driver);
        if let Some(file) = &ports.file
            && let Some(text) = file.read()?
        {
            let known = parse(&text).map_err(|problem| file.set_aside(problem))?;
            *ports.lock() = known;
        }
        Ok(ports)
    }

    /// Nothing is known yet; it will be kept in `folder`.
    pub fn afresh(folder: &Path, driver: &str) -> Self {
        let file = KeptFile::new(folder.join(format!("{driver}-warden-ports.json")), MAX_BYTES);
        Self { known: Arc::default(), file: Some(file) }
    }

    /// Within this process only.
    pub fn in_memory() -> Self {
        Self::default()
    }

    /// The file, if there is one.
    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(KeptFile::path)
    }

    /// What is known.
    pub fn lock(&self) -> MutexGuard<'_, KnownGood> {
        // Whoever panicked changed whole entries only.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes it in one step. Blocks as long as the file system does.
    ///
    /// # Errors
    /// The operating system's. Nothing is lost but the memory over a restart.
    pub fn save(&self) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let ports = self.lock().iter().map(written).collect();
        file.replace(&serde_json::to_vec_pretty(&Written { schema: SCHEMA, ports }).map_err(io::Error::other)?)
    }
}

fn written((guid, port, place): (u64, u32, &Place)) -> WrittenPort {
    WrittenPort { node_guid: show_guid(guid), port, device: place.name.clone(), pci: place.pci.clone() }
}

fn parse(text: &[u8]) -> Result<KnownGood, String> {
    let written: Written = serde_json::from_slice(text).map_err(|error| format!("is no list of ports ({error})"))?;
    if written.schema != SCHEMA {
        return Err(format!("has schema {}, not {SCHEMA}", written.schema));
    }
    if written.ports.len() > MAX_PORTS {
        return Err(format!("has over {MAX_PORTS} ports"));
    }
    let mut known = KnownGood::default();
    for port in written.ports {
        let guid = parse_guid(&port.node_guid).filter(|guid| *guid != 0);
        let guid = guid.ok_or_else(|| format!("has a node GUID that is none, {:?}", port.node_guid))?;
        known.insert(guid, port.port, Place { name: port.device, pci: port.pci });
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn ports_come_back_in_whatever_boot_and_anything_odd_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let load = || KnownPorts::load(folder.path(), "x.example.com");
        let ports = load().unwrap();
        let place = Place { name: "mlx5_0".into(), pci: Some("0000:01:00.0".into()) };
        ports.lock().insert(0x0c42_a103_001d_d12a, 1, place);
        ports.save().unwrap();
        assert_eq!(*load().unwrap().lock(), *ports.lock());
        let path = ports.path().unwrap();
        for odd in [
            "",
            "{}",
            r#"{"schema": 2, "ports": []}"#,
            r#"{"schema": 1, "ports": [{"nodeGuid": "0", "port": 1, "device": "a", "pci": null}]}"#,
        ] {
            fs::write(path, odd).unwrap();
            assert!(load().unwrap_err().to_string().contains("set aside"), "{odd}");
            assert!(!path.exists() && load().unwrap().lock().iter().next().is_none());
        }
    }
}
