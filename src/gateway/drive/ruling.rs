//! What the policies say about one request.

#[cfg(feature = "onnx")]
use std::collections::HashMap;

use super::identity::Identity;
use crate::gateway::handover::Exchange;
use crate::gateway::mode::Mode;
use crate::gateway::route::Bypass;
use crate::session::Rules;

#[cfg(feature = "onnx")]
use crate::runtime::drafter::DrafterService;

/// x
pub struct Ruling {
    /// `name@revision` of the policy that matched.
    pub name: String,
    /// What the session may do.
    pub rules: Rules,
    /// The model drafter that the policy names, if any.
    pub model: Option<String>,
    /// Most bytes of a round's request and answer.
    pub bytes_max: usize,
}

/// x
pub struct Rulebook;

impl Rulebook {
    /// x
    pub fn rule(&self, _: &Exchange, _: &Identity, _: Mode) -> Result<Ruling, Bypass> {
        Err(Bypass::NoPolicy)
    }
}

/// A loaded model drafter and the vocabulary it speaks.
#[cfg(feature = "onnx")]
#[derive(Clone)]
pub struct Drafter {
    /// The service that steps it.
    pub service: DrafterService,
    /// Hash of its vocabulary.
    pub vocabulary: String,
}

/// The model drafters, by the names that policies use.
#[derive(Clone, Default)]
pub struct Drafters {
    #[cfg(feature = "onnx")]
    loaded: HashMap<String, Drafter>,
}

#[cfg(feature = "onnx")]
impl Drafters {
    /// These drafters.
    pub fn new(loaded: HashMap<String, Drafter>) -> Self {
        Self { loaded }
    }

    /// The drafter of that name, if it is loaded and speaks the target's vocabulary.
    pub fn get(&self, name: &str, identity: &Identity) -> Option<DrafterService> {
        let drafter = self.loaded.get(name)?;
        (drafter.vocabulary == identity.epoch.vocabulary).then(|| drafter.service.clone())
    }
}
