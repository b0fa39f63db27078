//! Servers that are recognised and only relayed: a request to them passes as it is, and what a relay needs is a
//! name, a version and the model.
//!
//! * **Ollama** has one slot by default, takes text only and returns no ids: a fan-out would be serial.
//! * **mlx-lm** copies the whole KV cache at every fetch, and takes one text per call: a fan-out costs what it
//!   saves.
//! * **Hosted and unknown servers** bill for every verify call, or nobody knows what they would make of one;
//!   what can be done for the former is in [`super::openai`].
//! * **TGI** cannot be verified *exactly*, for three reasons of which each is enough. Neither of its OpenAI
//!   routes returns token ids, so those of the first ride are not known, and `/generate_stream` (which returns
//!   them) is another request than the client's. It takes text only, so the ids so far would have to be those
//!   that its tokenizer makes of the text so far; where they are not (a greedy BPE joins what the model wrote
//!   as two tokens), the target would be conditioned on another past, silently. And `/generate` always adds
//!   the tokenizer's special tokens while a chat's template has written them already, so the prompt of a chat
//!   cannot be said again without knowing both. What would have to change: ids in the stream, or prompts of ids.

use serde_json::Value;

use super::recognise::{INFO, OLLAMA_VERSION, VERSION};
use super::{
    Answers, Asked, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, Load, MaxTokens, Question,
    Refusal, RideKind, Round, Unreadable, shared,
};
use crate::openai::{Additive, Request, Sampling};
use crate::words::{BypassReason, Refused};
use crate::words::{Plan, Verdict};

/// The dialects of servers that are relayed to, whatever they answer.
pub const RELAYED: [Dialect; 4] = [Dialect::Ollama, Dialect::Mlx, Dialect::OpenAi, Dialect::Tgi];

/// The codec of a server that is only relayed.
pub struct Relayed(pub Dialect);

impl Codec for Relayed {
    fn questions(&self, _: &Answers) -> Vec<Question> {
        Vec::new()
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let told = [OLLAMA_VERSION, INFO, VERSION];
        let version = told.into_iter().find_map(|path| answers.word(path, "/version"));
        Ok(Engine::new(self.0, answers.model().unwrap_or_default(), version.unwrap_or_default()))
    }

    fn refuses(&self, _: &Engine, _: &Request, _: &Sampling) -> Option<Refused> {
        Some(BypassReason::NoPlan.into())
    }

    fn plans(&self, _: &Engine, _: &Request, _: &Sampling, _: bool) -> Vec<Plan> {
        Vec::new()
    }

    fn max_tokens(&self, _: &Engine, _: &Request) -> MaxTokens {
        MaxTokens::Unknown
    }

    fn first_ride(&self, _: &Engine, request: &Request, _: u64) -> Call {
        Call { path: request.route.path(), body: shared::bytes(&request.body) }
    }

    fn additive(&self, _: &Engine, _: &Request) -> Additive {
        Additive::default()
    }

    fn ride(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        shared::ride(context, max_tokens, &shared::said_fields(sampling))
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::dialect::recognise::{MODELS, Told};
    use crate::openai::{Judgement, Route, judge};

    #[test]
    fn a_relayed_server_has_a_name_a_version_and_no_plan() {
        let mut answers = Answers::default();
        let mut tell = |path, body: Value| {
            answers.add(path, Told { status: 200, server: None, body: body.to_string().into_bytes() });
        };
        tell(MODELS, json!({"data": [{"id": "qwen3:8b"}]}));
        tell(OLLAMA_VERSION, json!({"version": "0.12.1"}));
        for dialect in RELAYED {
            let engine = dialect.codec().engine(&answers).unwrap();
            assert_eq!((engine.dialect, engine.model.as_str()), (dialect, "qwen3:8b"));
            assert_eq!(engine.version, "0.12.1");
            assert!(engine.plans.is_empty() && dialect.codec().questions(&answers).is_empty());
        }
    }

    #[test]
    fn what_is_relayed_goes_out_as_it_came_with_the_client_s_own_prediction() {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0,
            "prediction": {"type": "content", "content": "Hello"}});
        let Judgement::Eligible(request) = judge(Route::Chat, body.to_string().as_bytes()) else {
            panic!("eligible")
        };
        for dialect in RELAYED {
            let engine = Engine::new(dialect, "m", "");
            assert_eq!(engine.first_ride(&request, 1).body, body.to_string().into_bytes());
            assert_eq!(engine.additive(&request), Additive::default());
            assert_eq!(engine.plans(&request, &request.sampling, true), []);
            assert_eq!(
                dialect.codec().refuses(&engine, &request, &request.sampling),
                Some(BypassReason::NoPlan.into())
            );
            assert_eq!(dialect.codec().load_path(&engine), None);
        }
    }
}
