//! A stream whose mere acknowledgements leave together with what is written next.
//!
//! A peer that measures its bandwidth by pings, as grpc-go does with every message, is answered by a write of its own, which wakes
//! it for nothing, and before the message goes on. Nobody waits for an acknowledgement, so it may wait a moment.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// How long an acknowledgement waits for company: a call's answer, or the next call of a burst.
const PATIENCE: Duration = Duration::from_millis(5);

/// More than a peer sends before it has an answer; beyond it they leave at once.
const MOST_HELD_BYTES: usize = 128;

/// Slices that leave in one write with what was held; the rest follows.
const SLICES: usize = 8;

/// See the file's head.
#[derive(Debug)]
pub struct PatientAcks<S> {
    stream: S,
    held: Vec<u8>,
    /// Until when. Made when it is first needed.
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> PatientAcks<S> {
    /// Writes to `stream`.
    pub fn over(stream: S) -> Self {
        Self { stream, held: Vec::new(), until: None }
    }

    fn hold(&mut self, bytes: &[u8]) {
        if self.held.is_empty() {
            let until = Instant::now() + PATIENCE;
            match &mut self.until {
                Some(sleep) => sleep.as_mut().reset(until),
                None => self.until = Some(Box::pin(sleep_until(until))),
            }
        }
        self.held.extend_from_slice(bytes);
    }
}

impl<S: AsyncWrite + Unpin> PatientAcks<S> {
    fn write(&mut self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if let [only] = slices
            && self.held.len() + only.len() <= MOST_HELD_BYTES
            && all_can_wait(only)
        {
            self.hold(only);
            return Poll::Ready(Ok(only.len()));
        }
        while !self.held.is_empty() {
            let mut together = [IoSlice::new(&[]); SLICES];
            together[0] = IoSlice::new(&self.held);
            let count = slices.len().min(SLICES - 1);
            together[1..=count].copy_from_slice(&slices[..count]);
            let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, &together[..=count]))?;
            let of_held = written.min(self.held.len());
            self.held.drain(..of_held);
            match written - of_held {
                _ if written == 0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                0 => {}
                news => return Poll::Ready(Ok(news)),
            }
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn release(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.held.is_empty() {
            match ready!(Pin::new(&mut self.stream).poll_write(context, &self.held))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => drop(self.held.drain(..written)),
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Whether these are whole frames for which nobody waits: acknowledged settings and pings, and room on the whole connection, of which
/// there is plenty. What looks like it and is not waits a moment for nothing, and never loses its place.
fn all_can_wait(mut bytes: &[u8]) -> bool {
    const ACK: u8 = 1;
    while let Some((head, rest)) = bytes.split_first_chunk::<9>() {
        let size = match *head {
            // SETTINGS, PING, WINDOW_UPDATE; all on stream 0.
            [0, 0, 0, 4, ACK, 0, 0, 0, 0] => 0,
            [0, 0, 8, 6, ACK, 0, 0, 0, 0] => 8,
            [0, 0, 4, 8, 0, 0, 0, 0, 0] => 4,
            _ => return false,
        };
        match rest.get(size..) {
            Some([]) => return true,
            Some(more) => bytes = more,
            None => return false,
        }
    }
    false
}

impl<S: AsyncRead + Unpin> AsyncRead for PatientAcks<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PatientAcks<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.write(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let patient =
            !self.held.is_empty() && self.until.as_mut().is_some_and(|until| until.as_mut().poll(context).is_pending());
        if !patient {
            ready!(self.release(context))?;
        }
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Of no use to a peer that is gone, or will be.
        self.held.clear();
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    const SETTINGS_ACK: &[u8] = &[0, 0, 0, 4, 1, 0, 0, 0, 0];
    const PING_ACK: &[u8] = &[0, 0, 8, 6, 1, 0, 0, 0, 0, 2, 4, 16, 16, 9, 14, 7, 7];
    const PING: &[u8] = &[0, 0, 8, 6, 0, 0, 0, 0, 0, 2, 4, 16, 16, 9, 14, 7, 7];
    const ROOM_FOR_A_STREAM: &[u8] = &[0, 0, 4, 8, 0, 0, 0, 0, 1, 0, 0, 1, 0];
    const ROOM: &[u8] = &[0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 1, 0];

    #[tokio::test(start_paused = true)]
    async fn an_acknowledgement_leaves_with_what_follows_it_in_its_order() {
        let (ours, mut theirs) = duplex(1024);
        let mut acks = PatientAcks::over(ours);
        for part in [SETTINGS_ACK, PING_ACK, b"answer"] {
            acks.write_all(part).await.unwrap();
            acks.flush().await.unwrap();
        }
        let mut read = [0; 1024];
        let length = theirs.read(&mut read).await.unwrap();
        assert_eq!(read[..length], [SETTINGS_ACK, PING_ACK, b"answer"].concat());
    }

    /// The connection is polled again when its timer wakes it, as h2 flushes in each poll.
    #[tokio::test(start_paused = true)]
    async fn an_acknowledgement_alone_leaves_by_itself_soon() {
        let (ours, mut theirs) = duplex(1024);
        let mut acks = PatientAcks::over(ours);
        acks.write_all(PING_ACK).await.unwrap();
        let began = Instant::now();
        let mut read = [0; PING_ACK.len()];
        let connection = std::future::poll_fn(|context| {
            drop(Pin::new(&mut acks).poll_flush(context));
            Poll::<()>::Pending
        });
        tokio::select! {
            () = connection => unreachable!(),
            all = theirs.read_exact(&mut read) => drop(all.unwrap()),
        }
        assert_eq!(read, PING_ACK);
        assert!(began.elapsed() <= 2 * PATIENCE, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_that_is_waited_for_is_held() {
        let half = &PING_ACK[..12];
        for urgent in [PING, ROOM_FOR_A_STREAM, half, b"\0\0\0", &[PING_ACK, PING].concat(), &PING_ACK.repeat(8)] {
            let (ours, mut theirs) = duplex(1024);
            let mut acks = PatientAcks::over(ours);
            acks.write_all(urgent).await.unwrap();
            let mut read = vec![0; urgent.len()];
            theirs.read_exact(&mut read).await.unwrap();
            assert_eq!(read, urgent);
        }
        for patient in [PING_ACK, SETTINGS_ACK, ROOM, &[SETTINGS_ACK, ROOM].concat()] {
            assert!(all_can_wait(patient), "{patient:?}");
        }
    }

    proptest! {
        #[test]
        fn every_byte_arrives_in_order_whatever_is_written_and_fits(
            parts in prop::collection::vec(
                prop_oneof![
                    Just(PING_ACK.to_vec()), Just(SETTINGS_ACK.to_vec()), Just(ROOM.to_vec()), Just(PING_ACK[5..].to_vec()),
                    prop::collection::vec(any::<u8>(), 0..40),
                ],
                0..40,
            ),
            fits in 1_usize..50,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let read = runtime.block_on(async {
                let (ours, mut theirs) = duplex(fits);
                let mut acks = PatientAcks::over(ours);
                let writing = async {
                    for part in &parts {
                        acks.write_all(part).await.unwrap();
                        acks.flush().await.unwrap();
                    }
                    acks.write_all(b"end").await.unwrap();
                    acks.shutdown().await.unwrap();
                };
                let mut read = Vec::new();
                let ((), all) = tokio::join!(writing, theirs.read_to_end(&mut read));
                all.unwrap();
                read
            });
            prop_assert_eq!(read, [parts.concat(), b"end".to_vec()].concat());
        }
    }
}
