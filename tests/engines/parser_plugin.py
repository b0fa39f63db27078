"""A reasoning parser for vLLM that moves text: the first line is reasoning, the rest content.

The tokenizer of the bundled target has no thinking tokens, so none of vLLM's own parsers finds anything to do.
What a proxy must survive is that `content` is not the text of the tokens: this does it on every answer.
"""

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("first_line")
class FirstLine(ReasoningParser):
    def is_reasoning_end(self, input_ids):
        return False  # asked of the prompt too, which has lines of its own

    def is_reasoning_end_streaming(self, input_ids, delta_ids):
        return "\n" in self.model_tokenizer.decode(list(delta_ids))

    def extract_content_ids(self, input_ids):
        return list(input_ids)

    def extract_reasoning(self, model_output, request):
        line, newline, rest = model_output.partition("\n")
        return line, rest if newline else None

    def extract_reasoning_streaming(self, previous_text, current_text, delta_text, *ids):
        if "\n" in previous_text:
            return DeltaMessage(content=delta_text)
        line, newline, rest = delta_text.partition("\n")
        return DeltaMessage(reasoning=line or None, content=rest or None) if line or newline else None
