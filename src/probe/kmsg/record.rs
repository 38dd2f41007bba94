//! Records of `/dev/kmsg`: `priority,sequence,microseconds,flags;text`, then lines that begin with a blank.
//!
//! Source: <https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg>

/// The kernel's own messages. What user space writes into the log gets another facility, so it cannot pass for the kernel.
const KERNEL: u64 = 0;

/// One message of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record<'a> {
    /// Counts up from the boot.
    pub sequence: u64,
    /// Since the boot.
    pub microseconds: u64,
    /// Its first line, and only one there is.
    pub text: &'a str,
}

/// The kernel's records among `text`; others, and what is none, are left out.
pub fn records(text: &str) -> impl Iterator<Item = Record<'_>> {
    text.lines().filter_map(record)
}

fn record(line: &str) -> Option<Record<'_>> {
    // Continuation lines hold the device in another form.
    if line.starts_with(' ') {
        return None;
    }
    let (prefix, text) = line.split_once(';')?;
    let mut fields = prefix.split(',');
    let mut number = || fields.next()?.parse::<u64>().ok();
    let (priority, sequence, microseconds) = (number()?, number()?, number()?);
    (priority >> 3 == KERNEL).then_some(Record { sequence, microseconds, text })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_kernels_records_are_taken_and_no_others() {
        let text = "4,1204,35478321,-;nvme nvme0: I/O 24 QID 0 timeout, reset controller\n SUBSYSTEM=nvme\n DEVICE=c244:0\n\
                    6,1205,35478400,c,caller=T1;text; with, all\n\
                    12,1206,35478500,-;nvme nvme0: Removing after probe failure status: -19\n\
                    ;no prefix\nx,1,2,-;no number\n3,7;short\n";
        let seen: Vec<_> = records(text).map(|record| (record.sequence, record.microseconds, record.text)).collect();
        assert_eq!(
            seen,
            [
                (1204, 35_478_321, "nvme nvme0: I/O 24 QID 0 timeout, reset controller"),
                (1205, 35_478_400, "text; with, all"),
            ],
            "1206 was written by a program, not by the kernel"
        );
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([0-9,;\\- a-z\n\\\\]|4,1,2,-;x\n){0,100}") {
            for record in records(&text) {
                prop_assert!(text.contains(record.text));
            }
        }
    }
}
