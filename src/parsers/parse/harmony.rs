//! gpt-oss: an output of messages in the format Harmony, each a header and a text between marker
//! tokens.
//!
//! The server hands the ids to a parser that knows one vocabulary by heart and decodes them itself,
//! so markers are recognised by id, and what only spells one is text. The header tells the part:
//! its channel, or a recipient that is a function. A header that cannot be read hides its message;
//! one that the output ends in is content, as the model wrote it.

use super::{ParsedMessage, Request, ToolCall, Unsure, Vocabulary, python, steps};

use foretell_core::session::parse::{CallDelta, Parse, Parsed};
use foretell_core::units::TokenId;

use std::borrow::Cow;

/// The tokens from here on are special; `<|reserved_ID|>` if they are none of these.
const FIRST_SPECIAL: TokenId = 199_998;
const SPECIAL: [(TokenId, &str); 9] = [
    (FIRST_SPECIAL, "<|startoftext|>"),
    (199_999, "<|endoftext|>"),
    (RETURN, "<|return|>"),
    (200_003, CONSTRAIN),
    (200_005, CHANNEL),
    (START, "<|start|>"),
    (END, "<|end|>"),
    (MESSAGE, "<|message|>"),
    (CALL, "<|call|>"),
];
const RETURN: TokenId = 200_002;
const START: TokenId = 200_006;
const END: TokenId = 200_007;
const MESSAGE: TokenId = 200_008;
const CALL: TokenId = 200_012;
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";

const ROLES: [&str; 5] = ["user", ASSISTANT, "system", "developer", TOOL];
const ASSISTANT: &str = "assistant";
const TOOL: &str = "tool";
/// Recipients that are tools of the server, not functions of the request.
const BUILT_IN: [&str; 3] = ["python", "browser", "container"];
const FUNCTIONS: &str = "functions.";

fn special(token: TokenId) -> Option<Cow<'static, str>> {
    let known = SPECIAL.iter().find(|(id, _)| *id == token);
    let reserved = || Cow::Owned(format!("<|reserved_{token}|>"));
    (token >= FIRST_SPECIAL).then(|| known.map_or_else(reserved, |(_, text)| Cow::Borrowed(*text)))
}

/// The part of the answer that a message is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum MessagePart {
    Reasoning,
    Content,
    Call(String),
    /// None: it is dropped.
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Header {
    part: MessagePart,
    /// Its tokens count as reasoning.
    is_reasoning: bool,
    /// Its text is JSON, as far as the header says.
    is_json: bool,
    /// The parts of an answer that is not streamed, which leaves out messages to others.
    is_assistant: bool,
}

impl Header {
    /// Reads the text of a header; `opened` is the role if the prompt contains it. `None` if the
    /// server cannot read it.
    fn read(text: &str, opened: Option<&'static str>) -> Option<Self> {
        let (channel, rest) = take_channels(text)?;
        let rest = rest.trim().replace(CONSTRAIN, " <|constrain|>");
        let mut parts: Vec<&str> = rest.split_ascii_whitespace().collect();
        let role = match opened {
            Some(role) => role,
            None => read_role(&mut parts)?,
        };
        if parts.first() == Some(&role) {
            parts.remove(0);
        }
        let recipient = |text| str::strip_prefix(text, "to=").unwrap_or(text);
        let (recipient, kind) = match parts.as_slice() {
            [] => (None, None),
            [one] => (Some(recipient(one)), None),
            [one, kind] if !kind.starts_with("to=") => (Some(recipient(one)), Some(*kind)),
            _ => return None,
        };
        let recipient = recipient.and_then(without_constrain);
        let channel = channel.as_deref();
        let part = match (channel, recipient) {
            (_, Some(name)) if is_function(name) => {
                MessagePart::Call(name.strip_prefix(FUNCTIONS).unwrap_or(name).to_owned())
            }
            (Some("analysis"), _) => MessagePart::Reasoning,
            (Some("final"), _) | (Some("commentary"), None) => MessagePart::Content,
            _ => MessagePart::Nothing,
        };
        Some(Self {
            part,
            is_reasoning: channel == Some("analysis")
                || (channel == Some("commentary") && recipient.is_some()),
            is_json: kind.is_none_or(|kind| kind.contains("json")),
            is_assistant: role == ASSISTANT,
        })
    }
}

/// The first channel of a header, and the header without its channels. `None` if the first has no
/// name.
fn take_channels(header: &str) -> Option<(Option<String>, String)> {
    let mut channel = None;
    let mut parts = header.split(CHANNEL);
    let mut rest = parts.next().unwrap_or("").to_owned();
    for part in parts {
        let end = part.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(part.len());
        let (name, after) = part.split_at(end);
        if channel.is_none() {
            if name.is_empty() {
                return None;
            }
            channel = Some(name.to_owned());
        }
        rest.push_str(after);
        steps::read(part.len());
    }
    Some((channel, rest))
}

/// The role that a header begins with. An unknown one is the name of a tool if more follows.
fn read_role(parts: &mut Vec<&str>) -> Option<&'static str> {
    let name = *parts.first()?;
    if let Some(role) = ROLES.into_iter().find(|role| *role == name) {
        return Some(role);
    }
    (parts.len() > 1 || name.starts_with("to=")).then(|| {
        parts.remove(0);
        TOOL
    })
}

/// A recipient that is only a constraint is none.
fn without_constrain(recipient: &str) -> Option<&str> {
    match recipient.split_once(CONSTRAIN) {
        None => Some(recipient),
        Some((before, _)) => Some(python::strip_end(before)).filter(|text| !text.is_empty()),
    }
}

fn is_function(recipient: &str) -> bool {
    if let Some(name) = recipient.strip_prefix(FUNCTIONS) {
        return !name.is_empty();
    }
    let first = recipient.split('.').next().unwrap_or("");
    let is_other = recipient.is_empty() || recipient.starts_with("<|") || recipient == ASSISTANT;
    !is_other && !BUILT_IN.contains(&first)
}

#[derive(Clone, Debug)]
enum Position {
    /// Before a message; all but its start is dropped.
    Between,
    Header(String),
    Message(Header),
}

enum News {
    Nothing,
    Begin,
    Text(String),
    End(Header),
}

/// Reads messages out of tokens.
#[derive(Clone, Debug)]
struct Reader {
    position: Position,
    /// The prompt contains the role of the next message: it is the first.
    is_opened: bool,
    /// The output since the last message, as far as the server could read it.
    raw: String,
    /// Half a character is withheld.
    is_half: bool,
    is_sure: bool,
}

impl Reader {
    const fn new() -> Self {
        let position = Position::Header(String::new());
        Self { position, is_opened: true, raw: String::new(), is_half: false, is_sure: true }
    }

    fn push(&mut self, token: TokenId, text: &str) -> News {
        let special = special(token);
        let text = special.as_deref().unwrap_or(text);
        if !matches!(self.position, Position::Between) {
            self.watch(special.is_some(), text);
        }
        match &mut self.position {
            Position::Between if token == START => {
                self.raw.push_str(text);
                self.position = Position::Header(String::new());
                News::Nothing
            }
            Position::Between => News::Nothing,
            Position::Header(header) if token == MESSAGE => {
                let read = Header::read(header, self.is_opened.then_some(ASSISTANT));
                let Some(header) = read else {
                    self.position = Position::Between;
                    return News::Nothing;
                };
                self.is_opened = false;
                self.position = Position::Message(header);
                News::Begin
            }
            Position::Header(header) => {
                header.push_str(text);
                self.raw.push_str(text);
                News::Nothing
            }
            Position::Message(_) if [END, RETURN, CALL].contains(&token) => self.end(),
            Position::Message(_) => News::Text(text.to_owned()),
        }
    }

    /// Bytes that make no character are written otherwise than in the detokenizer's text.
    fn watch(&mut self, is_special: bool, text: &str) {
        let is_broken = text.contains('\u{fffd}') || (is_special && self.is_half);
        self.is_sure &= !is_broken;
        self.is_half = text.is_empty();
    }

    fn end(&mut self) -> News {
        self.raw.clear();
        match std::mem::replace(&mut self.position, Position::Between) {
            Position::Message(header) => News::End(header),
            _ => News::Nothing,
        }
    }

    /// The end of the output: content that was to be a header, and a message that was not ended.
    fn finish(&mut self) -> (String, News) {
        self.is_sure &= !self.is_half;
        if matches!(self.position, Position::Header(_)) {
            self.position = Position::Between;
            return (std::mem::take(&mut self.raw), News::Nothing);
        }
        (String::new(), self.end())
    }

    const fn header(&self) -> Option<&Header> {
        match &self.position {
            Position::Message(header) => Some(header),
            Position::Between | Position::Header(_) => None,
        }
    }
}

/// Parser of a stream.
#[derive(Clone, Debug)]
pub(super) struct Harmony {
    reader: Reader,
    /// The server was started with the flag of reasoning, or of calls; without it they are dropped.
    has_reasoning: bool,
    has_calls: bool,
    calls: u32,
    reasoning_tokens: u64,
}

impl Harmony {
    /// # Errors
    /// The vocabulary is not the one that the server's parser knows.
    pub fn new(vocabulary: &Vocabulary<'_>, has_reasoning: bool, has_calls: bool) -> Result<Self, Unsure> {
        let is_known = SPECIAL.iter().all(|(id, text)| (vocabulary.id)(text) == Some(*id));
        if !is_known {
            return Err(Unsure);
        }
        Ok(Self { reader: Reader::new(), has_reasoning, has_calls, calls: 0, reasoning_tokens: 0 })
    }

    fn count(&mut self, token: TokenId) {
        let counts = self.has_reasoning && special(token).is_none();
        let is_reasoning = self.reader.header().is_some_and(|header| header.is_reasoning);
        self.reasoning_tokens += u64::from(counts && is_reasoning);
    }

    /// A piece of the present message.
    fn part(&self, text: String) -> Parsed {
        let piece = |name: Option<&String>, arguments| CallDelta {
            index: self.calls.saturating_sub(1),
            name: name.cloned(),
            arguments,
            ..CallDelta::default()
        };
        match self.reader.header().map(|header| &header.part) {
            Some(MessagePart::Content) => Parsed::content(text),
            Some(MessagePart::Reasoning) if self.has_reasoning => {
                Parsed { reasoning: text, ..Parsed::default() }
            }
            Some(MessagePart::Call(name)) if self.has_calls => {
                let name = text.is_empty().then_some(name);
                Parsed { calls: vec![piece(name, text)], ..Parsed::default() }
            }
            _ => Parsed::default(),
        }
    }

    /// The parts of one answer that is not streamed.
    ///
    /// # Errors
    /// The server's answer depends on more than the output, or is an error.
    pub fn unstreamed(
        mut self,
        request: &Request<'_>,
        tokens: &[(TokenId, &str)],
    ) -> Result<ParsedMessage, Unsure> {
        let mut text = String::new();
        let mut parts = Parts::default();
        for (token, piece) in tokens {
            match self.reader.push(*token, piece) {
                News::Begin => text.clear(),
                News::Text(piece) => text.push_str(&piece),
                News::End(header) => parts.add(&header, std::mem::take(&mut text))?,
                News::Nothing => {}
            }
            self.count(*token);
        }
        match self.reader.finish() {
            (_, News::End(header)) => parts.add(&header, text)?,
            (recovered, _) => parts.content.push(recovered),
        }
        if !self.reader.is_sure {
            return Err(Unsure);
        }
        let lines = |parts: Vec<String>| {
            let parts: Vec<_> = parts.into_iter().filter(|text| !text.is_empty()).collect();
            Some(parts.join("\n")).filter(|text| !text.is_empty())
        };
        Ok(ParsedMessage {
            reasoning: if self.has_reasoning { lines(parts.reasoning) } else { None },
            content: lines(parts.content),
            calls: if self.has_calls && request.may_call { parts.calls } else { Vec::new() },
            reasoning_tokens: self.reasoning_tokens,
        })
    }
}

/// Messages of an unstreamed answer.
#[derive(Default)]
struct Parts {
    reasoning: Vec<String>,
    content: Vec<String>,
    calls: Vec<ToolCall>,
}

impl Parts {
    fn add(&mut self, header: &Header, text: String) -> Result<(), Unsure> {
        match &header.part {
            _ if !header.is_assistant => {}
            MessagePart::Reasoning => self.reasoning.push(text),
            MessagePart::Content => self.content.push(text),
            MessagePart::Call(name) => {
                let arguments = if header.is_json { rewritten(text)? } else { text };
                self.calls.push(ToolCall { id: None, name: name.clone(), arguments });
            }
            MessagePart::Nothing => {}
        }
        Ok(())
    }
}

/// Arguments as Python writes them; others stay as they are.
fn rewritten(text: String) -> Result<String, Unsure> {
    match python::load(&text) {
        Ok(value) => Ok(python::dump_ascii(&value)),
        Err(python::Unread::Invalid) => Ok(text),
        Err(_) => Err(Unsure),
    }
}

impl Parse for Harmony {
    fn push(&mut self, token: TokenId, text: &str) -> Parsed {
        let news = self.reader.push(token, text);
        self.count(token);
        match news {
            News::Begin => {
                let is_call = matches!(self.reader.header(), Some(Header { part: MessagePart::Call(_), .. }));
                self.calls += u32::from(is_call && self.has_calls);
                self.part(String::new())
            }
            News::Text(text) if !text.is_empty() => self.part(text),
            News::Text(_) | News::End(_) | News::Nothing => Parsed::default(),
        }
    }

    fn finish(&mut self) -> Parsed {
        Parsed::content(self.reader.finish().0)
    }

    fn is_outside_calls(&self) -> bool {
        // A header may become that of a call.
        self.reader.header().is_some_and(|header| !matches!(header.part, MessagePart::Call(_)))
    }

    fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens
    }

    fn is_sure(&self) -> bool {
        self.reader.is_sure
    }

    fn fork(&self) -> Box<dyn Parse> {
        Box::new(self.clone())
    }
}
