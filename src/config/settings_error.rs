//! What can be wrong with the settings: each message names the flag, or the file's line, and what to do.

use super::file::{ConfigFile, Problem};
use super::listen::{AddressError, ListenAddress};
use crate::registration::socket::MAX_SOCKET_PATH_BYTES;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// A setting that cannot be. Each message names the flag and what to do.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The one flag without a default.
    #[error(
        "--kubelet-registration-path is required: the driver socket's path on the host, as the kubelet is to dial it, e.g. /var/lib/kubelet/plugins/<driver>/csi.sock"
    )]
    NoRegistrationPath,
    /// The kubelet would resolve it against its own working folder.
    #[error("--kubelet-registration-path={0:?} is not an absolute path: give the driver socket's path on the host")]
    RelativeRegistrationPath(String),
    /// Not a unix socket's address.
    #[error("--csi-address={0:?} is not a unix socket: give a path, or unix:///path")]
    NotAUnixSocket(String),
    /// `sun_path` has 108 bytes.
    #[error("{flag}: the socket path {} has {} bytes; a unix socket's path holds {MAX_SOCKET_PATH_BYTES}", .path.display(), .path.as_os_str().len())]
    PathTooLong {
        /// Which.
        flag: &'static str,
        /// What was given, or made of it.
        path: PathBuf,
    },
    /// The registration folder is not there, not a folder, or not writable.
    #[error("--plugin-registration-path={}: {problem}; mount the host's <kubelet root>/plugins_registry there, writable", .path.display())]
    RegistrationFolder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Both addresses of the health endpoint.
    #[error("only one of --http-endpoint and --health-port may be set (--health-port is deprecated)")]
    TwoHealthEndpoints,
    /// The address does not parse.
    #[error("{flag}: {problem}")]
    BadAddress {
        /// Which.
        flag: &'static str,
        /// What is wrong with it.
        problem: AddressError,
    },
    /// Both `/healthz` in one place.
    #[error(
        "--liveness-endpoint={liveness} and --http-endpoint={http} are one address: give each its own port, such as :9808 and :9809"
    )]
    SharedAddress {
        /// The one.
        liveness: ListenAddress,
        /// The other.
        http: ListenAddress,
    },
    /// Out of range.
    #[error("--health-port={0} is no port: use 1 to 65535, or 0 for none")]
    BadHealthPort(i64),
    /// A value that must be positive is zero.
    #[error("{flag} must be above zero{hint}")]
    Zero {
        /// Which.
        flag: &'static str,
        /// What to do instead.
        hint: &'static str,
    },
    /// A value below what this program can keep.
    #[error("{flag}={value:?} is too short: at least {least:?}")]
    TooShort {
        /// Which.
        flag: &'static str,
        /// Its value.
        value: Duration,
        /// The least.
        least: Duration,
    },
    /// Two durations that contradict each other.
    #[error("{flag}={value:?} must be {relation} {other}={other_value:?}")]
    Contradiction {
        /// Which.
        flag: &'static str,
        /// Its value.
        value: Duration,
        /// How they must relate.
        relation: &'static str,
        /// To which.
        other: &'static str,
        /// Its value.
        other_value: Duration,
    },
    /// A word that a flag does not know.
    #[error("{flag}={value:?} is unknown: use {known}")]
    UnknownWord {
        /// Which.
        flag: &'static str,
        /// Its value.
        value: String,
        /// What it knows.
        known: &'static str,
    },
    /// The proxy is switched off, and something needs it.
    #[error("{flag}{value} needs the proxy, and --proxy=off: leave one of them out")]
    NeedsProxy {
        /// Which.
        flag: &'static str,
        /// `=value`, or nothing.
        value: String,
    },
    /// Even the kubelet would be refused.
    #[error("--allowed-uids is empty, so nobody could call the driver: 0 is the kubelet's")]
    NobodyAllowed,
    /// The kubelet could not find it.
    #[error("--proxy-socket={} must be another file in the folder of --csi-address={}: the kubelet is told the same name in the folder of --kubelet-registration-path", .socket.display(), .driver_socket.display())]
    ProxySocket {
        /// As given.
        socket: PathBuf,
        /// The driver's.
        driver_socket: PathBuf,
    },
    /// A segment that cannot be, or a file without any.
    #[error("{flag}{}: {problem}", .line.map(|line| format!(": line {line}")).unwrap_or_default())]
    TopologyFile {
        /// The flag; a file's with its path.
        flag: String,
        /// In the file, from 1.
        line: Option<usize>,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// The file has no name.
    #[error("--health-file={} names no file", .0.display())]
    HealthFileHasNoName(PathBuf),
    /// A probe that contradicts itself, or a flag.
    #[error(transparent)]
    InFile(#[from] Problem),
}

/// Every setting that cannot be, in the order of the checks.
#[derive(Debug)]
pub struct SettingsErrors {
    pub(super) errors: Vec<SettingsError>,
    pub(super) file: Option<ConfigFile>,
}

impl SettingsErrors {
    /// One line each; what the file sets is named by file, line and field.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.errors.iter().map(|error| {
            let written = self.file.as_ref().and_then(|file| {
                error
                    .flags()
                    .into_iter()
                    .flatten()
                    .find_map(|flag| Some((file, file.flag(flag.trim_start_matches('-'))?)))
            });
            match written {
                Some((file, flag)) => format!("{}:{}: {}: {error}", file.path.display(), flag.line, flag.key),
                None => error.to_string(),
            }
        })
    }
}

impl fmt::Display for SettingsErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().collect::<Vec<_>>().join("\n"))
    }
}

impl std::error::Error for SettingsErrors {}

impl SettingsError {
    /// The flags whose values it is about.
    pub(super) fn flags(&self) -> [Option<&str>; 2] {
        match self {
            Self::NoRegistrationPath | Self::RelativeRegistrationPath(_) => [Some("--kubelet-registration-path"), None],
            Self::NotAUnixSocket(_) => [Some("--csi-address"), None],
            Self::PathTooLong { flag, .. } | Self::Zero { flag, .. } | Self::TooShort { flag, .. } => {
                [Some(flag), None]
            }
            Self::RegistrationFolder { .. } => [Some("--plugin-registration-path"), None],
            Self::TwoHealthEndpoints => [Some("--http-endpoint"), Some("--health-port")],
            Self::BadAddress { flag, .. } => [Some(flag), None],
            Self::SharedAddress { .. } => [Some("--liveness-endpoint"), Some("--http-endpoint")],
            Self::BadHealthPort(_) => [Some("--health-port"), None],
            Self::Contradiction { flag, other, .. } => [Some(flag), Some(other)],
            Self::UnknownWord { flag, .. } => [Some(flag), None],
            Self::NeedsProxy { flag, .. } => [Some(flag), Some("--proxy")],
            Self::NobodyAllowed => [Some("--allowed-uids"), None],
            Self::ProxySocket { .. } => [Some("--proxy-socket"), Some("--csi-address")],
            Self::TopologyFile { flag, .. } => [flag.split('=').next(), None],
            Self::HealthFileHasNoName(_) => [Some("--health-file"), None],
            Self::InFile(_) => [None, None],
        }
    }
}
