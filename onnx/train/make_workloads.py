"""Makes the workloads `turns`, `agent` and `retrieval` from the sources of eight packages.

The texts are Python sources and documentation of packages that the bundled models were not trained
on: no file of them is in the corpus of corpus.py. Unlike in the other workloads, requests repeat
parts of earlier requests:

  turns      a conversation of 3 and of 5 messages; the second request carries the first one's
             messages, the target's own answer to them, and the next question
  agent      a log of Thought, Action and Observation, sent at several of its steps; the second half
             of the file has the same tasks with another new name
  retrieval  three passages of documentation, a question, the beginning of an answer that quotes
             one; the second half has the same passages in another order

As in choose_workloads.py a prompt is kept only if less than a fifth of the 8-grams of its plain
output repeat an earlier one that is not in the prompt, cut shorter (96, then 64 tokens) where the
loop comes late. Text of the prompt can loop as well, so less than MOST_REPEATS may repeat, in the
prompt or not. And since a model of a few million parameters mostly gives unrelated answers to such
prompts, at least COPIED of the output's 4-grams must be in the prompt: these workloads are chosen
to copy. Only the target's own output decides, without drafters.

The target copies earlier text mostly after its token for instructions, with which it was trained,
so most requests contain one, as `rewrite` does.

    make_workloads.py fetch DIR                download and unpack the packages into DIR
    make_workloads.py make DIR URL OUT_DIR     choose; URL is a running `foretell target`
    make_workloads.py measure URL FILE...      a line of figures for each workload

Only the standard library is needed. The choice is a function of the packages and of the target's
greedy output; another device or ONNX Runtime may round differently and so give another choice.
"""

import ast
import builtins
import concurrent.futures
import hashlib
import json
import pathlib
import random
import re
import subprocess
import sys
import tarfile
import textwrap
import urllib.request

MODEL = "foretell-target"
SEED = 25
COUNT, HALF = 50, 25
LIMIT, CUTS, SHORTEST, MOST_LOOPS = 128, (96, 64), 48, 0.2
COPIED, MOST_REPEATS = 0.5, 0.3
MOST_PROMPT = 1200
AT_ONCE = 2  # requests in flight
REWRITE = "<|rewrite|>"

# name, version, licence, folder of sources, folder of documentation (or None), sha256 of the source
# archive
PACKAGES = [
    ("anyio", "4.8.0", "MIT", "src/anyio", "docs",
     "1d9fe889df5212298c0c0723fa20479d1b94883a2df44bd3897aa91083316f7a"),
    ("attrs", "25.1.0", "MIT", "src/attr", None,
     "1c97078a80c814273a76b2a298a932eb681c87415c11dee0a6921de7f1b02c3e"),
    ("click", "8.1.8", "BSD-3-Clause", "src/click", "docs",
     "ed53c9d8990d83c2a27deae68e4ee337473f6330c040a31d4225c9574d16096a"),
    ("flask", "3.1.0", "BSD-3-Clause", "src/flask", "docs",
     "5f873c5184c897c8d9d1b05df1e3d01b14910ce69607a117bd3277098a5836ac"),
    ("itsdangerous", "2.2.0", "BSD-3-Clause", "src/itsdangerous", "docs",
     "e0050c0b7da1eea53ffaf149c0cfbb5c6e2e2b69c4bef22c81fa6eb73e5f6173"),
    ("pluggy", "1.5.0", "MIT", "src/pluggy", "docs",
     "2cffa88e94fdc978c4c574f15f9e59b7f4201d439195c3715ca9e2486f1d0cf1"),
    ("requests", "2.32.3", "Apache-2.0", "src/requests", None,
     "55365417734eb18255590a9ff9eb97e9e1da868d4ccd6402399eaf68af20a760"),
    ("trio", "0.28.0", "MIT OR Apache-2.0", "src/trio", "docs/source",
     "4e547896fe9e8a5658e54e4c7c5fa1db748cbbbaa7c965e7d40505b928c73c05"),
]
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{4,}")
COMMON = set(dir(builtins)) | set("self return import from args kwargs None True False class with else elif raise except finally while "
             "continue break pass yield async await lambda assert isinstance super there these those which would could "
             "about their other where being after before using".split())


def fetch(folder):
    """Fetches the pinned source archives, checked and unpacked."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / "requirements.txt"
    wanted.write_text("".join(f"{name}=={version} --hash=sha256:{digest}\n"
                              for name, version, _, _, _, digest in PACKAGES))
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", str(folder),
                    "--no-binary", ",".join(p[0] for p in PACKAGES), "-r", str(wanted)], check=True)
    for name, version, *_, digest in PACKAGES:
        archive = folder / f"{name}-{version}.tar.gz"
        if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
            sys.exit(f"{archive} is not what was pinned")
        with tarfile.open(archive) as members:
            members.extractall(folder, filter="data")


class Target:
    """A running `foretell target`: its plain output, and texts as its tokens."""

    def __init__(self, url):
        self.url = url.rstrip("/")

    def post(self, path, body):
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def tokens(self, body):
        return self.post("/tokenize", {k: body[k] for k in ("prompt", "messages") if k in body})["tokens"]

    def answer(self, line):
        """(text, prompt ids, output ids, True if it ended by itself)"""
        chat = line["route"] == "chat"
        choice = self.post("/v1/chat/completions" if chat else "/v1/completions", line["body"])["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        return text, self.tokens(line["body"]), self.tokens({"prompt": text}), choice["finish_reason"] == "stop"

    def chosen(self, line, copied=COPIED):
        """The line at the longest limit at which nothing loops, with its answer, or None."""
        if len(self.tokens(line["body"])) > MOST_PROMPT:
            return None
        text, prompt, output, _ = self.answer(line)
        for limit in (LIMIT, *CUTS):
            part = output[:limit]
            fits = (len(part) >= SHORTEST and loop_share(prompt, part) < MOST_LOOPS
                    and loop_share([], part) < MOST_REPEATS and copy_share(prompt, part) >= copied)
            if fits:
                line = {**line, "body": {**line["body"], "max_tokens": limit}}
                return line, (text if len(output) <= limit else self.answer(line)[0])
        return None

    def all_chosen(self, lines):
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.chosen, lines))


def grams(ids, n):
    return [tuple(ids[i:i + n]) for i in range(len(ids) - n + 1)]


def loop_share(prompt, output, n=8):
    """Share of the output's n-grams that repeat an earlier one and are not in the prompt."""
    known, seen, loops = set(grams(prompt, n)), set(), 0
    for gram in grams(output, n):
        loops += gram in seen and gram not in known
        seen.add(gram)
    return loops / max(1, len(grams(output, n)))


def copy_share(prompt, output, n=4):
    """Share of the output's n-grams that are in the prompt."""
    known = set(grams(prompt, n))
    return sum(gram in known for gram in grams(output, n)) / max(1, len(grams(output, n)))


def completion(prompt):
    return {"route": "completions", "body": {
        "model": MODEL, "prompt": prompt, "max_tokens": LIMIT, "temperature": 0}}


def chat(contents):
    return {"route": "chat", "body": {
        "model": MODEL, "messages": [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)],
        "max_tokens": LIMIT, "temperature": 0}}


class Texts:
    """Contents of the packages, in a fixed order."""

    def __init__(self, folder):
        self.files, self.pages = [], []  # (package, path, text)
        for name, version, _, sources, pages, _ in PACKAGES:
            root = folder / f"{name}-{version}"
            for path in sorted((root / sources).rglob("*.py")):
                if "test" not in path.relative_to(root).as_posix():
                    self.files.append((name, path.relative_to(root).as_posix(), path.read_text("utf-8")))
            for path in sorted((root / pages).rglob("*.rst")) if pages else ():
                if not re.search("history|changes|license|conduct|awesome|releasing", path.name):
                    self.pages.append((name, path.relative_to(root).as_posix(), path.read_text("utf-8")))
        names = {n for _, _, text in self.files for n in re.findall(r"\bdef ([a-z][a-z_]{3,15})\(", text)}
        self.names = sorted(names)

    def functions(self):
        """(module, name, source, docstring or None) of each function of a fitting size."""
        for _, path, text in self.files:
            lines, module = text.split("\n"), path.removeprefix("src/").removesuffix(".py").replace("/", ".")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    source = textwrap.dedent("\n".join(lines[node.lineno - 1:node.end_lineno]))
                    if source.isascii() and 300 <= len(source) <= 1000:
                        yield module, node.name, source, ast.get_docstring(node)

    def passages(self, low=300, high=800):
        """(package, path, title, text): whole paragraphs from the start of each section."""
        heading = re.compile(r"(?m)^(\S[^\n]{3,59})\n([-=~^\"'])\2{3,}\n")
        for package, path, text in self.pages:
            heads = list(heading.finditer(text))
            for i, head in enumerate(heads):
                body, passage = text[head.end():heads[i + 1].start() if i + 1 < len(heads) else None].strip(), ""
                for paragraph in re.split(r"\n\n+", body):
                    if paragraph.startswith(".. _") or len(passage) + len(paragraph) > high:
                        break
                    passage += paragraph.rstrip() + "\n\n"
                passage = re.sub(r"(\n\n\.\. [^\n]*)+$", "", passage.rstrip())
                plain = sum(c.isalpha() or c.isspace() for c in passage) > 0.85 * len(passage)
                if len(passage) >= low and passage.isascii() and plain and passage[0].isalpha():
                    yield package, path, head[1].strip("`"), passage


def often(text):
    """The words that may be renamed, the most frequent first."""
    words = [w for w in WORD.findall(text) if w not in COMMON]
    return sorted((w for w in set(words) if words.count(w) >= 2), key=lambda w: (-words.count(w), w))


def rename(text, old, new):
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def turns(texts, target):
    """Conversations about a function or a passage; half of the lines are the second requests."""
    rng = random.Random(f"{SEED} turns")
    begun = []
    for module, name, source, doc in texts.functions():
        summary = doc and re.sub(r"\s+", " ", doc.split("\n\n")[0]).rstrip(".")
        if doc and len(doc) >= 300 and len(doc) <= 800:
            begun.append((f"Explain `{module}.{name}`.", doc))
        elif summary:
            begun.append((f"Write a Python function `{name}`: {summary}.", source))
        else:
            begun.append((f"Show the function `{name}` of `{module}`.", source))
    begun += [(f"What does the documentation of {package} say about `{title}`?", passage)
              for package, _, title, passage in texts.passages()]
    rng.shuffle(begun)
    asks = ("Show the whole text again.", "Once more, please.", "Change that and show all of it.", "")
    found = []
    for question, answer in begun:
        words = often(answer)[:6]
        if len(words) < 2:
            continue
        old, other = rng.sample(words, 2)
        new, newer = rng.sample([n for n in texts.names if n not in answer], 2)
        lead, again = rng.sample(asks, 2)
        first = chat([question, answer, f"{lead}\n{REWRITE}rename {old} to {new}\n".lstrip("\n")])
        one = target.chosen(first, 0.7)  # it becomes part of the next request
        if not one or other not in one[1]:
            continue
        contents = [m["content"] for m in one[0]["body"]["messages"]]
        two = target.chosen(chat([*contents, one[1], f"{again}\n{REWRITE}rename {other} to {newer}\n".lstrip("\n")]))
        if two:
            found += [one[0], two[0]]
            print(f"turns: {len(found)}", flush=True)
        if len(found) >= COUNT:
            break
    return found[:COUNT]


TOOLS = '''You change a repository, one step at a time. Each step is a Thought, an Action and its Observation.
The actions are these functions:

def list_files(folder: str) -> list[str]:
    """Return the names of the Python files in a folder."""

def search(word: str, path: str) -> list[str]:
    """Return the lines of a file that hold a word, with their numbers."""

def read_file(path: str, first: int, last: int) -> str:
    """Return some lines of a file."""

def edit_file(path: str, first: int, last: int, text: str) -> str:
    """Replace some lines of a file by a text, given after the instruction."""

'''


class Task:
    """Renaming a word in a file, as the steps of an agent."""

    def __init__(self, package, path, text, old, new):
        lines, folder = text.split("\n"), path.rsplit("/", 1)[0]
        hits = [i for i, line in enumerate(lines) if re.search(rf"\b{old}\b", line)]
        self.head = f"{TOOLS}Task: rename {old} to {new} in {path} of {package}.\n\n"
        shown = "\n".join(f"{i + 1}: {lines[i].strip()}" for i in hits[:6])
        self.steps = [(f"I look where {old} is used.", f'search("{old}", "{path}")', None, shown)]
        last = -1
        for i in hits:
            if i <= last:
                continue
            first, end = i, i
            while first > max(last + 1, 0, i - 9) and lines[first - 1].strip():
                first -= 1
            while end + 1 < min(len(lines), i + 9) and lines[end + 1].strip():
                end += 1
            last, piece = end, textwrap.dedent("\n".join(lines[first:end + 1]))
            if not 120 <= len(piece) <= 700:
                continue
            place = f'"{path}", {first + 1}, {end + 1}'
            self.steps.append((f"I read lines {first + 1} to {end + 1} of {path}.", f"read_file({place})", None, piece))
            self.steps.append((f"I write lines {first + 1} to {end + 1} of {path}.", f"edit_file({place})",
                               f"{REWRITE}rename {old} to {new}\n{rename(piece, old, new)}",
                               f"wrote {end - first + 1} lines"))

    def prompt(self, k, tail):
        """The log before step k, and the beginning of that step."""
        log = "".join(f"Thought: {thought}\nAction: {action}\n" + (f"{given}\n" if given else "") +
                      f"Observation:\n{seen}\n\n" for thought, action, given, seen in self.steps[:k])
        thought, action, given, _ = self.steps[k]
        begin = {"thought": "Thought:", "action": f"Thought: {thought}\nAction:",
                 "text": f"Thought: {thought}\nAction: {action}\n" + (given or "").split("\n")[0] + "\n"}[tail]
        return self.head + log + begin


def agent(texts, target):
    """Two variants of each task, by the new name; the steps that both can use."""
    rng = random.Random(f"{SEED} agent")
    jobs = [(package, path, text, old) for package, path, text in texts.files
            for old in often(text) if "_" in old.strip("_") and text.isascii()
            and 3 <= len(re.findall(rf"\b{old}\b", text)) <= 8]
    rng.shuffle(jobs)
    halves, used = ([], []), {}
    for package, path, text, old in jobs:
        if used.get(path, 0) >= 2:
            continue
        kept, sets = {}, []
        names = rng.sample([n for n in texts.names if n not in text and "_" in n] or texts.names, 2)
        for new in names:
            task = Task(package, path, text, old, new)
            steps = range(2, min(len(task.steps), 9))
            tails = [(k, tail) for k in steps for tail in (("text",) if task.steps[k][2] else ("thought", "action"))]
            if sets:
                tails = [t for t in tails if t in sets[0]]
            lines = target.all_chosen([completion(task.prompt(*t)) for t in tails])
            sets.append({t: one[0] for t, one in zip(tails, lines) if one})
            if len(sets[-1]) < 2:
                break
        else:
            both = [t for t in sets[0] if t in sets[1]][:4]
            if len(both) >= 2:
                used[path] = used.get(path, 0) + 1
                for half, chosen in zip(halves, sets):
                    half += [chosen[t] for t in both]
                print(f"agent: {2 * len(halves[0])} {[t for t in both]} {path}", flush=True)
        if len(halves[0]) >= HALF:
            break
    return halves[0][:HALF] + halves[1][:HALF]


def retrieval(texts, target):
    """Three passages of one package, a question about one, an answer that begins to quote it."""
    rng = random.Random(f"{SEED} retrieval")
    by_package, groups, halves = {}, [], ([], [])
    for passage in texts.passages(high=700):
        by_package.setdefault(passage[0], []).append(passage)
    for passages in by_package.values():
        rng.shuffle(passages)
        groups += [passages[i:i + 3] for i in range(0, len(passages) - 2, 3)]
    rng.shuffle(groups)

    def quoting(order, asked):
        """The first form of the question that makes the target quote the passage, or None."""
        shown = "".join(f"[{n}] {package}, {path}: {title}\n\n{text}\n\n"
                        for n, (package, path, title, text) in enumerate(order, 1))
        package, _, title, text = asked
        question = f"{shown}Question: What does the documentation of {package} say about {title}?\n"
        answer, words = 'The documentation says: "', re.match(r"\S+(\s+\S+){0,5}", text)[0]
        three = re.match(r"\S+(\s+\S+){0,2}", text)[0]
        instruction = f"{REWRITE}quote passage {order.index(asked) + 1}\n"
        ways = (f"\nAnswer: {answer}", f"\nAnswer: {answer}{three}",
                f"{instruction}{answer}{three}", f"{instruction}{answer}{words}")
        known = target.tokens({"prompt": text})
        for one in target.all_chosen([completion(question + way) for way in ways]):
            # the requested passage, not another
            if one and copy_share(known, target.tokens({"prompt": one[1]})) >= COPIED:
                return one[0]
        return None

    for group in groups:
        got, left = [], list(group)
        for order in (group, group[1:] + group[:1]):
            for asked in [p for p in group if p in left] + [p for p in group if p not in left]:
                if line := quoting(order, asked):
                    got.append(line)
                    left.remove(asked) if asked in left else None
                    break
            else:
                break
        if len(got) == 2:
            for half, line in zip(halves, got):
                half.append(line)
            print(f"retrieval: {2 * len(halves[0])}", flush=True)
        if len(halves[0]) >= HALF:
            break
    return halves[0] + halves[1]


def measure(target, files):
    print("| workload | prompts | prompt tokens | output tokens | limits | 4-grams in the prompt | loops | ended by itself |")
    print("|---|---|---|---|---|---|---|---|")
    for file in files:
        lines = [json.loads(line) for line in open(file)]
        rows, ended = [], 0
        for line in lines:
            _, prompt, output, stopped = target.answer(line)
            ended += stopped
            rows.append((len(prompt), len(output), copy_share(prompt, output), loop_share(prompt, output)))
        mean = [sum(column) / len(rows) for column in zip(*rows)]
        limits = sorted(line["body"]["max_tokens"] for line in lines)
        print(f"| {pathlib.Path(file).stem} | {len(rows)} | {mean[0]:.0f} | {mean[1]:.1f} | {limits[0]} to {limits[-1]} | "
              f"{mean[2]:.3f} | {mean[3]:.3f} | {ended} |", flush=True)


def main():
    command, rest = sys.argv[1], sys.argv[2:]
    if command == "fetch":
        fetch(pathlib.Path(rest[0]))
    elif command == "measure":
        measure(Target(rest[0]), rest[1:])
    elif command == "make":
        texts, target, out = Texts(pathlib.Path(rest[0])), Target(rest[1]), pathlib.Path(rest[2])
        out.mkdir(parents=True, exist_ok=True)
        for make in (turns, agent, retrieval):
            if rest[3:] and make.__name__ not in rest[3:]:
                continue
            lines = make(texts, target)
            (out / f"{make.__name__}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            print(f"{make.__name__}: {len(lines)} chosen", flush=True)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
