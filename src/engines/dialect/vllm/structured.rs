//! What makes vLLM's grammars, and whether an output under one is followed here as it does there.
//!
//! With `--structured-outputs-config` left alone vLLM takes the library that the first request with
//! a grammar needs, for the life of its process, and no page tells which (0.32,
//! `v1/structured_output/__init__.py`: `grammar_init`). Two to four requests of two tokens show it:
//! xgrammar alone takes a special token for its text inside a string, llguidance alone reads
//! `x-guidance` in a schema, whitespace is free unless the operator has fixed it
//! (`disable_any_whitespace`), and so are further members of an object.

use serde_json::{Map, Value, json};

use crate::dialect::shared::bytes;
use crate::dialect::{Call, Context, Engine, Round, Unreadable, masked};
use crate::masks::{Library, Mask, Shown, Whitespace};
use crate::openai::{Route, STRUCTURED_OUTPUTS};
use crate::parse;
use crate::text::Tokenizer;
use foretell_core::draft::{Features, Source, Tree};
use foretell_core::units::TokenId;
use foretell_core::words::VerifyMethod;

/// Maximum number of special tokens offered.
const OFFERED: usize = 8;
/// Outweighs every difference of likely logits.
const CERTAIN: u32 = 100;

/// A call and the tokens of which its answer has to have one at its second place.
pub(super) type Question = (Call, Vec<TokenId>);

/// The calls that show the library, in the order of [`library`]; `None` where the vocabulary has no
/// tokens that could show it.
pub(super) fn library_calls(engine: &Engine, tokenizer: &Tokenizer) -> Option<Vec<Question>> {
    let spelled = |text: &str| {
        (0..tokenizer.end()).find(|&id| tokenizer.spelling(id).as_deref() == Some(text.as_bytes()))
    };
    let [quote, letter, open, line] = [spelled("\"")?, spelled("a")?, spelled("[")?, spelled("\n")?];
    let [brace, end] = [spelled("{")?, spelled("}")?];
    let special: Vec<TokenId> = engine.may_end.iter().copied().take(OFFERED).collect();
    let string = json!({"type": "string"});
    let list = json!({"type": "array", "items": string, "minItems": 1});
    let of_letters =
        json!({"type": "array", "items": string, "minItems": 1, "x-guidance": {"whitespace_pattern": "a"}});
    let object = json!({"type": "object", "properties": {}});
    // A prompt that has ended its reasoning, so that the grammar binds from the first token on.
    let ends = parse::with_vocabulary(tokenizer, |vocabulary| {
        engine.parsers.reasoning_ends(&parse::Request::default(), vocabulary).ok().flatten()
    });
    let prompt: Vec<TokenId> = ends.map(|ends| ends.marker).into_iter().chain([quote]).collect();
    let question = |schema: &Value, wanted: Vec<TokenId>, others: &[TokenId]| {
        let allowed = [&wanted, others].concat();
        let biases = wanted.iter().map(|token| (token.to_string(), json!(CERTAIN)));
        let body = json!({
            "model": engine.model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": true,
            STRUCTURED_OUTPUTS: {"json": schema},
            "allowed_token_ids": allowed,
            "logit_bias": biases.collect::<Map<_, _>>(),
        });
        (Call { path: Route::Completions.path(), body: bytes(&body) }, wanted)
    };
    let shown = !special.is_empty();
    shown.then(|| {
        vec![
            question(&string, special, &[quote, letter]),
            question(&list, vec![line], &[open, quote]),
            question(&of_letters, vec![letter], &[open, quote]),
            question(&object, vec![quote], &[brace, end]),
        ]
    })
}

/// The library, by the answers so far: does it take a special token for text, free whitespace,
/// letters for whitespace where a schema tells llguidance so, and further members of an object?
pub(super) fn library(shown: &[bool]) -> Shown {
    match *shown {
        [true, free] => Shown::Library(Library::Xgrammar(whitespace(free))),
        [false, free, true, true] => Shown::Library(Library::Guidance(whitespace(free))),
        [] | [_] | [false, _] | [false, _, true] => Shown::Open,
        _ => Shown::Other,
    }
}

fn whitespace(free: bool) -> Whitespace {
    if free { Whitespace::Free } else { Whitespace::Fixed }
}

/// True if the answer to a question has one of the wanted tokens; `None` if it is not readable.
pub(super) fn shows(wanted: &[TokenId], body: &[u8]) -> Option<bool> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    let second = answer.pointer("/choices/0/token_ids/1")?.as_u64()?;
    Some(wanted.iter().any(|&wanted| u64::from(wanted) == second))
}

/// The call that scores the end of an output, as one draft. It reads no cache: the output that the
/// server has just written is in it.
pub(super) fn score_end(context: &Context<'_>, scored: &[TokenId]) -> Call {
    let draft = Tree::chain(scored, Source::Model, Features::default());
    let sampling = crate::openai::Sampling { temperature: 0.0, ..Default::default() };
    let round = Round {
        context: *context,
        draft: &draft,
        sampling: &sampling,
        method: VerifyMethod::Score,
        weighs: false,
    };
    super::score_call(&round, scored.len(), super::MAX_LOGPROBS, false)
}

/// True if every token of the scored end of an output is the likeliest that its mask allows,
/// wherever the scores decide that.
///
/// # Errors
/// It is no answer with a score for each token.
pub(super) fn agrees(
    context: &Context<'_>,
    scored: &[TokenId],
    mask: &Mask,
    body: &[u8],
) -> Result<bool, Unreadable> {
    let told = super::prompt_rows(body)?;
    let tail = told.len().checked_sub(scored.len()).and_then(|from| told.get(from..));
    let tail = tail.ok_or(Unreadable("not a score for each token"))?;
    Ok(masked::agrees(context, scored, mask, super::MAX_LOGPROBS, tail))
}
