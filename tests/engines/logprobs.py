#!/usr/bin/env python3
"""Records how vLLM writes the tokens of log-probabilities.

    logprobs.py [--out FILE]        run by the Python of vLLM's installation

For outputs in the bundled tokenizer, characters that are spread over several tokens among them: the member `logprobs` of
the whole answers of both routes, made by vLLM's own classes from made-up numbers. `foretell_onnx::target::logprobs`
is compared with the file (tests/goldens/logprobs.jsonl).
"""

import argparse
import json
import pathlib
import random
from types import SimpleNamespace

import numpy as np
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "goldens/logprobs.jsonl"
TOKENIZER = ROOT.parent / "onnx/models/target/tokenizer.json"
TEXTS = ("The fox , the dog . \"Zürich\"\n\tlet x = 1;", "東京 🦊🦊 naïve — ½ 𝄞é", "🦊", "a\U0001F9D1\u200d\U0001F680b", "ﬁ ÿ \u00a0.")
SEED, RANDOM, LENGTH, LISTED = 27, 24, 16, 4


def outputs(tokenizer, rng):
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        yield from (ids, ids[1:], ids[::-1])
    size = len(tokenizer)
    # the tokens of a byte-level vocabulary that are no whole characters
    broken = [id for id in range(size) if tokenizer.decode([id]).endswith("\ufffd")]
    for number in range(RANDOM):
        pool = broken if number % 3 == 0 else range(size)
        yield [rng.choice(broken if rng.random() < 0.4 else pool) for _ in range(LENGTH)]


def listed(token, size, rng):
    """The token that was taken, then the likeliest ones, as the sampler gives them."""
    top = rng.sample(range(size), LISTED)
    if rng.random() < 0.6:
        top[rng.randrange(LISTED)] = token
    scores = sorted((-round(rng.uniform(0.01, 9), 3) for _ in top), reverse=True)
    if rng.random() < 0.1:
        scores[-1] = float("-inf")
    own = dict(zip(top, scores)).get(token, -12.5)
    return [token, *top], [own, *scores]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    tokenizer, rng = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER)), random.Random(SEED)
    serving = SimpleNamespace(return_tokens_as_token_ids=False, _get_decoded_token=OpenAIServingChat._get_decoded_token)
    serving._get_top_logprobs = OpenAIServingChat._get_top_logprobs.__get__(serving)
    lines = []
    for ids in outputs(tokenizer, rng):
        most = rng.choice((0, 1, 2, LISTED))
        rows = [listed(token, len(tokenizer), rng) for token in ids]
        rows = [(tokens[:most + 1], scores[:most + 1]) for tokens, scores in rows]
        processor = LogprobsProcessor(tokenizer=tokenizer, logprobs=[], prompt_logprobs=None, cumulative_logprob=0.0,
                                      num_logprobs=most, num_prompt_logprobs=None)
        for tokens, scores in rows:
            processor._update_sample_logprobs(LogprobsLists(np.array([tokens]), np.array([scores]), np.array([1])))
        chat = OpenAIServingChat._create_chat_logprobs(serving, ids, processor.logprobs, tokenizer, most)
        completion = OpenAIServingCompletion._create_completion_logprobs(serving, ids, processor.logprobs, most, tokenizer)
        lines.append({"most": most, "places": [list(zip(tokens, (max(score, -9999.0) for score in scores))) for tokens, scores in rows],
                      "chat": chat.model_dump(), "completions": completion.model_dump()})
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} outputs, {sum(len(line['places']) for line in lines)} tokens")


if __name__ == "__main__":
    main()
