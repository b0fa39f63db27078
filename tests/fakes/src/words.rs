//! Text of the toy model: the bundled tokenizer and chat template, read by the original libraries.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value as Jinja, context};
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::TokenId;

const CHAT: &str = "chat";

pub struct Words {
    tokenizer: Tokenizer,
    templates: Environment<'static>,
    /// The chat template of the model's folder.
    pub template: String,
}

impl Words {
    /// From a folder with `tokenizer.json` and `chat_template.jinja`.
    pub fn of(folder: &Path) -> Self {
        let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
        let template = std::fs::read_to_string(folder.join("chat_template.jinja")).unwrap();
        let mut templates = Environment::new();
        templates.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap());
        templates.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        templates.add_template_owned(CHAT, template.clone()).unwrap();
        Self { tokenizer, templates, template }
    }

    /// Tokens of the vocabulary, added ones included.
    pub fn size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// A token's spelling in the vocabulary.
    pub fn token(&self, id: TokenId) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// A token's bytes: characters of the byte-level alphabet stand for one each, printable ones of
    /// Latin-1 for themselves, those from U+0100 on for the others in order.
    pub fn bytes(&self, id: TokenId) -> Vec<u8> {
        let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let others: Vec<u8> = (0..=u8::MAX).filter(|byte| !printable(byte)).collect();
        let byte = |character: char| match u32::from(character) {
            code @ 0x100.. => others.get(code as usize - 0x100).copied(),
            code => u8::try_from(code).ok(),
        };
        let spelled = self.token(id).unwrap_or_default();
        if self.is_special(id) { spelled.into_bytes() } else { spelled.chars().filter_map(byte).collect() }
    }

    pub fn id(&self, token: &str) -> Option<TokenId> {
        self.tokenizer.token_to_id(token)
    }

    pub fn is_special(&self, id: TokenId) -> bool {
        self.token(id).is_some_and(|token| self.tokenizer.get_added_vocabulary().is_special_token(&token))
    }

    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        self.tokenizer.encode_fast(text, true).unwrap().get_ids().to_vec()
    }

    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        self.tokenizer.decode(tokens, skip_special).unwrap()
    }

    /// The text of a prompt, or an error. Text parts of a message are on separate lines.
    pub fn chat(&self, messages: &Value, opening: bool) -> Result<String, String> {
        let mut messages = messages.clone();
        for message in messages.as_array_mut().into_iter().flatten() {
            let parts = message["content"].as_array().into_iter().flatten();
            let texts: Option<Vec<&str>> = parts.map(|part| part["text"].as_str()).collect();
            if let (Some(texts), true) = (texts, message["content"].is_array()) {
                message["content"] = texts.join("\n").into();
            }
        }
        let values = context! { messages => Jinja::from(Serde(&messages)), add_generation_prompt => opening };
        let rendered = self.templates.get_template(CHAT).unwrap().render(values);
        rendered.map_err(|error| format!("chat template: {error}"))
    }
}
