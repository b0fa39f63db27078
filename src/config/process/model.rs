//! A model of a backend.

use std::path::PathBuf;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};

use crate::forms::{FilePath, Tokenizer};
use crate::values::{Glob, TokenizerSource};
use foretell_parsers::parse::{Parsers, ReasoningFormat, ToolFormat};
use foretell_policy::form::{As, Maybe};

/// A model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
pub struct Model {
    /// Its id, or a pattern with * and ?.
    #[schemars(extend("allowed" = "a model id or a pattern"))]
    pub id: Glob,
    /// Further names of it.
    // A request is forwarded with the name that the client used.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Id of the model before it that it is an adapter of, for the reader: all models of a backend
    /// share tokenizer, parsers and sampling defaults.
    #[serde(default)]
    pub base: Option<String>,
    /// backend: fetched from the server; else a tokenizer.json, or a folder with one.
    #[serde(default, with = "As::<Tokenizer>")]
    pub tokenizer: TokenizerSource,
    /// Output parsers that its server was started with; auto: those that it tells.
    #[serde(default, deserialize_with = "parsers")]
    #[schemars(with = "ParserNames")]
    pub parsers: Parsers,
    /// vLLM and SGLang: its generation_config.json, or a folder with one, from which the server
    /// takes sampling defaults; without it the one beside the tokenizer is read.
    #[serde(default, with = "Maybe::<FilePath>")]
    pub generation_config: Option<PathBuf>,
}

/// How a file names the parsers of a server.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum ParserNames {
    /// Those that the server tells.
    Auto(Auto),
    /// As its flags name them.
    Named {
        /// Its --tool-call-parser.
        #[serde(default)]
        #[schemars(schema_with = "tool_parsers")]
        tools: Option<String>,
        /// Its --reasoning-parser.
        #[serde(default)]
        #[schemars(schema_with = "reasoning_parsers")]
        reasoning: Option<String>,
    },
}

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Auto {
    Auto,
}

fn tool_parsers(_: &mut SchemaGenerator) -> Schema {
    parser(ToolFormat::ALL.iter().flat_map(|format| format.names()))
}

fn reasoning_parsers(_: &mut SchemaGenerator) -> Schema {
    parser(ReasoningFormat::ALL.iter().flat_map(|format| format.names()))
}

fn parser(names: impl Iterator<Item = &'static &'static str>) -> Schema {
    json_schema!({ "anyOf": [{ "enum": names.collect::<Vec<_>>() }, { "type": "null" }] })
}

fn parsers<'de, D: Deserializer<'de>>(from: D) -> Result<Parsers, D::Error> {
    Ok(match ParserNames::deserialize(from)? {
        ParserNames::Auto(Auto::Auto) => Parsers::default(),
        ParserNames::Named { tools, reasoning } => Parsers {
            tools: tools.and_then(|name| ToolFormat::from_name(&name)),
            reasoning: reasoning.and_then(|name| ReasoningFormat::from_name(&name)),
        },
    })
}
