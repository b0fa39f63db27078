//! Proposing tokens: the draft itself and the drafters that need no model.
//!
//! PURE. A drafter sees the past through [`Feedback`], and answers a [`Budget`] with a [`Tree`].

pub mod automaton;
pub mod memory;
pub mod merge;
pub mod phrasebook;
pub mod prediction;
pub mod prompt_lookup;
pub mod recycling;
pub mod sampled;
pub mod stop;
pub mod suffix;
pub mod tree;

pub use merge::Merged;
pub use phrasebook::{Phrasebook, Phrases, Spelling};
pub use prediction::Prediction;
pub use prompt_lookup::{Ngram, PromptLookup};
pub use recycling::{Recycling, Successors};
pub use sampled::Sampled;
pub use stop::{Stop, chance_by_entropy, chance_by_margin};
pub use suffix::{Suffix, View};
pub use tree::{Company, DrafterId, Features, Node, Source, Tree, Vote, Votes};

use std::ops::Deref;
use std::sync::Arc;

use crate::units::TokenId;
use crate::words::Verdict;

/// What is put to the backend. As a tree it can be looked at, whatever it is; only a tree can be merged or cut.
#[derive(Clone, Debug, PartialEq)]
pub enum Draft {
    /// One-hot nodes: the backend's samples are matched with them.
    Tree(Tree),
    /// A lone chain that was drawn from known laws, verified by those.
    Sampled(Lone),
}

/// A sampled chain, and the same as a tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Lone {
    nodes: Tree,
    drawn: Arc<Sampled>,
}

impl Draft {
    /// The chain that the model drafter drew; `features` of its tokens in order.
    pub fn drawn(drawn: Sampled, features: impl IntoIterator<Item = Features>) -> Self {
        let mut nodes = Tree::default();
        for (at, (&token, features)) in drawn.chain().iter().zip(features).enumerate() {
            nodes.push(Node::new(token, at.checked_sub(1), Vote::new(Source::Model, features)));
        }
        Self::Sampled(Lone { nodes, drawn: Arc::new(drawn) })
    }

    /// The same proposed by `drafter`.
    #[must_use]
    pub fn by(self, drafter: DrafterId) -> Self {
        match self {
            Self::Tree(tree) => tree.by(drafter).into(),
            Self::Sampled(Lone { nodes, drawn }) => Self::Sampled(Lone { nodes: nodes.by(drafter), drawn }),
        }
    }

    /// With what it was drawn from, if it was.
    pub fn sampled(&self) -> Option<&Arc<Sampled>> {
        match self {
            Self::Tree(_) => None,
            Self::Sampled(lone) => Some(&lone.drawn),
        }
    }
}

impl From<Tree> for Draft {
    fn from(tree: Tree) -> Self {
        Self::Tree(tree)
    }
}

impl Deref for Draft {
    type Target = Tree;

    fn deref(&self) -> &Tree {
        match self {
            Self::Tree(tree) => tree,
            Self::Sampled(lone) => &lone.nodes,
        }
    }
}

/// How much a drafter may propose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Most nodes in all.
    pub nodes: usize,
    /// Most nodes on one path.
    pub depth: usize,
}

/// Tokens that have become the past since the last feedback.
#[derive(Clone, Copy, Debug)]
pub struct Feedback<'a> {
    /// The new tokens, in order: first the prompt's, then every emitted one.
    pub tokens: &'a [TokenId],
    /// What they are a part of.
    pub origin: Origin,
}

/// What a token of the past is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The prompt.
    Prompt,
    /// The output.
    Output,
}

/// What the target said of a draft, in a verdict that was used.
#[derive(Clone, Copy, Debug)]
pub struct Told<'a> {
    /// The token that the draft follows.
    pub after: TokenId,
    /// The draft.
    pub draft: &'a Tree,
    /// Its rows. A drafter may read their distributions, and no sample: most of them do not become the past.
    pub verdict: &'a Verdict,
}

/// A drafter that lives in the proxy and needs no model.
pub trait Lookup: Send {
    /// Learns the tokens that have become the past.
    fn observe(&mut self, seen: &Feedback<'_>);
    /// Learns what the target said of a draft, whoever proposed it, before what became the past of it is observed.
    fn hear(&mut self, _told: &Told<'_>) {}
    /// Proposes what may follow everything observed so far; an empty tree if it has no proposal.
    fn draft(&self, budget: Budget) -> Tree;
    /// Bytes that it holds for this session alone, by what it has allocated; what sessions share is accounted by its owner.
    fn bytes(&self) -> usize;
    /// What it has learnt of successors, for later requests.
    fn successors(&self) -> Option<&Successors> {
        None
    }
}

/// Whose texts a drafter remembers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// Those of the same request.
    #[default]
    Request,
    /// Those of the same tenant.
    Tenant,
    /// Those of all tenants.
    Global,
}

/// A lookup drafter as a policy names it. Adding one is one file and one variant.
#[derive(Clone, Debug, PartialEq)]
pub enum LookupSpec {
    /// The longest recent match in the request's own context.
    PromptLookup(Ngram),
    /// What followed most often.
    Suffix(Scope),
    /// The client's own prediction.
    Prediction,
    /// Phrases of the operator's, and the skeletons of the prompt's schemas.
    Phrasebook {
        /// The phrases.
        phrases: Arc<Phrases>,
        /// Whether the schemas in the prompt count.
        schemas: bool,
    },
    /// What the target said may follow.
    Recycling,
}

/// What lookups use beside their own request: handed to a session when it starts.
#[derive(Clone, Debug, Default)]
pub struct Shared {
    /// Earlier texts of the request's tenant; none without a tenant that is trusted.
    pub of_tenant: View,
    /// Earlier texts of all tenants that share theirs.
    pub of_all: View,
    /// Successors that earlier requests of the tenant have learnt; none without a tenant that is trusted.
    pub successors: Arc<Successors>,
    /// The client's own prediction, in the target's tokens.
    pub prediction: Arc<[TokenId]>,
    /// The target's tokens as bytes; `None` where that is not known.
    pub spelling: Option<Arc<dyn Spelling>>,
}

impl LookupSpec {
    /// What kind of drafter it is.
    pub const fn source(&self) -> Source {
        match self {
            Self::PromptLookup(_) => Source::PromptLookup,
            Self::Suffix(_) => Source::Suffix,
            Self::Prediction => Source::Prediction,
            Self::Phrasebook { .. } => Source::Phrasebook,
            Self::Recycling => Source::Recycling,
        }
    }

    /// Whether it may ever propose anything in a session that is handed `shared`.
    fn has_a_say(&self, shared: &Shared) -> bool {
        match self {
            Self::PromptLookup(_) | Self::Suffix(_) | Self::Recycling => true,
            Self::Prediction => !shared.prediction.is_empty(),
            Self::Phrasebook { phrases, schemas } => {
                shared.spelling.is_some() && (*schemas || !phrases.texts().is_empty())
            }
        }
    }

    /// A fresh drafter that has seen nothing and votes as `id`; `None` where it has nothing to say.
    pub fn build(&self, id: DrafterId, shared: &Shared) -> Option<Box<dyn Lookup>> {
        if !self.has_a_say(shared) {
            return None;
        }
        Some(match self {
            Self::PromptLookup(ngram) => Box::new(PromptLookup::new(*ngram, &shared.prediction, id)),
            Self::Suffix(scope) => Box::new(Suffix::new(shared.earlier(*scope), id)),
            Self::Recycling => Box::new(Recycling::new(Arc::clone(&shared.successors), id)),
            Self::Prediction => Box::new(Prediction::new(Arc::clone(&shared.prediction), id)),
            Self::Phrasebook { phrases, schemas } => {
                let spelling = Arc::clone(shared.spelling.as_ref()?);
                Box::new(Phrasebook::new(Arc::clone(phrases), *schemas, spelling, id))
            }
        })
    }
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

    fn specs() -> [LookupSpec; 8] {
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
            LookupSpec::Recycling,
            LookupSpec::Phrasebook { phrases: phrases(&[]), schemas: true },
            LookupSpec::Phrasebook { phrases: phrases(&[("a", "1}"), ("}", "{\"a\":")]), schemas: false },
        ]
    }

    /// Tokens of which JSON can be made.
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
        let mut successors = Successors::default();
        for (token, next) in [(0, 1), (1, 4), (1, 2), (3, 3)] {
            successors.follows(token, next);
        }
        successors.tell(2, &[(3, 0.5), (0, 0.25), (2, 0.25)]);
        Shared {
            successors: Arc::new(successors),
            of_tenant: earlier.map(Arc::new).into(),
            prediction: Arc::new([1, 2, 3, 1, 4]),
            spelling: Some(Arc::new(Parts)),
            ..Shared::default()
        }
    }

    /// A drafter that has read a prompt: `{"a":1}` and more.
    fn built(spec: &LookupSpec, prompt: &[TokenId]) -> Box<dyn Lookup> {
        let mut drafter = spec.build(spec.source().into(), &shared()).expect("it has something to say");
        for tokens in [&[0, 1, 2, 3, 4], prompt] {
            drafter.observe(&Feedback { tokens, origin: Origin::Prompt });
        }
        drafter
    }

    fn of(tokens: &[TokenId]) -> Feedback<'_> {
        Feedback { tokens, origin: Origin::Output }
    }

    #[test]
    fn a_drafter_that_has_seen_nothing_says_nothing() {
        for spec in &specs() {
            let drafter = spec.build(spec.source().into(), &Shared::default());
            assert!(drafter.is_none_or(|drafter| drafter.draft(Budget { nodes: 8, depth: 8 }).is_empty()));
        }
    }

    /// What docs/drafters.md says of the bytes per token of the request.
    #[test]
    fn what_a_drafter_holds_grows_with_its_request_and_stays_within_what_is_said() {
        let most = |source| match source {
            Source::PromptLookup => 150,
            Source::Suffix => 16,
            Source::Prediction => 9,
            Source::Recycling => 400,
            Source::Phrasebook | Source::Model => 0,
        };
        let mut dice = crate::units::Dice::new(7);
        // Every other stretch is said again, as in real texts; the rest is as random as no text is.
        let mut text: Vec<TokenId> = Vec::new();
        while text.len() < 32_768 {
            let from = dice.below(text.len() as u64 + 1) as usize;
            let again: Vec<TokenId> = text.iter().skip(from).take(30).copied().collect();
            text.extend(again);
            text.extend((0..30).map(|_| dice.below(8192) as TokenId));
        }
        for spec in specs().iter().filter(|spec| spec.source() != Source::Phrasebook) {
            let mut drafter = built(spec, &[]);
            let fresh = drafter.bytes();
            drafter.observe(&of(&text));
            let each = (drafter.bytes() - fresh) as f64 / text.len() as f64;
            let source = spec.source();
            assert!(each >= 4.0 && each <= f64::from(most(source)), "{source:?}: {each:.1} bytes per token");
        }
    }

    #[test]
    fn every_drafter_has_something_to_say_behind_some_text() {
        for spec in &specs() {
            let texts: [&[TokenId]; 3] = [&[0], &[1, 2], &[0, 1, 2, 3, 4, 0, 1, 2]];
            let speaks = texts.into_iter().any(|text| {
                let mut drafter = built(spec, &[]);
                drafter.observe(&of(text));
                !drafter.draft(Budget { nodes: 8, depth: 8 }).is_empty()
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
                let (mut whole, mut pieces) = (built(spec, &prompt), built(spec, &prompt));
                whole.observe(&of(&text));
                let cut = cut.min(text.len());
                pieces.observe(&of(&text[..cut]));
                let _ = pieces.draft(Budget { nodes, depth });
                pieces.observe(&of(&text[cut..]));
                let draft = whole.draft(Budget { nodes, depth });
                prop_assert_eq!(&draft, &pieces.draft(Budget { nodes, depth }));
                prop_assert!(draft.len() <= nodes);
                for node in 0..draft.len() {
                    prop_assert!(draft.path(node).len() <= depth);
                    prop_assert!(draft.nodes()[node].token < 5, "nothing that was never said");
                }
                let mut shorter = whole.draft(Budget { nodes: nodes + 1, depth });
                shorter.truncate(nodes);
                prop_assert_eq!(draft, shorter, "a smaller budget is a truncation");
            }
        }
    }
}
