//! The kernel's modules for RDMA: loaded, and in an order in which each finds what it needs.

use super::finding::Finding;
use super::place::{Place, text, words};
use crate::probe::tree::{Tree, is_absence};

const LOADED: &str = "rdma-modules";
const ORDER: &str = "rdma-module-order";

/// Each needs those before it, but for the third: `mlx5_core` is the driver on PCI, and may come first.
const MODULES: [&str; 4] = ["ib_core", "ib_uverbs", "mlx5_core", "mlx5_ib"];

/// What each leaves in sysfs: built into the kernel, a module may be listed nowhere.
const TRACES: [&str; 4] =
    ["class/infiniband", "class/infiniband_verbs", "bus/pci/drivers/mlx5_core", "bus/auxiliary/drivers/mlx5_ib.rdma"];

/// Mellanox on PCI.
const MLX5_VENDOR: &str = "0x15b3";

/// What says in which order modules are loaded; `install` and `blacklist` keep them away.
const SOFTDEP: &str = "echo 'softdep mlx5_ib pre: ib_core ib_uverbs mlx5_core' > /etc/modprobe.d/rdma-order.conf";

/// Whether they are loaded, and how.
pub(super) fn check(place: &Place) -> Vec<Finding> {
    let seen = Seen::read(place);
    let mut findings = vec![loaded(&seen), order(&seen)];
    findings.truncate(if seen.wanted { 2 } else { 0 });
    if findings.is_empty() {
        let why = "no RDMA device, and no probe of type rdma";
        findings.extend([LOADED, ORDER].map(|check| Finding::not_applicable(check, why)));
    }
    findings
}

/// What there is to judge.
#[derive(Debug, Default)]
struct Seen {
    /// RDMA is watched, or there.
    wanted: bool,
    /// There is a device for `mlx5_core`; `None` if that cannot be told.
    mlx5: Option<bool>,
    /// `/proc/modules`: the last loaded comes first.
    modules: Option<Vec<String>>,
    /// Of those that are looked for: in the kernel, as a module or built in.
    present: Vec<&'static str>,
    /// Why `present` may lack some.
    unread: Option<String>,
    /// Lines of `modprobe.d`, with where they stand; `None` if they cannot be seen.
    lines: Option<Vec<(String, String)>>,
}

impl Seen {
    fn read(place: &Place) -> Self {
        let mut seen = Self { wanted: place.watches("rdma"), ..Self::default() };
        match Tree::open(&place.host.sysfs) {
            Ok(sysfs) => {
                let is_there = |path: &str| sysfs.exists(path) == Ok(true);
                let present = |(name, trace): &(&str, &str)| is_there(&format!("module/{name}")) || is_there(trace);
                seen.present = MODULES.into_iter().zip(TRACES).filter(present).map(|(name, _)| name).collect();
                seen.mlx5 = mlx5(&sysfs);
                let devices = sysfs.list("class/infiniband").unwrap_or_default();
                seen.wanted |= !devices.is_empty() || seen.mlx5 == Some(true);
            }
            Err(error) => seen.unread = Some(format!("{}: {}", place.host.sysfs.display(), words(error))),
        }
        seen.modules = Tree::open(&place.host.proc)
            .and_then(|proc| text(&proc, "modules"))
            .ok()
            .map(|table| table.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect());
        seen.lines = (!place.etc_is_doubtful).then(|| modprobe(place)).flatten();
        seen
    }

    fn is_loaded(&self, name: &str) -> bool {
        self.present.contains(&name) || self.modules.iter().flatten().any(|module| module == name)
    }

    fn needed(&self) -> impl Iterator<Item = &'static str> {
        let mlx5 = self.mlx5 == Some(true);
        MODULES.into_iter().filter(move |name| mlx5 || !name.starts_with("mlx5"))
    }
}

fn mlx5(sysfs: &Tree) -> Option<bool> {
    let addresses = sysfs.list("bus/pci/devices").ok()?;
    // Class 02 is network; the same maker's bridges have another driver.
    let is = |address: &String, file: &str, beginning: &str| {
        text(sysfs, &format!("bus/pci/devices/{address}/{file}")).is_ok_and(|text| text.trim().starts_with(beginning))
    };
    Some(addresses.iter().any(|address| is(address, "vendor", MLX5_VENDOR) && is(address, "class", "0x02")))
}

fn modprobe(place: &Place) -> Option<Vec<(String, String)>> {
    let etc = Tree::open(&place.etc).ok()?;
    let names = match etc.list("modprobe.d") {
        Ok(names) => names,
        Err(error) if is_absence(error) => return Some(Vec::new()),
        Err(_) => return None,
    };
    let mut lines = Vec::new();
    for name in names.iter().filter(|name| name.ends_with(".conf")) {
        let whole = text(&etc, &format!("modprobe.d/{name}")).ok()?;
        for (at, line) in whole.lines().enumerate() {
            let at = format!("{}/modprobe.d/{name}:{}", place.etc.display(), at + 1);
            lines.push((at, line.split_whitespace().collect::<Vec<_>>().join(" ").replace('-', "_")));
        }
    }
    Some(lines)
}

fn loaded(seen: &Seen) -> Finding {
    let missing: Vec<_> = seen.needed().filter(|name| !seen.is_loaded(name)).collect();
    if missing.is_empty() {
        return Finding::pass(LOADED, format!("loaded: {}", seen.needed().collect::<Vec<_>>().join(", ")));
    }
    if seen.modules.is_none() {
        let why =
            seen.unread.clone().unwrap_or_else(|| format!("no sign of {}, and no list of modules", missing.join(", ")));
        return Finding::unknown(LOADED, why).with_fix("mount the host's /proc and name it: --proc-root");
    }
    let kept = seen.lines.iter().flatten().find(|(_, line)| missing.iter().any(|name| keeps_away(line, name)));
    let seen_words = format!("not loaded: {}", missing.join(", "));
    match kept {
        Some((at, line)) => {
            let fix = format!("remove the line {at}, then modprobe -a {}", missing.join(" "));
            Finding::fail(LOADED, format!("{seen_words}; {at} says {line:?}"), fix)
        }
        None => {
            let fix = format!(
                "modprobe -a {0}; for each boot: echo {0} | tr ' ' '\\n' > /etc/modules-load.d/rdma.conf",
                missing.join(" ")
            );
            Finding::fail(LOADED, seen_words, fix)
        }
    }
}

fn keeps_away(line: &str, module: &str) -> bool {
    let words: Vec<_> = line.split(' ').collect();
    match words.as_slice() {
        ["blacklist", name] => *name == module,
        ["install", name, command, ..] => {
            *name == module && (command.ends_with("/true") || command.ends_with("/false"))
        }
        _ => false,
    }
}

/// The first of each pair before the second. `mlx5_core`, the driver on PCI, comes before `ib_core` on many nodes, and may.
const PAIRS: [(&str, &str); 4] =
    [("ib_core", "ib_uverbs"), ("ib_core", "mlx5_ib"), ("ib_uverbs", "mlx5_ib"), ("mlx5_core", "mlx5_ib")];

/// By what a file demands, and by what the kernel shows.
fn order(seen: &Seen) -> Finding {
    let softdeps = || seen.lines.iter().flatten().filter_map(|(at, line)| Some((at, softdep(line)?)));
    let is_pair = |first: &str, second: &str| PAIRS.contains(&(first, second));
    for (at, (module, before, after)) in softdeps() {
        let early = before.iter().find(|name| is_pair(&module, name));
        if let Some(other) = early.or_else(|| after.iter().find(|name| is_pair(name, &module))) {
            let seen = format!("{at} turns the order of {other} and {module} round");
            return Finding::fail(ORDER, seen, format!("remove that line; {SOFTDEP}"));
        }
    }
    let Some(modules) = &seen.modules else {
        let fix = "mount the host's /proc and name it: --proc-root";
        return Finding::unknown(ORDER, "cannot read the list of modules").with_fix(fix);
    };
    let age = |name: &str| modules.iter().rev().position(|module| module == name);
    let late: Vec<_> = PAIRS
        .iter()
        .filter(|(first, second)| age(first) > age(second) && age(second).is_some())
        .map(|(first, second)| format!("{first} after {second}"))
        .collect();
    if !late.is_empty() {
        let seen = format!("loaded {}: device files came late", late.join(", "));
        return Finding::fail(ORDER, seen, SOFTDEP);
    }
    match (age("mlx5_ib").or(age("ib_uverbs")), softdeps().find(|(_, (module, ..))| module == "mlx5_ib")) {
        (Some(_), Some((at, _))) => {
            Finding::pass(ORDER, format!("each was loaded after what it needs, and {at} keeps it so"))
        }
        (Some(_), None) => Finding::pass(ORDER, "each was loaded after what it needs"),
        (None, _) => Finding::not_applicable(ORDER, "neither ib_uverbs nor mlx5_ib is loaded as a module"),
    }
}

/// Module, those before it, those after it.
fn softdep(line: &str) -> Option<(String, Vec<String>, Vec<String>)> {
    let mut words = line.split(' ');
    if words.next()? != "softdep" {
        return None;
    }
    let module = words.next()?.to_owned();
    let (mut before, mut after, mut to_after) = (Vec::new(), Vec::new(), false);
    for word in words {
        match word {
            "pre:" => to_after = false,
            "post:" => to_after = true,
            name if to_after => after.push(name.to_owned()),
            name => before.push(name.to_owned()),
        }
    }
    Some((module, before, after))
}
