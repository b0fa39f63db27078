//! A small language model without weights over a real byte-level vocabulary.
//!
//! Its logits depend mostly on the last token, so its text repeats itself and lookups are often
//! right; they also depend on the token before and on the position, so lookups are often wrong.
//! Bytes of multi-token characters are likely, so that outputs are often in the middle of one.

// Only model drafters use the faults, and they need the feature.
#![cfg_attr(not(feature = "onnx"), allow(dead_code))]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use foretell_core::units::TokenId;
use foretell_onnx::forward::{
    Behind, Draws, Feed, Forward, HeadDraft, Lane, Logits, ModelConfig, ModelError, Rows,
};
use foretell_onnx::noise;
use foretell_parsers::text::Tokenizer;
use parking_lot::{Condvar, Mutex};
use tokenizers::AddedToken;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

pub const EOS: &str = "<|end|>";
const TEXT: &str = "fn take(text: &str) -> String {\n    let mut taken = String::new();\n    for piece in \
    text.split(',') {\n        taken.push_str(piece);\n    }\n    taken\n}\nThe fox took the lazy dog — über naïve \
    façades, “quoted” … 東京 💩\n";

/// A vocabulary that differs from every target's here.
pub fn other_words() -> Arc<Tokenizer> {
    words_of(tempfile::tempdir().unwrap().path(), 290)
}

/// Writes `tokenizer.json` and a chat template into a folder, and gives the tokenizer.
pub fn words(folder: &Path) -> Arc<Tokenizer> {
    words_of(folder, 340)
}

fn words_of(folder: &Path, size: usize) -> Arc<Tokenizer> {
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
    let special = [EOS, "<|user|>", "<|assistant|>"].map(|text| AddedToken::from(text, true));
    let trainer = BpeTrainer::builder()
        .vocab_size(size)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special.to_vec())
        .build();
    let mut trainer = TrainerWrapper::BpeTrainer(trainer);
    tokenizer.train(&mut trainer, std::iter::repeat_n(TEXT.to_owned(), 3)).unwrap();
    tokenizer.save(folder.join("tokenizer.json"), false).unwrap();
    let template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>{% endif %}";
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), "{}").unwrap();
    Arc::new(Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap())
}

/// Control of a model from outside its thread.
#[derive(Clone, Default)]
pub struct Handle {
    runs: Arc<AtomicUsize>,
    trouble: Arc<Mutex<Option<(usize, Trouble)>>>,
    released: Arc<(Mutex<bool>, Condvar)>,
}

/// Faults of a model's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    Fail,
    /// Its thread panics.
    Crash,
    /// The run blocks until it is released.
    Hang,
}

impl Handle {
    pub fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    /// Every run after the first `after` has this fault.
    pub fn trouble(&self, after: usize, trouble: Trouble) {
        *self.trouble.lock() = Some((after, trouble));
    }

    /// Releases all hanging runs, now and later.
    pub fn release(&self) {
        *self.released.0.lock() = true;
        self.released.1.notify_all();
    }

    fn pass(&self) -> Result<(), ModelError> {
        let run = self.runs.fetch_add(1, Ordering::SeqCst);
        let trouble = self.trouble.lock().filter(|&(after, _)| run >= after).map(|(_, trouble)| trouble);
        match trouble {
            None => Ok(()),
            Some(Trouble::Fail) => Err(ModelError::Runtime("planted fault".to_owned())),
            Some(Trouble::Crash) => panic!("planted crash"),
            Some(Trouble::Hang) => {
                let mut released = self.released.0.lock();
                while !*released {
                    self.released.1.wait(&mut released);
                }
                Ok(())
            }
        }
    }
}

/// How the drafts of a head are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Often right.
    Trained,
    /// As that, and above temperature 0 by the noise of the target.
    Drawing,
    /// Those of another model, with probabilities that are none.
    Wrong,
    /// It gives no numbers.
    Broken,
}

/// Tokens of a draft of a head.
const HEAD_STEPS: usize = 4;

/// The token of a cached row, and the row before it.
type Row = (TokenId, Option<usize>);

pub struct Babble {
    config: ModelConfig,
    lanes: Vec<Option<Vec<Row>>>,
    /// The prior of each token, without any context.
    taste: Vec<f64>,
    seed: u64,
    step: Duration,
    /// The token after which it writes, and what it writes; `None`: it babbles.
    script: Option<(TokenId, Vec<TokenId>)>,
    head: Option<Head>,
    pub handle: Handle,
}

impl Babble {
    pub fn new(tokenizer: &Tokenizer, context: usize, lanes: usize) -> Self {
        let eos = tokenizer.id(EOS).unwrap();
        let vocabulary = tokenizer.size();
        let taste = (0..vocabulary as TokenId).map(|token| taste(tokenizer, token)).collect();
        let config = ModelConfig { vocabulary, context, lanes, eos: vec![eos], proposes: 0 };
        let lanes = vec![None; lanes];
        let handle = Handle::default();
        Self { config, lanes, taste, seed: 0, step: Duration::ZERO, script: None, head: None, handle }
    }

    /// Another model, which agrees with the first where the last token decides.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Writes this text after every token `after`, and ends.
    pub fn with_script(mut self, after: TokenId, mut text: Vec<TokenId>) -> Self {
        text.extend(&self.config.eos);
        self.script = Some((after, text));
        self
    }

    /// With a head.
    pub fn with_head(mut self, head: Option<Head>) -> Self {
        self.config.proposes = head.map_or(0, |_| HEAD_STEPS);
        self.head = head;
        self
    }

    /// The likeliest tokens after a token, whatever was before.
    fn likeliest(&self, last: TokenId, draws: Option<Draws>) -> Vec<TokenId> {
        let drawn = |token| {
            draws.map_or(0.0, |draws| {
                draws.temperature * noise::gumbel(draws.seed, draws.choice, draws.position, token)
            })
        };
        let score = |token: TokenId| {
            self.taste[token as usize] + 2.0 * noise::gumbel(u64::from(last), 2, 0, token) + drawn(token)
        };
        let mut tokens: Vec<TokenId> = (0..self.config.vocabulary as TokenId).collect();
        tokens.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
        tokens.truncate(2);
        tokens
    }

    fn head_draft(&self, head: Head, mut last: TokenId, draws: Option<Draws>) -> HeadDraft {
        let step = |at: usize| {
            let there = |draws: Draws| Draws { position: draws.position + at as u64, ..draws };
            let tokens = match head {
                Head::Trained => self.likeliest(last, None),
                Head::Drawing => self.likeliest(last, draws.map(there)),
                Head::Wrong | Head::Broken => vec![last.wrapping_mul(7) % 97, 3],
            };
            last = tokens[0];
            let shares = match head {
                Head::Trained | Head::Drawing => [0.6, 0.2],
                Head::Wrong => [0.9, 9.0],
                Head::Broken => [f32::NAN, 0.1],
            };
            tokens.into_iter().zip(shares).collect()
        };
        (0..HEAD_STEPS).map(step).collect()
    }

    /// The duration of a run.
    pub fn with_step(mut self, step: Duration) -> Self {
        self.step = step;
        self
    }

    /// The next token of the script, if the text so far is its beginning.
    fn scripted(&self, rows: &[Row], row: usize) -> Option<TokenId> {
        let (after, script) = self.script.as_ref()?;
        let back = std::iter::successors(Some(row), |&row| rows[row].1).map(|row| rows[row].0);
        let mut text: Vec<TokenId> = back.take_while(|token| token != after).collect();
        text.reverse();
        script.strip_prefix(text.as_slice())?.first().copied()
    }

    fn logits(&self, rows: &[Row], row: usize) -> Vec<f32> {
        let scripted = self.scripted(rows, row);
        let (last, parent) = rows[row];
        let before = parent.map_or(0, |parent| rows[parent].0);
        let depth = std::iter::successors(Some(row), |&row| rows[row].1).count() as u64;
        let pair = noise::hash(u64::from(before), 1, self.seed, last);
        let logit = |(token, taste): (usize, &f64)| {
            let token = token as TokenId;
            let own = noise::gumbel(u64::from(last), 2, 0, token);
            let wider = noise::gumbel(pair, 3, depth / 8, token);
            let script = if scripted == Some(token) { 99.0 } else { 0.0 };
            (taste + 2.0 * own + 0.4 * wider + script) as f32
        };
        self.taste.iter().enumerate().map(logit).collect()
    }

    fn rows(&mut self, lane: Lane) -> &mut Vec<Row> {
        self.lanes[lane.0].as_mut().expect("a reserved lane")
    }
}

fn taste(tokenizer: &Tokenizer, token: TokenId) -> f64 {
    if tokenizer.is_special(token) {
        return if tokenizer.token(token).as_deref() == Some(EOS) { 0.3 } else { -20.0 };
    }
    let text = tokenizer.decode(&[token], false).unwrap();
    match text.as_str() {
        // Part of a character.
        "\u{FFFD}" if ["Ã", "¼", "©", "â", "Ģ", "Ķ"].contains(&tokenizer.token(token).unwrap().as_str()) => {
            2.5
        }
        "\u{FFFD}" => -4.0,
        text if text.chars().all(|c| c.is_alphanumeric() || c == ' ') => 2.0,
        _ => 0.5,
    }
}

impl Forward for Babble {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn reserve(&mut self) -> Option<Lane> {
        let free = self.lanes.iter().position(Option::is_none)?;
        self.lanes[free] = Some(Vec::new());
        Some(Lane(free))
    }

    fn release(&mut self, lane: Lane) {
        self.lanes[lane.0] = None;
    }

    fn len(&self, lane: Lane) -> usize {
        self.lanes[lane.0].as_ref().map_or(0, Vec::len)
    }

    fn rewind(&mut self, lane: Lane, len: usize) {
        self.rows(lane).truncate(len);
    }

    fn commit(&mut self, lane: Lane, base: usize, path: &[usize]) -> Result<(), ModelError> {
        let rows = self.rows(lane);
        let kept =
            path.iter().enumerate().map(|(at, &node)| (rows[base + node].0, (base + at).checked_sub(1)));
        let kept: Vec<Row> = kept.collect();
        rows.truncate(base);
        rows.extend(kept);
        Ok(())
    }

    fn fork(&mut self, from: Lane, to: Lane, len: usize) -> Result<(), ModelError> {
        let copied = self.rows(from)[..len].to_vec();
        *self.rows(to) = copied;
        Ok(())
    }

    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError> {
        self.handle.pass()?;
        if !self.step.is_zero() {
            std::thread::sleep(self.step);
        }
        let taps = usize::from(self.head.is_some());
        let rows = feeds.iter().map(Feed::wanted);
        let mut logits = Logits::zeroed(self.config.vocabulary, rows).with_taps(taps);
        for (number, feed) in feeds.iter().enumerate() {
            let context = self.config.context;
            let rows = self.rows(feed.lane);
            let base = rows.len();
            let wanted = base + feed.tokens.len();
            if wanted > context {
                return Err(ModelError::Full { wanted, context });
            }
            for (index, &token) in feed.tokens.iter().enumerate() {
                let within = feed.parents.map_or(index.checked_sub(1), |parents| parents[index]);
                rows.push((token, within.map_or(base.checked_sub(1), |parent| Some(base + parent))));
            }
            let rows = rows.clone();
            let first = match feed.rows {
                Rows::None => feed.tokens.len(),
                Rows::Last => feed.tokens.len().saturating_sub(1),
                Rows::From(first) => first,
            };
            for (row, index) in (first..feed.tokens.len()).enumerate() {
                logits.write(number, row, &self.logits(&rows, base + index));
                logits.write_taps(number, row, &[1.0][..taps]);
            }
        }
        Ok(logits)
    }

    fn propose(&mut self, behind: &[Behind<'_>]) -> Vec<HeadDraft> {
        let Some(head) = self.head else { return Vec::new() };
        assert!(behind.iter().all(|behind| behind.taps == [1.0]), "the hidden state of the token");
        behind.iter().map(|behind| self.head_draft(head, behind.token, behind.draws)).collect()
    }
}
