//! The output parser of a request, rebuilt from what its server was started with.

use std::sync::Arc;

use serde_json::Value;

use crate::fleet::identity::Identity;
use crate::learning::answer_traits::AnswerTraits;
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
    streamed && parsers != Parsers::default()
}

/// The permission to which the state of this server's parsers narrows that of every policy: none of
/// its answers is parsed here after one that was parsed differently, and none is speculated on
/// before [`PROVEN`] whole ones were parsed alike, one with a call among them where the request may
/// call, and one with reasoning where the server parses that. `None` if it does not.
pub(super) fn permission(
    identity: &Identity,
    request: &Request,
    traits: &AnswerTraits,
) -> Option<Permission> {
    if traits.misparsed() {
        return Some(Permission::Plain(PlainReason::Parser));
    }
    let alike = traits.parsed_alike();
    let may_call = request.tools && !request.bars_tools;
    let proven = alike.answers >= PROVEN
        && (alike.calls > 0 || !may_call)
        && (alike.reasoning > 0 || identity.engine.parsers.reasoning.is_none());
    (!proven).then_some(Permission::Shadow(PlainReason::Parser))
}

/// True if the server decodes special tokens of this answer as text, for its parsers.
pub(super) fn decodes_special(identity: &Identity, request: &Request) -> bool {
    identity.engine.parsers.decode_special(&Asked::of(request).as_request(&[]))
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

/// The members of a request that its parsers depend on.
struct Asked {
    tools: Vec<Value>,
    may_call: bool,
    template: Option<serde_json::Map<String, Value>>,
}

impl Asked {
    fn of(request: &Request) -> Self {
        let member = |name: &str| request.body.get(name).cloned();
        Self {
            tools: member("tools").and_then(|tools| tools.as_array().cloned()).unwrap_or_default(),
            may_call: request.tools && !request.bars_tools,
            template: member("chat_template_kwargs").and_then(|template| template.as_object().cloned()),
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
