//! One line per call, for checks to read.

use std::{
    fs::File,
    io::{self, Write as _},
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use tonic::{Code, Response, Status};

/// The open log; clones write to the same file.
#[derive(Clone)]
pub(crate) struct CallLog(Option<Arc<File>>);

impl CallLog {
    /// Appends to `path`; without one, nothing is written.
    pub(crate) fn open(path: Option<&Path>) -> io::Result<Self> {
        let file = path.map(|path| File::options().append(true).create(true).open(path)).transpose()?;
        Ok(Self(file.map(Arc::new)))
    }

    /// Logs one call's outcome and turns it into the answer.
    pub(crate) fn answer<T>(
        &self,
        method: &str,
        volume_id: &str,
        outcome: Result<T, Status>,
    ) -> Result<Response<T>, Status> {
        let code = outcome.as_ref().err().map_or(Code::Ok, Status::code);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let volume = if volume_id.is_empty() { "-" } else { volume_id };
        if let Some(file) = &self.0 {
            // One write call, so that lines never mix.
            file.as_ref().write_all(format!("{now} {method} {volume} {code:?}\n").as_bytes())?;
        }
        outcome.map(Response::new)
    }
}
