//! The output parser of a request, rebuilt from the parsers that its server was started with.

mod buffered;

use std::sync::Arc;

use serde_json::{Map, Value};

pub use self::buffered::{BufferedParser, Parts};
use crate::learning::answer_traits::{AnswerTraits, ParsedAlike};
use foretell_core::session::{MakeParser, Permission};
use foretell_core::words::PlainReason;
use foretell_engines::BrokenEnd;
use foretell_net::fleet::identity::Identity;
use foretell_parsers::parse::{self, Parsers};
use foretell_parsers::text::DecodeStep;
use foretell_wire::openai::{Request, Route};

/// Complete answers that have to be parsed alike here and by the server before the parser here is
/// relied on.
const PROVEN: u32 = 3;

/// True if the answer to this request is parsed here as by the server. Its parsers are known, and
/// no stop text may cut a part of the output.
pub(super) fn applies(identity: &Identity, request: &Request) -> bool {
    let parsers = identity.engine.parsing.parsers;
    // The server is the judge of answers that are not streamed.
    let judged = request.stream || identity.engine.pages.derenders;
    let cut = !request.stop.is_empty() || request.include_stop;
    // Reasoning so far is not counted in the events written here.
    let read = request.continuous_usage && request.reads_reasoning_usage;
    let counted = read && parsers.reasoning.is_some();
    request.route == Route::Chat && parsers.apply(may_call(request)) && judged && !cut && !counted
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
    let parsers = identity.engine.parsing.parsers;
    let plain = Some(Permission::Plain(PlainReason::Parser));
    if parsers == Parsers::default() {
        return if traits.parses() { plain } else { None };
    }
    if !parsers.apply(may_call(request)) {
        return None;
    }
    if !applies(identity, request) || traits.misparsed() {
        return plain;
    }
    let proof = Proof { alike: traits.parsed_alike(), parsers };
    if !request.stream || proof.is_enough_for(request) {
        return None;
    }
    Some(Permission::Shadow(PlainReason::Parser))
}

/// The state of the proof that concerns this chat, in words for the operator; `None` if there is
/// none to be given.
pub(super) fn note(identity: &Identity, request: &Request, traits: &AnswerTraits) -> Option<String> {
    let parsers = identity.engine.parsing.parsers;
    if !applies(identity, request) {
        return None;
    }
    if traits.misparsed() {
        return Some(format!(
            "The server parses otherwise ({parsers}): its chats stay plain until it restarts."
        ));
    }
    let alike = traits.parsed_alike();
    let proven = (Proof { alike, parsers }).is_enough_for(request);
    (request.stream && !proven).then(|| {
        format!(
            "The output parser ({parsers}) proves itself on complete streams: {} of {PROVEN} were parsed as by the \
             server, {} with a call, {} with reasoning.",
            alike.answers, alike.calls, alike.reasoning
        )
    })
}

/// Evidence from a server's answers about its parsers.
struct Proof {
    alike: ParsedAlike,
    parsers: Parsers,
}

impl Proof {
    /// True if enough complete answers were parsed alike: one with a call among them where the
    /// request may call, and one with reasoning where the server parses that.
    fn is_enough_for(&self, request: &Request) -> bool {
        let calls = self.alike.calls > 0 || !may_call(request);
        let reasoning = self.alike.reasoning > 0 || self.parsers.reasoning.is_none();
        self.alike.answers >= PROVEN && calls && reasoning
    }
}

/// True if the server decodes special tokens of this answer as text, for its parsers.
pub(super) fn decodes_special(identity: &Identity, request: &Request) -> bool {
    let request = parse::Request { may_call: may_call(request), ..parse::Request::default() };
    identity.engine.parsing.parsers.decode_special(&request)
}

/// The steps by which a server decodes an answer; `parsed`: for its parsers.
pub(super) fn step(identity: &Identity, parsed: bool) -> DecodeStep {
    match identity.engine.quirks().answers.broken_end {
        _ if parsed && identity.engine.parsing.parsers.read_tokens() => DecodeStep::Character,
        BrokenEnd::Omitted => DecodeStep::Broken,
        BrokenEnd::Sent | BrokenEnd::OmittedInStreams => DecodeStep::Token,
    }
}

/// Makes the parser of the answer to this request, once its prompt is known.
pub(super) fn maker(identity: &Identity, request: &Request) -> MakeParser {
    let (input, parsers) = (ParserInput::of(request), identity.engine.parsing.parsers);
    let tokenizer = Arc::clone(&identity.tokenizer);
    Box::new(move |prompt| {
        parse::with_vocabulary(&tokenizer, |vocabulary| {
            parsers.stream(&input.as_request(prompt), vocabulary).ok()
        })
    })
}

/// The variables of the chat template. An effort of reasoning switches it on or off where the
/// client does not (vLLM 0.32).
pub(super) fn template(request: &Request) -> Option<Map<String, Value>> {
    let mut template = request.body.get("chat_template_kwargs").and_then(Value::as_object).cloned();
    if let Some(effort @ Value::String(text)) = request.body.get("reasoning_effort") {
        let variables = template.get_or_insert_default();
        variables.insert("reasoning_effort".to_owned(), effort.clone());
        variables.entry("enable_thinking").or_insert(Value::Bool(text != "none"));
    }
    template
}

/// The members of a request that its parsers depend on.
struct ParserInput {
    tools: Vec<Value>,
    may_call: bool,
    single_call: bool,
    template: Option<Map<String, Value>>,
}

impl ParserInput {
    fn of(request: &Request) -> Self {
        let member = |name: &str| request.body.get(name).cloned();
        Self {
            tools: member("tools").and_then(|tools| tools.as_array().cloned()).unwrap_or_default(),
            may_call: may_call(request),
            single_call: request.single_call,
            template: template(request),
        }
    }

    fn as_request<'a>(&'a self, prompt: &'a [u32]) -> parse::Request<'a> {
        parse::Request {
            tools: &self.tools,
            may_call: self.may_call,
            single_call: self.single_call,
            template: self.template.as_ref(),
            prompt,
        }
    }
}
