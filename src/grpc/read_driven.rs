//! A unix stream that wakes its task for what comes, and for room to send only where there was none.
//!
//! Tokio's own registers both: then each read of the other side wakes the task, and mostly the whole process, for nothing.

use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream as Std;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// See the file's head.
#[derive(Debug)]
pub struct ReadDriven {
    stream: AsyncFd<Std>,
    /// A second descriptor of the same socket, while the first had no room.
    room: Option<AsyncFd<Std>>,
}

impl ReadDriven {
    /// Takes a stream over.
    ///
    /// # Errors
    /// Those of a registration with the poller.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        Ok(Self { stream: registered(stream.into_std()?, Interest::READABLE)?, room: None })
    }

    fn write(&mut self, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        loop {
            if let Some(room) = &self.room {
                ready!(room.poll_write_ready(context))?.clear_ready();
            }
            match self.stream.get_ref().write_vectored(slices) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.room.is_none() {
                        let again = self.stream.get_ref().try_clone()?;
                        self.room = Some(registered(again, Interest::WRITABLE)?);
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
fn registered(stream: Std, interest: Interest) -> io::Result<AsyncFd<Std>> {
    AsyncFd::with_interest(stream, interest)
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
