//! What is counted and measured, and how it reads in Prometheus' text format. The table is docs/metrics.md.

mod csi_methods;

use crate::grpc::code;
use crate::grpc::connect::CallError;
use crate::policy::outcome::{Health, Outcome, Reason};
use csi_methods::is_csi;
use prometheus::core::Collector;
use prometheus::{Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use prometheus::{Opts, Registry, TextEncoder};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// What dashboards for CSI sidecars know the driver by before it has given its name.
const UNKNOWN_DRIVER: &str = "unknown-driver";

/// The buckets of every CSI sidecar, so that one dashboard fits all.
const CALL_BUCKETS: [f64; 13] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// A look at a file takes microseconds, a command milliseconds; 3 s is the default timeout.
const PROBE_BUCKETS: [f64; 10] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 0.5, 1.0, 3.0];

/// What methods of other services go by.
const OTHER_METHOD: &str = "other";

const VERDICTS: [Health; 3] = [Health::Unknown, Health::Healthy, Health::Unhealthy];

/// The process's metrics. Clones are handles to the same ones.
#[derive(Debug, Clone)]
pub struct Metrics(Arc<Families>);

#[derive(Debug)]
struct Families {
    registry: Registry,
    driver: OnceLock<String>,
    calls: HistogramVec,
    registered: IntGaugeVec,
    verdict: IntGaugeVec,
    transitions: IntCounterVec,
    probe_seconds: HistogramVec,
    probe_outcomes: IntCounterVec,
    probe_last_success: GaugeVec,
    kubelet_refusals: IntCounter,
    kubelet_silence: IntCounter,
    publications: IntCounter,
    fenced: IntGaugeVec,
    fence_override: IntGaugeVec,
    bypass: IntGauge,
    fence_refusals: IntCounterVec,
    volumes: IntGauge,
    proxy_calls: IntGauge,
    proxy_connections: IntGauge,
}

impl Metrics {
    /// All families, with nothing observed yet. Make it at the start: the process is taken to have begun now.
    pub fn new() -> Self {
        let registry = Registry::new();
        let in_ours = |name: &str, help: &str| Opts::new(name, help).namespace("csi_warden");
        let start =
            Gauge::new("process_start_time_seconds", "[ALPHA] Start time of the process since unix epoch in seconds.");
        known_good(start, &registry).set(since_epoch());
        let build = in_ours("build_info", "Always 1; the version is in the label.");
        let version = [env!("CARGO_PKG_VERSION")];
        known_good(IntGaugeVec::new(build, &["version"]), &registry).with_label_values(&version).set(1);
        Self(Arc::new(Families {
            driver: OnceLock::new(),
            calls: known_good(
                HistogramVec::new(
                    HistogramOpts::new(
                        "csi_sidecar_operations_seconds",
                        "[ALPHA] Container Storage Interface operation duration with gRPC error code status total",
                    )
                    .buckets(CALL_BUCKETS.to_vec()),
                    &["driver_name", "method_name", "grpc_status_code"],
                ),
                &registry,
            ),
            registered: known_good(
                IntGaugeVec::new(
                    in_ours("registered", "1 while the kubelet has the driver, as far as it told us; else 0."),
                    &["driver_name"],
                ),
                &registry,
            ),
            verdict: known_good(
                IntGaugeVec::new(
                    in_ours("verdict", "1 for the verdict that holds, 0 for the others."),
                    &["driver_name", "verdict"],
                ),
                &registry,
            ),
            transitions: known_good(
                IntCounterVec::new(
                    in_ours("transitions_total", "Changes of the verdict, by the new one and the reason's code."),
                    &["driver_name", "to", "reason"],
                ),
                &registry,
            ),
            probe_seconds: known_good(
                HistogramVec::new(
                    HistogramOpts::new("probe_seconds", "How long one round of a probe took.")
                        .namespace("csi_warden")
                        .buckets(PROBE_BUCKETS.to_vec()),
                    &["probe"],
                ),
                &registry,
            ),
            probe_outcomes: known_good(
                IntCounterVec::new(
                    in_ours("probe_outcomes_total", "Rounds of a probe, by what they said."),
                    &["probe", "outcome"],
                ),
                &registry,
            ),
            probe_last_success: known_good(
                GaugeVec::new(
                    in_ours(
                        "probe_last_success_timestamp_seconds",
                        "When a probe last succeeded, since unix epoch in seconds.",
                    ),
                    &["probe"],
                ),
                &registry,
            ),
            kubelet_refusals: known_good(
                IntCounter::with_opts(in_ours("kubelet_refusals_total", "Times the kubelet refused the driver.")),
                &registry,
            ),
            kubelet_silence: known_good(
                IntCounter::with_opts(in_ours(
                    "kubelet_silence_total",
                    "Times the registration socket was shown and the kubelet did not ask.",
                )),
                &registry,
            ),
            publications: known_good(
                IntCounter::with_opts(in_ours(
                    "publications_total",
                    "Times the registration socket was put in its place.",
                )),
                &registry,
            ),
            fenced: known_good(
                IntGaugeVec::new(
                    in_ours("fenced", "1 while new volumes are refused; else 0. By what put the fence up."),
                    &["driver_name", "by"],
                ),
                &registry,
            ),
            fence_override: known_good(
                IntGaugeVec::new(
                    in_ours("fence_override", "1 while an operator's override holds, by what it says; else 0."),
                    &["driver_name", "fence"],
                ),
                &registry,
            ),
            bypass: known_good(
                IntGauge::with_opts(in_ours(
                    "bypass",
                    "1 while the agent stays out of the way after three crashes of its own; else 0.",
                )),
                &registry,
            ),
            fence_refusals: known_good(
                IntCounterVec::new(in_ours("fence_refusals_total", "Calls that the fence refused."), &["method"]),
                &registry,
            ),
            volumes: known_good(
                IntGauge::with_opts(in_ours(
                    "volumes_in_use",
                    "Volumes that are staged or published here, as far as known.",
                )),
                &registry,
            ),
            proxy_calls: known_good(
                IntGauge::with_opts(in_ours("proxy_calls_in_flight", "Calls that are on their way through the proxy.")),
                &registry,
            ),
            proxy_connections: known_good(
                IntGauge::with_opts(in_ours("proxy_connections", "Connections that callers hold open at the proxy.")),
                &registry,
            ),
            registry,
        }))
    }

    /// The driver has given its name; the first one stays. Until then its label is `unknown-driver`.
    pub fn set_driver_name(&self, name: &str) {
        // A second name would be that of another driver at the same socket; dashboards follow the first.
        drop(self.0.driver.set(name.to_owned()));
    }

    /// One call to the driver, by its full method such as `/csi.v1.Identity/Probe`. What never became a call, because there was no
    /// connection, is not counted, as in the other sidecars.
    pub fn observe_call<T>(&self, method: &str, result: &Result<T, CallError>, took: Duration) {
        let code = match result {
            Ok(_) => tonic::Code::Ok,
            Err(error) => match error.grpc_code() {
                Some(code) => code,
                None => return,
            },
        };
        self.0.calls.with_label_values(&[self.driver(), method, code::name(code)]).observe(took.as_secs_f64());
    }

    /// One call that passed the proxy, by its full method as every CSI sidecar gives it. Methods of no CSI service count as one.
    pub fn observe_proxied(&self, method: &str, code: tonic::Code, took: Duration) {
        let method = if is_csi(method) { method } else { OTHER_METHOD };
        self.0.calls.with_label_values(&[self.driver(), method, code::name(code)]).observe(took.as_secs_f64());
    }

    /// The fence is up, put there by `health` or `override`; or `None`: it is down.
    pub fn set_fenced(&self, by: Option<&str>) {
        for one in ["health", "override"] {
            self.0.fenced.with_label_values(&[self.driver(), one]).set((by == Some(one)).into());
        }
    }

    /// An operator's override holds, `on` or `off`; or `None`: there is none.
    pub fn set_override(&self, word: Option<&str>) {
        for one in ["on", "off"] {
            self.0.fence_override.with_label_values(&[self.driver(), one]).set((word == Some(one)).into());
        }
    }

    /// Whether the agent stays out of the way after crashes of its own.
    pub fn set_bypass(&self, bypass: bool) {
        self.0.bypass.set(bypass.into());
    }

    /// The fence refused a call of this method.
    pub fn count_fence_refusal(&self, method: &str) {
        self.0.fence_refusals.with_label_values(&[method]).inc();
    }

    /// How many volumes are known to be here.
    pub fn set_volumes_in_use(&self, count: usize) {
        self.0.volumes.set(count.try_into().unwrap_or(i64::MAX));
    }

    /// One call on its way through the proxy, until it is dropped.
    pub fn proxied_call(&self) -> Held {
        Held::of(&self.0.proxy_calls)
    }

    /// One connection at the proxy, until it is dropped.
    pub fn proxy_connection(&self) -> Held {
        Held::of(&self.0.proxy_connections)
    }

    /// Whether the kubelet has the driver.
    pub fn set_registered(&self, registered: bool) {
        self.0.registered.with_label_values(&[self.driver()]).set(registered.into());
    }

    /// The verdict that holds. Call it once at the start, too.
    pub fn set_verdict(&self, health: Health) {
        for verdict in VERDICTS {
            let holds = i64::from(verdict == health);
            self.0.verdict.with_label_values(&[self.driver(), verdict.name()]).set(holds);
        }
    }

    /// The verdict changed to `to`, for `reason` if there was one.
    pub fn count_transition(&self, to: Health, reason: Option<&Reason>) {
        let code = reason.map_or("", |reason| reason.code);
        self.0.transitions.with_label_values(&[self.driver(), to.name(), code]).inc();
    }

    /// One round of the probe named `probe`.
    pub fn observe_round(&self, probe: &str, outcome: &Outcome, took: Duration) {
        self.0.probe_seconds.with_label_values(&[probe]).observe(took.as_secs_f64());
        self.0.probe_outcomes.with_label_values(&[probe, outcome.name()]).inc();
        match outcome {
            Outcome::Success | Outcome::Warning(_) => {
                self.0.probe_last_success.with_label_values(&[probe]).set(since_epoch());
            }
            Outcome::Failure(..) | Outcome::Unknown(_) => {}
        }
    }

    /// The probe is gone from the settings, and with it all that was said about it.
    pub fn forget_probe(&self, probe: &str) {
        // An error means that there was nothing yet.
        drop(self.0.probe_seconds.remove_label_values(&[probe]));
        drop(self.0.probe_last_success.remove_label_values(&[probe]));
        for outcome in ["success", "warning", "failure", "unknown"] {
            drop(self.0.probe_outcomes.remove_label_values(&[probe, outcome]));
        }
    }

    /// The kubelet said that it did not register the driver.
    pub fn count_refusal(&self) {
        self.0.kubelet_refusals.inc();
    }

    /// The registration socket was put in its place.
    pub fn count_publication(&self) {
        self.0.publications.inc();
    }

    /// The registration socket was shown long enough, and the kubelet did not ask.
    pub fn count_silence(&self) {
        self.0.kubelet_silence.inc();
    }

    /// All of it, in the text format 0.0.4.
    pub fn render(&self) -> String {
        TextEncoder::new()
            .encode_to_string(&self.0.registry.gather())
            .expect("families of one registry have one type each")
    }

    fn driver(&self) -> &str {
        self.0.driver.get().map_or(UNKNOWN_DRIVER, String::as_str)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// One more on a gauge, as long as it is there.
#[derive(Debug)]
pub struct Held(IntGauge);

impl Held {
    fn of(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Names and labels are constants of this file, so a test that makes them once shows them good for ever.
fn known_good<C: Collector + Clone + 'static>(family: prometheus::Result<C>, registry: &Registry) -> C {
    let family = family.expect("the name and the labels are well-formed");
    registry.register(Box::new(family.clone())).expect("no two families share a name");
    family
}

fn since_epoch() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::outcome::Severity;
    use std::path::Path;

    fn status(code: tonic::Code) -> CallError {
        CallError::Status { path: Path::new("/x").to_owned(), source: Box::new(tonic::Status::new(code, "")) }
    }

    #[test]
    fn calls_read_as_those_of_every_csi_sidecar() {
        let metrics = Metrics::new();
        metrics.observe_call("/csi.v1.Identity/GetPluginInfo", &Ok(()), Duration::from_millis(200));
        metrics.set_driver_name("x.example.com");
        metrics.observe_call::<()>(
            "/csi.v1.Identity/Probe",
            &Err(status(tonic::Code::DeadlineExceeded)),
            Duration::ZERO,
        );
        let text = metrics.render();
        for line in [
            "# HELP csi_sidecar_operations_seconds [ALPHA] Container Storage Interface operation duration with gRPC error code status total\n",
            "# TYPE csi_sidecar_operations_seconds histogram\n",
            "csi_sidecar_operations_seconds_bucket{driver_name=\"unknown-driver\",grpc_status_code=\"OK\",method_name=\"/csi.v1.Identity/GetPluginInfo\",le=\"0.1\"} 0\n",
            "csi_sidecar_operations_seconds_bucket{driver_name=\"unknown-driver\",grpc_status_code=\"OK\",method_name=\"/csi.v1.Identity/GetPluginInfo\",le=\"+Inf\"} 1\n",
            "csi_sidecar_operations_seconds_count{driver_name=\"x.example.com\",grpc_status_code=\"DeadlineExceeded\",method_name=\"/csi.v1.Identity/Probe\"} 1\n",
        ] {
            assert!(text.contains(line), "no {line:?} in\n{text}");
        }
    }

    #[test]
    fn proxied_calls_go_by_their_full_method_and_those_of_no_csi_service_count_as_one() {
        let metrics = Metrics::new();
        for method in [
            "/csi.v1.Node/NodeStageVolume",
            "/csi.v1.Controller/CreateVolume",
            "/csi.v1.GroupController/GetVolumeGroupSnapshot",
            "/csi.v1.SnapshotMetadata/GetMetadataDelta",
        ] {
            metrics.observe_proxied(method, tonic::Code::Ok, Duration::ZERO);
            assert!(metrics.render().contains(&format!("method_name=\"{method}\"")), "{method}");
        }
        for made_up in 0..100 {
            metrics.observe_proxied(&format!("/csi.v1.Controller/Made{made_up}"), tonic::Code::Ok, Duration::ZERO);
            metrics.observe_proxied(&format!("/x.v{made_up}.Node/NodeStageVolume"), tonic::Code::Ok, Duration::ZERO);
        }
        let text = metrics.render();
        assert!(text.contains("method_name=\"other\"} 200"), "{text}");
        assert_eq!(text.matches("csi_sidecar_operations_seconds_count{").count(), 5, "bounded");
    }

    #[test]
    fn what_never_became_a_call_is_not_counted() {
        let (metrics, path) = (Metrics::new(), Path::new("/x").to_owned());
        let (source, after) = (std::io::Error::other("x"), Duration::ZERO);
        for error in [
            CallError::Connect { path: path.clone(), source },
            CallError::Closed { path: path.clone() },
            CallError::Deadline { path, after, spoke: false },
        ] {
            metrics.observe_call::<()>("/csi.v1.Identity/Probe", &Err(error), Duration::ZERO);
        }
        assert!(!metrics.render().contains("csi_sidecar_operations_seconds"));
    }

    #[test]
    fn exactly_one_verdict_holds() {
        let metrics = Metrics::new();
        metrics.set_driver_name("x");
        for health in VERDICTS {
            metrics.set_verdict(health);
            let text = metrics.render();
            let holding: Vec<&str> =
                text.lines().filter(|line| line.starts_with("csi_warden_verdict{") && line.ends_with(" 1")).collect();
            assert_eq!(holding, [format!("csi_warden_verdict{{driver_name=\"x\",verdict=\"{health}\"}} 1")]);
        }
    }

    #[test]
    fn a_probe_that_is_gone_leaves_nothing() {
        let metrics = Metrics::new();
        let before = metrics.render();
        let reason = || Reason::new("PortDown", "");
        for outcome in [
            Outcome::Success,
            Outcome::Warning(reason()),
            Outcome::Failure(reason(), Severity::Hard),
            Outcome::Unknown(reason()),
        ] {
            metrics.observe_round("fabric", &outcome, Duration::from_millis(3));
        }
        assert_eq!(metrics.render().matches("csi_warden_probe_outcomes_total{").count(), 4);
        metrics.forget_probe("fabric");
        assert_eq!(metrics.render(), before);
    }
}
