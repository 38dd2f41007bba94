//! The kubelet's process, where the host's `/proc` can be seen: its root folder and its start.

use super::place::text;
use crate::probe::tree::Tree;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Names of processes that are a kubelet, or hold one. k3s and rke2 hold one, too, under root folders of the default.
const NAMES: [&str; 2] = ["kubelet", "kubelite"];

/// Unless `--root-dir` says otherwise.
const DEFAULT_ROOT: &str = "/var/lib/kubelet";

/// The kernel's clock tick that it shows to user space, on every architecture.
const TICKS: u64 = 100;

/// What is seen of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kubelet {
    Found(Process),
    Unseen,
}

/// The process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Process {
    /// Its folder in `/proc`.
    folder: PathBuf,
    /// `--root-dir`
    pub(super) root: PathBuf,
    /// In seconds of the wall clock.
    pub(super) started: Option<i64>,
}

impl Process {
    /// Whether `path`, as the kubelet sees it, is our `own`; `None` where we may not look.
    pub(super) fn sees(&self, path: &Path, own: &Path) -> Option<bool> {
        let of = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
        let theirs = self.folder.join("root").join(path.strip_prefix("/").unwrap_or(path));
        Some(of(&theirs)? == of(own)?)
    }
}

/// Looks for it. Only names are read of other processes.
pub(super) fn find(proc_root: &Path) -> Kubelet {
    let Ok(proc) = Tree::open(proc_root) else { return Kubelet::Unseen };
    let processes = proc.list(".").unwrap_or_default();
    let is_kubelet = |process: &String| {
        process.bytes().all(|byte| byte.is_ascii_digit())
            && text(&proc, &format!("{process}/comm")).is_ok_and(|name| NAMES.contains(&name.trim()))
    };
    let Some(process) = processes.into_iter().find(is_kubelet) else { return Kubelet::Unseen };
    let read = |file: &str| text(&proc, file).unwrap_or_default();
    Kubelet::Found(Process {
        folder: proc_root.join(&process),
        root: root_folder(&read(&format!("{process}/cmdline"))),
        started: started(&read(&format!("{process}/stat")), &read("stat")),
    })
}

fn root_folder(command_line: &str) -> PathBuf {
    let words: Vec<&str> = command_line.split('\0').collect();
    let value = |(at, word): (usize, &&str)| match word.trim_start_matches('-').strip_prefix("root-dir")? {
        "" => words.get(at + 1).map(|next| (*next).to_owned()),
        rest => rest.strip_prefix('=').map(str::to_owned),
    };
    words.iter().enumerate().filter_map(value).next_back().unwrap_or_else(|| DEFAULT_ROOT.to_owned()).into()
}

/// Boot time and the process's start since then. Its name may hold anything, and ends with the last parenthesis.
fn started(process: &str, system: &str) -> Option<i64> {
    let ticks: u64 = process.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let boot: i64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(boot + i64::try_from(ticks / TICKS).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_root_folder_and_start_are_read() {
        for (line, root) in [
            ("/usr/bin/kubelet\0--config=/x\0", "/var/lib/kubelet"),
            ("kubelet\0--root-dir=/data/kubelet\0", "/data/kubelet"),
            ("kubelet\0--root-dir\0/data/kubelet\0-v=2\0", "/data/kubelet"),
            ("", "/var/lib/kubelet"),
        ] {
            assert_eq!(root_folder(line), Path::new(root), "{line:?}");
        }
        let stat = "7 (ku be)let) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 12 0 4200 99 1";
        assert_eq!(started(stat, "cpu 1\nbtime 1000\n"), Some(1042));
        assert_eq!((started("", "btime 1\n"), started(stat, "")), (None, None));
    }
}
