//! The interface of a language model to the sampler, the scheduler and the drafter: tokens in,
//! logits out, and a cache that can be rewound.
//!
//! A trait, so that the code above it is tested with a model whose every logit is known.

use foretell_core::units::TokenId;

/// One sequence's slot in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane(pub usize);

/// Rows of logits that a feed requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// None: the tokens are only added to the cache.
    None,
    /// The row that follows the last token.
    Last,
    /// The rows that follow the tokens from this index on.
    From(usize),
}

/// Tokens that one lane takes in one run.
#[derive(Clone, Copy, Debug)]
pub struct Feed<'a> {
    pub lane: Lane,
    /// Token ids that are appended to the sequence.
    pub tokens: &'a [TokenId],
    /// Index of each token's parent among `tokens`, `None` for the last token that is in the lane
    /// already. Without it the tokens are a chain. A parent precedes its children.
    pub parents: Option<&'a [Option<usize>]>,
    /// Which logits are wanted.
    pub rows: Rows,
    /// Number of `tokens`, at their end, that are a draft to verify with these rows; `None`: no
    /// draft. Logits do not depend on it.
    pub draft: Option<usize>,
}

impl Feed<'_> {
    /// Number of rows of logits that it requests.
    pub fn wanted(&self) -> usize {
        match self.rows {
            Rows::None => 0,
            Rows::Last => self.tokens.len().min(1),
            Rows::From(first) => self.tokens.len().saturating_sub(first),
        }
    }
}

/// Checks feeds by themselves: no lane twice, no feed without tokens, no token outside of the
/// vocabulary, and parents before their children.
pub fn validate(feeds: &[Feed<'_>], vocabulary: usize) -> Result<(), ModelError> {
    for (index, feed) in feeds.iter().enumerate() {
        if feeds.iter().skip(index + 1).any(|other| other.lane == feed.lane) {
            return Err(ModelError::Invalid(format!("lane {} is fed twice in one run", feed.lane.0)));
        }
        if feed.tokens.is_empty() {
            return Err(ModelError::Invalid(format!("lane {} is fed no tokens", feed.lane.0)));
        }
        if let Some(&token) = feed.tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(ModelError::Invalid(format!("token {token} is not in a vocabulary of {vocabulary}")));
        }
        let Some(parents) = feed.parents else { continue };
        let ordered =
            parents.iter().enumerate().all(|(node, parent)| parent.is_none_or(|parent| parent < node));
        if parents.len() != feed.tokens.len() || !ordered {
            return Err(ModelError::Invalid(
                "every node of a tree needs a parent before it, or none".to_owned(),
            ));
        }
    }
    Ok(())
}

/// Properties of a model that are known before it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// Number of token ids.
    pub vocabulary: usize,
    /// Maximum number of tokens in one sequence.
    pub context: usize,
    /// Maximum number of concurrent sequences in the cache.
    pub lanes: usize,
    /// Token ids that end an output.
    pub eos: Vec<TokenId>,
    /// Number of tokens that its head drafts ([`Forward::propose`]); 0 if it has no head.
    pub proposes: usize,
}

/// The rows of one run: per feed the requested ones, in order.
#[derive(Clone, Debug, Default)]
pub struct Logits {
    vocabulary: usize,
    values: Vec<f32>,
    /// First row of each feed, and the end of the last feed.
    starts: Vec<usize>,
    /// Hidden states of the same rows that a head reads, `tap_width` numbers each; empty without a
    /// head.
    taps: Vec<f32>,
    tap_width: usize,
}

impl Logits {
    /// No rows yet, of this many logits each.
    pub fn new(vocabulary: usize) -> Self {
        Self { vocabulary, starts: vec![0], ..Self::default() }
    }

    /// Zeroed rows for each feed, to be written in any order.
    pub fn zeroed(vocabulary: usize, rows: impl Iterator<Item = usize>) -> Self {
        let mut starts = vec![0];
        let mut end = 0;
        starts.extend(rows.map(|count| {
            end += count;
            end
        }));
        Self { vocabulary, values: vec![0.0; end * vocabulary], starts, ..Self::default() }
    }

    /// The same with `width` numbers of hidden state for each row.
    #[must_use]
    pub fn with_taps(mut self, width: usize) -> Self {
        self.tap_width = width;
        self.taps = vec![0.0; self.starts.last().map_or(0, |end| end * width)];
        self
    }

    /// Writes the hidden states of complete rows of a feed from row `row` on. Rows that do not fit
    /// are dropped.
    pub fn write_taps(&mut self, feed: usize, row: usize, states: &[f32]) {
        let Some(&start) = self.starts.get(feed) else { return };
        let from = (start + row) * self.tap_width;
        if let Some(position) = self.taps.get_mut(from..from + states.len()) {
            position.copy_from_slice(states);
        }
    }

    /// The hidden state of row `row` of feed `feed`; `None` without a head.
    pub fn taps(&self, feed: usize, row: usize) -> Option<&[f32]> {
        let index = self.index(feed, row)?;
        self.taps.get(index * self.tap_width..(index + 1) * self.tap_width).filter(|taps| !taps.is_empty())
    }

    fn index(&self, feed: usize, row: usize) -> Option<usize> {
        let index = self.starts.get(feed)?.checked_add(row)?;
        (index < *self.starts.get(feed + 1)?).then_some(index)
    }

    /// Writes complete rows of a feed from row `row` on. Rows that do not fit are dropped.
    pub fn write(&mut self, feed: usize, row: usize, values: &[f32]) {
        let Some(&start) = self.starts.get(feed) else { return };
        let from = (start + row) * self.vocabulary;
        if let Some(position) = self.values.get_mut(from..from + values.len()) {
            position.copy_from_slice(values);
        }
    }

    /// Appends a row to the feed that is being written.
    pub fn push_row(&mut self, row: &[f32]) {
        self.values.extend_from_slice(row);
    }

    /// Ends the feed that is being written.
    pub fn end_feed(&mut self) {
        self.starts.push(self.values.len() / self.vocabulary.max(1));
    }

    /// Row `row` of feed `feed`, counted among its requested rows.
    pub fn row(&self, feed: usize, row: usize) -> Option<&[f32]> {
        let index = self.index(feed, row)?;
        self.values.get(index * self.vocabulary..(index + 1) * self.vocabulary)
    }
}

/// Reason that a model could not do a request.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// More tokens than fit into a lane.
    #[error("{wanted} tokens do not fit into a context of {context}")]
    Full {
        /// Tokens that would be in the lane.
        wanted: usize,
        /// Maximum tokens of a lane.
        context: usize,
    },
    /// A lane, token or parent that does not exist.
    #[error("{0}")]
    Invalid(String),
    /// The underlying runtime failed.
    #[error("the model runtime failed: {0}")]
    Runtime(String),
}

/// A draft of a head: for each position the best tokens with their probabilities, best first: the
/// likeliest, or those that the noise of the position draws. Each position follows the first token
/// of the one before it.
pub type HeadDraft = Vec<Vec<(TokenId, f32)>>;

/// A token for a head to draft behind.
#[derive(Clone, Copy, Debug)]
pub struct Behind<'a> {
    /// The hidden state that the token was chosen by ([`Logits::taps`]).
    pub taps: &'a [f32],
    pub token: TokenId,
    /// How the tokens behind it will be drawn; `None` where the likeliest are taken.
    pub draws: Option<Draws>,
}

/// The noise by which the tokens of a sequence are drawn.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    /// See [`crate::noise`].
    pub seed: u64,
    /// See [`crate::noise`].
    pub choice: u32,
    pub position: u64,
    /// Temperature, above 0.
    pub temperature: f64,
}

/// A language model over a slot cache.
pub trait Forward: Send {
    /// Its sizes and end tokens.
    fn config(&self) -> &ModelConfig;
    fn reserve(&mut self) -> Option<Lane>;
    /// Gives a lane back.
    fn release(&mut self, lane: Lane);
    fn len(&self, lane: Lane) -> usize;
    /// Drops all but the first `len` tokens of a lane.
    fn rewind(&mut self, lane: Lane, len: usize);
    /// Reduces a lane to `base` tokens and then the rows `base + path[0]`, `base + path[1]`, …: one
    /// branch of a tree. Only a target needs it.
    fn commit(&mut self, _lane: Lane, _base: usize, _path: &[usize]) -> Result<(), ModelError> {
        Err(ModelError::Invalid("this model commits no branches".to_owned()))
    }
    /// Makes `to` a copy of the first `len` tokens of `from`. Only a target needs it.
    fn fork(&mut self, _from: Lane, _to: Lane, _len: usize) -> Result<(), ModelError> {
        Err(ModelError::Invalid("this model copies no lanes".to_owned()))
    }
    /// Called where the runs of a scheduler's turn begin. Returns the number of tokens that they
    /// may have together if they are one step; `None` if each is a separate step.
    fn begin_turn(&mut self) -> Option<usize> {
        None
    }
    /// Appends tokens to lanes, and returns the requested logits.
    fn run(&mut self, feeds: &[Feed<'_>]) -> Result<Logits, ModelError>;
    /// The drafts of the model's head behind each of these tokens. None without a head, or where it
    /// failed: a draft is never owed.
    fn propose(&mut self, _behind: &[Behind<'_>]) -> Vec<HeadDraft> {
        Vec::new()
    }
    /// Called when there is nothing to run until the next request.
    fn rest(&mut self) {}
}
