//! One connection of a caller's: takes its calls, and breaks when the driver broke off in the middle of an answer.

use super::forward::End;
use super::{CANCELLED_BEFORE_SEEN, CONNECTION_WINDOW_BYTES, SEND_BUFFER_BYTES, STREAM_WINDOW_BYTES};
use crate::grpc::authority::AuthorityFix;
use crate::grpc::patient_acks::PatientAcks;
use crate::grpc::read_driven::ReadDriven;
use crate::parts::Parts;
use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::Request;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// A caller that says nothing for this long has no call.
const SILENCE: Duration = Duration::from_secs(20);

/// What is queued for a caller gets this long to leave, before its connection is cut.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// More than a stream has before its reads are as long as h2's buffer.
const LAST_TURNS: u32 = 8;

/// What runs a call. On the heap, because a task is moved several times before it runs.
pub(super) type TakesCalls =
    Box<dyn Fn(Request<RecvStream>, SendResponse<Bytes>) -> Pin<Box<dyn Future<Output = End> + Send>> + Send + Sync>;

/// Serves one connection to its end. `call` is run for each call; `stop` refuses new ones and lets those in flight finish.
pub(super) async fn serve(stream: ReadDriven, parts: Parts, stop: CancellationToken, call: TakesCalls) {
    let handshake = h2::server::Builder::new()
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_pending_accept_reset_streams(CANCELLED_BEFORE_SEEN)
        .max_local_error_reset_streams(None)
        .handshake::<_, Bytes>(AuthorityFix::new(PatientAcks::over(stream)));
    let mut connection = tokio::select! {
        shaken = timeout(SILENCE, handshake) => match shaken {
            Ok(Ok(connection)) => connection,
            // Whoever connects wants to call.
            Err(_elapsed) => return,
            Ok(Err(error)) => return debug!(error = &error as &dyn std::error::Error, "a caller's connection broke"),
        },
        () = stop.cancelled() => return,
    };
    // A clone for each call under way, which tells when the driver broke off.
    let calls = Arc::new(Notify::new());
    let (stopped, broke) = (stop.cancelled(), calls.notified());
    let (mut stopped, mut broke) = (std::pin::pin!(stopped), std::pin::pin!(broke));
    let mut stopping = false;
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut broke => break,
            () = &mut stopped, if !stopping => {
                stopping = true;
                connection.graceful_shutdown();
                continue;
            }
            // Before the end: after a pause of this process both may be there.
            accepted = connection.accept() => accepted,
            () = last_words(), if stopping && Arc::strong_count(&calls) == 1 => return,
        };
        match accepted {
            Some(Ok((request, respond))) => {
                let (call, calls) = (call(request, respond), Arc::clone(&calls));
                drop(parts.spawn_connection(async move {
                    if call.await == End::BrokeOff {
                        calls.notify_one();
                    }
                }));
            }
            Some(Err(error)) => {
                return debug!(error = &error as &dyn std::error::Error, "a caller's connection broke");
            }
            None => return,
        }
    }
    // What the driver did to us, we do to the caller; what others had in full still leaves.
    connection.abrupt_shutdown(Reason::NO_ERROR);
    drop(timeout(LAST_WORDS, poll_fn(|context| connection.poll_closed(context))).await);
}

/// The time for last words, and the turns in which what lies in the socket by then is read.
async fn last_words() {
    sleep(LAST_WORDS).await;
    for _ in 0..LAST_TURNS {
        yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use tokio::time::advance;

    /// A client's beginning, and one call: POST, http, `/x/y`, authority `h`.
    const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    const CALL: &[u8] = b"\0\0\x0b\x01\x05\0\0\0\x01\x83\x86\x44\x04/x/y\x41\x01h";

    /// The same with a header of 1500 bytes: literal, its name `x`, its value all `a`. More than is read at first.
    fn long_call() -> Vec<u8> {
        let mut head = CALL[9..].to_vec();
        head.extend(b"\x00\x01x\x7f\xdd\x0a");
        head.extend([b'a'; 1500]);
        let length = u16::try_from(head.len()).unwrap().to_be_bytes();
        [&[0], &length[..], &CALL[3..9], &head].concat()
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_was_sent_before_the_last_moment_is_taken() {
        for sent in [CALL.to_vec(), long_call()] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let (parts, stop) = (Parts::new(CancellationToken::new()), CancellationToken::new());
            let (ended, taken) = (CancellationToken::new(), CancellationToken::new());
            let tell = taken.clone();
            let call: TakesCalls = Box::new(move |_, _| {
                tell.cancel();
                Box::pin(std::future::pending())
            });
            let serving = serve(ReadDriven::new(ours).unwrap(), parts.clone(), stop.clone(), call);
            theirs.write_all(HELLO).unwrap();
            let guard = ended.clone().drop_guard();
            drop(parts.spawn_connection(async move {
                let _guard = guard;
                serving.await;
            }));
            for _ in 0..20 {
                advance(Duration::from_millis(10)).await;
            }
            stop.cancel();
            for _ in 0..20 {
                advance(Duration::from_millis(10)).await;
            }
            // As if this process stood still meanwhile.
            theirs.write_all(&sent).unwrap();
            advance(LAST_WORDS).await;
            for _ in 0..20 {
                yield_now().await;
            }
            let length = sent.len();
            assert!(
                taken.is_cancelled() && !ended.is_cancelled(),
                "the connection ended under a call of {length} bytes"
            );
        }
    }
}
