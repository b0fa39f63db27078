//! How a policy's drafter takes part in a session: inline, as a drafter model, or not at all.

use std::borrow::Cow;

use super::{Drafter, Vocabulary};
use foretell_core::draft::LookupSpec;

/// State of a drafter model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelState {
    /// It is loaded and has the target's vocabulary.
    Ready,
    /// Its vocabulary differs from the target's; the text names both.
    OtherVocabulary(String),
    /// It is not loaded.
    NotLoaded,
    /// Not known; the text says why.
    Unknown(&'static str),
}

/// How the drafts of a model become drafts in the target's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TranslationMode {
    /// No translation: both have one vocabulary.
    Same,
    /// As text, which is encoded in the target's tokens.
    Slem,
}

impl TranslationMode {
    /// The mode in words for the operator; `None` where nothing is translated.
    pub const fn words(self) -> Option<&'static str> {
        match self {
            Self::Same => None,
            Self::Slem => Some("another vocabulary: drafts are translated as text (slem)"),
        }
    }
}

/// How a drafter takes part in a session.
#[derive(Clone, Debug, PartialEq)]
pub enum DrafterPart<'a> {
    /// It drafts inside the session, from the tokens seen so far.
    Inline(LookupSpec),
    /// The drafter model of this name is queried for drafts.
    ModelDrafter(&'a str, TranslationMode),
    /// Not known; the text says why.
    Unknown(&'static str),
    /// It does not draft; the text says why. The output stays exact, only the speedup may be
    /// smaller.
    Absent(Cow<'static, str>),
}

impl Drafter {
    /// How this drafter takes part; `proposes`: the server's model has a head, `None` where that is
    /// not known; `model` gives the state of a drafter model by name.
    pub fn part(&self, proposes: Option<bool>, model: impl Fn(&str) -> ModelState) -> DrafterPart<'_> {
        match self {
            Self::Lookup(LookupSpec::Head) if proposes != Some(true) => match proposes {
                Some(_) => DrafterPart::Absent(Cow::Borrowed("the server's model has no head")),
                None => DrafterPart::Unknown("the answer depends on the server, which is not known"),
            },
            Self::Lookup(spec) => DrafterPart::Inline(spec.clone()),
            Self::Model { model: name, vocabulary, .. } => match model(name) {
                ModelState::Ready => DrafterPart::ModelDrafter(name, TranslationMode::Same),
                ModelState::OtherVocabulary(both) => translation_mode(*vocabulary, &both).map_or_else(
                    |why| DrafterPart::Absent(Cow::Owned(why)),
                    |translation_mode| DrafterPart::ModelDrafter(name, translation_mode),
                ),
                ModelState::NotLoaded => DrafterPart::Absent(Cow::Borrowed("it is not loaded")),
                ModelState::Unknown(why) => DrafterPart::Unknown(why),
            },
        }
    }
}

/// How the drafters of a policy take part, in its order; `proposes`: the server's model has a head,
/// `None` where that is not known; `model` gives the state of each by name.
/// Of several models that can draft, the first one that is loaded drafts.
pub fn parts(
    drafters: &[Drafter],
    proposes: Option<bool>,
    model: impl Fn(&str) -> ModelState,
) -> Vec<DrafterPart<'_>> {
    drafters.iter().map(|drafter| drafter.part(proposes, &model)).collect()
}

/// Translation mode of a model with another vocabulary; an error, in words, where the policy
/// declares the same vocabulary.
fn translation_mode(vocabulary: Vocabulary, both: &str) -> Result<TranslationMode, String> {
    match vocabulary {
        Vocabulary::Auto | Vocabulary::Slem => Ok(TranslationMode::Slem),
        Vocabulary::Same => Err(format!("it is declared `vocabulary: same`, and {both}")),
    }
}
