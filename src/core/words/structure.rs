//! Detects if a text is structured at its end, so that one wrong token would break it: JSON from
//! its first character on, or a fenced block of JSON.

/// The end of a text, read character by character.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Structure {
    /// The first non-space character of the text was a bracket of JSON.
    json: bool,
    begun: bool,
    /// The open fence of a JSON block: its character and length.
    fence: Option<(char, usize)>,
    /// The beginning of the current line, without leading spaces, up to [`LINE`] characters.
    line: String,
}

/// Maximum number of characters of a line that are examined.
const LINE: usize = 16;

impl Structure {
    /// Reads further text.
    pub fn push(&mut self, text: &str) {
        for character in text.chars() {
            self.read(character);
        }
    }

    /// True if the text that follows is free text.
    pub fn is_free(&self) -> bool {
        !self.json && self.fence.is_none()
    }

    fn read(&mut self, character: char) {
        if !self.begun && !character.is_whitespace() {
            self.begun = true;
            self.json = matches!(character, '{' | '[');
        }
        if character == '\n' {
            self.line.clear();
            return;
        }
        if self.line.len() >= LINE || (self.line.is_empty() && character.is_whitespace()) {
            return;
        }
        self.line.push(character);
        let (mark, length, rest) = fence(&self.line);
        match self.fence {
            Some((open, least)) if mark == Some(open) && length >= least && rest.trim().is_empty() => {
                // It is closed; the rest of its line opens no other.
                self.fence = None;
                self.line = "x".repeat(LINE);
            }
            Some(_) => {}
            None => {
                let json = rest.trim_start().get(..4).is_some_and(|word| word.eq_ignore_ascii_case("json"));
                if let Some(mark) = mark
                    && length >= 3
                    && json
                {
                    self.fence = Some((mark, length));
                }
            }
        }
    }
}

/// The fence character that the line begins with, if any, its number of repetitions, and the rest
/// of the line.
fn fence(line: &str) -> (Option<char>, usize, &str) {
    let mark = line.chars().next().filter(|mark| matches!(mark, '`' | '~'));
    let length = mark.map_or(0, |mark| line.chars().take_while(|&other| other == mark).count());
    (mark, length, line.get(length..).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(text: &str) -> bool {
        let mut structure = Structure::default();
        // Fed character by character and at once.
        text.chars().for_each(|character| structure.push(&character.to_string()));
        let mut whole = Structure::default();
        whole.push(text);
        assert_eq!(structure, whole);
        whole.is_free()
    }

    #[rstest::rstest]
    #[case("", true)]
    #[case("A text with { and [", true)]
    #[case("  \n{\"a\": 1", false)]
    #[case("[1, 2]\nand more", false)]
    #[case("So:\n```json\n{\"a\"", false)]
    #[case("So:\n  ``` JSON5\n{", false)]
    #[case("So:\n~~~~jsonl\n~~~\n", false)]
    #[case("So:\n```json\n{}\n```\nDone", true)]
    #[case("So:\n```json\n{\"a\": \"`\"}\n``", false)]
    #[case("So:\n```rust\nlet a", true)]
    #[case("inline ```json", true)]
    #[case("```json\n{}\n``` \nand\n```json\n", false)]
    fn json_is_detected_by_its_first_character_or_its_fence(#[case] text: &str, #[case] wanted: bool) {
        assert_eq!(free(text), wanted);
    }
}
