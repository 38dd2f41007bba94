//! One call: what the kubelet sends goes to the driver, what the driver answers goes back, and an end on one side ends the other.

use super::answer::{code_in, refuse, unavailable};
use super::reset_by_peer;
use super::timeout::{GRPC_TIMEOUT, remaining};
use super::upstream::{Load, Upstream};
use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::uri::{Authority, Scheme};
use http::{Request, Uri, Version};
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Poll, ready};
use tokio::time::Instant;
use tonic::Code;

/// Connections that are tried for one call, as long as none has taken it.
const TRIES: u32 = 3;

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The driver said so, or we did in its place.
    Status(Code),
    /// The driver or its transport reset the stream.
    Reset(Reason),
    /// The caller gave up.
    Cancelled,
    /// The connection to the driver broke in the middle of its answer: the caller's must break, too, for there is no
    /// other way to say it.
    BrokeOff,
}

impl End {
    /// The code that the caller made of it, as grpc-go does.
    pub(super) fn code(self) -> Code {
        match self {
            Self::Status(code) => code,
            Self::Cancelled | Self::Reset(Reason::CANCEL) => Code::Cancelled,
            Self::BrokeOff | Self::Reset(Reason::REFUSED_STREAM) => Code::Unavailable,
            Self::Reset(Reason::ENHANCE_YOUR_CALM) => Code::ResourceExhausted,
            Self::Reset(_) => Code::Internal,
        }
    }
}

/// Forwards one call to its end.
pub(super) async fn forward(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    upstream: &Upstream,
) -> End {
    let arrived = Instant::now();
    let (head, mut from_caller) = request.into_parts();
    let mut tries = TRIES;
    let (place, answer, mut to_driver) = loop {
        let mut place = match upstream.place().await {
            Ok(place) => place,
            Err(error) => {
                let path = upstream.path().display();
                let status = unavailable(format!("csi-warden: the CSI driver cannot be reached at {path}: {error}"));
                refuse(&mut respond, &status);
                return End::Status(status.code());
            }
        };
        let mut head = head_for_driver(&head);
        if let Some(timeout) = head.headers().get(GRPC_TIMEOUT)
            && let Some(left) = remaining(timeout, arrived.elapsed())
        {
            head.headers_mut().insert(GRPC_TIMEOUT, left);
        }
        match place.requests.send_request(head, from_caller.is_end_stream()) {
            Ok((answer, to_driver)) => break (place, answer, to_driver),
            // Nothing was sent: the connection closed since it was found, or has no stream numbers left.
            Err(_) if tries > 1 => {
                tries -= 1;
                upstream.retire(&place);
            }
            Err(error) => {
                let status = unavailable(format!("csi-warden: the call cannot be sent to the CSI driver: {error}"));
                refuse(&mut respond, &status);
                return End::Status(status.code());
            }
        }
    };
    let mut asked = from_caller.is_end_stream();
    let end = {
        let request = pump(&mut from_caller, &mut to_driver, Some(&place.load));
        let response = answer_back(answer, &mut respond);
        let (mut request, mut response) = (std::pin::pin!(request), std::pin::pin!(response));
        poll_fn(|context| {
            if !asked && let Poll::Ready(pumped) = request.as_mut().poll(context) {
                match pumped {
                    // The driver may well have answered already; its answer decides.
                    Pumped::Whole(_) | Pumped::ReaderGone => asked = true,
                    Pumped::Broken(_) => return Poll::Ready(End::Cancelled),
                }
            }
            response.as_mut().poll(context)
        })
        .await
    };
    if end == End::Cancelled {
        to_driver.send_reset(Reason::CANCEL);
    }
    end
}

/// The request's head as the driver gets it: the same, but for the authority, which strict drivers want to be `localhost`.
fn head_for_driver(head: &http::request::Parts) -> Request<()> {
    let mut uri = http::uri::Parts::default();
    uri.scheme = Some(Scheme::HTTP);
    uri.authority = Some(Authority::from_static("localhost"));
    uri.path_and_query = head.uri.path_and_query().cloned();
    let mut request = Request::new(());
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = Uri::from_parts(uri).unwrap_or_else(|_| head.uri.clone());
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = head.headers.clone();
    // Some clients send it beside `:authority`; h2 would send both.
    request.headers_mut().remove(http::header::HOST);
    request
}

/// The driver's answer on its way to the caller.
async fn answer_back(answer: ResponseFuture, respond: &mut SendResponse<Bytes>) -> End {
    let (head, mut from_driver) = match head_or_hang_up(answer, respond).await {
        Ok(Ok(response)) => response.into_parts(),
        Ok(Err(error)) => return failed_early(&error, respond),
        Err(HungUp) => return End::Cancelled,
    };
    let trailers_only = from_driver.is_end_stream();
    let mut code = code_in(&head.headers);
    let Ok(mut to_caller) = respond.send_response(http::Response::from_parts(head, ()), trailers_only) else {
        return End::Cancelled;
    };
    if !trailers_only {
        match pump(&mut from_driver, &mut to_caller, None).await {
            Pumped::Whole(trailers) => code = trailers.or(code),
            Pumped::ReaderGone => return End::Cancelled,
            Pumped::Broken(error) => {
                return match reset_by_peer(&error) {
                    Some(reason) => {
                        to_caller.send_reset(reason);
                        End::Reset(reason)
                    }
                    None => End::BrokeOff,
                };
            }
        }
    }
    End::Status(code.unwrap_or(Code::Unknown))
}

struct HungUp;

/// The head of the driver's answer, unless the caller hangs up before.
async fn head_or_hang_up(
    mut answer: ResponseFuture,
    respond: &mut SendResponse<Bytes>,
) -> Result<Result<http::Response<RecvStream>, h2::Error>, HungUp> {
    poll_fn(|context| {
        if respond.poll_reset(context).is_ready() {
            return Poll::Ready(Err(HungUp));
        }
        Pin::new(&mut answer).poll(context).map(Ok)
    })
    .await
}

/// No answer: the stream's own end goes on as it came, a connection's end is told.
fn failed_early(error: &h2::Error, respond: &mut SendResponse<Bytes>) -> End {
    let reason = match reset_by_peer(error) {
        Some(reason) => Some(reason),
        // The driver said goodbye before it looked at the call: the caller may ask again, and we may not.
        None if error.is_go_away() && error.is_remote() => Some(Reason::REFUSED_STREAM),
        None => None,
    };
    if let Some(reason) = reason {
        respond.send_reset(reason);
        return End::Reset(reason);
    }
    let status = unavailable(format!("csi-warden: the CSI driver closed its connection during the call: {error}"));
    refuse(respond, &status);
    End::Status(status.code())
}

/// How a body ended.
enum Pumped {
    /// All of it was handed on, and the trailers, in which there may be a status.
    Whole(Option<Code>),
    /// Its reader does not want it any more.
    ReaderGone,
    /// Its writer's side broke.
    Broken(h2::Error),
}

/// Hands a body on, piece by piece, and takes the next one only when the last is on its way. `load` is told of waits.
async fn pump(from: &mut RecvStream, to: &mut SendStream<Bytes>, load: Option<&Load>) -> Pumped {
    loop {
        let piece = poll_fn(|context| match from.poll_data(context) {
            Poll::Ready(piece) => Poll::Ready(Some(piece)),
            Poll::Pending => to.poll_reset(context).map(|_| None),
        })
        .await;
        match piece {
            None => return Pumped::ReaderGone,
            Some(Some(Err(error))) => return Pumped::Broken(error),
            Some(Some(Ok(piece))) => {
                let (bytes, last) = (piece.len(), from.is_end_stream());
                if !send(to, piece, last, load).await {
                    return Pumped::ReaderGone;
                }
                if last {
                    return Pumped::Whole(None);
                }
                // Only now may the writer send more. An error means that its stream is over, which the next look tells.
                drop(from.flow_control().release_capacity(bytes));
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

/// Sends one piece as the reader makes room for it. `false` when the reader is gone.
async fn send(to: &mut SendStream<Bytes>, mut piece: Bytes, last: bool, load: Option<&Load>) -> bool {
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
