//! How one session speaks with its drafter: in one vocabulary, or by a translation between two.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::draft::{Draft, Features, Node, Source, Tree, Vote};
use crate::drive::drafters::{Speaker, Translation};
use crate::policy::part::Speech;
use crate::runtime::drafter::{Chosen, DraftFault, Drafted, Noise, Order, Seat, Spoken, Voice};
use crate::text::translate::{Anchor, Common, Translator};
use crate::units::TokenId;
use crate::words::Past;

/// Share of common tokens in the text from which on a drafter may draft in them, where the target's noise is shared.
const OVERLAP: f64 = 0.9;
/// New tokens that are translated where they are needed; more are a matter for a thread that may block.
const FEW: usize = 64;

/// A session's way to speak with its drafter; clones speak for the same session.
#[derive(Clone)]
pub(super) enum Tongue {
    /// Both have one vocabulary.
    Same,
    /// There is a translation between them.
    Other(Arc<Mutex<Interpreter>>),
}

/// The translation of one session.
pub(super) struct Interpreter {
    translation: Arc<Translation>,
    speech: Speech,
    /// `None` before the first question.
    translator: Option<Translator>,
    /// The past as of the last question.
    past: Past,
}

/// The past as the drafter is to be told it.
pub(super) enum Told {
    /// In the tokens that both have.
    Same(Past),
    /// As text, in the drafter's tokens.
    Text {
        past: Past,
        anchor: Anchor,
        /// Tokens of the drafter's for each of the target's.
        ratio: f64,
    },
    /// In the drafter's tokens, and in the target's, which it is to answer in.
    Common { past: Past, spoken: Past, common: Arc<Common> },
}

impl Tongue {
    pub fn of(speaker: &Speaker) -> Self {
        match &speaker.translation {
            None => Self::Same,
            Some(translation) => Self::Other(Arc::new(Mutex::new(Interpreter {
                translation: Arc::clone(translation),
                speech: speaker.speech,
                translator: None,
                past: Past::default(),
            }))),
        }
    }

    /// The past as the drafter is to be told it; `None` where the two vocabularies cannot be translated. `noise`: how the
    /// session's seat chooses.
    pub async fn tell(&self, past: Past, noise: &Noise) -> Option<Told> {
        let Self::Other(interpreter) = self else { return Some(Told::Same(past)) };
        let shares = noise.seed.is_some() && noise.sampling.temperature > 0.0;
        // A question that was given up may still be at work on the text, which is not to be waited for here.
        if let Some(mut interpreter) = interpreter.try_lock()
            && interpreter.is_quick(&past)
        {
            return interpreter.tell(past, shares);
        }
        let interpreter = Arc::clone(interpreter);
        tokio::task::spawn_blocking(move || interpreter.lock().tell(past, shares)).await.ok()?
    }

    /// Whether the drafter may draw with the target's own noise.
    pub fn shares_noise(&self) -> bool {
        match self {
            Self::Same => true,
            Self::Other(interpreter) => interpreter.lock().speech != Speech::Slem,
        }
    }

    /// The drafter's own choice at each output place from `from` on; `None` where it would have written other text. Nothing
    /// where another question is at work on the text.
    pub async fn shadow(
        &self,
        seat: &Seat,
        told: Told,
        from: usize,
    ) -> Result<Vec<Option<TokenId>>, DraftFault> {
        match (told, self) {
            (Told::Same(past), _) => Ok(seat.shadow(past, from).await?.into_iter().map(Some).collect()),
            (Told::Text { .. } | Told::Common { .. }, Self::Same) => Ok(Vec::new()),
            (Told::Text { past, .. }, Self::Other(interpreter)) => {
                let Some((first, _)) = interpreter.try_lock().map(|it| it.places(from)) else {
                    return Ok(Vec::new());
                };
                let chosen = seat.shadow(past, first).await?;
                let agreed = |translator: &Translator, place| translator.agreed(place, first, &chosen);
                Ok(interpreter.try_lock().map(|it| it.said(from, agreed)).unwrap_or_default())
            }
            (Told::Common { past, spoken, .. }, Self::Other(interpreter)) => {
                let Some((first, before)) = interpreter.try_lock().map(|it| it.places(from)) else {
                    return Ok(Vec::new());
                };
                let asked = Spoken { past: spoken.clone(), before: before.clone() };
                let chosen = seat.shadow_common(past, asked, first).await?;
                let said = |at: usize| spoken.tokens().nth(at);
                let right = before.iter().zip(&chosen).filter(|&(&at, &choice)| said(at) == Some(choice));
                let right: Vec<usize> = right.map(|(&at, _)| at).collect();
                let agreed = |translator: &Translator, place| translator.agreed_at(place, &right);
                Ok(interpreter.try_lock().map(|it| it.said(from, agreed)).unwrap_or_default())
            }
        }
    }
}

impl Told {
    /// In whose tokens a seat is to answer that is told this.
    pub fn voice(&self) -> Voice {
        match self {
            Self::Same(_) | Self::Text { .. } => Voice::Own,
            Self::Common { common, .. } => Voice::Common(Arc::clone(common)),
        }
    }

    /// How a seat chooses that is told this: with the target's noise only in the target's tokens.
    pub fn noise(&self, noise: Noise) -> Noise {
        match self {
            Self::Same(_) | Self::Common { .. } => noise,
            Self::Text { .. } => Noise { seed: None, ..noise },
        }
    }
}

impl Interpreter {
    /// Whether it is told in no time what a past has grown by.
    fn is_quick(&self, past: &Past) -> bool {
        self.translator.is_some() && past.len().saturating_sub(self.past.len()) <= FEW
    }

    fn tell(&mut self, past: Past, shares: bool) -> Option<Told> {
        let pair = self.translation.pair()?;
        if self.speech == Speech::Tli && pair.common().size() == 0 {
            return None;
        }
        let translator = self.translator.get_or_insert_with(|| Translator::new(Arc::clone(pair)));
        translator.follow(&past);
        self.past = past.clone();
        if self.speech == Speech::Measured {
            let overlaps = pair.overlap().is_some_and(|overlap| overlap > OVERLAP);
            self.speech = if shares && overlaps { Speech::Tli } else { Speech::Slem };
        }
        let told = Past::new(&[], translator.ids());
        Some(match self.speech {
            Speech::Tli => Told::Common { past: told, spoken: past, common: Arc::clone(pair.common()) },
            _ => Told::Text { past: told, anchor: translator.anchor(), ratio: translator.ratio() },
        })
    }
}

impl Interpreter {
    /// The first of the drafter's places that tells of output token `from`, and for each from there on how many of the
    /// target's tokens stand before it.
    fn places(&self, from: usize) -> (usize, Vec<usize>) {
        let place = self.past.prompt().len() + from;
        self.translator.as_ref().map_or((1, Vec::new()), |translator| translator.places(place))
    }

    /// The output from `from` on, as far as the drafter would have written it.
    fn said(
        &self,
        from: usize,
        agreed: impl FnOnce(&Translator, usize) -> Vec<bool>,
    ) -> Vec<Option<TokenId>> {
        let place = self.past.prompt().len() + from;
        let agreed = self.translator.as_ref().map(|translator| agreed(translator, place)).unwrap_or_default();
        let output = self.past.output().iter().skip(from);
        output.zip(agreed).map(|(&token, agreed)| agreed.then_some(token)).collect()
    }
}

/// A draft in the target's tokens. What goes through text is never sampled: the laws of its tokens are not known.
pub(super) async fn draft(seat: &Seat, told: Told, order: Order) -> Result<Draft, DraftFault> {
    let Order { gamma, .. } = order;
    match told {
        Told::Same(past) => seat.order(past, None, order).await.map(drawn),
        Told::Common { past, spoken, .. } => seat.order(past, Some(spoken), order).await.map(drawn),
        Told::Text { past, anchor, ratio } => {
            // One more than it takes on the average, for the last one may have to be held back.
            let own = (gamma as f64 * ratio).ceil() as usize + 1;
            let chosen = seat.order(past, None, Order { gamma: own, draws: None, ..order }).await?;
            Ok(tree(&translated(&anchor, &chosen.tokens, gamma)).into())
        }
    }
}

/// The draft of these tokens: sampled, if all of them were drawn.
fn drawn(chosen: Chosen) -> Draft {
    let Chosen { tokens, drawn } = chosen;
    if drawn.chain().len() != tokens.len() || tokens.is_empty() {
        return tree(&tokens).into();
    }
    Draft::drawn(drawn, tokens.iter().map(|&(_, margin)| Features { margin, ..Features::default() }))
}

/// The draft in the target's tokens; each is as sure as the least sure of those that it comes from.
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
