//! The formats by the names of the server's flags, and how each is parsed.

use super::deepseek::Layout;
use super::grammar::{self, Grammar};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolFormat {
    /// Hermes, Qwen 2.5 and the JSON of Qwen 3.
    Hermes,
    /// Qwen 3 Coder: functions and parameters as tags.
    Qwen3Coder,
    /// Llama 3 and 4, as JSON.
    Llama3Json,
    /// GLM 4.5, 4.6 and 4.7.
    Glm,
    /// Kimi K2.
    KimiK2,
    /// MiniMax M2.
    MinimaxM2,
    /// DeepSeek V3 and R1.
    DeepseekV3,
    /// DeepSeek V3.1.
    DeepseekV31,
    /// DeepSeek V3.2.
    DeepseekV32,
    /// DeepSeek V4.
    DeepseekV4,
    GptOss,
    /// Mistral, with the tokenizer's files of Hugging Face.
    Mistral,
}

impl ToolFormat {
    pub const ALL: [Self; 12] = [
        Self::Hermes,
        Self::Qwen3Coder,
        Self::Llama3Json,
        Self::Glm,
        Self::KimiK2,
        Self::MinimaxM2,
        Self::DeepseekV3,
        Self::DeepseekV31,
        Self::DeepseekV32,
        Self::DeepseekV4,
        Self::GptOss,
        Self::Mistral,
    ];

    /// The values of `--tool-call-parser` that mean this format; the first is the usual one.
    pub const fn names(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["hermes", "qwen3_json"],
            Self::Qwen3Coder => &["qwen3_coder", "qwen3_xml"],
            Self::Llama3Json => &["llama3_json", "llama4_json"],
            Self::Glm => &["glm45", "glm47"],
            Self::KimiK2 => &["kimi_k2"],
            Self::MinimaxM2 => &["minimax_m2"],
            Self::DeepseekV3 => &["deepseek_v3"],
            Self::DeepseekV31 => &["deepseek_v31"],
            Self::DeepseekV32 => &["deepseek_v32"],
            Self::DeepseekV4 => &["deepseek_v4"],
            Self::GptOss => &["openai"],
            Self::Mistral => &["mistral"],
        }
    }

    pub fn name(self) -> &'static str {
        self.names().first().copied().unwrap_or("")
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.names().contains(&name))
    }

    pub(super) const fn parser(self) -> Tools {
        match self {
            Self::Hermes => Tools::Hermes,
            Self::Llama3Json => Tools::Llama,
            Self::DeepseekV3 => Tools::Deepseek(Layout::V3),
            Self::DeepseekV31 => Tools::Deepseek(Layout::V31),
            Self::Qwen3Coder => Tools::Grammar(&grammar::QWEN3),
            Self::Glm => Tools::Grammar(&grammar::GLM),
            Self::KimiK2 => Tools::Grammar(&grammar::KIMI_K2),
            Self::MinimaxM2 => Tools::Grammar(&grammar::MINIMAX_M2),
            Self::DeepseekV32 => Tools::Grammar(&grammar::DEEPSEEK_V32),
            Self::DeepseekV4 => Tools::Grammar(&grammar::DEEPSEEK_V4),
            Self::GptOss => Tools::Harmony,
            Self::Mistral => Tools::Grammar(&grammar::MISTRAL),
        }
    }

    /// True if the server decodes special tokens for it.
    pub(super) const fn decodes(self, may_call: bool) -> bool {
        match self {
            Self::Hermes | Self::KimiK2 => may_call,
            Self::Llama3Json | Self::DeepseekV3 | Self::DeepseekV31 | Self::GptOss => false,
            _ => true,
        }
    }

    /// The id of a new call for which the model wrote none, from a random number: Mistral's
    /// tokenizers take no others than such of nine letters and digits.
    pub(super) fn call_id(self, random: u64) -> String {
        match self {
            Self::Mistral => letters(random),
            _ => plain_call_id(random),
        }
    }
}

/// vLLM's form (0.32, `renderers/chat_utils.py`, `make_tool_call_id`).
pub(super) fn plain_call_id(random: u64) -> String {
    format!("chatcmpl-tool-{random:016x}")
}

/// Nine letters and digits (0.32, `parser/mistral.py`, `MistralToolCall`).
fn letters(mut random: u64) -> String {
    const ALL: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    let mut letter = || {
        let at = (random % ALL.len() as u64) as usize;
        random /= ALL.len() as u64;
        ALL.get(at).map_or('a', |letter| char::from(*letter))
    };
    (0..9).map(|_| letter()).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReasoningFormat {
    /// Qwen 3.
    Qwen3,
    /// DeepSeek R1, and every model with `<think>` and `</think>` as tokens.
    DeepseekR1,
    /// DeepSeek V3 and V3.1: as R1 if the template is given `thinking`, else nothing.
    DeepseekV3,
    /// GLM 4.5, 4.6 and 4.7.
    Glm,
    /// Kimi K2.
    KimiK2,
    /// MiniMax M2.
    MinimaxM2,
    /// DeepSeek V4.
    DeepseekV4,
    GptOss,
    /// Mistral, with the tokenizer's files of Hugging Face.
    Mistral,
}

impl ReasoningFormat {
    pub const ALL: [Self; 9] = [
        Self::Qwen3,
        Self::DeepseekR1,
        Self::DeepseekV3,
        Self::Glm,
        Self::KimiK2,
        Self::MinimaxM2,
        Self::DeepseekV4,
        Self::GptOss,
        Self::Mistral,
    ];

    /// The values of `--reasoning-parser` that mean this format; the first is the usual one.
    pub const fn names(self) -> &'static [&'static str] {
        match self {
            Self::Qwen3 => &["qwen3"],
            Self::DeepseekR1 => &["deepseek_r1"],
            Self::DeepseekV3 => &["deepseek_v3"],
            Self::Glm => &["glm45", "glm47"],
            Self::KimiK2 => &["kimi_k2"],
            Self::MinimaxM2 => &["minimax_m2"],
            Self::DeepseekV4 => &["deepseek_v4"],
            Self::GptOss => &["openai_gptoss"],
            Self::Mistral => &["mistral"],
        }
    }

    pub fn name(self) -> &'static str {
        self.names().first().copied().unwrap_or("")
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.names().contains(&name))
    }

    pub(super) const fn parser(self) -> Thoughts {
        match self {
            Self::DeepseekR1 => Thoughts::Think,
            Self::DeepseekV3 => Thoughts::ThinkIfRequested,
            Self::Qwen3 => Thoughts::Grammar(&grammar::QWEN3),
            Self::Glm => Thoughts::Grammar(&grammar::GLM),
            Self::KimiK2 => Thoughts::Grammar(&grammar::KIMI_K2),
            Self::MinimaxM2 => Thoughts::Grammar(&grammar::MINIMAX_M2),
            Self::DeepseekV4 => Thoughts::Grammar(&grammar::DEEPSEEK_V4),
            Self::GptOss => Thoughts::Harmony,
            Self::Mistral => Thoughts::Grammar(&grammar::MISTRAL),
        }
    }
}

/// How a format of tool calls is parsed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tools {
    Grammar(&'static Grammar),
    Hermes,
    Llama,
    Deepseek(Layout),
    Harmony,
}

/// How a format of reasoning is parsed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Thoughts {
    Grammar(&'static Grammar),
    Think,
    ThinkIfRequested,
    Harmony,
}

impl Tools {
    pub const fn grammar(self) -> Option<&'static Grammar> {
        match self {
            Self::Grammar(grammar) => Some(grammar),
            Self::Hermes | Self::Llama | Self::Deepseek(_) | Self::Harmony => None,
        }
    }
}

impl Thoughts {
    pub const fn grammar(self) -> Option<&'static Grammar> {
        match self {
            Self::Grammar(grammar) => Some(grammar),
            Self::Think | Self::ThinkIfRequested | Self::Harmony => None,
        }
    }
}
