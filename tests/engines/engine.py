"""The real engines as the tests and benches start them: exports, command lines, start and end.

    plain      the bundled target in 32 bits, for exactness
    house      the same with an operator's settings: repetition_penalty 1.05 and temperature 0.7 as
               server defaults, and on vLLM a reasoning parser that moves text out of `content`
    parsers    vLLM with its own parsers, as in Qwen3 deployments: reasoning (qwen3) and tool calls
               (hermes); grammars hold within reasoning too, so that a request can make any text
               that a parser is to split
    inflated   the same function at the cost of a bigger model (onnx/export/inflate.py), for speed

Exports are in the cache under models/engines and are made once; the name of a model directory says
how it was made.
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import vllm_check

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = pathlib.Path(os.environ.get("FORETELL_CACHE", ROOT / ".cache"))
MODELS = CACHE / "models" / "engines"
NAME = "foretell-target"
ENGINES = ("llama", "vllm")
VARIANTS = ("plain", "house", "parsers", "inflated")
HOUSE = {"repetition_penalty": 1.05, "temperature": 0.7}
PARSERS = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
           "--structured-outputs-config", '{"enable_in_reasoning": true}')
# measured: a decode step of at least 60 ms on two cores (tests/engines/cost.py)
INFLATE = {"llama": (int(os.environ.get("LLAMA_DEPTH", "20")), int(os.environ.get("LLAMA_WIDTH", "4"))),
           "vllm": (int(os.environ.get("VLLM_DEPTH", "64")), int(os.environ.get("VLLM_WIDTH", "1")))}


# one thread is as fast on the plain model, and does not spin against a second one on shared cores
def threads(variant):
    return os.environ.get("ENGINE_THREADS", "2" if variant == "inflated" else "1")


def binary(engine):
    """The server's path; installs it if missing."""
    script = HERE / f"{engine}.sh"
    environment = {**os.environ, "FORETELL_CACHE": str(CACHE)}
    return subprocess.run([script], check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.strip()


def absent(engine):
    """The reason why the engine cannot run here, in words; "" if it can."""
    if engine == "vllm" and (lacking := vllm_check.lacking()):
        return "; ".join(lacking)
    path = {"llama": "llama-0.3.36/bin/llama-server", "vllm": "vllm-0.32.0/.installed"}[engine]
    return "" if (CACHE / "engines" / path).exists() else "not installed: make engines"


def inflate(model, out, form, depth=1, width=1, kind=None):
    packages = CACHE / "python"
    command = [sys.executable, ROOT / "onnx/export/inflate.py", "--model", model, "--out", out, "--format", form,
               "--depth", str(depth), "--width", str(width)] + (["--type", kind] if kind else [])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(packages)})


def made(name, make):
    """MODELS/name, made in another folder first so that an incomplete export is never used."""
    out = MODELS / name
    if not out.exists():
        new = MODELS / f"{name}.{os.getpid()}"
        shutil.rmtree(new, ignore_errors=True)
        make(new)
        new.rename(out)
    return out


def model(engine, variant="plain", source="target"):
    """The model that the engine loads: a folder for vLLM, a file for llama-server."""
    depth, width = INFLATE[engine] if variant == "inflated" else (1, 1)
    form, kind = ("gguf", "f16" if variant == "inflated" else "f32") if engine == "llama" else ("safetensors", None)
    variant = "plain" if variant == "parsers" else variant
    tail = f"{engine}-{variant}" if variant != "inflated" else f"{engine}-d{depth}-w{width}"
    folder = ROOT / "onnx/models" / source

    def make(out):
        inflate(folder, out, form, depth, width, kind)
        if engine == "vllm" and variant == "house":
            path = out / "generation_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **HOUSE}, indent=1) + "\n")

    out = made(f"{source}-{tail}", make)
    return out / "model.gguf" if engine == "llama" else out


def compiled():
    """vLLM's folder of compiled code for this processor; vllm.sh has filled it."""
    return CACHE.absolute() / "engines/vllm-0.32.0/compiled" / str(vllm_check.library(vllm_check.here()))


def llama_argv(path, port, cores):
    """Command of llama-server with a slot for each prompt of a fan-out."""
    return [binary("llama"), "-m", str(path), "--alias", NAME, "--host", "127.0.0.1", "--port", str(port), "-t", cores,
            "-c", "18432", "-np", "9", "-kvu", "--no-cache-idle-slots", "--metrics", "--no-webui"]


LLAMA_32_BITS = ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]


def vllm_argv(path, port, dtype):
    return [binary("vllm"), "serve", str(path), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", dtype, "--enforce-eager", "--block-size", "32", "--enable-scale-out",
            "--enable-prompt-tokens-details", "--max-logprobs", "-1"]


def vllm_environment(cores, cache_gb):
    return {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(cache_gb), "OMP_NUM_THREADS": cores, "TORCHINDUCTOR_CACHE_DIR": str(compiled())}


def zeroed(environment):
    """An environment in which glibc hands out zeros (docs/engines.md), unless STOCK_MALLOC is set.

    The rows of cached positions are uninitialised; if they contain NaN, the call is refused."""
    return environment if os.environ.get("STOCK_MALLOC") else {**environment, "MALLOC_PERTURB_": "255"}


def command(engine, variant, port, extra=()):
    """(argv, environment) of one server."""
    path = model(engine, variant)
    if engine == "llama":
        argv = llama_argv(path, port, threads(variant))
        if variant != "inflated":
            argv += LLAMA_32_BITS
        if variant == "house":
            argv += ["--repeat-penalty", str(HOUSE["repetition_penalty"]), "--repeat-last-n", "2048",
                     "--temp", str(HOUSE["temperature"])]
        return argv + list(extra), dict(os.environ)
    environment = vllm_environment(threads(variant), 2 if variant == "inflated" else 1)
    if variant == "inflated":
        environment = zeroed(environment)
    argv = vllm_argv(path, port, "bfloat16" if variant == "inflated" else "float32")
    if variant == "house":
        argv += ["--reasoning-parser-plugin", str(HERE / "parser_plugin.py"), "--reasoning-parser", "first_line"]
    if variant == "parsers":
        argv += PARSERS
    return argv + list(extra), environment


def free_port():
    """A port without a listener; servers of several runs must not collide."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def get(url, timeout=5):
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


def ended(number, _):
    sys.exit(128 + number)


class Server:
    """A process in its own group (vLLM is three), ended as a whole, also when this script is
    ended."""

    def __init__(self, argv, environment, url, log, health="/health", limit=300):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ended)
        pathlib.Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self.process = subprocess.Popen([str(a) for a in argv], env=environment, stdout=out,
                                            stderr=subprocess.STDOUT, start_new_session=True)
        self.url, self.log = url, log
        end = time.monotonic() + limit
        while True:
            try:
                get(url + health, 1)
                return
            except (KeyboardInterrupt, SystemExit):
                self.stop()
                raise
            except (OSError, urllib.error.URLError):
                if self.process.poll() is not None or time.monotonic() > end:
                    self.stop(signal.SIGKILL)
                    tail = pathlib.Path(log).read_text(errors="replace").splitlines()[-15:]
                    raise RuntimeError(f"{argv[0]} did not start; {log} ends:\n" + "\n".join(tail)) from None
                time.sleep(0.1)

    def stop(self, how=signal.SIGTERM):
        group = self.process.pid
        try:
            os.killpg(group, how)
            self.process.wait(timeout=20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def warm(url):
    """The call with log-probabilities for which vLLM compiles: 20 s and more without other
    answers."""
    body = {"model": NAME, "prompt": [6, 7], "max_tokens": 1, "temperature": 0, "logprobs": 1}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        json.load(answer)


def start(engine, variant, port, log, extra=()):
    """A server that is ready for every call of a session."""
    return ready(engine, *command(engine, variant, port, extra), port, log)


def ready(engine, argv, environment, port, log, limit=300):
    server = Server(argv, environment, f"http://127.0.0.1:{port}", log, limit=limit)
    if engine == "vllm":
        try:
            warm(server.url)
        except BaseException:
            server.stop()
            raise
    return server
