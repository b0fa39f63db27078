//! The vocabulary bridge between a session and its drafter: one vocabulary, or a translation
//! between two.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::serving::drafters::{SessionModel, Translation};
use foretell_core::draft::{Features, Node, Source, Tree, Vote};
use foretell_core::units::TokenId;
use foretell_core::words::TokenContext;
use foretell_onnx::drafter::{DraftFault, Drafted, DrafterSlot, Noise, Order};
use foretell_parsers::text::translate::{Anchor, Translator};
use foretell_wire::openai::Sampling;

/// Maximum number of new tokens translated inline; more are translated on a thread that may block.
const FEW: usize = 64;

/// A session's bridge to its drafter; clones share it.
#[derive(Clone)]
pub(super) enum VocabularyBridge {
    /// Both have the same vocabulary.
    Same,
    /// Two vocabularies with a translation between them.
    Other(Arc<Mutex<SessionTranslator>>),
}

/// The translation of one session.
pub(super) struct SessionTranslator {
    translation: Arc<Translation>,
    /// `None` before the first request.
    translator: Option<Translator>,
    /// The context as of the last request.
    token_context: TokenContext,
}

/// The context in the form in which the drafter gets it.
pub(super) enum BridgedContext {
    /// In the vocabulary of both.
    Same(TokenContext),
    /// As text, in the drafter's tokens.
    Text {
        token_context: TokenContext,
        anchor: Anchor,
        /// Drafter tokens per target token.
        ratio: f64,
    },
}

impl VocabularyBridge {
    pub fn of(session_model: &SessionModel) -> Self {
        match &session_model.translation {
            None => Self::Same,
            Some(translation) => Self::Other(Arc::new(Mutex::new(SessionTranslator {
                translation: Arc::clone(translation),
                translator: None,
                token_context: TokenContext::default(),
            }))),
        }
    }

    /// The context in the form in which the drafter gets it; `None` if the two vocabularies cannot
    /// be translated.
    pub async fn bridged(&self, token_context: TokenContext) -> Option<BridgedContext> {
        let Self::Other(session_translator) = self else { return Some(BridgedContext::Same(token_context)) };
        // A cancelled request may still lock the translator, and this thread must not wait for it.
        if let Some(mut session_translator) = session_translator.try_lock()
            && session_translator.is_quick(&token_context)
        {
            return session_translator.bridged(token_context);
        }
        let session_translator = Arc::clone(session_translator);
        tokio::task::spawn_blocking(move || session_translator.lock().bridged(token_context)).await.ok()?
    }

    /// True if the drafter may sample with the target's noise.
    pub fn shares_noise(&self) -> bool {
        matches!(self, Self::Same)
    }

    /// The drafter's choice at each output position from `from` on; `None` where it would have
    /// written other text. Empty if another request has locked the translator.
    pub async fn shadow(
        &self,
        drafter_slot: &DrafterSlot,
        bridged: BridgedContext,
        from: usize,
    ) -> Result<Vec<Option<TokenId>>, DraftFault> {
        match (bridged, self) {
            (BridgedContext::Same(token_context), _) => {
                Ok(drafter_slot.shadow(token_context, from).await?.into_iter().map(Some).collect())
            }
            (BridgedContext::Text { .. }, Self::Same) => Ok(Vec::new()),
            (BridgedContext::Text { token_context, .. }, Self::Other(session_translator)) => {
                let Some(first) = session_translator.try_lock().map(|it| it.first_position(from)) else {
                    return Ok(Vec::new());
                };
                let chosen = drafter_slot.shadow(token_context, first).await?;
                let agreed = |translator: &Translator, position| translator.agreed(position, first, &chosen);
                Ok(session_translator.try_lock().map(|it| it.said(from, agreed)).unwrap_or_default())
            }
        }
    }
}

impl BridgedContext {
    /// Noise of a slot with this context. Seed and logit bias, which refer to tokens of the target,
    /// are dropped if the drafter answers in tokens of another vocabulary.
    pub fn noise(&self, noise: Noise) -> Noise {
        match self {
            Self::Same(_) => noise,
            Self::Text { .. } => {
                let sampling = Sampling { logit_bias: Vec::new(), ..noise.sampling };
                Noise { seed: None, sampling, ..noise }
            }
        }
    }
}

impl SessionTranslator {
    /// True if the growth of the context is small enough to be translated inline.
    fn is_quick(&self, token_context: &TokenContext) -> bool {
        self.translator.is_some() && token_context.len().saturating_sub(self.token_context.len()) <= FEW
    }

    fn bridged(&mut self, token_context: TokenContext) -> Option<BridgedContext> {
        let pair = self.translation.pair()?;
        let translator = self.translator.get_or_insert_with(|| Translator::new(Arc::clone(pair)));
        translator.follow(&token_context);
        self.token_context = token_context;
        Some(BridgedContext::Text {
            token_context: TokenContext::new(&[], translator.ids()),
            anchor: translator.anchor(),
            ratio: translator.ratio(),
        })
    }
}

impl SessionTranslator {
    /// The first of the drafter's positions that covers output token `from`.
    fn first_position(&self, from: usize) -> usize {
        let position = self.token_context.prompt().len() + from;
        self.translator.as_ref().map_or(1, |translator| translator.first_position(position))
    }

    /// The output tokens from `from` on; `None` where the drafter would have written another text.
    fn said(
        &self,
        from: usize,
        agreed: impl FnOnce(&Translator, usize) -> Vec<bool>,
    ) -> Vec<Option<TokenId>> {
        let position = self.token_context.prompt().len() + from;
        let agreed =
            self.translator.as_ref().map(|translator| agreed(translator, position)).unwrap_or_default();
        let output = self.token_context.output().iter().skip(from);
        output.zip(agreed).map(|(&token, agreed)| agreed.then_some(token)).collect()
    }
}

/// A draft in the target's tokens.
pub(super) async fn draft(
    drafter_slot: &DrafterSlot,
    bridged: BridgedContext,
    order: Order,
) -> Result<Tree, DraftFault> {
    let Order { gamma, .. } = order;
    let chain = match bridged {
        BridgedContext::Same(token_context) => drafter_slot.order(token_context, order).await?,
        BridgedContext::Text { token_context, anchor, ratio } => {
            // One more than needed on average, since the last one may be incomplete.
            let tokens = (gamma as f64 * ratio).ceil() as usize + 1;
            let chosen = drafter_slot.order(token_context, Order { gamma: tokens, ..order }).await?;
            translated(&anchor, &chosen, gamma)
        }
    };
    Ok(tree(&chain))
}

/// The draft in the target's tokens; each has the smallest margin of the drafter tokens that it
/// comes from.
fn translated(anchor: &Anchor, chain: &[Drafted], gamma: usize) -> Vec<Drafted> {
    let ids: Vec<TokenId> = chain.iter().map(|&(token, _)| token).collect();
    let sure = |first: usize, last: usize| {
        let margins = chain.get(first..=last).unwrap_or_default().iter().map(|&(_, margin)| margin);
        margins.fold(f32::INFINITY, f32::min)
    };
    let tokens = anchor.translate(&ids).into_iter().take(gamma);
    tokens.map(|token| (token.token, sure(token.first, token.last))).collect()
}

/// A chain; each node carries the drafter's margin as its feature.
fn tree(chain: &[Drafted]) -> Tree {
    let mut tree = Tree::default();
    for (index, &(token, margin)) in chain.iter().enumerate() {
        let features = Features { margin, ..Features::default() };
        tree.push(Node::new(token, index.checked_sub(1), Vote::new(Source::Model, features)));
    }
    tree
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use foretell_parsers::text::Tokenizer;
    use foretell_parsers::text::translate::{Ends, Pair};

    #[test]
    fn a_slot_that_drafts_by_text_is_told_no_ids_of_the_target() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../onnx/models/draft-same");
        let words = Arc::new(Tokenizer::from_file(&folder).unwrap());
        let pair = Arc::new(Pair::new(Arc::clone(&words), words, Ends::default()).unwrap());
        let token_context = TokenContext::new(&[], &[]);
        let anchor = Translator::new(pair).anchor();
        let sampling =
            Sampling { logit_bias: vec![(5, -100.0)], presence_penalty: 0.5, ..Sampling::default() };
        let noise = Noise { seed: Some(1), choice: 2, sampling };
        let text = BridgedContext::Text { token_context: token_context.clone(), anchor, ratio: 1.0 };
        let bridged = text.noise(noise.clone());
        assert_eq!((bridged.seed, bridged.choice, bridged.sampling.presence_penalty), (None, 2, 0.5));
        assert!(bridged.sampling.logit_bias.is_empty());
        let bridged = BridgedContext::Same(token_context).noise(noise);
        assert_eq!((bridged.seed, bridged.sampling.logit_bias), (Some(1), vec![(5, -100.0)]));
    }
}
