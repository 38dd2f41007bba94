//! gRPC's framing of messages: one byte that says whether it is compressed, four of length, and the message.

use bytes::{BufMut, Bytes, BytesMut};

const PREFIX_BYTES: usize = 5;

/// Most that is held of a message that has to be seen whole. Go's clients take no more by default.
pub(super) const MOST_BYTES: usize = 4 * 1024 * 1024;

/// The first message in `body`, if it is whole and not compressed.
pub(super) fn first(body: &Bytes) -> Option<Bytes> {
    let length = first_length(body)?;
    (body[0] == 0 && body.len() >= PREFIX_BYTES + length).then(|| body.slice(PREFIX_BYTES..PREFIX_BYTES + length))
}

/// The only message in `body`, likewise.
pub(super) fn only(body: &Bytes) -> Option<Bytes> {
    first(body).filter(|message| body.len() == PREFIX_BYTES + message.len())
}

/// How many bytes the first message and its prefix have, once the prefix is there.
pub(super) fn first_frame_bytes(body: &[u8]) -> Option<usize> {
    first_length(body)?.checked_add(PREFIX_BYTES)
}

fn first_length(body: &[u8]) -> Option<usize> {
    let length: [u8; 4] = body.get(1..PREFIX_BYTES)?.try_into().ok()?;
    usize::try_from(u32::from_be_bytes(length)).ok()
}

/// The message with its prefix.
pub(super) fn framed(message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + message.len());
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    bytes.put_slice(message);
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_not_whole_or_compressed_is_none() {
        for odd in [&b""[..], b"\0\0\0", b"\0\0\0\0\x02a", b"\x01\0\0\0\x01a", b"\0\xff\xff\xff\xffa"] {
            assert_eq!(first(&Bytes::copy_from_slice(odd)), None, "{odd:?}");
        }
        let two = Bytes::from_static(b"\0\0\0\0\x01a\0\0\0\0\x01b");
        assert_eq!((first(&two).as_deref(), only(&two)), (Some(&b"a"[..]), None));
    }

    proptest! {
        #[test]
        fn a_framed_message_reads_back(message in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let body = framed(&message);
            prop_assert_eq!(first_frame_bytes(&body), Some(body.len()));
            prop_assert_eq!(only(&body), Some(Bytes::from(message)));
        }

        #[test]
        fn no_bytes_panic(body in proptest::collection::vec(any::<u8>(), 0..64)) {
            let body = Bytes::from(body);
            first(&body);
            only(&body);
        }
    }
}
