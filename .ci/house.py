#!/usr/bin/env python3
"""Sizes and shapes of the sources, against the limits below.

    house.py [--all]

Product lines are those of `src/**/*.rs` before the inline tests. Each figure has a limit, which is
what has been reached, and a goal. Prints what is beyond its limit, and then exits with 1; `--all`
prints every figure too. A limit may be lowered, and is raised only with a reason in the commit.
"""

import argparse
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
# (what has been reached, what is wanted)
LIMITS = {
    "product lines without lab": (88_200, 64_000),
    "product lines of a crate": (15_200, 14_000),
    "test lines": (61_200, 60_000),
    "words of documents": (40_000, 40_000),
    "product lines of a file": (600, 600),
    "lines of a function": (80, 80),
    "fields of a struct": (20, 20),
    "methods of a trait": (15, 15),
    "circles of files": (1, 0),
    "closures that ignore what they filter": (0, 0),
    "vague words": (95, 40),
}
VAGUE = set("told asked held left whole bound own place heard borne kept again beside".split())
INLINE_TESTS = re.compile(r"\s*(pub(\(.*\))? )?mod \w+ \{")
FUNCTION = re.compile(r"\s*(pub(\([^)]*\))? )?(const )?(async )?fn (?P<name>\w+)")
STRUCT = re.compile(r"\s*(pub(\([^)]*\))? )?struct (?P<name>\w+)[^;(]*\{\s*$")
TRAIT = re.compile(r"\s*(pub(\([^)]*\))? )?trait (?P<name>\w+)[^;]*\{\s*$")
FIELD = re.compile(r"\s*(pub(\([^)]*\))? )?(r#)?\w+: ")
METHOD = re.compile(r"    (const |async )*fn ")
# Structs of a command line or of a file of settings: a field for each flag, a field for each setting.
SETTINGS = re.compile(r"\b(cli|config|policy/settings)\b")
SKIPPED = {".cache", "target", "node_modules", ".git"}


def product(path):
    """The lines of a file before its inline tests."""
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines[:-1]):
        if line.strip() == "#[cfg(test)]" and INLINE_TESTS.match(lines[number + 1]):
            return lines[:number]
    return lines


def is_test(path):
    return path.name == "tests.rs" or "tests" in path.relative_to(SRC).parts


def sources():
    return [path for path in sorted(SRC.rglob("*.rs")) if not is_test(path)]


def blocks(lines, head):
    """(name, lines inside) of every block that begins with `head`, by the formatter's indentation."""
    for first, line in enumerate(lines):
        found = head.match(line)
        if not found or line.rstrip().endswith((";", "}")):
            continue
        indent = line[:len(line) - len(line.lstrip())]
        last = next((n for n in range(first + 1, len(lines)) if lines[n].startswith(indent + "}")), len(lines))
        yield found.group("name"), lines[first + 1:last]


def words(lines):
    """The vague words of names and comments, identifiers split at underscores and capitals."""
    for line in lines:
        split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", line)
        yield from (word for word in re.findall(r"[a-z]+", split.lower()) if word in VAGUE)


# --- imports ------------------------------------------------------------------------------------


def module(path):
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[:-1] if parts[-1] in ("lib", "main") else parts


def members(tree):
    """`a::{b, c::{d}}` as plain paths."""
    head, brace, inside = tree.partition("{")
    if not brace:
        return [tree]
    if "}" not in inside:  # `impl Trait + use<>` is no import
        return []
    depth, parts, part = 0, [], ""
    for char in inside[:inside.rindex("}")]:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += char
    return [head + path for part in [*parts, part] if part for path in members(part)]


class Imports:
    """Which file uses an item of which other file of its crate."""

    def __init__(self):
        self.text = {module(path): self.code(path) for path in sources()}
        self.exported, self.starred = collections.defaultdict(dict), collections.defaultdict(list)
        for at, text in self.text.items():
            for path, alias in self.uses(r"\bpub(?:\([^)]*\))? use ([^;]+);", text):
                if target := self.absolute(at, path):
                    if target[-1] == "*":
                        self.starred[at].append(target[:-1])
                    else:
                        self.exported[at][alias or target[-1]] = target

    @staticmethod
    def code(path):
        return "\n".join(line.split("//")[0] for line in product(path))

    @staticmethod
    def uses(pattern, text):
        for use in re.finditer(pattern, text):
            for path in members(re.sub(r"\s+as\s+", "@", use.group(1)).translate({32: None, 10: None})):
                path, _, alias = path.partition("@")
                yield path, alias

    def absolute(self, at, path):
        parts = path.split("::")
        if parts[0] == "crate":
            return (at[0], *parts[1:])
        if parts[0] == "self":
            return (*at, *parts[1:])
        while parts and parts[0] == "super":
            at, parts = at[:-1], parts[1:]
            if parts and parts[0] != "super":
                return (*at, *parts)
        return (*at, *parts) if parts and (*at, parts[0]) in self.text else None

    def file(self, path, depth=0):
        """The module that a path names, or that defines its item."""
        at = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self.text), None)
        if at is None or at == path or depth > 6:
            return at
        name = path[len(at)]
        if name in self.exported[at]:
            return self.file((*self.exported[at][name], *path[len(at) + 1:]), depth + 1) or at
        defined = re.compile(rf"\bpub(\([^)]*\))? (\w+ )*{re.escape(name)}\b")
        return next((star for star in self.starred[at] if defined.search(self.text.get(star, ""))), at)

    def graph(self):
        """Edges between files. What a child uses of the files above it is not one: they are its home."""
        edges = collections.defaultdict(set)
        for at, text in self.text.items():
            private = re.sub(r"\bpub(?:\([^)]*\))? use [^;]+;", "", text)
            rest = re.sub(r"\buse [^;]+;", "", private)
            paths = [path for path, _ in self.uses(r"\buse ([^;]+);", private)]
            paths += re.findall(r"\b((?:crate|super|self)(?:::\w+)+)", rest)
            children = [known[-1] for known in self.text if known[:-1] == at]
            for child in children:
                paths += ["self::" + path for path in re.findall(rf"(?<![\w:])({child}(?:::\w+)+)", rest)]
            for path in paths:
                target = self.absolute(at, path)
                target = target and self.file(target[:-1] if target[-1] == "*" else target)
                if target and at[:len(target)] != target:
                    edges[at].add(target)
        return edges


def circles(edges):
    """The strongly connected components of more than one file."""
    order, seen = [], set()

    def visit(node, graph, out):
        stack = [(node, iter(graph.get(node, ())))]
        seen.add(node)
        while stack:
            at, rest = stack[-1]
            following = next((n for n in rest if n not in seen), None)
            if following is None:
                out.append(stack.pop()[0])
            else:
                seen.add(following)
                stack.append((following, iter(graph.get(following, ()))))

    for node in list(edges):
        if node not in seen:
            visit(node, edges, order)
    backward = collections.defaultdict(set)
    for at, targets in edges.items():
        for target in targets:
            backward[target].add(at)
    seen.clear()
    for node in reversed(order):
        if node not in seen:
            component = []
            visit(node, backward, component)
            if len(component) > 1:
                yield sorted("::".join(at) for at in component)


# --- figures ------------------------------------------------------------------------------------


def figures():
    """(name, value, where) of every figure; `where` names what is beyond a limit."""
    crates, vague, ignoring = collections.Counter(), collections.Counter(), 0
    for path in sources():
        lines = product(path)
        where = str(path.relative_to(ROOT))
        crates[path.relative_to(SRC).parts[0]] += len(lines)
        yield "product lines of a file", len(lines), where
        yield from (("lines of a function", len(inside), f"{where} {name}")
                    for name, inside in blocks(lines, FUNCTION))
        yield from (("methods of a trait", sum(map(bool, map(METHOD.match, inside))), f"{where} {name}")
                    for name, inside in blocks(lines, TRAIT))
        if not SETTINGS.search(where):
            yield from (("fields of a struct", sum(map(bool, map(FIELD.match, inside))), f"{where} {name}")
                        for name, inside in blocks(lines, STRUCT))
        ignoring += sum(line.count(".filter(|_|") for line in lines)
        vague.update(words(lines))
    yield from (("product lines of a crate", lines, crate) for crate, lines in crates.items())
    yield "product lines without lab", sum(crates.values()) - crates["lab"], ""
    inline = sum(path.read_text().count("\n") - (0 if is_test(path) else len(product(path)) - 1)
                 for path in SRC.rglob("*.rs"))
    yield "test lines", inline + sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.rs")), ""
    pages = [path for path in ROOT.rglob("*.md") if not SKIPPED & set(path.relative_to(ROOT).parts)]
    yield "words of documents", sum(len(path.read_text().split()) for path in pages), ""
    found = list(circles(Imports().graph()))
    yield "circles of files", len(found), "; ".join(" ".join(circle) for circle in found)
    yield "closures that ignore what they filter", ignoring, ""
    yield "vague words", sum(vague.values()), ", ".join(f"{word} {count}" for word, count in vague.most_common())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every figure, with its largest five")
    args = parser.parse_args()
    by_name = collections.defaultdict(list)
    for name, value, where in figures():
        by_name[name].append((value, where))
    beyond = False
    for name, (limit, goal) in LIMITS.items():
        largest = sorted(by_name[name], reverse=True)
        over = [entry for entry in largest if entry[0] > limit]
        beyond |= bool(over)
        shown = over or ([entry for entry in largest if entry[0] > goal] or largest[:1] if args.all else [])
        for value, where in shown:
            mark = f"beyond {limit}" if value > limit else f"goal {goal}"
            print(f"{name}: {value}, {mark}" + (f": {where}" if where else ""))
    if not beyond:
        print("sizes and shapes are within their limits")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
