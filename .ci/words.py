#!/usr/bin/env python3
"""Words and form of code and texts: no word of ours where the field has one, and lines that fit.

Without arguments: prints every violation as FILE:LINE: PROBLEM, and exits with 1 if there is one. The words are those that
an engineer who knows vLLM would stumble over; each is searched with word boundaries, identifiers split at capitals and
underscores. A word in another meaning is allowed by the pattern of its context in ALLOWED.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Not ours to word: data, generated or foreign text; the changelog tells what names used to be.
SKIPPED = re.compile(r"^(CHANGELOG\.md|Cargo\.lock|LICENSE|\.ci/words\.py|onnx/(models|train/data)/|proptest-regressions/|"
                     r"tests/fuzz/(corpus|regressions|seeds)|tests/recorded/|src/foretell/bench/workload/.*\.jsonl|grafana/dashboards/|docs/images/pictures\.json)")
TEXTS = {".rs", ".md", ".py", ".sh", ".yaml", ".yml", ".toml", ".js", ".mjs", ".html", ".css", ".json", ".txt", ""}
OLD = {
    "leap leaps leapt leaping": "speculate, round",
    "ride rides ridden riding rode rider riders": "plain, plain request",
    "bypass bypassed bypasses relay relays relayed relaying": "pass through, passthrough",
    "verdict verdicts": "verification result",
    "crowd crowds crowded": "concurrency",
    "hearing hearings": "drafter evaluation",
    "tariff tariffs": "round costs",
    "shelf shelves": "expiring map, corpus",
    "dice": "random numbers",
    "tongue tongues interpreter": "vocabulary bridge, translator",
    "pilot pump": "speculation controller, session loop",
    "seat seats": "drafter slot",
    "sketch sketches sketched": "draft",
    "law laws": "distribution",
    "passage passages sayings": "text, prompt, output",
    "penance ebb": "fault backoff, allocator purge",
    "gap_most acceptance_least": "max_gap, min_acceptance",
    "epoch epochs": "engine start",
    "switchback switchbacks": "control group",
}
# Names of several words, also where a line ends between them.
PHRASES = {
    "process file": "config file",
    "process files": "config files",
    "own target": "`foretell target`",
    "may be speculated on": "is eligible",
    "may not be speculated on": "is not eligible",
    "fell short": "was not met",
    "falls short": "is not met",
    "held back": "in the control group, withheld",
    "held_back": "control_group, withheld",
    "holdback group": "control group",
    "plain windows": "control group",
}
# Files where a word means something else.
ALLOWED = {
    "interpreter": r".*\.py",  # of a script or an ELF file
    "passage passages": r"(onnx/train|tests/workloads)/.*",  # of a text
    "epoch epochs": r"(onnx/train|tests/(bench|python))/.*\.py",  # of a training
}
EVERY_OLD = {word for words in OLD for word in words.split()}
UNIX_TIME = re.compile(r"\bUNIX_EPOCH\b")
GAP = r"\s+(?:(?://[/!]?|#)\s+)?"  # in a comment of several lines, too
COMMENT = re.compile(r"^\s*//[/!]?")
ITEM = re.compile(r"^\s*///\s+(What|Whether)\b")
WIDTH, MARKDOWN = 100, 120


def files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in listed if name and not SKIPPED.match(name) and pathlib.Path(name).suffix in TEXTS]


def parts(line):
    """The words of a line, identifiers split."""
    line = UNIX_TIME.sub("", line)
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line)
    return set(re.findall(r"[a-z]+", split.lower())) | set(re.findall(r"[a-z_]+", line))


def words(name, number, line):
    found = parts(line) & EVERY_OLD
    if not found:
        return
    for old, new in OLD.items():
        for word in found.intersection(old.split()):
            elsewhere = any(word in one.split() and re.fullmatch(file, name) for one, file in ALLOWED.items())
            if not elsewhere:
                yield f"{name}:{number}: `{word}`: say {new}"


def phrases(name, text):
    lower = text.lower()
    for old, new in PHRASES.items():
        if old.split()[0] not in lower:
            continue
        for found in re.finditer(r"\b" + GAP.join(map(re.escape, old.split())) + r"\b", text, re.IGNORECASE):
            yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}: `{old}`: say {new}"


def form(name, lines):
    fenced = False
    for number, line in enumerate(lines, 1):
        if name.endswith(".rs") and COMMENT.match(line):
            if len(line) > WIDTH and "http" not in line and not line.lstrip("/! ").startswith("|"):
                yield f"{name}:{number}: a comment of {len(line)} columns, more than {WIDTH}"
            if ITEM.match(line) and (number < 2 or not COMMENT.match(lines[number - 2])):
                yield f"{name}:{number}: a doc that begins with What or Whether: say what it is"
        if name.endswith(".md"):
            fenced ^= line.startswith("```")
            wide = len(line) > MARKDOWN and not fenced and not line.lstrip().startswith("|")
            if wide and " " in line[MARKDOWN // 2:].strip():
                yield f"{name}:{number}: {len(line)} columns, more than {MARKDOWN}"


def main():
    problems = []
    for name in files():
        try:
            lines = (ROOT / name).read_text().split("\n")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            problems += words(name, number, line)
        problems += phrases(name, "\n".join(lines))
        problems += form(name, lines)
    print("\n".join(problems) if problems else "no old word, no line too long")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
