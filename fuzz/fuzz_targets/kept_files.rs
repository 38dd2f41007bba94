//! Files that we find at a start: our own of an earlier run, the kubelet's records, a driver's answer. Nothing panics; what is no
//! file of ours is set aside and gives nothing; what is one is written as it was.
#![no_main]

use csi_warden::known_ports::KnownPorts;
use csi_warden::policy::volumes::{Completeness, InUse};
use csi_warden::proxy::kubelet_records::{self, Records};
use csi_warden::proxy::node_info::{Limit, merge};
use csi_warden::proxy::volume_file::{Left, VolumeFile};
use csi_warden::proxy::volumes::begin;
use csi_warden::state_file::StateFile;
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Instant;

const DRIVER: &str = "x";

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("w-fuzz-kept-{}", std::process::id()));
    for below in ["state", "proc/sys/kernel/random", "plugins/kubernetes.io/csi/x/volume"] {
        fs::create_dir_all(folder.join(below)).unwrap();
    }
    fs::write(folder.join("proc/sys/kernel/random/boot_id"), "b\n").unwrap();
    folder
});

fuzz_target!(|input: &[u8]| {
    let (state, proc) = (FOLDER.join("state"), FOLDER.join("proc"));
    let put = |name: &str| {
        let path = state.join(name);
        fs::write(&path, input).unwrap();
        path
    };

    let file = StateFile::new(&state, DRIVER, "p".to_owned(), &proc);
    let path = put("x-warden.json");
    let now = Instant::now();
    match file.load(now) {
        Ok(Some(past)) => {
            assert!(past.since <= now && past.falls.iter().all(|fall| *fall <= now), "{past:?}");
            file.save(&past, None, now).unwrap();
            let again = file.load(now).unwrap().unwrap();
            assert_eq!((again.health, again.falls.len()), (past.health, past.falls.len()));
        }
        Ok(None) => {}
        Err(_) => is_aside(&path),
    }

    let path = put("x-warden-ports.json");
    match KnownPorts::load(&state, DRIVER) {
        Ok(ports) => {
            ports.save().unwrap();
            assert_eq!(*KnownPorts::load(&state, DRIVER).unwrap().lock(), *ports.lock());
        }
        Err(_) => is_aside(&path),
    }

    let path = put("x-warden-volumes.json");
    let file = VolumeFile::new(&state, DRIVER, &proc);
    let table = begin(file.load(Left::Nothing), &Records::default(), Some(true));
    if !path.exists() {
        assert!(table.places().next().is_none() && table.completeness() != Completeness::Complete);
    }
    assert!(table.in_use() != InUse::No || table.completeness() == Completeness::Complete);

    fs::write(FOLDER.join("plugins/kubernetes.io/csi/x/volume/vol_data.json"), input).unwrap();
    let socket = FOLDER.join("plugins/x/csi.sock");
    let records = kubelet_records::read(DRIVER, &socket, &socket);
    assert!(records.staged.len() <= 1 && (records.troubles.is_empty() || records.staged.is_empty() && !records.all));

    let topology = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
    if let Ok(merged) = merge(input, &topology, Limit::Drivers) {
        // Protobuf adds up what is written twice, so ours goes behind theirs.
        assert!(merged.bytes.starts_with(input) && (merged.bytes.len() > input.len() || input.len() > 3));
    }
});

fn is_aside(path: &Path) {
    assert!(!path.exists(), "it stays in the way");
    // They would add up.
    for odd in fs::read_dir(path.parent().unwrap()).unwrap().flatten() {
        fs::remove_file(odd.path()).unwrap();
    }
}
