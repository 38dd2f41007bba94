//! Reads HPACK's Huffman code as far as host names need it.

/// The symbols whose codes have 5 to 8 bits, as (bits, code of the first symbol, symbols in the order of their codes).
///
/// They cover names, IPv4 addresses, ports and percent-encoded paths. The code is canonical, so a list per length says
/// it all. Source: RFC 7541, appendix B.
const SHORT_CODES: [(u32, usize, &[u8]); 4] = [
    (5, 0x00, b"012aceiost"),
    (6, 0x14, b" %-./3456789=A_bdfghlmnpru"),
    (7, 0x5c, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, 0xf8, b"&*,;XZ"),
];

/// The string that `coded` stands for; `None` if it is malformed or holds a symbol with a longer code, as `[` or `@`.
pub(super) fn decode_short(coded: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(coded.len() * 8 / 5);
    let (mut code, mut bits) = (0_usize, 0_u32);
    for byte in coded {
        for bit in (0..8).rev() {
            code = code << 1 | usize::from(byte >> bit & 1);
            bits += 1;
            if let Some(symbol) = symbol(code, bits) {
                decoded.push(symbol);
                (code, bits) = (0, 0);
            } else if bits >= 8 {
                return None;
            }
        }
    }
    let only_padding = code + 1 == 1 << bits; // ones, fewer than 8 of them
    only_padding.then_some(decoded)
}

fn symbol(code: usize, bits: u32) -> Option<u8> {
    let (_, first, symbols) = SHORT_CODES.iter().find(|(length, ..)| *length == bits)?;
    symbols.get(code.checked_sub(*first)?).copied()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use fluke_hpack::huffman::HuffmanDecoder;
    use proptest::prelude::*;

    /// Encodes with the codes above; panics on symbols they lack.
    pub(in super::super) fn encode_short(text: &[u8]) -> Vec<u8> {
        let bits: String = text
            .iter()
            .map(|symbol| {
                let (bits, first, at) = SHORT_CODES
                    .iter()
                    .find_map(|(bits, first, symbols)| Some((*bits, *first, symbols.iter().position(|s| s == symbol)?)))
                    .expect("tests only code symbols with short codes");
                format!("{:0width$b}", first + at, width = bits as usize)
            })
            .collect();
        let padding = "1".repeat((8 - bits.len() % 8) % 8);
        let padded = bits + &padding;
        (0..padded.len()).step_by(8).map(|at| u8::from_str_radix(&padded[at..at + 8], 2).unwrap()).collect()
    }

    #[test]
    fn every_short_code_is_the_standards_code() {
        for (_, _, symbols) in SHORT_CODES {
            let coded = encode_short(symbols);
            assert_eq!(HuffmanDecoder::new().decode(&coded).unwrap(), symbols);
            assert_eq!(decode_short(&coded).unwrap(), symbols);
        }
    }

    #[test]
    fn padding_of_a_whole_byte_is_refused() {
        assert_eq!(decode_short(&[0xff]), None);
        assert_eq!(decode_short(&[]), Some(vec![]));
    }

    proptest! {
        #[test]
        fn whatever_is_read_is_what_a_full_decoder_reads(coded in prop::collection::vec(any::<u8>(), 0..12)) {
            if let Some(decoded) = decode_short(&coded) {
                prop_assert_eq!(HuffmanDecoder::new().decode(&coded).ok(), Some(decoded));
            }
        }
    }
}
