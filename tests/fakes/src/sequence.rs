//! One sequence during generation: a token at a time, with its text, until its end.

use crate::TokenId;

use super::sample::Sampling;
use super::toy::{Context, Row, Toy};

/// Reason for the end of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    Length,
    Eos,
    StopToken(TokenId),
    StopText(String),
}

impl Finish {
    /// Finish reason of the OpenAI interface.
    pub fn reason(&self) -> &'static str {
        if *self == Self::Length { "length" } else { "stop" }
    }
}

/// Amount of text withheld for a possible stop string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// One character less than the longest stop string.
    Longest,
    /// A suffix that begins a stop string.
    Prefix,
    /// Nothing: a stop string is sent with the text that it ends.
    Nothing,
}

/// One step's result.
#[derive(Clone, Debug)]
pub struct Piece {
    pub token: TokenId,
    /// Text that can be sent now.
    pub text: String,
    /// The model's logits at this position.
    pub raw: Row,
    /// The logits after bias, penalties and temperature.
    pub processed: Row,
    pub temperature: f64,
    /// The text ends in the middle of a character.
    pub incomplete: bool,
    pub finish: Option<Finish>,
}

pub struct Sequence {
    pub index: usize,
    pub context: Context,
    pub prompt: usize,
    pub sampling: Sampling,
    pub cached: usize,
    /// Maximum number of prompt tokens that may be looked up in the cache.
    pub cache_limit: Option<usize>,
    pub salt: u64,
    pub finish: Option<Finish>,
    /// All text so far, including withheld text.
    pub text: String,
    told: usize,
    hold: Hold,
    /// Token offsets of the decoded text window (prefix) and of the end of the text (read).
    window: (usize, usize),
    incomplete: bool,
}

impl Sequence {
    pub fn new(index: usize, prompt: Context, sampling: Sampling, hold: Hold) -> Self {
        let prompt_len = prompt.len();
        Self {
            index,
            context: prompt,
            prompt: prompt_len,
            sampling,
            cached: 0,
            cache_limit: None,
            salt: 0,
            finish: None,
            text: String::new(),
            told: 0,
            hold,
            window: (prompt_len.saturating_sub(5), prompt_len),
            incomplete: false,
        }
    }

    pub fn output(&self) -> &[TokenId] {
        &self.context.tokens()[self.prompt..]
    }

    /// The next token, unless it has ended.
    pub fn step(&mut self, toy: &Toy) -> Option<Piece> {
        if self.finish.is_some() {
            return None;
        }
        let raw = toy.row(&self.context, self.context.len());
        let (token, processed) = self.sampling.draw(&raw, &self.context, self.prompt, toy.eos());
        let processed = match self.sampling.temperature {
            temperature if temperature > 0.0 => processed.cooled(temperature),
            _ => processed,
        };
        self.context.push(token);
        self.finish = self.ended_by(token, toy.eos());
        let hidden = match self.finish {
            Some(Finish::Eos) => true,
            Some(Finish::StopToken(_)) => !self.sampling.keep_stop,
            _ => false,
        };
        if !hidden {
            self.grow_text(toy);
            self.cut_at_stop();
        }
        let text = self.tell();
        let temperature = self.sampling.temperature;
        let incomplete = self.incomplete;
        Some(Piece { token, text, raw, processed, temperature, incomplete, finish: self.finish.clone() })
    }

    fn ended_by(&self, token: TokenId, eos: TokenId) -> Option<Finish> {
        let count = self.output().len();
        if token == eos && !self.sampling.ignore_eos {
            return Some(Finish::Eos);
        }
        if self.sampling.stop_ids.contains(&token) {
            return Some(Finish::StopToken(token));
        }
        (count >= self.sampling.max_tokens).then_some(Finish::Length)
    }

    /// The window is decoded with and without the new token; half a character waits for its other
    /// half.
    fn grow_text(&mut self, toy: &Toy) {
        let tokens = self.context.tokens();
        let (prefix, read) = self.window;
        let skip = self.sampling.skip_special;
        let before = toy.decode(&tokens[prefix..read], skip);
        let after = toy.decode(&tokens[prefix..], skip);
        self.incomplete = after.len() > before.len() && after.ends_with('\u{FFFD}');
        if after.len() > before.len() && !after.ends_with('\u{FFFD}') && after.is_char_boundary(before.len())
        {
            self.text.push_str(&after[before.len()..]);
            self.window = (read, tokens.len());
        }
    }

    /// The rest of the text if the last character stayed incomplete.
    pub fn tail(&self, toy: &Toy) -> String {
        let tokens = self.context.tokens();
        let (prefix, read) = self.window;
        let before = toy.decode(&tokens[prefix..read], self.sampling.skip_special);
        let after = toy.decode(&tokens[prefix..], self.sampling.skip_special);
        match self.finish {
            Some(Finish::Length) => after.get(before.len()..).unwrap_or_default().to_owned(),
            _ => String::new(),
        }
    }

    fn cut_at_stop(&mut self) {
        if self.output().len() <= self.sampling.min_tokens {
            return;
        }
        let found = self.sampling.stop.iter().filter_map(|stop| {
            // Text sent without holding back may contain the beginning.
            let back = if self.hold == Hold::Nothing { stop.len() } else { 0 };
            let from = self.text.floor_char_boundary(self.told.saturating_sub(back));
            let at = self.text[from..].find(stop.as_str())?;
            Some((from + at, stop.clone()))
        });
        if let Some((at, stop)) = found.min() {
            let keep = if self.sampling.keep_stop { at + stop.len() } else { at };
            self.text.truncate(keep);
            self.finish = Some(Finish::StopText(stop));
        }
    }

    /// The text that can be sent now.
    fn tell(&mut self) -> String {
        let rest = &self.text[self.told..];
        let held = if self.finish.is_some() { 0 } else { self.held(rest) };
        let told = rest[..rest.len() - held].to_owned();
        self.told += told.len();
        told
    }

    fn held(&self, rest: &str) -> usize {
        let stops = &self.sampling.stop;
        let bytes = match self.hold {
            Hold::Nothing => 0,
            Hold::Longest => {
                let chars =
                    stops.iter().map(|stop| stop.chars().count()).max().unwrap_or(1).saturating_sub(1);
                rest.chars().rev().take(chars).map(char::len_utf8).sum()
            }
            Hold::Prefix => {
                let begins = |at: &usize| {
                    rest.is_char_boundary(*at) && stops.iter().any(|stop| stop.starts_with(&rest[*at..]))
                };
                (0..rest.len()).find(begins).map_or(0, |at| rest.len() - at)
            }
        };
        bytes.min(rest.len())
    }
}
