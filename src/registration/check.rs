//! Who, if anybody, answers on a registration socket.

use crate::api::registration::InfoRequest;
use crate::api::registration::registration_client::RegistrationClient;
use crate::grpc::connect::{CallError, call, origin, request};
use std::{path::Path, time::Duration};

/// Asks GetInfo through the socket; returns the driver's name.
///
/// # Errors
/// [`CallError`], as any call.
pub async fn plugin_name(socket: &Path, deadline: Duration) -> Result<String, CallError> {
    call(socket, deadline, |connection| async move {
        let mut client = RegistrationClient::with_origin(connection, origin());
        Ok(client.get_info(request(InfoRequest {})).await?.into_inner().name)
    })
    .await
}
