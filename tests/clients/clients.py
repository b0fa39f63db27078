#!/usr/bin/env python3
"""Agent frameworks in front of Foretell: which of their calls are eligible, and do users notice?

    clients.py [--server target|vllm] [--foretell BIN]

Every call of frameworks.py is made twice, direct and through Foretell, which speculates at every token in
drafts of 4. What the user gets must be the same, errors included, and path, reason and parameter of
each request those of PASSTHROUGH: a call that it does not name is eligible. `target` is
`foretell target` with the bundled model, `vllm` the engine with SmolLM2 of `make real-models`, both
with the tool parser `hermes`. Prints one line per call and the share, exits 1 if one is otherwise.

Needs the packages of requirements.txt, and of node/package-lock.json where there is Node:
`make test-clients` installs them.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/bench"))

import frameworks  # noqa: E402
import real_servers as servers  # noqa: E402
import sides  # noqa: E402

# (framework, call): reason and parameter for which its requests are passed through
PASSTHROUGH = {
    ("openai-python", "n"): ("choices", "n"),
    ("openai-python", "responses, a stored one"): ("parameter", "previous_response_id"),
    ("anthropic", "an error"): ("route", None),
}
# vLLM has the API itself, so what is not translated is passed on to it.
PASSED = {("anthropic", "an error"): ("parameter", "messages[0].content[0]")}
# Sampled, without a seed: only the number of choices is compared.
SAMPLED = {("openai-python", "n")}


def got(function):
    """What the user gets: the result, or the error."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  (whatever a framework raises)
        return f"{type(error).__name__}: {error}"


def requests(proxy, after):
    """The requests since number `after`, oldest first. One is listed once its answer has ended here, too."""
    for _ in range(50):
        listed = json.loads(sides.page(f"127.0.0.1:{proxy.admin}", "/api/sessions?rounds=no"))["sessions"]
        if made := sorted((one for one in listed if one["number"] > after), key=lambda one: one["number"]):
            return made
        time.sleep(0.04)
    return []


def told(request):
    """("path reason", passthrough reason and parameter or None) of a request."""
    reason = request.get("reason")
    words = f"{request['path']} ({reason})" if reason else request["path"]
    return words, (reason, request.get("parameter")) if request["path"] == "passthrough" else None


@contextlib.contextmanager
def target(foretell, port):
    argv = [foretell, "target", "--model", ROOT / "onnx/models/target", "--name", "toy", "--listen", f"127.0.0.1:{port}",
            "--tool-parser", "hermes", "--log-level", "error"]
    with sides.running(argv, stdout=-1, text=True) as process:
        process.stdout.readline()  # ready
        yield f"127.0.0.1:{port}"


def start(stack, args):
    """(address, model, lines of the config file) of the server."""
    if args.server == "target":
        return stack.enter_context(target(args.foretell, sides.free_port())), "toy", "    probe: { when: never }\n"
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    server = stack.enter_context(servers.start("vllm", "smollm2", args.foretell, folder, True, servers.HERMES))
    name = servers.engines.NAME
    return servers.address_of(server), name, (
        f"    models: [{{ id: {name}, tokenizer: {servers.TOKENIZERS['smollm2']}, parsers: {{ tools: hermes }} }}]\n"
        "    verify: { allow: [fan_out, score] }\n    probe: { when: never }\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", choices=("target", "vllm"), default="target")
    parser.add_argument("--foretell", default=str(ROOT / "target/dist/foretell"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    wrong, may, total, last = [], 0, 0, 0
    with contextlib.ExitStack() as stack:
        address, model, backend = start(stack, args)
        backend += "    routes: { messages: translate, responses: translate }\n"
        proxy = sides.start_proxy(stack, args.foretell, address, backend, {"forced": servers.FORCED}, "forced")
        for framework, make in frameworks.FRAMEWORKS.items():
            if reason := frameworks.absent(framework):
                print(f"{framework}: skipped, {reason}", flush=True)
                continue
            direct, through = make(f"http://{address}", model), make(f"http://{proxy.address}", model)
            for name in direct:
                want, have = got(direct[name]), got(through[name])
                made = requests(proxy, last)
                last = made[-1]["number"] if made else last
                words, reasons = zip(*map(told, made)) if made else ((), ())
                known = PASSTHROUGH if args.server == "target" else PASSTHROUGH | PASSED
                expected = known.get((framework, name))
                passthrough = {reason for reason in reasons if reason}
                total, may = total + 1, may + (not passthrough)
                said = f"{framework}, {name}"
                print(f"{said:55} {', '.join(dict.fromkeys(words))}", flush=True)
                if not made or passthrough != ({expected} if expected else set()):
                    wrong.append(f"{said}: {passthrough or 'no request'}, expected {expected or 'eligible'}")
                same = len(want) == len(have) if (framework, name) in SAMPLED else repr(want) == repr(have)
                if not same:
                    wrong.append(f"{said}: direct {want!r}, through {have!r}")
    print(f"\n{may} of {total} calls are eligible")
    for line in wrong:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
