//! The `kmsg` probe: what the kernel log says of the hardware, by a table of lines.

pub mod log;
pub mod record;

use super::Probe;
use super::lane::Abandoned;
use super::observed::Observed;
use crate::config::probes::KmsgSettings;
use crate::policy::kernel_log::{Class, Held, KernelLogPolicy};
use crate::policy::outcome::{Outcome, Reason, Severity};
use crate::probe::observed::judged;
use log::{KernelLog, Line};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The probe.
#[derive(Debug)]
pub struct Kmsg {
    log: KernelLog,
    policy: KernelLogPolicy,
    observed: Option<Arc<Observed>>,
}

impl Kmsg {
    /// Reads the log from `settings.since` on.
    pub fn new(settings: &KmsgSettings) -> Self {
        let log = KernelLog::new(&settings.host.dev, settings.since);
        Self { log, policy: KernelLogPolicy::new(settings.rules.clone()), observed: None }
    }

    /// Reads nothing: the lines of a trace are handed over.
    pub fn replayed(settings: &KmsgSettings) -> Self {
        Self { log: KernelLog::replayed(), ..Self::new(settings) }
    }

    /// Takes in a line of the trace; one that means nothing is left out. Says whether it wakes the probe.
    pub fn hand_over(&mut self, line: Line) -> bool {
        let concerns = self.policy.concerns(&line.text);
        if concerns {
            self.log.hand_over(line);
        }
        concerns
    }
}

impl Probe for Kmsg {
    type Seen = Result<(), Reason>;

    async fn look(&mut self, _timeout: Duration) -> Result<Self::Seen, Abandoned> {
        // Nothing here waits.
        Ok(self.log.look(|text| self.policy.concerns(text)).await)
    }

    fn judge(&mut self, seen: Self::Seen, now: Instant) -> Option<Outcome> {
        for line in self.log.take() {
            self.policy.read(line.message(now), now);
        }
        let mut observed: Observed = self.policy.held(now).iter().map(told).collect();
        if self.log.lost() > 0 {
            observed.insert("lostPlaces".to_owned(), json!(self.log.lost()));
        }
        self.observed = (!observed.is_empty()).then(|| Arc::new(observed));
        Some(self.policy.judge(seen.err(), now))
    }

    async fn changed(&mut self) {
        self.log.changed().await;
    }

    fn observed(&self) -> Option<Arc<Observed>> {
        self.observed.clone()
    }
}

/// `mlx5-health/0000:41:00.0` and what its line means.
pub(super) fn told(held: &Held) -> (String, Value) {
    let reason = Reason::new("KernelLog", held.text.clone());
    let mut map = judged(&match held.class {
        Class::Fatal => Outcome::Failure(reason, Severity::Hard),
        Class::Warn | Class::Ignore => Outcome::Warning(reason),
    });
    map.insert("lines".to_owned(), json!(held.lines));
    let subject = match &held.device {
        Some(device) => format!("{}/{device}", held.rule),
        None => held.rule.clone(),
    };
    (subject, Value::Object(map))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::probes::HostTree;
    use crate::policy::kernel_log::Since;
    use crate::policy::kernel_log_rules::built_in;
    use std::fs;
    use std::path::Path;

    fn probe(folder: &Path, since: Since) -> Kmsg {
        let host = HostTree { sysfs: "/none".into(), dev: folder.to_owned(), proc: "/none".into() };
        Kmsg::new(&KmsgSettings { host, since, rules: built_in() })
    }

    async fn said(probe: &mut Kmsg) -> Outcome {
        let seen = probe.look(Duration::from_secs(3)).await.unwrap();
        probe.judge(seen, tokio::time::Instant::now().into_std()).unwrap()
    }

    #[tokio::test]
    async fn history_condemns_only_when_it_is_asked_for_and_young() {
        let folder = tempfile::tempdir().unwrap();
        let age = |seconds: u64| {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            u64::try_from(time.tv_sec).unwrap().saturating_sub(seconds) * 1_000_000
        };
        let line = format!("3,7,{},-;nvme nvme0: Removing after probe failure status: -19\n", age(5));
        fs::write(folder.path().join("kmsg"), &line).unwrap();
        assert_eq!(said(&mut probe(folder.path(), Since::Now)).await, Outcome::Success);
        let mut from_boot = probe(folder.path(), Since::Boot);
        assert_eq!(said(&mut from_boot).await.name(), "failure");
        let observed = from_boot.observed().unwrap();
        assert_eq!(observed["nvme-removed/nvme0"]["outcome"], json!("failure"));
        // The way back: the log goes away and comes again, and the controller is found.
        fs::write(
            folder.path().join("kmsg"),
            format!("{line}6,8,{},-;nvme nvme0: pci function 0000:01:00.0\n", age(0)),
        )
        .unwrap();
        assert_eq!(said(&mut from_boot).await, Outcome::Success);
        assert!(from_boot.observed().is_none());
    }
}
