//! The bundled models' own tokenizers and chat template.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use foretell_core::session::Decode;
use foretell_parsers::text::{ChatTemplate, Tokenizer};
use serde_json::json;

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../onnx/models").join(model)
}

fn tokenizer(model: &str) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_file(&folder(model).join("tokenizer.json")).unwrap())
}

#[test]
fn every_text_survives_the_way_to_tokens_and_back() {
    let source = include_str!("text_models.rs").to_owned() + "naïve 東京 👩‍👩‍👧 \u{1F980}\r\n\t ";
    for model in ["target", "draft-same", "draft-other"] {
        let tokenizer = tokenizer(model);
        let ids = tokenizer.encode(&source, false).unwrap();
        let mut detokenizer = tokenizer.detokenizer(&[], true);
        let pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
        assert_eq!(pieces.concat() + &detokenizer.flush(), source, "{model}");
        assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{model}");
    }
}

#[test]
fn one_drafter_shares_the_vocabulary_and_the_other_does_not() {
    let target = tokenizer("target").fingerprint();
    assert_eq!(target, tokenizer("draft-same").fingerprint());
    assert_ne!(target, tokenizer("draft-other").fingerprint());
}

#[test]
fn the_chat_template_ends_where_the_assistant_begins() {
    let template = ChatTemplate::from_folder(&folder("target")).unwrap();
    let messages = json!([{"role": "system", "content": "S"}, {"role": "user", "content": "Question?"}]);
    let text = template.render(&messages, true, &serde_json::Map::new()).unwrap();
    let before = template.render(&messages, false, &serde_json::Map::new()).unwrap();
    assert!(text.contains("Question?") && text.starts_with(&before) && text.len() > before.len(), "{text}");
    // Special tokens of the template are single tokens, not spelt out.
    let tokenizer = tokenizer("target");
    let ids = tokenizer.encode(&text, false).unwrap();
    assert!(ids.iter().any(|&id| tokenizer.is_special(id)), "{text}");
}
