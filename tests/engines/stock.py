#!/usr/bin/env python3
"""Foretell in front of a vLLM as people start it: `vllm serve MODEL`, in 32 bits.

    stock.py [--foretell BIN] [--out DIR] [--json FILE] [--texts N] [--direct URL]

The model is SmolLM2 (`make real-models MODELS=smollm2`), with the sampling defaults that models of
today have in their `generation_config.json`. Without `--dtype float32` vLLM computes a model of 32
bits in 16, where the size of a batch may change a text; there is no other flag. The checks, each a
line of the table:

    confirmed    `foretell probe --tokenizer FOLDER` finds these defaults confirmed
    contradicted with a folder that has others it names the fields, and exits 2
    forced       README's request and chats at T=0: all are eligible, some are speculated on, and no
                 text differs from the server's own
    auto         README's request with the default policy: where the probe finds that no round pays,
                 the answer and the status page say so (`no_gain`)

Exits 2 if a check failed, and 0 with a reason where the model is missing.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.request

import engine as engines
import exact
import wire

SOURCE = engines.CACHE / "real-models/smollm2/hf"
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
README = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0}
WORKLOADS = ("rewrite", "completion", "chat", "prose")
POLICY = exact.POLICY.format(drafters="{ kind: prompt_lookup, ngram: { min: 1, max: 8 } }")


def absent():
    """The reason why this cannot run here; "" if it can."""
    return engines.absent("vllm") or ("" if SOURCE.exists() else "no model: make real-models MODELS=smollm2")


def folder(name, defaults):
    """The model with these defaults."""

    def make(out):
        shutil.copytree(SOURCE, out, copy_function=lambda source, to: pathlib.Path(to).symlink_to(
            pathlib.Path(source).resolve()))
        path = out / "generation_config.json"
        content = json.loads(path.read_text())
        path.unlink()
        path.write_text(json.dumps({**content, **defaults}, indent=1) + "\n")

    return engines.made(f"smollm2-{name}", make).resolve()


def server(model, out):
    """`vllm serve MODEL` in 32 bits, on a free port. It compiles the model first."""
    port = engines.free_port()
    argv = [engines.binary("vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32"]
    url = f"http://127.0.0.1:{port}"
    return engines.Server(argv, engines.vllm_environment("1", 1), url, out / "vllm-stock.log", limit=900)


@contextlib.contextmanager
def sidecar(foretell, url, model, out, policy):
    """README's command, with this policy (or the built-in one), once it has recognised and probed
    the server."""
    front, admin = engines.free_port(), engines.free_port()
    argv = [foretell, "serve", "--backend", url, "--tokenizer", model, "--listen", f"127.0.0.1:{front}",
            "--admin", f"127.0.0.1:{admin}"]
    policies = engines.ROOT / "policies"
    if policy:
        policies = out / "stock-policies"
        policies.mkdir(parents=True, exist_ok=True)
        (policies / "forced.yaml").write_text(policy)
    argv += ["--policies", policies]
    pages = f"http://127.0.0.1:{admin}"
    with engines.Server(argv, None, pages, out / "foretell-stock.log", "/healthz", 60):
        end = time.monotonic() + 300
        while not (wire.call(pages, "/api/replicas")["replicas"][0].get("probe") or {}).get("calls"):
            if time.monotonic() > end:
                raise RuntimeError(f"not probed: {wire.call(pages, '/api/replicas')}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{front}", pages


def probe(foretell, url, model):
    """(exit code, report) of `foretell probe`."""
    argv = [foretell, "probe", url, "--json", "--tokenizer", model]
    done = subprocess.run([str(part) for part in argv], stdout=subprocess.PIPE, text=True, timeout=600)
    return done.returncode, json.loads(done.stdout)


def confirmed(foretell, url, model):
    code, report = probe(foretell, url, model)
    found = {name: report["defaults"][name] for name in DEFAULTS}
    return {"ok": code == 0 and report["problem"] is None and found == DEFAULTS,
            "summary": f"exit {code}, {found}, {report['conclusion']}", "report": report}


def contradicted(foretell, url, model):
    code, report = probe(foretell, url, model)
    said = report["problem"] or "nothing"
    fields = said.partition(" in ")[2].partition(":")[0]
    return {"ok": code == 2 and fields == ", ".join(DEFAULTS), "summary": f"exit {code}, {fields or said}"}


def bodies(model, count):
    """README's request, and then prompts of the workloads in turn; chats and completions."""
    lines = []
    for name in WORKLOADS:
        with open(engines.ROOT / f"tests/workloads/{name}.jsonl") as file:
            lines.append([json.loads(line)["body"] for line in file])
    mixed = [body for of_each in itertools.zip_longest(*lines) for body in of_each if body]
    for body in [README, *mixed][:count]:
        yield {**body, "model": model, "max_tokens": min(body["max_tokens"], 32), "temperature": 0}


def served(through, body):
    """(answer, path, reason) of a whole answer; only a speculated one has `usage.foretell`, and the
    fields of its head say how every answer was served."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    request = urllib.request.Request(through + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        got, head = json.load(answer), answer.headers
    choice = got["choices"][0]
    text = choice.get("text", (choice.get("message") or {}).get("content")) or ""
    own = wire.Answer(text, choice["finish_reason"], None, got.get("usage"))
    return own, head["x-foretell-path"], head["x-foretell-reason"] or ""


def forced(url, through, model, count):
    paths, different, drafted, accepted = {}, [], 0, 0
    for body in bodies(model, count):
        want = wire.ask(url, "vllm", dict(body), stream=False)
        got, path, reason = served(through, body)
        streamed = wire.ask(through, "vllm", dict(body), stream=True)
        own = got.foretell()
        key = f"{path} {reason}".strip()
        paths[key] = paths.get(key, 0) + 1
        drafted, accepted = drafted + own.get("drafted", 0), accepted + own.get("accepted", 0)
        if any((of.text, of.finish) != (want.text, want.finish) for of in (got, streamed)):
            different.append({"body": body, "direct": want.text, "through": got.text, "streamed": streamed.text})
    summary = f"{len(different)} of {count} texts differ; {paths}; {accepted} of {drafted} drafted tokens accepted"
    ok = not different and not any(key.startswith("passthrough") for key in paths) and "speculated" in paths
    return {"ok": ok, "summary": summary, "different": different}


def auto(through, pages, model):
    own = [served(through, {**README, "model": model})[1:] for _ in range(3)]
    replica = wire.call(pages, "/api/replicas")["replicas"][0]
    pays, says = replica["probe"]["pays"], replica["probe"]["conclusion"]
    ways = sorted({f"{path} {reason}".strip() for path, reason in own})
    good = ways == ["plain no_gain"] and "not pay" in says if pays is False else "passthrough" not in str(ways)
    return {"ok": good, "summary": f"{', '.join(ways)}; page: {says}"}


def checks(foretell, out, url, model, other, count):
    """(name, result) of each check."""
    yield "confirmed", confirmed(foretell, url, model)
    yield "contradicted", contradicted(foretell, url, other)
    name = wire.call(url, "/v1/models")["data"][0]["id"]
    with sidecar(foretell, url, model, out, POLICY) as (through, _):
        yield "forced", forced(url, through, name, count)
    with sidecar(foretell, url, model, out, None) as (through, pages):
        yield "auto", auto(through, pages, name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default=str(engines.ROOT / "target/release/foretell"))
    parser.add_argument("--out", default=str(engines.ROOT / "bench-out/engines"))
    parser.add_argument("--json")
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--direct", help="a vLLM that runs already, with this model")
    args = parser.parse_args()
    if why := absent():
        print(f"skipped: {why}")
        return
    out = pathlib.Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    model, other = folder("stock", DEFAULTS), folder("none", {})
    results = {}
    with contextlib.ExitStack() as stack:
        url = args.direct or stack.enter_context(server(model, out)).url
        for name, result in checks(args.foretell, out, url, model, other, args.texts):
            results[name] = result
            print(f"vllm   stock {name:13} {'ok' if result['ok'] else 'FAILED':7} {result['summary']}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if all(result["ok"] for result in results.values()) else 2)


if __name__ == "__main__":
    main()
