//! Servers that are recognised, and whose requests are only passed through, unchanged; known of
//! them are a name, a version and the model.
//!
//! * **Ollama** has one slot by default, takes text only and returns no ids: a fan-out would be
//!   serial.
//! * **mlx-lm** copies the complete KV cache at every fetch, and takes one text per call: a fan-out
//!   costs what it saves.
//! * **Hosted services** bill for every verify request; how **unknown servers** would answer one is
//!   not known.
//! * **TGI** cannot verify *exactly*, for three reasons, each of which suffices. Neither of its
//!   OpenAI routes returns token ids, so those of the first call are not known, and
//!   `/generate_stream` (which returns them) is another request than the client's. It takes text
//!   only, so the ids so far would have to be those that its tokenizer makes of the text so far;
//!   where they are not (a greedy BPE joins two tokens that the model generated), the target would
//!   silently condition on another context. And `/generate` always adds the tokenizer's special
//!   tokens while a chat's template has written them already, so the prompt of a chat cannot be
//!   resent without knowing both. TGI would need ids in the stream, or prompts of ids.
//! * **TensorRT-LLM**, **Triton** and **LMDeploy** could be verified on in part: at temperature 0,
//!   or with every field set, and on one of the two routes. They speculate themselves. The load of
//!   the first and the last is read, where they report it; Triton's metrics are on another port.

use super::recognise::{INFO, KSERVE, OLLAMA_VERSION, VERSION};
use super::{
    Additions, Answers, Call, Chunk, Codec, Context, Dialect, Engine, Foreign, Load, Pages, Question, Quirks,
    Refusal, RequestKind, Round, Unreadable, VerifyRequest, shared,
};
use foretell_core::words::{PassthroughReason, Refused, VerifyMethod, VerifyResult};
use foretell_wire::openai::{Event, Request, Sampling};

/// The dialects of servers to which all requests are passed through, whatever they answer.
pub const PASSTHROUGH: [Dialect; 7] = [
    Dialect::Ollama,
    Dialect::Mlx,
    Dialect::OpenAi,
    Dialect::Tgi,
    Dialect::TrtLlm,
    Dialect::Triton,
    Dialect::Lmdeploy,
];

const TRTLLM: Quirks = Quirks { owner: Some("tensorrt_llm"), ..Quirks::COMMON };
const LMDEPLOY: Quirks = Quirks { owner: Some("lmdeploy"), ..Quirks::COMMON };

/// The codec of a server to which all requests are passed through.
pub struct Passthrough(pub Dialect);

impl Passthrough {
    /// The page on which it reports its load. `GET /metrics` of TensorRT-LLM empties a queue that
    /// another client may be reading.
    const fn load_page(&self) -> Option<&'static str> {
        match self.0 {
            Dialect::TrtLlm => Some("/prometheus/metrics"),
            Dialect::Lmdeploy => Some("/metrics"),
            _ => None,
        }
    }
}

impl Codec for Passthrough {
    fn quirks(&self) -> &'static Quirks {
        match self.0 {
            Dialect::TrtLlm => &TRTLLM,
            Dialect::Lmdeploy => &LMDEPLOY,
            _ => &Quirks::COMMON,
        }
    }

    fn questions(&self, answers: &Answers) -> Vec<Question> {
        answers.unanswered(self.load_page().as_slice())
    }

    fn engine(&self, answers: &Answers) -> Result<Engine, Foreign> {
        let paths = [OLLAMA_VERSION, INFO, VERSION, KSERVE];
        let version = paths.into_iter().find_map(|path| answers.word(path, "/version"));
        Ok(Engine {
            pages: Pages {
                load: self.load_page().filter(|page| answers.text(page).is_some()),
                ..Pages::default()
            },
            ..Engine::new(self.0, answers.model().unwrap_or_default(), version.unwrap_or_default())
        })
    }

    fn methods(&self, _: &Engine, _: &Request, _: &Sampling, _: bool) -> Result<Vec<VerifyMethod>, Refused> {
        Err(PassthroughReason::NoVerifyMethod.into())
    }

    fn additions(&self, _: &Engine, _: &Request, _: u64) -> Additions {
        Additions::default()
    }

    fn plain_request(&self, _: &Engine, context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
        shared::plain_request(context, max_tokens, &shared::client_fields(sampling))
    }

    fn chunk(&self, _: RequestKind, _: &Event) -> Result<Chunk, Unreadable> {
        Err(Unreadable("requests to this server are only passed through"))
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
        Err(Unreadable("requests to this server are only passed through"))
    }

    fn load(&self, body: &str) -> Option<Load> {
        match self.0 {
            Dialect::TrtLlm => {
                let kv = ["trtllm_kv_cache_utilization"];
                shared::load(body, "trtllm_num_requests_running", "trtllm_num_requests_waiting", &kv)
            }
            Dialect::Lmdeploy => {
                let kv = ["lmdeploy:gpu_cache_usage_perc"];
                let (running, waiting) = ("lmdeploy:num_requests_running", "lmdeploy:num_requests_waiting");
                let load = shared::load(body, running, waiting, &kv)?;
                let more = shared::metric(body, &["lmdeploy:num_api_requests_waiting"]).unwrap_or(0.0);
                Some(Load { waiting: load.waiting.saturating_add(more as u32), ..load })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::recognise::{MODELS, Reply};
    use foretell_wire::openai::{Judgement, Route, judge};

    #[test]
    fn a_passthrough_server_has_a_name_a_version_and_no_verification_method() {
        let mut answers = Answers::default();
        let mut tell = |path, body: Value| {
            answers.add(path, Reply { status: 200, server: None, body: body.to_string().into_bytes() });
        };
        tell(MODELS, json!({"data": [{"id": "qwen3:8b"}]}));
        tell(OLLAMA_VERSION, json!({"version": "0.12.1"}));
        for dialect in PASSTHROUGH {
            let engine = dialect.codec().engine(&answers).unwrap();
            assert_eq!((engine.dialect, engine.model.as_str()), (dialect, "qwen3:8b"));
            assert_eq!(engine.version, "0.12.1");
            assert!(engine.methods.is_empty() && engine.pages.load.is_none(), "no page was answered");
        }
    }

    #[test]
    fn the_load_is_read_where_an_engine_reports_it() {
        let read = |dialect: Dialect, page| {
            dialect.codec().load(page).map(|load| (load.running, load.waiting, load.kv_usage))
        };
        let trtllm = "trtllm_num_requests_running{m=\"a\"} 3\ntrtllm_num_requests_waiting{m=\"a\"} 1\n\
            trtllm_kv_cache_utilization{m=\"a\"} 0.4\n";
        assert_eq!(read(Dialect::TrtLlm, trtllm), Some((3, 1, Some(0.4))));
        let lmdeploy = "lmdeploy:num_requests_running 2\nlmdeploy:num_requests_waiting 1\n\
            lmdeploy:num_api_requests_waiting 4\n";
        assert_eq!(read(Dialect::Lmdeploy, lmdeploy), Some((2, 5, None)));
        assert_eq!(read(Dialect::Triton, trtllm), None);
        let mut answers = Answers::default();
        answers.add("/metrics", Reply { status: 200, server: None, body: lmdeploy.into() });
        let engine = |dialect: Dialect| dialect.codec().engine(&answers).unwrap();
        assert_eq!(engine(Dialect::Lmdeploy).pages.load, Some("/metrics"));
        assert_eq!(engine(Dialect::TrtLlm).pages.load, None);
    }

    #[test]
    fn no_request_is_eligible_there() {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5});
        let Judgement::Eligible(request) = judge(Route::Chat, body.to_string().as_bytes()) else {
            panic!("eligible")
        };
        for dialect in PASSTHROUGH {
            let engine = Engine::new(dialect, "m", "");
            let refused =
                engine.methods_for(&request, &request.sampling, true).map_err(|refused| refused.reason);
            assert_eq!(refused, Err(PassthroughReason::NoVerifyMethod));
        }
    }
}
