//! The rewriter under a socket: what a server reads, or what a client writes.

use super::frames::AuthorityRewriter;
use super::hpack::Rewrite;
use bytes::{Buf, BytesMut};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A server's end of a connection, on which every `:authority` that the client sends is one that h2 accepts.
///
/// What is read is rewritten by [`Rewrite::Refused`]; bodies go straight into the reader's buffer. What is written is
/// not looked at. A stream that is not HTTP/2 passes unchanged.
#[derive(Debug)]
pub struct AuthorityFix<S> {
    stream: S,
    rewriter: AuthorityRewriter,
    /// Rewritten bytes that did not fit into the reader's buffer. Nothing is read before they are gone.
    ready: BytesMut,
    ended: bool,
}

impl<S> AuthorityFix<S> {
    /// Takes over a connection of which nothing has been read.
    pub fn new(stream: S) -> Self {
        Self { stream, rewriter: AuthorityRewriter::new(Rewrite::Refused), ready: BytesMut::new(), ended: false }
    }

    /// The connection itself, say for the peer's credentials.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityFix<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.ready.is_empty() {
                let fitting = this.ready.len().min(buffer.remaining());
                buffer.put_slice(&this.ready[..fitting]);
                this.ready.advance(fitting);
                return Poll::Ready(Ok(()));
            }
            if this.ended || buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            let before = buffer.filled().len();
            ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
            let read = &buffer.filled()[before..];
            if read.is_empty() {
                this.ended = true;
                this.rewriter.finish(&mut this.ready);
                continue;
            }
            let passed = this.rewriter.pass(read);
            this.rewriter.rewrite(&read[passed..], &mut this.ready);
            buffer.set_filled(before + passed);
            if passed > 0 {
                return Poll::Ready(Ok(()));
            } // else: nothing for the reader yet, which must not look like the end
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorityFix<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// A client's end of a connection, on which every request carries a given `:authority`, even one that hyper refuses.
///
/// With [`percent_encode_path`](super::percent_encode_path) of the socket it speaks as the kubelet does. What is written
/// is rewritten by [`Rewrite::Every`], through a buffer; what is read is not looked at. A request without `:authority`
/// stays so.
#[derive(Debug)]
pub struct AuthorityAs<S> {
    stream: S,
    rewriter: AuthorityRewriter,
    /// Rewritten bytes that the connection has not taken. Nothing is accepted before they are gone.
    pending: BytesMut,
}

impl<S> AuthorityAs<S> {
    /// Takes over a connection to which nothing has been written.
    pub fn new(stream: S, authority: String) -> Self {
        Self { stream, rewriter: AuthorityRewriter::new(Rewrite::Every(authority)), pending: BytesMut::new() }
    }

    /// The connection itself.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }
}

impl<S: AsyncWrite + Unpin> AuthorityAs<S> {
    fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.pending.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.pending))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.pending.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityAs<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorityAs<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_drain(context))?;
        this.rewriter.rewrite(bytes, &mut this.pending);
        // From here on the bytes are ours: a connection that takes none now gets them with the next write or flush.
        match this.poll_drain(context) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(bytes.len())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_drain(context))?;
        Pin::new(&mut this.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.rewriter.finish(&mut this.pending);
        ready!(this.poll_drain(context))?;
        Pin::new(&mut this.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::super::huffman::tests::encode_short;
    use super::*;
    use crate::api::registration::registration_client::RegistrationClient;
    use crate::api::registration::registration_server::{Registration, RegistrationServer};
    use crate::api::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
    use bytes::Bytes;
    use http_body_util::{BodyExt, Full};
    use hyper::body::Incoming;
    use hyper::client::conn::http2::SendRequest;
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use hyper_util::service::TowerToHyperService;
    use std::convert::Infallible;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::net::UnixStream;
    use tokio::task::JoinSet;

    const KUBELETS_AUTHORITY: &str = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fx.example.com-reg.sock";

    #[derive(Debug, PartialEq)]
    enum Answer {
        Ok,
        Reset { code: u8 },
        Other(Vec<u8>),
    }

    const REFUSED: Answer = Answer::Reset { code: 1 }; // PROTOCOL_ERROR

    /// hyper's answers to requests with these header blocks on one connection, each sent in pieces of `piece_bytes`.
    async fn answers<S>(mut client: DuplexStream, server: S, blocks: &[Vec<u8>], piece_bytes: usize) -> Vec<Answer>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let service = service_fn(async |_| Ok::<_, Infallible>(http::Response::new(Full::new(Bytes::new()))));
            hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(server), service)
                .await
        });
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        let mut answers = Vec::new();
        for (n, block) in blocks.iter().enumerate() {
            let stream = u8::try_from(2 * n + 1).unwrap();
            let length = u8::try_from(block.len()).unwrap();
            for piece in [&[0, 0, length, 1, 5, 0, 0, 0, stream], &block[..]].concat().chunks(piece_bytes) {
                client.write_all(piece).await.unwrap();
                tokio::task::yield_now().await; // the server reads it by itself
            }
            answers.push(answer(&mut client, stream).await);
        }
        answers
    }

    async fn answer(client: &mut DuplexStream, stream: u8) -> Answer {
        loop {
            let mut header = [0; 9];
            client.read_exact(&mut header).await.unwrap();
            let mut payload = vec![0; usize::from(header[1]) * 256 + usize::from(header[2])];
            client.read_exact(&mut payload).await.unwrap();
            match (header[3], header[8] == stream) {
                (1, true) if payload.contains(&0x88) => return Answer::Ok, // :status 200
                (3, true) => return Answer::Reset { code: payload[3] },
                (1 | 7, _) => return Answer::Other(payload),
                _ => {}
            }
        }
    }

    /// The block of a GET request to `/` with the given fields in the authority's place.
    fn get(authority: &[u8]) -> Vec<u8> {
        [b"\x82\x86\x84", authority].concat()
    }

    fn text(bytes: &[u8]) -> Vec<u8> {
        [&[u8::try_from(bytes.len()).unwrap()], bytes].concat()
    }

    fn huffman(bytes: &[u8]) -> Vec<u8> {
        let mut coded = text(&encode_short(bytes));
        coded[0] |= 0x80;
        coded
    }

    #[tokio::test]
    async fn hyper_answers_every_authority_a_client_may_send() {
        let path = KUBELETS_AUTHORITY.as_bytes();
        let blocks = [
            get(&[b"\x41", &text(path)[..]].concat()),
            get(b"\xbe"), // the field just stored
            get(&[b"\x01", &text(b"/var/lib/kubelet/x-reg.sock")[..]].concat()),
            get(&[b"\x41", &huffman(path)[..]].concat()),
            get(&[b"\x40", &text(b":authority")[..], &text(path)].concat()),
            get(&[b"\x40", &huffman(b":authority")[..], &huffman(path)].concat()),
            get(&[b"\x7e", &text(path)[..]].concat()), // its name from the field just stored
            get(b""),
            get(b"\x81"), // an empty one
            get(&[b"\x41", &text(b"localhost")[..]].concat()),
            get(b"\xbe"),
        ];
        for piece_bytes in [1, 7, 1024] {
            let (client, server) = tokio::io::duplex(64 * 1024);
            let answers = answers(client, AuthorityFix::new(server), &blocks, piece_bytes).await;
            for (n, answer) in answers.into_iter().enumerate() {
                assert_eq!(answer, Answer::Ok, "request {n}");
            }
        }
    }

    #[tokio::test]
    async fn bare_hyper_refuses_what_the_kubelet_sends() {
        let (client, server) = tokio::io::duplex(64 * 1024);
        let blocks = [
            get(&[b"\x01", &text(KUBELETS_AUTHORITY.as_bytes())[..]].concat()),
            get(&[b"\x01", &text(b"/var/lib/kubelet/x-reg.sock")[..]].concat()),
            get(b"\x81"),
            get(b""),
        ];
        assert_eq!(answers(client, server, &blocks, 1024).await, [REFUSED, REFUSED, REFUSED, Answer::Ok]);
    }

    #[tokio::test]
    async fn client_that_leaves_in_the_midst_of_a_frame_ends_the_stream() {
        let (mut client, server) = tokio::io::duplex(64);
        let begun = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x09\x01\x04\0\0\0\x01\x41";
        client.write_all(begun).await.unwrap();
        drop(client);
        let mut read = Vec::new();
        AuthorityFix::new(server).read_to_end(&mut read).await.unwrap();
        assert_eq!(read, begun);
    }

    #[tokio::test]
    async fn bodies_are_read_into_the_readers_own_buffer() {
        let (mut client, server) = tokio::io::duplex(64 * 1024);
        let mut server = AuthorityFix::new(server);
        let data = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\x40\0\0\0\0\0\0\x01", &[7; 16 * 1024][..]].concat();
        client.write_all(&data).await.unwrap();
        let mut buffer = vec![0; 64 * 1024];
        assert_eq!(server.read(&mut buffer).await.unwrap(), data.len());
        assert!(!server.ready.try_reclaim(1), "nothing was ever copied, so there is no memory to reclaim");
    }

    /// A connection of a client that speaks as the kubelet does, and its server's end.
    fn kubelets_connection() -> (AuthorityAs<UnixStream>, AuthorityFix<UnixStream>) {
        let (client, server) = UnixStream::pair().unwrap();
        (AuthorityAs::new(client, KUBELETS_AUTHORITY.to_owned()), AuthorityFix::new(server))
    }

    /// hyper's client as tonic wants it.
    struct Channel(SendRequest<tonic::body::Body>);

    impl tower_service::Service<http::Request<tonic::body::Body>> for Channel {
        type Response = http::Response<Incoming>;
        type Error = hyper::Error;
        type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

        fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
            self.0.poll_ready(context)
        }

        fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
            Box::pin(self.0.send_request(request))
        }
    }

    struct Driver;

    #[tonic::async_trait]
    impl Registration for Driver {
        async fn get_info(&self, _: tonic::Request<InfoRequest>) -> Result<tonic::Response<PluginInfo>, tonic::Status> {
            Ok(tonic::Response::new(PluginInfo { name: "x.example.com".to_owned(), ..PluginInfo::default() }))
        }

        async fn notify_registration_status(
            &self,
            status: tonic::Request<RegistrationStatus>,
        ) -> Result<tonic::Response<RegistrationStatusResponse>, tonic::Status> {
            match status.into_inner().error {
                error if error.is_empty() => Ok(tonic::Response::new(RegistrationStatusResponse {})),
                error => Err(tonic::Status::internal(error)),
            }
        }
    }

    #[tokio::test]
    async fn many_calls_in_the_kubelets_words_are_answered_on_one_connection() {
        let (client, server) = kubelets_connection();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(server), TowerToHyperService::new(RegistrationServer::new(Driver)))
                .await
        });
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client)).await.unwrap();
        tasks.spawn(connection);
        let origin = http::Uri::from_static("http://localhost");
        let mut client = RegistrationClient::with_origin(Channel(sender), origin);
        for n in 0..200 {
            assert_eq!(client.get_info(InfoRequest {}).await.unwrap().into_inner().name, "x.example.com");
            // Metadata that never repeats fills the dynamic table, so that it evicts the authority again and again.
            let mut status = tonic::Request::new(RegistrationStatus { plugin_registered: true, error: String::new() });
            status.metadata_mut().insert("x-call", format!("{n:0100}").parse().unwrap());
            client.notify_registration_status(status).await.unwrap();
        }
    }

    #[tokio::test]
    async fn client_that_speaks_as_the_kubelet_is_refused_by_bare_hyper() {
        let (client, server) = tokio::io::duplex(64 * 1024);
        let client = AuthorityAs::new(client, KUBELETS_AUTHORITY.to_owned());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(server), TowerToHyperService::new(RegistrationServer::new(Driver)))
                .await
        });
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client)).await.unwrap();
        tasks.spawn(connection);
        let mut client = RegistrationClient::with_origin(Channel(sender), http::Uri::from_static("http://localhost"));
        let refusal = client.get_info(InfoRequest {}).await.unwrap_err();
        assert!(format!("{refusal:?}").contains("PROTOCOL_ERROR"), "{refusal:?}");
    }

    #[tokio::test]
    async fn body_of_five_mebibytes_passes_intact_both_ways() {
        let (client, server) = kubelets_connection();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let echo = service_fn(async |request: http::Request<Incoming>| {
                assert_eq!(request.uri().authority().map(http::uri::Authority::as_str), Some("w"));
                let body = request.into_body().collect().await?.to_bytes();
                Ok::<_, hyper::Error>(http::Response::new(Full::new(body)))
            });
            hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(server), echo)
                .await
        });
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client)).await.unwrap();
        tasks.spawn(connection);
        let body: Bytes = (0..5 * 1024 * 1024_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for _ in 0..2 {
            let request = http::Request::post("http://localhost/").body(Full::new(body.clone())).unwrap();
            let answer = sender.send_request(request).await.unwrap();
            assert!(answer.into_body().collect().await.unwrap().to_bytes() == body);
        }
    }
}
