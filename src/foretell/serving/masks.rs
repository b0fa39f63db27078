//! The grammar that binds the output of a request, held against it here: who may rely on it, and
//! how a grammar proves itself.

use std::sync::Arc;

use super::calls::Calls;
use crate::clock::Clock;
use crate::fleet::identity::Identity;
use crate::learning::answer_traits::AnswerTraits;
use crate::learning::masks::{MaskKey, Trust};
use foretell_core::session::Permission;
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::PlainReason;
use foretell_engines::masks::{Compiled, Library, Mask};
use foretell_engines::openai::{Grammar, Sampling};

/// The grammar of a request that the server does not apply to later requests, and its library;
/// `None` if there is none.
fn grammar_of<'a>(identity: &Identity, sampling: &'a Sampling) -> Option<(Library, &'a Arc<Grammar>)> {
    let library = identity.engine.masks.filter(|_| !identity.engine.continues_grammar)?;
    Some((library, sampling.grammar.as_ref()?))
}

/// The key of that grammar, and the trust in it; `None` if there is none.
fn trust_of(
    identity: &Identity,
    sampling: &Sampling,
    traits: &AnswerTraits,
    now: Tick,
) -> Option<(MaskKey, Trust)> {
    let (_, grammar) = grammar_of(identity, sampling)?;
    let key = MaskKey::of(grammar, sampling.plainly_greedy());
    Some((key, traits.masks.trust(&key, now)))
}

/// True if a grammar binds the output of a request that the server does not apply to later ones.
pub(super) fn binds(identity: &Identity, sampling: &Sampling) -> bool {
    sampling.grammar.is_some() && !identity.engine.continues_grammar
}

/// The permission to which the grammar of a request narrows that of its policy; `None` if it does
/// not.
pub(super) fn permission(
    identity: &Identity,
    sampling: &Sampling,
    traits: &AnswerTraits,
    now: Tick,
) -> Option<Permission> {
    let (_, trust) = trust_of(identity, sampling, traits, now)?;
    match trust {
        Trust::Proven(_) => None,
        Trust::Unproven | Trust::Proving => Some(Permission::Shadow(PlainReason::Grammar)),
        Trust::Refused(_) => Some(Permission::Plain(PlainReason::Grammar)),
    }
}

/// The mask of a request whose grammar has proved itself; `None` otherwise.
pub(super) fn mask(
    identity: &Identity,
    sampling: &Sampling,
    traits: &AnswerTraits,
    now: Tick,
) -> Option<Mask> {
    let (_, trust) = trust_of(identity, sampling, traits, now)?;
    match trust {
        Trust::Proven(compiled) => {
            Some(Mask::new(&compiled, Arc::clone(&identity.tokenizer), identity.engine.may_end.clone()))
        }
        Trust::Unproven | Trust::Proving | Trust::Refused(_) => None,
    }
}

/// The state of the grammar of a request, in words for the operator; `None` if it does not matter,
/// or has proved itself.
pub(super) fn note(
    identity: &Identity,
    sampling: &Sampling,
    traits: &AnswerTraits,
    now: Tick,
) -> Option<String> {
    let (_, trust) = trust_of(identity, sampling, traits, now)?;
    match trust {
        Trust::Proven(_) => None,
        Trust::Unproven => Some(
            "The grammar proves itself on the next complete answer of the server's own, which at temperature 0 is \
             scored once."
                .to_owned(),
        ),
        Trust::Proving => Some("An answer of the server's own is held against the grammar.".to_owned()),
        Trust::Refused(reason) => Some(format!("Requests under this grammar stay plain: {reason}.")),
    }
}

/// The reason for which grammars of a server are not followed.
const OTHER_LIBRARY: &str = "the server does not make its grammars by xgrammar 0.2.8 with free whitespace";

/// The proof of a grammar by an answer of the server's own.
pub(super) struct Proof {
    library: Library,
    grammar: Arc<Grammar>,
    key: MaskKey,
    /// At temperature 0.
    greedy: bool,
    identity: Arc<Identity>,
    traits: Arc<AnswerTraits>,
    clock: Clock,
    /// Maximum tokens of a request that scores an answer.
    context_max: usize,
}

impl Proof {
    /// The proof that the answer to a request can give; `None` if none is needed.
    pub fn of(
        identity: &Arc<Identity>,
        sampling: &Sampling,
        traits: &Arc<AnswerTraits>,
        clock: Clock,
        context_max: usize,
    ) -> Option<Self> {
        let (library, grammar) = grammar_of(identity, sampling)?;
        let greedy = sampling.plainly_greedy();
        let (key, trust) = trust_of(identity, sampling, traits, clock.now())?;
        let open = matches!(trust, Trust::Unproven);
        let (identity, traits, grammar) = (Arc::clone(identity), Arc::clone(traits), Arc::clone(grammar));
        open.then_some(Self { library, grammar, key, greedy, identity, traits, clock, context_max })
    }

    /// Holds a complete answer against the grammar, without the token that ended it.
    pub async fn run(self, calls: Calls, prompt: Vec<TokenId>, mut output: Vec<TokenId>) {
        let ends = &self.identity.engine.may_end;
        output.pop_if(|last| ends.binary_search(last).is_ok());
        let fits = prompt.len() + output.len() <= self.context_max;
        let shows = fits && !prompt.is_empty() && !output.is_empty();
        if !shows || !self.traits.masks.begin_proof(&self.key, self.clock.now()) {
            return;
        }
        let trust = self.prove(&calls, &prompt, &output).await;
        if let Trust::Refused(reason) = &trust {
            tracing::warn!(parameter = self.grammar.parameter, %reason, "requests under a grammar stay plain");
        }
        self.traits.masks.end_proof(&self.key, trust, self.clock.now());
    }

    async fn prove(&self, calls: &Calls, prompt: &[TokenId], output: &[TokenId]) -> Trust {
        let masks = &self.traits.masks;
        if masks.library().is_none()
            && let Some(expected) = calls.shows_library(&self.identity.tokenizer).await
        {
            masks.note_library(expected);
        }
        match masks.library() {
            Some(true) => {}
            Some(false) => return Trust::Refused(OTHER_LIBRARY.into()),
            None => return Trust::Unproven,
        }
        let (library, grammar) = (self.library, Arc::clone(&self.grammar));
        let compiling = tokio::task::spawn_blocking(move || Compiled::new(library, &grammar));
        let compiled = match compiling.await {
            Ok(Ok(compiled)) => Arc::new(compiled),
            Ok(Err(error)) => return Trust::Refused(error.to_string().into()),
            // The library has panicked.
            Err(_) => return Trust::Refused("the grammar cannot be compiled here".into()),
        };
        let ends = self.identity.engine.may_end.clone();
        let mask = Mask::new(&compiled, Arc::clone(&self.identity.tokenizer), ends);
        let agrees = if self.greedy {
            calls.agrees(&mask, prompt, output).await
        } else {
            Some(mask.follow(&[], output, false) == output.len())
        };
        match agrees {
            Some(true) => Trust::Proven(compiled),
            Some(false) => {
                Trust::Refused("an answer of the server is not what the grammar makes of it here".into())
            }
            None => Trust::Unproven,
        }
    }
}
