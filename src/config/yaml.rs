//! YAML text as a tree in which every word knows its line. Keys are unique; size, depth and aliases are bounded.

use saphyr_parser::{Event, Parser, ScalarStyle, Span, StrInput};
use std::collections::{BTreeMap, BTreeSet};

/// Deeper than any setting lies.
const MAX_DEPTH: usize = 16;

/// What the tree may cost, aliases written out. Far above any honest file, and reached in milliseconds.
const MAX_COST: usize = 4 * 1024 * 1024;

/// What a word costs besides its bytes.
const NODE_COST: usize = 256;

/// Kubernetes' objects lie deeper, the schemas of custom resources above all.
const MAX_MANIFEST_DEPTH: usize = 64;

/// A driver's whole bundle with its custom resources, some times over.
const MAX_MANIFEST_COST: usize = 64 * 1024 * 1024;

/// How much of a foreign word an error repeats.
const MAX_ECHO_CHARS: usize = 64;

/// A value and where it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// From 1.
    pub line: usize,
    /// The value.
    pub value: Value,
}

/// What can be written. Numbers and booleans are text here: the setting decides how it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Nothing, `~` or `null`.
    Nothing,
    /// One word, or several.
    Text(String),
    /// `[a, b]`
    List(Vec<Node>),
    /// `{a: b}`, in the order of the file.
    Map(Vec<Entry>),
}

/// One key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key; unique in its map.
    pub key: String,
    /// Where the key is written.
    pub line: usize,
    /// Its value.
    pub node: Node,
}

/// What is wrong with the text itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct YamlError {
    /// From 1.
    pub line: usize,
    /// What is wrong, and what to do.
    pub message: String,
}

impl Node {
    /// What a map has under `key`.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node),
            Value::Nothing | Value::Text(_) | Value::List(_) => None,
        }
    }

    /// What lies under these keys, each in the one before.
    pub fn at(&self, keys: &[&str]) -> Option<&Self> {
        keys.iter().try_fold(self, |node, key| node.get(key))
    }

    /// Its word, if it is one.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            Value::Nothing | Value::List(_) | Value::Map(_) => None,
        }
    }

    /// Its items; none if it is no list.
    pub fn items(&self) -> &[Self] {
        match &self.value {
            Value::List(items) => items,
            Value::Nothing | Value::Text(_) | Value::Map(_) => &[],
        }
    }
}

impl Value {
    /// For messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Text(_) => "a single value",
            Self::List(_) => "a list",
            Self::Map(_) => "a map of keys",
        }
    }
}

/// A foreign word, short enough for one line.
pub fn echo(text: &str) -> String {
    let short: String = text.chars().take(MAX_ECHO_CHARS).collect();
    if short.len() < text.len() { format!("{short:?}…") } else { format!("{text:?}") }
}

/// Reads the one document of `text`.
///
/// # Errors
/// The first thing that is no YAML, or more than a settings file may be. Never repeats values, only keys.
pub fn parse(text: &str) -> Result<Node, YamlError> {
    let mut reader = Reader::new(text, MAX_DEPTH, MAX_COST);
    let mut document = None;
    loop {
        let (event, span) = reader.next()?;
        match event {
            Event::StreamEnd => break,
            Event::Nothing | Event::StreamStart | Event::DocumentEnd => {}
            Event::DocumentStart(_) if document.is_some() => {
                return Err(error(span, "a second document begins: one file holds one document, so remove the `---`"));
            }
            Event::DocumentStart(_) => {
                let (event, span) = reader.next()?;
                document = Some(reader.node(event, span, 0)?);
            }
            Event::Alias(_)
            | Event::Scalar(..)
            | Event::SequenceStart(..)
            | Event::SequenceEnd
            | Event::MappingStart(..)
            | Event::MappingEnd => return Err(error(span, "not YAML: a value outside of the document")),
        }
    }
    Ok(document.unwrap_or(Node { line: 1, value: Value::Nothing }))
}

/// Reads every document of `text`: Kubernetes' manifests, which are larger and deeper than a settings file.
///
/// # Errors
/// As [`parse`].
pub fn parse_manifests(text: &str) -> Result<Vec<Node>, YamlError> {
    let mut reader = Reader::new(text, MAX_MANIFEST_DEPTH, MAX_MANIFEST_COST);
    let mut documents = Vec::new();
    loop {
        let (event, span) = reader.next()?;
        match event {
            Event::StreamEnd => return Ok(documents),
            Event::Nothing | Event::StreamStart | Event::DocumentEnd => {}
            Event::DocumentStart(_) => {
                // An anchor ends with its document.
                reader.anchored.clear();
                let (event, span) = reader.next()?;
                documents.push(reader.node(event, span, 0)?);
            }
            Event::Alias(_)
            | Event::Scalar(..)
            | Event::SequenceStart(..)
            | Event::SequenceEnd
            | Event::MappingStart(..)
            | Event::MappingEnd => return Err(error(span, "not YAML: a value outside of a document")),
        }
    }
}

struct Reader<'text> {
    max_depth: usize,
    max_cost: usize,
    text: &'text str,
    parser: Parser<'text, StrInput<'text>>,
    /// Complete nodes only: an alias within its own anchor finds nothing.
    anchored: BTreeMap<usize, Node>,
    cost: usize,
}

impl<'text> Reader<'text> {
    fn new(text: &'text str, max_depth: usize, max_cost: usize) -> Self {
        let parser = Parser::new_from_str(text);
        Self { max_depth, max_cost, text, parser, anchored: BTreeMap::new(), cost: 0 }
    }

    fn next(&mut self) -> Result<(Event<'text>, Span), YamlError> {
        match self.parser.next_event() {
            Some(Ok(event)) => Ok(event),
            Some(Err(scan)) => {
                let line = scan.marker().line().max(1);
                let message = match tab_indented(self.text, line) {
                    Some(line) => return Err(YamlError { line, message: TAB.to_owned() }),
                    None => format!("not YAML at column {}: {}", scan.marker().col() + 1, scan.info()),
                };
                Err(YamlError { line, message })
            }
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'text>, span: Span, depth: usize) -> Result<Node, YamlError> {
        let line = span.start.line();
        if depth > self.max_depth {
            return Err(error(span, format!("lies deeper than {} levels; no setting does", self.max_depth)));
        }
        self.pay(NODE_COST, span)?;
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                refuse_tag(tag.is_some(), span)?;
                self.pay(text.len(), span)?;
                if text.contains('\0') {
                    return Err(error(span, "holds a NUL character, which no setting can"));
                }
                let nothing =
                    matches!(style, ScalarStyle::Plain) && matches!(text.as_ref(), "" | "~" | "null" | "Null" | "NULL");
                (anchor, if nothing { Value::Nothing } else { Value::Text(text.into_owned()) })
            }
            Event::SequenceStart(anchor, tag) => {
                refuse_tag(tag.is_some(), span)?;
                (anchor, self.list(depth)?)
            }
            Event::MappingStart(anchor, tag) => {
                refuse_tag(tag.is_some(), span)?;
                (anchor, self.map(depth)?)
            }
            Event::Alias(anchor) => {
                let Some(node) = self.anchored.get(&anchor) else {
                    return Err(error(span, "an alias stands within what it refers to: write the value out"));
                };
                let (node, cost, levels) = (node.clone(), cost(node), levels(node));
                if depth + levels > self.max_depth {
                    return Err(error(span, format!("an alias makes more than {} levels", self.max_depth)));
                }
                self.pay(cost, span)?;
                return Ok(node);
            }
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd
            | Event::SequenceEnd
            | Event::MappingEnd => return Err(error(span, "not YAML: the text ends where a value should be")),
        };
        let node = Node { line, value };
        if anchor > 0 {
            self.pay(cost(&node), span)?;
            self.anchored.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn list(&mut self, depth: usize) -> Result<Value, YamlError> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(Value::List(items)),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
        }
    }

    fn map(&mut self, depth: usize) -> Result<Value, YamlError> {
        let (mut entries, mut keys) = (Vec::new(), BTreeSet::new());
        loop {
            let (event, span) = match self.next()? {
                (Event::MappingEnd, _) => return Ok(Value::Map(entries)),
                other => other,
            };
            let key = self.node(event, span, depth + 1)?;
            let line = span.start.line();
            let Value::Text(key) = key.value else {
                return Err(error(span, format!("a key must be one word, not {}", key.value.kind())));
            };
            if key == "<<" {
                return Err(error(span, "merge keys (<<) are not supported: write the settings out"));
            }
            if !keys.insert(key.clone()) {
                return Err(error(span, format!("the key {} is written twice here: keep one", echo(&key))));
            }
            let (event, span) = self.next()?;
            let node = self.node(event, span, depth + 1)?;
            entries.push(Entry { key, line, node });
        }
    }

    fn pay(&mut self, cost: usize, span: Span) -> Result<(), YamlError> {
        self.cost = self.cost.saturating_add(cost);
        if self.cost > self.max_cost {
            return Err(error(span, "the file becomes too large here, with lists and aliases written out"));
        }
        Ok(())
    }
}

const TAB: &str = "a tab in the indentation: YAML is indented by spaces alone";

fn error(span: Span, message: impl Into<String>) -> YamlError {
    YamlError { line: span.start.line().max(1), message: message.into() }
}

fn refuse_tag(tagged: bool, span: Span) -> Result<(), YamlError> {
    if tagged { Err(error(span, "tags (!…) mean nothing here: remove it, or quote the value")) } else { Ok(()) }
}

/// The parser complains of whatever the tab broke, which may begin a line before it or end a line after.
fn tab_indented(text: &str, line: usize) -> Option<usize> {
    let near = text.lines().enumerate().skip(line.saturating_sub(2)).take(3);
    let tabbed =
        |line: &str| line.chars().take_while(|char| char.is_whitespace() || *char == '-').any(|char| char == '\t');
    near.filter(|(_, line)| tabbed(line)).map(|(at, _)| at + 1).next()
}

fn cost(node: &Node) -> usize {
    NODE_COST
        + match &node.value {
            Value::Nothing => 0,
            Value::Text(text) => text.len(),
            Value::List(items) => items.iter().map(cost).sum(),
            Value::Map(entries) => entries.iter().map(|entry| NODE_COST + entry.key.len() + cost(&entry.node)).sum(),
        }
}

fn levels(node: &Node) -> usize {
    match &node.value {
        Value::Nothing | Value::Text(_) => 0,
        Value::List(items) => 1 + items.iter().map(levels).max().unwrap_or(0),
        Value::Map(entries) => 1 + entries.iter().map(|entry| levels(&entry.node)).max().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::{Duration, SystemTime};

    fn text(line: usize, text: &str) -> Node {
        Node { line, value: Value::Text(text.to_owned()) }
    }

    fn refused(text: &str) -> (usize, String) {
        let error = parse(text).unwrap_err();
        (error.line, error.message)
    }

    #[test]
    fn every_word_knows_its_line() {
        let tree = parse("# comment\na: 1\nb:\n  - x\n  - \"y: z\"\nc: {d: ~}\n").unwrap();
        let entry = |key: &str, line, node| Entry { key: key.to_owned(), line, node };
        assert_eq!(
            tree.value,
            Value::Map(vec![
                entry("a", 2, text(2, "1")),
                entry("b", 3, Node { line: 4, value: Value::List(vec![text(4, "x"), text(5, "y: z")]) }),
                entry(
                    "c",
                    6,
                    Node { line: 6, value: Value::Map(vec![entry("d", 6, Node { line: 6, value: Value::Nothing })]) }
                ),
            ])
        );
    }

    #[test]
    fn an_empty_text_is_nothing() {
        for text in ["", "\n", "# comment\n", "---\n", "~", "\u{feff}"] {
            assert_eq!(parse(text).unwrap().value, Value::Nothing, "{text:?}");
        }
    }

    #[test]
    fn what_is_no_single_plain_document_is_refused_with_its_line() {
        for (text, line, words) in [
            ("a: 1\nb: 2\na: 3\n", 3, "the key \"a\" is written twice"),
            ("a: 1\n---\nb: 2\n", 2, "a second document begins"),
            ("a:\n\tb: 1\n", 2, "a tab in the indentation"),
            ("a:\n  - b\n\t- c\n", 3, "a tab in the indentation"),
            ("a: [1, 2\n", 2, "not YAML at column"),
            ("a: 'b\n", 1, "not YAML at column"),
            ("a: b: c\n", 1, "not YAML at column"),
            ("a: *b\n", 1, "not YAML at column"),
            ("a: &a [*a]\n", 1, "an alias stands within what it refers to"),
            ("a: &a {b: *a}\n", 1, "an alias stands within what it refers to"),
            ("a: !!binary eA==\n", 1, "tags (!…) mean nothing here"),
            ("? [a]\n: b\n", 1, "a key must be one word, not a list"),
            ("~: b\n", 1, "a key must be one word, not nothing"),
            ("a: &a {b: 1}\nc:\n  <<: *a\n", 3, "merge keys"),
            ("a: \"\\0\"\n", 1, "holds a NUL character"),
        ] {
            let (seen, message) = refused(text);
            assert!(message.contains(words) && seen == line, "{text:?}: line {seen}: {message}");
        }
    }

    #[test]
    fn aliases_stand_for_what_they_name() {
        let Value::Map(entries) = parse("a: &a [x]\nb: *a\n").unwrap().value else { panic!("no map") };
        assert_eq!(entries[0].node, entries[1].node);
    }

    #[test]
    fn every_document_of_a_manifest_is_read_and_none_is_endless() {
        let documents = parse_manifests("---\na: &x 1\n---\n# nothing\n---\nb: 2\n").unwrap();
        assert_eq!(
            documents.iter().map(|node| node.value.kind()).collect::<Vec<_>>(),
            ["a map of keys", "nothing", "a map of keys"]
        );
        assert!(parse_manifests("a: &x 1\n---\nb: *x\n").is_err(), "an anchor of another document");
        assert_eq!(parse_manifests("").unwrap(), []);
        assert!(
            parse_manifests(&"{a: ".repeat(20)).is_err()
                && parse_manifests(&("{a: ".repeat(20) + &"}".repeat(20))).is_ok()
        );
        assert!(parse_manifests(&("{a: ".repeat(80) + &"}".repeat(80))).is_err());
        let bomb: String = (0..400_000).map(|at| format!("k{at}: x\n")).collect();
        assert!(parse_manifests(&bomb).is_err());
    }

    #[test]
    fn bombs_and_depths_are_refused_at_once() {
        let mut laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            laughs += &format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 9].join(", "));
        }
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(300_000), vec!["*a"; 10_000].join(", "));
        let mebibyte = 1024 * 1024;
        for text in [
            laughs,
            long,
            "[".repeat(mebibyte),
            "{".repeat(mebibyte),
            "{---".to_owned(),
            "{a: ".repeat(mebibyte / 4),
            "- ".repeat(mebibyte / 2),
            "? ".repeat(mebibyte / 2),
            "- a\n".repeat(mebibyte / 4),
            "[a,".repeat(mebibyte / 3),
            format!("[{}]", "a,".repeat(mebibyte / 2)),
            format!("[{}", "\"a\":".repeat(mebibyte / 4)),
            "&a ".repeat(mebibyte / 3),
            "!a ".repeat(mebibyte / 3),
            (0..100_000).map(|at| format!("k{at}: x\n")).collect(),
            (0..60_000).map(|at| format!("&k{at} k{at}: x\n")).collect(),
        ] {
            let began = SystemTime::now();
            assert!(parse(&text).is_err(), "{}", &text[..40.min(text.len())]);
            let took = began.elapsed().unwrap_or_default();
            assert!(took < Duration::from_secs(10), "{took:?}: {}", &text[..40.min(text.len())]);
        }
    }

    #[test]
    fn long_honest_text_is_quick() {
        for text in [
            format!("a: {}", "x".repeat(900_000)),
            format!("a: |\n{}", " x\n".repeat(300_000)),
            "#\n".repeat(500_000),
            format!("a: \"{}\"", "\\n".repeat(400_000)),
        ] {
            let began = SystemTime::now();
            assert!(parse(&text).is_ok(), "{}", &text[..20]);
            assert!(began.elapsed().unwrap_or_default() < Duration::from_secs(10), "{}", &text[..20]);
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*") {
            drop(parse(&text));
        }

        #[test]
        fn no_near_miss_panics_or_hangs(text in "([a-c]|[-:?,&*!|>'\"%#\\[\\]{}~@]| |\n|  |---|\\.\\.\\.|\t|: |- ){0,40}") {
            drop(parse(&text));
        }
    }
}
