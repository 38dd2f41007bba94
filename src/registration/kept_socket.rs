//! A socket of ours that stays in its place: put back when it is lost, and left to a successor that serves it.

use super::socket::{FileId, Found, PublishError, SocketPath};
use crate::grpc::read_driven::Acceptor;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream as Std;
use std::path::Path;
use tokio::net::UnixStream;

/// A listening socket and the path that it belongs at.
#[derive(Debug)]
pub struct KeptSocket {
    socket: SocketPath,
    listener: Acceptor,
    id: FileId,
}

/// What a look at the path found, and did about it.
#[derive(Debug)]
pub enum Look {
    /// Ours is there.
    Ours,
    /// Another agent serves its own there.
    Theirs,
    /// It was lost and is in its place again.
    PutBack,
    /// It is lost, and cannot be put back now.
    Lost(PublishError),
}

impl KeptSocket {
    /// Puts the socket in its place, over one that a former agent left or still serves: the newest has it.
    ///
    /// # Errors
    /// [`PublishError`] when it cannot be there. Nothing of anybody else's is touched.
    pub fn publish(socket: SocketPath) -> Result<Self, PublishError> {
        let (listener, id) = publish(&socket)?;
        Ok(Self { socket, listener, id })
    }

    /// Where it belongs.
    pub fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Accepts a connection, non-blocking. Cancelling it loses nothing.
    ///
    /// # Errors
    /// The operating system's.
    pub async fn accept(&self) -> std::io::Result<Std> {
        self.listener.accept().await
    }

    /// Looks at the path, and puts the socket back if nobody serves what is there.
    pub async fn look(&mut self) -> Look {
        match self.socket.found() {
            Ok(Found::Socket(id)) if id == self.id => return Look::Ours,
            Ok(Found::Socket(_)) if !is_dead(self.socket.path()).await => return Look::Theirs,
            // Publishing says what is wrong.
            Ok(Found::Socket(_) | Found::Nothing | Found::NotASocket) | Err(_) => {}
        }
        match publish(&self.socket) {
            Ok((listener, id)) => {
                (self.listener, self.id) = (listener, id);
                Look::PutBack
            }
            Err(error) => Look::Lost(error),
        }
    }

    /// Takes it away. A successor's stays.
    pub fn withdraw(self) {
        drop(self.socket.withdraw(self.id));
    }
}

fn publish(socket: &SocketPath) -> Result<(Acceptor, FileId), PublishError> {
    let (listener, id) = socket.publish()?;
    match Acceptor::new(listener) {
        Ok(listener) => Ok((listener, id)),
        Err(source) => {
            drop(socket.withdraw(id));
            Err(PublishError::Os { step: "listen on", path: socket.path().to_owned(), source })
        }
    }
}

async fn is_dead(path: &Path) -> bool {
    match UnixStream::connect(path).await {
        Ok(_) => false,
        Err(error) => matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound),
    }
}
