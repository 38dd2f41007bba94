//! One call: what the kubelet sends goes to the driver, what the driver answers goes back, and an end on one side ends the other.

use super::answer::{code_in, refuse, unavailable};
use super::body::{Pumped, pump, pump_changed};
use super::reset_by_peer;
use super::timeout::{GRPC_TIMEOUT, remaining};
use super::upstream::{Place, Upstream};
use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::uri::{Authority, Scheme};
use http::{Request, Uri, Version};
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use tokio::time::Instant;
use tonic::{Code, Status};

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
    /// The head, without the address.
    pub(super) head: http::request::Parts,
    /// The address.
    pub(super) target: Uri,
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
    call: &mut Incoming,
    respond: &mut SendResponse<Bytes>,
    upstream: &Upstream,
    change: Option<Change<'_>>,
) -> End {
    let mut place = match ready_place(upstream).await {
        Ok(place) => place,
        Err(status) => return refuse(respond, &status),
    };
    let nothing_follows = call.gathered.is_empty() && call.body.is_end_stream();
    let (answer, mut to_driver) = match place.requests.send_request(call.head_for_driver(), nothing_follows) {
        Ok(streams) => streams,
        Err(error) => {
            let status = unavailable(format!("csi-warden: the call cannot be sent to the CSI driver: {error}"));
            return refuse(respond, &status);
        }
    };
    let Incoming { gathered, body: from_caller, .. } = call;
    let mut asked = nothing_follows;
    let end = {
        let request = pump(std::mem::take(gathered), from_caller, &mut to_driver, Some(&place.load));
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

/// A place on a connection that takes a call now.
async fn ready_place(upstream: &Upstream) -> Result<Place, Status> {
    let mut tries = TRIES;
    loop {
        let mut place = upstream.place().await.map_err(|error| {
            let path = upstream.path().display();
            unavailable(format!("csi-warden: the CSI driver cannot be reached at {path}: {error}"))
        })?;
        tries -= 1;
        match poll_fn(|context| place.requests.poll_ready(context)).await {
            Ok(()) => return Ok(place),
            // The connection closed since it was found, or has no stream numbers left.
            Err(_) if tries > 0 => upstream.retire(&place),
            Err(error) => {
                return Err(unavailable(format!("csi-warden: the call cannot be sent to the CSI driver: {error}")));
            }
        }
    }
}

impl Incoming {
    /// The request's head as the driver gets it: the same, but for the authority, which strict drivers want to be `localhost`. It is
    /// not there any more afterwards.
    fn head_for_driver(&mut self) -> Request<()> {
        let mut uri = http::uri::Parts::default();
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = Some(Authority::from_static("localhost"));
        uri.path_and_query = self.target.path_and_query().cloned();
        let mut request = Request::new(());
        std::mem::swap(request.method_mut(), &mut self.head.method);
        *request.uri_mut() = Uri::from_parts(uri).unwrap_or_else(|_| self.target.clone());
        *request.version_mut() = Version::HTTP_2;
        let headers = request.headers_mut();
        std::mem::swap(headers, &mut self.head.headers);
        // Some clients send it beside `:authority`; h2 would send both.
        headers.remove(http::header::HOST);
        if let Some(left) = headers.get(&GRPC_TIMEOUT).and_then(|timeout| remaining(timeout, self.arrived.elapsed())) {
            headers.insert(&GRPC_TIMEOUT, left);
        }
        if let Some(timeout) = headers.get_mut(&GRPC_TIMEOUT) {
            // Another one with each call: in the driver's header table it would only drive out what comes again.
            timeout.set_sensitive(true);
        }
        request
    }
}

/// The driver's answer on its way to the caller.
async fn answer_back(answer: ResponseFuture, respond: &mut SendResponse<Bytes>, change: Option<Change<'_>>) -> End {
    let response = match head_or_hang_up(answer, respond).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => return failed_early(&error, respond),
        Err(HungUp) => return End::Cancelled,
    };
    let Some(Begun { code, body }) = begin(response, respond, change.is_some()) else { return End::Cancelled };
    let Some((mut from_driver, mut to_caller)) = body else { return code.map_or(End::NoStatus, End::Status) };
    let pumped = match change {
        None => pump(Bytes::new(), &mut from_driver, &mut to_caller, None).await,
        // On the heap, because few calls come here, and each would have room for it.
        Some(change) => Box::pin(pump_changed(&mut from_driver, &mut to_caller, change)).await,
    };
    match pumped {
        Pumped::Whole(trailers) => trailers.or(code).map_or(End::NoStatus, End::Status),
        Pumped::ReaderGone => End::Cancelled,
        Pumped::Broken(error) => match reset_by_peer(&error) {
            Some(reason) => {
                to_caller.send_reset(reason);
                End::Reset(reason)
            }
            None => End::BrokeOff,
        },
    }
}

/// An answer whose head has gone to the caller.
struct Begun {
    /// The status in the head.
    code: Option<Code>,
    /// What follows, and its way.
    body: Option<(RecvStream, SendStream<Bytes>)>,
}

/// `None` when the caller is gone. Not async, because the head would have its room in each call until its end.
fn begin(response: http::Response<RecvStream>, respond: &mut SendResponse<Bytes>, changes: bool) -> Option<Begun> {
    let (mut head, from_driver) = response.into_parts();
    let (code, trailers_only) = (code_in(&head.headers), from_driver.is_end_stream());
    if changes {
        head.headers.remove(http::header::CONTENT_LENGTH);
    }
    let to_caller = respond.send_response(http::Response::from_parts(head, ()), trailers_only).ok()?;
    Some(Begun { code, body: (!trailers_only).then_some((from_driver, to_caller)) })
}

struct HungUp;

/// The head of the driver's answer, unless the caller hangs up before.
async fn head_or_hang_up(
    mut answer: ResponseFuture,
    respond: &mut SendResponse<Bytes>,
) -> Result<Result<http::Response<RecvStream>, h2::Error>, HungUp> {
    poll_fn(|context| match Pin::new(&mut answer).poll(context) {
        Poll::Ready(answered) => Poll::Ready(Ok(answered)),
        Poll::Pending => respond.poll_reset(context).map(|_| Err(HungUp)),
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
