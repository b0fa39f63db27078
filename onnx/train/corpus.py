"""Builds the training text from free software that package registries already carry.

Packages instead of a web crawl, because every byte has a known licence, a pinned version and a
stable location, so that `make models` gives the same text anywhere. The distribution is narrow on
purpose (Python code, its documentation, questions about it): a model of a few million parameters
must become predictable enough that a drafter can follow it.

Four pools of documents:
  code     whole Python files
  prose    reStructuredText and Markdown sources of documentation
  chat     question and answer, derived from docstrings, in the chat template
  rewrite  a piece of a file, a separator, an instruction, the same piece changed

Whole files are held out by a hash of their name: they are used for evaluation and the workloads of
the benchmark and are never trained on.

    corpus.py fetch DIR      download the packages into DIR/pkg
    corpus.py build DIR      write DIR/{train,held}/{code,prose,chat,rewrite}.jsonl
    corpus.py pack DIR TOKENIZER OUT   token ids as uint16 arrays
"""

import ast
import hashlib
import json
import keyword
import pathlib
import random
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile

import builtins

SEED = 20
END = "<|endoftext|>"
REWRITE = "<|rewrite|>"

# name, version, licence; wheels, because they need no build to be unpacked
WHEELS = [
    ("Django", "5.1.6", "BSD-3-Clause"),
    ("SQLAlchemy", "2.0.38", "MIT"),
    ("Twisted", "24.11.0", "MIT"),
    ("matplotlib", "3.10.1", "PSF-style"),
    ("networkx", "3.4.2", "BSD-3-Clause"),
    ("numpy", "2.2.3", "BSD-3-Clause"),
    ("pandas", "2.2.3", "BSD-3-Clause"),
    ("scikit-learn", "1.6.1", "BSD-3-Clause"),
    ("scipy", "1.15.2", "BSD-3-Clause"),
    ("statsmodels", "0.14.4", "BSD-3-Clause"),
    ("sympy", "1.13.3", "BSD-3-Clause"),
    ("xarray", "2025.1.2", "Apache-2.0"),
]
# Debian packages with documentation sources (_sources/*.rst.txt)
DEBS = [
    ("python3.11-doc", "PSF-2.0"),
    ("python-aiohttp-doc", "Apache-2.0"),
    ("python-jinja2-doc", "BSD-3-Clause"),
    ("python-pandas-doc", "BSD-3-Clause"),
    ("python-pytest-doc", "MIT"),
    ("python-skimage-doc", "BSD-3-Clause"),
    ("python-sklearn-doc", "BSD-3-Clause"),
    ("python-statsmodels-doc", "BSD-3-Clause"),
    ("python-tornado-doc", "Apache-2.0"),
    ("python-werkzeug-doc", "BSD-3-Clause"),
    ("python-xarray-doc", "Apache-2.0"),
    ("sphinx-doc", "BSD-2-Clause"),
]
SKIP = re.compile(r"_vendor|/site-packages/|lib2to3/tests|idlelib|/conf/locale/|unicodedata|encodings/|/pydoc_data/|parsetab|lextab|_generated|__pycache__")
HELD_PERCENT = 4


def fetch(root):
    """Downloads the pinned packages; the standard library comes with the interpreter."""
    pkg = root / "pkg"
    pkg.mkdir(parents=True, exist_ok=True)
    names = [f"{n}=={v}" for n, v, _ in WHEELS]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
         "--python-version", "3.11", "--implementation", "cp",
         "--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_17_x86_64",
         "--platform", "manylinux1_x86_64", "-d", str(pkg), *names], check=True)
    for name, _ in DEBS:
        if not list(pkg.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", name], cwd=pkg, check=True)
    for deb in sorted(pkg.glob("*.deb")):
        out = pkg / deb.name.split("_")[0]
        if not out.exists():
            subprocess.run(["dpkg", "-x", str(deb), str(out)], check=True)


def held(name):
    """True if a file is held out: by its name alone, so that it never depends on order."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_PERCENT


def clean(text):
    """Cleaned training text, or None: no tables of numbers, no very long lines."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    text = re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"
    if len(text) < 300 or not text.isascii() and sum(c > "\x7f" for c in text) > len(text) * 0.01:
        return None
    if max(map(len, text.split("\n"))) > 240:
        return None
    if sum(c.isdigit() for c in text) > len(text) * 0.12:
        return None
    return text


def python_files(root):
    """(name, text) of every Python source, sorted by package and name."""
    lib = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(lib.rglob("*.py")):
        name = "python/" + path.relative_to(lib).as_posix()
        if not SKIP.search(name) and "/test" not in name:
            yield name, path.read_text("utf-8", "replace")
    for want, _, _ in WHEELS:
        for wheel in sorted((root / "pkg").glob("*.whl")):
            if wheel.name.lower().split("-")[0].replace("_", "-") != want.lower():
                continue
            with zipfile.ZipFile(wheel) as archive:
                for info in sorted(archive.infolist(), key=lambda i: i.filename):
                    name = info.filename
                    if name.endswith(".py") and not SKIP.search(name) and info.file_size < 150_000:
                        yield name, archive.read(info).decode("utf-8", "replace")


def prose_files(root):
    for name, _ in DEBS:
        base = root / "pkg" / name
        for path in sorted(base.rglob("*")):
            if "_sources" in path.parts and path.suffix == ".txt":
                yield f"{name}/{path.name}", path.read_text("utf-8", "replace")


IDENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
COMMON = set(keyword.kwlist) | set(dir(builtins)) | {"self", "return", "import", "from", "args", "kwargs"}


def pieces(text, rng, low, high):
    """Cuts a file into pieces of low..high characters that begin at a blank line."""
    blocks, piece, want = re.split(r"\n\n+", text.strip("\n")), [], rng.randint(low, high)
    size = 0
    for block in blocks:
        if size and size + len(block) > want:
            yield "\n\n".join(piece)
            piece, size, want = [], 0, rng.randint(low, high)
        if len(block) <= high:
            piece.append(block)
            size += len(block) + 2
    if size > low:
        yield "\n\n".join(piece)


def rewrite(piece, names, rng):
    """(instruction, changed piece), or None where the piece offers no change."""
    if rng.random() < 0.75:
        counts = {}
        for word in IDENT.findall(piece):
            if word not in COMMON:
                counts[word] = counts.get(word, 0) + 1
        often = sorted(w for w, n in counts.items() if n >= 2)
        if not often:
            return None
        old, new = rng.choice(often), rng.choice(names)
        if new in counts:
            return None
        return f"rename {old} to {new}", re.sub(rf"\b{old}\b", new, piece)
    blocks = piece.split("\n\n")
    if len(blocks) < 3:
        return None
    i = rng.randrange(len(blocks) - 1)
    blocks[i], blocks[i + 1] = blocks[i + 1], blocks[i]
    return f"move block {i + 1} down", "\n\n".join(blocks)


def rewrite_document(piece, instruction, changed):
    return f"{piece}\n{REWRITE}{instruction}\n{changed}\n"


def chat_document(messages):
    """The same text as from chat_template.jinja, closed by the end of text."""
    parts = []
    for role, content in messages:
        parts.append(f"<|{role}|>\n{content}" + ("" if role == "assistant" else "<|end|>\n"))
    return "".join(parts)


def questions(name, text, rng):
    """Question and answer pairs from the docstrings of one file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    module = name.removesuffix(".py").replace("/", ".")
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        doc = ast.get_docstring(node)
        if not doc or not 60 <= len(doc):
            continue
        body = lines[node.lineno - 1:node.end_lineno]
        doc = "\n\n".join(p for p in doc[:900].split("\n\n")[:-1]) if len(doc) > 900 else doc
        if len(doc) < 60:
            continue
        what = "class" if isinstance(node, ast.ClassDef) else "function"
        first = body[0].strip().rstrip(":")
        source = textwrap.dedent("\n".join(body))
        kind = rng.randrange(4)
        if kind == 0:
            yield f"What does the {what} `{node.name}` in `{module}` do?", doc
        elif kind == 1:
            yield f"Document this {what}:\n\n{first}", doc
        elif kind == 2 and len(source) < 1100 and what == "function":
            summary = doc.split("\n\n")[0].replace("\n", " ").rstrip(".")
            yield f"Write a Python function `{node.name}`: {summary}.", source
        else:
            yield f"Explain `{module}.{node.name}`.", doc


def build(root):
    pools = {part: {k: [] for k in ("code", "prose", "chat", "rewrite")} for part in ("train", "held")}
    files, names, seen = [], set(), set()
    for name, text in python_files(root):
        text = clean(text)
        digest = text and hashlib.sha256(text.encode()).digest()
        if not text or digest in seen:
            continue
        seen.add(digest)
        files.append((name, text))
        names.update(re.findall(r"\bdef ([A-Za-z_][A-Za-z0-9_]{3,20})\(", text))
    names = sorted(names)
    prose = []
    for name, text in prose_files(root):
        text = clean(text)
        if not text or len(text) < 700:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            prose.append((name, text))
    for name, text in files:
        rng = random.Random(f"{SEED} {name}")
        pool = pools["held" if held(name) else "train"]
        pool["code"].append({"name": name, "text": text})
        if held(name) or rng.random() < 0.5:
            for question, answer in questions(name, text, rng):
                pool["chat"].append({"name": name, "text": chat_document(
                    [("user", question), ("assistant", answer)]), "question": question})
    for name, text in prose:
        pools["held" if held(name) else "train"]["prose"].append({"name": name, "text": text})
    for name, text in files + prose:
        rng = random.Random(f"{SEED} rewrite {name}")
        pool = pools["held" if held(name) else "train"]
        found = list(pieces(text, rng, 250, rng.choice((850, 850, 1700))))
        rng.shuffle(found)
        for piece in found[:4]:
            change = rewrite(piece, names, rng)
            if change:
                pool["rewrite"].append({"name": name, "text": rewrite_document(piece, *change),
                                        "prompt": f"{piece}\n{REWRITE}{change[0]}\n"})
    for part, pool in pools.items():
        (root / part).mkdir(exist_ok=True)
        for kind, docs in pool.items():
            random.Random(f"{SEED} {part} {kind}").shuffle(docs)
            with open(root / part / f"{kind}.jsonl", "w") as out:
                for doc in docs:
                    out.write(json.dumps(doc) + "\n")
            print(part, kind, len(docs), "documents", sum(len(d["text"]) for d in docs), "bytes", flush=True)


def pack(root, tokenizer_file, out):
    """Token ids, every document closed by the end-of-text token, with document offsets."""
    import numpy as np
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id(END)
    out.mkdir(parents=True, exist_ok=True)
    for part in ("held", "train"):
        for kind in ("rewrite", "chat", "prose", "code"):
            ids, offsets = [], [0]
            with open(root / part / f"{kind}.jsonl") as lines:
                texts = [json.loads(line)["text"] for line in lines]
            for start in range(0, len(texts), 500):
                for enc in tokenizer.encode_batch(texts[start:start + 500]):
                    ids.append(np.array([*enc.ids, end], np.uint16))
                    offsets.append(offsets[-1] + len(ids[-1]))
            np.savez(out / f"{part}-{kind}.npz", ids=np.concatenate(ids), offsets=np.array(offsets))
            print(part, kind, offsets[-1], "tokens", flush=True)


if __name__ == "__main__":
    command, root = sys.argv[1], pathlib.Path(sys.argv[2])
    if command == "fetch":
        fetch(root)
    elif command == "build":
        build(root)
    else:
        pack(root, pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4]))
