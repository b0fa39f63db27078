"""HTTP to an engine or to Foretell in front of it, with the differences between the engines."""

import functools
import http.client
import json
import pathlib
import threading
import time
import urllib.parse

_connections = threading.local()


BUNDLED = pathlib.Path(__file__).resolve().parent.parent.parent / "onnx/models/target/tokenizer.json"


@functools.cache
def special(path=BUNDLED):
    """Ids of a tokenizer's special tokens."""
    return {token["id"] for token in json.loads(path.read_text())["added_tokens"] if token["special"]}


class Refused(Exception):
    """The server answered with an error status."""


def _connection(url, fresh=False):
    pool = _connections.__dict__.setdefault("pool", {})
    address = urllib.parse.urlsplit(url).netloc
    if fresh or address not in pool:
        pool[address] = http.client.HTTPConnection(address, timeout=300)
    return pool[address]


def call(url, path, body=None, headers=None):
    """The JSON answer of one call (text where it is not JSON), over a kept connection."""
    data = None if body is None else json.dumps(body).encode()
    for attempt in (False, True):
        connection = _connection(url, attempt)
        try:
            connection.request("GET" if body is None else "POST", path, data,
                               {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            text = answer.read().decode()
            break
        except (http.client.HTTPException, OSError):
            connection.close()
            if attempt:
                raise
    if answer.status >= 400:
        raise Refused(f"{answer.status} from {url}{path}: {text[:300]}")
    return json.loads(text) if "json" in (answer.getheader("content-type") or "") else text


class Stream:
    """One streamed answer: iterate over (seconds since the request, event); `close` drops the
    connection."""

    def __init__(self, url, path, body):
        self.connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=300)
        self.began = time.perf_counter()
        self.connection.request("POST", path, json.dumps({**body, "stream": True}).encode(),
                                {"content-type": "application/json"})
        self.answer = self.connection.getresponse()
        if self.answer.status >= 400:
            raise Refused(f"{self.answer.status}: {self.answer.read().decode()[:300]}")
        self.done = False

    def __iter__(self):
        for line in self.answer:
            if line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"data: "):
                yield time.perf_counter() - self.began, json.loads(line[6:])

    def close(self):
        sock = self.connection.sock
        if sock is not None:
            sock.close()
        self.connection.close()


class Answer:
    """A client's answer: text, finish reason, ids if returned, usage, seconds to the first text."""

    def __init__(self, text, finish, ids, usage, first=None):
        self.text, self.finish, self.ids, self.usage, self.first = text, finish, ids, usage or {}, first

    def foretell(self):
        return self.usage.get("foretell", {})


class Engine:
    """An engine's own routes by ids, and the client's routes, which Foretell serves too.

    `kind` is llama, vllm or onnx; onnx (`foretell target`) has vLLM's shapes.
    """

    def __init__(self, kind, url, model="foretell-target", tokenizer=BUNDLED):
        self.kind, self.url, self.model, self.tokenizer = kind, url, model, tokenizer

    def tokenize(self, body):
        """Ids of a client's body, chat template applied by the engine."""
        if self.kind == "llama":
            text = body.get("prompt")
            if text is None:
                text = call(self.url, "/apply-template", {"messages": body["messages"]})["prompt"]
            return call(self.url, "/tokenize", {"content": text})["tokens"]
        asked = {"messages": body["messages"], "add_generation_prompt": True} if "messages" in body else {
            "prompt": body["prompt"]}
        return call(self.url, "/tokenize", {"model": self.model, **asked})["tokens"]

    def words(self, text):
        """Ids of a bare text, without special tokens."""
        asked = {"content": text} if self.kind == "llama" else {"model": self.model, "prompt": text,
                                                                  "add_special_tokens": False}
        return call(self.url, "/tokenize", asked)["tokens"]

    def detokenize(self, ids):
        if not ids:
            return ""
        if self.kind == "llama":
            return call(self.url, "/detokenize", {"tokens": ids})["content"]
        return call(self.url, "/detokenize", {"model": self.model, "tokens": ids})["prompt"]

    def text(self, ids):
        """The client's text: both engines leave special tokens out of the text, but not out of the
        ids."""
        return self.detokenize([i for i in ids if i not in special(self.tokenizer)])

    def generate(self, ids, count, **sampling):
        """(ids, True if it ended by itself) of a continuation of `ids`, by the engine's token
        route."""
        if self.kind == "llama":
            body = {"prompt": ids, "n_predict": count, "return_tokens": True,
                    "response_fields": ["tokens", "stop_type"], **sampling}
            got = call(self.url, "/completion", body)
            return got["tokens"], got["stop_type"] == "eos"
        body = {"model": self.model, "prompt": ids, "max_tokens": count, "return_token_ids": True, **sampling}
        choice = call(self.url, "/v1/completions", body)["choices"][0]
        return choice["token_ids"], choice["finish_reason"] == "stop"

    def gap(self, ids):
        """Difference of the two best logits after `ids`."""
        if self.kind == "llama":
            body = {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": 2}
            top = [x["logprob"] for x in call(self.url, "/completion", body)["completion_probabilities"][0]["top_logprobs"]]
        else:
            body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 2}
            top = list(call(self.url, "/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0].values())
        top = sorted(top, reverse=True)
        return top[0] - top[1] if len(top) > 1 else float("inf")

    def load(self):
        """(requests running or waiting, KV usage or None) by the engine's own metrics."""
        names = {"vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
                 "llama": ("llamacpp:requests_processing", "llamacpp:requests_deferred", None),
                 "onnx": ("foretell_target_requests_running", "foretell_target_requests_waiting",
                          "foretell_target_kv_usage_ratio")}[self.kind]
        found = {}
        for line in call(self.url, "/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in names:
                found[name] = found.get(name, 0.0) + float(value)
        missing = [n for n in names if n and n not in found]
        if missing:
            raise Refused(f"{self.url}/metrics lacks {missing}")
        return found[names[0]] + found[names[1]], found.get(names[2])


def ask(url, kind, body, stream):
    """A client's completion or chat request at `url`, which may be an engine or Foretell."""
    body = {k: v for k, v in body.items() if k != "route"}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if kind != "llama":
        body["return_token_ids"] = True
    if not stream:
        got = call(url, path, body)
        choice = got["choices"][0]
        text = choice.get("text", (choice.get("message") or {}).get("content")) or ""
        return Answer(text, choice["finish_reason"], choice.get("token_ids"), got.get("usage"))
    text, ids, finish, usage, first = "", [], None, {}, None
    events = Stream(url, path, {**body, "stream_options": {"include_usage": True}})
    for seconds, event in events:
        if "error" in event:
            raise Refused(f"error event: {event}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice.get("text", (choice.get("delta") or {}).get("content")) or ""
            if first is None and (piece or choice.get("token_ids")):
                first = seconds
            text += piece
            ids += choice.get("token_ids") or []
            finish = choice.get("finish_reason") or finish
    events.close()
    return Answer(text, finish, ids or None, usage, first)
