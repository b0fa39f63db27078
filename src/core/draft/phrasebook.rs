//! `phrasebook`: proposes an operator's continuation after its trigger: licence headers,
//! boilerplate, the skeletons of tool calls and of JSON. Skeletons of tools and schemas in the
//! prompt, and of a schema that constrains the output, need no operator.
//!
//! Triggers are matched in bytes, by an Aho-Corasick automaton, so that they are found however the
//! text was split into tokens. A continuation is followed byte by byte; its rest is proposed in the
//! tokens that the target's tokenizer gives for trigger and continuation together, or, where the
//! text was split otherwise, for the rest alone.

mod json;
mod shapes;
mod skeleton;

use std::sync::Arc;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;
use aho_corasick::{Anchored, MatchKind};
use serde_json::Value;

use self::shapes::Finder;
use self::skeleton::{Proposal, Skeleton};
use super::{Budget, DrafterId, Features, Feedback, Growing, Lookup, Origin, Tree};
use crate::units::TokenId;

/// The target's tokens as bytes, for a drafter of texts.
pub trait Spelling: Send + Sync + std::fmt::Debug {
    /// The bytes of a token; empty if it is no text.
    fn bytes(&self, token: TokenId) -> Vec<u8>;
    /// The tokens of a text, each with the index of the byte after it.
    fn tokens(&self, text: &str) -> Vec<(TokenId, usize)>;
}

/// An operator's phrases, compiled.
#[derive(Clone, Debug, Default)]
pub struct Phrases {
    /// `None` if there are no phrases.
    triggers: Option<NFA>,
    texts: Vec<(String, String)>,
}

impl PartialEq for Phrases {
    fn eq(&self, other: &Self) -> bool {
        self.texts == other.texts
    }
}

impl Phrases {
    /// Compiles pairs of trigger and continuation.
    ///
    /// # Errors
    /// They are too many or too long; the text says which.
    pub fn new(texts: Vec<(String, String)>) -> Result<Self, String> {
        if texts.is_empty() {
            return Ok(Self::default());
        }
        let triggers = texts.iter().map(|(trigger, _)| trigger);
        let triggers = NFA::builder().match_kind(MatchKind::Standard).build(triggers);
        Ok(Self { triggers: Some(triggers.map_err(|error| error.to_string())?), texts })
    }

    /// The pairs of trigger and continuation, in the order of [`Self::new`].
    pub fn texts(&self) -> &[(String, String)] {
        &self.texts
    }

    /// The phrase with the longest trigger that ends in a state of the automaton.
    fn ended(&self, state: StateID) -> Option<usize> {
        let triggers = self.triggers.as_ref().filter(|triggers| triggers.is_match(state))?;
        let ended = (0..triggers.match_len(state)).map(|at| triggers.match_pattern(state, at));
        ended
            .map(|pattern| pattern.as_usize())
            .max_by_key(|&at| self.texts.get(at).map_or(0, |(trigger, _)| trigger.len()))
    }
}

/// The drafter of one session. Memory: the tokens of the phrase that is being followed, and the
/// shapes of the prompt's schemas.
#[derive(Debug)]
pub struct Phrasebook {
    id: DrafterId,
    phrases: Arc<Phrases>,
    spelling: Arc<dyn Spelling>,
    state: Option<StateID>,
    following: Option<Following>,
    schemas: Option<Schemas>,
}

/// The schemas of the prompt, and the state of the output in them.
#[derive(Debug, Default)]
struct Schemas {
    found: Finder,
    /// `None` until the output begins.
    skeleton: Option<Skeleton>,
}

impl Schemas {
    fn step(&mut self, byte: u8, origin: Origin) {
        let Self { found, skeleton } = self;
        match origin {
            Origin::Prompt => found.step(byte),
            Origin::Output => skeleton
                .get_or_insert_with(|| Skeleton::new(found.style().clone(), found.form()))
                .step(byte, found.shapes()),
        }
    }

    fn proposal(&self) -> Option<Proposal> {
        self.skeleton.as_ref()?.proposal(self.found.shapes())
    }
}

/// A phrase whose trigger is in the text.
#[derive(Debug)]
struct Following {
    phrase: usize,
    /// Bytes of the continuation that are in the text.
    said: usize,
    /// Trigger and continuation in tokens, each with the index of the byte after it; empty until
    /// the trigger's last token ends.
    all: Vec<(TokenId, usize)>,
    rest: Vec<TokenId>,
}

impl Phrasebook {
    /// A drafter that has seen nothing and votes as `id`; with `schemas`, also by those in the
    /// prompt, or by the one that constrains the output ([`Self::constrained`]).
    pub fn new(phrases: Arc<Phrases>, schemas: bool, spelling: Arc<dyn Spelling>, id: DrafterId) -> Self {
        let state = phrases.triggers.as_ref().and_then(|triggers| triggers.start_state(Anchored::No).ok());
        let schemas = schemas.then(Schemas::default);
        Self { id, phrases, spelling, state, following: None, schemas }
    }

    /// The drafter of an output that a schema constrains; a drafter without schemas is returned
    /// unchanged.
    #[must_use]
    pub fn constrained(mut self, schema: &Value) -> Self {
        if let Some(schemas) = &mut self.schemas {
            schemas.found = Finder::constrained(schema);
        }
        self
    }

    fn push(&mut self, token: TokenId, origin: Origin) {
        let bytes = self.spelling.bytes(token);
        for &byte in &bytes {
            self.step(byte);
            if let Some(schemas) = &mut self.schemas {
                schemas.step(byte, origin);
            }
        }
        let Some(mut following) = self.following.take() else { return };
        let Some((trigger, continuation)) = self.phrases.texts.get(following.phrase) else { return };
        if following.all.is_empty() {
            following.all = self.spelling.tokens(&[trigger.as_str(), continuation].concat());
        }
        following.rest = self.rest(&following, trigger.len(), continuation);
        self.following = (!following.rest.is_empty()).then_some(following);
    }

    fn step(&mut self, byte: u8) {
        if let Some(following) = &mut self.following {
            let continuation = self.phrases.texts.get(following.phrase).map(|(_, text)| text.as_bytes());
            let agrees = continuation.and_then(|text| text.get(following.said)) == Some(&byte);
            following.said += 1;
            if !agrees {
                self.following = None;
            }
        }
        let (Some(state), Some(triggers)) = (&mut self.state, &self.phrases.triggers) else { return };
        *state = triggers.next_state(Anchored::No, *state, byte);
        if let Some(phrase) = self.phrases.ended(*state)
            && self.following.is_none()
        {
            self.following = Some(Following { phrase, said: 0, all: Vec::new(), rest: Vec::new() });
        }
    }

    /// The tokens of the rest of a continuation; none within a character.
    fn rest(&self, following: &Following, trigger: usize, continuation: &str) -> Vec<TokenId> {
        let Following { said, all, .. } = following;
        let Some(rest) = continuation.get(*said..).filter(|rest| !rest.is_empty()) else { return Vec::new() };
        self.tokens_of(rest, all, trigger + said)
    }

    /// The tokens of a text's `rest`: those of the complete text `all` after byte `said`, if one
    /// ends there, otherwise those of `rest` by itself.
    fn tokens_of(&self, rest: &str, all: &[(TokenId, usize)], said: usize) -> Vec<TokenId> {
        let met = all.iter().position(|&(_, end)| end == said).map(|last| last + 1);
        let tokens = match met.and_then(|met| all.get(met..)) {
            Some(tokens) => tokens.to_vec(),
            None => self.spelling.tokens(rest),
        };
        tokens.into_iter().map(|(token, _)| token).collect()
    }

    /// The draft by the prompt's schemas.
    fn skeleton(&self, most: usize) -> Option<Tree> {
        let Proposal { begun, rest, shapes } = self.schemas.as_ref()?.proposal()?;
        let all =
            if begun.is_empty() { Vec::new() } else { self.spelling.tokens(&[&*begun, &*rest].concat()) };
        let tokens = self.tokens_of(&rest, &all, begun.len());
        let features = Features { share: 1.0 / shapes as f32, ..Features::default() };
        Some(Tree::chain(tokens.get(..most).unwrap_or(&tokens), self.id, features))
    }
}

impl Lookup for Phrasebook {
    fn observe(&mut self, seen: &Feedback<'_>) {
        seen.tokens.iter().for_each(|&token| self.push(token, seen.origin));
    }

    fn draft(&self, _: &Growing, budget: Budget) -> Tree {
        let most = budget.nodes.min(budget.depth);
        let Some(Following { rest, said, .. }) = &self.following else {
            return self.skeleton(most).unwrap_or_default();
        };
        let tokens = rest.get(..most).unwrap_or(rest);
        Tree::chain(tokens, self.id, Features::matched(*said as u32))
    }

    fn bytes(&self) -> usize {
        let following = self.following.as_ref().map_or(0, |Following { all, rest, .. }| {
            all.capacity() * size_of::<(TokenId, usize)>() + rest.capacity() * size_of::<TokenId>()
        });
        let schemas = self.schemas.as_ref().map_or(0, |schemas| schemas.found.bytes());
        size_of::<Self>() + following + schemas
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Origin, Source};

    /// Two lower case letters are one token; every other byte is a token of its own.
    #[derive(Debug)]
    struct Pairs;

    impl Spelling for Pairs {
        fn bytes(&self, token: TokenId) -> Vec<u8> {
            if token < 256 { vec![token as u8] } else { vec![(token >> 8) as u8, token as u8] }
        }

        fn tokens(&self, text: &str) -> Vec<(TokenId, usize)> {
            let (bytes, mut at, mut tokens) = (text.as_bytes(), 0, Vec::new());
            while at < bytes.len() {
                let pair = bytes.get(at..at + 2).filter(|pair| pair.iter().all(u8::is_ascii_lowercase));
                let token =
                    pair.map_or(u32::from(bytes[at]), |pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
                at += if pair.is_some() { 2 } else { 1 };
                tokens.push((token, at));
            }
            tokens
        }
    }

    fn drafted(phrases: &[(&str, &str)], said: &[&str]) -> String {
        let texts = phrases.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        let phrases = Arc::new(Phrases::new(texts).unwrap());
        let mut drafter = Phrasebook::new(phrases, true, Arc::new(Pairs), Source::Phrasebook.into());
        say(&mut drafter, Origin::Output, said);
        shown(&drafter)
    }

    fn say(drafter: &mut Phrasebook, origin: Origin, said: &[&str]) {
        for piece in said {
            let tokens: Vec<TokenId> = Pairs.tokens(piece).into_iter().map(|(token, _)| token).collect();
            drafter.observe(&Feedback { tokens: &tokens, origin, text: &Growing::new() });
        }
    }

    fn shown(drafter: &Phrasebook) -> String {
        let tree = drafter.draft(&Growing::new(), Budget { nodes: 8, depth: 8 });
        let bytes = tree.nodes().iter().flat_map(|node| Pairs.bytes(node.token)).collect();
        String::from_utf8(bytes).unwrap()
    }

    const TOOL: (&str, &str) = ("Action: ", "{\"tool\": \"");

    #[test]
    fn after_a_trigger_comes_its_continuation_and_then_its_rest() {
        assert_eq!(drafted(&[TOOL], &["so. Acti", "on: "]), "{\"tool\": \"", "eight tokens");
        assert_eq!(drafted(&[TOOL], &["Action: ", "{\"to"]), "ol\": \"");
        assert_eq!(drafted(&[TOOL], &["Action: ", "{\"t"]), "ool\": \"", "split otherwise");
        assert_eq!(drafted(&[TOOL], &["Action: ", "["]), "");
        assert_eq!(drafted(&[TOOL], &["Action: {\"tool\": \""]), "", "all of it is in the text");
        assert_eq!(drafted(&[TOOL], &["Action:"]), "");
    }

    #[test]
    fn the_longest_trigger_counts_and_a_phrase_is_followed_to_its_end() {
        let both = [("b", "X"), ("ab", "Y"), ("Y", "Z")];
        assert_eq!(drafted(&both, &["a", "b"]), "Y");
        assert_eq!(drafted(&both, &["c", "b"]), "X");
        assert_eq!(
            drafted(&[("a", "bac"), ("ba", "no")], &["aba"]),
            "c",
            "a trigger within it does not end it"
        );
        assert_eq!(drafted(&[("é", "ü!")], &["é"]), "ü!");
        assert_eq!(drafted(&[], &["anything"]), "");
    }

    #[test]
    fn a_schema_that_binds_the_output_is_drafted_and_no_other() {
        let other = r#"{"properties": {"unit": {"enum": ["kelvin"]}}}"#;
        let schema = serde_json::json!({"type": "object", "properties": {"a": {"const": "b"}}});
        let mut drafter = Phrasebook::new(Arc::default(), true, Arc::new(Pairs), Source::Phrasebook.into());
        drafter = drafter.constrained(&schema);
        say(&mut drafter, Origin::Prompt, &[other]);
        say(&mut drafter, Origin::Output, &["{\""]);
        assert_eq!(shown(&drafter), "a\": \"b\"}", "with the layout of the prompt");
        say(&mut drafter, Origin::Output, &["unit"]);
        assert_eq!(shown(&drafter), "");
    }

    #[test]
    fn a_schema_of_the_prompt_is_drafted_in_the_tokens_that_the_output_has_begun() {
        let schema = r#"{"properties":{"unit":{"enum":["kelvin"]}}}"#;
        let drafted = |schemas: bool, said: &[&str]| {
            let phrases = Arc::new(Phrases::new(vec![("!".to_owned(), "?".to_owned())]).unwrap());
            let mut drafter = Phrasebook::new(phrases, schemas, Arc::new(Pairs), Source::Phrasebook.into());
            say(&mut drafter, Origin::Prompt, &[schema]);
            assert!(
                drafter.draft(&Growing::new(), Budget { nodes: 8, depth: 8 }).is_empty(),
                "the prompt is not the output"
            );
            say(&mut drafter, Origin::Output, said);
            shown(&drafter)
        };
        assert_eq!(drafted(true, &["{\""]), "unit\":\"kelvin", "eight tokens");
        assert_eq!(drafted(true, &["{\"", "u"]), "nit\":\"kelvin", "split otherwise");
        assert_eq!(drafted(true, &["{\"unit\":\"kel"]), "vin\"}", "a token less than a pair");
        assert_eq!(drafted(true, &["{\"!"]), "?", "a phrase comes first");
        assert_eq!(drafted(false, &["{\""]), "");
    }
}
