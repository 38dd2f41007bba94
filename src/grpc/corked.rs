//! A stream that sends together what is written within one turn of the runtime.
//!
//! HTTP/2 writes a call in four steps: preface, settings, headers, data. Sent one by one they wake the other side, and its answers
//! us, at each step, and waking is most of what a call over a unix socket costs.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// More than a call of ours has; beyond it writing waits for the other side, as without this.
const MOST_HELD_BYTES: usize = 16 * 1024;

/// Holds what is written until a flush that comes with nothing new, for which it wakes its task once more.
#[derive(Debug)]
pub struct Corked<S> {
    stream: S,
    held: Vec<u8>,
    sent: usize,
    new: bool,
}

impl<S> Corked<S> {
    /// Sends over `stream`.
    pub fn over(stream: S) -> Self {
        Self { stream, held: Vec::new(), sent: 0, new: false }
    }
}

impl<S: AsyncWrite + Unpin> Corked<S> {
    fn send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.held.len() {
            match ready!(Pin::new(&mut self.stream).poll_write(context, &self.held[self.sent..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                sent => self.sent += sent,
            }
        }
        self.held.clear();
        self.sent = 0;
        Poll::Ready(Ok(()))
    }

    fn hold(&mut self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if self.held.len() >= MOST_HELD_BYTES {
            ready!(self.send(context))?;
        }
        let before = self.held.len();
        slices.iter().for_each(|slice| self.held.extend_from_slice(slice));
        self.new = true;
        Poll::Ready(Ok(self.held.len() - before))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Corked<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Corked<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.hold(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.hold(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if std::mem::take(&mut self.new) {
            // Whoever else has a turn now may have more to send.
            context.waker().wake_by_ref();
            return Poll::Ready(Ok(()));
        }
        ready!(self.send(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.send(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpc::driver;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::net::UnixListener;

    #[tokio::test]
    async fn what_is_written_is_sent_whole_and_in_order_whatever_fits() {
        let (ours, mut theirs) = duplex(7);
        let mut corked = Corked::over(ours);
        let text: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let writing = async {
            for part in text.chunks(1_000) {
                corked.write_all(part).await.unwrap();
                corked.flush().await.unwrap();
            }
            corked.shutdown().await.unwrap();
        };
        let mut read = Vec::new();
        let ((), read_bytes) = tokio::join!(writing, theirs.read_to_end(&mut read));
        assert_eq!(read_bytes.unwrap(), text.len());
        assert!(read == text);
    }

    /// The other side is silent, so all that comes is what is sent without it.
    #[tokio::test]
    async fn a_call_goes_out_in_one_piece() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("csi.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let first_piece = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut piece = vec![0; 65_536];
            let length = stream.read(&mut piece).await.unwrap();
            let more = tokio::time::timeout(Duration::from_millis(100), stream.read(&mut [0; 64])).await;
            assert!(more.is_err(), "a second piece");
            piece.truncate(length);
            piece
        };
        let piece = tokio::select! {
            piece = first_piece => piece,
            answer = driver::probe(&socket, Duration::from_secs(20)) => panic!("{answer:?}"),
        };
        assert!(piece.starts_with(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"));
        // The empty message in a DATA frame, and one that ends the stream.
        let last = [0, 0, 5, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1];
        assert!(piece.ends_with(&last), "{piece:?}");
    }
}
