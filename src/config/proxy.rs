//! `--proxy` and what belongs to it: typed, and checked against the rest.

use super::settings_error::SettingsError;
use super::typed::Typed;
use crate::policy::fence::RefusalCode;
use crate::policy::reaction::{Reaction, Rules};
use crate::registration::socket::MAX_SOCKET_PATH_BYTES;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The shortest name of a proxy socket that we make, to find out before any waiting that none will fit.
const SHORTEST_SOCKET_NAME: &str = "x-warden.sock";

/// Between kubelet and driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxySettings {
    /// `--proxy=on`, or a reaction that needs it was asked for: without it nothing starts.
    pub required: bool,
    /// What unhealthy does was left to us, so it follows from whether the proxy can be.
    pub reaction_is_default: bool,
    /// `--proxy-socket`, in the driver socket's folder. `None`: named after the driver, [`Self::socket_for`].
    pub socket: Option<PathBuf>,
    /// `--refusal-code`
    pub refusal_code: RefusalCode,
    /// `--allowed-uids`, never empty.
    pub allowed_uids: Vec<u32>,
    /// `--topology` and `--topology-file`
    pub topology: BTreeMap<String, String>,
    /// `--fence-max-volumes`
    pub fence_max_volumes: bool,
}

impl ProxySettings {
    /// Where it listens, and what the kubelet is told to dial: the same name beside both paths of the driver's socket.
    pub fn socket_for(&self, driver: &str, driver_socket: &Path, endpoint: &str) -> (PathBuf, String) {
        let made = PathBuf::from(format!("{driver}-warden.sock"));
        let socket = self.socket.clone().unwrap_or_else(|| driver_socket.with_file_name(&made));
        let name = socket.file_name().unwrap_or(made.as_os_str());
        let announced = Path::new(endpoint).with_file_name(name).to_string_lossy().into_owned();
        (socket, announced)
    }
}

/// `--proxy`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Auto,
    On,
    Off,
}

/// What the flags say by themselves.
#[derive(Debug)]
pub(super) struct Checked {
    mode: Mode,
    reaction: Option<Reaction>,
    settings: ProxySettings,
}

/// Checks the flags by themselves and against the paths.
pub(super) fn check(
    typed: &Typed,
    driver_socket: Option<&Path>,
    endpoint: Option<&str>,
    topology: BTreeMap<String, String>,
) -> Result<Checked, Vec<SettingsError>> {
    let mut errors = Vec::new();
    let mut keep = |problem: SettingsError| errors.push(problem);
    let mode = match typed.proxy.as_str() {
        "auto" => Mode::Auto,
        "on" => Mode::On,
        "off" => Mode::Off,
        other => {
            keep(unknown("--proxy", other, "auto, on or off"));
            Mode::Auto
        }
    };
    let reaction = typed.on_unhealthy.as_deref().and_then(|name| {
        let found = Reaction::ALL.into_iter().find(|reaction| reaction.name() == name);
        if found.is_none() {
            keep(unknown("--on-unhealthy", name, "observe, fence, deregister or fence-then-deregister"));
        }
        found
    });
    let refusal_code = match typed.refusal_code.as_str() {
        "auto" => RefusalCode::Auto,
        "failed-precondition" => RefusalCode::FailedPrecondition,
        "unavailable" => RefusalCode::Unavailable,
        other => {
            keep(unknown("--refusal-code", other, "auto, failed-precondition or unavailable"));
            RefusalCode::Auto
        }
    };
    if mode == Mode::Off {
        if let Some(reaction) = reaction.filter(|reaction| reaction.fences()) {
            keep(SettingsError::NeedsProxy { flag: "--on-unhealthy", value: format!("={}", reaction.name()) });
        }
        for flag in &typed.proxy_only_flags {
            keep(SettingsError::NeedsProxy { flag, value: String::new() });
        }
    }
    if typed.allowed_uids.is_empty() {
        keep(SettingsError::NobodyAllowed);
    }
    if !typed.drain_timeout.is_zero() && typed.drain_timeout < typed.deregister_after {
        keep(SettingsError::Contradiction {
            flag: "--drain-timeout",
            value: typed.drain_timeout,
            relation: "0 (wait for ever) or at least",
            other: "--deregister-after",
            other_value: typed.deregister_after,
        });
    }
    if let (Some(driver_socket), Some(endpoint)) = (driver_socket, endpoint) {
        socket_fits(typed, driver_socket, endpoint, mode == Mode::On, &mut keep);
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    let settings = ProxySettings {
        required: mode == Mode::On || reaction.is_some_and(Reaction::fences),
        reaction_is_default: reaction.is_none(),
        socket: typed.proxy_socket.clone(),
        refusal_code,
        allowed_uids: typed.allowed_uids.clone(),
        topology,
        fence_max_volumes: typed.fence_max_volumes,
    };
    Ok(Checked { mode, reaction, settings })
}

/// The kubelet dials the same name in the other folder, so the socket can be nowhere else.
fn socket_fits(typed: &Typed, driver_socket: &Path, endpoint: &str, on: bool, keep: &mut impl FnMut(SettingsError)) {
    let name = match &typed.proxy_socket {
        Some(socket) => {
            let same_folder = socket.parent() == driver_socket.parent();
            if !super::paths::names_a_file(socket) || !same_folder || socket == driver_socket {
                return keep(SettingsError::ProxySocket {
                    socket: socket.clone(),
                    driver_socket: driver_socket.to_owned(),
                });
            }
            socket.file_name().unwrap_or_default().to_owned()
        }
        // In doubt there is no proxy; then the daemon tells, which knows the driver's name.
        None if !on => return,
        None => SHORTEST_SOCKET_NAME.into(),
    };
    for (flag, path) in [("--csi-address", driver_socket), ("--kubelet-registration-path", Path::new(endpoint))] {
        let path = path.with_file_name(&name);
        if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            keep(SettingsError::PathTooLong { flag, path });
        }
    }
}

fn unknown(flag: &'static str, value: &str, known: &'static str) -> SettingsError {
    SettingsError::UnknownWord { flag, value: value.to_owned(), known }
}

impl Checked {
    /// What is in force, `watching` or not; what has no effect is told.
    pub(super) fn settle(
        self,
        typed: &Typed,
        watching: bool,
        warnings: &mut Vec<String>,
    ) -> (Option<ProxySettings>, Rules) {
        let proxies = match self.mode {
            Mode::Auto => watching,
            Mode::On => true,
            Mode::Off => false,
        };
        let default = if proxies { Reaction::FenceThenDeregister } else { Reaction::Deregister };
        let reaction = self.reaction.unwrap_or(default);
        if !proxies && self.mode == Mode::Auto && !typed.proxy_only_flags.is_empty() {
            warnings.push(format!(
                "with --proxy=auto and nothing watched there is no proxy, so {} has no effect: set --proxy=on",
                typed.proxy_only_flags.join(", ")
            ));
        }
        if watching && reaction != Reaction::FenceThenDeregister && !typed.drain_only_flags.is_empty() {
            warnings.push(format!(
                "with --on-unhealthy={} {} has no effect",
                reaction.name(),
                typed.drain_only_flags.join(", ")
            ));
        }
        if proxies && watching && !reaction.fences() && typed.fence_max_volumes {
            warnings.push(format!(
                "with --on-unhealthy={} there is a fence only by `csi-warden fence on`, and --fence-max-volumes has no other effect",
                reaction.name()
            ));
        }
        if proxies && !typed.allowed_uids.contains(&0) {
            warnings.push("--allowed-uids has no 0: a kubelet that runs as root cannot call the driver".to_owned());
        }
        let rules = Rules {
            reaction,
            deregister_after: typed.deregister_after,
            drain_timeout: (!typed.drain_timeout.is_zero()).then_some(typed.drain_timeout),
        };
        (proxies.then_some(self.settings), rules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::given::Given;
    use crate::cli::run::RunFlags;
    use crate::config::settings::Settings;
    use clap::CommandFactory;
    use std::time::Duration;

    const HEALTH: &str = "--health-file=/health/health";

    fn settings(flags: &[&str]) -> Settings {
        let fixed = ["--kubelet-registration-path=/k/plugins/x/csi.sock", "--csi-address=/csi/csi.sock"];
        let folder = format!("--plugin-registration-path={}", std::env::temp_dir().display());
        let all = fixed.iter().chain(flags).map(Into::into).chain([folder.into()]);
        Given::read(RunFlags::command(), all).ok().unwrap().settings().unwrap()
    }

    #[test]
    fn a_health_source_switches_the_proxy_on_and_the_reaction_follows() {
        for (flags, proxies, reaction) in [
            (&[][..], false, None),
            (&["--proxy=on"], true, None),
            (&[HEALTH], true, Some(Reaction::FenceThenDeregister)),
            (&[HEALTH, "--proxy=on"], true, Some(Reaction::FenceThenDeregister)),
            (&[HEALTH, "--proxy=off"], false, Some(Reaction::Deregister)),
            (&[HEALTH, "--on-unhealthy=observe"], true, Some(Reaction::Observe)),
            (&[HEALTH, "--on-unhealthy=fence"], true, Some(Reaction::Fence)),
            (&[HEALTH, "--on-unhealthy=deregister"], true, Some(Reaction::Deregister)),
        ] {
            let settings = settings(flags);
            assert_eq!(settings.proxy.is_some(), proxies, "{flags:?}");
            assert_eq!(settings.health.map(|health| health.rules.reaction), reaction, "{flags:?}");
            assert_eq!(settings.warnings, Vec::<String>::new(), "{flags:?}");
        }
    }

    #[test]
    fn every_flag_of_the_proxy_arrives() {
        let settings = settings(&[
            HEALTH,
            "--proxy-socket=/csi/proxy.sock",
            "--refusal-code=unavailable",
            "--allowed-uids=0,65534",
            "--topology=a.io/x=1",
            "--topology=b.io/y=2,c.io/z=3",
            "--fence-max-volumes",
            "--deregister-after=1s",
            "--drain-timeout=1m",
        ]);
        let proxy = settings.proxy.unwrap();
        assert_eq!(
            proxy.socket_for("d", &settings.driver_socket, &settings.endpoint),
            (PathBuf::from("/csi/proxy.sock"), "/k/plugins/x/proxy.sock".to_owned())
        );
        assert_eq!(
            (proxy.refusal_code, proxy.allowed_uids, proxy.fence_max_volumes),
            (RefusalCode::Unavailable, vec![0, 65534], true)
        );
        assert_eq!(
            proxy.topology.into_iter().map(|(key, value)| key + "=" + &value).collect::<Vec<_>>(),
            ["a.io/x=1", "b.io/y=2", "c.io/z=3"]
        );
        let rules = settings.health.unwrap().rules;
        assert_eq!(
            (rules.deregister_after, rules.drain_timeout),
            (Duration::from_secs(1), Some(Duration::from_secs(60)))
        );
    }

    #[test]
    fn socket_is_named_after_the_driver_beside_both_paths() {
        let settings = settings(&[HEALTH]);
        let proxy = settings.proxy.unwrap();
        assert_eq!(
            proxy.socket_for("d.io", &settings.driver_socket, &settings.endpoint),
            (PathBuf::from("/csi/d.io-warden.sock"), "/k/plugins/x/d.io-warden.sock".to_owned())
        );
    }

    #[test]
    fn what_has_no_effect_is_told_by_name() {
        for (flags, words) in [
            (
                &["--topology=a.io/x=1", "--refusal-code=auto"][..],
                "--refusal-code, --topology has no effect: set --proxy=on",
            ),
            (
                &[HEALTH, "--on-unhealthy=fence", "--drain-timeout=1m"],
                "with --on-unhealthy=fence --drain-timeout has no effect",
            ),
            (&[HEALTH, "--on-unhealthy=observe", "--fence-max-volumes"], "--fence-max-volumes has no other effect"),
            (&[HEALTH, "--allowed-uids=1000"], "--allowed-uids has no 0"),
            (&["--deregister-after=1s"], "--deregister-after has no effect"),
        ] {
            let warnings = settings(flags).warnings;
            assert!(warnings.len() == 1 && warnings[0].contains(words), "{warnings:?}");
        }
    }
}
