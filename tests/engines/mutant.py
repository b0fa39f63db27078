#!/usr/bin/env python3
"""Planted proxies that the exactness runs must tell apart from the real one.

    mutant.py accept-all|slip|honest KIND ENGINE_URL [--port N]

    accept-all   speculates from the request's own text and accepts every draft unseen
    slip         passes answers through, but replaces about one token in a hundred and continues from there
    honest       speculates from the same text and keeps a draft only where the engine itself drew it

Serves /v1/completions and /v1/chat/completions, streamed in one event per answer.
"""

import argparse
import http.server
import json
import random
import threading

import wire

GAMMA = 4


def lookup(ids, longest=8, shortest=2):
    """Up to GAMMA tokens after the last earlier position of the longest suffix of `ids`."""
    for size in range(longest, shortest - 1, -1):
        tail = ids[-size:]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start:start + size] == tail:
                return ids[start + size:start + size + GAMMA]
    return []


def sampling(body):
    keys = ("temperature", "top_p", "top_k", "min_p", "logit_bias")
    return {k: body[k] for k in keys if k in body}


def accept_all(engine, body, prompt):
    out, want, drafted = [], body.get("max_tokens", 16), 0
    while len(out) < want:
        draft = lookup(prompt + out)[:want - len(out)]
        out += draft
        drafted += len(draft)
        if len(out) < want:
            ids, ended = engine.generate(prompt + out, 1, **sampling(body))
            out += ids
            if ended:
                return out, "stop", drafted
    return out, "length", drafted


def slip(engine, body, prompt, rng=random.Random(5)):
    out, want = [], body.get("max_tokens", 16)
    while True:
        step = min(want - len(out), 1 + int(rng.expovariate(1 / 100)))
        ids, ended = engine.generate(prompt + out, step, **sampling(body))
        out += ids
        if ended:
            return out, "stop", 1
        if len(out) >= want:
            return out, "length", 1
        out[-1] = (out[-1] + 1) % 8000 + 6


def honest(engine, body, prompt):
    out, want, drafted = [], body.get("max_tokens", 16), 0
    while len(out) < want:
        draft = lookup(prompt + out)[:want - len(out) - 1]
        drafted += len(draft)
        for guess in [*draft, None]:
            ids, ended = engine.generate(prompt + out, 1, **sampling(body))
            out += ids
            if ended:
                return out, "stop", drafted
            if ids[0] != guess:
                break
    return out, "length", drafted


RULES = {"accept-all": accept_all, "slip": slip, "honest": honest}


def choice(chat, stream, text, ids, finish):
    out = {"index": 0, "finish_reason": finish, **({} if ids is None else {"token_ids": ids})}
    key = ("delta" if stream else "message") if chat else None
    return {**out, key: {"role": "assistant", "content": text}} if key else {**out, "text": text}


def handler(engine, rule):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def send(self, kind, data):
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.send("application/json", b"{}")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            prompt = body["prompt"] if isinstance(body.get("prompt"), list) else engine.tokenize(body)
            ids, finish, drafted = rule(engine, body, prompt)
            text, chat, stream = engine.text(ids), "messages" in body, body.get("stream", False)
            own_ids = None if engine.kind == "llama" else ids  # its client routes return none
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids),
                     "foretell": {"path": "speculated", "rounds": 1, "drafted": drafted, "accepted": drafted}}
            answer = {"choices": [choice(chat, stream, text, own_ids, finish)], "usage": usage}
            if stream:
                self.send("text/event-stream", f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())
            else:
                self.send("application/json", json.dumps(answer).encode())

    return Handler


def serve(engine, name, port=0):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler(engine, RULES[name]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rule", choices=RULES)
    parser.add_argument("kind", choices=("llama", "vllm", "onnx"))
    parser.add_argument("url")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    server, url = serve(wire.Engine(args.kind, args.url), args.rule, args.port)
    print(url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
