"""Servers of the real models, and Foretell in front of them."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "engines"))

import engine as engines  # noqa: E402
import exact  # noqa: E402
import sides  # noqa: E402
import speed  # noqa: E402
import wire  # noqa: E402

CORES = os.environ.get("ENGINE_THREADS", "2")
CONTEXT = 4096
# requests that `foretell target` computes concurrently
LANES = 4
REAL = engines.CACHE / "real-models"
PROMPTS, BFCL = REAL / "prompts", REAL / "bfcl"
# a processor without instructions for it computes in bfloat16 ten times slower than in 32 bits
SHORT = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(pathlib.Path("/proc/cpuinfo").read_text().split()) else "float32"
THINKING = ("--reasoning-parser", "qwen3", "--chat-template", REAL / "agent/hf/reasoning.jinja")
# by engine and model: the usual form of an operator, and the form in 32 bits
MODELS = {
    ("onnx", "smollm2"): ("smollm2/onnx", "smollm2/onnx"),
    ("vllm", "smollm2"): ("smollm2/hf", "smollm2/hf"),
    ("llama", "smollm2"): ("smollm2/model.gguf", "smollm2/f32/model.gguf"),
    ("vllm", "qwen"): ("qwen/hf", "qwen/hf"),
    # at 7 GB in 32 bits a step takes half a second: the quantised weights, with a cache in 32 bits
    ("llama", "qwen"): ("qwen/model.gguf", "qwen/model.gguf"),
    ("onnx", "fixture"): ("agent/onnx", "agent/onnx"),
    ("vllm", "fixture"): ("agent/hf", "agent/hf"),
}
TOKENIZERS = {model: REAL / folder / "hf/tokenizer.json" for model, folder in
              (("smollm2", "smollm2"), ("qwen", "qwen"), ("fixture", "agent"))}
MADE_BY = {"fixture": "make real-fixture"}
HERMES = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
# the costs of a large model, at steps so long that a verify request on two busy cores fits in them
PACE = "step=200ms,base=1.35,node=0.025"
# arguments of a server whose speed with tools is measured
WITH_TOOLS = {("onnx", "fixture"): ("--tool-parser", "hermes", "--pace", PACE), ("vllm", "fixture"): HERMES}
# a policy that speculates at every token, with a draft of 4
FORCED = "version: 1\nname: forced\ndrafters: [{ kind: prompt_lookup }]\ngamma: { fixed: 4 }\nholdback: { start: 0, floor: 0 }\n"
ENGINES = {"llama": "llamacpp"}
# seconds: a machine with other work must not end a run
STARTED_WITHIN, PROBED_WITHIN = 900, 600
LOOKUPS = sides.DRAFTERS["lookups"]
# for requests with tools: the lookups over the texts of all requests, and the tools' own schemas
AGENT = f"{sides.LOOKUP}, {{ kind: suffix, scope: global, i_accept_sharing: true }}, {{ kind: phrasebook }}"
HEADS = {"head": "{ kind: head }", "lookups, head": f"{LOOKUPS}, {{ kind: head }}"}
OTHERS = {"draft-other": sides.BUNDLED["draft-other"], "minimind2": REAL / "minimind2"}


def absent(kind, model):
    """The reason why the pair cannot run here, in words; "" if it can."""
    if not (REAL / MODELS[kind, model][0]).exists() or not PROMPTS.exists():
        return f"not there: {MADE_BY.get(model, 'make real-models')}"
    return "" if kind == "onnx" else engines.absent(kind)


def lacks_bfcl():
    return "" if BFCL.exists() else "no questions with right answers: make real-models"


def start(kind, model, foretell, out, precise=False, extra=(), label=""):
    """A server of the pair that is ready; `precise`: in 32 bits, `label`: part of the log's name."""
    port, path = engines.free_port(), REAL / MODELS[kind, model][precise]
    log = out / f"{kind}-{model}{'-32' if precise else ''}{label}.log"
    if kind == "onnx":
        argv = [foretell, "target", "--model", path, "--name", engines.NAME, "--listen", f"127.0.0.1:{port}",
                "--context", str(CONTEXT), "--threads", CORES]
        argv += [] if "--lanes" in extra else ["--lanes", str(LANES)]
        return engines.Server(argv + list(extra), None, f"http://127.0.0.1:{port}", log)
    if kind == "llama":
        argv = engines.llama_argv(path, port, CORES) + (engines.LLAMA_32_BITS if precise else [])
        return engines.ready(kind, argv + list(extra), None, port, log, STARTED_WITHIN)
    argv = engines.vllm_argv(path, port, "float32" if precise else SHORT) + ["--max-model-len", str(CONTEXT)]
    environment = engines.zeroed(engines.vllm_environment(CORES, 1))
    return engines.ready(kind, argv + list(extra), environment, port, log, STARTED_WITHIN)


def engine(kind, model, server):
    return wire.Engine(kind, server.url, tokenizer=TOKENIZERS[model])


def address_of(server):
    return server.url.removeprefix("http://")


def drafters(model, names):
    """The lookups, followed by the named models with another vocabulary."""
    return ", ".join([AGENT if model == "fixture" else LOOKUPS, *(f"{{ kind: model, model: {name}, vocabulary: slem }}" for name in names)])


def start_proxy(stack, kind, model, server, foretell, setting, others=(), kinds=None):
    """Foretell with the lookups in front of a server, once its probe has ended, if it probes."""
    backend = f"    engine: {ENGINES.get(kind, kind)}\n" + exact.VERIFY.get(kind, "")
    if kind != "onnx":
        parsers = ", parsers: { tools: hermes }" if model == "fixture" else ""
        backend += f"    models: [{{ id: {engines.NAME}, tokenizer: {TOKENIZERS[model]}{parsers} }}]\n    probe: {{ within: 2m }}\n"
    policies = {"real": sides.policy("real", kinds or drafters(model, others), setting)}
    proxy = sides.start_proxy(stack, foretell, address_of(server), backend, policies, setting,
                              models={name: OTHERS[name] for name in others})
    print(f"{kind}, {model}, {sides.named(setting)}: {speed.probed(proxy, PROBED_WITHIN)['conclusion']}", flush=True)
    return proxy
