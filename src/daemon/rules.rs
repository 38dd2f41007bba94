//! Settings in the policy's terms.

use crate::config::probes::{OnFailure, ProbeKind, ProbeSettings, Require};
use crate::config::watched::Watched;
use crate::policy::group::GroupRule;
use crate::policy::probe_verdict::ProbeRule;

/// What is asked, in words. Another question is another verdict.
pub(super) fn asks(watched: &Watched) -> String {
    let probes: Vec<String> =
        watched.probes.iter().map(|probe| format!("{} {}", probe.name, question(probe))).collect();
    format!("{} | {:?}", probes.join(" | "), watched.groups)
}

/// Values of variables may be secrets, and this ends up in the state file.
fn question(probe: &ProbeSettings) -> String {
    let kind = match &probe.kind {
        ProbeKind::HealthFile { path, limits } => format!("health-file {} {limits:?}", path.display()),
        ProbeKind::Csi { socket } => format!("csi {}", socket.display()),
        ProbeKind::Exec { command } => {
            let names: Vec<_> = command.environment.iter().map(|(name, _)| name).collect();
            format!("exec {:?} {:?} {names:?}", command.program, command.arguments)
        }
    };
    format!("{kind} {:?} {:?}", probe.thresholds, probe.on_failure)
}

/// The probes, as the policy knows them.
pub(super) fn rules(watched: &Watched) -> Vec<ProbeRule> {
    let rule = |probe: &ProbeSettings| ProbeRule {
        name: probe.name.clone(),
        asks: question(probe),
        thresholds: probe.thresholds,
    };
    watched.probes.iter().map(rule).collect()
}

/// The groups by numbers; every other probe whose failures count is a group of its own.
pub(super) fn groups(watched: &Watched) -> Vec<GroupRule> {
    let number = |name: &String| watched.probes.iter().position(|probe| probe.name == *name);
    let counts = |member: &usize| watched.probes.get(*member).is_some_and(|probe| probe.on_failure == OnFailure::Fail);
    let named = watched.groups.iter().map(|group| {
        let members: Vec<usize> = group.probes.iter().filter_map(number).filter(counts).collect();
        let require = match group.require {
            Require::All => members.len(),
            Require::Any => 1,
            Require::AtLeast(count) => usize::try_from(count.get()).unwrap_or(usize::MAX),
        };
        GroupRule { require: require.min(members.len()), members }
    });
    let alone = (0..watched.probes.len()).filter(counts).filter(|member| {
        let name = &watched.probes[*member].name;
        !watched.groups.iter().any(|group| group.probes.contains(name))
    });
    let alone = alone.map(|member| GroupRule { members: vec![member], require: 1 });
    named.filter(|group| !group.members.is_empty()).chain(alone).collect()
}
