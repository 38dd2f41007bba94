//! GPUs as PCI has them, under `<sysfs-root>/bus/pci/devices`.

use crate::config::probes::GpuSelect;
use crate::policy::gpu::OnBus;
use crate::policy::outcome::Reason;
use crate::policy::rdma::selector::{matches_glob, parse_pci};
use crate::probe::attribute::{attribute, link_name};
use crate::probe::tree::Tree;
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::path::Path;

/// Display controllers: VGA, 3D and others.
const DISPLAY: u32 = 0x03;

/// The kernel's folder of them.
const DEVICES: &str = "bus/pci/devices";

/// The GPUs that are there.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// Those that the settings select, by their address.
    pub selected: BTreeSet<String>,
    /// Those that they leave out.
    pub excluded: BTreeSet<String>,
    /// Addresses that they name and that are not there.
    pub absent: Vec<String>,
    /// Why what is there cannot be told for sure, if so.
    pub doubt: Option<Reason>,
}

/// The GPUs under `sysfs`. None of them is opened: what is read here the kernel knows by itself.
///
/// # Errors
/// Why it is not known what is there.
pub fn list(sysfs: &Path, select: &GpuSelect) -> Result<Listed, Reason> {
    let unread = |path: &str, error: Errno| {
        Reason::new("SysfsUnreadable", format!("cannot read {}: {error}", sysfs.join(path).display()))
    };
    let tree = Tree::open(sysfs).map_err(|error| unread("", error))?;
    let found = tree.list(DEVICES).map_err(|error| unread(DEVICES, error))?;
    let matches =
        |words: &[String], address: &str| words.iter().any(|word| matches_glob(word.as_bytes(), address.as_bytes()));
    let mut listed = Listed::default();
    for address in found.into_iter().filter(|name| parse_pci(name).as_ref() == Some(name)) {
        if matches(&select.exclude, &address) {
            listed.excluded.insert(address);
            continue;
        }
        let mut doubt = None;
        // What makes no sense tells as little as what cannot be read.
        let number = |text: &str| {
            let number = text.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
            number.ok_or(Errno::ILSEQ)
        };
        let mut read =
            |name| match attribute(&tree, &format!("{DEVICES}/{address}/{name}")).and_then(|text| number(&text)) {
                Ok(number) => Some(number),
                // One that is removed just now is no doubt.
                Err(Errno::NOENT) => None,
                Err(error) => {
                    doubt = Some(unread(&format!("{DEVICES}/{address}"), error));
                    None
                }
            };
        let vendor = read("vendor").and_then(|vendor| u16::try_from(vendor).ok());
        let is_gpu = read("class").is_some_and(|class| class >> 16 == DISPLAY)
            && vendor.is_some_and(|vendor| select.vendors.contains(&vendor));
        listed.doubt = listed.doubt.or(doubt);
        if is_gpu && (select.devices.is_empty() || matches(&select.devices, &address)) {
            listed.selected.insert(address);
        } else {
            listed.excluded.insert(address);
        }
    }
    let names_one = |word: &&String| listed.doubt.is_none() && !word.contains(['*', '?']);
    let missed = select.devices.iter().filter(names_one).filter(|word| !listed.selected.contains(*word));
    listed.absent = missed.cloned().collect();
    Ok(listed)
}

/// What PCI says of one GPU. Reading its configuration space asks the device itself, and may block.
pub fn on_bus(sysfs: &Path, address: &str) -> OnBus {
    let Ok(tree) = Tree::open(sysfs) else { return OnBus::default() };
    let folder = format!("{DEVICES}/{address}");
    let driver = link_name(&tree, &format!("{folder}/driver"));
    // A sleeping GPU would be woken for nothing.
    let asleep = attribute(&tree, &format!("{folder}/power/runtime_status")).is_ok_and(|status| status == "suspended");
    let mut vendor = [0; 2];
    let read = !asleep && tree.read_bytes(&format!("{folder}/config"), &mut vendor) == Ok(2);
    OnBus { answers: read.then_some(vendor != [0xff, 0xff]), driver }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tree(devices: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for address in devices {
            let folder = root.path().join("bus/pci/devices").join(address);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("vendor"), "0x10de\n").unwrap();
            fs::write(folder.join("class"), "0x030200\n").unwrap();
        }
        root
    }

    fn selected(root: &Path, devices: &[&str], exclude: &[&str]) -> (Vec<String>, Vec<String>) {
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect();
        let select = GpuSelect { vendors: vec![0x10de], devices: words(devices), exclude: words(exclude) };
        let listed = list(root, &select).unwrap();
        (listed.selected.into_iter().collect(), listed.absent)
    }

    #[test]
    fn addresses_and_patterns_select_and_what_is_named_is_missed() {
        let root = tree(&["0000:17:00.0", "0000:18:00.0", "not-an-address"]);
        assert_eq!(selected(root.path(), &[], &[]).0, ["0000:17:00.0", "0000:18:00.0"]);
        assert_eq!(selected(root.path(), &[], &["0000:17:*"]).0, ["0000:18:00.0"]);
        assert_eq!(selected(root.path(), &["0000:1?:00.0"], &[]).0.len(), 2);
        let (there, absent) = selected(root.path(), &["0000:17:00.0", "0000:65:00.0", "0000:66:*"], &[]);
        assert_eq!((there, absent), (vec!["0000:17:00.0".to_owned()], vec!["0000:65:00.0".to_owned()]));
    }

    #[test]
    fn a_gpu_whose_numbers_make_no_sense_is_in_doubt_and_not_gone() {
        let select = GpuSelect { vendors: vec![0x10de], devices: vec!["0000:17:00.0".to_owned()], exclude: Vec::new() };
        for (file, text) in [("vendor", "garbage"), ("class", "\u{fffd}"), ("vendor", "")] {
            let root = tree(&["0000:17:00.0"]);
            let folder = root.path().join("bus/pci/devices/0000:17:00.0");
            fs::write(folder.join(file), text).unwrap();
            let listed = list(root.path(), &select).unwrap();
            assert!(listed.doubt.is_some() && listed.absent.is_empty(), "{file} {text:?}: {listed:?}");
        }
        // An error is not forgotten over one that says less.
        let root = tree(&["0000:17:00.0"]);
        let folder = root.path().join("bus/pci/devices/0000:17:00.0");
        fs::remove_file(folder.join("vendor")).unwrap();
        fs::create_dir(folder.join("vendor")).unwrap();
        fs::remove_file(folder.join("class")).unwrap();
        assert!(list(root.path(), &select).unwrap().doubt.is_some());
    }

    #[test]
    fn what_cannot_be_read_of_a_gpu_condemns_nothing() {
        let root = tree(&["0000:17:00.0"]);
        let folder = root.path().join("bus/pci/devices/0000:17:00.0");
        assert_eq!(on_bus(root.path(), "0000:17:00.0"), OnBus { answers: None, driver: None });
        for (config, answers) in [(&[0xff_u8][..], None), (&[0xff, 0xff], Some(false)), (&[0xde, 0x10], Some(true))] {
            fs::write(folder.join("config"), config).unwrap();
            assert_eq!(on_bus(root.path(), "0000:17:00.0").answers, answers);
        }
        fs::create_dir(folder.join("power")).unwrap();
        fs::write(folder.join("power/runtime_status"), "suspended\n").unwrap();
        assert_eq!(on_bus(root.path(), "0000:17:00.0").answers, None, "asleep");
    }
}
