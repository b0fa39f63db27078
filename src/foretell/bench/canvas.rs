//! Text for a terminal: wrapped into columns, with speculated text in colour.
//!
//! Text is wrapped by characters before it is coloured, so colour codes do not count as width and a
//! coloured run may continue on the next line.

/// Terminal escape: green text.
const SPECULATED: &str = "\x1b[32m";
/// Terminal escape: faint text.
const FAINT: &str = "\x1b[2m";
/// Terminal escape: bold text.
const BOLD: &str = "\x1b[1m";
/// Terminal escape: normal text.
const PLAIN: &str = "\x1b[0m";

/// A character, and true if speculation produced it.
type Inked = (char, bool);

/// Capabilities of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Canvas {
    pub width: usize,
    /// True if colours may be used.
    pub colour: bool,
    /// Maximum number of lines of one text; further lines are counted instead of shown.
    pub lines: usize,
}

impl Canvas {
    pub const fn terminal(width: usize, colour: bool) -> Self {
        Self { width, colour, lines: 14 }
    }

    /// For a pipe or a file: no colour, no limit of lines.
    pub const fn plain() -> Self {
        Self { width: 100, colour: false, lines: usize::MAX }
    }

    /// True if two texts fit side by side.
    pub const fn is_wide(&self) -> bool {
        self.width >= 96
    }

    /// The text in bold, if colours may be used.
    pub fn bold(&self, text: &str) -> String {
        self.wrapped(BOLD, text)
    }

    /// The text in faint print, if colours may be used.
    pub fn faint(&self, text: &str) -> String {
        self.wrapped(FAINT, text)
    }

    /// The text in the colour of speculated text, if colours may be used.
    pub fn speculated(&self, text: &str) -> String {
        self.wrapped(SPECULATED, text)
    }

    fn wrapped(&self, code: &str, text: &str) -> String {
        if self.colour { format!("{code}{text}{PLAIN}") } else { text.to_owned() }
    }

    /// One text, indented by two spaces; each run is text with its number of tokens.
    pub fn column<'a>(&self, runs: impl Iterator<Item = (&'a str, usize)>) -> String {
        let lines = self.cut(wrap(runs, self.width.saturating_sub(2)));
        lines
            .iter()
            .map(|line| format!("  {}\n", self.ink(line)))
            .fold(String::new(), |text, line| text + &line)
    }

    /// Two texts side by side under their headings; each run is text with its number of tokens.
    pub fn columns<'a>(
        &self,
        headings: [&str; 2],
        first: impl Iterator<Item = (&'a str, usize)>,
        second: impl Iterator<Item = (&'a str, usize)>,
    ) -> String {
        let width = self.width.saturating_sub(7) / 2;
        let heading = |text: &str| vec![text.chars().map(|char| (char, false)).collect::<Vec<_>>()];
        let headings = headings.map(heading);
        let [first_heading, second_heading] = headings;
        let first = [first_heading, self.cut(wrap(first, width))].concat();
        let second = [second_heading, self.cut(wrap(second, width))].concat();
        let empty = Vec::new();
        let mut text = String::new();
        for row in 0..first.len().max(second.len()) {
            let (one, other) = (first.get(row).unwrap_or(&empty), second.get(row).unwrap_or(&empty));
            let padding = " ".repeat(width.saturating_sub(one.len()));
            let rule = self.faint("│");
            let line = format!("  {}{padding} {rule} {}", self.ink(one), self.ink(other));
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    fn cut(&self, mut lines: Vec<Vec<Inked>>) -> Vec<Vec<Inked>> {
        let over = lines.len().saturating_sub(self.lines);
        if over > 0 {
            lines.truncate(self.lines.saturating_sub(1));
            lines.push(format!("… {} more lines", over + 1).chars().map(|char| (char, false)).collect());
        }
        lines
    }

    fn ink(&self, line: &[Inked]) -> String {
        let mut text = String::new();
        let mut inside = false;
        for &(char, speculated) in line {
            if self.colour && speculated != inside {
                text.push_str(if speculated { SPECULATED } else { PLAIN });
                inside = speculated;
            }
            text.push(char);
        }
        if inside {
            text.push_str(PLAIN);
        }
        text
    }
}

/// Wraps runs into lines of at most `width` characters. A run of more than one token came from a
/// round of speculation.
fn wrap<'a>(runs: impl Iterator<Item = (&'a str, usize)>, width: usize) -> Vec<Vec<Inked>> {
    let mut lines = vec![Vec::new()];
    for (text, tokens) in runs {
        for char in text.chars() {
            let shown = match char {
                '\n' => {
                    lines.push(Vec::new());
                    continue;
                }
                '\t' => "    ",
                // Control characters in a model's output must not move the cursor.
                char if char.is_control() => "·",
                char => &char.to_string(),
            };
            for char in shown.chars() {
                if lines.last().is_some_and(|line| line.len() >= width.max(1)) {
                    lines.push(Vec::new());
                }
                if let Some(line) = lines.last_mut() {
                    line.push((char, tokens > 1));
                }
            }
        }
    }
    while lines.len() > 1 && lines.last().is_some_and(Vec::is_empty) {
        lines.pop();
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: [(&str, usize); 3] = [("ab", 1), ("cd\ne", 3), ("f", 1)];

    #[test]
    fn colour_follows_the_runs_over_line_ends() {
        let canvas = Canvas::terminal(80, true);
        assert_eq!(canvas.column(RUNS.into_iter()), "  ab\u{1b}[32mcd\u{1b}[0m\n  \u{1b}[32me\u{1b}[0mf\n");
    }

    #[test]
    fn a_pipe_gets_the_text_and_nothing_else() {
        assert_eq!(Canvas::plain().column(RUNS.into_iter()), "  abcd\n  ef\n");
        assert_eq!(Canvas::plain().bold("x"), "x");
    }

    #[test]
    fn columns_stand_side_by_side() {
        let canvas = Canvas { width: 27, colour: false, lines: 3 };
        let left = [("one two three", 1)];
        let right = [("1\n2\n3\n4\n5", 2)];
        assert_eq!(
            canvas.columns(["plain", "draft"], left.into_iter(), right.into_iter()),
            "  plain      │ draft\n  one two th │ 1\n  ree        │ 2\n             │ … 3 more lines\n"
        );
    }

    #[test]
    fn output_cannot_move_the_cursor() {
        assert_eq!(Canvas::plain().column([("a\u{1b}[2J\tb\r\n\n", 1)].into_iter()), "  a·[2J    b·\n");
    }
}
