//! A body on its way: piece by piece, as its reader makes room, or gathered where somebody has to see a message whole.

use super::answer::code_in;
use super::message;
use super::upstream::Load;
use bytes::{Bytes, BytesMut};
use h2::{RecvStream, SendStream};
use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use tonic::Code;

/// How a body ended.
pub(super) enum Pumped {
    /// All of it was handed on, and the trailers, in which there may be a status.
    Whole(Option<Code>),
    /// Its reader does not want it any more.
    ReaderGone,
    /// Its writer's side broke.
    Broken(h2::Error),
}

/// Hands a body on, of which `gathered` was read before: piece by piece, and takes the next one only when the last is on its way.
/// `load` is told of waits.
pub(super) async fn pump(
    gathered: Bytes,
    from: &mut RecvStream,
    to: &mut SendStream<Bytes>,
    load: Option<&Load>,
) -> Pumped {
    // An answer has always left its head; it is not over before its reader has room for it.
    let (mut piece, mut taken, mut first) = (gathered, 0, load.is_some());
    loop {
        let last = from.is_end_stream();
        if !piece.is_empty() || last {
            // One frame of a request goes at once, and so leaves in one write with the head: before that has left there is no room to
            // ask for, and a call that waits for room keeps others off its connection.
            let sent = match std::mem::take(&mut first) && piece.len() <= FIRST_BYTES {
                true => to.send_data(piece, last).is_ok(),
                false => send(to, piece, last, load).await,
            };
            if !sent {
                return Pumped::ReaderGone;
            }
            if last {
                return Pumped::Whole(None);
            }
        }
        if taken > MOST_UNRELEASED_BYTES {
            release(from, std::mem::take(&mut taken));
        }
        let next = poll_fn(|context| match from.poll_data(context) {
            Poll::Ready(next) => Poll::Ready(Some(next)),
            Poll::Pending => {
                if taken > 0 {
                    release(from, std::mem::take(&mut taken));
                }
                to.poll_reset(context).map(|_| None)
            }
        });
        match next.await {
            None => return Pumped::ReaderGone,
            Some(Some(Err(error))) => return Pumped::Broken(error),
            Some(Some(Ok(next))) => {
                taken += next.len();
                piece = next;
            }
            Some(None) => break,
        }
    }
    match from.trailers().await {
        Ok(Some(trailers)) => {
            let code = code_in(&trailers);
            to.send_trailers(trailers).map_or(Pumped::ReaderGone, |()| Pumped::Whole(code))
        }
        Ok(None) => to.send_data(Bytes::new(), true).map_or(Pumped::ReaderGone, |()| Pumped::Whole(None)),
        Err(error) => Pumped::Broken(error),
    }
}

/// Hands a body on; if it is one whole message, as `change` makes it.
pub(super) async fn pump_changed(
    from: &mut RecvStream,
    to: &mut SendStream<Bytes>,
    change: impl Fn(&Bytes) -> Bytes,
) -> Pumped {
    let gathered = match gather(from, |context| to.poll_reset(context).is_ready()).await {
        Ok(gathered) => gathered,
        Err(Stopped::HungUp) => return Pumped::ReaderGone,
        Err(Stopped::Broken(error)) => return Pumped::Broken(error),
    };
    let changed = match message::only(&gathered) {
        Some(message) => message::framed(&change(&message)),
        None => gathered,
    };
    let last = from.is_end_stream();
    match send(to, changed, last, None).await {
        true if last => Pumped::Whole(None),
        true => pump(Bytes::new(), from, to, None).await,
        false => Pumped::ReaderGone,
    }
}

/// Why a message could not be gathered.
pub(super) enum Stopped {
    /// Nobody wants it any more.
    HungUp,
    /// Its writer's side broke.
    Broken(h2::Error),
}

/// Reads until the first message is whole, the body ends, or it is longer than [`message::MOST_BYTES`].
pub(super) async fn gather(
    from: &mut RecvStream,
    mut hung_up: impl FnMut(&mut Context<'_>) -> bool,
) -> Result<Bytes, Stopped> {
    let mut gathered = BytesMut::new();
    loop {
        let piece = poll_fn(|context| match from.poll_data(context) {
            Poll::Ready(piece) => Poll::Ready(Ok(piece)),
            Poll::Pending if hung_up(context) => Poll::Ready(Err(Stopped::HungUp)),
            Poll::Pending => Poll::Pending,
        });
        let Some(piece) = piece.await? else { return Ok(gathered.freeze()) };
        let piece = piece.map_err(Stopped::Broken)?;
        release(from, piece.len());
        let wanted = |gathered: &[u8]| message::first_frame_bytes(gathered);
        // The usual message is one piece: no copy.
        if gathered.is_empty() && wanted(&piece).is_some_and(|bytes| piece.len() >= bytes) {
            return Ok(piece);
        }
        gathered.extend_from_slice(&piece);
        let whole = wanted(&gathered).is_some_and(|bytes| gathered.len() >= bytes || bytes > message::MOST_BYTES);
        if whole || gathered.len() > message::MOST_BYTES || from.is_end_stream() {
            return Ok(gathered.freeze());
        }
    }
}

/// What may be queued of a request before its stream is open; a frame holds no more.
const FIRST_BYTES: usize = 16 * 1024;

/// What is taken before its writer is told that there is room again, if it does not pause: a quarter of what it has.
const MOST_UNRELEASED_BYTES: usize = 64 * 1024;

/// Sends one piece as the reader makes room for it. `false` when the reader is gone.
pub(super) async fn send(to: &mut SendStream<Bytes>, mut piece: Bytes, last: bool, load: Option<&Load>) -> bool {
    while !piece.is_empty() {
        to.reserve_capacity(piece.len());
        let room = to.capacity().min(piece.len());
        if room == 0 {
            let _waiting = load.map(Load::wait);
            let more = poll_fn(|context| {
                if to.poll_reset(context).is_ready() {
                    return Poll::Ready(false);
                }
                Poll::Ready(matches!(ready!(to.poll_capacity(context)), Some(Ok(_))))
            });
            if !more.await {
                return false;
            }
            continue;
        }
        let part = piece.split_to(room);
        if to.send_data(part, last && piece.is_empty()).is_err() {
            return false;
        }
        if piece.is_empty() {
            return true;
        }
    }
    !last || to.send_data(Bytes::new(), true).is_ok()
}

/// Lets the writer send more. An error means that its stream is over, which the next look tells.
fn release(from: &mut RecvStream, bytes: usize) {
    drop(from.flow_control().release_capacity(bytes));
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use std::time::Duration;
    use tokio::time::timeout;

    /// As long as a caller has no room, its call is under way: at a stop it is waited for.
    #[tokio::test(start_paused = true)]
    async fn an_answer_is_not_over_before_its_reader_has_room() {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (asking, answering) = tokio::join!(
            h2::client::Builder::new().initial_window_size(0).handshake::<_, Bytes>(theirs),
            h2::server::handshake(ours),
        );
        let ((mut asks, mut caller), mut connection) = (asking.unwrap(), answering.unwrap());
        let (_answer, mut body) = asks.send_request(Request::new(()), false).unwrap();
        body.send_data(Bytes::from_static(b"what the driver says"), true).unwrap();
        let (request, mut respond) = tokio::select! {
            accepted = connection.accept() => accepted.unwrap().unwrap(),
            ended = &mut caller => panic!("{ended:?}"),
        };
        let (mut from, mut to) = (request.into_body(), respond.send_response(Response::new(()), false).unwrap());
        let mut pumping = std::pin::pin!(pump(Bytes::new(), &mut from, &mut to, None));
        let over = timeout(Duration::from_secs(60), async {
            tokio::select! {
                _ = &mut pumping => {}
                _ = connection.accept() => panic!("one call was made"),
                ended = &mut caller => panic!("{ended:?}"),
            }
        });
        assert!(over.await.is_err(), "without room");
        caller.set_initial_window_size(1 << 16).unwrap();
        let pumped = tokio::select! {
            pumped = pumping => pumped,
            _ = connection.accept() => panic!("one call was made"),
            ended = &mut caller => panic!("{ended:?}"),
        };
        assert!(matches!(pumped, Pumped::Whole(None)));
    }
}
