//! How a policy's drafter takes part in a session: inline, as a model that is asked, or not at all.

use super::{Drafter, Vocabulary};
use crate::draft::LookupSpec;
use crate::draft::prompt_lookup::Ngram;

/// State of a drafter model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelState {
    /// It is loaded and has the target's vocabulary.
    Ready,
    /// Its vocabulary differs from the target's.
    OtherVocabulary,
    /// It is not loaded.
    NotLoaded,
    /// Not known; the text says why.
    Unknown(&'static str),
}

/// How a drafter takes part in a session.
#[derive(Clone, Debug, PartialEq)]
pub enum Part<'a> {
    /// It drafts inside the session, from the tokens seen so far.
    Inline(LookupSpec),
    /// The drafter model of this name is asked for drafts.
    Asked(&'a str),
    /// Not known; the text says why.
    Unknown(&'static str),
    /// It does not draft; the text says why. The output stays exact, only speed may be lost.
    Absent(&'static str),
}

impl Drafter {
    /// How this drafter takes part; `model` gives the state of a drafter model by name.
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
