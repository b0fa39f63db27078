//! The source of a chat template, made safe to run before it is compiled.
//!
//! A template comes with a model, from whoever published it. Jinja's namespaces are its only values
//! that change: one that became an attribute of itself could be written and compared without end,
//! which ends the process by its stack. So a value that is assigned to an attribute is copied, as
//! plain data of limited depth and size. How deep other values may be follows from the number of
//! brackets and the depth of recursion. Steps are limited by the engine. Not limited are the time
//! and memory of a value that a template doubles repeatedly, by one short step each.

use std::ops::Range;

use indexmap::IndexMap;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// The name of [`copied`] in templates, which they may not use themselves.
pub const COPIED: &str = "foretell_copied";
/// Maximum number of opening brackets: the largest known templates have 600.
const MAX_BRACKETS: usize = 1_000;
/// The beginning of its call; the second parenthesis is for a tuple that has none.
const CALL: &str = "foretell_copied((";
/// Maximum length of a template, bytes: the largest known ones have 30,000.
const MAX_LEN: usize = 256 << 10;
/// Maximum size of a value that is assigned to an attribute, bytes of text and 16 for each value.
const MAX_SIZE: usize = 16 << 20;
/// Maximum depth of a value that is assigned to an attribute.
const MAX_DEPTH: usize = 200;

/// The source as it is compiled: attributes are assigned copies, and `generation` blocks, which
/// mark the texts of a training, are blocks without effect.
///
/// # Errors
/// It is too long, has too many brackets, is no template, uses [`COPIED`], or assigns to an
/// attribute in a way that is not understood.
pub fn prepare(source: &str, syntax: &SyntaxConfig) -> Result<String, Error> {
    if source.len() > MAX_LEN {
        return Err(refused("a template of more than 256 KiB"));
    }
    let tokens = tokenize(source, false, syntax.clone());
    let tokens = tokens
        .map(|token| token.map(|(token, span)| (token, span.start_offset as usize..span.end_offset as usize)))
        .collect::<Result<Vec<_>, _>>()?;
    if tokens.iter().filter(|(token, _)| opens(token)).count() > MAX_BRACKETS {
        return Err(refused("a template of more than 1,000 brackets"));
    }
    if tokens.iter().any(|(token, _)| matches!(token, Token::Ident(COPIED))) {
        return Err(refused("a template that uses foretell_copied"));
    }
    let mut edits = Vec::new();
    let mut rest = &tokens[..];
    while let Some(((token, _), behind)) = rest.split_first() {
        if matches!(token, Token::BlockStart) {
            let mut parts = behind.split(|(token, _)| matches!(token, Token::BlockEnd));
            statement(parts.next().unwrap_or_default(), &mut edits)?;
        }
        rest = behind;
    }
    let mut prepared = String::with_capacity(source.len());
    let mut end = 0;
    for (range, text) in edits {
        prepared.push_str(&source[end..range.start]);
        prepared.push_str(text);
        end = range.end;
    }
    prepared.push_str(&source[end..]);
    Ok(prepared)
}

type Edit = (Range<usize>, &'static str);

/// Adds the edits of a statement, in order.
fn statement(tokens: &[(Token<'_>, Range<usize>)], edits: &mut Vec<Edit>) -> Result<(), Error> {
    let Some(((Token::Ident(name), range), tokens)) = tokens.split_first() else { return Ok(()) };
    match *name {
        "generation" if tokens.is_empty() => edits.push((range.clone(), "if true")),
        "endgeneration" if tokens.is_empty() => edits.push((range.clone(), "endif")),
        "set" => {
            let ends = |(token, _): &(Token<'_>, _)| matches!(token, Token::Assign | Token::Pipe);
            let target = tokens.split(ends).next().unwrap_or_default();
            let is_attribute = target.iter().any(|(token, _)| matches!(token, Token::Dot));
            match tokens.get(target.len()) {
                _ if !is_attribute => {}
                Some((Token::Assign, assign)) => {
                    if !is_balanced(tokens.get(target.len() + 1..).unwrap_or_default()) {
                        return Err(refused(
                            "brackets that do not match, in what is assigned to an attribute",
                        ));
                    }
                    let last = tokens.last().map_or(assign.end, |(_, last)| last.end);
                    edits.push((assign.end..assign.end, CALL));
                    edits.push((last..last, "))"));
                }
                Some(_) => return Err(refused("a block that is filtered and assigned to an attribute")),
                None => {}
            }
        }
        _ => {}
    }
    Ok(())
}

fn opens(token: &Token<'_>) -> bool {
    matches!(token, Token::ParenOpen | Token::BracketOpen | Token::BraceOpen)
}

/// True if no bracket closes one that was opened before these tokens, or stays open.
fn is_balanced(tokens: &[(Token<'_>, Range<usize>)]) -> bool {
    let mut depth = 0_usize;
    tokens.iter().all(|(token, _)| {
        let closes = matches!(token, Token::ParenClose | Token::BracketClose | Token::BraceClose);
        let remaining = depth.checked_sub(closes.into());
        depth = remaining.unwrap_or(0) + usize::from(opens(token));
        remaining.is_some()
    }) && depth == 0
}

/// A value as plain data: what is assigned to an attribute of a namespace.
///
/// # Errors
/// It is nested too deep, too large, or a function.
#[allow(clippy::needless_pass_by_value)] // the signature of a template function
pub fn copied(value: Value) -> Result<Value, Error> {
    Copying { remaining: MAX_SIZE }.copy(&value, MAX_DEPTH)
}

struct Copying {
    /// Size that values may still have, bytes of text and 16 for each value.
    remaining: usize,
}

impl Copying {
    fn copy(&mut self, value: &Value, depth: usize) -> Result<Value, Error> {
        let Some(depth) = depth.checked_sub(1) else {
            return Err(refused("a value that is nested more than 200 levels deep"));
        };
        let Some(remaining) = self.remaining.checked_sub(16 + value.as_str().map_or(0, str::len)) else {
            return Err(refused("a value of more than 16 megabytes"));
        };
        self.remaining = remaining;
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| self.copy(&item, depth));
                Ok(Value::from(items.collect::<Result<Vec<Value>, Error>>()?))
            }
            ValueKind::Map => {
                let pairs = value.try_iter()?.map(|key| {
                    let entry = self.copy(&value.get_item(&key)?, depth)?;
                    Ok((self.copy(&key, depth)?, entry))
                });
                Ok(Value::from(pairs.collect::<Result<IndexMap<Value, Value>, Error>>()?))
            }
            ValueKind::Plain => Err(refused("a function that is assigned to an attribute")),
            _ => Ok(value.clone()),
        }
    }
}

fn refused(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("not supported: {what}"))
}
