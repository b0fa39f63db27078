//! Identifies engines by their endpoints.
//!
//! A server gets the questions of [`introduction`], which every engine answers without computing a
//! token, or refuses; then those of its dialect, in rounds ([`super::Codec::questions`]).

use std::borrow::Cow;

use indexmap::IndexMap;
use serde_json::Value;

use super::Dialect;

/// A call that asks a server about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The path, below the base path. Answers are stored under it.
    pub path: Cow<'static, str>,
    /// The JSON body of a `POST`; `None` for a `GET`.
    pub body: Option<Value>,
}

impl Question {
    /// The question `GET path`.
    pub fn get(path: &'static str) -> Self {
        Self { path: path.into(), body: None }
    }

    /// `POST path` with a JSON body.
    pub fn post(path: &'static str, body: Value) -> Self {
        Self { path: path.into(), body: Some(body) }
    }
}

/// A server's answer to one question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status of the answer.
    pub status: u16,
    /// Value of the `server` header; `None` if the answer has none.
    pub server: Option<String>,
    /// Bytes of the body.
    pub body: Vec<u8>,
}

/// A server's answers so far, by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answers(IndexMap<String, Reply>);

impl Answers {
    /// Adds the answer to the question at `path`; replaces an earlier one.
    pub fn add(&mut self, path: &str, reply: Reply) {
        self.0.insert(path.to_owned(), reply);
    }

    /// The paths that were answered with 200.
    pub fn good(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(_, reply)| reply.status == 200).map(|(path, _)| path.as_str())
    }

    /// True if there is an answer of `path`, whatever its status.
    pub fn has(&self, path: &str) -> bool {
        self.0.contains_key(path)
    }

    /// The `GET` questions for those of `paths` that have not been requested.
    pub fn unanswered(&self, paths: &[&'static str]) -> Vec<Question> {
        paths.iter().filter(|path| !self.has(path)).copied().map(Question::get).collect()
    }

    /// The requested paths.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The status that `path` was answered with; `None` if it was not requested.
    pub fn status(&self, path: &str) -> Option<u16> {
        Some(self.0.get(path)?.status)
    }

    /// The body of an answer with status 200, as text; `None` without such an answer, or if it is
    /// not UTF-8.
    pub fn text(&self, path: &str) -> Option<&str> {
        let reply = self.0.get(path).filter(|reply| reply.status == 200)?;
        std::str::from_utf8(&reply.body).ok()
    }

    /// The body of an answer with status 200, as JSON; `None` without such an answer, or if it is
    /// not JSON.
    pub fn json(&self, path: &str) -> Option<Value> {
        serde_json::from_str(self.text(path)?).ok()
    }

    /// A member of an answer with status 200, by JSON pointer; `None` if there is none.
    pub fn at(&self, path: &str, pointer: &str) -> Option<Value> {
        self.json(path)?.pointer(pointer).cloned()
    }

    /// A text member of an answer with status 200, by JSON pointer; `None` if there is none.
    pub fn word(&self, path: &str, pointer: &str) -> Option<String> {
        self.at(path, pointer)?.as_str().map(ToOwned::to_owned)
    }

    /// A non-negative integer of an answer with status 200, by JSON pointer; `None` if there is
    /// none.
    pub fn number(&self, path: &str, pointer: &str) -> Option<u64> {
        self.at(path, pointer)?.as_u64()
    }

    /// True if the `server` header of any answer begins with `name`.
    fn served_by(&self, name: &str) -> bool {
        self.0.values().any(|reply| reply.server.as_deref().is_some_and(|server| server.starts_with(name)))
    }

    /// The owner of the first model (`owned_by`).
    fn owner(&self) -> Option<String> {
        self.word(MODELS, "/data/0/owned_by")
    }

    /// The id of the first model in the server's list; `None` if it lists none.
    pub fn model(&self) -> Option<String> {
        self.word(MODELS, "/data/0/id")
    }
}

/// A server that cannot verify; the text says why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Foreign(pub String);

impl Foreign {
    /// The error for a server that does not report `what`, which has to be known.
    pub fn silent(what: &str) -> Self {
        Self(format!("it reports no {what}"))
    }
}

/// Lists the models on every OpenAI-compatible server.
pub const MODELS: &str = "/v1/models";
/// Reports the version of vLLM, TensorRT-LLM and `foretell target`.
pub const VERSION: &str = "/version";
/// Page by which llama-server is recognised.
pub const PROPS: &str = "/props";
/// Page by which SGLang is recognised.
pub const SERVER_INFO: &str = "/server_info";
/// Page by which TGI is recognised.
pub const INFO: &str = "/info";
/// Reports the version of Ollama.
pub const OLLAMA_VERSION: &str = "/api/version";
/// Page by which Triton is recognised.
pub const KSERVE: &str = "/v2";

/// The questions to an unknown server. None of them makes it compute a token.
pub fn introduction() -> Vec<Question> {
    [MODELS, VERSION, PROPS, SERVER_INFO, INFO, OLLAMA_VERSION, KSERVE].map(Question::get).into()
}

/// The questions by which a known engine, which gave these answers, is checked for being the same
/// one: none that it refused then, nor any that makes it compute.
pub fn check_of(dialect: Dialect, answers: &Answers, start_page: Option<&str>) -> Vec<Question> {
    let mut pages = match dialect.quirks().same_by {
        [] => introduction(),
        pages => pages.iter().copied().map(Question::get).collect(),
    };
    pages.retain(|page| answers.text(&page.path).is_some());
    if let Some(start) = start_page.filter(|start| pages.iter().all(|page| page.path != **start)) {
        pages.push(Question { path: start.to_owned().into(), body: None });
    }
    pages
}

/// The page on which an engine reports its start time; `None` if it does not.
pub fn start_page(dialect: Dialect, answers: &Answers) -> Option<&'static str> {
    let page = dialect.quirks().start_page?;
    dialect.codec().engine(answers).ok()?.process.started.map(|_| page)
}

/// The questions to a server whose dialect the operator has named, or not (`None`). One to
/// which requests are only passed through gets no questions about other dialects: a hosted service
/// receives a request for its list of models only.
pub fn introduction_to(dialect: Option<Dialect>) -> Vec<Question> {
    match dialect {
        Some(Dialect::OpenAi | Dialect::Mlx | Dialect::Lmdeploy) => vec![Question::get(MODELS)],
        Some(Dialect::Ollama) => [MODELS, OLLAMA_VERSION].map(Question::get).into(),
        Some(Dialect::Tgi) => [MODELS, INFO].map(Question::get).into(),
        Some(Dialect::TrtLlm) => [MODELS, VERSION].map(Question::get).into(),
        Some(Dialect::Triton) => [MODELS, KSERVE].map(Question::get).into(),
        _ => introduction(),
    }
}

/// The engine that gave these answers to the [`introduction`]; `None` if it is unknown.
pub fn dialect_of(answers: &Answers) -> Option<Dialect> {
    if answers.word(VERSION, "/engine").as_deref() == Some("foretell") {
        return Some(Dialect::Onnx);
    }
    let owner = answers.owner();
    let named = |dialect: &Dialect| dialect.quirks().owner.is_some_and(|name| owner.as_deref() == Some(name));
    Dialect::ALL.into_iter().find(named).or_else(|| by_habit(answers))
}

/// Recognises engines whose list of models does not name them. The last check accepts every server
/// with such a list: it has OpenAI's API and is none of the others.
fn by_habit(answers: &Answers) -> Option<Dialect> {
    let router = answers.word(INFO, "/router");
    let is_tgi = router.as_deref() == Some("text-generation-router")
        || (answers.word(INFO, "/model_id").is_some() && answers.number(INFO, "/max_total_tokens").is_some());
    // Many small servers are built on Python's HTTP server, which does not identify the API.
    let by_python = answers.served_by("BaseHTTP/");
    let habits = [
        (Dialect::Triton, answers.word(KSERVE, "/name").as_deref() == Some("triton")),
        (Dialect::Tgi, is_tgi),
        (Dialect::Ollama, answers.word(OLLAMA_VERSION, "/version").is_some()),
        (Dialect::Mlx, is_mlx(answers)),
        (Dialect::OpenAi, !by_python && answers.at(MODELS, "/data").is_some_and(|data| data.is_array())),
    ];
    habits.into_iter().find_map(|(dialect, is)| is.then_some(dialect))
}

/// mlx-lm's server is built on Python's HTTP server, names no owner of its models, and answers
/// `Not Found` in plain text, where that answers in HTML.
fn is_mlx(answers: &Answers) -> bool {
    let is_listed = |model: &Value| {
        let keys = model.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
        keys.eq(["id", "object", "created"])
    };
    let models = answers.at(MODELS, "/data");
    let lists = models.as_ref().and_then(Value::as_array).is_some_and(|models| models.iter().all(is_listed));
    let refuses =
        answers.0.get(VERSION).is_some_and(|reply| reply.status == 404 && reply.body == b"Not Found");
    lists && refuses && answers.served_by("BaseHTTP/")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reply(server: Option<&str>, said: &[(&str, Value)]) -> Answers {
        let mut answers = Answers::default();
        for question in introduction() {
            let found = said.iter().find(|(path, _)| *path == question.path);
            let status = if found.is_some() { 200 } else { 404 };
            let body = found.map_or_else(|| json!({"error": "not found"}), |(_, body)| body.clone());
            let reply = Reply { status, server: server.map(Into::into), body: body.to_string().into_bytes() };
            answers.add(&question.path, reply);
        }
        answers
    }

    fn models(owner: Option<&str>) -> Value {
        json!({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": owner}]})
    }

    #[test]
    fn servers_are_identified_by_answers_that_only_they_give() {
        let of = |server: Option<&str>, said: &[(&str, Value)]| dialect_of(&reply(server, said));
        let uvicorn = Some("uvicorn");
        let listed = |owner| (MODELS, models(owner));
        assert_eq!(of(uvicorn, &[listed(Some("tensorrt_llm"))]), Some(Dialect::TrtLlm));
        let triton = (KSERVE, json!({"name": "triton", "version": "2.59.0", "extensions": ["generate"]}));
        assert_eq!(
            of(uvicorn, &[listed(Some("Triton Inference Server")), triton.clone()]),
            Some(Dialect::Triton)
        );
        assert_eq!(of(None, &[triton]), Some(Dialect::Triton));
        let tgi = json!({"model_id": "m", "max_total_tokens": 4096, "router": "text-generation-router", "version": "3.3.6"});
        assert_eq!(of(None, &[listed(Some("m")), (INFO, tgi)]), Some(Dialect::Tgi));
        let embedder = json!({"model_id": "m", "max_input_length": 512, "version": "1.8"});
        assert_eq!(of(None, &[(INFO, embedder)]), None);
        let ollama = (OLLAMA_VERSION, json!({"version": "0.12.1"}));
        assert_eq!(of(None, &[listed(Some("library")), ollama]), Some(Dialect::Ollama));
        let python = Some("BaseHTTP/0.6 Python/3.12.3");
        assert_eq!(of(python, &[listed(None)]), None, "anybody's server");
        let mlx = |data: Value| {
            let mut answers = reply(python, &[(MODELS, json!({"object": "list", "data": data}))]);
            let refused = Reply { status: 404, server: python.map(Into::into), body: b"Not Found".to_vec() };
            answers.add(VERSION, refused);
            dialect_of(&answers)
        };
        assert_eq!(mlx(json!([{"id": "m", "object": "model", "created": 1}])), Some(Dialect::Mlx));
        assert_eq!(mlx(json!([])), Some(Dialect::Mlx));
        assert_eq!(mlx(json!([{"id": "m"}])), None);
        assert_eq!(of(None, &[listed(Some("system"))]), Some(Dialect::OpenAi));
        assert_eq!(of(python, &[]), None);
        assert_eq!(of(None, &[]), None);
    }

    #[test]
    fn a_server_that_is_passthrough_by_name_is_asked_for_its_models_and_no_more() {
        let paths = |dialect| -> Vec<String> {
            introduction_to(Some(dialect)).into_iter().map(|question| question.path.into_owned()).collect()
        };
        assert_eq!(paths(Dialect::OpenAi), [MODELS]);
        assert_eq!(paths(Dialect::Mlx), [MODELS]);
        assert_eq!(paths(Dialect::Ollama), [MODELS, OLLAMA_VERSION]);
        assert_eq!(paths(Dialect::Tgi), [MODELS, INFO]);
        assert_eq!(paths(Dialect::Lmdeploy), [MODELS]);
        assert_eq!(paths(Dialect::TrtLlm), [MODELS, VERSION]);
        assert_eq!(paths(Dialect::Triton), [MODELS, KSERVE]);
        assert_eq!(introduction_to(None), introduction());
        assert_eq!(introduction_to(Some(Dialect::Vllm)), introduction());
        assert!(introduction().iter().all(|question| question.body.is_none()), "only GETs");
    }
}
