//! A model whose every logit is a function of the whole sequence before it, and a tokenizer of
//! bytes.
//!
//! One wrong row in a lane changes all later logits, so a correct text was computed from the
//! correct cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use foretell_core::session::Decode;
use foretell_core::units::TokenId;
use foretell_onnx::forward::{Feed, Forward, Lane, Logits, ModelConfig, ModelError, Rows};
use foretell_onnx::noise;
use foretell_onnx::target::words::Words;
use foretell_parsers::text::Tokenizer;
use serde_json::{Map, Value};

pub const EOS: TokenId = 256;
pub const VOCABULARY: usize = 260;

/// Cached rows: the token that was fed, and the hash of the path down to it.
#[derive(Clone, Default)]
struct Row {
    hash: u64,
}

pub struct Fake {
    config: ModelConfig,
    lanes: Vec<Vec<Row>>,
    reserved: usize,
    pub watch: Watch,
    /// If set, each run waits for a permit.
    permits: Option<Receiver<()>>,
    /// A sequence that ends with this token fails.
    pub poison: Option<TokenId>,
}

/// Counts of the model's work.
#[derive(Clone, Default)]
pub struct Watch {
    pub runs: Arc<AtomicUsize>,
    pub tokens: Arc<AtomicUsize>,
    pub forks: Arc<AtomicUsize>,
    /// Maximum number of lanes in one run.
    pub widest: Arc<AtomicUsize>,
}

impl Fake {
    pub fn new(lanes: usize, context: usize) -> Self {
        let config = ModelConfig { vocabulary: VOCABULARY, context, lanes, eos: vec![EOS], proposes: 0 };
        let lanes = vec![Vec::new(); lanes];
        Self { config, lanes, reserved: 0, watch: Watch::default(), permits: None, poison: None }
    }

    /// From now on every run waits for a permit from this sender.
    pub fn gated(mut self) -> (Self, Sender<()>) {
        let (give, permits) = channel();
        self.permits = Some(permits);
        (self, give)
    }
}

/// Logits after a path: like a language model's, a few likely tokens and a long tail.
pub fn logits(hash: u64) -> Vec<f32> {
    let logit = |token: u32| {
        let base = match token {
            0x61..=0x7A | 0x20 | 0x0A => 4.0,
            0xC3 | 0xA9 | 0xE2 | 0x82 | 0xAC => 2.5,
            EOS => 0.0,
            _ => -4.0,
        };
        (base + 1.7 * noise::gumbel(hash, 3, 0, token)) as f32
    };
    (0..VOCABULARY as u32).map(logit).collect()
}

/// The hash of a path that is one token longer.
pub fn extend(hash: u64, token: TokenId) -> u64 {
    noise::hash(hash, 1, 0, token)
}

impl Forward for Fake {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn reserve(&mut self) -> Option<Lane> {
        (self.reserved < self.lanes.len()).then(|| {
            self.reserved += 1;
            Lane(self.reserved - 1)
        })
    }

    fn release(&mut self, lane: Lane) {
        self.lanes[lane.0].clear();
    }

    fn len(&self, lane: Lane) -> usize {
        self.lanes[lane.0].len()
    }

    fn rewind(&mut self, lane: Lane, len: usize) {
        assert!(len <= self.lanes[lane.0].len());
        self.lanes[lane.0].truncate(len);
    }

    fn commit(&mut self, lane: Lane, base: usize, path: &[usize]) -> Result<(), ModelError> {
        let rows = &mut self.lanes[lane.0];
        let kept: Vec<Row> = path.iter().map(|&node| rows[base + node].clone()).collect();
        rows.truncate(base);
        rows.extend(kept);
        Ok(())
    }

    fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        self.watch.forks.fetch_add(1, Ordering::SeqCst);
        assert!(from != to && self.lanes[from.0].len() >= len);
        self.lanes[to.0] = self.lanes[from.0][..len].to_vec();
        Ok(())
    }

    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError> {
        if let Some(permits) = &self.permits {
            permits.recv().map_err(|_| ModelError::Runtime("no permit".into()))?;
        }
        self.watch.runs.fetch_add(1, Ordering::SeqCst);
        self.watch.widest.fetch_max(feeds.len(), Ordering::SeqCst);
        let mut logits = Logits::new(VOCABULARY);
        for feed in feeds {
            self.feed(feed, &mut logits)?;
        }
        Ok(logits)
    }
}

impl Fake {
    fn feed(&mut self, feed: &Feed<'_>, out: &mut Logits) -> Result<(), ModelError> {
        self.watch.tokens.fetch_add(feed.tokens.len(), Ordering::SeqCst);
        let rows = &mut self.lanes[feed.lane.0];
        let base = rows.len();
        let wanted = base + feed.tokens.len();
        if wanted > self.config.context {
            return Err(ModelError::Full { wanted, context: self.config.context });
        }
        let start = rows.last().map_or(0, |row| row.hash);
        for (index, &token) in feed.tokens.iter().enumerate() {
            if self.poison == Some(token) {
                return Err(ModelError::Runtime("poison".into()));
            }
            let parent = feed.parents.map_or(index.checked_sub(1), |parents| parents[index]);
            let before = parent.map_or(start, |parent| rows[base + parent].hash);
            rows.push(Row { hash: extend(before, token) });
            let asked = match feed.rows {
                Rows::None => false,
                Rows::Last => index + 1 == feed.tokens.len(),
                Rows::From(first) => index >= first,
            };
            if asked {
                out.push_row(&logits(rows[base + index].hash));
            }
        }
        out.end_feed();
        Ok(())
    }
}

/// Tokens are bytes; 256 and above are special. NUL is a token that the model does not have.
pub struct Bytes;

impl Words for Bytes {
    fn encode(&self, text: &str, _: bool) -> Result<Vec<TokenId>, String> {
        let token = |byte: u8| if byte == 0 { VOCABULARY as TokenId } else { byte.into() };
        Ok(text.bytes().map(token).collect())
    }

    fn decode(&self, tokens: &[TokenId], special: bool) -> String {
        let mut text = Vec::new();
        for &token in tokens {
            match u8::try_from(token) {
                Ok(byte) => text.push(byte),
                Err(_) if special => text.extend_from_slice(format!("<{token}>").as_bytes()),
                Err(_) => {}
            }
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    fn decoder(&self, _: &[TokenId], _: bool) -> Box<dyn Decode> {
        Box::new(ByteDecoder::default())
    }

    fn chat(&self, messages: Vec<Value>, opening: bool, _: &Map<String, Value>) -> Result<String, String> {
        let mut text = String::new();
        for message in &messages {
            let (role, content) = (message["role"].as_str().unwrap(), message["content"].as_str().unwrap());
            if role == "wizard" {
                return Err("there are no wizards".into());
            }
            text.extend(["[", role, "]", content, "\n"]);
        }
        Ok(if opening { text + "[assistant]" } else { text })
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        None
    }

    fn longest(&self) -> usize {
        1
    }

    fn spelling(&self, token: TokenId) -> String {
        format!("t{token}")
    }

    fn file(&self) -> Option<Vec<u8>> {
        None
    }
}

#[derive(Default)]
struct ByteDecoder {
    held: Vec<u8>,
}

impl Decode for ByteDecoder {
    fn push(&mut self, token: TokenId) -> String {
        let Ok(byte) = u8::try_from(token) else { return String::new() };
        self.held.push(byte);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(good) => {
                    text.push_str(good);
                    self.held.clear();
                    return text;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(std::str::from_utf8(&self.held[..valid]).unwrap());
                    let Some(bad) = error.error_len() else {
                        self.held.drain(..valid);
                        return text;
                    };
                    text.push('\u{FFFD}');
                    self.held.drain(..valid + bad);
                }
            }
        }
    }

    fn flush(&mut self) -> String {
        let text = if self.held.is_empty() { String::new() } else { "\u{FFFD}".into() };
        self.held.clear();
        text
    }

    fn fork(&self) -> Box<dyn Decode> {
        Box::new(Self { held: self.held.clone() })
    }
}
