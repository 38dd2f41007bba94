//! NodeGetInfo's answer with topology segments of ours, and with a lower limit of volumes.
//!
//! The driver's bytes stay as they are, whatever fields a later CSI adds, and ours are appended: by protobuf's rules a message field
//! that comes twice is merged, a map takes both sets of entries, and of a number that comes twice the last one counts.

use crate::api::csi::{NodeGetInfoResponse, Topology};
use prost::Message;
use std::collections::BTreeMap;

/// The driver's answer, with ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// The message.
    pub bytes: Vec<u8>,
    /// Keys of ours that the driver gives other values; the driver's count.
    pub overruled: Vec<String>,
}

/// What the answer says of how many volumes the node takes. Zero or less means "no limit" to the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// What the driver says.
    Drivers,
    /// So many.
    Most(i64),
    /// What the driver says, and the largest number there is for "no limit": the scheduler wakes the pods that waited for a limit
    /// to rise, and does not when it goes away.
    AsNumber,
}

/// The most that CSINode can say.
const LARGEST: i64 = i32::MAX as i64;

/// Adds segments to the driver's answer, and puts `limit` in place of its own.
///
/// # Errors
/// When the bytes are no answer to NodeGetInfo; they are best passed on as they are.
pub fn merge(answer: &[u8], topology: &BTreeMap<String, String>, limit: Limit) -> Result<Merged, prost::DecodeError> {
    let NodeGetInfoResponse { max_volumes_per_node, accessible_topology, .. } = NodeGetInfoResponse::decode(answer)?;
    let theirs = accessible_topology.unwrap_or_default().segments;
    let most_volumes = match limit {
        Limit::Most(count) => Some(count),
        Limit::AsNumber if max_volumes_per_node <= 0 => Some(LARGEST),
        Limit::Drivers | Limit::AsNumber => None,
    };
    let mut merged = Merged { bytes: answer.to_vec(), overruled: Vec::new() };
    let mut segments = std::collections::HashMap::new();
    for (key, value) in topology {
        // CSI's keys are the same in either case.
        match theirs.iter().find(|(theirs, _)| theirs.eq_ignore_ascii_case(key)) {
            None => drop(segments.insert(key.clone(), value.clone())),
            Some((theirs, same)) if theirs == key && same == value => {}
            Some(_) => merged.overruled.push(key.clone()),
        }
    }
    let ours = NodeGetInfoResponse {
        node_id: String::new(),
        max_volumes_per_node: most_volumes.unwrap_or_default(),
        accessible_topology: (!segments.is_empty()).then_some(Topology { segments }),
    };
    merged.bytes.extend(ours.encode_to_vec());
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn answer(segments: &[(&str, &str)], limit: i64) -> Vec<u8> {
        NodeGetInfoResponse {
            node_id: "node-1".into(),
            max_volumes_per_node: limit,
            accessible_topology: (!segments.is_empty()).then(|| Topology {
                segments: segments.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            }),
        }
        .encode_to_vec()
    }

    fn topology(segments: &[(&str, &str)]) -> BTreeMap<String, String> {
        segments.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn segments(bytes: &[u8]) -> BTreeMap<String, String> {
        let read = NodeGetInfoResponse::decode(bytes).unwrap();
        assert_eq!(read.node_id, "node-1");
        read.accessible_topology.unwrap_or_default().segments.into_iter().collect()
    }

    #[test]
    fn segments_are_added_and_the_drivers_are_never_overridden() {
        let driver = answer(&[("d.io/zone", "z1"), ("d.io/rack", "r1")], 7);
        let ours = topology(&[("d.io/zone", "z2"), ("D.io/RACK", "r1"), ("x.io/switch", "leaf1")]);
        let merged = merge(&driver, &ours, Limit::Drivers).unwrap();
        assert_eq!(
            segments(&merged.bytes),
            topology(&[("d.io/zone", "z1"), ("d.io/rack", "r1"), ("x.io/switch", "leaf1")])
        );
        assert_eq!(merged.overruled, ["D.io/RACK", "d.io/zone"]);
        assert_eq!(NodeGetInfoResponse::decode(&*merged.bytes).unwrap().max_volumes_per_node, 7);
        let same = merge(&driver, &topology(&[("d.io/zone", "z1")]), Limit::Drivers).unwrap();
        assert_eq!((same.bytes, same.overruled.len()), (driver, 0), "nothing to add");
    }

    #[test]
    fn a_driver_without_topology_or_limit_gets_ours() {
        let merged = merge(&answer(&[], 0), &topology(&[("x.io/switch", "leaf1")]), Limit::Most(1)).unwrap();
        assert_eq!(segments(&merged.bytes), topology(&[("x.io/switch", "leaf1")]));
        assert_eq!(NodeGetInfoResponse::decode(&*merged.bytes).unwrap().max_volumes_per_node, 1);
        let lowered = merge(&answer(&[], 128), &BTreeMap::new(), Limit::Most(1)).unwrap();
        assert_eq!(NodeGetInfoResponse::decode(&*lowered.bytes).unwrap().max_volumes_per_node, 1);
    }

    #[test]
    fn fields_that_are_not_known_here_stay_to_the_byte() {
        let mut driver = answer(&[("d.io/zone", "z1")], 0);
        // Field 100, two bytes long, and field 15, a varint.
        driver.extend([0xa2, 0x06, 0x02, b'h', b'i', 0x78, 0x96, 0x01]);
        let merged = merge(&driver, &topology(&[("x.io/switch", "leaf1")]), Limit::Most(1)).unwrap();
        assert!(merged.bytes.starts_with(&driver));
        assert_eq!(segments(&merged.bytes).len(), 2);
    }

    #[test]
    fn no_limit_is_told_as_a_number_only_where_the_driver_has_none() {
        for (drivers, told) in [(0, LARGEST), (-1, LARGEST), (16, 16)] {
            let merged = merge(&answer(&[], drivers), &BTreeMap::new(), Limit::AsNumber).unwrap();
            assert_eq!(NodeGetInfoResponse::decode(&*merged.bytes).unwrap().max_volumes_per_node, told);
        }
    }

    #[test]
    fn what_is_no_answer_is_told_apart() {
        assert!(merge(&[0xff; 5], &BTreeMap::new(), Limit::Drivers).is_err());
    }

    proptest! {
        #[test]
        fn reading_the_merged_bytes_gives_both_and_the_driver_wins(
            theirs in proptest::collection::hash_map("[a-c]{1,2}", "[a-z]{1,3}", 0..6),
            ours in proptest::collection::btree_map("[a-c]{1,2}", "[a-z]{1,3}", 0..6),
            limit in any::<i64>(),
        ) {
            let driver = NodeGetInfoResponse {
                node_id: "node-1".into(),
                max_volumes_per_node: limit,
                accessible_topology: Some(Topology { segments: theirs.clone() }),
            };
            let merged = merge(&driver.encode_to_vec(), &ours, Limit::Drivers).unwrap();
            let read = NodeGetInfoResponse::decode(&*merged.bytes).unwrap();
            let mut both: HashMap<String, String> = ours.into_iter().collect();
            both.extend(theirs);
            prop_assert_eq!(read.accessible_topology.unwrap_or_default().segments, both);
            prop_assert_eq!(read.max_volumes_per_node, limit);
        }
    }
}
