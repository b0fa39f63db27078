#!/usr/bin/env python3
"""Records the masks of xgrammar as vLLM makes them, for the tests of `src/engines/masks.rs`.

    .cache/engines/vllm-0.32.0/bin/python tests/engines/masks.py [GRAMMARS.jsonl]

Reads grammars, one JSON object a line with a member `json` (the text of a schema), `regex`, `choice` or
`tag` (the text of a structural tag, as vLLM makes it of tools), by default those of the recording itself, tests/goldens/xgrammar.jsonl, which it writes: for each grammar
a walk over allowed tokens of the bundled target's vocabulary (under a tag: into one of its calls), and at some of its places the SHA-256 of
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

import xgrammar
from tokenizers import Tokenizer
from vllm.v1.structured_output.utils import choice_as_grammar

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/goldens/xgrammar.jsonl"
TOKENIZER = ROOT / "onnx/models/target/tokenizer.json"
STEPS, PLACES = 48, 8
SIXTEENTH = 16
# how often a walk prefers the tokens that texts are made of to any allowed one
PLAIN = 0.7
COMMON = ['{', '}', '[', ']', '"', '":', ',', '1', '2', '0', '.', '-', 'a', 'e', 'the', ' the', 'true', 'false', 'null', '@', '/', ':']


def compiled(compiler, grammar):
    if "tag" in grammar:
        return compiler.compile_structural_tag(grammar["tag"])
    if "json" in grammar:
        return compiler.compile_json_schema(grammar["json"], any_whitespace=True)
    if "regex" in grammar:
        return compiler.compile_regex(grammar["regex"])
    return compiler.compile_grammar(choice_as_grammar(grammar["choice"]))


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


def allowed(matcher, size):
    bitmask = xgrammar.allocate_token_bitmask(1, size)
    matcher.fill_next_token_bitmask(bitmask)
    words = bitmask[0].tolist()
    return [token for token in range(size) if words[token // 32] >> (token % 32) & 1]


def walk(context, size, ends, common, opening, rng):
    matcher = xgrammar.GrammarMatcher(context, override_stop_tokens=[min(ends)])
    tokens, places = [], []
    kept = set(rng.sample(range(STEPS), PLACES)) | {0}
    for step in range(STEPS):
        every = allowed(matcher, size)
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
        assert matcher.accept_token(tokens[-1])
    return tokens, places


def main():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    added = json.loads(TOKENIZER.read_text())["added_tokens"]
    ends = {token["id"] for token in added}
    size = tokenizer.get_vocab_size()
    ordered = [tokenizer.id_to_token(token) for token in range(size)]
    info = xgrammar.TokenizerInfo(ordered, xgrammar.VocabType.BYTE_LEVEL, vocab_size=size, stop_token_ids=[min(ends)])
    common = {token for text in COMMON for token in tokenizer.encode(text, add_special_tokens=False).ids}
    lines = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else GOLDEN).read_text().splitlines()
    with GOLDEN.open("w") as out:
        for number, line in enumerate(lines):
            grammar = {key: value for key, value in json.loads(line).items() if key in ("json", "regex", "choice", "tag")}
            try:
                context = compiled(xgrammar.GrammarCompiler(info, max_threads=2), grammar)
            except RuntimeError:
                grammar["refused"] = True
            else:
                rng = random.Random(number)
                begin = tokenizer.encode(opening(grammar, rng), add_special_tokens=False).ids
                grammar["tokens"], grammar["places"] = walk(context, size, ends, common, begin, rng)
            out.write(json.dumps(grammar) + "\n")


if __name__ == "__main__":
    main()
