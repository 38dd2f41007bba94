//! One entry of a trace's tree, and its text: `= 4: ACTIVE\n`.

use crate::probe::rdma::DeviceStandIn;
use rustix::io::Errno;
use std::fmt;

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A folder.
    Folder,
    /// A file, and what it says.
    Value(Vec<u8>),
    /// A link, and where it leads.
    Link(String),
    /// A device file.
    Device(DeviceStandIn),
    /// It is there and cannot be read: the error's name, such as `EINVAL`.
    Unreadable(String),
}

/// Why an entry's text is none.
pub type Problem = &'static str;

impl Entry {
    /// What cannot be read for this reason.
    pub fn unreadable(error: Errno) -> Self {
        Self::Unreadable(error_name(error))
    }

    /// Reads what follows a path in a line.
    ///
    /// # Errors
    /// Why it is none.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let (kind, rest) = text.split_once(' ').unwrap_or((text, ""));
        match (kind, rest) {
            ("/", "") => Ok(Self::Folder),
            ("=", rest) => Ok(Self::Value(unescape(rest)?)),
            ("->", rest) => {
                let target = String::from_utf8(unescape(rest)?).map_err(|_| "the link's target is not UTF-8")?;
                let good = !target.is_empty() && !target.contains('\0') && target.len() <= MAX_PATH_BYTES;
                if good { Ok(Self::Link(target)) } else { Err("a link needs a target of 1 to 1024 bytes") }
            }
            ("c", rest) => {
                let device = DeviceStandIn::parse(rest).ok_or("a device file is written `c MAJOR:MINOR`")?;
                let known = device.refused.as_deref().is_none_or(is_error_name);
                if known { Ok(Self::Device(device)) } else { Err(NO_ERROR_NAME) }
            }
            ("!", name) if is_error_name(name) => Ok(Self::Unreadable(name.to_owned())),
            ("!", _) => Err(NO_ERROR_NAME),
            _ => Err("after the path must come `= TEXT`, `-> TARGET`, `! ERROR`, `c MAJOR:MINOR`, `/` or `gone`"),
        }
    }
}

const NO_ERROR_NAME: Problem = "an error is written by its name, such as EINVAL";

/// Longer is no path of the kernel's.
pub(super) const MAX_PATH_BYTES: usize = 1024;

/// `EINVAL`
pub fn error_name(error: Errno) -> String {
    format!("{:?}", nix::errno::Errno::from_raw(error.raw_os_error()))
}

fn is_error_name(name: &str) -> bool {
    (2..=20).contains(&name.len())
        && name.starts_with('E')
        && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit())
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder => f.write_str("/"),
            Self::Value(bytes) => write!(f, "= {}", bytes.escape_ascii()),
            Self::Link(target) => write!(f, "-> {}", target.as_bytes().escape_ascii()),
            Self::Device(device) => write!(f, "c {device}"),
            Self::Unreadable(error) => write!(f, "! {error}"),
        }
    }
}

/// Undoes `escape_ascii`.
///
/// # Errors
/// What is no such text.
pub(super) fn unescape(text: &str) -> Result<Vec<u8>, Problem> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        bytes.push(match rest.next() {
            Some(b'n') => b'\n',
            Some(b't') => b'\t',
            Some(b'r') => b'\r',
            Some(same @ (b'\\' | b'\'' | b'"')) => same,
            Some(b'x') => {
                let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16)).ok_or(NO_ESCAPE);
                let (high, low) = (digit()?, digit()?);
                u8::try_from(high * 16 + low).map_err(|_| NO_ESCAPE)?
            }
            Some(_) | None => return Err(NO_ESCAPE),
        });
    }
    Ok(bytes)
}

const NO_ESCAPE: Problem =
    "after a backslash must come n, t, r, ', \", another backslash, or x and two hexadecimal digits";
