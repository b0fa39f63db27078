//! Which part a policy's drafter takes: some work beside the session, one is asked for its drafts, and some are not
//! there.

use super::{Drafter, Vocabulary};
use crate::draft::LookupSpec;
use crate::draft::prompt_lookup::Ngram;

/// What is known of a drafter model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelState {
    /// It is loaded, and speaks the target's vocabulary.
    Ready,
    /// It speaks another vocabulary than the target.
    OtherVocabulary,
    /// It is not loaded.
    NotLoaded,
    /// Whether it can draft is not known, for this reason.
    Unknown(&'static str),
}

/// The part of a drafter in a session.
#[derive(Clone, Debug, PartialEq)]
pub enum Part<'a> {
    /// It drafts from what the session has seen.
    Inline(LookupSpec),
    /// It is a model of this name, which is asked for drafts.
    Asked(&'a str),
    /// Whether it drafts is not known, for this reason.
    Unknown(&'static str),
    /// It drafts nothing, for this reason. Leaving out a drafter is slower, never wrong.
    Absent(&'static str),
}

impl Drafter {
    /// The part that this drafter takes. `model` tells the state of a drafter model.
    pub fn part(&self, model: impl Fn(&str) -> ModelState) -> Part<'_> {
        const NOT_BUILT: Part<'static> = Part::Absent("this kind of drafter is not built yet");
        match self {
            Self::PromptLookup { ngram_min, ngram_max } => {
                Part::Inline(LookupSpec::PromptLookup(Ngram { min: *ngram_min, max: *ngram_max }))
            }
            Self::Suffix { .. } | Self::Phrasebook { .. } | Self::Recycling | Self::Prediction => NOT_BUILT,
            Self::Model { vocabulary: Vocabulary::Slem | Vocabulary::Tli, .. } => {
                Part::Absent("translating between vocabularies is not built yet")
            }
            Self::Model { model: name, vocabulary: Vocabulary::Auto | Vocabulary::Same } => match model(name)
            {
                ModelState::Ready => Part::Asked(name),
                ModelState::OtherVocabulary => Part::Absent("it speaks another vocabulary than the target"),
                ModelState::NotLoaded => Part::Absent("it is not loaded"),
                ModelState::Unknown(why) => Part::Unknown(why),
            },
        }
    }
}
