//! Proposing tokens: the draft itself and the drafters that need no model.
//!
//! PURE. A drafter reads the context through [`Feedback`], and answers a [`Budget`] with a
//! [`Tree`]. A new one is a file here, a row in the matches of [`Source`] and [`LookupSpec`], and a
//! reader in the policy file.

mod context;
pub mod corpus;
pub mod head;
pub mod merge;
pub mod phrasebook;
pub mod prediction;
pub mod prompt_lookup;
pub mod stop;
pub mod suffix;
pub mod tree;

pub use context::Context;
pub use head::Head;
pub use merge::Merged;
pub use phrasebook::{Phrasebook, Phrases, Spelling};
pub use prediction::Prediction;
pub use prompt_lookup::{Ngram, PromptLookup};
pub use stop::{Stop, chance_by_entropy, chance_by_margin};
pub use suffix::{Growing, Suffix, View};
pub use tree::{Agreement, DrafterId, Features, Node, Tree, Vote, Votes};

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::units::TokenId;
use crate::words::Proposal;

/// Maximum size of a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Maximum nodes in all.
    pub nodes: usize,
    /// Maximum nodes on one path.
    pub depth: usize,
}

/// Tokens added to the context since the last feedback.
#[derive(Clone, Copy, Debug)]
pub struct Feedback<'a> {
    /// The new tokens, in order: first the prompt's, then every emitted one.
    pub tokens: &'a [TokenId],
    /// The part of the context that they belong to.
    pub origin: Origin,
    /// The context with them, where lookups search it ([`LookupSpec::searches`]).
    pub text: &'a Growing,
}

/// The part of the context that a token belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Prompt,
    Output,
}

/// A drafter that lives in the proxy and needs no model.
pub trait Lookup: Send {
    /// Learns the tokens that were added to the context.
    fn observe(&mut self, seen: &Feedback<'_>);
    /// Learns a proposal of the backend that follows the first `context` tokens of the context and
    /// then [`Proposal::behind`], which are not observed yet.
    fn observe_proposal(&mut self, _proposal: &Proposal, _context: usize) {}
    /// False while it lacks what it drafts from, so that an empty draft says nothing about it.
    fn is_informed(&self) -> bool {
        true
    }
    /// Proposes tokens after everything observed so far, which is `text`; an empty tree if it has
    /// no proposal.
    fn draft(&self, text: &Growing, budget: Budget) -> Tree;
    /// Bytes allocated for this session alone; the context, and data that sessions share, is
    /// accounted by its owner.
    fn bytes(&self) -> usize;
}

/// The requests whose texts a drafter uses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Those of the same request.
    #[default]
    Request,
    /// Those of the same tenant.
    Tenant,
    /// Those of all tenants.
    Global,
}

/// The kind of a drafter: its name, and its prior.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Source {
    /// The longest recent match in the request's context.
    PromptLookup,
    /// The most frequent continuation, in this request and in earlier ones.
    Suffix,
    /// The prediction that the client sent.
    Prediction,
    /// Phrases of the operator's, and the skeletons of the prompt's schemas.
    Phrasebook,
    /// The target's head.
    Head,
    /// A local language model.
    Model,
}

/// Number of buckets of a draft token's feature ([`Source::bucket`]), by which acceptance is
/// counted.
pub const BUCKETS: usize = 6;

impl Source {
    pub const ALL: [Self; 6] =
        [Self::PromptLookup, Self::Suffix, Self::Prediction, Self::Phrasebook, Self::Head, Self::Model];

    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name in policies, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PromptLookup => "prompt_lookup",
            Self::Suffix => "suffix",
            Self::Prediction => "prediction",
            Self::Phrasebook => "phrasebook",
            Self::Head => "head",
            Self::Model => "model",
        }
    }

    /// The bucket of the feature that predicts its acceptance best, below [`BUCKETS`].
    pub fn bucket(self, features: Features) -> usize {
        match self {
            Self::PromptLookup | Self::Prediction => by_length(features.match_len),
            // A continuation that was seen only once has an unreliable share, so that the length of
            // the match decides.
            Self::Suffix => match features.share {
                share if share < 0.3 => 0,
                share if share < 0.6 => 1,
                share if share < 0.9 => 2,
                _ => by_length(features.match_len).clamp(3, 5),
            },
            // A phrase; a skeleton that several shapes agree on; the only one that remains.
            Self::Phrasebook => match features.share {
                share if share <= 0.0 => 0,
                share if share < 1.0 => 1,
                _ => 2,
            },
            // By its probability, which is near the truth.
            Self::Head => [0.1, 0.3, 0.5, 0.7, 0.9].iter().filter(|&&limit| features.share >= limit).count(),
            Self::Model => match features.margin {
                margin if margin <= 0.0 => 0,
                margin if margin < 0.5 => 1,
                margin if margin < 1.5 => 2,
                margin if margin < 3.0 => 3,
                margin if margin < 6.0 => 4,
                _ => 5,
            },
        }
    }

    /// Acceptance of a first token before any was observed, 0 to 1, indexed by bucket.
    pub const fn prior(self) -> [f64; BUCKETS] {
        match self {
            Self::PromptLookup | Self::Prediction => [0.5, 0.3, 0.45, 0.6, 0.75, 0.85],
            Self::Suffix => [0.15, 0.4, 0.65, 0.7, 0.75, 0.85],
            Self::Phrasebook => [0.7; BUCKETS],
            Self::Head => [0.05, 0.25, 0.5, 0.7, 0.85, 0.95],
            Self::Model => [0.5; BUCKETS],
        }
    }
}

fn by_length(match_len: u32) -> usize {
    match match_len {
        0 => 0,
        1..=2 => 1,
        3..=4 => 2,
        5..=8 => 3,
        9..=16 => 4,
        _ => 5,
    }
}

/// A lookup drafter as a policy names it.
#[derive(Clone, Debug, PartialEq)]
pub enum LookupSpec {
    /// The longest recent match in the request's context.
    PromptLookup(Ngram),
    /// The most frequent continuation, in this request and in those of the scope.
    Suffix(Scope),
    /// The prediction that the client sent.
    Prediction,
    /// Phrases of the operator's, and the skeletons of the prompt's schemas.
    Phrasebook {
        phrases: Arc<Phrases>,
        /// True if the schemas in the prompt are used.
        schemas: bool,
    },
    /// The target's head.
    Head,
}

impl LookupSpec {
    /// The kind of drafter.
    pub const fn source(&self) -> Source {
        match self {
            Self::PromptLookup(_) => Source::PromptLookup,
            Self::Suffix(_) => Source::Suffix,
            Self::Prediction => Source::Prediction,
            Self::Phrasebook { .. } => Source::Phrasebook,
            Self::Head => Source::Head,
        }
    }

    /// The requests whose texts it reads from the corpus; `None` if it reads none.
    pub const fn corpus_scope(&self) -> Option<Scope> {
        match self {
            Self::Suffix(scope) => Some(*scope),
            Self::PromptLookup(_) | Self::Prediction | Self::Phrasebook { .. } | Self::Head => None,
        }
    }

    /// True if it searches the text of the request.
    pub const fn searches(&self) -> bool {
        matches!(self, Self::PromptLookup(_) | Self::Suffix(_))
    }

    /// True if it reads the prediction that the client sent.
    pub const fn reads_prediction(&self) -> bool {
        matches!(self, Self::PromptLookup(_) | Self::Prediction)
    }

    /// True if it reads the schema that constrains an output.
    pub const fn reads_schema(&self) -> bool {
        matches!(self, Self::Phrasebook { schemas: true, .. })
    }

    /// True if it can propose anything in a session with `shared`.
    fn is_applicable(&self, shared: &Shared) -> bool {
        match self {
            Self::PromptLookup(_) | Self::Suffix(_) => true,
            Self::Prediction => !shared.prediction.is_empty(),
            Self::Head => shared.proposes,
            Self::Phrasebook { phrases, schemas } => {
                shared.spelling.is_some() && (*schemas || !phrases.texts().is_empty())
            }
        }
    }

    /// A new drafter that has seen nothing and votes as `id`; `None` if it cannot propose anything.
    pub fn build(&self, id: DrafterId, shared: &Shared) -> Option<Box<dyn Lookup>> {
        if !self.is_applicable(shared) {
            return None;
        }
        Some(match self {
            Self::PromptLookup(ngram) => Box::new(PromptLookup::new(*ngram, id)),
            Self::Suffix(scope) => Box::new(Suffix::new(shared.earlier(*scope), id)),
            Self::Head => Box::new(Head::new(id)),
            Self::Prediction => Box::new(Prediction::new(Arc::clone(&shared.prediction), id)),
            Self::Phrasebook { phrases, schemas } => {
                let spelling = Arc::clone(shared.spelling.as_ref()?);
                let drafter = Phrasebook::new(Arc::clone(phrases), *schemas, spelling, id);
                Box::new(match &shared.schema {
                    Some(schema) => drafter.constrained(schema),
                    None => drafter,
                })
            }
        })
    }
}

/// Data that lookups use in addition to their request, passed to a session when it starts.
#[derive(Clone, Debug, Default)]
pub struct Shared {
    /// Earlier texts of the request's tenant; none without a tenant that is trusted.
    pub of_tenant: View,
    /// Earlier texts of all tenants that share theirs.
    pub of_all: View,
    /// The prediction that the client sent, in the target's tokens.
    pub prediction: Arc<[TokenId]>,
    /// True if the backend sends proposals of a head.
    pub proposes: bool,
    /// The target's tokens as bytes; `None` where that is not known.
    pub spelling: Option<Arc<dyn Spelling>>,
    /// The JSON schema that constrains the output; `None` without one.
    pub schema: Option<Arc<Value>>,
}

impl Shared {
    fn earlier(&self, scope: Scope) -> View {
        match scope {
            Scope::Request => View::default(),
            Scope::Tenant => Arc::clone(&self.of_tenant),
            Scope::Global => Arc::clone(&self.of_all),
        }
    }
}

#[cfg(test)]
mod tests {
    //! The contract that every lookup drafter keeps.

    use super::suffix::Segment;
    use super::*;
    use proptest::prelude::*;

    fn specs() -> [LookupSpec; 7] {
        let phrases = |texts: &[(&str, &str)]| {
            let texts = texts.iter().map(|(trigger, text)| ((*trigger).to_owned(), (*text).to_owned()));
            Arc::new(Phrases::new(texts.collect()).unwrap())
        };
        [
            LookupSpec::PromptLookup(Ngram { min: 1, max: 3 }),
            LookupSpec::PromptLookup(Ngram { min: 2, max: 8 }),
            LookupSpec::Suffix(Scope::Request),
            LookupSpec::Suffix(Scope::Tenant),
            LookupSpec::Prediction,
            LookupSpec::Phrasebook { phrases: phrases(&[]), schemas: true },
            LookupSpec::Phrasebook { phrases: phrases(&[("a", "1}"), ("}", "{\"a\":")]), schemas: false },
        ]
    }

    /// Tokens that can form JSON.
    #[derive(Debug)]
    struct Parts;

    const PARTS: [&str; 5] = ["{\"", "a", "\":", "1", "}"];

    impl Spelling for Parts {
        fn bytes(&self, token: TokenId) -> Vec<u8> {
            PARTS.get(token as usize).map(|part| part.as_bytes().to_vec()).unwrap_or_default()
        }

        fn tokens(&self, text: &str) -> Vec<(TokenId, usize)> {
            let mut at = 0;
            let mut tokens = Vec::new();
            while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
                let part = PARTS.iter().position(|part| rest.starts_with(part));
                at += part.map_or(1, |part| PARTS[part].len());
                tokens.extend(part.map(|part| (part as TokenId, at)));
            }
            tokens
        }
    }

    fn shared() -> Shared {
        let earlier =
            [Segment::build(&[(1, &[0, 1, 2, 3, 0, 1, 2, 4])]), Segment::build(&[(2, &[2, 2, 3, 1])])];
        Shared {
            of_tenant: earlier.map(Arc::new).into(),
            prediction: Arc::new([1, 2, 3, 1, 4]),
            spelling: Some(Arc::new(Parts)),
            ..Shared::default()
        }
    }

    /// A drafter with its context.
    struct Reader {
        context: Context,
        drafter: Box<dyn Lookup>,
    }

    impl Reader {
        /// One that has read a prompt: `{"a":1}` and more.
        fn new(spec: &LookupSpec, prompt: &[TokenId]) -> Self {
            let context = Context::new([spec], &shared());
            let drafter = spec.build(spec.source().into(), &shared()).expect("it can propose something");
            let mut this = Self { context, drafter };
            this.read(&[0, 1, 2, 3, 4], Origin::Prompt);
            this.read(prompt, Origin::Prompt);
            this
        }

        fn read(&mut self, tokens: &[TokenId], origin: Origin) {
            self.context.read(tokens, origin, |seen| self.drafter.observe(seen));
        }

        fn draft(&self, nodes: usize, depth: usize) -> Tree {
            self.drafter.draft(self.context.text(), Budget { nodes, depth })
        }

        fn bytes(&self) -> usize {
            self.context.bytes() + self.drafter.bytes()
        }
    }

    #[test]
    fn a_drafter_that_has_seen_nothing_proposes_nothing() {
        for spec in &specs() {
            let drafter = spec.build(spec.source().into(), &Shared::default());
            let budget = Budget { nodes: 8, depth: 8 };
            assert!(drafter.is_none_or(|drafter| drafter.draft(&Growing::new(), budget).is_empty()));
        }
    }

    /// The bytes per token of the request and its index are within those of docs/drafters.md.
    #[test]
    fn the_bytes_of_a_drafter_grow_with_its_request_within_the_documented_limits() {
        let most = |source| match source {
            Source::PromptLookup | Source::Suffix => 16,
            Source::Prediction => 9,
            Source::Phrasebook | Source::Head | Source::Model => 0,
        };
        let mut rng = crate::units::SplitMix64::new(7);
        // Every other run of tokens is a repetition, as in real texts; the rest is random, unlike
        // real text.
        let mut text: Vec<TokenId> = Vec::new();
        while text.len() < 32_768 {
            let from = rng.below(text.len() as u64 + 1) as usize;
            let again: Vec<TokenId> = text.iter().skip(from).take(30).copied().collect();
            text.extend(again);
            text.extend((0..30).map(|_| rng.below(8192) as TokenId));
        }
        for spec in specs().iter().filter(|spec| spec.source() != Source::Phrasebook) {
            let mut reader = Reader::new(spec, &[]);
            let fresh = reader.bytes();
            reader.read(&text, Origin::Output);
            let each = (reader.bytes() - fresh) as f64 / text.len() as f64;
            let source = spec.source();
            assert!(each >= 4.0 && each <= f64::from(most(source)), "{source:?}: {each:.1} bytes per token");
        }
    }

    #[test]
    fn every_drafter_proposes_something_after_some_text() {
        for spec in &specs() {
            let texts: [&[TokenId]; 3] = [&[0], &[1, 2], &[0, 1, 2, 3, 4, 0, 1, 2]];
            let speaks = texts.into_iter().any(|text| {
                let mut reader = Reader::new(spec, &[]);
                reader.read(text, Origin::Output);
                !reader.draft(8, 8).is_empty()
            });
            assert!(speaks, "{spec:?}");
        }
    }

    proptest! {
        #[test]
        fn a_draft_keeps_its_budget_and_depends_on_the_past_alone(
            prompt in proptest::collection::vec(0u32..5, 0..20),
            text in proptest::collection::vec(0u32..5, 0..60),
            cut in 0usize..60,
            nodes in 0usize..10,
            depth in 0usize..10,
        ) {
            for spec in &specs() {
                let (mut whole, mut pieces) = (Reader::new(spec, &prompt), Reader::new(spec, &prompt));
                whole.read(&text, Origin::Output);
                let cut = cut.min(text.len());
                pieces.read(&text[..cut], Origin::Output);
                let _ = pieces.draft(nodes, depth);
                pieces.read(&text[cut..], Origin::Output);
                let draft = whole.draft(nodes, depth);
                // That one follows its last match while it reads, and searches at the end.
                let searches_once = spec.source() == Source::PromptLookup;
                prop_assert!(searches_once || draft == pieces.draft(nodes, depth));
                prop_assert_eq!(&draft, &whole.draft(nodes, depth));
                prop_assert!(draft.len() <= nodes);
                for node in 0..draft.len() {
                    prop_assert!(draft.path(node).len() <= depth);
                    prop_assert!(draft.nodes()[node].token < 5, "only tokens that were seen");
                }
                let mut shorter = whole.draft(nodes + 1, depth);
                shorter.truncate(nodes);
                prop_assert_eq!(draft, shorter, "a smaller budget is a truncation");
            }
        }
    }
}
