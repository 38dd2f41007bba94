//! Tells when the kernel says that a link, an address or an RDMA device changed, so that the next look need not wait for its
//! period. Only which link it was is read, so that those of pods that come and go cost little: an event decides nothing.

use crate::policy::rereads::Rereads;
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use std::collections::BTreeSet;
use std::error::Error;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

/// RTMGRP_LINK, RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR: a port's state follows its link, its GIDs follow the addresses.
const LINKS_AND_ADDRESSES: u32 = 0x1 | 0x10 | 0x100;

/// RDMA_NL_GROUP_NOTIFY, which is group 4: devices come, go and are renamed. Kernels before 6.12 know no such group and say nothing.
const RDMA_NOTIFY: u32 = 1 << 3;

/// Where the index of the link stands, behind the header of 16 bytes: in `ifinfomsg` of links as in `ifaddrmsg` of addresses.
const INDEX_AT: usize = 16 + 4;

/// Messages read in one go, so that a storm cannot hold up everything else.
const MOST_MESSAGES: usize = 1024;

/// Events closer than this are one, so that a storm of them costs little.
const GAP: Duration = Duration::from_millis(10);

/// A socket that could not be opened is tried again after this: the RDMA modules may be loaded later.
const RETRY: Duration = Duration::from_secs(60);

/// The kernel's notifications, as moments to look again. They are those of the network namespace that this process is in.
///
/// Where a socket is not to be had, that is said once and its events never come: the caller's own period has to do.
#[derive(Debug)]
pub struct LinkEvents {
    links: Source,
    devices: Source,
    /// There once the RDMA subsystem is: without it, opening its netlink family would make the kernel look for a module, and wait.
    rdma_class: PathBuf,
    rereads: Rereads,
    /// Links that matter, by index; all of them until it is known which.
    watched: Option<BTreeSet<u32>>,
    /// Whether a link has changed since that was looked up.
    links_changed: bool,
    /// From then on the next event is heard.
    listen_from: Instant,
}

#[derive(Debug)]
struct Source {
    /// For the log.
    what: &'static str,
    protocol: Option<Protocol>,
    groups: u32,
    socket: Option<AsyncFd<OwnedFd>>,
    retry_at: Option<Instant>,
    told: bool,
}

impl LinkEvents {
    /// Nothing is opened before the first [`Self::listen`].
    pub fn new(sysfs_root: &Path) -> Self {
        Self {
            links: Source::new("link changes", None, LINKS_AND_ADDRESSES),
            devices: Source::new("RDMA device changes", Some(netlink::RDMA), RDMA_NOTIFY),
            rdma_class: sysfs_root.join("class/infiniband"),
            rereads: Rereads::default(),
            watched: None,
            links_changed: false,
            listen_from: Instant::now(),
        }
    }

    /// Opens what is not open. Does not block; to be called in a tokio runtime, before each look, so that what changes after the
    /// look is an event.
    pub fn listen(&mut self) {
        self.links.open();
        if self.rdma_class.exists() {
            self.devices.open();
        }
    }

    /// From now on these links matter, by index: those of ports, and those above and below them. Others, which may be new ones of a
    /// port, have one look a second at most.
    pub fn watch(&mut self, links: BTreeSet<u32>) {
        self.watched = Some(links);
    }

    /// Whether a link has changed since this was asked last, so that others may matter now.
    pub fn take_links_changed(&mut self) -> bool {
        std::mem::take(&mut self.links_changed)
    }

    /// Waits until it is time to look again. Cancelling it loses nothing.
    pub async fn changed(&mut self) {
        loop {
            let due = self.rereads.due().map(Instant::from_std);
            let (listen_from, watched) = (self.listen_from, self.watched.as_ref());
            let event = async {
                sleep_until(listen_from).await;
                tokio::select! {
                    heard = self.links.event(watched) => (heard, true),
                    heard = self.devices.event(None) => (heard, false),
                }
            };
            let heard = tokio::select! {
                biased;
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => None,
                heard = event => Some(heard),
            };
            let now = Instant::now();
            let Some((heard, of_links)) = heard else {
                self.rereads.begin(now.into_std());
                return;
            };
            match heard {
                Heard::Ours => self.rereads.event(now.into_std()),
                Heard::Others => self.rereads.event_of_others(now.into_std()),
            }
            self.links_changed |= of_links;
            self.listen_from = now + GAP;
        }
    }
}

/// What messages were about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Heard {
    /// Links that nobody watches.
    Others,
    /// At least one that matters, or one that cannot be told.
    Ours,
}

impl Source {
    fn new(what: &'static str, protocol: Option<Protocol>, groups: u32) -> Self {
        Self { what, protocol, groups, socket: None, retry_at: None, told: false }
    }

    fn open(&mut self) {
        let now = Instant::now();
        if self.socket.is_some() || self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        match open(self.protocol, self.groups) {
            Ok(socket) => {
                debug!(events = self.what, "listening for the kernel's notifications");
                self.socket = Some(socket);
            }
            Err(error) => self.lost(&error, now),
        }
    }

    fn lost(&mut self, error: &io::Error, now: Instant) {
        (self.socket, self.retry_at) = (None, Some(now + RETRY));
        if std::mem::replace(&mut self.told, true) {
            return;
        }
        let error = error as &dyn Error;
        // Links tell of most failures within milliseconds; without the other, a device that goes is still seen once a period.
        if self.protocol.is_none() {
            warn!(events = self.what, error, "cannot hear the kernel's notifications; looking once a period instead");
        } else {
            info!(events = self.what, error, "cannot hear the kernel's notifications; looking once a period instead");
        }
    }

    /// Waits for something to be said; with `watched`, whether of one of these links. Messages that were lost may have been.
    async fn event(&mut self, watched: Option<&BTreeSet<u32>>) -> Heard {
        loop {
            let Some(socket) = &self.socket else {
                return std::future::pending().await;
            };
            let mut heard = None;
            let drained = match socket.readable().await {
                Ok(mut ready) => ready.try_io(|socket| drain(socket.get_ref(), watched, &mut heard)),
                Err(error) => Ok(Err(error)),
            };
            match (drained, heard) {
                (Ok(Ok(())) | Err(_), Some(heard)) => return heard,
                // Nothing was there.
                (Ok(Ok(())) | Err(_), None) => {}
                // What it said before it broke is worth a look, and so is what it will not say.
                (Ok(Err(error)), _) => {
                    self.lost(&error, Instant::now());
                    return Heard::Ours;
                }
            }
        }
    }
}

fn open(protocol: Option<Protocol>, groups: u32) -> io::Result<AsyncFd<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    #[expect(
        deprecated,
        reason = "its successor is unsafe, for the sake of types that swap their descriptor; this one cannot"
    )]
    AsyncFd::new(socket)
}

/// Reads messages, and keeps which links they are of: `WouldBlock` once there are none left, fine while there may be more.
fn drain(socket: &OwnedFd, watched: Option<&BTreeSet<u32>>, heard: &mut Option<Heard>) -> io::Result<()> {
    // The rest of a message that is longer is dropped by the kernel.
    let mut start = [0; INDEX_AT + 4];
    for _ in 0..MOST_MESSAGES {
        match recv(socket, &mut start, RecvFlags::empty()) {
            Ok((_, length)) => {
                let index = start.get(INDEX_AT..).filter(|_| length >= start.len());
                let index = index.and_then(|index| Some(u32::from_ne_bytes(index.try_into().ok()?)));
                let others = watched.zip(index).is_some_and(|(watched, index)| !watched.contains(&index));
                let now = if others { Heard::Others } else { Heard::Ours };
                *heard = (*heard).max(Some(now));
            }
            // There were more than the socket holds.
            Err(Errno::NOBUFS) => *heard = Some(Heard::Ours),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
impl LinkEvents {
    /// What is watched, if that is known.
    pub(super) fn watched(&self) -> Option<&BTreeSet<u32>> {
        self.watched.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// What is real about these tests runs here, in a network namespace of its own.
    const INSIDE: &str = "CSI_WARDEN_TEST_IN_NAMESPACE";

    /// Runs the named test again in a new network namespace; `false` in there, where the caller goes on.
    fn outside(test: &str) -> bool {
        if std::env::var_os(INSIDE).is_some() {
            return false;
        }
        let mut unshare = Command::new("unshare");
        unshare.args(["--net", "--"]).arg(std::env::current_exe().unwrap());
        let test = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
        let output = unshare.args(["--exact", &test, "--nocapture"]).env(INSIDE, "1").output();
        match output {
            Ok(output) if output.status.code() == Some(1) && output.stderr.starts_with(b"unshare: ") => {
                skip(&test, &String::from_utf8_lossy(&output.stderr));
            }
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
                assert!(text.contains("1 passed"), "ran nothing: {text}");
            }
            Err(error) => skip(&test, &error.to_string()),
        }
        true
    }

    #[expect(clippy::print_stderr, reason = "a test that tests nothing says so")]
    fn skip(test: &str, why: &str) {
        eprintln!("SKIPPED {test}: no network namespace of its own here: {}", why.trim());
    }

    fn ip(arguments: &str) {
        let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
        assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn events() -> LinkEvents {
        let mut events = LinkEvents::new(Path::new("/no/sysfs"));
        events.listen();
        events
    }

    /// The looks until nothing more comes for two seconds, each by its time after `start`.
    async fn looks(events: &mut LinkEvents, start: Instant) -> Vec<Duration> {
        let mut looks = Vec::new();
        while tokio::time::timeout(Duration::from_secs(2), events.changed()).await.is_ok() {
            looks.push(start.elapsed());
        }
        looks
    }

    #[tokio::test]
    async fn a_link_that_changes_gives_a_look_at_once_and_another_a_second_later() {
        if outside("a_link_that_changes_gives_a_look_at_once_and_another_a_second_later") {
            return;
        }
        let mut events = events();
        assert!(looks(&mut events, Instant::now()).await.is_empty(), "nothing changes");
        // The loopback is the one link that every kernel has.
        for change in ["link set lo up", "addr add 127.0.0.7/8 dev lo", "link set lo down"] {
            let start = Instant::now();
            ip(change);
            let told = start.elapsed();
            let looks = looks(&mut events, start).await;
            // On a busy machine those between them become one.
            assert!(looks.len() >= 2, "{change}: {looks:?}");
            assert!(looks[0] < told + Duration::from_millis(500), "{change}: {looks:?}, made after {told:?}");
            assert!(looks.last().is_some_and(|last| *last >= Duration::from_secs(1)), "{change}: {looks:?}");
        }
    }

    #[tokio::test]
    async fn links_that_nobody_watches_have_a_look_a_second_and_one_that_is_watched_has_it_at_once() {
        if outside("links_that_nobody_watches_have_a_look_a_second_and_one_that_is_watched_has_it_at_once") {
            return;
        }
        let mut events = events();
        events.watch(BTreeSet::from([4711]));
        let start = Instant::now();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let churn = std::thread::spawn(move || {
            let mut changes = 0;
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                ip("link set lo up");
                ip("link set lo down");
                changes += 2;
            }
            changes
        });
        let mut looks = Vec::new();
        while start.elapsed() < Duration::from_secs(4) {
            if tokio::time::timeout(Duration::from_millis(100), events.changed()).await.is_ok() {
                looks.push(start.elapsed());
            }
        }
        stop.send(()).unwrap();
        let changes = churn.join().unwrap();
        assert!(changes > 20, "{changes} changes prove nothing");
        assert!((2..=5).contains(&looks.len()), "{looks:?} for {changes} changes");
        assert!(events.take_links_changed() && !events.take_links_changed());
        // The loopback is always the first.
        drop(self::looks(&mut events, start).await);
        events.watch(BTreeSet::from([1]));
        let start = Instant::now();
        ip("link set lo up");
        let told = start.elapsed();
        let looks = self::looks(&mut events, start).await;
        assert!(looks.len() >= 2 && looks[0] < told + Duration::from_millis(500), "{looks:?}, made after {told:?}");
    }

    #[tokio::test]
    async fn a_storm_that_overruns_the_socket_is_seen_and_bounded() {
        if outside("a_storm_that_overruns_the_socket_is_seen_and_bounded") {
            return;
        }
        let mut events = events();
        let socket = events.links.socket.as_ref().unwrap().get_ref();
        rustix::net::sockopt::set_socket_recv_buffer_size(socket, 1).unwrap();
        for _ in 0..100 {
            ip("link set lo up");
            ip("link set lo down");
        }
        let mut byte = [0];
        let lost = std::iter::repeat_with(|| recv(socket, &mut byte, RecvFlags::empty()))
            .take_while(|received| *received != Err(Errno::AGAIN))
            .any(|received| received == Err(Errno::NOBUFS));
        assert!(lost, "nothing was lost, so this proves nothing");
        let count = looks(&mut events, Instant::now()).await.len();
        assert!(count <= 5, "{count} looks for messages of the past");
        for _ in 0..100 {
            ip("link set lo up");
            ip("link set lo down");
        }
        let looks = looks(&mut events, Instant::now()).await;
        assert!((4..=14).contains(&looks.len()), "{looks:?}");
        assert!(events.links.socket.is_some(), "a full socket is no broken one");
    }

    #[tokio::test]
    async fn a_socket_that_is_not_to_be_had_gives_no_events_and_is_not_tried_all_the_time() {
        let mut events = LinkEvents::new(Path::new("/no/sysfs"));
        // A family that no kernel has.
        events.links.protocol = Some(Protocol::from_raw(std::num::NonZeroU32::new(31).unwrap()));
        for _ in 0..3 {
            events.listen();
        }
        let retry_at = events.links.retry_at.unwrap();
        assert!(events.links.socket.is_none() && events.links.told);
        events.listen();
        assert_eq!(events.links.retry_at, Some(retry_at));
        assert!(tokio::time::timeout(Duration::from_millis(300), events.changed()).await.is_err());
    }
}
