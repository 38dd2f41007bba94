//! docs/troubleshooting.md quotes what the program really says, and leaves no reason out.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;

const DOC: &str = include_str!("../docs/troubleshooting.md");

/// The operating system's words, and gRPC's.
const NOT_OURS: [&str; 3] = ["No such file or directory", "Connection refused", "Unimplemented"];

#[test]
fn every_quoted_log_line_is_one_of_ours_with_its_fields() {
    let sources = sources();
    let lines = blocks("log");
    assert!(lines.len() > 30);
    for line in lines {
        let (message, fields) = line.strip_prefix('"').unwrap().split_once('"').unwrap();
        let says = |source: &&Source| source.literals.iter().any(|literal| fits(literal, message));
        let saying: Vec<&Source> = sources.iter().filter(says).collect();
        assert!(!saying.is_empty(), "no source says {message:?}");
        let before_equals = fields.split('=').rev().skip(1);
        let keys: Vec<&str> = before_equals.filter_map(|text| text.rsplit(' ').next()).collect();
        let has = |source: &&Source, key: &str| source.text.contains(&format!("{key} = "));
        assert!(
            saying.iter().any(|source| keys.iter().all(|key| has(source, key))),
            "{message:?} does not have all of {keys:?}"
        );
    }
}

#[test]
fn every_quoted_sentence_of_status_is_one_of_ours() {
    let sources = sources();
    for line in blocks("status") {
        let (_, words) = line.split_once("  ").unwrap();
        let words = words.trim().replace('…', "X");
        let said = sources.iter().flat_map(|source| &source.literals).any(|literal| fits(literal, &words));
        assert!(said, "{words:?}");
    }
}

#[test]
fn every_quoted_word_of_the_tables_is_one_of_ours() {
    let sources = sources();
    let said = |words: &str| sources.iter().flat_map(|source| &source.literals).any(|literal| literal.contains(words));
    for heading in ["# Troubleshooting", "## Waiting for the driver", "## Liveness fails and the driver is restarted"] {
        let quoted = first_cells(heading);
        assert!(quoted.len() >= 4, "{heading}");
        for words in quoted {
            let words = NOT_OURS.iter().fold(words.to_owned(), |words, theirs| words.replace(theirs, "…"));
            for part in words.split(['…', ':']).map(str::trim).filter(|part| part.len() > 3) {
                assert!(said(part), "{heading}: {part:?} of {words:?}");
            }
        }
    }
}

#[test]
fn every_reason_of_a_probe_is_explained() {
    let mut found = 0;
    for source in sources().iter().filter(|source| !source.path.contains("/cli/")) {
        for after in source.text.split("Reason::new(").skip(1) {
            let Some((code, _)) = after.trim_start().strip_prefix('"').and_then(|rest| rest.split_once('"')) else {
                continue;
            };
            found += 1;
            // It is no probe's word, and the log says the same in another.
            assert!(code == "HeldFromBefore" || DOC.contains(&format!("`{code}`")), "{code} ({})", source.path);
        }
    }
    assert!(found > 10);
}

#[test]
fn every_link_leads_somewhere() {
    let anchors: Vec<String> = DOC.lines().filter(|line| line.starts_with('#')).map(anchor).collect();
    for target in DOC.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
        match target.strip_prefix('#') {
            Some(wanted) => assert!(anchors.iter().any(|anchor| anchor == wanted), "{target}"),
            None => {
                let (file, wanted) = target.split_once('#').unwrap_or((target, ""));
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(file);
                let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{target}: {error}"));
                let mut headings = text.lines().filter(|line| line.starts_with('#')).map(anchor);
                assert!(wanted.is_empty() || headings.any(|anchor| anchor == wanted), "{target}");
            }
        }
    }
}

/// As GitHub makes it of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().to_lowercase();
    kept.chars().filter(|char| char.is_alphanumeric() || " -".contains(*char)).collect::<String>().replace(' ', "-")
}

/// The lines of all fenced blocks of a kind.
fn blocks(kind: &str) -> Vec<&'static str> {
    let fence = format!("```{kind}\n");
    let blocks = DOC.split(fence.as_str()).skip(1);
    blocks.flat_map(|block| block.split("```").next().unwrap().lines()).collect()
}

/// What stands in backticks in the first cells under a heading.
fn first_cells(heading: &str) -> Vec<&'static str> {
    let lines = DOC.lines().skip_while(|line| *line != heading).skip(1).take_while(|line| !line.starts_with('#'));
    let cells =
        lines.filter_map(|line| line.strip_prefix("| ")?.split(" |").next()).filter(|cell| cell.starts_with('`'));
    cells.map(|cell| cell.trim_matches('`')).filter(|cell| !cell.contains('`')).collect()
}

/// Whether a literal of the source, its `{…}` filled in, is the text.
fn fits(literal: &str, text: &str) -> bool {
    let mut pieces = Vec::new();
    let mut rest = literal;
    while let Some((before, after)) = rest.split_once('{') {
        pieces.push(before);
        rest = after.split_once('}').map_or("", |(_, after)| after);
    }
    if pieces.is_empty() {
        return literal == text;
    }
    // "{}: {}" would be anything.
    if pieces.iter().map(|piece| piece.len()).sum::<usize>() + rest.len() < 12 {
        return false;
    }
    let Some(mut left) = text.strip_prefix(pieces[0]).and_then(|text| text.strip_suffix(rest)) else { return false };
    pieces[1..].iter().all(|piece| match left.split_once(piece) {
        Some((_, after)) => {
            left = after;
            true
        }
        None => false,
    })
}

struct Source {
    path: String,
    text: String,
    literals: Vec<String>,
}

/// Every source file without its tests.
fn sources() -> Vec<Source> {
    let mut sources = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let whole = fs::read_to_string(&path).unwrap();
                let text = whole.split("#[cfg(test)]\nmod tests").next().unwrap().to_owned();
                sources.push(Source { path: path.display().to_string(), literals: literals(&text), text });
            }
        }
    }
    sources
}

/// The text of the string literals. Raw ones are taken as they are; a quoted quote character is none.
fn literals(source: &str) -> Vec<String> {
    let mut literals = Vec::new();
    for line_or_more in without_comments(source).replace("'\"'", "' '").split('"').scan(String::new(), joined) {
        literals.extend(line_or_more);
    }
    literals.into_iter().skip(1).step_by(2).map(|literal| unescaped(&literal)).collect()
}

/// Puts together what an escaped quote has taken apart; the pieces are code and literals in turns.
#[expect(clippy::unnecessary_wraps, reason = "as scan wants it")]
fn joined(pending: &mut String, piece: &str) -> Option<Option<String>> {
    pending.push_str(piece);
    if piece.ends_with('\\') && !piece.ends_with("\\\\") {
        pending.push('"');
        return Some(None);
    }
    Some(Some(std::mem::take(pending)))
}

/// A backslash at a line's end, and the next line's indentation, are nothing.
fn unescaped(literal: &str) -> String {
    let mut parts = literal.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |whole, part| whole + part.trim_start()).replace("\\\"", "\"")
}

fn without_comments(source: &str) -> String {
    let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.map(|line| format!("{line}\n")).collect()
}
