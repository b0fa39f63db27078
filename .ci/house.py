#!/usr/bin/env python3
"""The measures of the house: sizes, shapes and words of the sources.

    house.py [--list]

Product lines are `src/**/*.rs` without tests. Exits 1 where a figure is beyond its limit, and names
what is too large; `--list` names the largest in any case.
"""
import argparse, collections, pathlib, re, sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
TEST = re.compile(r"\s*(pub(\(.*\))? )?mod \w+ \{")

def product(path):
    """The lines of a file before its inline tests."""
    lines = path.read_text().split("\n")
    for n, line in enumerate(lines[:-1]):
        if line.strip() == "#[cfg(test)]" and TEST.match(lines[n + 1]):
            return lines[:n]
    return lines

def files():
    for path in sorted(SRC.rglob("*.rs")):
        if path.name != "tests.rs" and "tests" not in path.relative_to(SRC).parts:
            yield path

def blocks(lines, head):
    """(name, first line, lines inside) of each block that begins with `head`, by indentation."""
    n = 0
    for n, line in enumerate(lines):
        found = head.match(line)
        if not found or line.rstrip().endswith(";") : continue
        indent = len(line) - len(line.lstrip())
        k = n
        while k < len(lines) and not (lines[k].startswith(" " * indent + "}") or (k>n and lines[k].startswith(" "*indent+")"))): 
            if lines[k].startswith(" "*indent + ") ") and lines[k].rstrip().endswith("{"): pass
            if k == n and lines[k].rstrip().endswith("}"): break
            k += 1
        # a signature over several lines closes with `)` at the same indent
        if k < len(lines) and lines[k].startswith(" " * indent + ")"):
            j = k + 1
            if lines[k].rstrip().endswith("{") or True:
                while j < len(lines) and not lines[j].startswith(" " * indent + "}"): j += 1
                k = j
        yield found.group("name"), n + 1, lines[n + 1:k]

FN = re.compile(r"\s*(pub(\([^)]*\))? )?(const )?(async )?(unsafe )?fn (?P<name>\w+)")
STRUCT = re.compile(r"\s*(pub(\([^)]*\))? )?struct (?P<name>\w+)[^;(]*\{\s*$")
TRAIT = re.compile(r"\s*(pub(\([^)]*\))? )?trait (?P<name>\w+)[^;]*\{\s*$")
FIELD = re.compile(r"^\s*(pub(\([^)]*\))? )?(r#)?\w+: ")

def strongly(graph):
    index, low, stack, on, out, counter = {}, {}, [], set(), [], [0]
    sys.setrecursionlimit(10000)
    def visit(v):
        index[v] = low[v] = counter[0]; counter[0] += 1
        stack.append(v); on.add(v)
        for w in graph.get(v, ()):
            if w not in index: visit(w); low[v] = min(low[v], low[w])
            elif w in on: low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            comp = []
            while True:
                w = stack.pop(); on.discard(w); comp.append(w)
                if w == v: break
            if len(comp) > 1: out.append(sorted(comp))
    for v in list(graph):
        if v not in index: visit(v)
    return out

def module_of(path):
    parts = list(path.relative_to(SRC).with_suffix("").parts)
    if parts[-1] in ("lib", "main", "mod"): parts = parts[:-1]
    return tuple(parts)

def expand(tree):
    """`a::{b, c::{d}}` as plain paths."""
    tree = tree.strip()
    m = re.match(r"^((?:\w+::)*)\{(.*)\}$", tree, re.S)
    if not m: return [tree]
    parts, depth, cur = [], 0, ""
    for ch in m.group(2):
        if ch == "{": depth += 1
        if ch == "}": depth -= 1
        if ch == "," and depth == 0: parts.append(cur); cur = ""
        else: cur += ch
    parts.append(cur)
    return [m.group(1) + x for p in parts if p.strip() for x in expand(p)]

def graph(weak_parent=False):
    mods = {module_of(p): p for p in files()}
    # reexports and items
    text = {m: "\n".join(l.split("//")[0] for l in product(p)) for m, p in mods.items()}
    reexp = collections.defaultdict(dict)
    globs = collections.defaultdict(list)
    def absolute(m, path):
        parts = path.split("::")
        if parts[0] == "crate": return (m[0],) + tuple(parts[1:])
        if parts[0] == "self": return m + tuple(parts[1:])
        if parts[0] == "super":
            base = m
            while parts and parts[0] == "super": base = base[:-1]; parts = parts[1:]
            return base + tuple(parts)
        if m + (parts[0],) in mods: return m + tuple(parts)
        return None
    for m, t in text.items():
        for use in re.finditer(r"\bpub(?:\([^)]*\))? use ([^;]+);", t):
            for path in expand(re.sub(r"\s+", " ", use.group(1)).replace(" ", "") if " as " not in use.group(1) else use.group(1)):
                path, _, alias = path.partition(" as ")
                a = absolute(m, path.strip())
                if a:
                    if a[-1] == "*": globs[m].append(a[:-1])
                    else: reexp[m][alias.strip() or a[-1]] = a
    def resolve(path, depth=0):
        """the module that a path names or that defines its item"""
        if depth > 6: return None
        for k in range(len(path), 0, -1):
            if path[:k] in mods:
                m = path[:k]
                if k < len(path):
                    name = path[k]
                    if name in reexp[m]: return resolve(reexp[m][name] + path[k+1:], depth + 1) or m
                    for g in globs[m]:
                        if re.search(r"\bpub(\([^)]*\))? (\w+ )*%s\b" % re.escape(name), text.get(g, "")): return g
                return m
        return None
    out = collections.defaultdict(set)
    for m, t in text.items():
        body = re.sub(r"\bpub(?:\([^)]*\))? use ([^;]+);", "", t)
        paths = []
        for use in re.finditer(r"\buse ([^;]+);", body):
            s = re.sub(r"\s+as\s+\w+", "", use.group(1)); s = re.sub(r"\s+", "", s)
            paths += expand(s)
        rest = re.sub(r"\buse ([^;]+);", "", body)
        paths += re.findall(r"\b((?:crate|super|self)(?:::\w+)+)", rest)
        kids = [c[-1] for c in mods if c[:-1] == m]
        for kid in kids:
            paths += ["self::" + x for x in re.findall(r"(?<![\w:])(%s(?:::\w+)+)" % kid, rest)]
        for path in paths:
            a = absolute(m, path)
            if a and a[-1] == "*": a = a[:-1]
            if not a: continue
            r = resolve(a)
            if r and r != m: out[m].add(r)
    return out

def main():
    ap = argparse.ArgumentParser(); ap.add_argument("--list", action="store_true"); a = ap.parse_args()
    crates = collections.Counter(); big=[]; fns=[]; structs=[]; traits=[]; filt=0
    words = collections.Counter()
    for p in files():
        lines = product(p); n = len(lines)
        crates[p.relative_to(SRC).parts[0]] += n
        if n > 600: big.append((n, p))
        t = "\n".join(lines); filt += t.count(".filter(|_|")
        for name, at, inside in blocks(lines, FN):
            if len(inside) > 80: fns.append((len(inside), name, p))
        for name, at, inside in blocks(lines, STRUCT):
            ind = None
            fields = [l for l in inside if FIELD.match(l) ]
            if len(fields) > 20: structs.append((len(fields), name, str(p.relative_to(SRC))))
        for name, at, inside in blocks(lines, TRAIT):
            k = sum(1 for l in inside if re.match(r"    (async |const )*fn ", l))
            if k > 15: traits.append((k, name, str(p.relative_to(SRC))))
        for w in ("told","asked","held","left","whole","bound","own","place","heard","borne","kept","again","beside"):
            words[w] += len(re.findall(r"\b%s\b" % w, t))
    print(dict(crates)); print("files >600", big); print("fns", fns); print("structs", sorted(structs)); print("traits", traits); print("filter(|_|", filt); print(words)
    circ = strongly(graph())
    print("circles", len(circ))
    for c in circ: print("  ", len(c), ["::".join(x) for x in c][:14])
if __name__ == "__main__": main()
