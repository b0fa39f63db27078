"""Candidate prompts for the benchmark's workloads, from held-out text only.

Real text, no random tokens, and no training text. choose_workloads.py chooses the 50 prompts of
each workload from these pools.

    pools.py CORPUS_DIR TOKENIZER OUT_DIR
"""

import hashlib
import json
import pathlib
import random
import re
import sys

from tokenizers import Tokenizer

MODEL = "foretell-target"
COUNT = 1200


def completion(prompt, limit):
    return {"route": "completions", "body": {
        "model": MODEL, "prompt": prompt, "max_tokens": limit, "temperature": 0}}


def chat(question, limit):
    return {"route": "chat", "body": {
        "model": MODEL, "messages": [{"role": "user", "content": question}],
        "max_tokens": limit, "temperature": 0}}


def read(path):
    return [json.loads(line) for line in open(path)]


class Pools:
    def __init__(self, corpus, tokenizer):
        self.corpus, self.tokenizer = corpus, tokenizer
        self.rng = random.Random(50)

    def tokens(self, text):
        return len(self.tokenizer.encode(text).ids)

    def head(self, text, low, high):
        """A prefix of whole lines of low..high tokens, or None."""
        want, out = self.rng.randint(low, high), ""
        for line in text.splitlines(keepends=True):
            if self.tokens(out + line) > want:
                break
            out += line
        return out if self.tokens(out) >= low else None

    def code(self):
        """Starts of held-out files, or of their later classes and functions."""
        for doc in read(self.corpus / "held/code.jsonl"):
            text = doc["text"]
            starts = [0] + [m.start() for m in re.finditer(r"^(?=class |def |@)", text, re.M)][1::3]
            for start in starts[:9]:
                if prompt := self.head(text[start:start + 4000], 100, 400):
                    yield completion(prompt, self.rng.choice((128, 160, 200)))

    def rewrites(self):
        for doc in read(self.corpus / "held/rewrite.jsonl"):
            if 150 <= self.tokens(doc["prompt"]) <= 450 and "rename" in doc["prompt"].splitlines()[-1]:
                yield completion(doc["prompt"], min(200, self.tokens(doc["prompt"]) - 10))

    def prose(self):
        for doc in read(self.corpus / "held/prose.jsonl"):
            paragraphs = doc["text"].split("\n\n")
            for i in range(0, len(paragraphs) - 4, 4):
                if prompt := self.head("\n\n".join(paragraphs[i:i + 12]) + "\n", 60, 250):
                    if sum(c.isalpha() or c == " " for c in prompt) > 0.85 * len(prompt):
                        yield completion(prompt, self.rng.choice((128, 160)))

    def chat(self):
        seen = set()
        for doc in read(self.corpus / "held/chat.jsonl"):
            if doc["question"] not in seen:
                seen.add(doc["question"])
                yield chat(doc["question"], self.rng.choice((128, 160)))

    def hostile(self):
        """Checksums, numbers, foreign words: real text that a drafter cannot predict."""
        import base64
        docs = read(self.corpus / "held/code.jsonl") + read(self.corpus / "held/prose.jsonl")
        for doc, kind in ((doc, kind) for doc in docs for kind in range(4)):
            raw = doc["text"].encode()
            chunks = [raw[k:k + 700] for k in range(0, min(len(raw), 20_000), 700)]
            if kind == 0:
                lines = [f"{hashlib.sha256(c).hexdigest()}  {doc['name'].rsplit('/', 1)[-1]}.{k:03d}"
                         for k, c in enumerate(chunks[:8])]
            elif kind == 1:
                lines = [base64.b64encode(hashlib.sha512(c).digest()).decode()[:76] for c in chunks[:8]]
            elif kind == 2:
                words = sorted(set(re.findall(r"[a-z]{5,}", doc["text"])), key=lambda w: hashlib.md5(w.encode()).digest())
                lines = [" ".join(words[k:k + 8]) for k in range(0, 96, 8)]
            else:
                lines = [f"{len(c)} {sum(c) % 9973} {hashlib.md5(c).hexdigest()[:12]} "
                         f"{int.from_bytes(hashlib.sha1(c).digest()[:6], 'big')}" for c in chunks[:12]]
            text = "\n".join(lines) + "\n"
            if len(lines) >= 5:
                yield completion(text, 128)


def main():
    corpus, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
    pools = Pools(corpus, Tokenizer.from_file(sys.argv[2]))
    out.mkdir(parents=True, exist_ok=True)
    for name, make in (("completion", pools.code), ("rewrite", pools.rewrites), ("prose", pools.prose),
                       ("chat", pools.chat), ("hostile", pools.hostile)):
        lines = list(make())
        pools.rng.shuffle(lines)
        with open(out / f"{name}.jsonl", "w") as file:
            for line in lines[:COUNT]:
                file.write(json.dumps(line) + "\n")
        print(name, len(lines))


if __name__ == "__main__":
    main()
