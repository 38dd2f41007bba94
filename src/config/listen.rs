//! Listen addresses as Go reads them: `:9809`, `127.0.0.1:9809`, `[::1]:9809`, `localhost:9809`.

use socket2::{Domain, Protocol, Socket, Type};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// Pending connections.
const BACKLOG: i32 = 128;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenAddress {
    host: Host,
    port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    /// Every address of the machine, of both families where it has both.
    Any,
    Named(String),
}

/// Why a text is no listen address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// No port.
    #[error("{0:?} has no port: use host:port, or :port for all addresses")]
    NoPort(String),
    /// The port is no number up to 65535.
    #[error("{0:?} has a port that is no number from 0 to 65535")]
    BadPort(String),
    /// An IPv6 address without brackets, or brackets that do not close.
    #[error("{0:?} needs its IPv6 address in brackets: [::1]:9809")]
    BadHost(String),
}

impl ListenAddress {
    /// All addresses, at this port.
    pub fn any(port: u16) -> Self {
        Self { host: Host::Any, port }
    }

    /// Whether both cannot be listened on. Names are not resolved; the kernel has the last word.
    pub fn collides_with(&self, other: &Self) -> bool {
        let any = self.host == Host::Any || other.host == Host::Any;
        self.port != 0 && self.port == other.port && (any || self.host == other.host)
    }

    /// Listens. A wildcard takes IPv4 and IPv6 alike, as Go does, and IPv4 alone where there is no IPv6.
    ///
    /// # Errors
    /// The operating system's: the address is taken, is not ours, or the name is unknown.
    pub fn listen(&self) -> io::Result<std::net::TcpListener> {
        match &self.host {
            Host::Any => {
                listen_on(SocketAddr::from((Ipv6Addr::UNSPECIFIED, self.port)), Families::Both).or_else(|error| {
                    if error.kind() == io::ErrorKind::AddrInUse {
                        return Err(error);
                    }
                    listen_on(SocketAddr::from((Ipv4Addr::UNSPECIFIED, self.port)), Families::One)
                })
            }
            Host::Named(name) => {
                let mut addresses: Vec<SocketAddr> = (name.as_str(), self.port).to_socket_addrs()?.collect();
                // Go takes the IPv4 address of a name that has both.
                addresses.sort_by_key(SocketAddr::is_ipv6);
                let address = addresses.first().ok_or_else(|| io::Error::other("the name has no address"))?;
                listen_on(*address, Families::One)
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Families {
    One,
    Both,
}

fn listen_on(address: SocketAddr, families: Families) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(families == Families::One)?;
    }
    // As Go does: a restart need not wait for connections of the last life.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

impl FromStr for ListenAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (host, port) = text.rsplit_once(':').ok_or_else(|| AddressError::NoPort(text.to_owned()))?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(|| AddressError::BadHost(text.to_owned()))?,
            None if host.contains([':', ']']) => return Err(AddressError::BadHost(text.to_owned())),
            None => host,
        };
        if port.is_empty() {
            return Err(AddressError::NoPort(text.to_owned()));
        }
        // `parse` would take a sign.
        if !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(AddressError::BadPort(text.to_owned()));
        }
        let port = port.parse().map_err(|_| AddressError::BadPort(text.to_owned()))?;
        let host = match host {
            "" | "0.0.0.0" | "::" => Host::Any,
            name => Host::Named(name.to_owned()),
        };
        Ok(Self { host, port })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Any => write!(f, ":{}", self.port),
            Host::Named(name) if name.contains(':') => write!(f, "[{name}]:{}", self.port),
            Host::Named(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn gos_forms_are_read() {
        for (text, shown) in [
            (":9809", ":9809"),
            ("0.0.0.0:9809", ":9809"),
            ("[::]:9809", ":9809"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("[::1]:9809", "[::1]:9809"),
            ("localhost:9809", "localhost:9809"),
        ] {
            assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn anything_else_is_refused_with_its_reason() {
        let error = |text: &str| text.parse::<ListenAddress>().unwrap_err();
        assert!(matches!(error("9809"), AddressError::NoPort(_)));
        assert!(matches!(error(""), AddressError::NoPort(_)));
        assert!(matches!(error("localhost:"), AddressError::NoPort(_)));
        assert!(matches!(error(":http"), AddressError::BadPort(_)));
        assert!(matches!(error(":65536"), AddressError::BadPort(_)));
        assert!(matches!(error(":+1"), AddressError::BadPort(_)));
        assert!(matches!(error("::1:9809"), AddressError::BadHost(_)));
        assert!(matches!(error("[::1:9809"), AddressError::BadHost(_)));
    }

    #[test]
    fn one_port_is_one_address_unless_the_hosts_differ() {
        let collide = |one: &str, other: &str| {
            one.parse::<ListenAddress>().unwrap().collides_with(&other.parse::<ListenAddress>().unwrap())
        };
        assert!(collide(":9808", "127.0.0.1:9808"));
        assert!(collide("127.0.0.1:9808", "127.0.0.1:9808"));
        assert!(!collide(":9808", ":9809"));
        assert!(!collide("127.0.0.1:9808", "[::1]:9808"));
        assert!(!collide(":0", ":0"), "two free ports");
    }

    #[test]
    fn a_wildcard_takes_both_families() {
        let listener = ListenAddress::any(0).listen().unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        if listener.local_addr().unwrap().is_ipv6() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
    }

    #[test]
    fn a_taken_port_is_an_error() {
        let first = ListenAddress::any(0).listen().unwrap();
        let port = first.local_addr().unwrap().port();
        let error = ListenAddress::any(port).listen().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
