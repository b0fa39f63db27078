#!/usr/bin/env python3
"""Records the masks of xgrammar, or of llguidance, as vLLM makes them, for the tests of `src/engines/masks.rs`.

    .cache/engines/vllm-0.32.0/bin/python tests/engines/masks.py xgrammar|guidance [--fixed] [GRAMMARS.jsonl]

Reads grammars, one JSON object a line with a member `json` (the text of a schema), `regex`, `choice` or
`tag` (the text of a structural tag, as vLLM makes it of tools; xgrammar alone), by default those of
tests/goldens/xgrammar.jsonl, and writes tests/goldens/LIBRARY.jsonl, with `--fixed` LIBRARY-fixed.jsonl of the schemas alone,
under `disable_any_whitespace`: for each grammar a walk over allowed tokens of the bundled target's vocabulary (under a tag: into one of its calls), and at some of its places the SHA-256 of
the ids of the allowed ones of every SIXTEENTH token (little-endian, 32 bits each), without those that
may end a text, and if the text may end there. Grammars that the library refuses are recorded as such. Seeded: the same library
writes the same file.
"""

import hashlib
import json
import pathlib
import random
import struct
import sys

import llguidance
import llguidance.hf
import transformers
import xgrammar
from tokenizers import Tokenizer
from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.utils import choice_as_grammar

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests/goldens"
TOKENIZER = ROOT / "onnx/models/target/tokenizer.json"
STEPS, PLACES = 48, 8
SIXTEENTH = 16
# how often a walk prefers the tokens that texts are made of to any allowed one
PLAIN = 0.7
COMMON = ['{', '}', '[', ']', '"', '":', ',', '1', '2', '0', '.', '-', 'a', 'e', 'the', ' the', 'true', 'false', 'null', '@', '/', ':']


class Xgrammar:
    kinds = ("json", "regex", "choice", "tag")

    def __init__(self, tokenizer, size, end):
        ordered = [tokenizer.id_to_token(token) for token in range(size)]
        info = xgrammar.TokenizerInfo(ordered, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[end])
        self.compiler, self.size, self.end = xgrammar.GrammarCompiler(info, max_threads=2), size, end

    def compile(self, grammar):
        if "tag" in grammar:
            self.compiled = self.compiler.compile_structural_tag(grammar["tag"])
        elif "json" in grammar:
            separators = (",", ":") if self.fixed else None
            self.compiled = self.compiler.compile_json_schema(grammar["json"], any_whitespace=not self.fixed, separators=separators)
        elif "regex" in grammar:
            self.compiled = self.compiler.compile_regex(grammar["regex"])
        else:
            self.compiled = self.compiler.compile_grammar(choice_as_grammar(grammar["choice"]))

    def begin(self):
        self.matcher = xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=[self.end])

    def allowed(self):
        bitmask = xgrammar.allocate_token_bitmask(1, self.size)
        self.matcher.fill_next_token_bitmask(bitmask)
        words = bitmask[0].tolist()
        return [token for token in range(self.size) if words[token // 32] >> (token % 32) & 1]

    def accept(self, token):
        return self.matcher.accept_token(token)


class Guidance:
    kinds = ("json", "regex", "choice")

    def __init__(self, tokenizer, size, end):
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        self.tokenizer, self.size = llguidance.hf.from_tokenizer(fast, size, eos_token=end), size

    def compile(self, grammar):
        (kind, spec), = grammar.items()
        spec = json.dumps(spec) if kind == "choice" else spec
        try:
            self.grammar = serialize_guidance_grammar(StructuredOutputOptions[kind.upper()], spec, self.fixed)
        except ValueError as error:
            raise RuntimeError(error) from error
        self.begin()
        self.matcher.compute_bitmask()
        if self.matcher.get_error():
            raise RuntimeError(self.matcher.get_error())

    def begin(self):
        self.matcher = llguidance.LLMatcher(self.tokenizer, self.grammar)

    def allowed(self):
        mask = self.matcher.compute_bitmask()
        assert not self.matcher.get_error(), self.matcher.get_error()
        return [token for token in range(self.size) if mask[token // 8] >> (token % 8) & 1]

    def accept(self, token):
        return self.matcher.consume_token(token)


LIBRARIES = {"xgrammar": Xgrammar, "guidance": Guidance}


def opening(grammar, rng):
    """The text with which a call of a structural tag begins; empty for other grammars."""
    texts, found = [json.loads(grammar.get("tag", "null"))], []
    while texts:
        part = texts.pop()
        if isinstance(part, dict):
            if isinstance(part.get("begin"), str):
                found.append(part["begin"])
            texts.extend(part.values())
        elif isinstance(part, list):
            texts.extend(part)
    return rng.choice(sorted(set(found))) if found else ""


def walk(library, ends, common, opening, rng):
    library.begin()
    tokens, places = [], []
    kept = set(rng.sample(range(STEPS), PLACES)) | {0}
    for step in range(STEPS):
        every = library.allowed()
        text = [token for token in every if token not in ends]
        complete = min(ends) in every
        if step in kept or not text:
            some = [token for token in text if token % SIXTEENTH == step % SIXTEENTH]
            digest = hashlib.sha256(struct.pack(f"<{len(some)}I", *some)).hexdigest()[:32]
            places.append([step, len(some), digest, complete])
        if not text:
            break
        likely = [token for token in text if token in common]
        if opening and opening[0] in text:
            tokens.append(opening.pop(0))
        else:
            tokens.append(rng.choice(likely if likely and rng.random() < PLAIN else text))
        assert library.accept(tokens[-1])
    return tokens, places


def main():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    added = json.loads(TOKENIZER.read_text())["added_tokens"]
    ends = {token["id"] for token in added}
    size = tokenizer.get_vocab_size()
    library, given = LIBRARIES[sys.argv[1]](tokenizer, size, min(ends)), sys.argv[2:]
    library.fixed = "--fixed" in given
    kinds = ("json",) if library.fixed else library.kinds
    given = [name for name in given if name != "--fixed"]
    common = {token for text in COMMON for token in tokenizer.encode(text, add_special_tokens=False).ids}
    source = pathlib.Path(given[0]) if given else GOLDENS / "xgrammar.jsonl"
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    with (GOLDENS / f"{sys.argv[1]}{'-fixed' if library.fixed else ''}.jsonl").open("w") as out:
        for number, line in enumerate(lines):
            grammar = {key: value for key, value in line.items() if key in kinds}
            if not grammar:
                continue
            try:
                library.compile(grammar)
            except RuntimeError:
                grammar["refused"] = True
            else:
                rng = random.Random(number)
                begin = tokenizer.encode(opening(grammar, rng), add_special_tokens=False).ids
                grammar["tokens"], grammar["places"] = walk(library, ends, common, begin, rng)
            out.write(json.dumps(grammar) + "\n")


if __name__ == "__main__":
    main()
