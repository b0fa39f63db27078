//! A language model without weights over the bundled vocabulary.
//!
//! The last token determines a few likely tokens, so texts repeat their n-grams and lookups are
//! often right. The hash of the whole context decides between them, so a context that lacks one
//! token anywhere gives another text. A row costs the same at any length of context.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::TokenId;
use crate::house::Script;
use crate::rng;
use crate::words::Words;

/// Number of likely successors of each token.
const CANDIDATES: u32 = 4;
/// Size of the vocabulary within the vocabulary.
const POOL: usize = 320;

/// A token sequence with the hash of every prefix: `hashes[i]` is of the first `i` tokens.
#[derive(Clone, Debug)]
pub struct Context {
    tokens: Vec<TokenId>,
    hashes: Vec<u64>,
}

impl Context {
    pub fn new(tokens: &[TokenId]) -> Self {
        let mut context = Self { tokens: Vec::with_capacity(tokens.len() + 64), hashes: vec![0x51ED] };
        for &token in tokens {
            context.push(token);
        }
        context
    }

    pub fn push(&mut self, token: TokenId) {
        let before = self.hashes[self.tokens.len()];
        self.tokens.push(token);
        self.hashes.push(rng::hash(before, 7, 0, token));
    }

    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The hash of the first `len` tokens.
    pub fn hash(&self, len: usize) -> u64 {
        self.hashes[len]
    }
}

/// Parameters of the model.
#[derive(Clone, Debug)]
pub struct Temper {
    /// One row in this number prefers the end of text; `None` for never.
    pub eos_every: Option<u64>,
    /// The punctuation of JSON and numbers are likely everywhere, each of them at its own places.
    pub punctuates: bool,
    /// Seed of the model.
    pub seed: u64,
}

impl Default for Temper {
    fn default() -> Self {
        Self { eos_every: Some(400), punctuates: false, seed: 0 }
    }
}

/// The model and its words.
pub struct Toy {
    pub words: Words,
    /// The folder of its tokenizer.
    pub folder: PathBuf,
    pub temper: Temper,
    eos: TokenId,
    tail: Vec<f32>,
    pool: Vec<TokenId>,
    /// Short tokens of nothing but the punctuation of JSON and digits, and how likely they are: a
    /// quote has to end texts.
    marks: Vec<(TokenId, f64)>,
    /// Ends of prompts, and the text that is written after each.
    scripts: Vec<(Vec<TokenId>, Vec<TokenId>)>,
}

/// Folder of the bundled model.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../onnx/models/target").canonicalize().unwrap()
}

impl Toy {
    pub fn new(temper: Temper) -> Self {
        Self::of(&folder(), temper)
    }

    /// With the tokenizer and the chat template of another folder.
    pub fn of(folder: &Path, temper: Temper) -> Self {
        let words = Words::of(folder);
        let size = words.size() as TokenId;
        let plain = |token: TokenId| {
            // Parts of characters are included, so that outputs sometimes end in the middle of one.
            !words.is_special(token) && token < size
        };
        let tail = |token| if plain(token) { rng::gumbel(1, 1, 0, token) as f32 } else { -30.0 };
        let drawn = (0..).map(|draw| (rng::hash(temper.seed, 2, 0, draw) % u64::from(size)) as TokenId);
        let pool = drawn.filter(|&token| plain(token)).take(POOL).collect();
        let tail: Vec<f32> = (0..size).map(tail).collect();
        let eos = words.id("<|endoftext|>").unwrap();
        let mark = |token: TokenId| {
            let spelled = words.token(token)?;
            let plain = spelled.trim_start_matches('Ġ');
            let numbers = plain.bytes().filter(u8::is_ascii_digit).count();
            let all = plain.bytes().all(|byte| b"[]{}\":,.-0123456789".contains(&byte));
            let likely = if plain.contains('"') { 10.5 } else { 7.0 };
            ((1..3).contains(&plain.len()) && all && numbers < 2).then_some((token, likely))
        };
        let marks = (0..size).filter_map(mark).collect();
        let folder = folder.to_owned();
        Self { words, folder, temper, eos, tail, pool, marks, scripts: Vec::new() }
    }

    /// The model that writes these texts after such prompts, and then ends.
    #[must_use]
    pub fn with_scripts(mut self, scripts: &[Script]) -> Self {
        let encoded = scripts.iter().map(|script| (self.encode(&script.after), self.encode(&script.text)));
        self.scripts = encoded.collect();
        self
    }

    /// The next token of the script, after the first `len` tokens.
    fn scripted(&self, context: &Context, len: usize) -> Option<TokenId> {
        let tokens = &context.tokens()[..len];
        self.scripts.iter().find_map(|(after, text)| {
            let at = tokens.windows(after.len()).rposition(|window| window == after.as_slice())?;
            Some(text.get(len - at - after.len()).copied().unwrap_or(self.eos))
        })
    }

    pub fn vocabulary(&self) -> usize {
        self.tail.len()
    }

    pub fn eos(&self) -> TokenId {
        self.eos
    }

    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        self.words.encode(text)
    }

    /// The text of a prompt, or an error.
    pub fn chat(&self, messages: &Value, opening: bool) -> Result<String, String> {
        self.words.chat(messages, opening)
    }

    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        self.words.decode(tokens, skip_special)
    }

    /// The name of a token in lists of logprobs.
    pub fn name(&self, token: TokenId) -> String {
        self.decode(&[token], false)
    }

    /// The logits after the first `len` tokens of a context.
    pub fn row(&self, context: &Context, len: usize) -> Row {
        let mut logits = self.tail.clone();
        let last = len.checked_sub(1).map_or(0, |at| context.tokens[at]);
        let whole = context.hash(len) ^ self.temper.seed;
        let pick = |rank| {
            self.pool[(rng::hash(self.temper.seed, 3, u64::from(last), rank) % POOL as u64) as usize] as usize
        };
        for rank in 0..CANDIDATES {
            let wobble = 0.55 * rng::gumbel(whole, 4, 0, rank);
            logits[pick(rank)] = (14.0 - 1.2 * f64::from(rank) + wobble) as f32;
        }
        if self.temper.punctuates {
            for &(mark, likely) in &self.marks {
                logits[mark as usize] = (likely + rng::gumbel(whole, 6, 0, mark)) as f32;
            }
        }
        if let Some(token) = self.scripted(context, len) {
            logits[token as usize] = 40.0;
            return Row(logits);
        }
        let fate = rng::hash(whole, 5, 0, 0);
        if self.temper.eos_every.is_some_and(|every| fate.is_multiple_of(every)) {
            logits[self.eos() as usize] = 18.0;
        }
        Row(logits)
    }
}

/// The logits of one position.
#[derive(Clone, Debug)]
pub struct Row(pub Vec<f32>);

impl Row {
    /// The logits at a temperature.
    #[must_use]
    pub fn cooled(&self, temperature: f64) -> Self {
        Self(self.0.iter().map(|&logit| (f64::from(logit) / temperature) as f32).collect())
    }

    /// The best token; the lowest id on a tie.
    pub fn best(&self) -> TokenId {
        let mut best = 0;
        for (token, &logit) in self.0.iter().enumerate() {
            if logit > self.0[best] {
                best = token;
            }
        }
        best as TokenId
    }

    /// Log-sum-exp of the logits: a token's logprob is its logit minus this.
    pub fn normaliser(&self) -> f32 {
        let most = self.0.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = self.0.iter().map(|&logit| f64::from(logit - most).exp()).sum();
        most + sum.ln() as f32
    }

    pub fn logprob(&self, token: TokenId) -> f32 {
        self.0[token as usize] - self.normaliser()
    }

    /// Number of tokens that are at least as good: on a tie at the top both have rank 2.
    pub fn rank(&self, token: TokenId) -> usize {
        let own = self.0[token as usize];
        self.0.iter().filter(|&&logit| logit >= own).count()
    }

    /// The best `most` tokens with their logprobs. On a tie the highest id comes first, unlike in
    /// `best`: engines break ties differently in the two cases.
    pub fn top(&self, most: usize) -> Vec<(TokenId, f32)> {
        let normaliser = self.normaliser();
        let mut all: Vec<(TokenId, f32)> =
            self.0.iter().enumerate().map(|(token, &logit)| (token as TokenId, logit - normaliser)).collect();
        let most = most.min(all.len());
        let order = |a: &(TokenId, f32), b: &(TokenId, f32)| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0));
        if most == 0 {
            return Vec::new();
        }
        all.select_nth_unstable_by(most - 1, order);
        all.truncate(most);
        all.sort_by(order);
        all
    }
}
