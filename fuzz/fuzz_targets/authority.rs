//! Hostile clients under a server's socket: the `:authority` rewriter takes any bytes in any pieces.
#![no_main]

use bytes::BytesMut;
use csi_warden::grpc::authority::{AuthorityRewriter, Rewrite};
use libfuzzer_sys::fuzz_target;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const LONG_AUTHORITY: &str = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fx.example.com-reg.sock";

// The first byte says whether a preface comes before the rest, the second how large the pieces are.
fuzz_target!(|input: &[u8]| {
    let &[with_preface, piece_bytes, ref rest @ ..] = input else {
        return;
    };
    let preface = if with_preface % 2 == 0 { PREFACE } else { &[] };
    let stream = [preface, rest].concat();
    let piece_bytes = usize::from(piece_bytes) + 1;

    // A field of one byte can become one of three bytes, or of the whole authority; a frame header comes per 16 KiB.
    for (rewrite, most_per_byte) in
        [(Rewrite::Refused, 3), (Rewrite::Every(LONG_AUTHORITY.to_owned()), LONG_AUTHORITY.len() + 2)]
    {
        let output = rewritten(rewrite.clone(), &stream, piece_bytes);
        assert!(output.len() <= stream.len() * most_per_byte + 9);
        assert!(output == rewritten(rewrite, &stream, usize::MAX), "the pieces matter");
        assert!(stream.starts_with(PREFACE) || output == stream, "garbage has changed");
    }
});

fn rewritten(rewrite: Rewrite, stream: &[u8], piece_bytes: usize) -> Vec<u8> {
    let mut rewriter = AuthorityRewriter::new(rewrite);
    let mut output = BytesMut::new();
    for piece in stream.chunks(piece_bytes) {
        let passed = rewriter.pass(piece);
        output.extend_from_slice(&piece[..passed]);
        rewriter.rewrite(&piece[passed..], &mut output);
    }
    rewriter.finish(&mut output);
    output.to_vec()
}
