//! JSON objects within running text, read byte by byte: the beginning of an object, the position in
//! it, and its end.
//!
//! The text may be cut anywhere and may contain anything. A byte that is not JSON ends an object at
//! once, and is then read as running text, so the scan never goes back.

/// Maximum depth of nested objects and arrays; deeper ones are not read as objects.
const DEPTH_MAX: usize = 64;
/// Maximum bytes of a key or value. Of a longer one, one more byte is stored, so that it equals no
/// text within the limit.
pub const WORD_MAX: usize = 256;
/// Maximum bytes of whitespace between two parts, and of a number.
const GAP_MAX: usize = 64;

/// A part that a byte completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// An object or array began.
    Opened(Bracket),
    /// The key of a member, as it is written, without its quotes.
    Key(&'a [u8]),
    /// A value that is no object and no array, as it is written.
    Scalar(&'a [u8]),
    /// An object or array ended.
    Closed,
    /// The object that had begun is not JSON.
    Broken,
}

/// The two kinds of bracket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bracket {
    Object,
    Array,
}

impl Bracket {
    const fn end(self) -> u8 {
        match self {
            Self::Object => b'}',
            Self::Array => b']',
        }
    }
}

/// Position of the end of the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Position {
    #[default]
    Outside,
    /// After an opening bracket.
    Opened,
    Key,
    /// After a key.
    Named,
    Colon,
    Comma,
    /// In a string, its opening quote included.
    Text,
    /// In a number, or in `true`, `false` or `null`.
    Literal,
    Valued,
}

/// Layout of an object, as whitespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Style {
    pub colon: String,
    /// After a comma between members on one line.
    pub comma: String,
}

impl Default for Style {
    /// The layout of Python and of most chat templates.
    fn default() -> Self {
        Self { colon: " ".to_owned(), comma: " ".to_owned() }
    }
}

/// An object or array that is open.
#[derive(Clone, Debug)]
pub struct Level {
    bracket: Bracket,
    /// Whitespace before its first member; empty until that is read.
    pub lead: String,
}

/// The reader of one text.
#[derive(Clone, Debug, Default)]
pub struct Scanner {
    position: Position,
    levels: Vec<Level>,
    word: Vec<u8>,
    gap: String,
    escaped: bool,
    style: Style,
    /// A comma on one line has been seen in this object.
    commas: bool,
}

impl Scanner {
    /// A scanner that begins with the layout of an earlier text.
    pub fn with(style: Style) -> Self {
        Self { style, ..Self::default() }
    }

    /// Position of the end of the text.
    pub fn position(&self) -> Position {
        self.position
    }

    /// The key or value that the text ends in, as far as it is written; a string with its opening
    /// quote, a key without.
    pub fn word(&self) -> &[u8] {
        &self.word
    }

    /// Whitespace since the last part.
    pub fn gap(&self) -> &str {
        &self.gap
    }

    /// The open objects and arrays, the outermost first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The layout of the last members.
    pub fn style(&self) -> &Style {
        &self.style
    }

    /// Reads a byte and reports the parts that it completed.
    pub fn step(&mut self, byte: u8, mut say: impl FnMut(Event<'_>)) {
        if self.read(byte, &mut say).is_some() {
            return;
        }
        if self.position != Position::Outside {
            self.leave();
            say(Event::Broken);
        }
        if byte == b'{' {
            self.open(Bracket::Object, &mut say);
        }
    }

    fn leave(&mut self) {
        self.position = Position::Outside;
        self.levels.clear();
        self.gap.clear();
    }

    /// `None`: the byte continues no object.
    fn read(&mut self, byte: u8, say: &mut impl FnMut(Event<'_>)) -> Option<()> {
        match self.position {
            Position::Outside => None,
            Position::Key | Position::Text => self.within_quotes(byte, say),
            Position::Literal if is_literal(&self.word, byte) => {
                self.word.push(byte);
                Some(())
            }
            Position::Literal if is_complete(&self.word) => {
                say(Event::Scalar(&self.word));
                self.between(Position::Valued);
                self.read(byte, say)
            }
            _ if byte.is_ascii_whitespace() => {
                self.space(byte);
                Some(())
            }
            Position::Named if byte == b':' => {
                self.between(Position::Colon);
                Some(())
            }
            Position::Opened | Position::Valued if self.levels.last()?.bracket.end() == byte => {
                self.close(say);
                Some(())
            }
            Position::Valued if byte == b',' => {
                self.between(Position::Comma);
                Some(())
            }
            Position::Opened | Position::Comma => self.member(byte, say),
            Position::Colon => {
                self.style.colon.clone_from(&self.gap);
                if !self.commas {
                    // Texts without spaces after colons have none after commas either.
                    self.style.comma.clone_from(&self.gap);
                }
                self.value(byte, say)
            }
            Position::Named | Position::Valued | Position::Literal => None,
        }
    }

    fn between(&mut self, position: Position) {
        self.position = position;
        self.gap.clear();
    }

    fn space(&mut self, byte: u8) {
        if self.gap.len() < GAP_MAX {
            self.gap.push(char::from(byte));
        }
    }

    fn within_quotes(&mut self, byte: u8, say: &mut impl FnMut(Event<'_>)) -> Option<()> {
        if byte < b' ' {
            return None;
        }
        let ends = byte == b'"' && !self.escaped;
        self.escaped = byte == b'\\' && !self.escaped;
        if ends && self.position == Position::Key {
            say(Event::Key(&self.word));
            self.between(Position::Named);
            return Some(());
        }
        if self.word.len() <= WORD_MAX {
            self.word.push(byte);
        }
        if ends {
            say(Event::Scalar(&self.word));
            self.between(Position::Valued);
        }
        Some(())
    }

    /// The first byte of a member, or of an item of an array.
    fn member(&mut self, byte: u8, say: &mut impl FnMut(Event<'_>)) -> Option<()> {
        let level = self.levels.last_mut()?;
        match self.position {
            Position::Opened => level.lead.clone_from(&self.gap),
            _ if self.gap.contains('\n') => {}
            _ => {
                self.style.comma.clone_from(&self.gap);
                self.commas = true;
            }
        }
        match level.bracket {
            Bracket::Array => self.value(byte, say),
            Bracket::Object if byte == b'"' => {
                self.begin(Position::Key);
                Some(())
            }
            Bracket::Object => None,
        }
    }

    fn begin(&mut self, position: Position) {
        self.between(position);
        self.word.clear();
        self.escaped = false;
    }

    fn value(&mut self, byte: u8, say: &mut impl FnMut(Event<'_>)) -> Option<()> {
        match byte {
            b'{' => self.open(Bracket::Object, say),
            b'[' => self.open(Bracket::Array, say),
            b'"' => {
                self.begin(Position::Text);
                self.word.push(byte);
                Some(())
            }
            _ if is_literal(&[], byte) => {
                self.begin(Position::Literal);
                self.word.push(byte);
                Some(())
            }
            _ => None,
        }
    }

    fn open(&mut self, bracket: Bracket, say: &mut impl FnMut(Event<'_>)) -> Option<()> {
        if self.levels.len() >= DEPTH_MAX {
            return None;
        }
        self.commas &= !self.levels.is_empty();
        self.levels.push(Level { bracket, lead: String::new() });
        self.between(Position::Opened);
        say(Event::Opened(bracket));
        Some(())
    }

    fn close(&mut self, say: &mut impl FnMut(Event<'_>)) {
        self.levels.pop();
        self.between(if self.levels.is_empty() { Position::Outside } else { Position::Valued });
        say(Event::Closed);
    }
}

/// True if a word that began as a literal is one.
fn is_complete(word: &[u8]) -> bool {
    word.last().is_some_and(u8::is_ascii_digit) || [&b"true"[..], b"false", b"null"].contains(&word)
}

/// True if a byte continues a word that may become a number, `true`, `false` or `null`. The syntax
/// of numbers is not fully checked.
fn is_literal(word: &[u8], byte: u8) -> bool {
    let names = [&b"true"[..], b"false", b"null"];
    let begins = |name: &&[u8]| name.starts_with(word) && name.get(word.len()) == Some(&byte);
    let numeric = |byte: u8| byte.is_ascii_digit() || b"+-.eE".contains(&byte);
    match word.first() {
        None => byte.is_ascii_digit() || byte == b'-' || names.iter().any(begins),
        Some(&first) if first.is_ascii_digit() || first == b'-' => word.len() < GAP_MAX && numeric(byte),
        Some(_) => names.iter().any(begins),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(text: &str) -> Vec<String> {
        let mut scanner = Scanner::default();
        let mut events = Vec::new();
        let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        for byte in text.bytes() {
            scanner.step(byte, |event| {
                events.push(match event {
                    Event::Opened(Bracket::Object) => "{".to_owned(),
                    Event::Opened(Bracket::Array) => "[".to_owned(),
                    Event::Key(key) => shown(key) + ":",
                    Event::Scalar(scalar) => shown(scalar),
                    Event::Closed => ")".to_owned(),
                    Event::Broken => "!".to_owned(),
                });
            });
        }
        events
    }

    #[test]
    fn an_object_is_reported_part_by_part_and_all_else_is_running_text() {
        assert_eq!(
            events(r#"so: {"a": [1, "b\"c", true], "d": {"e":null}} and {"#),
            ["{", "a:", "[", "1", "\"b\\\"c\"", "true", ")", "d:", "{", "e:", "null", ")", ")", "{"]
        );
        assert_eq!(events("[1] \"x\": }"), [""; 0]);
        assert_eq!(events(r#"{x {"a" 1 {"b":1}"#), ["{", "!", "{", "a:", "!", "{", "b:", "1", ")"]);
        assert_eq!(events("{\"a\": function}"), ["{", "a:", "!"], "a template");
        assert_eq!(events("{\"a\": \"b\nc"), ["{", "a:", "!"], "a string ends in its line");
        assert_eq!(events("{\"a\": 1]"), ["{", "a:", "1", "!"]);
        let deep = "{\"a\":".repeat(DEPTH_MAX + 1);
        assert_eq!(events(&deep).iter().filter(|event| *event == "!").count(), 1);
    }

    #[test]
    fn the_layout_is_that_of_the_last_members() {
        let mut scanner = Scanner::default();
        let mut read = |text: &str| {
            text.bytes().for_each(|byte| scanner.step(byte, |_| {}));
            let Style { colon, comma } = scanner.style().clone();
            (colon, comma, scanner.levels().last().map(|level| level.lead.clone()))
        };
        let of = |a: &str, b: &str, c| (a.to_owned(), b.to_owned(), c);
        assert_eq!(read("{\"a\""), of(" ", " ", Some(String::new())));
        assert_eq!(read(":1,\"b\":{\n  \"c\""), of("", "", Some("\n  ".to_owned())));
        assert_eq!(read(": 2,\n  \"d\": 3}, \"e"), of(" ", " ", Some(String::new())));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_and_an_object_is_found_after_them(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut scanner = Scanner::default();
            let mut opened = 0_i64;
            for &byte in bytes.iter().chain(b"\n{\n{\"k\":7}") {
                let mut ends = 0;
                scanner.step(byte, |event| match event {
                    Event::Opened(_) => ends += 1,
                    Event::Closed => ends -= 1,
                    Event::Broken => ends = -opened,
                    Event::Key(_) | Event::Scalar(_) => {}
                });
                opened += ends;
                prop_assert_eq!(opened, scanner.levels().len() as i64);
                prop_assert!(scanner.word().len() <= WORD_MAX + 1);
            }
            prop_assert_eq!(scanner.position(), Position::Outside);
        }
    }
}
