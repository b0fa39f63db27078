//! Grammars that bind an output: at every place a mask of the whole vocabulary, as xgrammar or
//! llguidance fills it for the engine.

use xgrammar::{CompileError, CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType};

use crate::TokenId;

use super::guidance::{self, Guidance};
use super::toy::{Row, Toy};

/// A grammar as the engine hands it to its library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spec {
    /// JSON of this schema.
    Json(String),
    Regex(String),
    Choice(Vec<String>),
    /// Rules in the notation of Backus and Naur.
    Rules(String),
    Lark(String),
    /// A structural tag.
    Tag(String),
}

/// How JSON is laid out, and which members an object may have besides those of its schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Whitespace between the parts of JSON is the model's choice.
    pub any_whitespace: bool,
    /// Objects have only the members of their schema, unless it says otherwise.
    pub strict: bool,
}

/// Compiles grammars over the vocabulary of a model.
pub enum Compiler {
    Xgrammar(Xgrammar),
    Guidance(Guidance),
}

impl Compiler {
    /// The mask of an output; `stops`: tokens that may end it, where the grammar allows an end.
    pub fn mask(&self, spec: &Spec, stops: &[TokenId]) -> Result<Mask, String> {
        match self {
            Self::Xgrammar(compiler) => compiler.mask(spec, stops).map_err(|error| error.to_string()),
            Self::Guidance(compiler) => compiler.mask(spec, stops).map(Box::new).map(Mask::Guidance),
        }
    }
}

/// The compiler of xgrammar.
pub struct Xgrammar {
    compiler: GrammarCompiler,
    layout: Layout,
}

impl Xgrammar {
    /// `spells_special`: a special token that does not end a text is its own text in a grammar; it
    /// is no text at all otherwise.
    pub fn new(toy: &Toy, spells_special: bool, layout: Layout) -> Self {
        let size = toy.vocabulary() as TokenId;
        let spelled = |id: TokenId| {
            let token = toy.words.token(id).unwrap_or_default();
            if spells_special || !toy.words.is_special(id) { token } else { String::new() }
        };
        let vocabulary: Vec<String> = (0..size).map(spelled).collect();
        let stop = Some(vec![toy.eos() as i32]);
        let info = TokenizerInfo::new(&vocabulary, VocabType::ByteLevel, Some(size as i32), stop, false);
        let compiler = GrammarCompiler::new(info.expect("a vocabulary"), 1, true, -1);
        Self { compiler, layout }
    }

    fn mask(&self, spec: &Spec, stops: &[TokenId]) -> Result<Mask, CompileError> {
        let compiled = self.compile(spec)?;
        let size = compiled.tokenizer_info().vocab_size();
        let stops = stops.iter().map(|&id| id as i32).collect();
        let matcher = GrammarMatcher::with_options(&compiled, Some(stops), false, None);
        let bits = xgrammar::allocate_token_bitmask(1, size);
        Ok(Mask::Xgrammar(Box::new(matcher.expect("stop tokens of the vocabulary")), bits))
    }

    fn compile(&self, spec: &Spec) -> Result<CompiledGrammar, CompileError> {
        let Layout { any_whitespace, strict } = self.layout;
        let separators = (!any_whitespace).then_some((",", ":"));
        match spec {
            Spec::Json(schema) => {
                self.compiler.compile_json_schema(schema, any_whitespace, None, separators, strict, None)
            }
            Spec::Regex(regex) => self.compiler.compile_regex(regex),
            Spec::Choice(texts) => self.compiler.compile_grammar_ebnf(&rules(texts), "root"),
            Spec::Rules(rules) => self.compiler.compile_grammar_ebnf(rules, "root"),
            Spec::Lark(grammar) => self.compiler.compile_lark(grammar, &[]),
            Spec::Tag(tag) => self.compiler.compile_structural_tag(tag),
        }
    }
}

/// The place of an output in its grammar.
#[derive(Clone, Debug)]
pub enum Mask {
    Xgrammar(Box<GrammarMatcher>, Vec<i32>),
    Guidance(Box<guidance::Mask>),
}

impl Mask {
    /// Bars the tokens that may not follow. Behind a token that could have ended the text, all may.
    pub fn apply(&mut self, row: &mut Row) {
        let (matcher, bits) = match self {
            Self::Xgrammar(matcher, bits) => (matcher, bits),
            Self::Guidance(mask) => return mask.apply(row),
        };
        if matcher.is_terminated() {
            return;
        }
        let shape = [bits.len() as i64];
        matcher.fill_next_token_bitmask(bits, &shape, 0).expect("a mask of the vocabulary");
        for (token, logit) in row.0.iter_mut().enumerate() {
            if bits[token / 32] >> (token % 32) & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Goes on by a sampled token; false if the grammar bars it. The masks of this crate (0.2.8)
    /// have too many tokens at some places (at the beginning of `[a-z]{2,9}`), which those of the
    /// library itself do not.
    pub fn accept(&mut self, token: TokenId) -> bool {
        match self {
            Self::Xgrammar(matcher, _) => matcher.is_terminated() || matcher.accept_token(token as i32),
            Self::Guidance(mask) => mask.accept(token),
        }
    }
}

/// The rules of a choice (`choice_as_grammar`).
fn rules(texts: &[String]) -> String {
    let escape = |char: char| match char {
        '\\' => r"\\".to_owned(),
        '"' => "\\\"".to_owned(),
        '\n' => r"\n".to_owned(),
        '\r' => r"\r".to_owned(),
        '\t' => r"\t".to_owned(),
        '\0'..='\x1F' | '\x7F' => format!("\\u{:04x}", u32::from(char)),
        other => other.to_string(),
    };
    let quoted = |text: &String| format!("\"{}\"", text.chars().map(escape).collect::<String>());
    format!("root ::= {}", texts.iter().map(quoted).collect::<Vec<_>>().join(" | "))
}
