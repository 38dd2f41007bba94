//! What the kubelet has on record of this driver's volumes: `vol_data.json` files under its root folder, where that is mounted
//! at the same path as on the host.
//!
//! The kubelet writes a record before it stages a persistent volume, also for drivers that do not stage, and removes it after
//! the unstage. It keeps none here of inline volumes: those are under `pods/`, which is never looked at (ARCHITECTURE.md says why).
//!
//! Source: <https://github.com/kubernetes/kubernetes/blob/v1.36.2/pkg/volume/csi/csi_attacher.go>

use crate::kept_file::read_regular;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde::Deserialize;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A record has below 1 KiB.
const MAX_BYTES: u64 = 64 * 1024;

/// Far above what a node can mount.
const MOST_RECORDS: usize = 10_000;

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// Volume IDs with their staging paths.
    pub staged: Vec<(String, String)>,
    /// Every record of this driver is among them: all folders where one could be are the host's, and each file could be read.
    pub all: bool,
    /// What could not be read, for the log.
    pub troubles: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct VolData {
    driver_name: String,
    volume_handle: String,
    #[serde(rename = "specVolID")]
    spec_volume: Option<String>,
}

/// The kubelet's root folder, by the path that it dials: what is before `plugins`.
pub fn kubelet_root(endpoint: &Path) -> Option<PathBuf> {
    let plugins = endpoint.ancestors().skip(1).find(|folder| folder.ends_with("plugins"))?;
    plugins.parent().map(Path::to_owned)
}

/// Reads the records of `driver`. `endpoint` is the driver socket as the kubelet dials it, `driver_socket` as we do. Blocks as
/// long as the file system does; never fails.
pub fn read(driver: &str, endpoint: &Path, driver_socket: &Path) -> Records {
    let Some(root) = kubelet_root(endpoint) else { return Records::default() };
    let csi = root.join("plugins/kubernetes.io/csi");
    let mut records = Records { all: is_the_hosts(&csi, endpoint, driver_socket), ..Records::default() };
    // The second is where kubelets before 1.24 kept them.
    for folder in [csi.join(driver), csi.join("pv")] {
        records.read_folder(driver, &csi, &folder, |entry| (entry.join("vol_data.json"), entry.join("globalmount")));
    }
    let block = csi.join("volumeDevices");
    records.read_folder(driver, &csi, &block, |entry| (entry.join("data/vol_data.json"), block.join("staging")));
    records
}

impl Records {
    /// `place` gives a record's file and its staging path, for block volumes without the volume's name.
    fn read_folder(&mut self, driver: &str, csi: &Path, folder: &Path, place: impl Fn(&Path) -> (PathBuf, PathBuf)) {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => return self.trouble(folder, &error.to_string()),
        };
        // Another mount in the middle is not what the kubelet sees by its path.
        if mount(folder) != mount(csi) {
            self.all = false;
        }
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry.path(),
                Err(error) => return self.trouble(folder, &error.to_string()),
            };
            if self.staged.len() >= MOST_RECORDS {
                return self.trouble(folder, "too many records");
            }
            let (file, staging) = place(&entry);
            match read_regular(&file, MAX_BYTES) {
                Ok(None) => {}
                Ok(Some(text)) => match serde_json::from_slice::<VolData>(&text) {
                    Ok(data) if data.driver_name != driver => {}
                    Ok(data) => {
                        let staging = match &data.spec_volume {
                            Some(name) if staging.ends_with("staging") => staging.join(name),
                            Some(_) | None => staging,
                        };
                        self.staged.push((data.volume_handle, staging.to_string_lossy().into_owned()));
                    }
                    Err(error) => self.trouble(&file, &format!("is no record ({error})")),
                },
                Err(error) => self.trouble(&file, &error.to_string()),
            }
        }
    }

    fn trouble(&mut self, path: &Path, problem: &str) {
        self.all = false;
        self.troubles.push(format!("{}: {problem}", path.display()));
    }
}

/// Whether what we see at this path is what the host has there, or nothing because the host has nothing.
fn is_the_hosts(csi: &Path, endpoint: &Path, driver_socket: &Path) -> bool {
    let Some(nearest) = csi.ancestors().find(|folder| folder.exists()) else { return false };
    let (Some(here), Some(top)) = (mount(nearest), mount(Path::new("/"))) else { return false };
    // On a mount of its own: someone put the host's folder there.
    if here != top && csi.exists() {
        return true;
    }
    // Not in a container at all: the driver's folder is the same by both paths, and on this mount, too.
    let folders = (endpoint.parent(), driver_socket.parent());
    let (Some(by_endpoint), Some(by_us)) = folders else { return false };
    mount(by_endpoint) == Some(here) && identity(by_endpoint).is_some_and(|folder| Some(folder) == identity(by_us))
}

fn mount(path: &Path) -> Option<u64> {
    let stat = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok()?;
    (stat.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(stat.stx_mnt_id)
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).ok().map(|data| (data.dev(), data.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const DRIVER: &str = "rdma.example.com";

    struct Root(tempfile::TempDir);

    impl Root {
        fn new() -> Self {
            let root = Self(tempfile::tempdir().unwrap());
            fs::create_dir_all(root.endpoint().parent().unwrap()).unwrap();
            root
        }

        fn endpoint(&self) -> PathBuf {
            self.0.path().join("plugins").join(DRIVER).join("csi.sock")
        }

        fn record(&self, folder: &str, text: &str) -> PathBuf {
            let folder = self.0.path().join("plugins/kubernetes.io/csi").join(folder);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("vol_data.json"), text).unwrap();
            folder
        }

        fn read(&self) -> Records {
            read(DRIVER, &self.endpoint(), &self.endpoint())
        }
    }

    fn text(driver: &str, volume: &str) -> String {
        format!(r#"{{"driverName":"{driver}","volumeHandle":"{volume}","specVolID":"pv-{volume}","x":"y"}}"#)
    }

    #[test]
    fn records_of_file_and_block_volumes_are_found_and_those_of_other_drivers_not() {
        let root = Root::new();
        assert_eq!(root.read(), Records { all: true, ..Records::default() }, "nothing there is nothing mounted");
        let file = root.record(&format!("{DRIVER}/abc"), &text(DRIVER, "a"));
        root.record(&format!("{DRIVER}/def"), &text("other", "o"));
        let block = root.record("volumeDevices/pv-b/data", &text(DRIVER, "b"));
        let old = root.record("pv/pv-c", &text(DRIVER, "c"));
        root.record("other.example.com/abc", "never read");
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let staging = block.parent().unwrap().parent().unwrap().join("staging/pv-b");
        let records = root.read();
        assert_eq!(
            records.staged,
            [
                ("a".to_owned(), path(file.join("globalmount"))),
                ("c".to_owned(), path(old.join("globalmount"))),
                ("b".to_owned(), path(staging)),
            ]
        );
        assert!(records.all && records.troubles.is_empty());
    }

    #[test]
    fn a_record_that_cannot_be_read_is_told_and_proves_nothing() {
        let odd: [fn(&Path); 4] = [
            |file| fs::write(file, "{").unwrap(),
            |file| fs::write(file, vec![b' '; 70_000]).unwrap(),
            |file| symlink("/dev/zero", file).unwrap(),
            |file| fs::create_dir(file).unwrap(),
        ];
        for make in odd {
            let root = Root::new();
            root.record(&format!("{DRIVER}/good"), &text(DRIVER, "a"));
            let file = root.record(&format!("{DRIVER}/bad"), "").join("vol_data.json");
            fs::remove_file(&file).unwrap();
            make(&file);
            let records = root.read();
            assert_eq!((records.staged.len(), records.all, records.troubles.len()), (1, false, 1), "{records:?}");
        }
    }

    #[test]
    fn a_folder_that_is_not_the_kubelets_proves_nothing() {
        let (root, container) = (Root::new(), tempfile::tempdir().unwrap());
        // As in a container: the driver's folder is elsewhere, and the kubelet's path is not the host's.
        let records = read(DRIVER, &root.endpoint(), &container.path().join("csi.sock"));
        let tmp_is_a_mount = mount(container.path()) != mount(Path::new("/"));
        assert!(tmp_is_a_mount || !records.all);
        assert!(!read(DRIVER, Path::new("/nowhere/plugins/x/csi.sock"), &container.path().join("csi.sock")).all);
        assert!(!read(DRIVER, Path::new("/csi/csi.sock"), Path::new("/csi/csi.sock")).all, "no plugins folder in it");
    }

    #[test]
    fn the_root_is_what_is_before_the_plugins() {
        let root = |path: &str| kubelet_root(Path::new(path)).map(|root| root.to_string_lossy().into_owned());
        assert_eq!(root("/var/lib/kubelet/plugins/x/csi.sock").as_deref(), Some("/var/lib/kubelet"));
        assert_eq!(root("/k/plugins/a/b/csi.sock").as_deref(), Some("/k"));
        assert_eq!(root("/csi/csi.sock"), None);
        assert_eq!(root("/csi/plugins"), None, "a socket of that name is no folder");
    }
}
