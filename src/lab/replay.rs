//! Replays recorded texts: every drafter drafts for them as in a session, and its mean acceptance
//! length is measured.
//!
//! No server is called, so it takes seconds, and everything but the times is the same in every run.
//! A round is a draft, its accepted prefix (the drafted tokens that match the recorded text), and
//! one more token; the next round begins after that.
//!
//! A stream is a line `{"prompt": [ids], "output": [ids], "choices": [ids]}`; `choices[i]` is the
//! token that a model drafter would have chosen at the position of `output[i]` (recorded by
//! tests/control/record.py), and may be omitted.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use foretell_core::control::TemperatureBucket;
use foretell_core::control::survival::Survival;
use foretell_core::draft::corpus::{Corpus, Key, Limits};
use foretell_core::draft::{
    Budget, Context, DrafterId, Features, Lookup, LookupSpec, Ngram, Origin, Scope, Shared, Source, Spelling,
    Tree, View, merge,
};
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::Shape;

/// A recorded text.
#[derive(Clone, Debug, Deserialize)]
pub struct Stream {
    /// Ids of the prompt.
    pub prompt: Vec<TokenId>,
    /// Ids of the output.
    pub output: Vec<TokenId>,
    /// A model drafter's choice at the position of each of them; empty if there was none.
    #[serde(default)]
    pub choices: Vec<TokenId>,
}

/// A drafter of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayDrafter {
    /// `prompt_lookup` with the default lengths.
    PromptLookup,
    /// `suffix` over the request alone.
    Suffix,
    /// `suffix` over the request and the earlier streams.
    Memory,
    /// `phrasebook` without phrases: only the schemas in the prompt. It needs the tokenizer of the
    /// texts.
    Phrasebook,
    /// The recorded choices of a model drafter.
    Model,
    /// All of them merged into one tree.
    Merged,
}

impl ReplayDrafter {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::PromptLookup, Self::Suffix, Self::Memory, Self::Phrasebook, Self::Model, Self::Merged];

    /// The name in arguments and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PromptLookup => "prompt_lookup",
            Self::Suffix => "suffix",
            Self::Memory => "suffix_tenant",
            Self::Phrasebook => "phrasebook",
            Self::Model => "model",
            Self::Merged => "merged",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|drafter| drafter.name() == name)
    }

    fn lookup(self) -> Option<LookupSpec> {
        match self {
            Self::PromptLookup => Some(LookupSpec::PromptLookup(Ngram::default())),
            Self::Suffix => Some(LookupSpec::Suffix(Scope::Request)),
            Self::Memory => Some(LookupSpec::Suffix(Scope::Tenant)),
            Self::Phrasebook => Some(LookupSpec::Phrasebook { phrases: Arc::default(), schemas: true }),
            Self::Model | Self::Merged => None,
        }
    }
}

/// Settings of a replay.
#[derive(Clone, Copy, Debug)]
pub struct ReplaySettings<'a> {
    /// Maximum number of nodes of a draft.
    pub gamma: usize,
    /// Chains only, or trees.
    pub shape: Shape,
    /// Texts that are put into the corpus before the first stream.
    pub earlier: &'a [Stream],
    /// Prompts are preceded by tokens of earlier streams until they have this number of tokens.
    pub context: usize,
    /// Assumed time of a round without drafting; nothing is verified here.
    pub verify: Duration,
    /// The tokens of the texts as bytes, for drafters that read bytes.
    pub spelling: Option<&'a Arc<dyn Spelling>>,
}

/// Figures of a drafter over some streams.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its name.
    pub drafter: &'static str,
    /// Name of the workload.
    pub workload: String,
    pub streams: usize,
    /// Rounds of all streams.
    pub rounds: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Drafted tokens accepted.
    pub accepted: u64,
    /// Output tokens.
    pub tokens: u64,
    /// Mean acceptance length: output tokens per round.
    pub mean_acceptance_length: f64,
    /// Drafting and learning, microseconds per output token: mean, median and 99th percentile.
    pub micros: [f64; 3],
    /// Drafting and learning ÷ all time, 0 to 1, if every round took [`ReplaySettings::verify`] in
    /// addition.
    pub share: f64,
    /// Time to read the prompts, microseconds per prompt token.
    pub reading: f64,
    /// Bytes of the corpus per stored token; `None` without a corpus.
    pub bytes_per_token: Option<f64>,
}

/// A file of streams that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// Path of the file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A line is not a stream.
    #[error("{path}:{line}: {source}")]
    Line {
        /// Path of the file.
        path: String,
        /// Line number, counted from 1.
        line: usize,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// There is no stream in it.
    #[error("{0}: no streams")]
    Empty(String),
}

/// The streams of a file.
///
/// # Errors
/// [`Error`].
pub fn read(path: &Path) -> Result<Vec<Stream>, Error> {
    let shown = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|source| Error::Read { path: shown.clone(), source })?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let stream = |(at, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|source| Error::Line { path: shown.clone(), line: at + 1, source })
    };
    let streams: Vec<Stream> = lines.map(stream).collect::<Result<_, _>>()?;
    if streams.is_empty() { Err(Error::Empty(shown)) } else { Ok(streams) }
}

/// Replays all streams with a drafter; with [`ReplayDrafter::Merged`], with `all` others merged.
pub fn play(
    drafter: ReplayDrafter,
    all: &[ReplayDrafter],
    workload: &str,
    streams: &[Stream],
    settings: ReplaySettings<'_>,
) -> Row {
    let single = [drafter];
    let others: Vec<ReplayDrafter> =
        all.iter().copied().filter(|one| *one != ReplayDrafter::Merged).collect();
    let drafters = if drafter == ReplayDrafter::Merged { &others[..] } else { &single[..] };
    let mut earlier = EarlierTexts::new(drafters.contains(&ReplayDrafter::Memory), settings);
    let mut score = Score::default();
    let mut survival = Survival::default();
    for (at, stream) in streams.iter().enumerate() {
        let context = longer(streams, at, settings.context);
        let mut replay = StreamReplay::start(drafters, &earlier, stream, &context, &mut score);
        replay.play(&mut survival, settings, &mut score);
        earlier.learn(stream);
    }
    score.row(drafter.name(), workload, streams.len(), settings.verify, earlier.bytes_per_token())
}

/// The tokens before a stream's prompt that make its context long enough.
fn longer(streams: &[Stream], at: usize, wanted: usize) -> Vec<TokenId> {
    let mut missing = wanted.saturating_sub(streams.get(at).map_or(0, |stream| stream.prompt.len()));
    let mut context = Vec::new();
    for turn in 1.. {
        if missing == 0 || streams.is_empty() {
            break;
        }
        let before = (at + streams.len() * turn - turn) % streams.len();
        for &token in
            streams.get(before).into_iter().flat_map(|other| other.prompt.iter().chain(&other.output))
        {
            if missing == 0 {
                break;
            }
            context.push(token);
            missing -= 1;
        }
    }
    context
}

/// State that outlives a stream: the corpus.
struct EarlierTexts {
    corpus: Option<Corpus>,
    view: View,
    spelling: Option<Arc<dyn Spelling>>,
}

impl EarlierTexts {
    fn new(wanted: bool, settings: ReplaySettings<'_>) -> Self {
        let limits = Limits { bytes: usize::MAX, ttl: Duration::from_hours(1) };
        let corpus = wanted.then(|| Corpus::new(limits, 1));
        let spelling = settings.spelling.map(Arc::clone);
        let mut this = Self { corpus, view: View::default(), spelling };
        for stream in settings.earlier {
            this.learn(stream);
        }
        this
    }

    /// The part of the earlier streams that drafters may read.
    fn shared(&self) -> Shared {
        let of_tenant = Arc::clone(&self.view);
        Shared { of_tenant, spelling: self.spelling.clone(), ..Shared::default() }
    }

    fn learn(&mut self, stream: &Stream) {
        if let Some(corpus) = &mut self.corpus {
            corpus.learn(&key(), None, &[&stream.prompt[..], &stream.output].concat(), Tick::default());
            self.view = corpus.view(&key());
        }
    }

    fn bytes_per_token(&self) -> Option<f64> {
        let corpus = self.corpus.as_ref()?;
        let tokens: usize = corpus.holdings().map(|(_, sizes)| sizes.tokens).sum();
        Some(corpus.bytes() as f64 / tokens.max(1) as f64)
    }
}

fn key() -> Key {
    Key { model: String::new(), vocabulary: String::new(), tenant: None }
}

/// The drafters of one stream.
struct StreamReplay<'a> {
    stream: &'a Stream,
    context: Context,
    lookups: Vec<Box<dyn Lookup>>,
    models: bool,
}

impl<'a> StreamReplay<'a> {
    fn start(
        drafters: &[ReplayDrafter],
        earlier: &EarlierTexts,
        stream: &'a Stream,
        context: &[TokenId],
        score: &mut Score,
    ) -> Self {
        let specs: Vec<LookupSpec> = drafters.iter().filter_map(|drafter| drafter.lookup()).collect();
        let shared = earlier.shared();
        let built = specs.iter().enumerate().filter_map(|(at, spec)| {
            let id = DrafterId { source: spec.source(), number: at as u8 };
            spec.build(id, &shared)
        });
        let models = drafters.contains(&ReplayDrafter::Model);
        let mut this =
            Self { stream, context: Context::new(&specs, &shared), lookups: built.collect(), models };
        let begun = Instant::now();
        for tokens in [context, &stream.prompt] {
            this.read(tokens, Origin::Prompt);
        }
        score.read(begun.elapsed(), context.len() + stream.prompt.len());
        this
    }

    fn read(&mut self, tokens: &[TokenId], origin: Origin) {
        let lookups = &mut self.lookups;
        self.context.read(tokens, origin, |seen| {
            for lookup in lookups {
                lookup.observe(seen);
            }
        });
        self.context.tidy();
    }

    fn play(&mut self, survival: &mut Survival, settings: ReplaySettings<'_>, score: &mut Score) {
        let output = &self.stream.output;
        let budget = Budget { nodes: settings.gamma, depth: settings.gamma };
        let mut done = 0;
        while done < output.len() {
            let begun = Instant::now();
            let mut drafts: Vec<Tree> =
                self.lookups.iter().map(|lookup| lookup.draft(self.context.text(), budget)).collect();
            drafts.extend(self.models.then(|| self.chosen(done, settings.gamma)));
            let accept =
                |vote, company, depth| survival.conditional(TemperatureBucket::Greedy, vote, company, depth);
            let draft = merge::merge(&drafts, budget, settings.shape, accept).tree;
            let drafting = begun.elapsed();
            let run = followed(survival, &draft, output.get(done..).unwrap_or_default());
            let end = (done + run + 1).min(output.len());
            let begun = Instant::now();
            self.read(output.get(done..end).unwrap_or_default(), Origin::Output);
            score.round(&draft, run.min(end - done), end - done, drafting + begun.elapsed());
            done = end;
        }
    }

    /// The model's recorded chain; empty where nothing was recorded.
    fn chosen(&self, done: usize, gamma: usize) -> Tree {
        let rest = self.stream.choices.get(done..).unwrap_or_default();
        Tree::chain(rest.get(..gamma).unwrap_or(rest), Source::Model, Features::default())
    }
}

/// Number of accepted tokens of the draft; every compared token updates the survival estimates.
fn followed(survival: &mut Survival, draft: &Tree, text: &[TokenId]) -> usize {
    let (mut position, mut run) = (None, 0);
    for (depth, &token) in text.iter().enumerate() {
        for at in draft.children(position) {
            let Some(node) = draft.nodes().get(at) else { continue };
            for vote in node.votes.by_source() {
                survival.observe(TemperatureBucket::Greedy, vote, node.company, depth, node.token == token);
            }
        }
        match draft.child(position, token) {
            Some(node) => (position, run) = (Some(node), run + 1),
            None => break,
        }
    }
    run
}

/// Sums over rounds.
#[derive(Default)]
struct Score {
    rounds: u64,
    drafted: u64,
    accepted: u64,
    tokens: u64,
    /// Nanoseconds per output token, and the number of tokens of the round.
    spent: Vec<(u64, u64)>,
    reading: Duration,
    read: usize,
}

impl Score {
    fn read(&mut self, spent: Duration, tokens: usize) {
        self.reading += spent;
        self.read += tokens;
    }

    fn round(&mut self, draft: &Tree, accepted: usize, tokens: usize, spent: Duration) {
        self.rounds += 1;
        self.drafted += draft.len() as u64;
        self.accepted += accepted as u64;
        self.tokens += tokens as u64;
        let each = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX) / tokens.max(1) as u64;
        self.spent.push((each, tokens as u64));
    }

    fn mean(&self) -> f64 {
        let sum: u64 = self.spent.iter().map(|(each, tokens)| each * tokens).sum();
        sum as f64 / self.tokens.max(1) as f64
    }

    /// Drafting and learning ÷ all time, if a round takes `verify` in addition.
    fn share(&self, verify: Duration) -> f64 {
        let drafting = self.mean() * self.tokens as f64;
        let all = drafting + verify.as_nanos() as f64 * self.rounds as f64;
        if all > 0.0 { drafting / all } else { 0.0 }
    }

    /// Quantile of the time per output token, nanoseconds, weighted by tokens.
    fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.spent.clone();
        sorted.sort_unstable();
        let mut remaining = (self.tokens as f64 * share).ceil();
        let reached = sorted.iter().find(|(_, tokens)| {
            remaining -= *tokens as f64;
            remaining <= 0.0
        });
        reached.map_or(0.0, |&(each, _)| each as f64)
    }

    fn row(
        &self,
        drafter: &'static str,
        workload: &str,
        streams: usize,
        verify: Duration,
        bytes_per_token: Option<f64>,
    ) -> Row {
        Row {
            drafter,
            workload: workload.to_owned(),
            streams,
            rounds: self.rounds,
            drafted: self.drafted,
            accepted: self.accepted,
            tokens: self.tokens,
            mean_acceptance_length: self.tokens as f64 / self.rounds.max(1) as f64,
            micros: [self.mean(), self.quantile(0.5), self.quantile(0.99)].map(|nanos| nanos / 1e3),
            share: self.share(verify),
            reading: self.reading.as_secs_f64() * 1e6 / self.read.max(1) as f64,
            bytes_per_token,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams() -> Vec<Stream> {
        let text: Vec<TokenId> = (0..40).collect();
        let one = Stream { prompt: vec![100, 101], output: text.clone(), choices: text.clone() };
        vec![one.clone(), Stream { choices: Vec::new(), ..one }]
    }

    const GAME: ReplaySettings<'_> = ReplaySettings {
        gamma: 4,
        shape: Shape::Tree,
        earlier: &[],
        context: 0,
        spelling: None,
        verify: Duration::from_millis(10),
    };

    #[test]
    fn share_is_drafting_time_over_all_time() {
        let mut score = Score::default();
        let draft = Tree::chain(&[1, 2], Source::Model, Features::default());
        // Two rounds: 3 tokens in 3 ms and 1 in 2 ms.
        score.round(&draft, 2, 3, Duration::from_millis(3));
        score.round(&draft, 0, 1, Duration::from_millis(2));
        assert!((score.share(Duration::from_millis(10)) - 5.0 / 25.0).abs() < 1e-9);
        let none = Score::default();
        assert_eq!(none.share(Duration::ZERO).to_bits(), 0.0_f64.to_bits());
    }

    #[test]
    fn a_perfect_drafter_yields_gamma_plus_one_and_a_useless_one_yields_one() {
        let of = |drafter| play(drafter, &ReplayDrafter::ALL, "w", &streams(), GAME);
        let lookup = of(ReplayDrafter::PromptLookup);
        assert_eq!((lookup.rounds, lookup.tokens, lookup.accepted), (80, 80, 0), "nothing repeats");
        let model = of(ReplayDrafter::Model);
        assert_eq!((model.rounds, model.tokens), (8 + 40, 80), "the second stream has no choices");
        let corpus = of(ReplayDrafter::Memory);
        // The first stream is learnt for the second: its first round has one matching token and is
        // too short to draft.
        assert!(
            corpus.rounds < 40 + 14 && corpus.bytes_per_token.is_some_and(|bytes| bytes > 8.0),
            "{corpus:?}"
        );
        let merged = of(ReplayDrafter::Merged);
        assert!(
            merged.rounds <= 8 + 14 && merged.mean_acceptance_length > model.mean_acceptance_length,
            "{merged:?}"
        );
    }

    /// Every token is a byte.
    #[derive(Debug)]
    struct Bytes;

    impl Spelling for Bytes {
        fn bytes(&self, token: TokenId) -> Vec<u8> {
            vec![token as u8]
        }

        fn tokens(&self, text: &str) -> Vec<(TokenId, usize)> {
            text.bytes().enumerate().map(|(at, byte)| (TokenId::from(byte), at + 1)).collect()
        }
    }

    #[test]
    fn a_phrasebook_drafts_from_prompt_schemas_if_it_has_the_tokenizer() {
        let tokens = |text: &str| Bytes.tokens(text).into_iter().map(|(token, _)| token).collect();
        let prompt = tokens("{\"properties\": {\"unit\": {\"const\": \"kelvin\"}}}");
        let stream = Stream { prompt, output: tokens("{\"unit\": \"kelvin\"}"), choices: Vec::new() };
        let of = |spelling| {
            play(
                ReplayDrafter::Phrasebook,
                &[],
                "w",
                std::slice::from_ref(&stream),
                ReplaySettings { spelling, ..GAME },
            )
        };
        let known: Arc<dyn Spelling> = Arc::new(Bytes);
        assert_eq!(of(None).rounds, 18);
        assert_eq!(of(Some(&known)).rounds, 2 + 4, "two bytes begin it, five make a round");
    }

    #[test]
    fn contexts_and_corpora_have_the_requested_length() {
        let all = streams();
        assert_eq!(longer(&all, 0, 500).len(), 498);
        assert_eq!(longer(&all, 0, 2).len(), 0);
        let filled = EarlierTexts::new(true, ReplaySettings { earlier: &all[..1], ..GAME });
        let sizes: usize = filled.corpus.unwrap().holdings().map(|(_, sizes)| sizes.tokens).sum();
        assert_eq!(sizes, 42);
    }
}
