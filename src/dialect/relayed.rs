//! Servers that are told apart and relayed: Ollama, mlx-lm, and whatever speaks OpenAI's API and is none of
//! the others. None of them can be asked to verify at a gain (backends.md 7, 9, 10); what a relay needs is a
//! name, a version and the model.

use serde_json::Value;

use super::recognise::{OLLAMA_VERSION, VERSION};
use super::{
    Answers, Asked, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, Load, MaxTokens, Question,
    Refusal, RideKind, Round, Unreadable, shared,
};
use crate::openai::{Additive, BypassReason, Request, Sampling};
use crate::session::{Plan, StopOrder, Verdict};

/// How a server of this dialect is relayed.
pub struct Relayed(pub Dialect);

impl Codec for Relayed {
    fn questions(&self, _: &Answers) -> Vec<Question> {
        Vec::new()
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let version = [OLLAMA_VERSION, VERSION].into_iter().find_map(|path| answers.word(path, "/version"));
        Ok(Engine::new(self.0, answers.model().unwrap_or_default(), version.unwrap_or_default()))
    }

    fn refuses(&self, _: &Engine, _: &Request, _: &Sampling) -> Option<BypassReason> {
        Some(BypassReason::NoPlan)
    }

    fn plans(&self, _: &Engine, _: &Request, _: &Sampling, _: bool) -> Vec<Plan> {
        Vec::new()
    }

    fn max_tokens(&self, _: &Engine, _: &Request) -> MaxTokens {
        MaxTokens::Unknown
    }

    fn stop_order(&self) -> StopOrder {
        StopOrder::Listed
    }

    fn first_ride(&self, _: &Engine, request: &Request, _: u64) -> Call {
        Call { path: request.route.path(), body: shared::bytes(&request.body) }
    }

    fn additive(&self, _: &Engine, _: &Request) -> Additive {
        Additive::default()
    }

    fn ride(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        let (prompt, fields) = (vec![context.whole(&[])], shared::said_fields(sampling));
        shared::Completion { model: context.model, prompt, max_tokens, stream: true, fields }.call()
    }

    fn chunk(&self, _: &Engine, _: RideKind, _: &Value) -> Result<Chunk, Unreadable> {
        Err(Unreadable("this server is only relayed"))
    }

    fn verify(&self, _: &Engine, round: &Round<'_>) -> Result<Asked, Refusal> {
        Err(Refusal::NoPlan(round.plan.name()))
    }

    fn verdict(&self, _: &Engine, _: &Round<'_>, _: &Asked, _: &[Vec<u8>]) -> Result<Verdict, Unreadable> {
        Err(Unreadable("this server is only relayed"))
    }

    fn load_path(&self, _: &Engine) -> Option<&'static str> {
        None
    }

    fn load(&self, _: &str) -> Option<Load> {
        None
    }
}
