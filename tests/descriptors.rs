//! What goes on when this process has no descriptor left. One test, alone in its process: the limit is everybody's.

#![allow(clippy::allow_attributes, clippy::unwrap_used, reason = "a test may panic")]

use csi_warden::grpc::read_driven::{Acceptor, ReadDriven};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(60);

/// No new descriptor until it is dropped.
struct NoneLeft(Rlimit);

impl NoneLeft {
    fn now() -> Self {
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(1), ..before }).unwrap();
        Self(before)
    }
}

impl Drop for NoneLeft {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.0).unwrap();
    }
}

#[tokio::test]
async fn connections_live_on_and_callers_wait_while_no_descriptor_is_left() {
    a_connection_without_room_lives_on().await;
    a_caller_is_accepted_later().await;
}

async fn a_connection_without_room_lives_on() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    for stream in [&ours, &theirs] {
        stream.set_nonblocking(true).unwrap();
    }
    let (mut ours, mut theirs) = (ReadDriven::new(ours).unwrap(), tokio::net::UnixStream::from_std(theirs).unwrap());
    let _none_left = NoneLeft::now();
    let all: Vec<u8> = (0..4_000_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    let mut read = vec![0; all.len()];
    let both = async { tokio::try_join!(ours.write_all(&all), theirs.read_exact(&mut read)) };
    timeout(LONG, both).await.unwrap().unwrap();
    assert!(read == all);
}

async fn a_caller_is_accepted_later() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = Acceptor::new(UnixListener::bind(&path).unwrap()).unwrap();
    let _caller = UnixStream::connect(&path).unwrap();
    let none_left = NoneLeft::now();
    for _ in 0..3 {
        let error = timeout(LONG, listener.accept()).await.unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::MFILE.raw_os_error()));
    }
    drop(none_left);
    timeout(LONG, listener.accept()).await.unwrap().unwrap();
    assert!(timeout(Duration::from_millis(50), listener.accept()).await.is_err(), "there is no other");
}
