//! What `run` runs with: every value typed, every contradiction found before anything is created.

use super::listen::ListenAddress;
use super::paths::{driver_socket, endpoint, fits, names_a_file, state_folder, writable_folder};
use super::probes::{GroupSettings, HostTree, ProbeSettings};
use super::proxy::{self, ProxySettings};
pub use super::settings_error::{SettingsError, SettingsErrors};
use super::source::ConfigSource;
use super::topology;
pub use super::typed::{Typed, TypedFile};
use super::watched::{Defaults, Watched};
use crate::policy::damping::Hold;
use crate::policy::probe_verdict::Thresholds;
use crate::policy::reaction::{Reaction, Rules};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

/// Shortest driver name there can be, to find out before any waiting that no socket path will fit.
const SHORTEST_SOCKET_NAME: &str = "x-reg.sock";

/// Looking more often would only heat the node.
const SHORTEST_PERIOD: Duration = Duration::from_millis(1);

/// A look itself may take half of this.
const SHORTEST_AGE: Duration = Duration::from_millis(100);

/// Everything `run` needs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `--csi-address`: the driver's socket.
    pub driver_socket: PathBuf,
    /// `--kubelet-registration-path`: what the kubelet is told to dial.
    pub endpoint: String,
    /// `--plugin-registration-path`: the folder of the registration socket.
    pub registration_folder: PathBuf,
    /// `--timeout`: first deadline of a question to the driver, and the deadline of `/healthz`.
    pub timeout: Duration,
    /// `--http-endpoint` or `--health-port`.
    pub http: Option<ListenAddress>,
    /// `--enable-pprof`.
    pub pprof: bool,
    /// `--liveness-endpoint`, and how it asks.
    pub liveness: Option<LivenessSettings>,
    /// What is watched, if anything is. Without it this is the registrar it replaces, and nothing more.
    pub health: Option<Health>,
    /// `--proxy`: between kubelet and driver, if we are there.
    pub proxy: Option<ProxySettings>,
    /// `--config`: reads the file again.
    pub source: Option<ConfigSource>,
    /// `--state-dir`, or the driver socket's folder.
    pub state_folder: PathBuf,
    /// `--status-socket`, if it is not in the state folder.
    pub status_socket: Option<PathBuf>,
    /// `--proc-root`: where the boot is told from the last one.
    pub proc_root: PathBuf,
    /// What was odd but not wrong, for the log.
    pub warnings: Vec<String>,
}

/// livenessprobe's duty in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LivenessSettings {
    /// `--liveness-endpoint`.
    pub address: ListenAddress,
    /// `--probe-timeout`.
    pub timeout: Duration,
    /// `--probe-interval`.
    pub interval: Duration,
}

/// How health is watched and what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Never empty; names are unique.
    pub probes: Vec<ProbeSettings>,
    /// Probes of which not all need pass.
    pub groups: Vec<GroupSettings>,
    /// Damping.
    pub hold: Hold,
    /// `--start-grace`.
    pub start_grace: Duration,
    /// `--on-unhealthy` and its waits.
    pub rules: Rules,
}

impl Health {
    /// Nobody watches anything, and nothing is waited for: an operator alone decides about the fence.
    pub fn nobody() -> Self {
        Self {
            probes: Vec::new(),
            groups: Vec::new(),
            hold: Hold { base: Duration::ZERO, max: Duration::ZERO, window: Duration::ZERO },
            start_grace: Duration::ZERO,
            rules: Rules { reaction: Reaction::Observe, deregister_after: Duration::ZERO, drain_timeout: None },
        }
    }
}

impl Settings {
    /// Checks the flags, the file's probes, and the folder they name. Creates nothing.
    ///
    /// # Errors
    /// Every setting that cannot be.
    pub fn check(typed: &Typed) -> Result<Self, SettingsErrors> {
        let (mut warnings, mut found) = (Vec::new(), Found(Vec::new()));
        let endpoint = found.keep(endpoint(&typed.kubelet_registration_path, &mut warnings));
        let driver_socket = found.keep(driver_socket(&typed.csi_address));
        found.keep(fits("--plugin-registration-path", &typed.plugin_registration_path.join(SHORTEST_SOCKET_NAME)));
        found.keep(above_zero("--timeout", typed.timeout, ""));
        let http = found.keep(http(&typed.http_endpoint, typed.health_port));
        let liveness = found.keep(liveness(typed, http.as_ref().and_then(Option::as_ref)));
        let topology = found.keep_all(topology::segments(&typed.topology, typed.topology_file.as_deref()));
        let proxy = proxy::check(typed, driver_socket.as_deref(), endpoint.as_deref(), topology.unwrap_or_default());
        let proxy = found.keep_all(proxy);
        found.keep(holds(typed));
        let defaults = defaults(typed, driver_socket.clone().unwrap_or_default(), &mut found);
        // Last, because it alone looks at the machine.
        found.keep(writable_folder(&typed.plugin_registration_path));
        let file = typed.config.as_ref().map(|config| &config.file);
        let watched = defaults.as_ref().map(|defaults| Watched::new(defaults, file));
        let watched = match watched {
            Some(Ok(watched)) => Some(watched),
            Some(Err(problems)) => {
                found.0.extend(problems.into_iter().map(SettingsError::InFile));
                None
            }
            None => None,
        };
        let (true, Some(endpoint), Some(driver_socket), Some(http), Some(proxy), Some(defaults), Some(watched)) =
            (found.0.is_empty(), endpoint, driver_socket, http, proxy, defaults, watched)
        else {
            return Err(SettingsErrors { errors: found.0, file: file.cloned() });
        };
        let liveness = liveness.flatten();
        if liveness.is_none() && !typed.liveness_only_flags.is_empty() {
            warnings.push(format!(
                "without --liveness-endpoint the driver is not probed, so {}",
                no_effect(&typed.liveness_only_flags)
            ));
        }
        warnings.extend(watched.warnings);
        if watched.probes.is_empty() && !typed.health_only_flags.is_empty() {
            warnings.push(format!(
                "without --health-file, or probes in --config, nothing is watched, so {}",
                no_effect(&typed.health_only_flags)
            ));
        }
        if http.is_none() && typed.enable_pprof {
            warnings.push("--enable-pprof has no effect without --http-endpoint".to_owned());
        }
        let (proxy, rules) = proxy.settle(typed, !watched.probes.is_empty(), &mut warnings);
        let health = (!watched.probes.is_empty()).then_some(Health {
            probes: watched.probes,
            groups: watched.groups,
            hold: Hold { base: typed.recovery_hold, max: typed.max_recovery_hold, window: typed.flap_window },
            start_grace: typed.start_grace,
            rules,
        });
        let state_folder = state_folder(typed.state_dir.as_deref(), &driver_socket);
        let source = typed
            .config
            .as_ref()
            .map(|config| ConfigSource::new(&config.file, config.typed.clone(), config.flags, defaults));
        Ok(Self {
            driver_socket,
            endpoint,
            registration_folder: typed.plugin_registration_path.clone(),
            timeout: typed.timeout,
            http,
            pprof: typed.enable_pprof,
            liveness,
            health,
            proxy,
            source,
            state_folder,
            status_socket: typed.status_socket.clone(),
            proc_root: typed.proc_root.clone(),
            warnings,
        })
    }

    /// What is watched, and nothing besides: for whoever only asks the probes. Looks at nothing on the machine.
    ///
    /// # Errors
    /// Every setting of the probes that cannot be.
    pub fn watched(typed: &Typed) -> Result<Watched, SettingsErrors> {
        let mut found = Found(Vec::new());
        let driver_socket = found.keep(driver_socket(&typed.csi_address)).unwrap_or_default();
        let defaults = defaults(typed, driver_socket, &mut found);
        let file = typed.config.as_ref().map(|config| &config.file);
        match defaults.map(|defaults| Watched::new(&defaults, file)) {
            Some(Ok(watched)) if found.0.is_empty() => return Ok(watched),
            Some(Err(problems)) => found.0.extend(problems.into_iter().map(SettingsError::InFile)),
            Some(Ok(_)) | None => {}
        }
        Err(SettingsErrors { errors: found.0, file: file.cloned() })
    }

    /// How health is watched and what it does, and nothing besides: for whoever plays it through. Looks at nothing on the machine.
    ///
    /// # Errors
    /// Every setting of the probes, the verdict and the reaction that cannot be.
    pub fn health(typed: &Typed) -> Result<Health, SettingsErrors> {
        let mut found = Found(Vec::new());
        let proxy = found.keep_all(proxy::check(typed, None, None, std::collections::BTreeMap::new()));
        found.keep(holds(typed));
        match Self::watched(typed) {
            Ok(watched) => {
                if let Some(proxy) = proxy.filter(|_| found.0.is_empty()) {
                    let (_, rules) = proxy.settle(typed, !watched.probes.is_empty(), &mut Vec::new());
                    return Ok(Health {
                        probes: watched.probes,
                        groups: watched.groups,
                        hold: Hold {
                            base: typed.recovery_hold,
                            max: typed.max_recovery_hold,
                            window: typed.flap_window,
                        },
                        start_grace: typed.start_grace,
                        rules,
                    });
                }
            }
            Err(errors) => found.0.extend(errors.errors),
        }
        Err(SettingsErrors { errors: found.0, file: typed.config.as_ref().map(|config| config.file.clone()) })
    }
}

/// `--a has no effect`, `--a, --b have no effect`
fn no_effect(flags: &[&str]) -> String {
    format!("{} {} no effect", flags.join(", "), if flags.len() == 1 { "has" } else { "have" })
}

/// Problems so far: one does not hide the next.
struct Found(Vec<SettingsError>);

impl Found {
    fn keep<T>(&mut self, result: Result<T, SettingsError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.0.push(error);
                None
            }
        }
    }

    fn keep_all<T>(&mut self, result: Result<T, Vec<SettingsError>>) -> Option<T> {
        result.map_err(|errors| self.0.extend(errors)).ok()
    }
}

/// The address that `flag` gives.
///
/// # Errors
/// When it does not parse.
pub fn address(flag: &'static str, typed: &str) -> Result<ListenAddress, SettingsError> {
    typed.parse().map_err(|problem| SettingsError::BadAddress { flag, problem })
}

fn http(endpoint: &str, health_port: i64) -> Result<Option<ListenAddress>, SettingsError> {
    match (endpoint, health_port) {
        ("", port) if port <= 0 => Ok(None),
        ("", port) => match u16::try_from(port) {
            Ok(port) => Ok(Some(ListenAddress::any(port))),
            Err(_) => Err(SettingsError::BadHealthPort(port)),
        },
        (_, port) if port > 0 => Err(SettingsError::TwoHealthEndpoints),
        (endpoint, _) => Ok(Some(address("--http-endpoint", endpoint)?)),
    }
}

fn liveness(typed: &Typed, http: Option<&ListenAddress>) -> Result<Option<LivenessSettings>, SettingsError> {
    above_zero("--probe-timeout", typed.probe_timeout, "")?;
    above_zero("--probe-interval", typed.probe_interval, "")?;
    if typed.liveness_endpoint.is_empty() {
        return Ok(None);
    }
    let address = address("--liveness-endpoint", &typed.liveness_endpoint)?;
    if let Some(http) = http
        && http.collides_with(&address)
    {
        return Err(SettingsError::SharedAddress { liveness: address, http: http.clone() });
    }
    Ok(Some(LivenessSettings { address, timeout: typed.probe_timeout, interval: typed.probe_interval }))
}

fn holds(typed: &Typed) -> Result<(), SettingsError> {
    if typed.recovery_hold > typed.max_recovery_hold {
        return Err(SettingsError::Contradiction {
            flag: "--recovery-hold",
            value: typed.recovery_hold,
            relation: "at most",
            other: "--max-recovery-hold",
            other_value: typed.max_recovery_hold,
        });
    }
    Ok(())
}

/// What probes get that do not say otherwise. `None` when something was found.
fn defaults(typed: &Typed, driver_socket: PathBuf, found: &mut Found) -> Option<Defaults> {
    let before = found.0.len();
    let threshold = |flag, value| NonZeroU32::new(value).ok_or(SettingsError::Zero { flag, hint: "" });
    let failure = found.keep(threshold("--failure-threshold", typed.failure_threshold));
    let success = found.keep(threshold("--success-threshold", typed.success_threshold));
    found.keep(above_zero("--health-interval", typed.health_interval, ""));
    found.keep(above_zero("--health-max-age", typed.health_max_age, "; a file is never younger than that"));
    found.keep(at_least("--health-interval", typed.health_interval, SHORTEST_PERIOD));
    found.keep(at_least("--health-max-age", typed.health_max_age, SHORTEST_AGE));
    let dead_after = (!typed.health_dead_after.is_zero()).then_some(typed.health_dead_after);
    if let Some(dead_after) = dead_after
        && dead_after <= typed.health_max_age
    {
        found.0.push(SettingsError::Contradiction {
            flag: "--health-dead-after",
            value: dead_after,
            relation: "longer than",
            other: "--health-max-age",
            other_value: typed.health_max_age,
        });
    }
    if let Some(file) = &typed.health_file
        && !names_a_file(file)
    {
        found.0.push(SettingsError::HealthFileHasNoName(file.clone()));
    }
    let (Some(failure), Some(success), true) = (failure, success, found.0.len() == before) else { return None };
    Some(Defaults {
        driver_socket,
        health_file: typed.health_file.clone(),
        health_interval: typed.health_interval,
        health_max_age: typed.health_max_age,
        health_dead_after: dead_after,
        thresholds: Thresholds { failure, success },
        confirm_interval: typed.confirm_interval,
        host: HostTree { sysfs: typed.sysfs_root.clone(), dev: typed.dev_root.clone(), proc: typed.proc_root.clone() },
    })
}

fn at_least(flag: &'static str, value: Duration, least: Duration) -> Result<(), SettingsError> {
    if !value.is_zero() && value < least { Err(SettingsError::TooShort { flag, value, least }) } else { Ok(()) }
}

fn above_zero(flag: &'static str, value: Duration, hint: &'static str) -> Result<(), SettingsError> {
    if value.is_zero() { Err(SettingsError::Zero { flag, hint }) } else { Ok(()) }
}
