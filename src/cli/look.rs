//! How tables look: the terminal's width and colours, or plain text of 80 columns.

use std::fmt::Write as _;
use std::io::{IsTerminal, stdout};

/// Without a terminal, or one that does not tell, the width that logs and mails have.
const USUAL_COLUMNS: usize = 80;

/// How the table is shown.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    pub(super) terminal: bool,
    pub(super) colours: bool,
    pub(super) columns: usize,
}

impl Look {
    pub(super) fn of_stdout() -> Self {
        let terminal = stdout().is_terminal();
        let width = terminal
            .then(|| rustix::termios::tcgetwinsize(stdout()).ok())
            .flatten()
            .map(|size| usize::from(size.ws_col));
        Self {
            terminal,
            colours: terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            columns: width.filter(|columns| *columns >= 40).unwrap_or(USUAL_COLUMNS),
        }
    }

    pub(super) fn paint(self, text: &str, word: &str) -> String {
        let colour = match word {
            "registered" | "healthy" | "success" => "32",
            "withdrawn" | "lost" | "refused" | "unhealthy" | "failure" => "31",
            _ => "33",
        };
        if self.colours { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Cut to the width, with an ellipsis: a wrapped table is no table.
    pub(super) fn cut(self, text: &str) -> String {
        if text.chars().count() <= self.columns {
            return text.to_owned();
        }
        text.chars().take(self.columns.saturating_sub(1)).chain(std::iter::once('…')).collect()
    }
}

/// Broken between words, so that no terminal does it within them.
pub(super) fn wrapped(words: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            Some(_) | None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// One more line of `text`, without blanks at its end.
pub(super) fn line(text: &mut String, line: &str) {
    // Writing to a String cannot fail.
    let written = writeln!(text, "{}", line.trim_end());
    debug_assert!(written.is_ok());
}
