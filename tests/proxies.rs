//! Any call passes the proxy unchanged: on raw HTTP/2 at both ends, so that nothing of a gRPC stack is in the way.

#![allow(clippy::allow_attributes, clippy::unwrap_used, reason = "a test may panic")]

use bytes::Bytes;
use csi_warden::metrics::Metrics;
use csi_warden::parts::Parts;
use csi_warden::policy::volumes::{Completeness, VolumeTable};
use csi_warden::proxy::gate::{Gate, GateRules};
use csi_warden::proxy::listener::{Proxy, ProxySettings};
use csi_warden::proxy::volumes::Volumes;
use csi_warden::registration::socket::SocketPath;
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{HeaderMap, HeaderValue, Request, Response};
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(20);

/// What the driver tells the test.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Call { path: String, authority: Option<String>, headers: Vec<(String, Vec<u8>)> },
    Reset(Reason),
}

struct Bed {
    folder: tempfile::TempDir,
    parts: Parts,
    seen: mpsc::UnboundedReceiver<Seen>,
    tell: mpsc::UnboundedSender<Seen>,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("p").tempdir().unwrap();
        let (tell, seen) = mpsc::unbounded_channel();
        Self { folder, parts: Parts::new(CancellationToken::new()), seen, tell }
    }

    fn driver_socket(&self) -> PathBuf {
        self.folder.path().join("csi.sock")
    }

    fn proxy_socket(&self) -> PathBuf {
        self.folder.path().join("x-warden.sock")
    }

    fn proxy(&self) {
        self.proxy_for(rustix::process::geteuid().as_raw());
    }

    fn proxy_for(&self, uid: u32) {
        let settings = ProxySettings {
            socket: SocketPath::at(&self.proxy_socket()).unwrap(),
            driver_socket: self.driver_socket(),
            allowed: BTreeSet::from([uid]),
        };
        let (parts, stop) = (&self.parts, self.parts.stop().child_token());
        let table = VolumeTable::new(Completeness::Complete);
        let gate = Gate::new("x", GateRules::default(), watch::channel(None).1, Volumes::new(table), Metrics::new());
        Proxy::listen(settings).unwrap().serve(gate, Metrics::new(), parts, parts, stop);
    }

    fn driver(&self) -> Driver {
        self.driver_with(|_| {})
    }

    fn driver_with(&self, builder: impl Fn(&mut h2::server::Builder) + Send + 'static) -> Driver {
        drop(std::fs::remove_file(self.driver_socket()));
        let listener = UnixListener::bind(self.driver_socket()).unwrap();
        let (tell, stop) = (self.tell.clone(), CancellationToken::new());
        spawn(accept(listener, builder, tell, stop.clone()));
        Driver { _stop: stop.drop_guard() }
    }

    async fn seen(&mut self) -> Seen {
        timeout(PATIENCE, self.seen.recv()).await.expect("the driver saw nothing").unwrap()
    }
}

/// Dropped: its connections break, its socket's file stays.
struct Driver {
    _stop: tokio_util::sync::DropGuard,
}

async fn accept(
    listener: UnixListener,
    builder: impl Fn(&mut h2::server::Builder),
    tell: mpsc::UnboundedSender<Seen>,
    stop: CancellationToken,
) {
    while let Some(Ok((stream, _))) = stop.run_until_cancelled(listener.accept()).await {
        let mut settings = h2::server::Builder::new();
        settings.max_pending_accept_reset_streams(100_000);
        builder(&mut settings);
        let (tell, stop) = (tell.clone(), stop.clone());
        spawn(async move {
            let serve = async {
                let mut connection = settings.handshake::<_, Bytes>(stream).await.unwrap();
                while let Some(Ok((request, respond))) = connection.accept().await {
                    let path = request.uri().path().to_owned();
                    if path == "/x/die" {
                        return;
                    }
                    if path == "/x/die-late" {
                        let mut respond = respond;
                        let mut answer = respond.send_response(grpc_head(), false).unwrap();
                        answer.send_data(Bytes::from_static(b"\0\0\0\0\x09half"), false).unwrap();
                        drop(timeout(Duration::from_millis(100), connection.accept()).await);
                        return;
                    }
                    spawn(answer(request, respond, tell.clone()));
                }
            };
            stop.run_until_cancelled(serve).await;
        });
    }
}

fn grpc_head() -> Response<()> {
    Response::builder().header("content-type", "application/grpc").header("x-from", "driver").body(()).unwrap()
}

async fn answer(request: Request<RecvStream>, mut respond: SendResponse<Bytes>, tell: mpsc::UnboundedSender<Seen>) {
    let (head, mut body) = request.into_parts();
    let headers = head.headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect();
    let authority = head.uri.authority().map(ToString::to_string);
    drop(tell.send(Seen::Call { path: head.uri.path().to_owned(), authority, headers }));
    match head.uri.path() {
        "/x/refuse" => {
            let head = Response::builder()
                .header("content-type", "application/grpc")
                .header("grpc-status", "9")
                .header("grpc-message", "50%25 of it%0A\u{fc}")
                .header("grpc-status-details-bin", "CAkSBGhhbGY")
                .header("x-twice", "a")
                .header("x-twice", "b")
                .body(())
                .unwrap();
            drop(respond.send_response(head, true));
        }
        "/x/hang" => {
            let reason = poll_fn(|context| respond.poll_reset(context)).await.unwrap();
            drop(tell.send(Seen::Reset(reason)));
        }
        "/x/reset" => respond.send_reset(Reason::ENHANCE_YOUR_CALM),
        "/x/reset-late" => {
            let mut answer = respond.send_response(grpc_head(), false).unwrap();
            answer.send_data(Bytes::from_static(b"half"), false).unwrap();
            sleep(Duration::from_millis(50)).await;
            answer.send_reset(Reason::INTERNAL_ERROR);
        }
        // Echo, piece by piece.
        _ => {
            let mut answer = respond.send_response(grpc_head(), false).unwrap();
            while let Some(Ok(piece)) = body.data().await {
                let bytes = piece.len();
                send_all(&mut answer, piece).await;
                body.flow_control().release_capacity(bytes).unwrap();
            }
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
            trailers.append("x-end", HeaderValue::from_static("1"));
            trailers.append("x-end", HeaderValue::from_static("2"));
            drop(answer.send_trailers(trailers));
        }
    }
}

async fn send_all(to: &mut h2::SendStream<Bytes>, mut piece: Bytes) {
    while !piece.is_empty() {
        to.reserve_capacity(piece.len());
        let Some(Ok(_)) = poll_fn(|context| to.poll_capacity(context)).await else { return };
        let room = to.capacity().min(piece.len());
        to.send_data(piece.split_to(room), false).unwrap();
    }
}

#[expect(clippy::disallowed_methods, reason = "ends with the test's runtime")]
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(task);
}

async fn connect(path: &Path) -> SendRequest<Bytes> {
    let mut settings = h2::client::Builder::new();
    settings.initial_window_size(1 << 20).initial_connection_window_size(1 << 30);
    let (requests, io) = settings.handshake(UnixStream::connect(path).await.unwrap()).await.unwrap();
    spawn(async move { drop(io.await) });
    requests
}

fn request(method: &str) -> Request<()> {
    Request::post(format!("http://localhost/x/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("grpc-timeout", "10S")
        .header("x-bytes-bin", "AAEC")
        .header("x-many", "1")
        .header("x-many", "2")
        .body(())
        .unwrap()
}

struct Whole {
    head: HeaderMap,
    body: Vec<u8>,
    trailers: Option<HeaderMap>,
}

async fn whole(answer: h2::client::ResponseFuture) -> Result<Whole, h2::Error> {
    timeout(PATIENCE, async {
        let (head, mut body) = answer.await?.into_parts();
        let mut bytes = Vec::new();
        while let Some(piece) = body.data().await {
            let piece = piece?;
            body.flow_control().release_capacity(piece.len())?;
            bytes.extend_from_slice(&piece);
        }
        Ok(Whole { head: head.headers, body: bytes, trailers: body.trailers().await? })
    })
    .await
    .expect("no end of the answer")
}

async fn unary(path: &Path, method: &str, body: &[u8]) -> Result<Whole, h2::Error> {
    let (answer, mut stream) = connect(path).await.ready().await?.send_request(request(method), false)?;
    let body = Bytes::copy_from_slice(body);
    spawn(async move {
        send_all(&mut stream, body).await;
        drop(stream.send_data(Bytes::new(), true));
    });
    whole(answer).await
}

fn status(headers: &HeaderMap) -> &str {
    headers["grpc-status"].to_str().unwrap()
}

#[tokio::test]
async fn a_call_passes_both_ways_with_all_that_is_with_it() {
    let mut bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    let answer = unary(&bed.proxy_socket(), "echo", b"\0\0\0\0\x05hello").await.unwrap();
    assert_eq!(answer.body, b"\0\0\0\0\x05hello");
    assert_eq!(answer.head["x-from"], "driver");
    let trailers = answer.trailers.unwrap();
    assert_eq!(status(&trailers), "0");
    assert_eq!(trailers.get_all("x-end").iter().collect::<Vec<_>>(), ["1", "2"]);
    let Seen::Call { path, authority, headers } = bed.seen().await else { panic!() };
    assert_eq!((path.as_str(), authority.as_deref()), ("/x/echo", Some("localhost")));
    let mut sent = Vec::new();
    for (name, value) in request("echo").headers() {
        sent.push((name.to_string(), value.as_bytes().to_vec()));
    }
    // On a busy machine the time that the call waited is taken off.
    let but_timeout =
        |headers: Vec<(String, Vec<u8>)>| headers.into_iter().partition(|(name, _)| name == "grpc-timeout");
    let ((timeouts, others), (_, sent)): ((Vec<_>, Vec<_>), (Vec<_>, Vec<_>)) =
        (but_timeout(headers), but_timeout(sent));
    assert_eq!((timeouts.len(), others), (1, sent), "nothing more, nothing less");
}

#[tokio::test]
async fn a_trailers_only_error_keeps_every_byte() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    let through = unary(&bed.proxy_socket(), "refuse", b"").await.unwrap();
    let direct = unary(&bed.driver_socket(), "refuse", b"").await.unwrap();
    assert_eq!(through.head, direct.head);
    assert!(through.body.is_empty() && through.trailers.is_none());
}

#[tokio::test]
async fn a_large_body_passes_both_ways() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    let body = (0..16u32 << 20).map(|at| (at % 251) as u8).collect::<Vec<_>>();
    let answer = unary(&bed.proxy_socket(), "echo", &body).await.unwrap();
    assert!(answer.body == body, "{} of {} bytes", answer.body.len(), body.len());
}

#[tokio::test]
async fn a_stream_is_not_held_back() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    let (answer, mut stream) =
        connect(&bed.proxy_socket()).await.ready().await.unwrap().send_request(request("echo"), false).unwrap();
    stream.send_data(Bytes::from_static(b"0"), false).unwrap();
    let mut body = timeout(PATIENCE, answer).await.unwrap().unwrap().into_body();
    for number in 0..1000u32 {
        let piece = timeout(PATIENCE, body.data()).await.expect("held back").unwrap().unwrap();
        body.flow_control().release_capacity(piece.len()).unwrap();
        assert_eq!(piece, number.to_string());
        stream.send_data(Bytes::from((number + 1).to_string()), false).unwrap();
    }
    stream.send_data(Bytes::new(), true).unwrap();
    assert!(timeout(PATIENCE, body.data()).await.unwrap().unwrap().is_ok(), "the last one");
    assert_eq!(status(&timeout(PATIENCE, body.trailers()).await.unwrap().unwrap().unwrap()), "0");
}

#[tokio::test]
async fn a_caller_that_hangs_up_cancels_the_call_at_the_driver() {
    let mut bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    let (answer, mut stream) =
        connect(&bed.proxy_socket()).await.ready().await.unwrap().send_request(request("hang"), true).unwrap();
    assert!(matches!(bed.seen().await, Seen::Call { .. }));
    stream.send_reset(Reason::CANCEL);
    assert_eq!(bed.seen().await, Seen::Reset(Reason::CANCEL));
    drop(answer);
    // A connection that goes away says it, too.
    let requests = connect(&bed.proxy_socket()).await;
    let call = requests.ready().await.unwrap().send_request(request("hang"), true).unwrap();
    assert!(matches!(bed.seen().await, Seen::Call { .. }));
    drop(call);
    assert_eq!(bed.seen().await, Seen::Reset(Reason::CANCEL));
}

#[tokio::test]
async fn a_reset_by_the_driver_keeps_its_reason() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    for (method, reason) in [("reset", Reason::ENHANCE_YOUR_CALM), ("reset-late", Reason::INTERNAL_ERROR)] {
        let error = unary(&bed.proxy_socket(), method, b"").await.err().unwrap();
        assert_eq!((error.is_reset(), error.reason()), (true, Some(reason)), "{method}: {error}");
    }
}

#[tokio::test]
async fn a_driver_that_is_away_is_told_at_once_and_found_when_it_is_back() {
    let bed = Bed::new();
    bed.proxy();
    let away = unary(&bed.proxy_socket(), "echo", b"x").await.unwrap();
    assert_eq!(status(&away.head), "14");
    let text = away.head["grpc-message"].to_str().unwrap();
    assert!(text.contains("csi-warden") && text.contains("csi.sock"), "{text}");
    for _ in 0..3 {
        let driver = bed.driver();
        assert_eq!(unary(&bed.proxy_socket(), "echo", b"x").await.unwrap().body, b"x");
        drop(driver);
        let gone = unary(&bed.proxy_socket(), "echo", b"x").await.unwrap();
        assert_eq!(status(&gone.head), "14", "its socket's file is still there");
    }
}

#[tokio::test]
async fn a_driver_with_a_new_socket_gets_the_calls_although_the_old_one_lives() {
    let mut bed = Bed::new();
    let _old = bed.driver();
    bed.proxy();
    let requests = connect(&bed.proxy_socket()).await;
    let (hanging, _stream) = requests.clone().ready().await.unwrap().send_request(request("hang"), true).unwrap();
    assert!(matches!(bed.seen().await, Seen::Call { .. }));
    std::fs::remove_file(bed.driver_socket()).unwrap();
    let away = unary(&bed.proxy_socket(), "echo", b"x").await.unwrap();
    assert_eq!(status(&away.head), "14", "without a socket nobody could call it");
    let _new = bed.driver();
    assert_eq!(unary(&bed.proxy_socket(), "echo", b"x").await.unwrap().body, b"x");
    drop(hanging);
}

#[tokio::test]
async fn a_driver_that_dies_under_a_call_makes_it_unavailable() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    let early = unary(&bed.proxy_socket(), "die", b"").await.unwrap();
    assert_eq!(status(&early.head), "14");
    let late = unary(&bed.proxy_socket(), "die-late", b"").await.err().expect("half an answer is no answer");
    let direct = unary(&bed.driver_socket(), "die-late", b"").await.err().unwrap();
    assert!(!late.is_reset() && !direct.is_reset(), "the connection breaks, as it would without us: {late} / {direct}");
    assert_eq!(unary(&bed.proxy_socket(), "echo", b"x").await.unwrap().body, b"x");
}

#[tokio::test]
async fn calls_beyond_the_drivers_limit_find_room() {
    let mut bed = Bed::new();
    let _driver = bed.driver_with(|settings| {
        settings.max_concurrent_streams(1);
    });
    bed.proxy();
    let mut hanging = Vec::new();
    for _ in 0..5 {
        hanging.push(
            connect(&bed.proxy_socket()).await.ready().await.unwrap().send_request(request("hang"), true).unwrap(),
        );
        assert!(matches!(bed.seen().await, Seen::Call { .. }), "each has a connection of its own at the kubelet, too");
    }
    assert_eq!(unary(&bed.proxy_socket(), "echo", b"x").await.unwrap().body, b"x");
}

#[tokio::test]
async fn a_thousand_short_connections_pass() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    for number in 0..1000u32 {
        let body = number.to_string();
        assert_eq!(unary(&bed.proxy_socket(), "echo", body.as_bytes()).await.unwrap().body, body.as_bytes());
    }
}

#[tokio::test]
async fn a_slow_reader_is_waited_for_and_stops_nobody_else() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    let mut slow = Vec::new();
    for _ in 0..8 {
        let (answer, mut stream) =
            connect(&bed.proxy_socket()).await.ready().await.unwrap().send_request(request("echo"), false).unwrap();
        let (sent, mut stuck) = mpsc::channel(1);
        spawn(async move {
            for _ in 0..1000 {
                send_all(&mut stream, Bytes::from(vec![7; 1 << 16])).await;
                sent.try_send(()).ok();
            }
        });
        // Until nothing moves any more: 64 MB do not fit in between.
        while timeout(Duration::from_millis(300), stuck.recv()).await.is_ok_and(|sent| sent.is_some()) {}
        slow.push((answer, stuck));
    }
    assert_eq!(unary(&bed.proxy_socket(), "echo", b"x").await.unwrap().body, b"x");
    for (_, stuck) in &slow {
        assert!(!stuck.is_closed(), "it had room for all: nothing held it back");
    }
}

#[tokio::test]
async fn nobody_else_may_call() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy_for(rustix::process::geteuid().as_raw() + 4321);
    let refused = unary(&bed.proxy_socket(), "echo", b"x").await.unwrap();
    assert_eq!(status(&refused.head), "7");
    let text = refused.head["grpc-message"].to_str().unwrap();
    assert!(text.contains("--allowed-uids"), "{text}");
}

#[tokio::test]
async fn a_lost_proxy_socket_comes_back_and_a_successors_stays() {
    let bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    assert_eq!(unary(&bed.proxy_socket(), "echo", b"x").await.unwrap().body, b"x");
    std::fs::remove_file(bed.proxy_socket()).unwrap();
    timeout(PATIENCE, async {
        while !bed.proxy_socket().exists() {
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(unary(&bed.proxy_socket(), "echo", b"x").await.unwrap().body, b"x");
    std::fs::remove_file(bed.proxy_socket()).unwrap();
    let _successor = UnixListener::bind(bed.proxy_socket()).unwrap();
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap());
    let before = inode(&bed.proxy_socket());
    sleep(Duration::from_secs(5)).await;
    assert_eq!(inode(&bed.proxy_socket()), before);
    bed.parts.stop().cancel();
    sleep(Duration::from_millis(300)).await;
    assert_eq!(inode(&bed.proxy_socket()), before, "nor is it removed at the end");
}

/// What holds connections open without a call must not use up the descriptors that calls need.
#[tokio::test]
async fn of_too_many_idle_connections_the_longest_idle_goes_and_one_with_a_call_stays() {
    let mut bed = Bed::new();
    let _driver = bed.driver();
    bed.proxy();
    let busy = connect(&bed.proxy_socket()).await;
    let (hanging, _stream) = busy.clone().ready().await.unwrap().send_request(request("hang"), true).unwrap();
    assert!(matches!(bed.seen().await, Seen::Call { .. }));
    let stream = UnixStream::connect(bed.proxy_socket()).await.unwrap();
    let (mut idle, io) = h2::client::handshake(stream).await.unwrap();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let (most, mut others) = ((limit / 4).min(1024), Vec::new());
    let ended = async {
        for _ in 0..most {
            others.push(connect(&bed.proxy_socket()).await);
        }
        poll_fn(|context| idle.poll_ready(context)).await.err()
    };
    let (io, _) = timeout(PATIENCE, async { tokio::join!(io, ended) }).await.expect("nobody was told to go");
    io.expect("a goodbye, not a broken connection");
    let (answer, _) = others.pop().unwrap().ready().await.unwrap().send_request(request("refuse"), true).unwrap();
    assert_eq!(status(timeout(PATIENCE, answer).await.unwrap().unwrap().headers()), "9", "the newest has its place");
    assert!(timeout(Duration::from_millis(300), hanging).await.is_err(), "the call goes on");
}

/// Calls that wait for room count as a connection that has none. A first frame never waits, so they do not.
#[tokio::test]
async fn a_burst_of_calls_shares_one_connection_to_the_driver() {
    let bed = Bed::new();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let _driver = bed.driver_with(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    bed.proxy();
    unary(&bed.proxy_socket(), "echo", b"first").await.unwrap();
    let requests = connect(&bed.proxy_socket()).await;
    for _ in 0..50 {
        let mut answers = Vec::new();
        for _ in 0..32 {
            let (answer, mut stream) =
                requests.clone().ready().await.unwrap().send_request(request("echo"), false).unwrap();
            stream.send_data(Bytes::from_static(&[7; 500]), true).unwrap();
            answers.push(answer);
        }
        for answer in answers {
            assert_eq!(whole(answer).await.unwrap().body.len(), 500);
        }
    }
    assert_eq!(connections.load(Ordering::Relaxed), 1);
}

/// What a driver on bare bytes saw: calls with their first message, and those of them that did not come in one piece.
#[derive(Default)]
struct Pieces {
    whole: AtomicUsize,
    split: AtomicUsize,
}

/// A driver that answers no call and looks all the time, so that it sees what one write brings. Ends with its connection.
fn bare_driver(listener: &std::os::unix::net::UnixListener, pieces: &Pieces) {
    const PREFACE: usize = 24;
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const SETTINGS: u8 = 4;
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(&[0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]).unwrap();
    stream.set_nonblocking(true).unwrap();
    let (mut bytes, mut skip, mut piece) = (Vec::new(), PREFACE, vec![0; 1 << 16]);
    loop {
        let read = match stream.read(&mut piece) {
            Ok(0) => return,
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::hint::spin_loop();
                continue;
            }
            Err(_) => return,
        };
        bytes.extend_from_slice(&piece[..read]);
        let mut kinds = Vec::new();
        while bytes.len() >= skip + 9 {
            let frame = &bytes[skip..];
            let length = usize::from(frame[0]) << 16 | usize::from(frame[1]) << 8 | usize::from(frame[2]);
            if frame.len() < 9 + length {
                break;
            }
            let (kind, acknowledged) = (frame[3], frame[4] & 1 == 1);
            if kind == SETTINGS && !acknowledged {
                stream.write_all(&[0, 0, 0, SETTINGS, 1, 0, 0, 0, 0]).unwrap();
            }
            kinds.push(kind);
            bytes.drain(..skip + 9 + length);
            skip = 0;
        }
        let count = |wanted: u8| kinds.iter().filter(|kind| **kind == wanted).count();
        pieces.split.fetch_add(count(HEADERS).saturating_sub(count(DATA)), Ordering::Relaxed);
        pieces.whole.fetch_add(count(DATA), Ordering::Relaxed);
    }
}

#[tokio::test]
async fn a_calls_first_message_leaves_in_one_write_with_its_head() {
    let bed = Bed::new();
    let listener = std::os::unix::net::UnixListener::bind(bed.driver_socket()).unwrap();
    let pieces = Arc::new(Pieces::default());
    let told = Arc::clone(&pieces);
    let driver = std::thread::spawn(move || bare_driver(&listener, &told));
    bed.proxy();
    let mut before = 0;
    for call in 1..=200 {
        let requests = connect(&bed.proxy_socket()).await;
        let (_answer, mut stream) = requests.ready().await.unwrap().send_request(request("x"), false).unwrap();
        stream.send_data(Bytes::from_static(b"\0\0\0\0\x04body"), true).unwrap();
        timeout(PATIENCE, async {
            while pieces.whole.load(Ordering::Relaxed) < call {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .expect("the driver saw no message");
        if call == 1 {
            // Before the driver's settings have come, nothing can be said about it.
            before = pieces.split.load(Ordering::Relaxed);
        }
    }
    assert_eq!(pieces.split.load(Ordering::Relaxed), before);
    drop(bed);
    drop(driver);
}
