"""A reasoning parser for vLLM that moves text: the first line is reasoning, the rest content.

The tokenizer of the bundled target has no thinking tokens, so none of vLLM's own parsers has an
effect. A proxy must work when `content` is not the text of the tokens: this parser causes that on
every answer.
"""

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("first_line")
class FirstLine(ReasoningParser):
    def is_reasoning_end(self, input_ids):
        return False  # called for the prompt too, which has several lines

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
