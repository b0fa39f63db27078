//! Grammars of the families whose server-side parser is driven by a table: markers, states, steps.
//!
//! One [`Machine`](super::machine::Machine) runs them all. A grammar says which texts are markers,
//! which of them count only as a single token (text that merely spells one stays text), and what a
//! marker does in a state. A marker without a step in the present state is text; where text is
//! dropped, or is all argument, a step that only stays there would say nothing, so there is none.

use super::arguments::Arguments;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrammarState {
    /// Text for the user.
    Content,
    /// Text for nobody.
    Reasoning,
    /// After the marker of a call, before its name: text is dropped.
    Preamble,
    Name,
    Arguments,
    /// After a call, before the next: text is dropped.
    Between,
}

impl GrammarState {
    pub const fn is_call(self) -> bool {
        !matches!(self, Self::Content | Self::Reasoning)
    }
}

/// A marker; its text is the grammar's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    ThinkStart,
    ThinkEnd,
    /// Around all calls.
    SectionStart,
    SectionEnd,
    CallStart,
    CallEnd,
    /// Before a name, and after it.
    NameStart,
    NameEnd,
    /// End of one call's arguments.
    FunctionEnd,
    /// Marks inside arguments.
    KeyStart,
    KeyEnd,
    ValueStart,
    ValueEnd,
    /// A special token of the vocabulary that the grammar does not know.
    Drop,
}

/// News of a step, besides the new state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Emit {
    ReasoningEnd,
    CallStart,
    /// The marker's text belongs to the arguments.
    Argument,
    CallEnd,
}

pub(super) type Transition = (GrammarState, Mark, GrammarState, &'static [Emit]);

/// A family's format.
#[derive(Clone, Debug)]
pub(super) struct Grammar {
    /// Texts of the markers; one marker may have several, the first is the usual one.
    pub spellings: &'static [(Mark, &'static str)],
    /// Markers that are looked for as a token, if the vocabulary has it.
    pub by_token: &'static [Mark],
    pub steps: &'static [Transition],
    /// Texts of tokens that begin or end a turn in the prompt.
    pub boundaries: &'static [&'static str],
    pub arguments: Arguments,
    /// Arguments are converted only with a piece that has this character.
    pub converts_at: Option<char>,
    pub thinks: Thinks,
    /// Without reasoning the grammar forgets the markers of it.
    pub forgets_reasoning: bool,
    /// Spaces at the end of reasoning are dropped.
    pub strips_reasoning: bool,
    /// Spaces around content are dropped if there are calls (unstreamed answers only).
    pub strips_content: bool,
    /// A call of a function that the request does not have is dropped.
    pub checks_names: bool,
    /// How the text of a name is read.
    pub names: Names,
    /// Tokens of the output that the tool parser is given with the marker that ends reasoning.
    pub rest: Rest,
}

/// When the model reasons before it answers, by the variables of its chat template. The output then
/// begins in reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thinks {
    Never,
    Always,
    /// Unless `enable_thinking` is false.
    UnlessDisabled,
    /// If neither `thinking` nor `enable_thinking` is set, or one is true.
    IfEither,
    /// The same, unless `reasoning_effort` is `none`.
    IfEitherAndEffort,
    /// If the vocabulary has the marker; the output begins in content all the same.
    IfMarked,
}

/// How the text of a name is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    Plain,
    Stripped,
    /// `functions.NAME:INDEX`, which is also the id of the call.
    Kimi,
    /// As it stands, even if there is none.
    Mistral,
}

/// Tokens that remain of the one that ended reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// None after the end marker; all if a call ended it.
    CallToo,
    /// Always none.
    Nothing,
    /// The section's marker, if that ended it.
    Section,
}

use Emit::Argument;
use GrammarState::{Between, Content, Name, Preamble, Reasoning};
use Mark::{
    CallEnd, CallStart, FunctionEnd, KeyEnd, KeyStart, NameEnd, NameStart, SectionEnd, SectionStart,
    ThinkEnd, ThinkStart, ValueEnd, ValueStart,
};

const ARGS: GrammarState = GrammarState::Arguments;
const NONE: &[Emit] = &[];
const REASONED: &[Emit] = &[Emit::ReasoningEnd];
const CALLS: &[Emit] = &[Emit::CallStart];
const CALLED: &[Emit] = &[Emit::CallEnd];
const CALLED_CALLS: &[Emit] = &[Emit::CallEnd, Emit::CallStart];
const REASONED_CALLS: &[Emit] = &[Emit::ReasoningEnd, Emit::CallStart];
const ARGUMENT: &[Emit] = &[Argument];

/// Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>…`.
pub(super) static QWEN3: Grammar = Grammar {
    spellings: &[
        (ThinkStart, "<think>"),
        (ThinkEnd, "</think>"),
        (CallStart, "<tool_call>"),
        (CallEnd, "</tool_call>"),
        (NameStart, "<function="),
        (FunctionEnd, "</function>"),
        (KeyStart, "<parameter="),
        (KeyEnd, "</parameter>"),
        (NameEnd, ">"),
    ],
    by_token: &[ThinkStart, ThinkEnd, CallStart, CallEnd],
    steps: &[
        (Reasoning, ThinkStart, Reasoning, NONE),
        (Reasoning, ThinkEnd, Content, REASONED),
        (Content, ThinkEnd, Content, NONE),
        (Reasoning, CallStart, Preamble, REASONED_CALLS),
        (Content, CallStart, Preamble, REASONED_CALLS),
        (Content, NameStart, Name, CALLS),
        (Preamble, CallEnd, Content, CALLED),
        (Preamble, NameStart, Name, NONE),
        (Name, NameEnd, ARGS, NONE),
        (Name, FunctionEnd, Between, CALLED),
        (ARGS, FunctionEnd, Between, CALLED),
        (Between, CallEnd, Content, NONE),
        (Between, CallStart, Preamble, CALLS),
        (Between, NameStart, Name, CALLS),
    ],
    boundaries: &["<|im_start|>", "<|im_end|>"],
    arguments: Arguments::Qwen3,
    converts_at: None,
    thinks: Thinks::UnlessDisabled,
    forgets_reasoning: false,
    strips_reasoning: false,
    strips_content: true,
    checks_names: false,
    names: Names::Plain,
    rest: Rest::CallToo,
};

/// GLM 4.5 to 4.7: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.
pub(super) static GLM: Grammar = Grammar {
    spellings: &[
        (ThinkStart, "<think>"),
        (ThinkEnd, "</think>"),
        (CallStart, "<tool_call>"),
        (CallEnd, "</tool_call>"),
        (KeyStart, "<arg_key>"),
        (KeyEnd, "</arg_key>"),
        (ValueStart, "<arg_value>"),
        (ValueEnd, "</arg_value>"),
    ],
    by_token: &[ThinkStart, ThinkEnd, CallStart, CallEnd],
    steps: &[
        (Content, ThinkStart, Reasoning, NONE),
        (Reasoning, ThinkEnd, Content, REASONED),
        (Content, ThinkEnd, Content, NONE),
        (Reasoning, ThinkStart, Reasoning, NONE),
        (Reasoning, CallStart, Name, REASONED_CALLS),
        (Content, CallStart, Name, CALLS),
        (Name, KeyStart, ARGS, ARGUMENT),
        (Name, CallEnd, Content, CALLED),
        (ARGS, CallEnd, Content, CALLED),
    ],
    boundaries: &["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    arguments: Arguments::Glm,
    converts_at: None,
    thinks: Thinks::IfEither,
    forgets_reasoning: true,
    strips_reasoning: true,
    strips_content: true,
    checks_names: true,
    names: Names::Stripped,
    rest: Rest::CallToo,
};

/// Kimi K2: a section of calls, each a name with an index and JSON.
pub(super) static KIMI_K2: Grammar = Grammar {
    spellings: &[
        (ThinkStart, "<think>"),
        (ThinkEnd, "</think>"),
        (SectionStart, "<|tool_calls_section_begin|>"),
        (SectionEnd, "<|tool_calls_section_end|>"),
        (CallStart, "<|tool_call_begin|>"),
        (CallEnd, "<|tool_call_end|>"),
        (NameEnd, "<|tool_call_argument_begin|>"),
    ],
    by_token: &[ThinkStart, ThinkEnd, SectionStart, SectionEnd, CallStart, CallEnd, NameEnd],
    steps: &[
        (Reasoning, ThinkStart, Reasoning, NONE),
        (Reasoning, ThinkEnd, Content, REASONED),
        (Content, ThinkEnd, Content, NONE),
        (Reasoning, SectionStart, Preamble, REASONED),
        (Content, SectionStart, Preamble, NONE),
        (Preamble, CallStart, Name, CALLS),
        (Name, NameEnd, ARGS, NONE),
        (ARGS, CallEnd, Between, CALLED),
        (ARGS, SectionEnd, Preamble, CALLED),
        (Between, CallStart, Name, CALLS),
    ],
    boundaries: &[],
    arguments: Arguments::Json,
    converts_at: None,
    thinks: Thinks::IfEither,
    forgets_reasoning: true,
    strips_reasoning: true,
    strips_content: false,
    checks_names: false,
    names: Names::Kimi,
    rest: Rest::Section,
};

/// MiniMax M2: `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>…`.
pub(super) static MINIMAX_M2: Grammar = Grammar {
    spellings: &[
        (ThinkStart, "<think>"),
        (ThinkEnd, "</think>"),
        (CallStart, "<minimax:tool_call>"),
        (CallEnd, "</minimax:tool_call>"),
        (KeyStart, "<parameter name="),
        (KeyEnd, "</parameter>"),
        (NameStart, "<invoke name=\""),
        (NameStart, "<invoke name='"),
        (NameStart, "<invoke name="),
        (FunctionEnd, "</invoke>"),
        (NameEnd, "\">"),
        (NameEnd, "'>"),
        (NameEnd, ">"),
    ],
    by_token: &[ThinkStart, ThinkEnd, CallStart, CallEnd],
    steps: &[
        (Reasoning, ThinkStart, Reasoning, NONE),
        (Reasoning, ThinkEnd, Content, REASONED),
        (Content, ThinkEnd, Content, NONE),
        (Reasoning, CallStart, Preamble, REASONED),
        (Content, CallStart, Preamble, NONE),
        (Preamble, CallEnd, Content, NONE),
        (Between, CallEnd, Content, NONE),
        (Content, CallEnd, Content, NONE),
        (ARGS, FunctionEnd, Between, CALLED),
        (Content, NameStart, Name, CALLS),
        (Preamble, NameStart, Name, CALLS),
        (Between, NameStart, Name, CALLS),
        (Name, NameEnd, ARGS, NONE),
    ],
    boundaries: &[],
    arguments: Arguments::Minimax,
    converts_at: None,
    thinks: Thinks::Always,
    forgets_reasoning: false,
    strips_reasoning: true,
    strips_content: true,
    checks_names: true,
    names: Names::Plain,
    rest: Rest::Nothing,
};

/// Mistral from its eleventh tokenizer on: `[TOOL_CALLS]NAME[ARGS]JSON`, or without the second
/// marker. The brace that begins the arguments is a marker too.
pub(super) static MISTRAL: Grammar = Grammar {
    spellings: &[
        (ThinkStart, "[THINK]"),
        (ThinkEnd, "[/THINK]"),
        (CallStart, "[TOOL_CALLS]"),
        (NameEnd, "[ARGS]"),
        (ValueStart, "{"),
    ],
    by_token: &[ThinkStart, ThinkEnd, CallStart, NameEnd],
    steps: &[
        (Content, ThinkStart, Reasoning, NONE),
        (Reasoning, ThinkStart, Reasoning, NONE),
        (Reasoning, ThinkEnd, Content, REASONED),
        (Content, ThinkEnd, Content, NONE),
        (Reasoning, CallStart, Name, REASONED_CALLS),
        (Content, CallStart, Name, REASONED_CALLS),
        (Name, NameEnd, ARGS, NONE),
        (Name, ValueStart, ARGS, ARGUMENT),
        (ARGS, CallStart, Name, CALLED_CALLS),
    ],
    boundaries: &[],
    arguments: Arguments::Json,
    converts_at: None,
    thinks: Thinks::IfMarked,
    forgets_reasoning: true,
    strips_reasoning: true,
    strips_content: true,
    checks_names: false,
    names: Names::Mistral,
    rest: Rest::CallToo,
};

/// DeepSeek V3.2: `<｜DSML｜function_calls>`, and no reasoning.
pub(super) static DEEPSEEK_V32: Grammar = V32;

const V32: Grammar = Grammar {
    spellings: &[
        (SectionStart, "<｜DSML｜function_calls>"),
        (SectionEnd, "</｜DSML｜function_calls>"),
        (NameStart, "<｜DSML｜invoke name=\""),
        (NameEnd, "\">"),
        (FunctionEnd, "</｜DSML｜invoke>"),
        (KeyStart, "<｜DSML｜parameter"),
        (KeyEnd, "</｜DSML｜parameter>"),
    ],
    by_token: &[SectionStart, SectionEnd],
    steps: DSML_STEPS,
    boundaries: &[],
    arguments: Arguments::Dsml,
    converts_at: Some('>'),
    thinks: Thinks::Never,
    forgets_reasoning: false,
    strips_reasoning: true,
    strips_content: false,
    checks_names: false,
    names: Names::Plain,
    rest: Rest::CallToo,
};

/// DeepSeek V4: `<｜DSML｜tool_calls>`.
pub(super) static DEEPSEEK_V4: Grammar = Grammar {
    spellings: &[
        (ThinkStart, "<think>"),
        (ThinkEnd, "</think>"),
        (SectionStart, "<｜DSML｜tool_calls>"),
        (SectionStart, "<｜DSML｜toolcalls>"),
        (SectionStart, "<｜DSML｜tool>"),
        (SectionEnd, "</｜DSML｜tool_calls>"),
        (NameStart, "<｜DSML｜invoke name=\""),
        (NameEnd, "\">"),
        (FunctionEnd, "</｜DSML｜invoke>"),
        (KeyStart, "<｜DSML｜parameter"),
        (KeyEnd, "</｜DSML｜parameter>"),
    ],
    by_token: &[ThinkStart, ThinkEnd, SectionStart, SectionEnd],
    thinks: Thinks::IfEitherAndEffort,
    ..V32
};

/// The steps with reasoning never fire in V3.2, which has no marker of it.
const DSML_STEPS: &[Transition] = &[
    (Content, ThinkStart, Reasoning, NONE),
    (Content, ThinkEnd, Content, NONE),
    (Reasoning, ThinkStart, Reasoning, NONE),
    (Reasoning, ThinkEnd, Content, REASONED),
    (Reasoning, SectionStart, Preamble, REASONED),
    (Content, SectionStart, Preamble, NONE),
    (Preamble, NameStart, Name, CALLS),
    (Content, NameStart, Name, CALLS),
    (Name, NameEnd, ARGS, NONE),
    (ARGS, FunctionEnd, Between, CALLED),
    (ARGS, SectionEnd, Between, CALLED),
    (Between, NameStart, Name, CALLS),
];
