//! Calls one after the other and at once, and at last any number of them beside a driver that does what it is asked.

use super::*;
use proptest::prelude::*;

const OK: End = End::Code(0);
const INTERNAL: End = End::Code(13);
const UNAVAILABLE: End = End::Code(14);

fn table() -> VolumeTable {
    VolumeTable::new(Completeness::Complete)
}

fn stage(volume: &str) -> VolumeCall {
    VolumeCall::Stage { volume: volume.into(), path: "/stage".into() }
}

fn unstage(volume: &str) -> VolumeCall {
    VolumeCall::Unstage { volume: volume.into(), path: "/stage".into() }
}

fn publish(target: &str) -> VolumeCall {
    VolumeCall::Publish { volume: "v".into(), target: target.into() }
}

fn unpublish(target: &str) -> VolumeCall {
    VolumeCall::Unpublish { volume: "v".into(), target: target.into() }
}

fn run(table: &mut VolumeTable, call: &VolumeCall, end: End) {
    let id = table.begin(call);
    table.end(id, end);
}

fn presence(table: &VolumeTable) -> Option<Presence> {
    table.places().next().map(|place| place.presence)
}

#[test]
fn a_volume_from_before_us_is_learnt_from_an_answer_about_it() {
    let target = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount";
    let learn = |table: &mut VolumeTable, mark: Option<u64>| {
        table.answered_at("v".into(), target.into(), mark.unwrap());
        table.is_at("v", Kind::Published, target)
    };
    let mut table = VolumeTable::new(Completeness::Incomplete(Gap::NotFollowed));
    let mark = table.could_learn("v", target);
    let unpublish = VolumeCall::Unpublish { volume: "v".into(), target: target.into() };
    let id = table.begin(&unpublish);
    assert_eq!(table.could_learn("v", target), None, "it is on its way out");
    table.end(id, End::Code(0));
    assert!(!learn(&mut table, mark), "it went meanwhile");
    let mark = table.could_learn("v", target);
    assert!(learn(&mut table, mark));
    assert_eq!((table.could_learn("v", target), table.in_use()), (None, InUse::Yes(1)), "known");
    assert!(table.was_staged_before("v") && !table.was_staged_before("w"));
    let id = table.begin(&unpublish);
    table.end(id, End::Code(0));
    assert_eq!(table.in_use(), InUse::Unknown, "out again");
    assert!(!table.was_staged_before("v"));
    assert_eq!(table.could_learn("v", "/var/lib/kubelet/plugins/kubernetes.io/csi/d/x/globalmount"), None);
    assert_eq!(VolumeTable::new(Completeness::Complete).could_learn("v", target), None, "nothing to learn");
}

/// The driver published it, and the agent was killed before it had written that down.
#[test]
fn a_publish_whose_end_was_lost_is_known_by_an_answer_about_the_volume() {
    let target = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/pv/mount";
    let mut table = table();
    assert!(!table.can_learn());
    run(&mut table, &publish(target), End::Lost);
    assert!(table.can_learn() && !table.is_at("v", Kind::Published, target));
    let mark = table.could_learn("v", target).unwrap();
    table.answered_at("v".into(), target.into(), mark);
    assert!(table.is_at("v", Kind::Published, target) && table.is_settled("v"));
    assert_eq!((table.can_learn(), table.could_learn("v", target)), (false, None));
    run(&mut table, &unpublish(target), INTERNAL);
    assert_eq!(table.could_learn("v", target), None, "it is on its way out");
    run(&mut table, &unpublish(target), OK);
    assert_eq!((table.in_use(), table.places, table.bytes), (InUse::No, 0, 0));
}

#[test]
fn a_volume_is_in_use_from_the_begin_of_its_stage_to_the_good_end_of_its_unstage() {
    let mut table = table();
    assert_eq!(table.in_use(), InUse::No);
    let id = table.begin(&stage("v"));
    assert_eq!(table.in_use(), InUse::Yes(1));
    assert!(!table.is_settled("v") && !table.is_at("v", Kind::Staged, "/stage"));
    table.end(id, OK);
    assert!(table.is_settled("v") && table.is_at("v", Kind::Staged, "/stage"));
    assert!(!table.is_at("v", Kind::Staged, "/other") && !table.is_at("v", Kind::Published, "/stage"));
    let id = table.begin(&unstage("v"));
    assert_eq!(table.in_use(), InUse::Yes(1));
    assert!(!table.is_at("v", Kind::Staged, "/stage"), "it is leaving");
    table.end(id, OK);
    assert_eq!(table.in_use(), InUse::No);
    assert_eq!((table.places, table.bytes, table.flights.len()), (0, 0, 0), "nothing is left behind");
}

#[test]
fn a_first_stage_with_a_final_error_is_forgotten_and_with_any_other_remembered() {
    for code in 1..=16 {
        let mut table = table();
        run(&mut table, &stage("v"), End::Code(code));
        let open = [1, 4, 8, 10, 14].contains(&code);
        assert_eq!(presence(&table), open.then_some(Presence::Coming), "code {code}");
        assert_eq!(table.in_use() == InUse::Yes(1), open, "code {code}");
        run(&mut table, &stage("v"), INTERNAL);
        assert_eq!(table.in_use(), InUse::No, "the driver has decided now");
    }
    let mut table = table();
    run(&mut table, &stage("v"), End::Lost);
    assert_eq!(presence(&table), Some(Presence::Coming));
}

#[test]
fn a_repeated_stage_that_fails_leaves_the_volume_staged() {
    for (end, settled) in [(INTERNAL, true), (UNAVAILABLE, false), (End::Lost, false)] {
        let mut table = table();
        run(&mut table, &stage("v"), OK);
        run(&mut table, &stage("v"), end);
        assert!(table.is_at("v", Kind::Staged, "/stage"));
        assert_eq!(table.is_settled("v"), settled, "{end:?}");
    }
}

#[test]
fn a_failed_unstage_keeps_the_volume_in_use_and_unsettled_whatever_its_code() {
    for end in [INTERNAL, UNAVAILABLE, End::Lost] {
        let mut table = table();
        run(&mut table, &stage("v"), OK);
        run(&mut table, &unstage("v"), end);
        assert_eq!((presence(&table), table.is_settled("v")), (Some(Presence::Leaving), false), "{end:?}");
        run(&mut table, &stage("v"), INTERNAL);
        assert_eq!(table.in_use(), InUse::Yes(1), "a stage that failed does not take away");
        run(&mut table, &unstage("v"), OK);
        assert_eq!(table.in_use(), InUse::No);
    }
}

#[test]
fn targets_of_one_volume_are_counted_as_one_volume_and_end_one_by_one() {
    let mut table = table();
    run(&mut table, &stage("v"), OK);
    run(&mut table, &publish("/a"), OK);
    run(&mut table, &publish("/b"), OK);
    run(&mut table, &stage("w"), OK);
    assert_eq!(table.in_use(), InUse::Yes(2));
    for call in [unpublish("/a"), unstage("v"), unstage("w")] {
        run(&mut table, &call, OK);
    }
    assert!(table.is_at("v", Kind::Published, "/b"));
    run(&mut table, &unpublish("/b"), OK);
    assert_eq!(table.in_use(), InUse::No);
}

#[test]
fn a_late_end_of_an_older_call_does_not_overwrite_the_newer_ones() {
    let mut table = table();
    let (old, new) = (table.begin(&unstage("v")), table.begin(&stage("v")));
    table.end(new, OK);
    table.end(old, OK);
    assert!(table.is_at("v", Kind::Staged, "/stage"), "the stage is the newer one");

    let mut table = VolumeTable::new(Completeness::Complete);
    let (old, new) = (table.begin(&stage("v")), table.begin(&unstage("v")));
    table.end(new, OK);
    assert_eq!(table.in_use(), InUse::Yes(1), "the stage is still under way");
    table.end(old, INTERNAL);
    assert_eq!(table.in_use(), InUse::No, "and did nothing");
}

#[test]
fn an_unstage_that_a_stage_overtook_may_have_been_done_first() {
    for end in [OK, UNAVAILABLE] {
        let mut table = table();
        let (stage, unstage) = (table.begin(&stage("v")), table.begin(&unstage("v")));
        table.end(stage, end);
        table.end(unstage, OK);
        assert_eq!(presence(&table), Some(Presence::Leaving), "{end:?}");
    }
}

#[test]
fn an_expansion_under_way_or_unanswered_keeps_its_volume_unsettled() {
    let mut table = table();
    let expand = VolumeCall::Expand { volume: "v".into() };
    run(&mut table, &expand, UNAVAILABLE);
    assert_eq!(table.in_use(), InUse::No, "an expansion alone puts nothing here");
    run(&mut table, &stage("v"), OK);
    let id = table.begin(&expand);
    assert!(!table.is_settled("v"));
    table.end(id, UNAVAILABLE);
    assert!(!table.is_settled("v"));
    run(&mut table, &expand, INTERNAL);
    assert!(table.is_settled("v"));
}

#[test]
fn an_incomplete_table_never_says_no() {
    for gap in [Gap::NotFollowed, Gap::AgentDied] {
        let mut table = VolumeTable::new(Completeness::Incomplete(gap));
        assert_eq!(table.in_use(), InUse::Unknown);
        run(&mut table, &stage("v"), OK);
        assert_eq!(table.in_use(), InUse::Yes(1));
        run(&mut table, &unstage("v"), OK);
        assert_eq!(table.in_use(), InUse::Unknown);
    }
    let mut table = table();
    table.undecodable();
    assert_eq!(table.completeness(), Completeness::Incomplete(Gap::Undecodable));
}

#[test]
fn too_much_makes_it_incomplete_and_no_larger() {
    let long = "x".repeat(MOST_TEXT_BYTES + 1);
    for call in [stage(&long), publish(&long), VolumeCall::Expand { volume: long.clone() }] {
        let mut table = table();
        run(&mut table, &call, OK);
        assert_eq!((table.in_use(), table.bytes), (InUse::Unknown, 0));
        assert_eq!(table.completeness(), Completeness::Incomplete(Gap::Full));
    }
    let mut many = table();
    for number in 0..MOST_PLACES {
        run(&mut many, &stage(&number.to_string()), OK);
    }
    assert_eq!(many.completeness(), Completeness::Complete);
    run(&mut many, &stage("one more"), OK);
    assert_eq!(many.completeness(), Completeness::Incomplete(Gap::Full));
    assert_eq!(many.in_use(), InUse::Yes(MOST_PLACES));
    let mut wide = table();
    for number in 0..MOST_BYTES / MOST_TEXT_BYTES + 1 {
        run(&mut wide, &publish(&format!("{number:04096}")), OK);
    }
    assert_eq!(wide.completeness(), Completeness::Incomplete(Gap::Full));
    assert!(wide.bytes <= MOST_BYTES);
}

#[test]
fn what_is_restored_is_what_was_there_with_calls_in_flight_counted_as_lost() {
    let mut table = table();
    run(&mut table, &stage("v"), OK);
    table.begin(&publish("/a"));
    table.begin(&unstage("v"));
    let places: Vec<Place> = table.places().collect();
    assert_eq!(places.iter().map(|place| place.presence).collect::<Vec<_>>(), [Presence::Leaving, Presence::Coming]);
    let back = VolumeTable::with(places.clone(), Completeness::Complete);
    assert_eq!(back.places().collect::<Vec<_>>(), places);
    for place in places {
        assert_eq!(Kind::named(place.kind.name()), Some(place.kind));
        assert_eq!(Presence::named(place.presence.name()), Some(place.presence));
    }
}

#[test]
fn what_the_kubelet_recorded_may_be_staged_again_and_is_not_settled() {
    let mut table = table();
    run(&mut table, &stage("v"), OK);
    table.add_recorded([("v".into(), "/stage".into()), ("w".into(), "/stage".into())]);
    assert!(table.is_settled("v"), "what is known better stays");
    assert!(table.is_at("w", Kind::Staged, "/stage") && !table.is_settled("w"));
    assert_eq!(table.in_use(), InUse::Yes(2));
}

#[test]
fn what_another_agent_left_goes_over_what_was_known_and_calls_under_way_stay_so() {
    let mut table = table();
    run(&mut table, &stage("out"), OK);
    run(&mut table, &stage("here"), OK);
    let (removing, adding) = (table.begin(&unstage("here")), table.begin(&stage("new")));
    let there = |volume: &str| Place {
        volume: volume.into(),
        kind: Kind::Staged,
        path: "/stage".into(),
        presence: Presence::There,
    };
    table.taken_back([there("here"), there("theirs")]);
    assert_eq!(table.in_use(), InUse::Yes(3), "here, theirs, new");
    assert!(!table.is_at("out", Kind::Staged, "/stage"), "the other one let it out");
    assert!(table.is_at("theirs", Kind::Staged, "/stage") && !table.is_at("here", Kind::Staged, "/stage"));
    table.end(removing, OK);
    assert_eq!(table.in_use(), InUse::Yes(3), "the other one may have staged it after that");
    table.end(adding, INTERNAL);
    assert_eq!((table.in_use(), table.flights.len()), (InUse::Yes(2), 0));
    for volume in ["here", "theirs"] {
        run(&mut table, &unstage(volume), OK);
    }
    assert_eq!((table.in_use(), table.places, table.bytes), (InUse::Unknown, 0, 0), "there may be more");
}

#[test]
fn only_what_a_file_would_show_makes_it_dirty() {
    let mut table = table();
    assert!(table.take_dirty(), "a new table is not on disk yet");
    let id = table.begin(&stage("v"));
    assert!(table.take_dirty() && !table.take_dirty());
    table.end(id, UNAVAILABLE);
    assert!(!table.take_dirty(), "a lost call is written as one in flight is");
    run(&mut table, &VolumeCall::Expand { volume: "v".into() }, OK);
    assert!(!table.take_dirty());
    table.undecodable();
    assert!(table.take_dirty());
}

#[test]
fn a_second_end_is_not_heard() {
    let mut table = table();
    let id = table.begin(&stage("v"));
    table.end(id, OK);
    table.end(id, INTERNAL);
    assert!(table.is_at("v", Kind::Staged, "/stage"));
}

/// A call in a driver that does what it is asked at some moment between begin and end.
#[derive(Debug, Clone, Copy)]
enum Step {
    Begin(bool),
    /// The driver does the call, numbered among those under way.
    Do(usize),
    Answer(usize, u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        any::<bool>().prop_map(Step::Begin),
        any::<usize>().prop_map(Step::Do),
        (any::<usize>(), 0_u8..3).prop_map(|(call, end)| Step::Answer(call, end)),
    ];
    proptest::collection::vec(step, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_volume_that_is_there_is_never_called_gone(steps in steps()) {
        let (mut table, mut there) = (table(), false);
        let mut under_way: Vec<(CallId, bool, bool)> = Vec::new();
        let mut overlapped = false;
        for step in steps {
            match step {
                Step::Begin(adds) => {
                    let call = if adds { stage("v") } else { unstage("v") };
                    overlapped |= !under_way.is_empty();
                    under_way.push((table.begin(&call), adds, false));
                }
                Step::Do(number) if !under_way.is_empty() => {
                    let number = number % under_way.len();
                    let (_, adds, done) = &mut under_way[number];
                    *done = true;
                    there = *adds;
                }
                Step::Answer(number, end) if !under_way.is_empty() => {
                    let (id, adds, done) = under_way.remove(number % under_way.len());
                    // What was done is not denied, nor a stage of what is staged; what is lost may have been done or not.
                    let end = match (end, done) {
                        (0, _) => { if !done { there = adds; } OK }
                        (1, false) if !(adds && there) => INTERNAL,
                        _ => End::Lost,
                    };
                    table.end(id, end);
                    if !overlapped && end == OK {
                        prop_assert_eq!(table.in_use() == InUse::No, !adds, "and one after the other, never too late");
                    }
                }
                Step::Do(_) | Step::Answer(..) => {}
            }
            prop_assert!(!there || table.in_use() == InUse::Yes(1), "there, and called gone");
            prop_assert!(overlapped || there || !table.is_settled("v") || table.in_use() == InUse::No);
        }
    }
}
