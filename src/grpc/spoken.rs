//! Whether the other side of a stream has ever said anything: one that accepts and is silent never took a call.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Set with the first byte from the other side. Clones are the same mark.
#[derive(Debug, Clone, Default)]
pub struct Spoken(Arc<AtomicBool>);

impl Spoken {
    /// Whether a byte has come.
    pub fn yet(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Puts the mark under `stream`.
    pub fn over<S>(&self, stream: S) -> SpokenStream<S> {
        SpokenStream { stream, spoken: self.clone() }
    }
}

/// A stream that sets its mark; otherwise as it was.
#[derive(Debug)]
pub struct SpokenStream<S> {
    stream: S,
    spoken: Spoken,
}

impl<S: AsyncRead + Unpin> AsyncRead for SpokenStream<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            this.spoken.0.store(true, Ordering::Relaxed);
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for SpokenStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
