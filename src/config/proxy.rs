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
            if !super::settings::names_a_file(socket) || !same_folder || socket == driver_socket {
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
