//! A `tokenizer.json` and a chat template, which come with a model from an untrusted source.
//!
//! Input: a text, up to the separator; then a `tokenizer.json` or, if it does not begin with a
//! brace, a chat template. For any content, loading and using them must end, and take memory in
//! proportion to the files; but for a text that a macro doubles at each level of its recursion.

use std::panic;
use std::sync::{Arc, Once};

use foretell_core::session::Decode;
use foretell_parsers::text::template::ChatTemplate;
use foretell_parsers::text::tokenizer::Tokenizer;
use serde_json::json;

use crate::bytes::Bytes;

/// Maximum size of an input, bytes.
const MAX_LEN: usize = 256 << 10;
/// Maximum size of the text that is encoded, bytes.
const TEXT: usize = 512;

/// Runs one input.
pub fn run(input: &[u8]) {
    if input.len() > MAX_LEN {
        return;
    }
    quiet();
    let parts = Bytes(input).bodies();
    let Some((text, rest)) = parts.split_first() else { return };
    let text: String = String::from_utf8_lossy(text).chars().take(TEXT).collect();
    for file in rest {
        if file.trim_ascii_start().starts_with(b"{\"") || file.trim_ascii_start().starts_with(b"{\n") {
            tokenizer(file, &text);
        } else {
            template(&String::from_utf8_lossy(file), &text);
        }
    }
}

/// Replaces the panic hook: a caught panic of the library is not a finding, but fuzzing engines end
/// the process at any panic.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panicked| {
            let inside = panicked.location().is_some_and(|position| position.file().contains("/tokenizers-"));
            if !inside {
                before(panicked);
            }
        }));
    });
}

fn tokenizer(file: &[u8], text: &str) {
    let Ok(tokenizer) = Tokenizer::from_bytes(file).map(Arc::new) else { return };
    let _ = tokenizer.fingerprint();
    for &id in tokenizer.added().iter().take(64) {
        assert!(id < tokenizer.end(), "{id} is beyond the end {}", tokenizer.end());
    }
    for id in (0..64).chain([tokenizer.end().saturating_sub(1), tokenizer.end(), u32::MAX]) {
        let _ = (tokenizer.spelling(id), tokenizer.token(id), tokenizer.is_special(id));
    }
    let Ok(ids) = tokenizer.encode(text, false) else { return };
    assert!(ids.iter().all(|&id| id < tokenizer.end()), "an id that is no token");
    let _ = tokenizer.encode(text, true);
    if let Ok(pieces) = tokenizer.pieces(text) {
        assert!(pieces.is_sorted_by_key(|piece| piece.end), "{pieces:?}");
    }
    for skip in [false, true] {
        let mut detokenizer = tokenizer.detokenizer(&[], skip);
        let mut said: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        said.push_str(&detokenizer.flush());
        let whole = tokenizer.decode(&ids, skip);
        if tokenizer.is_byte_level() && whole.is_ok() {
            assert_eq!(Ok(said), whole.map_err(|_| ()), "piece by piece as at once");
        }
    }
}

fn template(source: &str, text: &str) {
    if source.contains("macro") && source.contains(['~', '+']) {
        return;
    }
    let Ok(template) = ChatTemplate::new(source, "<s>".into(), "</s>".into()) else { return };
    let messages = json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text},
    ]);
    if let Ok(rendered) = template.render(&messages, true, &serde_json::Map::new()) {
        assert_eq!(template.render(&messages, true, &serde_json::Map::new()).ok(), Some(rendered));
    }
}
