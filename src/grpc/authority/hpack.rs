//! Walks the fields of HPACK header blocks and changes the value of `:authority`.
//!
//! HPACK is stateful: a field may be stored in the decoder's dynamic table and later be named by its place there. The
//! table itself is not kept here. Which of its entries are an `:authority` is, one bit an entry, because a later field
//! may take its name from such an entry (gRPC C-core does that; grpc-go, h2 and nghttp2 prefer the static name).
//!
//! Source: RFC 7541

use super::huffman;

/// Which values of `:authority` change, and into what.
#[derive(Debug, Clone)]
pub enum Rewrite {
    /// Those that `http::uri::Authority`, and therefore h2, refuses become a host of one byte; every other value stays
    /// as it is, bit for bit.
    ///
    /// A field that the client has stored in the dynamic table is stored still, under the new value. That must not be
    /// longer, decoded, than the old one: the table counts bytes, and the decoder would evict what the client still
    /// refers to. So an empty value is replaced only where it is not stored. Encoders never store one: they know it
    /// from the static table, and there it is replaced.
    Refused,
    /// All of them become this text, of any length.
    ///
    /// The field is no longer stored, and references to later entries are moved up by one, so eviction does not matter.
    Every(String),
}

/// The field is not well-formed HPACK, or uses integers no decoder accepts. The decoder will say so itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// The header blocks of one direction of one connection, in their order.
#[derive(Debug)]
pub(super) struct HeaderBlocks {
    rewrite: Rewrite,
    /// Bit n: the field stored n insertions before the latest one is an `:authority`.
    ///
    /// 128 bits cover a table of 4096 bytes, the default that our servers keep, as every entry counts 32 bytes or more.
    /// Entries that were evicted have bits too; nobody refers to them.
    authorities: u128,
    /// What [`Self::keep`] compares with, to be used again.
    compared: Vec<u8>,
}

impl HeaderBlocks {
    pub(super) fn new(rewrite: Rewrite) -> Self {
        Self { rewrite, authorities: 0, compared: Vec::new() }
    }

    /// Whether `block` stays as it is, bit for bit. If not, or after an error, it does not count as given.
    pub(super) fn keep(&mut self, block: &[u8]) -> bool {
        let (before, mut compared) = (self.authorities, std::mem::take(&mut self.compared));
        compared.clear();
        let kept = self.rewrite_into(block, &mut compared).is_ok() && compared == block;
        if compared.capacity() <= MOST_COMPARED_BYTES {
            self.compared = compared;
        }
        if !kept {
            self.authorities = before;
        }
        kept
    }

    /// The block to send instead of `block`, which may be equal.
    ///
    /// After an error the table is out of step: no further block may be given.
    pub(super) fn rewrite(&mut self, block: &[u8]) -> Result<Vec<u8>, Malformed> {
        let mut rewritten = Vec::with_capacity(block.len());
        self.rewrite_into(block, &mut rewritten)?;
        Ok(rewritten)
    }

    fn rewrite_into(&mut self, block: &[u8], rewritten: &mut Vec<u8>) -> Result<(), Malformed> {
        let mut fields = Fields { block, at: 0 };
        while let Some(first) = fields.peek() {
            let start = fields.at;
            match first {
                0x80.. => {
                    let index = fields.integer(7)?;
                    self.indexed(index, &block[start..fields.at], rewritten)?;
                }
                0x40.. => self.literal(&mut fields, 6, rewritten)?,
                0x20.. => {
                    fields.integer(5)?; // a new table size only evicts
                    rewritten.extend_from_slice(&block[start..fields.at]);
                }
                _ => self.literal(&mut fields, 4, rewritten)?,
            }
        }
        Ok(())
    }

    /// A field that is an entry of a table, name and value.
    fn indexed(&self, index: usize, field: &[u8], rewritten: &mut Vec<u8>) -> Result<(), Malformed> {
        let value = match &self.rewrite {
            _ if index == 0 => return Err(Malformed),
            Rewrite::Every(value) if self.names_authority(index) => Some(value.as_str()),
            Rewrite::Refused if index == STATIC_AUTHORITY => Some(HOST), // its value there is empty
            Rewrite::Every(_) | Rewrite::Refused => None,
        };
        match (value, self.decoders_index(index)) {
            (Some(value), _) => put_unstored_authority(LITERAL_UNSTORED, value, rewritten),
            (None, same) if same == index => rewritten.extend_from_slice(field),
            (None, moved) => put_integer(0x80, 7, moved, rewritten),
        }
        Ok(())
    }

    /// A field with its value, and perhaps its name, spelled out. `prefix` is the width of the name's index, in bits.
    fn literal(&mut self, fields: &mut Fields<'_>, prefix: u32, rewritten: &mut Vec<u8>) -> Result<(), Malformed> {
        let (start, first) = (fields.at, fields.block[fields.at]);
        let is_stored = first & LITERAL_STORED != 0;
        let index = fields.integer(prefix)?;
        let after_index = fields.at;
        let is_authority = if index == 0 { fields.string()?.is_authority_name() } else { self.names_authority(index) };
        let after_name = fields.at;
        let value = fields.string()?;

        match (&self.rewrite, self.decoders_index(index)) {
            (Rewrite::Every(text), _) if is_authority => {
                let kind = if is_stored { LITERAL_UNSTORED } else { first & !low_bits(prefix) };
                put_unstored_authority(kind, text, rewritten);
            }
            (Rewrite::Refused, _) if is_authority && !value.is_accepted() && !(is_stored && value.bytes.is_empty()) => {
                rewritten.extend_from_slice(&fields.block[start..after_name]);
                put_text(HOST, rewritten);
            }
            (_, same) if same == index => rewritten.extend_from_slice(&fields.block[start..fields.at]),
            (_, moved) => {
                put_integer(first & !low_bits(prefix), prefix, moved, rewritten);
                rewritten.extend_from_slice(&fields.block[after_index..fields.at]);
            }
        }
        if is_stored {
            self.authorities = self.authorities << 1 | u128::from(is_authority);
        }
        Ok(())
    }

    /// Whether the entry at `index` of the client's tables is an `:authority`.
    fn names_authority(&self, index: usize) -> bool {
        let stored_since = index.checked_sub(FIRST_DYNAMIC).and_then(|since| u32::try_from(since).ok());
        index == STATIC_AUTHORITY
            || stored_since
                .and_then(|since| self.authorities.checked_shr(since))
                .is_some_and(|entries| entries & 1 == 1)
    }

    /// Where the decoder has the entry that the client has at `index`: it lacks the entries that are no longer stored.
    fn decoders_index(&self, index: usize) -> usize {
        match (&self.rewrite, index.checked_sub(FIRST_DYNAMIC)) {
            (Rewrite::Every(_), Some(since)) => {
                let newer = u32::try_from(since)
                    .ok()
                    .and_then(|since| 1_u128.checked_shl(since))
                    .map_or(u128::MAX, |bit| bit - 1);
                index - (self.authorities & newer).count_ones() as usize
            }
            (Rewrite::Every(_) | Rewrite::Refused, _) => index,
        }
    }
}

/// What a connection keeps room for, so that a block needs none of its own. The usual one has 200 bytes at most.
const MOST_COMPARED_BYTES: usize = 1024;

/// What a refused authority becomes. Of one byte, as it must never be longer than the original.
const HOST: &str = "w";

/// The place of `:authority`, with an empty value, in the static table.
const STATIC_AUTHORITY: usize = 1;

/// The place of the latest entry of the dynamic table.
const FIRST_DYNAMIC: usize = 62;

/// Set in the first byte of a literal that goes into the dynamic table.
const LITERAL_STORED: u8 = 0x40;

/// The first byte of a literal that does not, without its index.
const LITERAL_UNSTORED: u8 = 0x00;

/// Bytes of one header block, and how many have been read.
struct Fields<'a> {
    block: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    fn peek(&self) -> Option<u8> {
        self.block.get(self.at).copied()
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        let byte = self.peek().ok_or(Malformed)?;
        self.at += 1;
        Ok(byte)
    }

    /// An integer in the low `prefix` bits of the next byte and up to four bytes more: h2 refuses a fifth.
    fn integer(&mut self, prefix: u32) -> Result<usize, Malformed> {
        let mask = low_bits(prefix);
        let start = self.byte()? & mask;
        let mut value = usize::from(start);
        if start < mask {
            return Ok(value);
        }
        for shift in [0, 7, 14, 21] {
            let byte = self.byte()?;
            value += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn string(&mut self) -> Result<Text<'a>, Malformed> {
        let is_huffman = self.peek().ok_or(Malformed)? & 0x80 != 0;
        let length = self.integer(7)?;
        let bytes = self.block[self.at..].get(..length).ok_or(Malformed)?;
        self.at += length;
        Ok(Text { is_huffman, bytes })
    }
}

/// A name or value as it was sent.
struct Text<'a> {
    is_huffman: bool,
    bytes: &'a [u8],
}

impl Text<'_> {
    fn is_authority_name(&self) -> bool {
        self.bytes == if self.is_huffman { HUFFMAN_AUTHORITY } else { &b":authority"[..] }
    }

    /// Whether h2 takes this value as an authority: it asks the same parser.
    ///
    /// A coded value with symbols that [`huffman::decode_short`] does not read counts as refused. Such are the brackets
    /// of IPv6 addresses: losing one costs nothing, as no service of ours looks at its own host name.
    fn is_accepted(&self) -> bool {
        let accepts = |bytes: &[u8]| http::uri::Authority::try_from(bytes).is_ok();
        if self.is_huffman {
            huffman::decode_short(self.bytes).is_some_and(|text| accepts(&text))
        } else {
            accepts(self.bytes)
        }
    }
}

/// `:authority`, Huffman-coded. A text has exactly one valid coding, so comparing bytes is enough.
const HUFFMAN_AUTHORITY: &[u8] = b"\xb8\x3b\x53\x39\xec\x32\x7d\x7f";

fn put_unstored_authority(kind: u8, value: &str, rewritten: &mut Vec<u8>) {
    put_integer(kind, 4, STATIC_AUTHORITY, rewritten);
    put_text(value, rewritten);
}

fn put_text(text: &str, rewritten: &mut Vec<u8>) {
    put_integer(0, 7, text.len(), rewritten);
    rewritten.extend_from_slice(text.as_bytes());
}

/// Appends `value` under the high bits `kind`, beginning in the low `prefix` bits of the first byte.
fn put_integer(kind: u8, prefix: u32, value: usize, rewritten: &mut Vec<u8>) {
    let mask = low_bits(prefix);
    let Some(mut rest) = value.checked_sub(usize::from(mask)) else {
        rewritten.push(kind | value as u8); // below the mask
        return;
    };
    rewritten.push(kind | mask);
    while rest >= 0x80 {
        rewritten.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    rewritten.push(rest as u8);
}

fn low_bits(count: u32) -> u8 {
    u8::MAX >> (8 - count)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::huffman::tests::encode_short;
    use super::*;
    use fluke_hpack::{Decoder, huffman::HuffmanDecoder};
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// A field as a client may choose to send it. Numbers pick from what the tables hold at that moment.
    #[derive(Debug, Clone)]
    pub(in super::super) enum Field {
        Static(usize),
        Dynamic(usize),
        Literal { kind: Kind, name: Name, value: Vec<u8>, huffman: bool },
        TableSize(usize),
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    pub(in super::super) enum Kind {
        Stored,
        Unstored,
        NeverStored,
    }

    #[derive(Debug, Clone)]
    pub(in super::super) enum Name {
        Static(usize),
        Dynamic(usize),
        New(&'static str),
    }

    /// A client that uses every freedom HPACK gives, with the dynamic table that it believes in.
    pub(in super::super) struct Encoder {
        table: VecDeque<(Vec<u8>, Vec<u8>)>,
        max_bytes: usize,
    }

    type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

    impl Encoder {
        pub(in super::super) fn new() -> Self {
            Self { table: VecDeque::new(), max_bytes: 4096 }
        }

        /// The block, and of each field whether it comes from the dynamic table or goes there.
        pub(in super::super) fn encode(&mut self, fields: &[Field]) -> (Vec<u8>, Vec<bool>) {
            let (mut block, mut in_table) = (Vec::new(), Vec::new());
            for field in fields {
                match field {
                    Field::TableSize(bytes) => {
                        put_integer(0x20, 5, *bytes, &mut block);
                        self.max_bytes = *bytes;
                        self.evict();
                    }
                    Field::Static(index) => put_integer(0x80, 7, *index, &mut block),
                    Field::Dynamic(pick) if self.table.is_empty() => put_integer(0x80, 7, 1 + pick % 61, &mut block),
                    Field::Dynamic(pick) => put_integer(0x80, 7, 62 + pick % self.table.len(), &mut block),
                    Field::Literal { kind, name, value, huffman } => {
                        self.literal(*kind, name, value, *huffman, &mut block)
                    }
                }
                match field {
                    Field::Static(_) => in_table.push(false),
                    Field::Dynamic(_) => in_table.push(!self.table.is_empty()),
                    Field::Literal { kind, .. } => in_table.push(*kind == Kind::Stored),
                    Field::TableSize(_) => {}
                }
            }
            (block, in_table)
        }

        fn literal(&mut self, kind: Kind, name: &Name, value: &[u8], huffman: bool, block: &mut Vec<u8>) {
            let (bits, prefix) = match kind {
                Kind::Stored => (0x40, 6),
                Kind::Unstored => (0x00, 4),
                Kind::NeverStored => (0x10, 4),
            };
            let name = match name {
                Name::Dynamic(pick) if self.table.is_empty() => &Name::Static(1 + pick % 61),
                name @ (Name::Static(_) | Name::Dynamic(_) | Name::New(_)) => name,
            };
            let name = match name {
                Name::Static(index) => {
                    put_integer(bits, prefix, *index, block);
                    static_name(*index)
                }
                Name::Dynamic(pick) => {
                    let place = pick % self.table.len();
                    put_integer(bits, prefix, 62 + place, block);
                    self.table[place].0.clone()
                }
                Name::New(name) => {
                    put_integer(bits, prefix, 0, block);
                    put_string(name.as_bytes(), huffman, block);
                    name.as_bytes().to_vec()
                }
            };
            put_string(value, huffman, block);
            if kind == Kind::Stored {
                self.table.push_front((name, value.to_vec()));
                self.evict();
            }
        }

        fn evict(&mut self) {
            let size = |table: &VecDeque<(Vec<u8>, Vec<u8>)>| -> usize {
                table.iter().map(|(name, value)| name.len() + value.len() + 32).sum()
            };
            while size(&self.table) > self.max_bytes {
                self.table.pop_back();
            }
        }
    }

    fn static_name(index: usize) -> Vec<u8> {
        let mut block = Vec::new();
        put_integer(0x80, 7, index, &mut block);
        Decoder::new().decode(&block).unwrap().remove(0).0
    }

    fn put_string(text: &[u8], huffman: bool, block: &mut Vec<u8>) {
        let is_short = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.%/:".contains(byte);
        if huffman && text.iter().all(is_short) {
            let coded = encode_short(text);
            put_integer(0x80, 7, coded.len(), block);
            block.extend_from_slice(&coded);
        } else {
            put_integer(0, 7, text.len(), block);
            block.extend_from_slice(text);
        }
    }

    /// What must come out for the fields that a server would have read. `in_table` as from [`Encoder::encode`].
    pub(in super::super) fn expected(rewrite: &Rewrite, sent: Pairs, in_table: &[bool]) -> Pairs {
        assert_eq!(sent.len(), in_table.len());
        let fields = sent.into_iter().zip(in_table);
        fields
            .map(|((name, value), in_table)| match rewrite {
                _ if name != b":authority" => (name, value),
                Rewrite::Every(text) => (name, text.clone().into_bytes()),
                Rewrite::Refused if http::uri::Authority::try_from(&value[..]).is_ok() => (name, value),
                Rewrite::Refused if value.is_empty() && *in_table => (name, value),
                Rewrite::Refused => (name, b"w".to_vec()),
            })
            .collect()
    }

    fn value() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            Just(b"%2Fvar%2Flib%2Fkubelet%2Fx-reg.sock".to_vec()),
            Just(b"/var/lib/kubelet/x-reg.sock".to_vec()),
            Just(b"localhost".to_vec()),
            Just(b"localhost:8080".to_vec()),
            Just(b"".to_vec()),
            prop::collection::vec(any::<u8>(), 0..40),
            "[a-z/%]{0,900}".prop_map(String::into_bytes),
        ]
    }

    fn field() -> impl Strategy<Value = Field> {
        let kind = prop_oneof![2 => Just(Kind::Stored), 1 => Just(Kind::Unstored), 1 => Just(Kind::NeverStored)];
        let name = prop_oneof![
            3 => Just(Name::Static(1)),
            3 => Just(Name::New(":authority")),
            1 => (1_usize..=61).prop_map(Name::Static),
            3 => any::<usize>().prop_map(Name::Dynamic),
            2 => prop::sample::select(vec!["te", "x-trace", ":authorit", "grpc-timeout"]).prop_map(Name::New),
        ];
        let literal = (kind, name, value(), any::<bool>()).prop_map(|(kind, name, value, huffman)| Field::Literal {
            kind,
            name,
            value,
            huffman,
        });
        prop_oneof![
            1 => (1_usize..=61).prop_map(Field::Static),
            1 => Just(Field::Static(1)),
            3 => any::<usize>().prop_map(Field::Dynamic),
            6 => literal,
        ]
    }

    /// The header lists of the requests on one connection, some after a change of the table's size.
    pub(in super::super) fn requests() -> impl Strategy<Value = Vec<Vec<Field>>> {
        let size = prop::option::weighted(0.2, (0_usize..=4096).prop_map(Field::TableSize));
        let request = (size, prop::collection::vec(field(), 1..12))
            .prop_map(|(size, fields)| size.into_iter().chain(fields).collect());
        prop::collection::vec(request, 1..12)
    }

    pub(in super::super) fn rewrite() -> impl Strategy<Value = Rewrite> {
        prop_oneof![Just(Rewrite::Refused), "[a-zA-Z%.]{0,300}".prop_map(Rewrite::Every)]
    }

    fn rewritten(rewrite: Rewrite, block: &[u8]) -> Result<Vec<u8>, Malformed> {
        HeaderBlocks::new(rewrite).rewrite(block)
    }

    #[test]
    fn coded_name_is_the_standards() {
        assert_eq!(HuffmanDecoder::new().decode(HUFFMAN_AUTHORITY).unwrap(), b":authority");
    }

    #[test]
    fn representation_stays_while_the_value_becomes_one_byte() {
        for (name, value) in [(&b"\x41"[..], &b"\x05%2Fvs"[..]), (b"\x01", b"\x02/v"), (b"\x11", b"\x01%")] {
            assert_eq!(rewritten(Rewrite::Refused, &[name, value].concat()), Ok([name, b"\x01w"].concat()));
        }
        let coded = encode_short(b"%2Fvar");
        let block = [b"\x40\x88", HUFFMAN_AUTHORITY, &[0x80 | coded.len() as u8], &coded].concat();
        assert_eq!(rewritten(Rewrite::Refused, &block), Ok([b"\x40\x88", HUFFMAN_AUTHORITY, b"\x01w"].concat()));
    }

    #[test]
    fn good_authority_stays_bit_for_bit() {
        let coded = encode_short(b"localhost");
        for value in
            [&b"\x09localhost"[..], b"\x05[::1]", b"\x7f\x00", &[&[0x80 | coded.len() as u8], &coded[..]].concat()]
        {
            let value = if value == b"\x7f\x00" { [value, &[b'a'; 127]].concat() } else { value.to_vec() };
            let block = [b"\x41", &value[..]].concat();
            assert_eq!(rewritten(Rewrite::Refused, &block), Ok(block));
        }
    }

    #[test]
    fn empty_authority_is_replaced_where_no_table_stores_it() {
        assert_eq!(rewritten(Rewrite::Refused, b"\x81\x84"), Ok(b"\x01\x01w\x84".to_vec()));
        assert_eq!(rewritten(Rewrite::Refused, b"\x11\x00"), Ok(b"\x11\x01w".to_vec()));
        assert_eq!(rewritten(Rewrite::Refused, b"\x41\x00"), Ok(b"\x41\x00".to_vec()));
    }

    #[test]
    fn name_taken_from_the_dynamic_table_is_recognised() {
        let block = b"\x41\x01/\x40\x01x\x01y\x7f\x00\x02/v"; // :authority is at 63 when the third field names it
        assert_eq!(rewritten(Rewrite::Refused, block), Ok(b"\x41\x01w\x40\x01x\x01y\x7f\x00\x01w".to_vec()));
    }

    #[test]
    fn what_no_decoder_accepts_is_malformed() {
        for block in [&b"\x80"[..], b"\x41", b"\x41\x05abc", b"\x40\x01", b"\xff\x80\x80\x80\x80\x00", b"\x3f\xff"] {
            assert_eq!(rewritten(Rewrite::Refused, block), Err(Malformed), "{block:x?}");
        }
    }

    proptest! {
        #[test]
        fn decoder_reads_the_same_fields_but_for_the_authority(rewrite in rewrite(), requests in requests()) {
            let (mut encoder, mut sender, mut receiver) = (Encoder::new(), Decoder::new(), Decoder::new());
            let mut blocks = HeaderBlocks::new(rewrite.clone());
            for fields in &requests {
                let (block, in_table) = encoder.encode(fields);
                let sent = sender.decode(&block).expect("the encoder is right");
                let received = receiver.decode(&blocks.rewrite(&block).unwrap()).expect("the tables are in step");
                let never_longer = (sent.iter().zip(&received).zip(&in_table))
                    .all(|(((_, before), (_, after)), in_table)| !in_table || after.len() <= before.len());
                prop_assert!(never_longer || matches!(rewrite, Rewrite::Every(_)));
                prop_assert_eq!(received, expected(&rewrite, sent, &in_table));
            }
        }

        #[test]
        fn any_bytes_are_walked_or_malformed(
            rewrite in rewrite(),
            blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 1..5),
        ) {
            let mut walker = HeaderBlocks::new(rewrite);
            for block in blocks {
                if walker.rewrite(&block).is_err() {
                    break;
                }
            }
        }
    }
}
