//! What `nvidia-smi --query-gpu=… --format=csv,noheader,nounits` answers: rows, complaints among them, and an exit code.

use super::rdma::selector::parse_pci;

/// The columns that are asked for, in this order; the last only where the driver knows it.
pub const COLUMNS: [&str; 7] =
    ["index", "pci.bus_id", "uuid", "memory.used", "memory.total", "temperature.gpu", "gpu_recovery_action"];

/// No machine has more.
const MAX_ROWS: usize = 256;

/// What of a complaint is kept.
const MAX_COMPLAINT_CHARS: usize = 300;

/// Complaints that are kept.
const MAX_COMPLAINTS: usize = 16;

/// What the tool cannot do without: it answers with one of these alone when nothing works.
const NOTHING_WORKS: [&str; 2] = ["Failed to initialize NVML", "couldn't communicate with the NVIDIA driver"];

/// A figure as the tool gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Figure {
    /// The number.
    Number(u64),
    /// The GPU has no such figure, or nobody was told: not zero.
    Absent,
    /// Words where a number should be.
    Trouble(String),
}

/// One GPU's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// As the kernel writes it.
    pub pci: String,
    /// The tool's own number.
    pub index: u32,
    /// Stays when cards are moved.
    pub uuid: String,
    /// MiB.
    pub memory_used: Figure,
    /// MiB.
    pub memory_total: Figure,
    /// Degrees Celsius.
    pub temperature: Figure,
    /// What the driver wants done: `None` unless asked and known.
    pub recovery_action: Option<String>,
}

/// A whole answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// The GPUs it has data of.
    pub rows: Vec<Row>,
    /// GPUs that it complains of.
    pub failed: Vec<(String, String)>,
    /// Its other words.
    pub complaints: Vec<String>,
    /// `None` when it was killed by a signal.
    pub exit: Option<i32>,
}

impl Answer {
    /// Makes sense of the outputs. Nothing is taken for a row that is not one.
    pub fn parse(stdout: &str, stderr: &str, exit: Option<i32>) -> Self {
        let mut answer = Self { exit, ..Self::default() };
        for line in stdout.lines().chain(stderr.lines()).map(str::trim).filter(|line| !line.is_empty()) {
            if let Some(row) = row(line) {
                if answer.rows.len() < MAX_ROWS {
                    answer.rows.push(row);
                }
                continue;
            }
            let text: String = line.chars().filter(|char| !char.is_control()).take(MAX_COMPLAINT_CHARS).collect();
            match pci_in(line) {
                Some(pci) if answer.failed.len() < MAX_ROWS => answer.failed.push((pci, text)),
                Some(_) | None if answer.complaints.len() < MAX_COMPLAINTS => answer.complaints.push(text),
                Some(_) | None => {}
            }
        }
        answer
    }

    /// Its word that no GPU can be used at all, if it is that.
    pub fn nothing_works(&self) -> Option<&str> {
        if !self.rows.is_empty() {
            return None;
        }
        let says = |complaint: &&String| NOTHING_WORKS.iter().any(|words| complaint.contains(words));
        self.complaints.iter().find(says).map(String::as_str)
    }

    /// Whether it says that there are no GPUs.
    pub fn no_devices(&self) -> bool {
        self.rows.is_empty() && self.complaints.iter().any(|complaint| complaint.contains("No devices were found"))
    }
}

fn row(line: &str) -> Option<Row> {
    let mut cells = line.split(',').map(str::trim);
    let (index, pci, uuid) = (cells.next()?.parse().ok()?, parse_pci(cells.next()?)?, cells.next()?);
    let (memory_used, memory_total, temperature) =
        (figure(cells.next()?), figure(cells.next()?), figure(cells.next()?));
    let recovery_action = cells.next().filter(|word| !is_absent(word)).map(str::to_owned);
    let uuid = uuid.to_owned();
    cells.next().is_none().then_some(Row { pci, index, uuid, memory_used, memory_total, temperature, recovery_action })
}

fn is_absent(cell: &str) -> bool {
    matches!(cell, "[N/A]" | "N/A" | "[Not Supported]" | "[Not Found]" | "[Insufficient Permissions]" | "")
}

fn figure(cell: &str) -> Figure {
    match cell.parse() {
        Ok(number) => Figure::Number(number),
        Err(_) if is_absent(cell) => Figure::Absent,
        Err(_) => Figure::Trouble(cell.chars().filter(|char| !char.is_control()).take(64).collect()),
    }
}

fn pci_in(line: &str) -> Option<String> {
    line.split_whitespace().find_map(|word| parse_pci(word.trim_matches(|char: char| !char.is_ascii_hexdigit())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_dead_gpu_among_good_ones_is_a_complaint_with_its_address() {
        let stdout = "0, 00000000:17:00.0, GPU-a, 0, 81559, 33\n\
                      Unable to determine the device handle for gpu 0000:18:00.0: Unknown Error\n\
                      2, 00000000:65:00.0, GPU-c, 100, 81559, 34\n\
                      3, 00010000:AB:00.0, GPU-d, 100, 81559, [N/A]\n";
        let answer = Answer::parse(stdout, "", Some(0));
        let seen: Vec<_> = answer.rows.iter().map(|row| row.pci.as_str()).collect();
        assert_eq!(seen, ["0000:17:00.0", "0000:65:00.0", "10000:ab:00.0"]);
        assert_eq!(answer.failed.len(), 1);
        assert_eq!(answer.failed[0].0, "0000:18:00.0");
        assert_eq!(answer.rows[2].temperature, Figure::Absent, "absent, not zero");
        assert_eq!(answer.rows[0].memory_used, Figure::Number(0));
    }

    #[test]
    fn words_in_place_of_figures_are_told_from_absence() {
        let row = |line| Answer::parse(line, "", Some(0)).rows.remove(0);
        let seen = row("1, 00000000:18:00.0, GPU-b, ERR!, [Not Supported], [Unknown Error], Reset");
        assert_eq!(seen.memory_used, Figure::Trouble("ERR!".into()));
        assert_eq!(seen.memory_total, Figure::Absent);
        assert_eq!(seen.temperature, Figure::Trouble("[Unknown Error]".into()));
        assert_eq!(seen.recovery_action.as_deref(), Some("Reset"));
        assert_eq!(row("1, 00000000:18:00.0, GPU-b, 1, 2, 3, [N/A]").recovery_action, None);
    }

    #[test]
    fn the_tools_own_troubles_are_known_by_their_words_on_either_stream() {
        let nvml = "Failed to initialize NVML: Driver/library version mismatch";
        for (stdout, stderr) in [(nvml, ""), ("", nvml)] {
            assert_eq!(Answer::parse(stdout, stderr, Some(18)).nothing_works(), Some(nvml));
        }
        assert!(Answer::parse("No devices were found\n", "", Some(6)).no_devices());
        let other = Answer::parse("Field \"x\" is not a valid field to query.\n", "", Some(2));
        assert!(other.nothing_works().is_none() && !other.no_devices() && other.complaints.len() == 1);
    }

    #[test]
    fn half_a_row_is_no_row() {
        for line in [
            "0, 00000000:17:00.0, GPU-a, 0, 81559",
            "0, 17, GPU-a, 0, 81559, 33",
            "x, 00000000:17:00.0, a, 0, 1, 3",
            "0, 00000000:17:00.0, a, 0, 1, 3, None, 7",
        ] {
            assert!(Answer::parse(line, "", Some(0)).rows.is_empty(), "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_output_panics_or_grows(stdout in "([0-9a-f:.,\\[\\]N/A !é\n-]|GPU|0, 0000:18:00.0, a, 1, 2, 3\n){0,200}", exit in any::<Option<i32>>()) {
            let answer = Answer::parse(&stdout, &stdout, exit);
            prop_assert!(answer.rows.len() <= MAX_ROWS && answer.complaints.len() <= MAX_COMPLAINTS);
        }
    }
}
