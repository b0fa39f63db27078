"""The unit: systemd's own check of it, and its start, reload and stop.

A socket replaces the service manager's.
"""

import configparser
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import kit

UNIT = kit.DEPLOY / "systemd/foretell.service"
PROGRAM, FILE = "foretell", "/etc/foretell/foretell.yaml"


def section():
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(UNIT)
    return dict(parser["Service"])


class Unit(unittest.TestCase):
    def test_systemd_takes_every_line_of_it(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder, UNIT.name)
            copy.write_text(re.sub(r"(?m)^(Exec\w+=)foretell ", rf"\1{kit.FORETELL} ", UNIT.read_text()))
            # It reports unknown settings on standard error and still ends with 0.
            verify = lambda: subprocess.run([kit.tool("systemd-analyze"), "verify", "--man=no", str(copy)], capture_output=True, text=True)
            fine = verify()
            self.assertEqual((fine.returncode, fine.stderr.replace("\n", "")), (0, ""))
            copy.write_text(copy.read_text().replace("ProtectSystem=strict", "ProtectSystems=strict"))
            self.assertIn("ProtectSystems", verify().stderr)

    def test_it_is_exposed_little(self):
        """systemd's own score: 0 is best, 10 is worst; `OK` ends below 5."""
        said = kit.run(kit.tool("systemd-analyze"), "security", "--offline=yes", "--no-pager", "--threshold=20", UNIT)
        self.assertIn("Overall exposure level", said)

    def test_it_waits_for_the_drain_to_end(self):
        annotated = (kit.DEPLOY / "foretell.yaml").read_text()
        delay, grace = re.search(r"drain: \{ delay: (\w+), grace: (\w+) \}", annotated).groups()
        self.assertGreater(int(section()["TimeoutStopSec"]), kit.seconds(delay) + kit.seconds(grace))

    def test_the_drop_in_asks_for_what_the_reload_below_shows(self):
        drop_in = (UNIT.parent / "notify-reload.conf").read_text()
        self.assertIn("\nType=notify-reload\nReloadSignal=SIGHUP\nExecReload=\n", drop_in)
        self.assertEqual(section()["ExecReload"], "/bin/kill -HUP $MAINPID")


class Manager:
    """The service manager's side of the protocol: a datagram socket that receives states."""

    def __init__(self, folder):
        self.path = str(folder / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(kit.PATIENCE)

    def message_with(self, wanted):
        """The fields of the next message that has the line `wanted`."""
        while True:
            message = self.socket.recv(4096).decode()
            lines = message.splitlines()
            if wanted in lines:
                return dict(line.split("=", 1) for line in lines)
            # A changed file is also reloaded automatically; that reload may be reported in between.
            assert "STOPPING=1" not in lines, f"waited for {wanted}, got {message!r}"


class Life(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.manager = Manager(self.folder)
        self.addCleanup(self.manager.socket.close)
        self.engine = kit.Engine()
        self.admin, self.listen = (("127.0.0.1", kit.free_port()) for _ in range(2))
        (self.folder / "policies").mkdir()
        self.policy = self.folder / "policies/only.yaml"
        self.policy.write_text("version: 1\nname: before\nmode: shadow\n")
        self.file = self.folder / "foretell.yaml"
        self.file.write_text(f"""version: 1
mode: observe
listen: [{{ address: "127.0.0.1:{self.listen[1]}" }}]
admin: {{ address: "127.0.0.1:{self.admin[1]}" }}
backends: [{{ name: engine, replicas: ["http://127.0.0.1:{self.engine.port}"] }}]
policies: {{ dir: policies }}
""")
        self.unit = section()
        self.environment = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": self.manager.path}

    def command(self, line):
        self.assertTrue(line.startswith((PROGRAM, "/bin/kill")), line)
        return shlex.split(re.sub(r"^foretell ", f"{kit.FORETELL} ", line).replace(FILE, str(self.file)))

    def start(self):
        subprocess.run(self.command(self.unit["ExecStartPre"]), check=True, stdout=subprocess.DEVNULL, timeout=kit.PATIENCE)
        log = open(self.folder / "log", "w")
        self.addCleanup(log.close)
        child = subprocess.Popen(self.command(self.unit["ExecStart"]), env=self.environment, stdout=log, stderr=log)
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        return child

    def policies(self):
        return re.findall(r'"name":\s*"(\w+)"', kit.status(self.admin, "/api/policies")[1])

    def test_start_reload_and_stop(self):
        child = self.start()
        self.manager.message_with("READY=1")
        self.assertEqual(kit.status(self.admin, "/readyz"), (200, "ready"), "reported ready too early")
        self.assertEqual(self.policies(), ["before"])

        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.policy.write_text("version: 1\nname: after\nmode: shadow\n")
        subprocess.run([word.replace("$MAINPID", str(child.pid)) for word in self.command(self.unit["ExecReload"])], check=True)
        # Type=notify-reload waits for the reload's beginning, with its time, and its end.
        message_fields = self.manager.message_with("RELOADING=1")
        self.assertGreaterEqual(int(message_fields["MONOTONIC_USEC"]), before)
        self.manager.message_with("READY=1")
        self.assertLessEqual(int(message_fields["MONOTONIC_USEC"]), time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)
        self.assertEqual(self.policies(), ["after"], "reported ready before the reload had ended")

        self.policy.write_text("version: 1\nname: after\nmode: nonsense\n")
        child.send_signal(signal.SIGHUP)
        self.manager.message_with("RELOADING=1")
        self.manager.message_with("READY=1")
        self.assertEqual(self.policies(), ["after"], "an invalid policy changes nothing")

        child.send_signal(signal.Signals[self.unit["KillSignal"]])
        self.manager.message_with("STOPPING=1")
        self.assertEqual(child.wait(kit.PATIENCE), 0)

    def test_a_wrong_configuration_ends_with_the_status_that_is_not_tried_again(self):
        self.file.write_text("version: 1\nmode: nonsense\n")
        for line in ("ExecStartPre", "ExecStart"):
            done = subprocess.run(self.command(self.unit[line]), env=self.environment, capture_output=True, timeout=kit.PATIENCE)
            self.assertEqual(str(done.returncode), self.unit["RestartPreventExitStatus"])

    def test_it_needs_no_manager(self):
        del self.environment["NOTIFY_SOCKET"]
        child = self.start()
        kit.until(lambda: kit.status(self.admin, "/readyz")[0] == 200, "/readyz")
        child.terminate()
        self.assertEqual(child.wait(kit.PATIENCE), 0)


if __name__ == "__main__":
    unittest.main()
