//! Families of client programs, recognised by their `User-Agent`: a closed list, so that clients
//! cannot make labels of metrics.

/// The program or library that sends a request, as far as its `User-Agent` tells.
///
/// A framework that calls through another library's client is counted as that library: most of
/// them use the OpenAI client and send its `OpenAI/Python x.y` unchanged. `LangChain` in Python,
/// `LlamaIndex`, Haystack, Aider, and `LiteLLM` where it calls an OpenAI server, cannot be told
/// apart from it. Clients may send any text, so a family is a hint and no proof.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClientFamily {
    /// Claude Code.
    ClaudeCode,
    /// Codex of OpenAI, on the command line or in an editor.
    Codex,
    /// opencode.
    OpenCode,
    /// Cline.
    Cline,
    /// Roo Code.
    RooCode,
    /// The AI SDK of Vercel, in a program without a name of its own.
    AiSdk,
    /// `LangChain.js`, which names itself.
    LangChain,
    /// `LiteLLM`, where it uses its own HTTP client.
    LiteLlm,
    /// Pydantic AI.
    PydanticAi,
    /// The Agents SDK of OpenAI.
    OpenAiAgents,
    /// The Python client of OpenAI, or a framework over it.
    OpenAiPython,
    /// The JavaScript client of OpenAI, or a framework over it.
    OpenAiNode,
    /// A client of OpenAI for another language.
    OpenAiOther,
    /// The Python client of Anthropic, or a framework over it.
    AnthropicPython,
    /// The JavaScript client of Anthropic, or a framework over it.
    AnthropicNode,
    /// curl.
    Curl,
    /// An HTTP library of Python: requests, httpx, aiohttp, urllib.
    Python,
    /// An HTTP library of a JavaScript runtime.
    Node,
    /// A web browser, or a desktop program made of one.
    Browser,
    /// Any other program, or one that does not name itself.
    #[default]
    Other,
}

/// Position of a name in a `User-Agent`.
#[derive(Clone, Copy)]
enum At {
    /// It begins with the name.
    Start,
    /// It has the name anywhere: programs add their own name before or after that of a library.
    Anywhere,
}

use At::{Anywhere, Start};
use ClientFamily as F;

/// Names in lower case, each with its family; the first that is found decides. Programs come
/// before the frameworks that they use, and those before clients and HTTP libraries.
const NAMES: [(At, &str, ClientFamily); 33] = [
    (Start, "claude-cli/", F::ClaudeCode),
    (Start, "claude-code/", F::ClaudeCode),
    (Start, "codex_", F::Codex),
    (Start, "codex-", F::Codex),
    (Start, "codex/", F::Codex),
    (Start, "opencode/", F::OpenCode),
    (Start, "cline/", F::Cline),
    (Start, "roocode/", F::RooCode),
    (Anywhere, "ai-sdk/", F::AiSdk),
    (Anywhere, "langchain", F::LangChain),
    (Start, "litellm/", F::LiteLlm),
    (Anywhere, "pydantic-ai/", F::PydanticAi),
    (Start, "agents/python", F::OpenAiAgents),
    (Start, "agents/javascript", F::OpenAiAgents),
    (Anywhere, "openai/python", F::OpenAiPython),
    (Anywhere, "openai/js", F::OpenAiNode),
    (Anywhere, "openai/", F::OpenAiOther),
    (Start, "openai::client", F::OpenAiOther),
    (Anywhere, "anthropic/python", F::AnthropicPython),
    (Anywhere, "anthropic/js", F::AnthropicNode),
    (Start, "curl/", F::Curl),
    (Start, "python-requests/", F::Python),
    (Start, "python-httpx/", F::Python),
    (Start, "python-urllib/", F::Python),
    (Start, "python/", F::Python),
    (Start, "aiohttp/", F::Python),
    (Start, "node", F::Node),
    (Start, "undici", F::Node),
    (Start, "axios/", F::Node),
    (Start, "bun/", F::Node),
    (Start, "deno/", F::Node),
    (Anywhere, "node-fetch", F::Node),
    (Start, "mozilla/", F::Browser),
];

impl ClientFamily {
    /// Every family, in the order of the documentation.
    pub const ALL: [Self; 20] = [
        F::OpenAiPython,
        F::OpenAiNode,
        F::OpenAiOther,
        F::AnthropicPython,
        F::AnthropicNode,
        F::LangChain,
        F::LiteLlm,
        F::PydanticAi,
        F::OpenAiAgents,
        F::AiSdk,
        F::ClaudeCode,
        F::Codex,
        F::OpenCode,
        F::Cline,
        F::RooCode,
        F::Curl,
        F::Python,
        F::Node,
        F::Browser,
        F::Other,
    ];

    /// The family of a program that sends this `User-Agent`.
    pub fn of(user_agent: &str) -> Self {
        let told = user_agent.trim_start().to_ascii_lowercase();
        let found = NAMES.iter().find(|(at, name, _)| match at {
            Start => told.starts_with(name),
            Anywhere => told.contains(name),
        });
        found.map_or(Self::Other, |(_, _, family)| *family)
    }

    /// The name in metrics and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClaudeCode => "claude-code",
            Self::Codex => "codex",
            Self::OpenCode => "opencode",
            Self::Cline => "cline",
            Self::RooCode => "roo-code",
            Self::AiSdk => "ai-sdk",
            Self::LangChain => "langchain",
            Self::LiteLlm => "litellm",
            Self::PydanticAi => "pydantic-ai",
            Self::OpenAiAgents => "openai-agents",
            Self::OpenAiPython => "openai-python",
            Self::OpenAiNode => "openai-node",
            Self::OpenAiOther => "openai-other",
            Self::AnthropicPython => "anthropic-python",
            Self::AnthropicNode => "anthropic-node",
            Self::Curl => "curl",
            Self::Python => "python",
            Self::Node => "node",
            Self::Browser => "browser",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Texts that released programs send.
    const SENT: [(&str, ClientFamily); 37] = [
        ("OpenAI/Python 1.99.1", F::OpenAiPython),
        ("AsyncOpenAI/Python 1.40.0", F::OpenAiPython),
        ("AsyncAzureOpenAI/Python 1.40.0", F::OpenAiPython),
        ("OpenAI/JS 5.0.1", F::OpenAiNode),
        ("AzureOpenAI/JS 4.104.0", F::OpenAiNode),
        ("OpenAI/Go 1.12.0", F::OpenAiOther),
        ("OpenAI/Java 2.8.1", F::OpenAiOther),
        ("OpenAI/2.2.0 (.NET 8.0.4; Ubuntu 24.04 LTS)", F::OpenAiOther),
        ("OpenAI::Client/Ruby 0.23.0", F::OpenAiOther),
        ("Anthropic/Python 0.64.0", F::AnthropicPython),
        ("AsyncAnthropic/Python 0.64.0", F::AnthropicPython),
        ("Anthropic/JS 0.60.0", F::AnthropicNode),
        ("langchainjs-openai/1.0.0 ((node/v24.16.0; linux; x64))", F::LangChain),
        ("litellm/1.90.1", F::LiteLlm),
        ("pydantic-ai/0.4.2", F::PydanticAi),
        ("Agents/Python 0.2.3", F::OpenAiAgents),
        ("Agents/JavaScript 0.1.0", F::OpenAiAgents),
        ("ai-sdk/openai-compatible/0.1.0", F::AiSdk),
        ("ai/5.0.8 ai-sdk/openai/2.0.5 ai-sdk/provider-utils/3.0.2 runtime/node.js/22", F::AiSdk),
        ("opencode/0.1.50 ai-sdk/openai-compatible/3.0.41", F::OpenCode),
        ("opencode/1.18.0", F::OpenCode),
        ("claude-cli/2.0.69 (external, cli)", F::ClaudeCode),
        ("codex_cli_rs/0.116.0 (Mac OS 26.0.1; arm64) Apple_Terminal/464", F::Codex),
        ("Cline/3.74.0", F::Cline),
        ("RooCode/3.52.1", F::RooCode),
        ("curl/8.5.0", F::Curl),
        ("python-requests/2.31.0", F::Python),
        ("python-httpx/0.27.2", F::Python),
        ("Python/3.12 aiohttp/3.9.5", F::Python),
        ("Python-urllib/3.11", F::Python),
        ("node", F::Node),
        ("undici", F::Node),
        ("axios/1.7.2", F::Node),
        ("Bun/1.3.11", F::Node),
        ("Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0", F::Browser),
        ("Go-http-client/1.1", F::Other),
        ("", F::Other),
    ];

    #[test]
    fn released_programs_are_recognised() {
        for (sent, family) in SENT {
            assert_eq!(ClientFamily::of(sent), family, "{sent}");
            assert_eq!(ClientFamily::of(&sent.to_uppercase()), family, "{sent}");
        }
    }

    #[test]
    fn every_family_has_a_name_of_its_own_and_can_be_recognised() {
        let names: HashSet<&str> = ClientFamily::ALL.iter().map(|family| family.name()).collect();
        assert_eq!(names.len(), ClientFamily::ALL.len());
        let found: HashSet<ClientFamily> = SENT.iter().map(|(_, family)| *family).collect();
        assert_eq!(found.len(), ClientFamily::ALL.len());
    }
}
