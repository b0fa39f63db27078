//! Servers that are recognised and only relayed: a request to them passes as it is; known of them
//! are a name, a version and the model.
//!
//! * **Ollama** has one slot by default, takes text only and returns no ids: a fan-out would be
//!   serial.
//! * **mlx-lm** copies the whole KV cache at every fetch, and takes one text per call: a fan-out
//!   costs what it saves.
//! * **Hosted services** bill for every verify request (what can be done for them is in
//!   [`super::openai`]); how **unknown servers** would answer one is not known.
//! * **TGI** cannot verify *exactly*, for three reasons, each of which suffices. Neither of its
//!   OpenAI routes returns token ids, so those of the first call are not known, and
//!   `/generate_stream` (which returns them) is another request than the client's. It takes text
//!   only, so the ids so far would have to be those that its tokenizer makes of the text so far;
//!   where they are not (a greedy BPE joins two tokens that the model generated), the target would
//!   silently condition on another context. And `/generate` always adds the tokenizer's special
//!   tokens while a chat's template has written them already, so the prompt of a chat cannot be
//!   sent again without knowing both. TGI would need ids in the stream, or prompts of ids.

use serde_json::Value;

use super::recognise::{INFO, OLLAMA_VERSION, VERSION};
use super::{
    Answers, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, MaxTokens, Question, Refusal,
    RequestKind, Round, Unreadable, VerifyRequest, shared,
};
use crate::openai::{Additive, Request, Sampling};
use foretell_core::words::{Refused, RelayReason, VerifyResult};

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
        Some(RelayReason::NoVerifyMethod.into())
    }

    fn max_tokens(&self, _: &Engine, _: &Request) -> MaxTokens {
        MaxTokens::Unknown
    }

    fn first_request(&self, _: &Engine, request: &Request, _: u64) -> Call {
        Call { path: request.route.path(), body: shared::bytes(&request.body) }
    }

    fn additive(&self, _: &Engine, _: &Request) -> Additive {
        Additive::default()
    }

    fn plain_request(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        shared::plain_request(context, max_tokens, &shared::client_fields(sampling))
    }

    fn chunk(&self, _: &Engine, _: RequestKind, _: &Value) -> Result<Chunk, Unreadable> {
        Err(Unreadable("this server is only relayed"))
    }

    fn verify(&self, _: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
        Err(Refusal::NoVerifyMethod(round.method.name()))
    }

    fn result(
        &self,
        _: &Engine,
        _: &Round<'_>,
        _: &VerifyRequest,
        _: &[Vec<u8>],
    ) -> Result<VerifyResult, Unreadable> {
        Err(Unreadable("this server is only relayed"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::dialect::recognise::{MODELS, Reply};
    use crate::openai::{Judgement, Route, judge};

    #[test]
    fn a_relayed_server_has_a_name_a_version_and_no_verification_method() {
        let mut answers = Answers::default();
        let mut tell = |path, body: Value| {
            answers.add(path, Reply { status: 200, server: None, body: body.to_string().into_bytes() });
        };
        tell(MODELS, json!({"data": [{"id": "qwen3:8b"}]}));
        tell(OLLAMA_VERSION, json!({"version": "0.12.1"}));
        for dialect in RELAYED {
            let engine = dialect.codec().engine(&answers).unwrap();
            assert_eq!((engine.dialect, engine.model.as_str()), (dialect, "qwen3:8b"));
            assert_eq!(engine.version, "0.12.1");
            assert!(engine.methods.is_empty() && dialect.codec().questions(&answers).is_empty());
        }
    }

    #[test]
    fn a_relayed_request_is_sent_unchanged_with_the_client_s_prediction() {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0,
            "prediction": {"type": "content", "content": "Hello"}});
        let Judgement::Eligible(request) = judge(Route::Chat, body.to_string().as_bytes()) else {
            panic!("eligible")
        };
        for dialect in RELAYED {
            let engine = Engine::new(dialect, "m", "");
            assert_eq!(engine.first_request(&request, 1).body, body.to_string().into_bytes());
            assert_eq!(engine.additive(&request), Additive::default());
            assert_eq!(engine.methods_for(&request, &request.sampling, true), []);
            assert_eq!(
                dialect.codec().refuses(&engine, &request, &request.sampling),
                Some(RelayReason::NoVerifyMethod.into())
            );
        }
    }
}
