//! Tokenizer and chat template from a model's folder.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::target::words::Words;
use foretell_core::session::Decode;
use foretell_core::units::TokenId;
use foretell_parsers::text::{ChatTemplate, TextError, Tokenizer};

/// Tokenizer and chat template of a model folder in Hugging Face's layout.
pub struct FolderWords {
    tokenizer: Arc<Tokenizer>,
    /// A missing template is only an error once a chat request arrives.
    template: Result<ChatTemplate, TextError>,
    file: Vec<u8>,
}

impl FolderWords {
    /// Reads `tokenizer.json`, and the chat template if there is one.
    ///
    /// # Errors
    /// The tokenizer cannot be read.
    pub fn read(folder: &Path) -> Result<Self, TextError> {
        let path = folder.join("tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::from_file(&path)?);
        let file = foretell_parsers::text::read(&path)?;
        Ok(Self { tokenizer, template: ChatTemplate::from_folder(folder), file })
    }
}

impl Words for FolderWords {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenId>, String> {
        self.tokenizer.encode(text, special).map_err(|error| error.to_string())
    }

    fn decode(&self, tokens: &[TokenId], special: bool) -> String {
        self.tokenizer.decode(tokens, !special).unwrap_or_default()
    }

    fn decoder(&self, prompt: &[TokenId], special: bool) -> Box<dyn Decode> {
        Box::new(self.tokenizer.detokenizer(prompt, !special))
    }

    fn chat(
        &self,
        messages: Vec<Value>,
        opening: bool,
        variables: &Map<String, Value>,
    ) -> Result<String, String> {
        match &self.template {
            Ok(template) => template
                .render(&Value::Array(messages), opening, variables)
                .map_err(|error| error.to_string()),
            Err(error) => Err(format!("this model has no chat template: {error}")),
        }
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        Some(&self.tokenizer)
    }

    fn longest(&self) -> usize {
        self.tokenizer.longest()
    }

    fn spelling(&self, token: TokenId) -> String {
        self.tokenizer.token(token).unwrap_or_default()
    }

    fn file(&self) -> Option<Vec<u8>> {
        Some(self.file.clone())
    }
}
