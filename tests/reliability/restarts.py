#!/usr/bin/env python3
"""Changes around a running proxy: an engine restarts, a listener's certificate is replaced.

    restarts.py [--foretell BIN] [--times N]

Prints the seconds until requests succeed again. Changes of addresses behind a DNS name are tested
in `cargo nextest run --test proxy fleet::discovery`, with a resolver of the test.
"""

import contextlib
import http.client
import socket
import ssl
import subprocess
import time

import kit


def post(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/v1/completions", b'{"model": "toy", "prompt": [100, 101, 102], "max_tokens": 2}', {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def engine_restarts(args, numbers):
    took, kept = [], []
    with contextlib.ExitStack() as stack:
        port = kit.free_port()
        argv = [str(kit.FAKE), "vllm", "--port", str(port), "--eos-every", "0", "--scale-out", "--prompt-tokens-details"]
        engine = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        stack.callback(lambda: (engine.kill(), engine.wait()))
        kit.wait_for("the fake listens", lambda: socket.create_connection(("127.0.0.1", port), 1).close() or True)
        proxy = kit.Proxy(stack, args.foretell, kit.toy(f"127.0.0.1:{port}"))
        proxy.recognised("vllm")
        for _ in range(args.times):
            engine.kill()
            engine.wait()
            # Long enough for the breaker to open.
            until = time.monotonic() + 3
            while time.monotonic() < until:
                post(proxy.port)
            engine = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
            kit.wait_for("the fake listens again", lambda: socket.create_connection(("127.0.0.1", port), 1).close() or True, every=0.005)
            begun = time.monotonic()
            kit.wait_for("a request succeeds", lambda: post(proxy.port) == 200, every=0.02)
            took.append(time.monotonic() - begun)
            kit.wait_for("it is recognised again", lambda: kit.Proxy.recognised(proxy, "vllm") or True)
            kept.append(time.monotonic() - begun)
    numbers.at_most(31, f"an engine that restarts: until a request succeeds, the longest of {args.times}", max(took), 5.0, "s")
    numbers.note(31, "and until it is recognised", max(kept), "s")


def certificate(folder, serial):
    new = folder / "new.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                    "-set_serial", str(serial), "-keyout", str(folder / "new.key"), "-out", str(new)], check=True, capture_output=True)
    (folder / "new.key").replace(folder / "key.pem")
    new.replace(folder / "cert.pem")


def shown(port):
    """The certificate of the listener, or nothing."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 5) as raw, context.wrap_socket(raw) as stream:
        return ssl.DER_cert_to_PEM_cert(stream.getpeercert(True)).strip()


def certificates_rotate(args, numbers):
    took = []
    with contextlib.ExitStack() as stack:
        folder = kit.pathlib.Path(stack.enter_context(kit.tempfile.TemporaryDirectory()))
        certificate(folder, 1)
        port = kit.free_port()
        listen = f'listen: [{{ address: "127.0.0.1:{port}", tls: {{ cert: {folder}/cert.pem, key: {folder}/key.pem }} }}]'
        kit.Proxy(stack, args.foretell, kit.before("127.0.0.1:9"), listen)
        for serial in range(2, args.times + 2):
            certificate(folder, serial)
            wanted, begun = (folder / "cert.pem").read_text().strip(), time.monotonic()
            with contextlib.suppress(kit.Wrong):
                kit.wait_for("the new certificate is used", lambda: shown(port) == wanted, limit=30)
            took.append(time.monotonic() - begun)
    numbers.at_most(31, f"a listener's certificate that is replaced: until it is shown, the longest of {args.times}", max(took), 5.0, "s")


def restarts(args, numbers):
    engine_restarts(args, numbers)
    certificates_rotate(args, numbers)


if __name__ == "__main__":
    kit.main(restarts, __doc__, ("times", 5, "changes of each kind"))
