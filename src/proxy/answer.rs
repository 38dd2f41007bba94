//! What we answer ourselves, where the driver cannot or must not.

use super::forward::End;
use bytes::Bytes;
use h2::server::SendResponse;
use http::{HeaderName, HeaderValue, Response, header};
use tonic::{Code, Status};

/// Answers with a status and nothing else (a "trailers-only" answer), and ends the call.
pub(super) fn refuse(respond: &mut SendResponse<Bytes>, status: &Status) -> End {
    let mut response = Response::new(());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    if status.add_header(response.headers_mut()).is_err() {
        // Only a text that fits no header; the code is what counts.
        drop(Status::new(status.code(), "").add_header(response.headers_mut()));
    }
    // An error means that the caller is gone.
    drop(respond.send_response(response, true));
    End::Status(status.code())
}

/// The driver cannot be reached, or went away before it answered.
pub(super) fn unavailable(text: impl Into<String>) -> Status {
    Status::new(Code::Unavailable, text)
}

/// The status code in trailers, or in the headers of a trailers-only answer.
pub(super) fn code_in(headers: &http::HeaderMap) -> Option<Code> {
    static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
    headers.get(&GRPC_STATUS).map(|value| Code::from_bytes(value.as_bytes()))
}
