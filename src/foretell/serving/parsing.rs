//! The output parser of a request, rebuilt from what its server was started with.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::fleet::identity::Identity;
use crate::learning::answer_traits::{AnswerTraits, ParsedAlike};
use foretell_core::session::{MakeParser, Permission};
use foretell_core::words::PlainReason;
use foretell_engines::openai::{Request, Route};
use foretell_engines::parse::{self, Parsers, Vocabulary};

/// Whole answers that have to be parsed alike here and by the server before one is speculated on.
const PROVEN: u32 = 3;

/// True if the answer to this request is parsed here as by the server. Its parsers are known, and
/// no stop text may cut a part of the output; whole answers are parsed by other code of the server.
pub(super) fn applies(identity: &Identity, request: &Request) -> bool {
    let parsers = identity.engine.parsers;
    let streamed = request.route == Route::Chat && request.stream && request.stop.is_empty();
    // Reasoning so far is not counted in the events written here.
    let counted = request.continuous_usage && parsers.reasoning.is_some();
    parsers.apply(may_call(request)) && streamed && !counted
}

/// Tools are offered, and one may be called.
fn may_call(request: &Request) -> bool {
    request.tools && !request.bars_tools
}

/// The permission to which the parsers of this server narrow that of every policy for this chat;
/// `None` if they do not.
pub(super) fn permission(
    identity: &Identity,
    request: &Request,
    traits: &AnswerTraits,
) -> Option<Permission> {
    let parsers = identity.engine.parsers;
    let plain = Some(Permission::Plain(PlainReason::Parser));
    match () {
        () if parsers == Parsers::default() => plain.filter(|_| traits.parses()),
        () if !parsers.apply(may_call(request)) => None,
        () if !applies(identity, request) || traits.misparsed() => plain,
        () if is_proven(traits.parsed_alike(), request, parsers) => None,
        () => Some(Permission::Shadow(PlainReason::Parser)),
    }
}

/// True if enough whole answers were parsed alike: one with a call among them where the request may
/// call, and one with reasoning where the server parses that.
fn is_proven(alike: ParsedAlike, request: &Request, parsers: Parsers) -> bool {
    let calls = alike.calls > 0 || !may_call(request);
    let reasoning = alike.reasoning > 0 || parsers.reasoning.is_none();
    alike.answers >= PROVEN && calls && reasoning
}

/// True if the server decodes special tokens of this answer as text, for its parsers.
pub(super) fn decodes_special(identity: &Identity, request: &Request) -> bool {
    let asked = parse::Request { may_call: may_call(request), ..parse::Request::default() };
    identity.engine.parsers.decode_special(&asked)
}

/// Makes the parser of the answer to this request, once its prompt is known.
pub(super) fn maker(identity: &Identity, request: &Request) -> MakeParser {
    let (asked, parsers) = (Asked::of(request), identity.engine.parsers);
    let tokenizer = Arc::clone(&identity.tokenizer);
    Box::new(move |prompt| {
        let special: Vec<_> =
            tokenizer.added().iter().filter(|&&id| tokenizer.is_special(id)).copied().collect();
        let named: Vec<_> = special.iter().filter_map(|&id| Some((id, tokenizer.token(id)?))).collect();
        let special: Vec<_> = named.iter().map(|(id, text)| (*id, text.as_str())).collect();
        let id = |text: &str| tokenizer.id(text);
        let vocabulary = Vocabulary { id: &id, special: &special };
        parsers.stream(&asked.as_request(prompt), &vocabulary).ok()
    })
}

/// The variables of the chat template. An effort of reasoning switches it on or off where the
/// client does not (vLLM 0.32).
fn template(request: &Request) -> Option<Map<String, Value>> {
    let mut template = request.body.get("chat_template_kwargs").and_then(Value::as_object).cloned();
    if let Some(effort @ Value::String(text)) = request.body.get("reasoning_effort") {
        let variables = template.get_or_insert_default();
        variables.insert("reasoning_effort".to_owned(), effort.clone());
        variables.entry("enable_thinking").or_insert(Value::Bool(text != "none"));
    }
    template
}

/// The members of a request that its parsers depend on.
struct Asked {
    tools: Vec<Value>,
    may_call: bool,
    template: Option<Map<String, Value>>,
}

impl Asked {
    fn of(request: &Request) -> Self {
        let member = |name: &str| request.body.get(name).cloned();
        Self {
            tools: member("tools").and_then(|tools| tools.as_array().cloned()).unwrap_or_default(),
            may_call: may_call(request),
            template: template(request),
        }
    }

    fn as_request<'a>(&'a self, prompt: &'a [u32]) -> parse::Request<'a> {
        parse::Request {
            tools: &self.tools,
            may_call: self.may_call,
            template: self.template.as_ref(),
            prompt,
        }
    }
}
