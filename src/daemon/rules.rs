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
        ProbeKind::Rdma(rdma) => format!("rdma {rdma:?}"),
        ProbeKind::Nvme(nvme) => format!("nvme {nvme:?}"),
        // Values of an environment may be secrets.
        ProbeKind::Gpu(gpu) => format!("gpu {:?} {:?} {:?} {:?}", gpu.host, gpu.select, gpu.rule, gpu.xid),
        ProbeKind::Kmsg(kmsg) => format!("kmsg {kmsg:?}"),
    };
    format!("{kind} {:?} {:?}", probe.thresholds, probe.on_failure)
}

/// The probes, as the policy knows them.
pub(crate) fn rules(watched: &Watched) -> Vec<ProbeRule> {
    let rule = |probe: &ProbeSettings| ProbeRule {
        name: probe.name.clone(),
        asks: question(probe),
        thresholds: probe.thresholds,
    };
    watched.probes.iter().map(rule).collect()
}

/// The groups by numbers; every other probe whose failures count is a group of its own.
pub(crate) fn groups(watched: &Watched) -> Vec<GroupRule> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::probes::GroupSettings;
    use crate::policy::probe_verdict::Thresholds;
    use crate::probe::exec::Command;
    use std::num::NonZeroU32;
    use std::time::Duration;

    fn probe(name: &str, on_failure: OnFailure) -> ProbeSettings {
        let (one, second) = (NonZeroU32::MIN, Duration::from_secs(1));
        let command = Command {
            program: "check".into(),
            arguments: Vec::new(),
            environment: vec![("TOKEN".into(), "secret".into())],
        };
        ProbeSettings {
            name: name.into(),
            kind: ProbeKind::Exec { command },
            period: second,
            timeout: second,
            confirm_interval: second,
            thresholds: Thresholds { failure: one, success: one },
            on_failure,
        }
    }

    fn watched(require: Require) -> Watched {
        let probes = vec![
            probe("rail0", OnFailure::Fail),
            probe("rail1", OnFailure::Fail),
            probe("rail2", OnFailure::Warn),
            probe("disk", OnFailure::Fail),
            probe("wear", OnFailure::Warn),
        ];
        let rails = GroupSettings {
            name: "rails".into(),
            probes: ["rail0", "rail1", "rail2"].map(String::from).into(),
            require,
        };
        Watched { probes, groups: vec![rails], warnings: Vec::new() }
    }

    #[test]
    fn groups_have_their_members_others_stand_alone_and_probes_that_only_warn_have_no_say() {
        let alone = GroupRule { members: vec![3], require: 1 };
        let rails = |require| GroupRule { members: vec![0, 1], require };
        assert_eq!(groups(&watched(Require::Any)), [rails(1), alone.clone()]);
        assert_eq!(groups(&watched(Require::All)), [rails(2), alone.clone()]);
        let three = NonZeroU32::new(3).unwrap();
        assert_eq!(groups(&watched(Require::AtLeast(three))), [rails(2), alone], "never more than there are");
    }

    #[test]
    fn values_of_variables_are_no_part_of_the_question() {
        let asked = asks(&watched(Require::All));
        assert!(asked.contains("TOKEN") && !asked.contains("secret"), "{asked}");
    }
}
