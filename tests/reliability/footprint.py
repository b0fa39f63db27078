#!/usr/bin/env python3
"""The program itself: size, time from start to the first `/readyz` of 200, memory without a model.

    footprint.py [--foretell BIN] [--starts N]

The time is also given as a ratio to starting nginx and fetching a page from it, alternating: a busy
machine delays both.
"""

import contextlib
import pathlib
import shutil
import socket
import statistics
import subprocess
import tempfile
import time

import kit

NGINX = "daemon off; pid nginx.pid; error_log /dev/null crit; events {} http { access_log off; client_body_temp_path a; proxy_temp_path b; fastcgi_temp_path c; uwsgi_temp_path d; scgi_temp_path e; server { listen 127.0.0.1:%d; } }"


def nginx_starts(program):
    with contextlib.ExitStack() as stack:
        folder, port = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())), kit.free_port()
        (folder / "nginx.conf").write_text(NGINX % port)
        begun = time.perf_counter()
        kit.started(stack, [program, "-p", folder, "-c", "nginx.conf"], stderr=subprocess.DEVNULL)
        kit.wait_for("nginx", lambda: socket.create_connection(("127.0.0.1", port), 1).close() or True, every=0.002)
        return time.perf_counter() - begun


def footprint(args, numbers):
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    ours, theirs, resident = [], [], []
    for _ in range(args.starts):
        with contextlib.ExitStack() as stack:
            proxy = kit.Proxy(stack, args.foretell, kit.before("127.0.0.1:9"), wait="/readyz")
            ours.append(proxy.up_after)
            time.sleep(1)
            resident.append(proxy.resident())
        if nginx:
            theirs.append(nginx_starts(nginx))
    numbers.at_most(8, "size of the program", pathlib.Path(args.foretell).stat().st_size / 1e6, 40.0, "MB")
    numbers.at_most(8, "from its start to ready, median", statistics.median(ours) * 1e3, 200.0, "ms")
    if theirs:
        numbers.note(8, "the same of nginx", statistics.median(theirs) * 1e3, "ms")
    numbers.note(8, "resident memory without a model", statistics.median(resident) / kit.MIB, "MiB")


if __name__ == "__main__":
    kit.main(footprint, __doc__, ("starts", 9, "starts"))
