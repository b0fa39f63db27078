//! The output of one request: tokens to text, stop texts, limits, and the part that the client has
//! already received.
//!
//! During the first plain request the backend's text goes out verbatim, and is compared with the
//! decoded tokens. Only while the two agree may the session continue by itself; its text then
//! starts exactly where the backend's ended. Where the backend parses its output, the parts that
//! the tokens parse to are compared in the same way.

mod parsing;

use self::parsing::{Parsing, same_part};
use super::parse::{Difference, MakeParser, Parsed};
use super::start::{Ending, Limit, StopBuffer, StopOrder};
use super::{Decode, Delta, Finish, PartsSeen, Stopped};
use crate::units::TokenId;
use crate::words::Structure;

/// The output of one request so far.
pub struct Output {
    ending: Ending,
    limit: Limit,
    prompt_len: Option<usize>,
    decode: Box<dyn Decode>,
    tokens: Vec<TokenId>,
    /// Text of the decoded tokens, the certain part.
    text: String,
    /// Structure at the end of that text.
    structure: Structure,
    /// Text that the backend sent during the first plain request; empty after it.
    backend: String,
    /// Bytes of `backend` that were compared with `text`.
    compared: usize,
    /// Bytes of `text` that the client has received.
    sent: usize,
    /// The backend's text has matched the decoded tokens so far.
    agrees: bool,
    finish: Option<Finish>,
    stopped: Option<Stopped>,
    /// Makes `parsing` once the prompt is known; `None` from then on, and without a parser.
    parser: Option<MakeParser>,
    /// The parser, if the backend parses its output; it has no stop texts then.
    parsing: Option<Parsing>,
}

impl Output {
    /// No output yet.
    pub fn new(ending: Ending, limit: Limit, decode: Box<dyn Decode>, parser: Option<MakeParser>) -> Self {
        Self {
            parser,
            parsing: None,
            ending,
            limit,
            prompt_len: None,
            decode,
            tokens: Vec::new(),
            text: String::new(),
            structure: Structure::default(),
            backend: String::new(),
            compared: 0,
            sent: 0,
            agrees: true,
            finish: None,
            stopped: None,
        }
    }

    /// Sets the prompt: its length counts against the limit of the context, and the parser reads
    /// from its end where the output begins.
    pub fn set_prompt(&mut self, ids: &[TokenId]) {
        self.prompt_len = Some(ids.len());
        if let Some(parser) = self.parser.take() {
            self.parsing = parser(ids).map(Parsing::new);
            self.agrees &= self.parsing.is_some() && self.tokens.is_empty();
        }
    }

    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Reason for the end of the output, judged by the tokens; `None` while it goes on.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// The cause that ended the output before its limit; `None` while it goes on, and at the limit.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.stopped.as_ref()
    }

    /// True if this is one of the model's end-of-text tokens.
    pub fn is_end_of_text(&self, token: TokenId) -> bool {
        self.ending.eos.contains(&token)
    }

    fn ends_as_text(&self, token: TokenId) -> bool {
        !self.ending.ignore_eos && self.is_end_of_text(token)
    }

    /// True if the backend's text has matched the decoded tokens so far.
    pub fn agrees(&self) -> bool {
        self.agrees
    }

    /// True if the backend's parser has given other parts than those that the tokens parse to here,
    /// or with `ended`, at the end of its answer, fewer or more; false where that is not sure.
    pub fn is_misparsed(&self, ended: bool) -> bool {
        let parsing = self.parsing.as_ref();
        parsing.is_some_and(|parsing| parsing.is_sure() && (!self.agrees || (ended && !parsing.level())))
    }

    /// The first difference between the parts that the backend has sent and those here; `None` if
    /// there is none, and without a parser.
    pub fn difference(&self) -> Option<Difference> {
        self.parsing.as_ref().and_then(Parsing::difference)
    }

    /// Tokens so far that the backend counts as reasoning; `None` without a parser.
    pub fn reasoning_tokens(&self) -> Option<u64> {
        self.parsing.as_ref().map(Parsing::reasoning_tokens)
    }

    /// The kinds of parts so far; `None` without a parser.
    pub fn parts(&self) -> Option<PartsSeen> {
        self.parsing.as_ref().map(Parsing::parts)
    }

    /// True if the output extended by these tokens would end in free text, where one wrong token
    /// breaks nothing.
    pub fn is_free_behind(&self, tokens: &[TokenId]) -> bool {
        let mut structure = self.structure.clone();
        let mut pieces = Vec::with_capacity(tokens.len());
        if !tokens.is_empty() {
            let mut decode = self.decode.fork();
            pieces.extend(tokens.iter().map(|&token| (token, decode.push(token))));
        }
        for (_, text) in &pieces {
            structure.push(text);
        }
        let outside = self.parsing.as_ref().is_none_or(|parsing| parsing.is_outside_calls_behind(&pieces));
        structure.is_free() && outside
    }

    /// Maximum number of tokens still to come; `None` without a limit.
    pub fn rest(&self) -> Option<usize> {
        let by_request = self.limit.max_tokens.map(|max| max as usize);
        let by_context =
            self.limit.context.zip(self.prompt_len).map(|(max, len)| (max as usize).saturating_sub(len));
        let most = match (by_request, by_context) {
            (Some(request), Some(context)) => Some(request.min(context)),
            (request, context) => request.or(context),
        };
        most.map(|most| most.saturating_sub(self.tokens.len()))
    }

    /// Takes tokens of the first plain request, and what came with them, which goes to the client
    /// unchanged. `ends`: the backend reports that the last of them ends the text; this is used
    /// where the text is parsed, for it may contain special tokens.
    pub fn plain(&mut self, tokens: Vec<TokenId>, parsed: Parsed, ends: bool) -> Delta {
        let ends = ends && self.parsing.is_some();
        for (index, &token) in tokens.iter().enumerate() {
            self.take(token, ends && index + 1 == tokens.len());
        }
        // Without its prompt an output cannot be parsed.
        self.agrees &= self.parser.is_none();
        if self.agrees {
            self.agrees = self.compare(&parsed);
        }
        Delta { tokens, parsed }
    }

    fn compare(&mut self, parsed: &Parsed) -> bool {
        if let Some(parsing) = &mut self.parsing {
            return parsing.agrees(parsed.clone());
        }
        self.backend.push_str(&parsed.text);
        same_part(&self.text, &self.backend, &mut self.compared)
    }

    /// True if the backend's text is level with the tokens: not ahead of them, and behind by no
    /// more than the backend withholds for a stop text ([`StopBuffer`]), with some text seen before
    /// that. Only then is it certain that no component between them (a parser of tools or of
    /// reasoning) withholds text, and that continuing by tokens is seamless.
    pub fn level(&self) -> bool {
        if let Some(parsing) = &self.parsing {
            return self.agrees && parsing.level();
        }
        if !self.agrees {
            return false;
        }
        let Some(ahead) = self.text.get(self.backend.len()..) else { return false };
        ahead.is_empty() || (!self.backend.is_empty() && self.buffers(ahead))
    }

    /// True if the backend may withhold this end of the text because a stop text may be in it.
    fn buffers(&self, ahead: &str) -> bool {
        match self.ending.stop_buffer {
            StopBuffer::Beginning => ahead.len() <= self.withheld_bytes(),
            StopBuffer::Longest => {
                let longest = self.ending.stop.iter().map(|stop| stop.chars().count()).max();
                ahead.chars().count() < longest.unwrap_or(0)
            }
        }
    }

    /// Ends the first plain request: from here on the session's text goes out.
    pub fn take_over(&mut self) -> Delta {
        self.sent = self.backend.len();
        self.backend = String::new();
        if let Some(parsing) = &mut self.parsing {
            parsing.take_over();
        }
        Delta { tokens: Vec::new(), parsed: self.release() }
    }

    /// Takes tokens in order until the output is over; later ones are dropped. `ends`: the backend
    /// reports that the last of them ends the text.
    pub fn extend(&mut self, tokens: &[TokenId], ends: bool) -> Delta {
        let mut taken = Vec::with_capacity(tokens.len());
        for (index, &token) in tokens.iter().enumerate() {
            if self.finish.is_some() {
                break;
            }
            self.take(token, ends && index + 1 == tokens.len());
            taken.push(token);
        }
        Delta { tokens: taken, parsed: self.release() }
    }

    /// Ends the output if it goes on, and releases the text that was withheld.
    pub fn end(&mut self, finish: Finish) -> Delta {
        if self.finish.is_none() {
            self.flush(finish);
            self.close();
        }
        Delta { tokens: Vec::new(), parsed: self.release() }
    }

    fn take(&mut self, token: TokenId, reported_end: bool) {
        self.tokens.push(token);
        if self.finish.is_some() {
            return;
        }
        let by_id = self.ending.stop_token_ids.contains(&token);
        let of_text = self.ends_as_text(token);
        let ends = by_id || of_text || reported_end;
        let from = self.text.len();
        if !ends || (by_id && self.ending.include_stop) {
            let piece = self.decode.push(token);
            self.append(&piece);
        }
        let over = self.finish.is_none() && (ends || self.rest() == Some(0));
        if over {
            self.flush(if ends { Finish::Stop } else { Finish::Length });
        }
        if let Some(parsing) = &mut self.parsing {
            parsing.push(token, self.text.get(from..).unwrap_or_default());
        }
        if over {
            self.close();
            if ends && self.stopped.is_none() {
                self.stopped =
                    Some(if by_id && !of_text { Stopped::Token(token) } else { Stopped::TextEnd(token) });
            }
        }
    }

    /// Ends the output for `finish`, unless the text that was withheld completes a stop text.
    fn flush(&mut self, finish: Finish) {
        let rest = self.decode.flush();
        self.append(&rest);
        self.finish.get_or_insert(finish);
    }

    /// Ends the parser with the output: one that stopped by itself after a tool call ended with it.
    fn close(&mut self) {
        let Some(parsing) = &mut self.parsing else { return };
        parsing.finish();
        let ends = parsing.has_called();
        if ends && self.finish == Some(Finish::Stop) {
            self.finish = Some(Finish::ToolCalls);
        }
    }

    /// Adds text; ends the output where a stop text is complete.
    fn append(&mut self, piece: &str) {
        let before = self.text.len();
        self.text.push_str(piece);
        self.structure.push(piece);
        if piece.is_empty() || self.tokens.len() <= self.ending.min_tokens as usize {
            return;
        }
        if let Some((start, end)) = self.stop_text(before) {
            self.stopped = self.text.get(start..end).map(|stop| Stopped::Text(stop.to_owned()));
            self.text.truncate(if self.ending.include_stop { end } else { start });
            self.finish = Some(Finish::Stop);
        }
    }

    /// Byte range of the stop text that was completed after byte `before`.
    fn stop_text(&self, before: usize) -> Option<(usize, usize)> {
        let bytes = self.text.as_bytes();
        let mut found = self.ending.stop.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| {
            let len = stop.len();
            let last = bytes.len().checked_sub(len)?;
            let mut positions = (before + 1).saturating_sub(len)..=last;
            positions.find(|&at| bytes.get(at..at + len) == Some(stop.as_bytes())).map(|at| (at, at + len))
        });
        match self.ending.stop_order {
            StopOrder::FirstComplete => found.min_by_key(|&(start, end)| (end, start)),
            StopOrder::Listed => found.next(),
            StopOrder::FirstBegun => found.min_by_key(|&(start, _)| start),
        }
    }

    /// The parts that may go out now.
    fn release(&mut self) -> Parsed {
        if let Some(parsing) = &mut self.parsing {
            return parsing.release();
        }
        let until =
            if self.finish.is_some() { self.text.len() } else { self.text.len() - self.withheld_bytes() };
        let text = self.text.get(self.sent..until).unwrap_or_default().to_owned();
        self.sent = self.sent.max(until);
        Parsed::content(text)
    }

    /// Bytes at the end of the text that may be the beginning of a stop text.
    fn withheld_bytes(&self) -> usize {
        let bytes = self.text.as_bytes();
        let stops = self.ending.stop.iter().map(String::as_bytes);
        stops
            .filter_map(|stop| {
                let most = stop.len().saturating_sub(1).min(bytes.len());
                (1..=most).rev().find(|&len| bytes.get(bytes.len() - len..) == stop.get(..len))
            })
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Token n is the n-th letter; 26.. are two-byte halves of "é".
    #[derive(Clone, Default)]
    struct Letters(Vec<u8>);

    impl Decode for Letters {
        fn push(&mut self, token: TokenId) -> String {
            match token {
                0..26 => self.0.push(b'a' + token as u8),
                26 => self.0.push(0xC3),
                _ => self.0.push(0xA9),
            }
            match String::from_utf8(self.0.clone()) {
                Ok(text) => {
                    self.0.clear();
                    text
                }
                Err(_) => String::new(),
            }
        }

        fn flush(&mut self) -> String {
            if std::mem::take(&mut self.0).is_empty() { String::new() } else { "\u{FFFD}".into() }
        }

        fn fork(&self) -> Box<dyn Decode> {
            Box::new(self.clone())
        }
    }

    fn output(stop: &[&str], max: u32) -> Output {
        let stop = stop.iter().map(|&stop| stop.to_owned()).collect();
        let ending = Ending { stop, eos: vec![25], ..Ending::default() };
        Output::new(ending, Limit { max_tokens: Some(max), context: None }, Box::<Letters>::default(), None)
    }

    #[test]
    fn a_stop_text_across_tokens_is_withheld_and_cut() {
        let mut out = output(&["cd"], 99);
        assert_eq!(out.extend(&[0, 1, 2], false).parsed.text, "ab");
        assert_eq!(out.extend(&[4], false).parsed.text, "ce");
        let last = out.extend(&[2, 3, 0, 1], false);
        assert_eq!((last.parsed.text.as_str(), last.tokens.as_slice()), ("", &[2, 3][..]));
        assert_eq!(out.finish(), Some(Finish::Stop));
    }

    #[test]
    fn the_engine_s_order_selects_among_several_stop_texts() {
        let cut = |order, stop: &[&str]| {
            let mut out = output(stop, 99);
            out.ending.stop_order = order;
            out.extend(&[0, 1], false);
            // One token that is "cdef".
            out.append("cdef");
            out.text
        };
        assert_eq!(cut(StopOrder::FirstComplete, &["ef", "d", "cd"]), "ab");
        assert_eq!(cut(StopOrder::Listed, &["ef", "d", "cd"]), "abcd");
    }

    #[test]
    fn half_a_character_never_goes_out_and_the_limit_counts_tokens() {
        let mut out = output(&[], 3);
        assert_eq!(out.extend(&[0, 26], false).parsed.text, "a");
        assert_eq!(
            out.extend(&[27, 1, 1], false),
            Delta { tokens: vec![27], parsed: Parsed::content("é".into()) }
        );
        assert_eq!(out.finish(), Some(Finish::Length));
    }

    #[test]
    fn an_end_of_text_token_adds_no_text() {
        let mut out = output(&[], 9);
        assert_eq!(
            out.extend(&[0, 25, 1], false),
            Delta { tokens: vec![0, 25], parsed: Parsed::content("a".into()) }
        );
        assert_eq!(out.finish(), Some(Finish::Stop));
    }

    #[test]
    fn a_token_that_ends_the_text_by_the_backend_s_report_adds_no_text() {
        let mut out = output(&[], 9);
        assert_eq!(
            out.extend(&[0, 1], true),
            Delta { tokens: vec![0, 1], parsed: Parsed::content("a".into()) }
        );
        assert_eq!((out.finish(), out.stopped()), (Some(Finish::Stop), Some(&Stopped::TextEnd(1))));
    }

    #[test]
    fn own_text_starts_where_the_backend_left_off() {
        let mut out = output(&["xyz"], 99);
        out.ending.stop_buffer = StopBuffer::Longest;
        assert_eq!(out.plain(vec![0, 1, 2], Parsed::content("a".into()), false).parsed.text, "a");
        assert!(out.level());
        assert_eq!(out.take_over().parsed.text, "bc");
        assert_eq!(out.extend(&[3], false).parsed.text, "d");
    }

    #[test]
    fn unseen_text_is_level_only_where_the_backend_buffers_it() {
        let level = |hold, stop: &str, seen: &str| {
            let mut out = output(&[stop], 99);
            out.ending.stop_buffer = hold;
            out.plain(vec![0, 1, 2, 3], Parsed::content(seen.into()), false);
            out.level()
        };
        // The tokens decode to "abcd". One backend holds back the beginning of the stop text,
        // another a fixed length.
        assert!(level(StopBuffer::Beginning, "cdx", "ab"));
        assert!(!level(StopBuffer::Beginning, "cdx", "a"), "more is missing than begins a stop text");
        assert!(
            !level(StopBuffer::Beginning, "longer than the text", "ab"),
            "nothing of it begins a stop text"
        );
        assert!(level(StopBuffer::Longest, "xyz", "ab") && !level(StopBuffer::Longest, "xyz", "a"));
        assert!(!level(StopBuffer::Longest, "longer than the text", ""), "a parser may keep all of it");
    }

    #[test]
    fn text_that_differs_from_the_tokens_is_detected() {
        let mut out = output(&[], 99);
        out.plain(vec![0], Parsed::content(String::new()), false);
        assert!(out.agrees() && !out.level());
        out.plain(vec![1], Parsed::content("b".into()), false);
        assert!(!out.agrees());
    }
}
