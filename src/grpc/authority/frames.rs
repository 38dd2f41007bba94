//! Finds the header blocks in the bytes that an HTTP/2 client sends.
//!
//! Source: RFC 9113, sections 3.4, 4 and 6

use super::hpack::{HeaderBlocks, Rewrite};
use bytes::BytesMut;

/// Rewrites `:authority` in the byte stream of one HTTP/2 client, from its first byte on.
///
/// It does no I/O and takes bytes in pieces of any size. What is not HTTP/2, breaks its rules or needs more than
/// 64 KiB for one header block passes unchanged, from there to the end: the server has the say on it. The bytes it
/// keeps back (a part of a frame header or header block) stay within those 64 KiB.
///
/// The server must keep the default HPACK table size of 4096 bytes, as hyper does.
#[derive(Debug)]
pub struct AuthorityRewriter {
    headers: HeaderBlocks,
    place: Place,
    /// Bytes kept back until it is known what becomes of them: frames of a header block, the last perhaps only begun.
    held: Vec<u8>,
}

/// Where in the stream the next byte belongs.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// The client's preface, of which `seen` bytes went by. Left at its end, or at the first byte that differs.
    Preface { seen: usize },
    /// The header of a frame, its first bytes perhaps held. Left once it is whole.
    FrameHeader,
    /// The payload of a frame without header fields. Left after `left` bytes.
    Payload { left: usize },
    /// The payload of a HEADERS or CONTINUATION frame that begins at `frame` of what is held. Left at `end`.
    Block { frame: usize, end: usize },
    /// The header of the CONTINUATION frame that has to follow, at `frame` of what is held. Left once it is whole.
    ContinuationHeader { frame: usize },
    /// Not HTTP/2 that we understand. Never left.
    Unchanged,
}

impl AuthorityRewriter {
    /// A rewriter for a new connection.
    pub fn new(rewrite: Rewrite) -> Self {
        Self { headers: HeaderBlocks::new(rewrite), place: Place::Preface { seen: 0 }, held: Vec::new() }
    }

    /// How many of the first bytes of `input` go on as they are. They count as seen.
    ///
    /// This is what spares bodies a copy: give a fresh read to it first, and only the rest to [`Self::rewrite`].
    pub fn pass(&mut self, input: &[u8]) -> usize {
        let mut passed = 0;
        while passed < input.len() {
            let rest = &input[passed..];
            match self.place {
                Place::Preface { seen } => {
                    let expected = &PREFACE[seen..];
                    let same = rest.iter().zip(expected).take_while(|(is, should)| is == should).count();
                    passed += same;
                    self.place = if same == expected.len() {
                        Place::FrameHeader
                    } else if same == rest.len() {
                        Place::Preface { seen: seen + same }
                    } else {
                        Place::Unchanged
                    };
                }
                Place::FrameHeader => match FrameHeader::read(rest) {
                    Some(header) if self.held.is_empty() && header.kind != HEADERS => {
                        self.place = header.after_opaque(FrameHeader::LENGTH);
                    }
                    Some(header) if self.held.is_empty() && self.stays(header, rest) => {
                        passed += FrameHeader::LENGTH + header.length;
                    }
                    Some(_) | None => break,
                },
                Place::Payload { left } => {
                    let here = left.min(rest.len());
                    passed += here;
                    self.place = if here == left { Place::FrameHeader } else { Place::Payload { left: left - here } };
                }
                Place::Block { .. } | Place::ContinuationHeader { .. } => break,
                Place::Unchanged => passed = input.len(),
            }
        }
        passed
    }

    /// Whether the HEADERS frame with which `bytes` begin is whole, a block by itself, and stays as it is. Then it counts as seen. So it is
    /// with most: an authority is good, or was stored in the table by the first.
    fn stays(&mut self, header: FrameHeader, bytes: &[u8]) -> bool {
        header.flags & (END_HEADERS | PADDED | PRIORITY) == END_HEADERS
            && header.length + 2 * FrameHeader::LENGTH <= MAX_HELD_BYTES
            && bytes[FrameHeader::LENGTH..].get(..header.length).is_some_and(|fields| self.headers.keep(fields))
    }

    /// Takes in the next bytes of the stream; appends to `output` what is to be sent in their place, as far as is known.
    pub fn rewrite(&mut self, mut input: &[u8], output: &mut BytesMut) {
        loop {
            let (unchanged, rest) = input.split_at(self.pass(input));
            output.extend_from_slice(unchanged);
            let end = match self.place {
                Place::FrameHeader => FrameHeader::LENGTH,
                Place::ContinuationHeader { frame } => frame + FrameHeader::LENGTH,
                Place::Block { end, .. } => end,
                Place::Preface { .. } | Place::Payload { .. } | Place::Unchanged => return, // all of it has passed
            };
            let (wanted, rest) = rest.split_at(rest.len().min(end - self.held.len()));
            self.held.extend_from_slice(wanted);
            input = rest;
            if self.held.len() < end {
                return;
            }
            self.place = self.leave(output);
        }
    }

    /// Appends what is kept back, unchanged, as the stream ended in the midst of it.
    pub fn finish(&mut self, output: &mut BytesMut) {
        self.place = self.give_up(output);
    }

    /// Everything of the current place has come in and is held: deals with it, and returns what follows.
    fn leave(&mut self, output: &mut BytesMut) -> Place {
        match self.place {
            Place::FrameHeader => match FrameHeader::read(&self.held) {
                Some(header) if header.kind == HEADERS => self.enter_block(0, header.length, output),
                Some(header) => {
                    self.release(output);
                    header.after_opaque(0)
                }
                None => Place::FrameHeader,
            },
            Place::ContinuationHeader { frame } => {
                match (FrameHeader::read(&self.held), FrameHeader::read(&self.held[frame..])) {
                    (Some(first), Some(header)) if header.kind == CONTINUATION && header.stream == first.stream => {
                        self.enter_block(frame, header.length, output)
                    }
                    _ => self.give_up(output),
                }
            }
            Place::Block { frame, end } => match FrameHeader::read(&self.held[frame..]) {
                Some(header) if header.flags & END_HEADERS == 0 => Place::ContinuationHeader { frame: end },
                _ => self.finish_block(output),
            },
            elsewhere @ (Place::Preface { .. } | Place::Payload { .. } | Place::Unchanged) => elsewhere,
        }
    }

    fn enter_block(&mut self, frame: usize, length: usize, output: &mut BytesMut) -> Place {
        let end = frame + FrameHeader::LENGTH + length;
        if end + FrameHeader::LENGTH > MAX_HELD_BYTES { self.give_up(output) } else { Place::Block { frame, end } }
    }

    /// Sends the header block whose frames are held.
    fn finish_block(&mut self, output: &mut BytesMut) -> Place {
        let Some(block) = HeaderBlock::gather(&self.held) else {
            return self.give_up(output);
        };
        let Ok(fields) = self.headers.rewrite(&block.fields) else {
            return self.give_up(output);
        };
        if fields == block.fields {
            self.release(output);
        } else {
            HeaderBlock { fields, ..block }.put(output);
            self.held.clear();
        }
        Place::FrameHeader
    }

    fn give_up(&mut self, output: &mut BytesMut) -> Place {
        self.release(output);
        Place::Unchanged
    }

    fn release(&mut self, output: &mut BytesMut) {
        output.extend_from_slice(&self.held);
        self.held.clear();
    }
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The most that is kept back. hyper refuses header lists of more than 16 KiB; this leaves room for their frames.
const MAX_HELD_BYTES: usize = 64 * 1024;

/// The largest frame we make. Every peer has to accept it.
const MAX_FRAME_BYTES: usize = 16 * 1024;

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;

const END_HEADERS: u8 = 0x04;
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;

/// The bytes that the PRIORITY flag announces: a stream and its weight.
const PRIORITY_BYTES: usize = 5;

/// The nine bytes before every payload.
#[derive(Debug, Clone, Copy)]
struct FrameHeader {
    length: usize,
    kind: u8,
    flags: u8,
    stream: [u8; 4],
}

impl FrameHeader {
    const LENGTH: usize = 9;

    /// `None` while `bytes` are too few.
    fn read(bytes: &[u8]) -> Option<Self> {
        let &[high, middle, low, kind, flags, a, b, c, d, ..] = bytes else {
            return None;
        };
        let length = u32::from_be_bytes([0, high, middle, low]) as usize;
        Some(Self { length, kind, flags, stream: [a, b, c, d] })
    }

    /// Where a frame with nothing to rewrite leads; `more` bytes of it stand before its payload.
    fn after_opaque(self, more: usize) -> Place {
        match self.kind {
            CONTINUATION => Place::Unchanged, // of nothing: an error, and a header block that we would miss
            _ => Place::Payload { left: more + self.length },
        }
    }

    fn put(self, payload: &[&[u8]], output: &mut BytesMut) {
        let length: usize = payload.iter().map(|part| part.len()).sum();
        output.extend_from_slice(&(length as u32).to_be_bytes()[1..]); // at most `MAX_FRAME_BYTES`
        output.extend_from_slice(&[self.kind, self.flags]);
        output.extend_from_slice(&self.stream);
        payload.iter().for_each(|part| output.extend_from_slice(part));
    }
}

/// A HEADERS frame and its CONTINUATION frames, put together.
struct HeaderBlock {
    first: FrameHeader,
    priority: Vec<u8>,
    fields: Vec<u8>,
}

impl HeaderBlock {
    /// Reads whole frames; `None` if padding and priority do not fit into the first.
    fn gather(frames: &[u8]) -> Option<Self> {
        let first = FrameHeader::read(frames)?;
        let (payload, mut frames) = frames[FrameHeader::LENGTH..].split_at_checked(first.length)?;
        let payload = if first.flags & PADDED == 0 {
            payload
        } else {
            let (&padding, padded) = payload.split_first()?;
            &padded[..padded.len().checked_sub(usize::from(padding))?]
        };
        let priority_bytes = if first.flags & PRIORITY == 0 { 0 } else { PRIORITY_BYTES };
        let (priority, fields) = payload.split_at_checked(priority_bytes)?;
        let (priority, mut fields) = (priority.to_vec(), fields.to_vec());
        while let Some(header) = FrameHeader::read(frames) {
            let (payload, rest) = frames[FrameHeader::LENGTH..].split_at_checked(header.length)?;
            fields.extend_from_slice(payload);
            frames = rest;
        }
        Some(Self { first, priority, fields })
    }

    /// Appends the block in as few frames as possible, without padding: it would hide nothing on a local socket.
    fn put(&self, output: &mut BytesMut) {
        let here = self.fields.len().min(MAX_FRAME_BYTES - self.priority.len());
        let (here, mut more) = self.fields.split_at(here);
        let flags = self.first.flags & !(PADDED | END_HEADERS) | end_headers(more);
        FrameHeader { flags, ..self.first }.put(&[&self.priority, here], output);
        while !more.is_empty() {
            let (here, rest) = more.split_at(more.len().min(MAX_FRAME_BYTES));
            FrameHeader { kind: CONTINUATION, flags: end_headers(rest), ..self.first }.put(&[here], output);
            more = rest;
        }
    }
}

fn end_headers(more: &[u8]) -> u8 {
    if more.is_empty() { END_HEADERS } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::super::hpack::tests::{Encoder, Field, expected, requests, rewrite};
    use super::*;
    use fluke_hpack::Decoder;
    use proptest::prelude::*;

    #[test]
    fn a_block_that_stays_passes_without_a_copy_and_with_what_follows_it() {
        // GET, with what is stored so far; an authority that is stored and refused; the one that is stored now.
        let [get, refused, stored] =
            [&b"\x82"[..], b"\x41\x01/", b"\x82\xbe"].map(|block| frame(HEADERS, END_HEADERS, &[block]));
        let body = frame(0, 1, &[b"body"]);
        let (mut rewriter, mut output) = (AuthorityRewriter::new(Rewrite::Refused), BytesMut::new());
        let stays = [PREFACE, &get, &body, &get].concat();
        assert_eq!(rewriter.pass(&[&stays[..], &refused, &body].concat()), stays.len());
        rewriter.rewrite(&[&refused[..], &body].concat(), &mut output);
        assert_eq!(output[..], [&frame(HEADERS, END_HEADERS, &[b"\x41\x01w"])[..], &body].concat());
        assert_eq!(rewriter.pass(&[&stored[..], &body].concat()), stored.len() + body.len());
        // Of a block that has only begun nothing passes.
        assert_eq!(rewriter.pass(&stored[..10]), 0);
    }

    /// How a client cuts one header block into frames.
    #[derive(Debug, Clone)]
    struct Cut {
        padding: Option<u8>,
        priority: Option<[u8; PRIORITY_BYTES]>,
        fragments: Vec<prop::sample::Index>,
        next: Vec<u8>,
        next_kind: u8,
    }

    fn cut() -> impl Strategy<Value = Cut> {
        let fragments = prop::collection::vec(any::<prop::sample::Index>(), 0..4);
        let next = prop::collection::vec(any::<u8>(), 0..300);
        let next_kind = prop::sample::select(vec![0_u8, 2, 3, 4, 6, 8, 77]);
        (any::<Option<u8>>(), any::<Option<[u8; PRIORITY_BYTES]>>(), fragments, next, next_kind).prop_map(
            |(padding, priority, fragments, next, next_kind)| Cut { padding, priority, fragments, next, next_kind },
        )
    }

    fn frame(kind: u8, flags: u8, payload: &[&[u8]]) -> Vec<u8> {
        let mut bytes = BytesMut::new();
        FrameHeader { length: 0, kind, flags, stream: [0, 0, 0, 1] }.put(payload, &mut bytes);
        bytes.to_vec()
    }

    impl Cut {
        /// The frames of a header block, and a frame of another kind behind them.
        fn apply(&self, block: &[u8]) -> Vec<u8> {
            let mut ends: Vec<usize> = self.fragments.iter().map(|at| at.index(block.len() + 1)).collect();
            ends.push(block.len());
            ends.sort_unstable();
            let last = ends.len() - 1;
            let mut bytes = Vec::new();
            let mut start = 0;
            for (n, end) in ends.into_iter().enumerate() {
                let end_headers = if n == last { END_HEADERS } else { 0 };
                if n == 0 {
                    let flags = self.padding.map_or(0, |_| PADDED) | self.priority.map_or(0, |_| PRIORITY);
                    let padding = self.padding.map(|length| vec![0; usize::from(length)]).unwrap_or_default();
                    let length: &[u8] = self.padding.as_slice();
                    let priority: &[u8] = self.priority.as_ref().map_or(&[], |bytes| bytes);
                    bytes.extend(frame(HEADERS, flags | end_headers | 1, &[length, priority, &block[..end], &padding]));
                } else {
                    bytes.extend(frame(CONTINUATION, end_headers, &[&block[start..end]]));
                }
                start = end;
            }
            bytes.extend(frame(self.next_kind, 0, &[&self.next]));
            bytes
        }
    }

    /// Feeds `stream` in pieces of the given sizes, over and over; `None` is all at once.
    fn rewritten(rewrite: Rewrite, stream: &[u8], sizes: &[usize]) -> Vec<u8> {
        let mut rewriter = AuthorityRewriter::new(rewrite);
        let mut output = BytesMut::new();
        let mut rest = stream;
        for &size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (mut piece, later) = rest.split_at(size.min(rest.len()));
            if size % 2 == 0 {
                let passed = rewriter.pass(piece);
                output.extend_from_slice(&piece[..passed]);
                piece = &piece[passed..];
            }
            rewriter.rewrite(piece, &mut output);
            assert!(rewriter.held.len() <= MAX_HELD_BYTES);
            rest = later;
        }
        rewriter.finish(&mut output);
        output.to_vec()
    }

    /// What a server reads: header blocks put together, and the other frames' bytes.
    fn parsed(stream: &[u8]) -> (Vec<HeaderBlock>, Vec<Vec<u8>>) {
        let mut rest = stream.strip_prefix(PREFACE).expect("the preface passes");
        let (mut blocks, mut others, mut block) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(header) = FrameHeader::read(rest) {
            let (whole, later) = rest.split_at(FrameHeader::LENGTH + header.length);
            assert!(header.length <= MAX_FRAME_BYTES);
            assert_eq!(block.is_empty(), header.kind != CONTINUATION);
            if header.kind == HEADERS || header.kind == CONTINUATION {
                block.extend_from_slice(whole);
                if header.flags & END_HEADERS != 0 {
                    blocks.push(HeaderBlock::gather(&block).unwrap());
                    block.clear();
                }
            } else {
                others.push(whole.to_vec());
            }
            rest = later;
        }
        assert!(rest.is_empty() && block.is_empty());
        (blocks, others)
    }

    fn connection(requests: &[Vec<Field>], cuts: &[Cut]) -> (Vec<u8>, Vec<Vec<bool>>) {
        let mut encoder = Encoder::new();
        let (mut stream, mut in_tables) = (PREFACE.to_vec(), Vec::new());
        for (fields, cut) in requests.iter().zip(cuts.iter().cycle()) {
            let (block, in_table) = encoder.encode(fields);
            stream.extend(cut.apply(&block));
            in_tables.push(in_table);
        }
        (stream, in_tables)
    }

    #[test]
    fn kubelets_request_gets_a_host_of_one_byte() {
        let request = [PREFACE, &frame(4, 0, &[]), &frame(HEADERS, 5, &[b"\x83\x86\x41\x06%2Fvar\x84"])].concat();
        let wanted = [PREFACE, &frame(4, 0, &[]), &frame(HEADERS, 5, &[b"\x83\x86\x41\x01w\x84"])].concat();
        assert_eq!(rewritten(Rewrite::Refused, &request, &[usize::MAX]), wanted);
        assert_eq!(rewritten(Rewrite::Refused, &request, &[1]), wanted);
    }

    #[test]
    fn bodies_pass_without_being_copied() {
        let mut rewriter = AuthorityRewriter::new(Rewrite::Refused);
        let stream = [PREFACE, &frame(0, 0, &[&[7; 16000]]), &frame(0, 1, &[&[7; 16000]])].concat();
        assert_eq!(rewriter.pass(&stream), stream.len());
    }

    #[test]
    fn request_without_anything_to_change_passes_bit_for_bit() {
        let padded =
            frame(HEADERS, PADDED | PRIORITY | END_HEADERS, &[&[3], &[0, 0, 0, 0, 9], b"\x83\x84\x41\x01a", &[0; 3]]);
        let stream = [PREFACE, &padded].concat();
        assert_eq!(rewritten(Rewrite::Refused, &stream, &[5]), stream);
    }

    #[test]
    fn stream_that_breaks_the_rules_is_unchanged_from_there_on() {
        let request = frame(HEADERS, END_HEADERS, &[b"\x41\x01/"]);
        let mut other_stream = [frame(HEADERS, 0, &[b"\x41"]), frame(CONTINUATION, END_HEADERS, &[b"\x01/"])].concat();
        other_stream[FrameHeader::LENGTH + 1 + 8] = 3;
        let breaches = [
            other_stream,
            frame(HEADERS, END_HEADERS, &[b"\x83\x86\x41\x09%2Fvar"]), // a value cut short
            frame(HEADERS, END_HEADERS | PADDED, &[b"\x09abc"]),       // more padding than payload
            frame(HEADERS, END_HEADERS | PRIORITY, &[b"\x00\x00"]),    // no room for the priority
            frame(CONTINUATION, END_HEADERS, &[b"\x84"]),              // of nothing
            [frame(HEADERS, 0, &[b"\x41"]), frame(0, 0, &[b"data"])].concat(), // not continued
            [&[0xff, 0xff, 0xff, HEADERS, 0, 0, 0, 0, 1], &[0; 70_000][..]].concat(), // too large to hold
            frame(HEADERS, END_HEADERS, &[&[0x82; MAX_HELD_BYTES - 17]]), // the same, by a byte, and whole
            frame(HEADERS, 0, &[]).into_iter().chain(frame(CONTINUATION, 0, &[]).repeat(8000)).collect(), // a flood
        ];
        for breach in breaches {
            let stream = [PREFACE, &breach, &request].concat();
            for sizes in [&[usize::MAX - 1][..], &[1], &[1000]] {
                assert!(
                    rewritten(Rewrite::Refused, &stream, sizes) == stream,
                    "{:x?}",
                    &breach[..breach.len().min(30)]
                );
            }
        }
    }

    #[test]
    fn http1_passes_unchanged() {
        for request in [&b"GET /healthz HTTP/1.1\r\nHost: /\r\n\r\n"[..], b"PRI", b"PRI * HTTP/2.0\r\n\r\nSX", b""] {
            assert_eq!(rewritten(Rewrite::Refused, request, &[4]), request);
        }
    }

    #[test]
    fn block_that_outgrows_one_frame_is_continued() {
        let stream = [PREFACE, &frame(HEADERS, END_HEADERS, &[&[0x81; 12_000]])].concat();
        let (blocks, _) = parsed(&rewritten(Rewrite::Refused, &stream, &[512]));
        assert_eq!(blocks[0].fields, b"\x01\x01w".repeat(12_000));
    }

    proptest! {
        #[test]
        fn server_reads_the_same_requests_but_for_the_authority(
            rewrite in rewrite(),
            requests in requests(),
            cuts in prop::collection::vec(cut(), 1..6),
            sizes in prop::collection::vec(1_usize..2000, 1..6),
        ) {
            let (stream, in_tables) = connection(&requests, &cuts);
            let output = rewritten(rewrite.clone(), &stream, &sizes);
            let ((sent, sent_others), (received, received_others)) = (parsed(&stream), parsed(&output));
            prop_assert_eq!(received_others, sent_others);
            prop_assert_eq!(received.len(), sent.len());
            let (mut sender, mut receiver) = (Decoder::new(), Decoder::new());
            for ((sent, received), in_table) in sent.iter().zip(&received).zip(&in_tables) {
                prop_assert_eq!(&received.priority, &sent.priority);
                prop_assert_eq!(received.first.stream, sent.first.stream);
                prop_assert_eq!((received.first.flags ^ sent.first.flags) & !(PADDED | END_HEADERS), 0);
                let fields = sender.decode(&sent.fields).expect("the encoder is right");
                let received = receiver.decode(&received.fields).expect("the tables are in step");
                prop_assert_eq!(received, expected(&rewrite, fields, in_table));
            }
        }

        #[test]
        fn damaged_streams_do_no_harm_and_do_not_depend_on_the_pieces(
            rewrite in rewrite(),
            requests in requests(),
            cuts in prop::collection::vec(cut(), 1..6),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            sizes in prop::collection::vec(1_usize..2000, 1..6),
        ) {
            let (mut stream, _) = connection(&requests, &cuts);
            for (at, byte) in damage {
                let at = at.index(stream.len());
                stream[at] = byte;
            }
            prop_assert_eq!(rewritten(rewrite.clone(), &stream, &sizes), rewritten(rewrite, &stream, &[usize::MAX]));
        }

        #[test]
        fn what_is_not_http2_passes_unchanged(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            sizes in prop::collection::vec(1_usize..50, 1..6),
        ) {
            prop_assume!(!bytes.starts_with(PREFACE));
            prop_assert_eq!(rewritten(Rewrite::Refused, &bytes, &sizes), bytes);
        }

        #[test]
        fn any_frames_are_taken(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            kind in 0_u8..12,
            sizes in prop::collection::vec(1_usize..50, 1..6),
        ) {
            let stream = [PREFACE, &[0, 0, 30, kind], &bytes].concat();
            prop_assert!(rewritten(Rewrite::Refused, &stream, &sizes).len() <= 3 * stream.len() + 9);
        }
    }
}
