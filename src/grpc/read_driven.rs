//! A unix stream that wakes its task for what comes, and for room to send only where there was none.
//!
//! Tokio's own registers both: then each read of the other side wakes the task, and mostly the whole process, for nothing.

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::future::Future;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener as StdListener, UnixStream as Std};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixListener;
use tokio::time::{Sleep, sleep};

/// Between two tries to write while there is no second descriptor to be had.
const PAUSE: Duration = Duration::from_millis(10);

/// See the file's head.
#[derive(Debug)]
pub struct ReadDriven {
    stream: AsyncFd<Std>,
    /// A second descriptor of the same socket, while the first had no room.
    room: Option<AsyncFd<Std>>,
    /// In its place while this process has no descriptor left: calls under way must not end for that.
    pause: Option<Pin<Box<Sleep>>>,
}

impl ReadDriven {
    /// Takes a non-blocking stream over.
    ///
    /// # Errors
    /// Those of a registration with the poller.
    pub fn new(stream: Std) -> io::Result<Self> {
        Ok(Self { stream: registered(stream, Interest::READABLE)?, room: None, pause: None })
    }

    fn write(&mut self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        loop {
            if let Some(room) = &self.room {
                ready!(room.poll_write_ready(context))?.clear_ready();
            }
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match self.stream.get_ref().write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.room.is_none() {
                        let again = self.stream.get_ref().try_clone();
                        match again.and_then(|again| registered(again, Interest::WRITABLE)) {
                            Ok(room) => self.room = Some(room),
                            Err(_out_of_descriptors) => self.pause = Some(Box::pin(sleep(PAUSE))),
                        }
                    }
                }
                written => {
                    self.room = None;
                    return Poll::Ready(written);
                }
            }
        }
    }
}

#[expect(
    deprecated,
    reason = "a stream that owns its descriptor is what the new constructor, which is unsafe, asks for"
)]
fn registered<S: AsFd + AsRawFd>(stream: S, interest: Interest) -> io::Result<AsyncFd<S>> {
    AsyncFd::with_interest(stream, interest)
}

/// A listener whose connections nobody has registered yet; tokio's own registers each for both directions.
#[derive(Debug)]
pub struct Acceptor(AsyncFd<StdListener>);

impl Acceptor {
    /// Takes a listener over.
    ///
    /// # Errors
    /// Those of a registration with the poller.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        registered(listener.into_std()?, Interest::READABLE).map(Self)
    }

    /// The next connection, non-blocking. Nothing is lost when it is dropped before.
    ///
    /// # Errors
    /// Those of `accept(2)`.
    pub async fn accept(&self) -> io::Result<Std> {
        loop {
            let mut ready = self.0.readable().await?;
            match accept_with(self.0.get_ref(), SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Err(Errno::WOULDBLOCK) => ready.clear_ready(),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                accepted => return Ok(Std::from(accepted?)),
            }
        }
    }
}

impl AsyncRead for ReadDriven {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.stream.poll_read_ready(context))?;
            let room = buffer.remaining();
            let read = self.stream.get_ref().read(buffer.initialize_unfilled());
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) => return Poll::Ready(Err(error)),
                Ok(bytes) => {
                    // Less than there was room for: all that there was. The poller tells of what comes next.
                    if 0 < bytes && bytes < room {
                        ready.clear_ready();
                    }
                    buffer.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for ReadDriven {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().write(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().write(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.stream.get_ref().shutdown(Shutdown::Write))
    }
}
