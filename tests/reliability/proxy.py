"""A proxy under test: started in front of a backend, with its port and its resident memory."""

import asyncio
import os
import pathlib
import resource
import signal
import subprocess
import tempfile
import time
import urllib.request


def descriptors(wanted):
    """Raises the limit of open files of this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SystemExit(f"{wanted} descriptors are needed, the hard limit is {hard}: a smaller --count, or `ulimit -n`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


class Proxy:
    """`foretell serve` in front of 127.0.0.1:PORT; ends with the block."""

    def __init__(self, binary, backend, more=""):
        self.folder = tempfile.TemporaryDirectory()
        file = pathlib.Path(self.folder.name, "foretell.yaml")
        file.write_text(f"version: 1\nbackends: [{{ name: b, replicas: [\"http://127.0.0.1:{backend}\"] }}]\n"
                        'listen: [{ address: "127.0.0.1:0" }]\nadmin: { address: "127.0.0.2:0" }\n' + more)
        env = {name: value for name, value in os.environ.items() if not name.startswith("FORETELL_")}
        log = open(pathlib.Path(self.folder.name, "log"), "w")
        binary = pathlib.Path(binary).resolve()
        self.process = subprocess.Popen([binary, "serve", "--config", file], cwd=self.folder.name, env=env, stderr=log)

    def __enter__(self):
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(pathlib.Path(self.folder.name, "log").read_text())
            if len(open_ports := self.listening()) == 2:
                self.port, self.admin = open_ports["0100007F"], open_ports["0200007F"]
                return self
            time.sleep(0.1)
        raise SystemExit("it does not listen")

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()

    def listening(self):
        """Ports of its listening sockets by address, as /proc writes it."""
        held = set()
        for entry in os.scandir(f"/proc/{self.process.pid}/fd"):
            try:
                held.add(os.readlink(entry.path))
            except OSError:
                pass
        rows = [line.split() for line in open(f"/proc/{self.process.pid}/net/tcp").readlines()[1:]]
        ours = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]
        return {address: int(port, 16) for address, port in ours}

    def resident(self):
        """Resident memory, bytes."""
        status = open(f"/proc/{self.process.pid}/status").read()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def get(self, path):
        """An admin page."""
        return urllib.request.urlopen(f"http://127.0.0.2:{self.admin}{path}", timeout=60).read().decode()


async def settled(proxy, below=None, patience=30):
    """Resident memory once it has changed by at most 1 % in 2 s, or as soon as it is below
    `below`."""
    history = [await asyncio.to_thread(proxy.resident)]
    for _ in range(4 * patience):
        await asyncio.sleep(0.25)
        history.append(await asyncio.to_thread(proxy.resident))
        recent = history[-8:]
        calm = len(recent) == 8 and max(recent) - min(recent) <= max(recent) // 100
        if calm if below is None else calm and history[-1] < below:
            break
    return history[-1]
