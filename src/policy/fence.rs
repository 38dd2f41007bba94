//! What a fence refuses, with which code, and in which words.
//!
//! New work is refused, and volumes get out. Which code: the kubelet takes a final one for "nothing of this is here" and cleans
//! up, even where an earlier call may yet put something there; any other makes it come back to unstage.

use super::volume_call::VolumeCall;
use super::volume_place::Kind;
use super::volumes::{Completeness, VolumeTable};

/// The whole message. An event's text is cut at 1 KiB, and the kubelet puts its own words before ours.
const MOST_BYTES: usize = 512;

/// The longest driver name is 63 bytes by the CSI specification.
const MOST_NAME_BYTES: usize = 63;

/// The methods that concern volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeMethod {
    /// New work.
    Stage,
    /// Lets a volume out.
    Unstage,
    /// New work.
    Publish,
    /// Lets a volume out.
    Unpublish,
    /// New work.
    Expand,
}

impl VolumeMethod {
    /// The method behind a request's path, if it concerns volumes on this node. All others pass a fence unread: without
    /// NodeGetInfo and NodeGetCapabilities the kubelet could neither register nor unstage. A future version of CSI has other
    /// messages and another package, which is not known and passes.
    pub fn of(path: &str) -> Option<Self> {
        match path.strip_prefix("/csi.v1.Node/")? {
            "NodeStageVolume" => Some(Self::Stage),
            "NodeUnstageVolume" => Some(Self::Unstage),
            "NodePublishVolume" => Some(Self::Publish),
            "NodeUnpublishVolume" => Some(Self::Unpublish),
            "NodeExpandVolume" => Some(Self::Expand),
            _ => None,
        }
    }

    /// The method's name, as in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stage => "NodeStageVolume",
            Self::Unstage => "NodeUnstageVolume",
            Self::Publish => "NodePublishVolume",
            Self::Unpublish => "NodeUnpublishVolume",
            Self::Expand => "NodeExpandVolume",
        }
    }
}

/// `--refusal-code`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RefusalCode {
    /// FAILED_PRECONDITION where it is known that nothing of the volume can be here, else UNAVAILABLE.
    #[default]
    Auto,
    /// Always, for stage and publish.
    FailedPrecondition,
    /// Always.
    Unavailable,
}

/// The code of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Final: the kubelet cleans up and asks anew.
    FailedPrecondition,
    /// The kubelet takes the volume for uncertain, and will unstage it when the pod goes.
    Unavailable,
}

impl Code {
    /// The gRPC status code.
    pub fn number(self) -> i32 {
        match self {
            Self::FailedPrecondition => 9,
            Self::Unavailable => 14,
        }
    }
}

/// Why there is a fence, for the message.
#[derive(Debug, Clone, Copy)]
pub struct Fence<'a> {
    /// The driver's name.
    pub driver: &'a str,
    /// What is broken, such as `PortDown: mlx5_0 port 1 is DOWN`, or who put up the fence and why.
    pub reason: &'a str,
    /// Since when, in UTC.
    pub since_utc: &'a str,
}

/// The answer to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judgement {
    /// It goes to the driver.
    Pass,
    /// It does not.
    Refuse {
        /// With this code
        code: Code,
        /// and this status message.
        message: String,
    },
}

/// Judges a call about a volume while there is a fence.
///
/// `call` is `None` if the request could not be understood. What is staged or published already may be so again: after its own
/// restart the kubelet asks for that before it looks after running pods.
pub fn judge(
    method: VolumeMethod,
    call: Option<&VolumeCall>,
    fence: &Fence<'_>,
    table: &VolumeTable,
    setting: RefusalCode,
) -> Judgement {
    let code = match method {
        VolumeMethod::Unstage | VolumeMethod::Unpublish => return Judgement::Pass,
        VolumeMethod::Stage | VolumeMethod::Publish if call.is_some_and(|call| is_repeated(call, table)) => {
            return Judgement::Pass;
        }
        // To the kubelet a failed precondition means "cannot be expanded while in use", and it gives up.
        VolumeMethod::Expand => Code::Unavailable,
        VolumeMethod::Stage | VolumeMethod::Publish => match setting {
            RefusalCode::Auto if call.is_some_and(|call| nothing_can_be_here(call, table)) => Code::FailedPrecondition,
            RefusalCode::Auto | RefusalCode::Unavailable => Code::Unavailable,
            RefusalCode::FailedPrecondition => Code::FailedPrecondition,
        },
    };
    Judgement::Refuse { code, message: message(fence) }
}

fn is_repeated(call: &VolumeCall, table: &VolumeTable) -> bool {
    match call {
        VolumeCall::Stage { volume, path } => {
            table.is_at(volume, Kind::Staged, path) || table.was_staged_before(volume)
        }
        VolumeCall::Publish { volume, target } => table.is_at(volume, Kind::Published, target),
        VolumeCall::Unstage { .. } | VolumeCall::Unpublish { .. } | VolumeCall::Expand { .. } => false,
    }
}

/// A volume staged at another path is the kubelet's to unstage, so a stage of it is not refused for good.
fn nothing_can_be_here(call: &VolumeCall, table: &VolumeTable) -> bool {
    let settled = |volume: &str| table.completeness() == Completeness::Complete && table.is_settled(volume);
    match call {
        VolumeCall::Stage { volume, .. } => settled(volume) && !table.may_be_staged(volume),
        VolumeCall::Publish { volume, .. } => settled(volume),
        VolumeCall::Unstage { .. } | VolumeCall::Unpublish { .. } | VolumeCall::Expand { .. } => false,
    }
}

/// One line that says what is broken, since when, and how to override; at most 512 bytes.
///
/// The same for as long as the fence is up for the same reason: of a text that changes the kubelet makes a new Event object with each
/// try, of one that does not it only counts.
pub fn message(fence: &Fence<'_>) -> String {
    let driver = one_line(fence.driver, MOST_NAME_BYTES);
    let since = one_line(fence.since_utc, 32);
    let before = format!("csi-warden: no new volumes of {driver} on this node: ");
    let after = format!(
        " (since {since}). Volumes in use can still be unmounted. To override, on the node: csi-warden fence off --for 30m --reason …"
    );
    let reason = one_line(fence.reason, MOST_BYTES - before.len() - after.len());
    format!("{before}{reason}{after}")
}

/// Without control characters, nor those that turn or break lines, and with an ellipsis where it was cut.
fn one_line(text: &str, most_bytes: usize) -> String {
    const ELLIPSIS: char = '…';
    let turns =
        |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    let clean = text.chars().map(|c| if c.is_whitespace() { ' ' } else { c }).filter(|c| !c.is_control() && !turns(*c));
    let mut line = String::new();
    for word in clean.collect::<String>().split_whitespace() {
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if line.len() > most_bytes {
        let mut end = most_bytes.saturating_sub(ELLIPSIS.len_utf8());
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        line.truncate(end);
        line.push(ELLIPSIS);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::volume_call::End;
    use crate::policy::volumes::Gap;
    use proptest::prelude::*;

    const FENCE: Fence<'_> = Fence {
        driver: "rdma.example.com",
        reason: "PortDown: mlx5_0 port 1 is DOWN, physically Polling",
        since_utc: "2026-11-30T22:38:37Z",
    };

    fn stage(path: &str) -> VolumeCall {
        VolumeCall::Stage { volume: "v".into(), path: path.into() }
    }

    fn publish(target: &str) -> VolumeCall {
        VolumeCall::Publish { volume: "v".into(), target: target.into() }
    }

    fn method(call: &VolumeCall) -> VolumeMethod {
        match call {
            VolumeCall::Stage { .. } => VolumeMethod::Stage,
            VolumeCall::Unstage { .. } => VolumeMethod::Unstage,
            VolumeCall::Publish { .. } => VolumeMethod::Publish,
            VolumeCall::Unpublish { .. } => VolumeMethod::Unpublish,
            VolumeCall::Expand { .. } => VolumeMethod::Expand,
        }
    }

    /// `None`: passes.
    fn code(call: &VolumeCall, table: &VolumeTable, setting: RefusalCode) -> Option<Code> {
        match judge(method(call), Some(call), &FENCE, table, setting) {
            Judgement::Pass => None,
            Judgement::Refuse { code, .. } => Some(code),
        }
    }

    fn table(calls: &[(VolumeCall, End)]) -> VolumeTable {
        let mut table = VolumeTable::new(Completeness::Complete);
        for (call, end) in calls {
            let id = table.begin(call);
            table.end(id, *end);
        }
        table
    }

    #[test]
    fn only_five_methods_of_csi_v1_node_concern_volumes() {
        for (path, method) in [
            ("/csi.v1.Node/NodeStageVolume", Some(VolumeMethod::Stage)),
            ("/csi.v1.Node/NodeUnstageVolume", Some(VolumeMethod::Unstage)),
            ("/csi.v1.Node/NodePublishVolume", Some(VolumeMethod::Publish)),
            ("/csi.v1.Node/NodeUnpublishVolume", Some(VolumeMethod::Unpublish)),
            ("/csi.v1.Node/NodeExpandVolume", Some(VolumeMethod::Expand)),
            ("/csi.v1.Node/NodeGetInfo", None),
            ("/csi.v1.Node/NodeGetCapabilities", None),
            ("/csi.v1.Node/NodeGetVolumeStats", None),
            ("/csi.v1.Node/NodeStageVolumes", None),
            ("/csi.v1.Node/nodestagevolume", None),
            ("/csi.v2.Node/NodeStageVolume", None),
            ("/csi.v1.Controller/NodeStageVolume", None),
            ("/csi.v1.Identity/Probe", None),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", None),
            ("csi.v1.Node/NodeStageVolume", None),
            ("", None),
        ] {
            assert_eq!(VolumeMethod::of(path), method, "{path}");
        }
    }

    #[test]
    fn volumes_get_out_whatever_is_known() {
        for completeness in [Completeness::Complete, Completeness::Incomplete(Gap::NotFollowed)] {
            let table = VolumeTable::new(completeness);
            for method in [VolumeMethod::Unstage, VolumeMethod::Unpublish] {
                assert_eq!(judge(method, None, &FENCE, &table, RefusalCode::Auto), Judgement::Pass);
            }
        }
    }

    #[test]
    fn what_is_there_already_passes_and_the_same_elsewhere_does_not() {
        let table = table(&[(stage("/s"), End::Code(0)), (publish("/a"), End::Code(0))]);
        for setting in [RefusalCode::Auto, RefusalCode::FailedPrecondition, RefusalCode::Unavailable] {
            assert_eq!(code(&stage("/s"), &table, setting), None);
            assert_eq!(code(&publish("/a"), &table, setting), None);
            assert!(code(&stage("/t"), &table, setting).is_some());
            assert!(code(&publish("/b"), &table, setting).is_some());
            let other = VolumeCall::Stage { volume: "w".into(), path: "/s".into() };
            assert!(code(&other, &table, setting).is_some());
        }
    }

    #[test]
    fn a_refusal_is_final_only_where_nothing_of_the_volume_can_be_here() {
        use Code::{FailedPrecondition, Unavailable};
        let unstage = VolumeCall::Unstage { volume: "v".into(), path: "/s".into() };
        let (ok, lost, internal) = (End::Code(0), End::Lost, End::Code(13));
        type Row<'a> = (&'a [(VolumeCall, End)], Code, Code);
        let rows: [Row<'_>; 7] = [
            (&[], FailedPrecondition, FailedPrecondition),
            (&[(stage("/s"), internal)], FailedPrecondition, FailedPrecondition),
            (&[(stage("/s"), lost)], Unavailable, Unavailable),
            (&[(publish("/a"), lost)], Unavailable, Unavailable),
            (&[(stage("/s"), ok), (unstage.clone(), internal)], Unavailable, Unavailable),
            (&[(stage("/s"), ok), (unstage, ok)], FailedPrecondition, FailedPrecondition),
            (&[(stage("/other"), ok)], Unavailable, FailedPrecondition),
        ];
        for (calls, staging, publishing) in rows {
            let table = table(calls);
            assert_eq!(code(&stage("/s"), &table, RefusalCode::Auto), Some(staging), "{calls:?}");
            assert_eq!(code(&publish("/b"), &table, RefusalCode::Auto), Some(publishing), "{calls:?}");
            assert_eq!(code(&stage("/s"), &table, RefusalCode::FailedPrecondition), Some(FailedPrecondition));
            assert_eq!(code(&stage("/s"), &table, RefusalCode::Unavailable), Some(Unavailable));
        }
        let mut running = table(&[]);
        running.begin(&stage("/s"));
        assert_eq!(code(&stage("/s"), &running, RefusalCode::Auto), Some(Unavailable), "the first one is under way");
        let incomplete = VolumeTable::new(Completeness::Incomplete(Gap::NotFollowed));
        assert_eq!(code(&stage("/s"), &incomplete, RefusalCode::Auto), Some(Unavailable));
        let unread = judge(VolumeMethod::Publish, None, &FENCE, &table(&[]), RefusalCode::Auto);
        assert!(matches!(unread, Judgement::Refuse { code: Unavailable, .. }));
    }

    #[test]
    fn an_expansion_is_never_refused_for_good() {
        let table = table(&[(stage("/s"), End::Code(0))]);
        let expand = VolumeCall::Expand { volume: "v".into() };
        for setting in [RefusalCode::Auto, RefusalCode::FailedPrecondition, RefusalCode::Unavailable] {
            assert_eq!(code(&expand, &table, setting), Some(Code::Unavailable));
        }
        assert_eq!((Code::FailedPrecondition.number(), Code::Unavailable.number()), (9, 14));
    }

    #[test]
    fn message_says_what_is_broken_since_when_and_how_to_override() {
        insta::assert_snapshot!(message(&FENCE), @"csi-warden: no new volumes of rdma.example.com on this node: PortDown: mlx5_0 port 1 is DOWN, physically Polling (since 2026-11-30T22:38:37Z). Volumes in use can still be unmounted. To override, on the node: csi-warden fence off --for 30m --reason …");
        let text = message(&Fence { reason: "a\n\tb\u{7}\u{202e}c", ..FENCE });
        assert!(text.contains("on this node: a bc (since "), "{text}");
    }

    proptest! {
        #[test]
        fn message_is_one_short_line_whatever_it_tells(driver in ".*", reason in ".*", utc in ".*") {
            let long = reason.repeat(40);
            for reason in [&reason, &long] {
                let fence = Fence { driver: &driver, reason, since_utc: &utc };
                let text = message(&fence);
                prop_assert!(text.len() <= MOST_BYTES, "{} bytes", text.len());
                prop_assert!(!text.contains(char::is_control));
                prop_assert!(text.ends_with("csi-warden fence off --for 30m --reason …"));
            }
        }
    }
}
