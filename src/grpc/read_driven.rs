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

/// Some calls with little to say.
const FIRST_READ_BYTES: usize = 1024;

/// See the file's head.
#[derive(Debug)]
pub struct ReadDriven {
    stream: AsyncFd<Std>,
    /// A second descriptor of the same socket, while the first had no room.
    room: Option<AsyncFd<Std>>,
    /// In its place while this process has no descriptor left: calls under way must not end for that.
    pause: Option<Pin<Box<Sleep>>>,
    turn: Turn,
}

/// How much is read before others have a turn, the one that writes on what was read among them: then the other side begins with the
/// first of many calls while we read the next ones. A read that takes all of it makes room for twice as much, and soon the reader's
/// buffer, as long as more follows, is what ends a read.
#[derive(Debug)]
struct Turn {
    most: usize,
    over: bool,
}

impl Default for Turn {
    fn default() -> Self {
        Self { most: FIRST_READ_BYTES, over: false }
    }
}

impl Turn {
    fn read(&mut self, bytes: usize, room: usize) {
        self.over = bytes == room && room == self.most;
        if self.over {
            self.most *= 2;
        } else if bytes < room && bytes < FIRST_READ_BYTES {
            self.most = FIRST_READ_BYTES;
        }
    }
}

impl ReadDriven {
    /// Takes a non-blocking stream over.
    ///
    /// # Errors
    /// Those of a registration with the poller.
    pub fn new(stream: Std) -> io::Result<Self> {
        Ok(Self { stream: registered(stream, Interest::READABLE)?, room: None, pause: None, turn: Turn::default() })
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
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if std::mem::take(&mut this.turn.over) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        loop {
            let mut ready = ready!(this.stream.poll_read_ready(context))?;
            let room = buffer.remaining().min(this.turn.most);
            let read = this.stream.get_ref().read(buffer.initialize_unfilled_to(room));
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) => return Poll::Ready(Err(error)),
                Ok(bytes) => {
                    // Less than there was room for: all that there was. The poller tells of what comes next.
                    if 0 < bytes && bytes < room {
                        ready.clear_ready();
                    }
                    this.turn.read(bytes, room);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Wake, Waker};
    use tokio::io::AsyncReadExt;

    /// Wider than what h2 reads into.
    const BUFFER_BYTES: usize = 16 * 1024;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How much one poll reads, and whether it asks for another turn by itself.
    fn polled(stream: &mut ReadDriven) -> (Option<usize>, bool) {
        let (wakes, mut bytes) = (Arc::new(Wakes::default()), [0; BUFFER_BYTES]);
        let waker = Waker::from(Arc::clone(&wakes));
        let mut buffer = ReadBuf::new(&mut bytes);
        let read = match Pin::new(stream).poll_read(&mut Context::from_waker(&waker), &mut buffer) {
            Poll::Ready(read) => {
                read.unwrap();
                Some(buffer.filled().len())
            }
            Poll::Pending => None,
        };
        (read, wakes.0.load(Ordering::Relaxed) > 0)
    }

    async fn pair() -> (ReadDriven, Std) {
        let (ours, theirs) = Std::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (ReadDriven::new(ours).unwrap(), theirs)
    }

    #[tokio::test]
    async fn what_comes_at_once_is_read_in_turns_and_all_of_it() {
        let (mut ours, mut theirs) = pair().await;
        theirs.write_all(&[1; 5_000]).unwrap();
        ours.stream.readable().await.unwrap().retain_ready();
        let mut turns = Vec::new();
        for _ in 0..6 {
            turns.push(polled(&mut ours));
        }
        let again = (None, true);
        assert_eq!(turns[..5], [(Some(1024), false), again, (Some(2048), false), again, (Some(1928), false)]);
        assert_eq!(turns[5], (None, false), "all that there was: it waits for more");
    }

    #[tokio::test]
    async fn a_call_alone_takes_no_turn_more() {
        let (mut ours, mut theirs) = pair().await;
        for _ in 0..3 {
            theirs.write_all(&[1; 200]).unwrap();
            ours.stream.readable().await.unwrap().retain_ready();
            assert_eq!([polled(&mut ours), polled(&mut ours)], [(Some(200), false), (None, false)]);
        }
    }

    /// As HTTP/2 begins: its reader wants 24 bytes first.
    #[tokio::test]
    async fn a_short_buffer_takes_no_turn() {
        let (mut ours, mut theirs) = pair().await;
        theirs.write_all(&[1; 200]).unwrap();
        ours.read_exact(&mut [0; 24]).await.unwrap();
        assert_eq!([polled(&mut ours), polled(&mut ours)], [(Some(176), false), (None, false)]);
    }

    #[tokio::test]
    async fn a_long_message_is_soon_read_by_the_buffer_and_without_turns() {
        const LONG: usize = 1 << 20;
        let (mut ours, mut theirs) = pair().await;
        let writing = std::thread::spawn(move || theirs.write_all(&[7; LONG]).unwrap());
        let (mut read, mut reads, mut turns) = (0, 0, 0);
        while read < LONG {
            match polled(&mut ours) {
                (Some(bytes), _) => {
                    read += bytes;
                    reads += 1;
                }
                (None, true) => turns += 1,
                (None, false) => ours.stream.readable().await.unwrap().retain_ready(),
            }
        }
        writing.join().unwrap();
        // The writer may be slower at times, and each time the first reads are short.
        assert!(reads < 3 * LONG / BUFFER_BYTES && turns < LONG / BUFFER_BYTES, "{reads} reads, {turns} turns");
    }
}
