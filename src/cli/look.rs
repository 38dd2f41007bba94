//! How tables look: the terminal's width and colours, or plain text of 80 columns.

use std::fmt::Write as _;
use std::io::{IsTerminal, stdout};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Without a terminal, or one that does not tell, the width that logs and mails have.
const USUAL_COLUMNS: usize = 80;

/// Names are cut to this before a column is left out.
const LEAST_NAME_COLUMNS: usize = 12;

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
            columns: width.filter(|columns| *columns > 0).unwrap_or(USUAL_COLUMNS),
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

    /// Cut to the terminal's width: a wrapped table is no table.
    pub(super) fn cut(self, text: &str) -> String {
        cut(text, self.columns)
    }
}

/// Cells that `text` takes in a terminal: a letter of Chinese takes two, a combining mark none.
pub(super) fn width(text: &str) -> usize {
    text.width()
}

/// With blanks up to `columns`; longer ones are cut.
pub(super) fn padded(text: &str, columns: usize) -> String {
    let text = cut(text, columns);
    let blanks = columns.saturating_sub(width(&text));
    text + &" ".repeat(blanks)
}

/// What fits into `columns`, with an ellipsis where something was cut.
pub(super) fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let (head, _) = split(text, columns.saturating_sub(1));
    if columns == 0 { String::new() } else { format!("{head}…") }
}

/// As many letters as fit into `columns`, and the rest.
fn split(text: &str, columns: usize) -> (&str, &str) {
    let mut cells = 0;
    let end = text.char_indices().find(|(_, letter)| {
        cells += letter.width().unwrap_or(1);
        cells > columns
    });
    text.split_at(end.map_or(text.len(), |(at, _)| at))
}

/// Broken between words, so that no terminal does it within them; a word that is longer than a line is broken, too.
pub(super) fn wrapped(words: &str, columns: usize) -> Vec<String> {
    // The widest letter must fit.
    let columns = columns.max(2);
    let mut lines = vec![String::new()];
    for mut word in words.split_whitespace() {
        let room = lines.last().map_or(0, |line| columns.saturating_sub(width(line)));
        match lines.last_mut() {
            Some(line) if line.is_empty() => {}
            Some(line) if width(word) < room => line.push(' '),
            Some(_) | None => lines.push(String::new()),
        }
        while width(word) > columns {
            let (head, rest) = split(word, columns);
            lines.last_mut().expect("there is a first line").push_str(head);
            lines.push(String::new());
            word = rest;
        }
        lines.last_mut().expect("there is a first line").push_str(word);
    }
    lines
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) width: usize,
    /// Numbers are set to the right.
    pub(super) right: bool,
    /// Left out of a terminal too narrow for all, the highest first; 0 stays.
    pub(super) dispensable: u8,
}

impl Column {
    fn cell(self, text: &str) -> String {
        if self.right {
            let text = cut(text, self.width);
            " ".repeat(self.width.saturating_sub(width(&text))) + &text
        } else {
            padded(text, self.width)
        }
    }
}

/// The numbers of the columns that fit side by side, two blanks between them. The first one, names, gives way before another
/// is left out.
pub(super) fn fitting(columns: &mut [Column], room: usize) -> Vec<usize> {
    let mut shown: Vec<usize> = (0..columns.len()).collect();
    loop {
        let needed = shown.iter().map(|at| columns[*at].width + 2).sum::<usize>().saturating_sub(2);
        let missing = needed.saturating_sub(room);
        let names = columns.first().map_or(0, |names| names.width);
        let spare = names.saturating_sub(LEAST_NAME_COLUMNS);
        let least = (0..shown.len()).max_by_key(|at| columns[shown[*at]].dispensable);
        match least {
            Some(at) if missing > spare && columns[shown[at]].dispensable > 0 => drop(shown.remove(at)),
            Some(_) | None => {
                // Nothing is left to leave out: then even names are cut to what there is.
                let least = LEAST_NAME_COLUMNS.min(names);
                let width = names.saturating_sub(missing);
                if let Some(names) = columns.first_mut() {
                    names.width = if missing > spare { width.max(1) } else { width.max(least) };
                }
                return shown;
            }
        }
    }
}

/// The titles of the columns `shown`.
pub(super) fn titles(columns: &[Column], shown: &[usize]) -> String {
    let titles: Vec<String> = shown.iter().map(|at| columns[*at].cell(columns[*at].title)).collect();
    titles.join("  ")
}

/// One row: a text for each column, and the word that it is painted by.
pub(super) fn row(look: Look, columns: &[Column], shown: &[usize], cells: &[(&str, Option<&str>)]) -> String {
    let cell = |at: &usize| {
        let (text, word) = cells[*at];
        let text = columns[*at].cell(text);
        word.map_or_else(|| text.clone(), |word| look.paint(&text, word))
    };
    shown.iter().map(cell).collect::<Vec<_>>().join("  ")
}

/// One more line of `text`, without blanks at its end.
pub(super) fn line(text: &mut String, line: &str) {
    // Writing to a String cannot fail.
    let written = writeln!(text, "{}", line.trim_end());
    debug_assert!(written.is_ok());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_counted_not_letters() {
        assert_eq!((width("eth"), width("網路"), width("e\u{301}")), (3, 4, 1));
        assert_eq!(padded("網路", 6), "網路  ");
        assert_eq!(
            (cut("網路斷", 5), cut("網路斷", 6), cut("abc", 2), cut("abc", 0)),
            ("網路…".into(), "網路斷".into(), "a…".into(), String::new())
        );
    }

    #[test]
    fn no_line_is_longer_than_told_and_no_letter_is_lost() {
        let words = "a /sys/class/infiniband/mlx5_0/ports/1/state 網路斷了網路斷了 b c";
        for columns in 2..50 {
            let lines = wrapped(words, columns);
            assert!(lines.iter().all(|line| width(line) <= columns && !line.is_empty()), "{columns}: {lines:?}");
            let letters = |text: &str| text.chars().filter(|letter| !letter.is_whitespace()).collect::<String>();
            assert_eq!(letters(&lines.concat()), letters(words), "{columns}");
        }
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
    }

    #[test]
    fn names_give_way_and_then_columns_that_can_be_spared() {
        let column = |width, dispensable| Column { title: "T", width, right: false, dispensable };
        for (room, shown, names) in [
            (37, &[0, 1, 2][..], 20),
            (36, &[0, 1, 2], 19),
            (29, &[0, 1, 2], 12),
            (28, &[0, 2], 19),
            (20, &[0], 20),
            (3, &[0], 3),
        ] {
            let mut columns = [column(20, 0), column(6, 2), column(7, 1)];
            assert_eq!((fitting(&mut columns, room).as_slice(), columns[0].width), (shown, names), "{room}");
        }
    }
}
