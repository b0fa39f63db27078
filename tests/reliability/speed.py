#!/usr/bin/env python3
"""Large prompts, saturation and the cost of a decision, compared with nginx in the same run.

    speed.py [--foretell BIN] [--seconds S] [--rounds N]

nginx is the server; nginx and Foretell are in front of it and are asked in turn. Large bodies:
medians of the time that each adds to that without a proxy, Foretell to nginx. Saturation: wrk with
64 connections, requests per second, Foretell to nginx, and no 5xx. The decision: processor time of
Foretell per request with 200 policies of which the last matches, minus that with one.
Bounds here, where the load and all the servers share the cores: at most 1.5 times nginx's addition
(answers of small requests are measured by `tests/bench/passthrough.py`), at least half of nginx's
requests per second, at most 5 us for 200 policies.
"""

import contextlib
import http.client
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile
import time

import kit

NGINX = """worker_processes auto;
daemon off;
error_log /dev/null crit;
pid nginx.pid;
events { worker_connections 4096; }
http {
    access_log off;
    client_max_body_size 64m; client_body_buffer_size 64k;
    client_body_temp_path client_body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    keepalive_requests 100000000;
    upstream backend { server 127.0.0.1:%(sink)d; keepalive 512; keepalive_requests 100000000; }
    upstream reads { server %(reads)s; keepalive 512; keepalive_requests 100000000; }
    server {
        listen 127.0.0.1:%(front)d backlog=4096;
        location / { proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_request_buffering off; proxy_buffering off; }
        location /v1/completions { proxy_pass http://reads; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_request_buffering off; proxy_buffering off; }
    }
}
"""
SINK = """worker_processes auto;
daemon off;
error_log /dev/null crit;
pid sink.pid;
events { worker_connections 4096; }
http {
    access_log off;
    client_max_body_size 64m;
    client_body_temp_path a; proxy_temp_path b; fastcgi_temp_path c; uwsgi_temp_path d; scgi_temp_path e;
    keepalive_requests 100000000;
    server { listen 127.0.0.1:%(sink)d backlog=4096; default_type application/json; location / { return 200 '{"object": "list", "data": []}'; } }
}
"""
# Bodies that are passed through unread are forwarded in pieces; those that a policy may speculate on are read
# first.
SIZES = {"32 KB": 32 << 10, "220 KB": 220_000, "1 MB": 1 << 20, "8 MB": 8 << 20}
POLICY = "version: 1\nname: p{n}\nmode: plain\nmatch: {{ models: ['other-{n}-*'], headers: {{ x-team: [red, blue] }} }}\n"
LAST = "version: 1\nname: last\nmode: off\n"


def program(name):
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if not found:
        raise kit.Wrong(f"needs {name} (Debian package)")
    return found


async def serve(reader, writer):
    """Reads the whole body, unlike nginx as a server."""
    while (lines := await kit.read_head(reader)) is not None:
        fields = kit.fields_of(lines)
        body, _ = await kit.read_body(reader, fields)
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: 2\r\n\r\n{}" % (b"200 OK" if body else b"404 Not Found"))
        await writer.drain()


def start_nginx(stack, reads):
    """Addresses of the sink and of nginx in front of it and of `reads`."""
    ports = {"sink": kit.free_port(), "front": kit.free_port(), "reads": reads}
    for name, text in (("sink", SINK), ("front", NGINX)):
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "nginx.conf").write_text(text % ports)
        kit.started(stack, [program("nginx"), "-p", folder, "-c", "nginx.conf"], stderr=subprocess.DEVNULL)
        kit.wait_for(name, lambda port=ports[name]: http.client.HTTPConnection("127.0.0.1", port, timeout=1).connect() or True)
    return ports["sink"], ports["front"]


class Asking:
    """A kept connection."""

    def __init__(self, port, path):
        self.connection, self.path = http.client.HTTPConnection("127.0.0.1", port, timeout=60), path

    def ask(self, body):
        """Milliseconds."""
        begun = time.perf_counter()
        self.connection.request("POST", self.path, body, {"content-type": "application/json"})
        answer = self.connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise kit.Wrong(f"HTTP {answer.status} for {len(body)} bytes")
        return (time.perf_counter() - begun) * 1e3


def prompts(args, numbers, ports):
    for name, size in SIZES.items():
        body = b'{"model": "m", "prompt": "' + b"x" * (size - 100) + b'"}'
        ways = {way: Asking(port, "/v1/completions") for way, port in ports.items()}
        took = {way: [] for way in ways}
        for _ in range(args.rounds if size < 1 << 20 else args.rounds // 4):
            for way, asking in ways.items():
                took[way].append(asking.ask(body))
        middle = {way: statistics.median(times) for way, times in took.items()}
        print(f"  {name}: " + ", ".join(f"{way} {ms:.2f} ms" for way, ms in middle.items()))
        numbers.note(3, f"{name}: added by Foretell, median", middle["foretell"] - middle["direct"], "ms")
        numbers.at_most(3, f"{name}: time through Foretell / through nginx, median", middle["foretell"] / middle["nginx"], 1.5)


def wrk(port, connections, seconds, *more):
    output = subprocess.run([program("wrk"), "-t2", f"-c{connections}", f"-d{seconds}s", "--latency", *more, f"http://127.0.0.1:{port}/v1/models"],
                          capture_output=True, text=True, check=True).stdout
    rate = float(re.search(r"Requests/sec:\s*([\d.]+)", output)[1])
    bad = sum(int(n) for n in re.findall(r"Non-2xx or 3xx responses: (\d+)|(?:connect|read|write) (\d+)", output) for n in n if n)
    return rate, bad


def saturation(args, numbers, ports):
    rates, bad = {"nginx": [], "foretell": []}, 0
    for _ in range(3):
        for way, given in rates.items():
            rate, wrong = wrk(ports[way], 64, args.seconds)
            given.append(rate)
            bad += wrong if way == "foretell" else 0
    middle = {way: statistics.median(given) for way, given in rates.items()}
    numbers.note(4, "requests per second through Foretell, 64 connections", middle["foretell"])
    numbers.note(4, "requests per second through nginx", middle["nginx"])
    numbers.at_least(4, "Foretell / nginx", middle["foretell"] / middle["nginx"], 0.5)
    _, wrong = wrk(ports["foretell"], 1000, args.seconds)
    numbers.at_most(4, "answers other than 2xx, and errors of connections, at 64 and at 1,000 connections", bad + wrong, 0)


def decision(args, numbers, backend):
    with contextlib.ExitStack() as stack:
        many = {f"{n:03}.yaml": POLICY.format(n=n) for n in range(199)} | {"last.yaml": LAST}
        costs = {}
        proxies = {count: kit.Proxy(stack, args.foretell, kit.before(backend), policies=given) for count, given in ((1, {"last.yaml": LAST}), (200, many))}
        for proxy in proxies.values():
            Asking(proxy.port, "/v1/completions").ask(b'{"model": "m", "prompt": "a"}')
        for _ in range(5):
            for count, proxy in proxies.items():
                asking, before = Asking(proxy.port, "/v1/completions"), kit.processor(proxy.pid)
                for _ in range(args.rounds * 20):
                    asking.ask(b'{"model": "m", "prompt": "a"}')
                costs.setdefault(count, []).append((kit.processor(proxy.pid) - before) / (args.rounds * 20) * 1e6)
    one, all_of_them = (statistics.median(costs[count]) for count in (1, 200))
    numbers.note(5, "processor time of a completion that is passed through, one policy", one, "us")
    numbers.at_most(5, "its increase with 200 policies of which the last matches", max(all_of_them - one, 0.0), 5.0, "us")


def speed(args, numbers):
    with contextlib.ExitStack() as stack:
        reads = stack.enter_context(kit.backend(serve))
        sink, front = start_nginx(stack, reads)
        readers = kit.Proxy(stack, args.foretell, kit.before(reads))
        numbers.note(3, "load of the machine before", kit.load())
        prompts(args, numbers, {"direct": int(reads.split(":")[1]), "nginx": front, "foretell": readers.port})
        proxy = kit.Proxy(stack, args.foretell, kit.before(f"127.0.0.1:{sink}"))
        saturation(args, numbers, {"nginx": front, "foretell": proxy.port})
        decision(args, numbers, reads)


if __name__ == "__main__":
    kit.main(speed, __doc__, ("seconds", 10, "seconds of a turn of wrk"), ("rounds", 200, "rounds of each size"))
