//! Lets clients whose `:authority` is a socket path speak to our servers.
//!
//! The kubelet's plugin watcher dials a bare path, so grpc-go sends `:authority: %2Fvar%2Flib%2F…-reg.sock`; gRPC C-core
//! does the same for `unix:` targets, and older stacks send the path raw. `http::uri::Authority` refuses `%` and `/`
//! there, and h2 resets the stream with PROTOCOL_ERROR before any service sees the call: the driver would never register.
//!
//! [`AuthorityFix`] sits between a server's socket and hyper and mends what the client sends. [`AuthorityAs`] is its
//! opposite for clients: it makes hyper, which cannot send such an authority, speak exactly as the kubelet does.
//!
//! `frames` finds the header blocks in the byte stream, `hpack` walks the fields of one block, `huffman` reads a coded
//! value, `stream` puts it all under a socket. Only `stream` knows of I/O.

mod frames;
mod hpack;
mod huffman;
mod stream;

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

pub use frames::AuthorityRewriter;
pub use hpack::Rewrite;
pub use stream::{AuthorityAs, AuthorityFix};

/// The `:authority` that grpc-go sends when told to dial the bare path `path`.
///
/// Source: `encodeAuthority` in <https://github.com/grpc/grpc-go/blob/v1.79.3/clientconn.go>
pub fn percent_encode_path(path: &Path) -> String {
    path.as_os_str().as_bytes().iter().fold(String::new(), |mut encoded, &byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
        encoded
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn kubelets_path_is_encoded_as_grpc_go_does() {
        let path = Path::new("/var/lib/kubelet/plugins_registry/x.example.com-reg.sock");
        assert_eq!(percent_encode_path(path), "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fx.example.com-reg.sock");
    }

    #[test]
    fn exactly_the_characters_of_an_authority_stay_plain() {
        let every_byte: Vec<u8> = (0..=255).collect();
        let encoded = percent_encode_path(Path::new(OsStr::from_bytes(&every_byte)));
        let plain: String =
            encoded.split('%').enumerate().map(|(n, part)| &part[if n == 0 { 0 } else { 2 }..]).collect();
        assert_eq!(plain, "!$&'()*+,-.0123456789:;=@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz~");
        assert!(encoded.starts_with("%00%01") && encoded.ends_with("%FE%FF") && encoded.contains("%2F"));
    }
}
