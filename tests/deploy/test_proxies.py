"""nginx and Envoy in front of a server of events, and of Foretell: no event is withheld.

The server sends event k+1 when the client has event k, so a proxy that holds one back would hold
the stream up for ever.
"""

import ipaddress
import os
import pathlib
import subprocess
import tempfile
import unittest

import yaml

import kit

FORETELLS, NGINX, ENVOY = 8080, 8088, 8089


class Proxies(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        os.chmod(self.folder, 0o755)
        self.log = open(self.folder / "log", "w")
        self.addCleanup(self.log.close)

    def begun(self, command, listen):
        child = subprocess.Popen([str(word) for word in command], stdout=self.log, stderr=self.log)
        self.addCleanup(child.wait)
        self.addCleanup(child.terminate)
        kit.until(lambda: child.poll() is not None or kit.status(listen, "/health")[0] == 200, command[0])
        self.assertIsNone(child.poll(), (self.folder / "log").read_text())

    def nginx(self, upstream, change=lambda text: text):
        listen = ("127.0.0.1", kit.free_port())
        text = (kit.DEPLOY / "nginx.conf").read_text()
        text = change(text).replace(f"127.0.0.1:{FORETELLS}", f"127.0.0.1:{upstream}").replace(f"127.0.0.1:{NGINX}", f"127.0.0.1:{listen[1]}")
        # Its temporary folders, which are not part of the snippet.
        text = text.replace("http {", "".join(["pid pid; error_log stderr;\nhttp {\n", *(f"{name}_temp_path {name};\n" for name in (
            "client_body", "proxy", "fastcgi", "uwsgi", "scgi"))]), 1)
        (self.folder / "nginx.conf").write_text(text)
        self.begun([kit.tool("nginx"), "-p", self.folder, "-c", "nginx.conf", "-g", "daemon off;"], listen)
        return listen

    def envoy(self, upstream):
        listen = ("127.0.0.1", kit.free_port())
        text = (kit.DEPLOY / "envoy.yaml").read_text()
        text = text.replace(f"port_value: {FORETELLS} ", f"port_value: {upstream} ").replace(f"port_value: {ENVOY} ", f"port_value: {listen[1]} ")
        (self.folder / "envoy.yaml").write_text(text)
        # A dynamic base id, so that several may run.
        self.begun([kit.tool("envoy"), "-c", self.folder / "envoy.yaml", "--use-dynamic-base-id", "--concurrency", "1",
                    "--log-level", "warning"], listen)
        return listen

    def passes(self, listen, engine, fields=""):
        """Reads a stream event by event; returns the head's fields and the rest after the
        events."""
        stream = kit.Stream(listen, fields)
        status, head = stream.head()
        self.assertEqual((status, head["content-type"]), (200, "text/event-stream"))
        for number in range(engine.events):
            self.assertEqual(stream.event(), str(number))
            engine.read.put(number)
        rest = stream.rest()
        stream.close()
        return head, rest

    def test_events_pass_one_by_one_through_nginx(self):
        engine = kit.Engine(events=20)
        self.passes(self.nginx(engine.port), engine)
        (head,) = engine.heads
        self.assertEqual(head["x-forwarded-for"], "127.0.0.1")
        self.assertEqual((head["host"], head["connection"], head["te"]), ("proxy", None, None))

    def test_events_pass_one_by_one_through_envoy_and_trailers_follow(self):
        engine = kit.Engine(events=20, trailer=("x-foretell-path", "speculated"))
        _, rest = self.passes(self.envoy(engine.port), engine, "te: trailers\r\n")
        (head,) = engine.heads
        # For a client on loopback Envoy gives an address of the machine.
        ipaddress.ip_address(head["x-forwarded-for"])
        self.assertEqual(head["te"], "trailers")
        self.assertIn(b"x-foretell-path: speculated\r\n", rest)

    def test_through_foretell_as_well(self):
        for before in (self.nginx, self.envoy):
            with self.subTest(before.__name__):
                engine = kit.Engine(events=20)
                with kit.foretell(kit.rendered("gateway"), engine.port) as live:
                    self.passes(before(live.listen[1]), engine)

    def test_envoy_finds_nothing_to_say(self):
        said = kit.run(kit.tool("envoy"), "--mode", "validate", "-c", kit.DEPLOY / "envoy.yaml", "--use-dynamic-base-id")
        self.assertNotIn("deprecated", said)
        kit.run(kit.tool("envoy"), "--mode", "validate", "--config-yaml", "{admin: {adress: x}}", "--use-dynamic-base-id", code=1)

    def test_time_is_given_that_streams_need(self):
        text = (kit.DEPLOY / "nginx.conf").read_text()
        self.assertIn("proxy_read_timeout 3600s;", text)
        manager = yaml.safe_load((kit.DEPLOY / "envoy.yaml").read_text())["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
        self.assertEqual((manager["stream_idle_timeout"], route["route"]["timeout"]), ("3600s", "0s"))


if __name__ == "__main__":
    unittest.main()
