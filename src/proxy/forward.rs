//! One call: what the kubelet sends goes to the driver, what the driver answers goes back, and an end on one side ends the other.

use super::answer::{code_in, refuse, unavailable};
use super::body::{Pumped, pump, pump_changed, send_first};
use super::reset_by_peer;
use super::timeout::{GRPC_TIMEOUT, remaining};
use super::upstream::Upstream;
use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::uri::{Authority, Scheme};
use http::{Request, Uri, Version};
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use tokio::time::Instant;
use tonic::Code;

/// Connections that are tried for one call, as long as none has taken it.
const TRIES: u32 = 3;

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The driver said so, or we did in its place.
    Status(Code),
    /// The answer had no status, which is no word of the driver's about the call.
    NoStatus,
    /// The driver or its transport reset the stream.
    Reset(Reason),
    /// The caller gave up.
    Cancelled,
    /// The connection to the driver broke in the middle of its answer: the caller's must break, too, for there is no
    /// other way to say it.
    BrokeOff,
}

impl End {
    /// The driver's word, if it gave one.
    pub(super) fn word(self) -> Option<Code> {
        match self {
            Self::Status(code) => Some(code),
            Self::NoStatus | Self::Reset(_) | Self::Cancelled | Self::BrokeOff => None,
        }
    }

    /// The code that the caller made of it, as grpc-go does.
    pub(super) fn code(self) -> Code {
        match self {
            Self::Status(code) => code,
            Self::NoStatus => Code::Unknown,
            Self::Cancelled | Self::Reset(Reason::CANCEL) => Code::Cancelled,
            Self::BrokeOff | Self::Reset(Reason::REFUSED_STREAM) => Code::Unavailable,
            Self::Reset(Reason::ENHANCE_YOUR_CALM) => Code::ResourceExhausted,
            Self::Reset(_) => Code::Internal,
        }
    }
}

/// One call as it came, and what was read of it already.
pub(super) struct Incoming {
    /// The head.
    pub(super) head: http::request::Parts,
    /// The body's beginning, if somebody needed to see it.
    pub(super) gathered: Bytes,
    /// The rest of the body.
    pub(super) body: RecvStream,
    /// When it came.
    pub(super) arrived: Instant,
}

/// What is done to an answer's only message on its way.
pub(super) type Change<'a> = &'a (dyn Fn(&Bytes) -> Bytes + Sync);

/// Forwards one call to its end. Without `change` the answer passes as it comes.
pub(super) async fn forward(
    call: Incoming,
    respond: &mut SendResponse<Bytes>,
    upstream: &Upstream,
    change: Option<Change<'_>>,
) -> End {
    let Incoming { head, gathered, body: mut from_caller, arrived } = call;
    let nothing_follows = gathered.is_empty() && from_caller.is_end_stream();
    let mut tries = TRIES;
    let (place, answer, mut to_driver) = loop {
        let mut place = match upstream.place().await {
            Ok(place) => place,
            Err(error) => {
                let path = upstream.path().display();
                let status = unavailable(format!("csi-warden: the CSI driver cannot be reached at {path}: {error}"));
                return refuse(respond, &status);
            }
        };
        let mut head = head_for_driver(&head);
        if let Some(timeout) = head.headers().get(GRPC_TIMEOUT)
            && let Some(left) = remaining(timeout, arrived.elapsed())
        {
            head.headers_mut().insert(GRPC_TIMEOUT, left);
        }
        match place.requests.send_request(head, nothing_follows) {
            Ok((answer, to_driver)) => break (place, answer, to_driver),
            // Nothing was sent: the connection closed since it was found, or has no stream numbers left.
            Err(_) if tries > 1 => {
                tries -= 1;
                upstream.retire(&place);
            }
            Err(error) => {
                let status = unavailable(format!("csi-warden: the call cannot be sent to the CSI driver: {error}"));
                return refuse(respond, &status);
            }
        }
    };
    let mut asked = nothing_follows;
    let end = {
        let request = async {
            let last = from_caller.is_end_stream();
            match gathered.is_empty() || send_first(&mut to_driver, gathered, last, Some(&place.load)).await {
                true if last => Pumped::Whole(None),
                true => pump(&mut from_caller, &mut to_driver, Some(&place.load)).await,
                false => Pumped::ReaderGone,
            }
        };
        let response = answer_back(answer, respond, change);
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
async fn answer_back(answer: ResponseFuture, respond: &mut SendResponse<Bytes>, change: Option<Change<'_>>) -> End {
    let (mut head, mut from_driver) = match head_or_hang_up(answer, respond).await {
        Ok(Ok(response)) => response.into_parts(),
        Ok(Err(error)) => return failed_early(&error, respond),
        Err(HungUp) => return End::Cancelled,
    };
    let trailers_only = from_driver.is_end_stream();
    let mut code = code_in(&head.headers);
    if change.is_some() {
        head.headers.remove(http::header::CONTENT_LENGTH);
    }
    let Ok(mut to_caller) = respond.send_response(http::Response::from_parts(head, ()), trailers_only) else {
        return End::Cancelled;
    };
    if !trailers_only {
        let pumped = match change {
            None => pump(&mut from_driver, &mut to_caller, None).await,
            Some(change) => pump_changed(&mut from_driver, &mut to_caller, change).await,
        };
        match pumped {
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
    code.map_or(End::NoStatus, End::Status)
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
    refuse(respond, &status)
}
