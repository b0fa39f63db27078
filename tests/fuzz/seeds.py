#!/usr/bin/env python3
"""Writes the seed corpus of every fuzz target from files of the repository.

These are answers recorded from real engines, policies, the config file, tokenizers and templates
of the bundled models.

    tests/fuzz/seeds.py FOLDER
"""
import json
import pathlib
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEPARATOR = b"\x1e"
DIALECTS = ["onnx", "vllm", "sglang", "llamacpp", "tgi", "trtllm", "triton", "lmdeploy", "openai", "ollama", "mlx"]
FAN_OUT, TREE, SCORE = 0, 1, 2
# Maximum bytes of a seed: mutations of long inputs are rarely useful.
MOST = 8192


def goldens():
    """(dialect, name, recorded exchange)"""
    for path in sorted((ROOT / "tests/goldens").rglob("*.json")):
        yield path.parent.name, path.stem, json.loads(path.read_text())


def body(recorded):
    answer = recorded.get("sse", recorded.get("body"))
    return (answer if isinstance(answer, str) else json.dumps(answer)).encode()


def events(sse):
    for line in sse.decode().splitlines():
        if line.startswith("data: {"):
            yield line.removeprefix("data: ").encode()


def fan_out(ids, index=0):
    choices = [{"index": at, "text": "a", "token_ids": [token], "finish_reason": "length"} for at, token in enumerate(ids)]
    return json.dumps({"choices": choices, "usage": {"prompt_tokens": 30, "completion_tokens": len(ids)}}).encode()


def verify():
    for dialect, name, recorded in goldens():
        answer = body(recorded)
        if dialect not in DIALECTS:
            continue
        number = DIALECTS.index(dialect)
        bodies = list(events(answer))[:3] if "sse" in recorded else [answer]
        method = SCORE if "logprob" in name or "generate" in name else FAN_OUT
        for draft in (1, 3):
            yield name, bytes([number, method, draft & 1, draft, draft & 1]) + SEPARATOR.join(bodies)
    for number, dialect in enumerate(DIALECTS):
        for nodes, ids in ((1, [7, 9]), (2, [7, 8, 9]), (3, [7, 8, 9, 10, 11])):
            yield f"fan-{dialect}", bytes([number, FAN_OUT, 0, nodes, 0]) + fan_out(ids)
    rows = [{"sample": 7}, {"sample": 8, "ends": True}, {"sample": 9}]
    yield "tree", bytes([0, TREE, 0, 2, 1]) + json.dumps({"rows": rows, "computed": 3}).encode()
    row = {"7": {"logprob": -0.1, "rank": 1}, "9": {"logprob": -3.0, "rank": 2}, "8": {"logprob": -4.5}, "6": {"logprob": -9.0}}
    scored = {"choices": [{"token_ids": [9], "finish_reason": "length"}], "prompt_logprobs": [None, row, row, row], "usage": None}
    for sampling in range(4):
        yield "scored", bytes([1, SCORE, 1, 2, sampling]) + json.dumps(scored).encode()


def stream():
    for dialect, name, recorded in goldens():
        if "sse" in recorded and dialect == "vllm":
            yield name, bytes(["chat" in name, 0, 0, 5]) + body(recorded)


def request():
    for dialect, name, recorded in goldens():
        asked = recorded.get("request", {})
        if asked.get("body") and "completions" in asked["path"]:
            for number in (1, DIALECTS.index(dialect) if dialect in DIALECTS else 3):
                yield name, bytes(["chat" in asked["path"], number]) + json.dumps(asked["body"]).encode()
    fields = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_p": 0.9,
              "seed": 7, "stop": ["a"], "max_tokens": 9, "logit_bias": {"5": -1.0}, "prediction": {"type": "content", "content": "b"}}
    yield "chat", b"\1\1" + json.dumps(fields | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}).encode()
    for api in ("messages", "responses"):
        for number, line in enumerate((ROOT / f"tests/goldens/{api}.jsonl").read_text().splitlines()):
            recorded = json.loads(line)
            asked = json.dumps(recorded["request"]) if "request" in recorded else "\n".join(recorded.get("stream", []))
            yield f"{api}-{number}", b"\1\1" + asked.encode()
    yield "plain", b"\0\1" + json.dumps(fields | {"prompt": [1, 2, 3], "top_k": -1, "min_p": 0, "user": "u"}).encode()


def small_tokenizer():
    """A byte-level vocabulary of a few tokens, in the form of the bundled one."""
    whole = json.loads((ROOT / "onnx/models/target/tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    few = {token: number for token, number in vocabulary.items() if number < 300}
    whole["model"]["vocab"] = few
    known = lambda merge: all(part in few for part in (merge if isinstance(merge, list) else merge.split(" ")))
    joined = lambda merge: "".join(merge if isinstance(merge, list) else merge.split(" "))
    whole["model"]["merges"] = [merge for merge in whole["model"].get("merges", []) if known(merge) and joined(merge) in few][:40]
    return whole


def tokenizer():
    small = small_tokenizer()
    text = "take the dog — über\n".encode()
    yield "byte-level", text + SEPARATOR + json.dumps(small, ensure_ascii=False).encode()
    word = {"version": "1.0", "added_tokens": [{"id": 3, "content": "</s>", "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False}], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "the": 1, "<unk>": 2}, "unk_token": "<unk>"}}
    yield "words", text + SEPARATOR + json.dumps(word).encode()
    metaspace = word | {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
                        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
                        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.0], ["<0x41>", -3.0]]}}
    yield "unigram", text + SEPARATOR + json.dumps(metaspace, ensure_ascii=False).encode()
    for path in sorted((ROOT / "onnx/models").rglob("tokenizer_config.json")):
        template = json.loads(path.read_text()).get("chat_template")
        if isinstance(template, str):
            yield path.parent.name, text + SEPARATOR + template.encode()
    loop = "{% for m in messages %}{{ m.role }}: {{ m['content'] | tojson(indent=2) }}{{ m.content.split('\\n')[0].strip() }}{% endfor %}"
    yield "loop", text + SEPARATOR + loop.encode()
    macro = "{% macro f(x) %}{{ x }}{% if x > 1 %}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(3) }}{{ raise_exception('no') }}"
    yield "macro", text + SEPARATOR + macro.encode()
    yield "range", text + SEPARATOR + b"{% set ns = namespace(a='') %}{% for i in range(9) %}{% set ns.a = ns.a ~ 'x' %}{% endfor %}{{ ns.a * 3 }}"


def wire():
    post = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{\"model\":\"m\"}"
    yield "get", b"\1GET /a?b=c HTTP/1.1\r\nhost: a\r\naccept: */*\r\n\r\n"
    yield "post", b"\1" + post
    yield "two", b"\1" + post + b"GET /b HTTP/1.1\r\nhost: a\r\n\r\n"
    chunked = b"POST /v1/files HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntrailer: x-a\r\n\r\n5;e=f\r\nhello\r\n0\r\nx-a: b\r\n\r\n"
    yield "chunked", b"\1" + chunked
    yield "both", b"\1POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    yield "folded", b"\1GET / HTTP/1.1\r\nhost: a\r\nx-a: b\r\n c\r\nconnection: x-a, keep-alive\r\n\r\n"
    yield "upgrade", b"\1GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    yield "expect", b"\1POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nhi"
    yield "absolute", b"\1GET http://b/c HTTP/1.1\r\nhost: a\r\ncookie: a=b\r\nx-foretell: off\r\n\r\n"
    # GET / to the authority "a", by entries of the static table and a literal field.
    block = bytes([0x82, 0x86, 0x84, 0x01, 0x01]) + b"a"
    headers = lambda stream, flags, block: len(block).to_bytes(3, "big") + bytes([1, flags]) + stream.to_bytes(4, "big") + block
    yield "h2-get", b"\0" + headers(1, 5, block)
    posted = bytes([0x83, 0x86, 0x84, 0x01, 0x01]) + b"a"
    data = b"\0\0\2\0\1\0\0\0\1hi"
    yield "h2-post", b"\0" + headers(1, 4, posted) + data
    yield "h2-ping", b"\0\0\0\10\6\0\0\0\0\0abcdefgh" + headers(1, 5, block) + headers(3, 5, block)


def session():
    # Rules (about 20 bytes), then events: the seed must contain both kinds of bytes.
    for method in range(6):
        for kind in range(4):
            head = bytes([0, kind, method, 0, 0, 0, 0, kind & 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0])
            step = bytes([10, 1, 0, 1, 3])
            yield f"{method}-{kind}", head + (step + bytes([0, 1, 0, 0])) * 30
            yield f"{method}-{kind}-mixed", head + b"".join(bytes([10, at % 16, at % 3, at % 8, at % 8, at % 24, 1, 0]) for at in range(40))


def snapshot():
    line = lambda **more: json.dumps({"model": "b/m", "vocabulary": "v", "tenant": "t", "owner": None, "age": 5,
                                      "ids": list(range(60))} | more).encode() + b"\n"
    yield "texts", b"\0" + line() + line(tenant=None, owner="t", ids=[1, 2, 3] * 30)
    yield "raw", b"\1" + b'{"version":1,"saved":0,"sha256":"00"}\n' + line()
    yield "learnt", b'\2{"now":1000000,"costs":{},"accounts":{},"engine_start":{}}'
    for number in range(16):
        yield "changed", b"\3" + b"".join(bytes([at, at * 7 % 256, at % 5, number, number]) for at in range(12))


def shared():
    acceptance = {"prompt_lookup": {"96": [7.5, 10.0]}, "model:small": {"0": [1.0, 2.0]}}
    rounds = {"gaps": 1.0, "tokens": {"0": [9.0, 9.0], "4": [30.0, 10.0]}, "modelled": {"4": [40.0, 10.0]}}
    model = {"acceptance": acceptance, "classes": [[["model:small", 0, 2**64 - 1], rounds]], "length": [2e3, 2.0]}
    key = {"method": 0, "size": 1, "concurrency": 2, "plain_neighbours": True}
    sums = {"0": [0.2, 8.0], "5": [0.1, 0.5]}
    costs = {"pace": sums, "verify": [[key, sums]], "undecided": sums, "switch_in": sums, "switch_out": {}}
    text = json.dumps([model, costs])
    yield "whole", text.encode()
    for figure in ("-1.0", "1e11", "1e300", "1e-300", "5e-324", "18446744073709551615"):
        yield "changed", text.replace("8.0", figure).encode()
        yield "changed", text.replace("10.0", figure).encode()


def exposition():
    said = {}
    for dialect, name, recorded in goldens():
        said.setdefault(dialect, {})[name] = body(recorded)
    for dialect, answers in sorted(said.items()):
        if dialect not in DIALECTS:
            continue
        names = ["models", "version", "metrics", "props", "slots", "completion_render_defaults", "server_info", "load"]
        bodies = [answers[name][:MOST // 2] for name in names if name in answers]
        for hint in (0, 1):
            yield f"{dialect}-{hint}", bytes([DIALECTS.index(dialect), hint, 0]) + SEPARATOR.join(bodies)
        for name in names:
            if name in answers:
                yield f"{dialect}-{name}", bytes([DIALECTS.index(dialect), 1, 0]) + answers[name]
    yield "metric", b"\1\1\0" + b'# HELP a:b x\na:b{c="d"} 2 1700000000\na:b NaN\nprocess_start_time_seconds 1e9\n'


def config():
    process = b"version: 1\nbackends:\n  - name: b\n    replicas: [\"http://127.0.0.1:1\"]\n"
    yield "process", (ROOT / "deploy/foretell.yaml").read_bytes()
    for path in sorted((ROOT / "policies").rglob("*.yaml")):
        yield path.stem, process + SEPARATOR + path.read_bytes()
    both = [path.read_bytes() for path in sorted((ROOT / "policies").rglob("*.yaml"))[:2]]
    yield "two", process + SEPARATOR + SEPARATOR.join(both)
    for table in ("bad-config.txt", "bad-policy.txt"):
        for at, case in enumerate((ROOT / "tests/unit/config" / table).read_text().split("=== ")[1:]):
            text = case.split("\n", 1)[1].split("--- errors")[0].encode()
            yield f"{table}-{at}", text if "process" in table else process + SEPARATOR + text


def admin():
    fields = b"authorization: Bearer k\nx-explain-authorization: a\nx-tenant: t\nconnection: close, x-a\nx-a: b\nte: trailers\n"
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    yield "explain", b"\0" + SEPARATOR.join([b"route=chat&peer=10.0.0.1&tenant=a%20b", body, fields])
    yield "six", b"\0" + SEPARATOR.join([b"peer=%3A%3A1&tenant=%C3%A9", b'{"prompt":[1]}', b""])
    for word in (b"off", b"plain", b"gamma=8", b"250ms", b"10MiB", b"lora-*", b"a?c*", b"*"):
        yield "word", b"\1" + word + SEPARATOR + b"lora-a"
    for net, address in ((b"10.0.0.0/8", b"10.1.2.3"), (b"::/0", b"::ffff:10.0.0.1"), (b"fe80::/10", b"fe80::1"), (b"1.2.3.4", b"1.2.3.4")):
        yield "net", b"\2" + net + SEPARATOR + address
    yield "fields", b"\3" + fields + b"content-encoding: gzip\nx-foretell: off\nx-foretell-corpus: off\n" + SEPARATOR + b"/v1/completions?x"


def parse():
    tools = ["hermes", "qwen3_coder", "llama3_json", "glm45", "kimi_k2", "minimax_m2", "deepseek_v3", "deepseek_v31",
             "deepseek_v32", "deepseek_v4", "openai", "mistral", None]
    reasoning = ["qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "deepseek_v4", "openai_gptoss",
                 "mistral", None]
    for path in sorted((ROOT / "tests/goldens/parsers").glob("*.json")):
        golden = json.loads(path.read_text())
        pair = golden["tools_parser"], golden["reasoning_parser"]
        if pair[0] not in tools or pair[1] not in reasoning:
            continue
        for case in golden["cases"][::4]:
            text = "".join(piece for _, piece in case["tokens"])
            yield path.stem, bytes([tools.index(pair[0]), reasoning.index(pair[1]), 6, 9]) + text.encode()


def drafts():
    def framed(kind, *parts):
        body = b"".join(parts)
        return struct.pack("<IB", 1 + len(body), kind) + body

    def ids(tokens):
        return struct.pack(f"<{len(tokens)}i", *tokens)

    text = [at % 9 for at in range(60)]
    row = framed(2, struct.pack("<IIfH", 1, 60, 0.0, 5), b"a-b-c")
    told = framed(3, struct.pack("<III", 1, 0, 60), ids(text))
    head = struct.pack("<QIIIHBH", 1, 20_000, 100, 0, 0, 0, 1)
    steps = [framed(4, head, struct.pack("<IHHHIH", 1, 0, 1, 8, 60, 0)),
             framed(4, head, struct.pack("<IHHHIH", 1, 4, 2, 8, 62, 2), ids([6, 7]))]
    yield "steps", row + told + steps[0] + steps[1] + framed(5, struct.pack("<HI", 1, 1)) + steps[0]
    yield "early", row + steps[0] + told + steps[1]


def main():
    folder = pathlib.Path(sys.argv[1])
    for target in (verify, stream, request, tokenizer, wire, session, snapshot, shared, exposition, config, admin, parse, drafts):
        out = folder / target.__name__
        out.mkdir(parents=True, exist_ok=True)
        for at, (name, seed) in enumerate(target()):
            (out / f"seed-{at:03}-{name.replace('/', '-')}").write_bytes(seed[:MOST])


if __name__ == "__main__":
    main()
