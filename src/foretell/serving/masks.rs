//! The grammar that binds the output of a request, held against it here: who may rely on it, and
//! how a grammar proves itself.

use std::sync::Arc;
use std::time::Duration;

use super::calls::Calls;
use super::grammar::Grammar;
use super::parsing;
use super::plan::SessionPlan;
use crate::clock::Clock;
use crate::fleet::identity::Identity;
use crate::learning::answer_traits::AnswerTraits;
use crate::learning::masks::{MaskKey, Trust};
use foretell_core::session::Permission;
use foretell_core::units::{Tick, TokenId};
use foretell_core::words::PlainReason;
use foretell_engines::dialect::Binding;
use foretell_engines::masks::{Compiled, Library, Mask, Rules, Shown};
use foretell_engines::openai::{Request, Sampling};

/// True if a grammar binds the output of a request that the server does not apply to later ones.
pub(super) fn binds(identity: &Identity, sampling: &Sampling, grammar: &Grammar) -> bool {
    let asked = sampling.grammar.is_some() && !identity.engine.continues_grammar;
    asked || matches!(grammar, Grammar::Told(Binding::Tag(_) | Binding::Other))
}

/// A grammar that binds the output of a request, that the server does not apply to later ones, and
/// that may be followed here.
pub(super) struct Followed {
    rules: Rules,
    key: MaskKey,
    trust: Trust,
}

impl Followed {
    /// The grammar of a request; `None` if there is none. `grammar`: the server's word about it.
    pub fn of(
        identity: &Identity,
        request: &Request,
        sampling: &Sampling,
        grammar: &Grammar,
        traits: &AnswerTraits,
        now: Tick,
    ) -> Option<Self> {
        let engine = &identity.engine;
        if !engine.masks || engine.continues_grammar {
            return None;
        }
        let rules = match (&sampling.grammar, grammar) {
            // It is a part of a grammar that the server has made of it.
            (Some(_), Grammar::Told(Binding::Tag(_))) => return None,
            (Some(asked), _) => Rules::Asked(Arc::clone(asked)),
            (None, Grammar::Told(Binding::Tag(tag))) if engine.follows_tag(request, sampling) => {
                Rules::Tag(Arc::clone(tag))
            }
            (None, _) => return None,
        };
        // By the variables of the template an output begins with reasoning, or not.
        let template = engine.parsers.reasoning.and_then(|_| parsing::template(request));
        let key = MaskKey::of(&rules, sampling.plainly_greedy(), template.as_ref());
        let trust = traits.masks.trust(&key, now);
        Some(Self { rules, key, trust })
    }

    /// The permission to which it narrows that of the policy; `None` if it does not.
    pub fn permission(&self) -> Option<Permission> {
        match self.trust {
            Trust::Proven(..) => None,
            Trust::Unproven | Trust::Proving => Some(Permission::Shadow(PlainReason::Grammar)),
            Trust::Refused(_) => Some(Permission::Plain(PlainReason::Grammar)),
        }
    }

    /// The mask of the output of a request; `None` if the grammar has not proved itself.
    pub fn mask(&self, identity: &Identity, request: &Request) -> Option<Mask> {
        match &self.trust {
            Trust::Proven(compiled, reasons) => Some(mask_of(compiled, identity, request, Some(*reasons))),
            Trust::Unproven | Trust::Proving | Trust::Refused(_) => None,
        }
    }

    /// Its state in words for the operator; `None` if it has proved itself.
    pub fn note(&self) -> Option<String> {
        match &self.trust {
            Trust::Proven(..) => None,
            Trust::Unproven => Some(
                "The grammar proves itself on the next complete answer of the server's own, which at temperature 0 is \
                 scored once."
                    .to_owned(),
            ),
            Trust::Proving => Some("An answer of the server's own is held against the grammar.".to_owned()),
            Trust::Refused(reason) => Some(format!("Requests under this grammar stay plain: {reason}.")),
        }
    }
}

/// The mask of the output of a request; `proven`: see [`Mask::behind_reasoning`].
fn mask_of(compiled: &Compiled, identity: &Identity, request: &Request, proven: Option<bool>) -> Mask {
    let mask = Mask::new(compiled, identity.engine.may_end.clone());
    match parsing::reasoning_ends(identity, request) {
        Some(find) => mask.behind_reasoning(find, proven),
        None => mask,
    }
}

/// Maximum time for which a proof waits for the compilation of its grammar, and for its turn.
const COMPILED_WITHIN: Duration = Duration::from_secs(5);
/// Tokens under a grammar that an answer needs to prove it, unless it is complete.
const SHOWN: usize = 16;
/// The reason for which grammars of a server are not followed.
const OTHER_LIBRARY: &str =
    "the server does not make its grammars by xgrammar 0.2.8, or llguidance 1.7 that leaves objects open";
/// The reason for which grammars of llguidance are followed at temperature 0 alone: its version is
/// another one, and an answer shows the likeliest tokens only.
const SAMPLED: &str = "grammars of llguidance are not followed above temperature 0";

/// The proof that an answer of the server's own can give of its grammar.
pub(super) struct Proof {
    plan: Arc<SessionPlan>,
    request: Arc<Request>,
    traits: Arc<AnswerTraits>,
    clock: Clock,
}

impl Proof {
    /// The proof that the answer to a request can give; `None` if none is to be given. The server
    /// may say what binds it while it answers.
    pub fn of(
        plan: &Arc<SessionPlan>,
        request: &Arc<Request>,
        traits: &Arc<AnswerTraits>,
        clock: Clock,
    ) -> Option<Self> {
        let bound = plan.mask.is_none() && (plan.bound || plan.grammar.may_bind());
        let open = bound && plan.identity.engine.masks;
        let (plan, request, traits) = (Arc::clone(plan), Arc::clone(request), Arc::clone(traits));
        open.then_some(Self { plan, request, traits, clock })
    }

    /// The grammar, if it has not proved itself yet.
    fn open(&self) -> Option<Followed> {
        let SessionPlan { identity, sampling, .. } = &*self.plan;
        let (now, traits) = (self.clock.now(), &self.traits);
        let grammar = Grammar::of(identity, &self.request, traits, now);
        let followed = Followed::of(identity, &self.request, sampling, &grammar, traits, now);
        followed.filter(|followed| matches!(followed.trust, Trust::Unproven))
    }

    /// Number of tokens of the output that are under the grammar; zero if that is not known.
    fn bound(&self, prompt: &[TokenId], output: &[TokenId]) -> usize {
        let find = parsing::reasoning_ends(&self.plan.identity, &self.request);
        let begin = match find.map_or(Ok(None), |find| find(prompt)) {
            Ok(Some(ends)) => ends.content(output.iter().copied()),
            Ok(None) => Some(0),
            Err(_) => None,
        };
        begin.map_or(0, |begin| output.len() - begin)
    }

    /// Holds a complete answer against the grammar, without the token that ended it.
    pub async fn run(self, calls: Calls, prompt: Vec<TokenId>, mut output: Vec<TokenId>) {
        let Some(followed) = self.open() else { return };
        let ends = &self.plan.identity.engine.may_end;
        let ended = output.pop_if(|last| ends.binary_search(last).is_ok()).is_some();
        let fits = prompt.len() + output.len() <= self.plan.rules.context_max;
        let bound = self.bound(&prompt, &output);
        let shows = fits && !prompt.is_empty() && (bound >= SHOWN || (ended && bound > 0));
        if !shows || !self.traits.masks.begin_proof(&followed.key, self.clock.now()) {
            return;
        }
        let Followed { rules, key, .. } = followed;
        let parameter = rules.parameter();
        let trust = self.prove(rules, &calls, &prompt, &output).await;
        if let Trust::Refused(reason) = &trust {
            tracing::warn!(parameter, %reason, "requests under a grammar stay plain");
        }
        self.traits.masks.end_proof(&key, trust, self.clock.now());
    }

    async fn prove(&self, rules: Rules, calls: &Calls, prompt: &[TokenId], output: &[TokenId]) -> Trust {
        let identity = &self.plan.identity;
        let masks = &self.traits.masks;
        if masks.library() == Shown::Open {
            masks.note_library(calls.library(&identity.tokenizer).await);
        }
        let greedy = self.plan.sampling.plainly_greedy();
        let library = match masks.library() {
            Shown::Library(Library::Guidance(_)) if !greedy => return Trust::Refused(SAMPLED.into()),
            Shown::Library(library) => library,
            Shown::Other => return Trust::Refused(OTHER_LIBRARY.into()),
            Shown::Open => return Trust::Unproven,
        };
        let vocabulary = masks.vocabulary(&identity.tokenizer);
        // A compilation cannot be ended: one at a time, so that a slow one holds one thread.
        let turn = tokio::time::timeout(COMPILED_WITHIN, Arc::clone(&masks.compiling).acquire_owned()).await;
        let Ok(Ok(turn)) = turn else { return Trust::Unproven };
        let compiling = tokio::task::spawn_blocking(move || {
            let compiled = Compiled::new(library, &rules, &vocabulary);
            drop(turn);
            compiled
        });
        let compiled = match tokio::time::timeout(COMPILED_WITHIN, compiling).await {
            Ok(Ok(Ok(compiled))) => Arc::new(compiled),
            Ok(Ok(Err(error))) => return Trust::Refused(error.to_string().into()),
            Err(_) => return Trust::Refused("it takes too long to compile".into()),
            // The library has panicked.
            Ok(Err(_)) => return Trust::Refused("the grammar cannot be compiled here".into()),
        };
        let mask = mask_of(&compiled, identity, &self.request, None);
        let Ok(reasons) = mask.reasons(prompt) else { return Trust::Unproven };
        let agrees = if greedy {
            calls.agrees(&mask, prompt, output).await
        } else {
            Some(mask.follow(prompt, &[], output, false) == output.len())
        };
        match agrees {
            Some(true) => Trust::Proven(compiled, reasons),
            Some(false) => {
                Trust::Refused("an answer of the server is not what the grammar makes of it here".into())
            }
            None => Trust::Unproven,
        }
    }
}
