"""A live Foretell with the config file of the manifests.

Covers `check`, probes, the engine's preStop and the image's health check.
"""

import http.server
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

import yaml

import kit

TOKEN_IN_THE_POD = "/run/secrets/foretell/admin-token"


def checked(process, policies):
    """Output of `foretell check` for a config file with policies in the same folder; must
    succeed."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "policies").mkdir()
        for name, text in policies.items():
            (folder / "policies" / name).write_text(text)
        (folder / "token").write_text("secret\n")
        text = process.replace("/etc/foretell/policies", str(folder / "policies"))
        named_files = {"tokenizer: /tokenizer\n": f"tokenizer: {kit.TOKENIZER}\n", "/etc/foretell/tokenizer.json": str(kit.TOKENIZER)}
        for named, here in named_files.items():
            text = text.replace(named, here)
        for secret in ("admin-token", "engine-key"):
            text = text.replace(f"/run/secrets/foretell/{secret}", str(folder / "token"))
        (folder / "foretell.yaml").write_text(text)
        return kit.run(kit.FORETELL, "check", "--config", folder / "foretell.yaml")


class Check(unittest.TestCase):
    def test_every_embedded_configuration_passes(self):
        for shape in kit.SHAPES:
            for settings in ((), ("secrets.adminToken=a", "secrets.engineKey=e")):
                objects = kit.rendered(shape, *settings)
                policies = kit.the(objects, "ConfigMap", "llm-foretell-policies")["data"]
                with self.subTest(shape, settings=settings):
                    said = checked(kit.the(objects, "ConfigMap", "llm-foretell")["data"]["foretell.yaml"], policies)
                    self.assertIn("backends: engine", said)
                    self.assertNotIn("has no effect", said)
                    self.assertIn("policies: default@", said)

    def test_the_configuration_of_compose_passes(self):
        folder = kit.DEPLOY / "compose/foretell"
        said = checked((folder / "foretell.yaml").read_text(), {path.name: path.read_text() for path in folder.glob("policies/*")})
        self.assertIn("backends: vllm", said)

    def test_the_policy_that_is_shipped_is_the_built_in_one(self):
        built_in = yaml.safe_load((kit.ROOT / "policies/default.yaml").read_text())
        of_chart = yaml.safe_load((kit.CHART / "values.yaml").read_text())["policies"]
        self.assertEqual([yaml.safe_load(text) for text in of_chart.values()], [built_in])
        of_compose = [yaml.safe_load(path.read_text()) for path in (kit.DEPLOY / "compose/foretell/policies").iterdir()]
        self.assertEqual(of_compose, [built_in])


class Probes(unittest.TestCase):
    def test_alive_before_the_engine_answers_and_ready_after_it(self):
        nobody = kit.free_port()
        with kit.foretell(kit.rendered("sidecar-vllm"), nobody) as live:
            self.assertEqual(kit.status(live.metrics, "/healthz"), (200, "ok"))
            self.assertEqual(kit.status(live.metrics, "/readyz")[0], 503)
        engine = kit.Engine()
        with kit.foretell(kit.rendered("sidecar-vllm"), engine.port) as live:
            kit.until(lambda: kit.status(live.metrics, "/readyz")[0] == 200, "/readyz")
            self.assertIn("foretell_build_info", kit.status(live.metrics, "/metrics")[1])
            for path in ("/", "/api/replicas", "/api/policies"):
                self.assertEqual(kit.status(live.metrics, path)[0], 404)
            self.assertEqual(kit.status(live.metrics, "/api/drain", "POST")[0], 404)

    @unittest.skipUnless(kit.CAN_CONFINE, "needs root and mount namespaces")
    def test_it_runs_as_the_security_context_has_it(self):
        engine = kit.Engine()
        with kit.foretell(kit.rendered("sidecar-vllm"), engine.port, confined=True) as live:
            kit.until(lambda: kit.status(live.metrics, "/readyz")[0] == 200, "/readyz")
            status_file = pathlib.Path(f"/proc/{live.child.pid}/status").read_text()
            facts = dict(line.split(":\t", 1) for line in status_file.splitlines() if ":\t" in line)
            self.assertEqual(facts["Uid"].split(), ["65532"] * 4)
            self.assertEqual((int(facts["CapEff"], 16), int(facts["CapBnd"], 16), facts["NoNewPrivs"]), (0, 0, "1"))
            engine.read.put(0), engine.read.put(1), engine.read.put(2)
            stream = kit.Stream(live.listen)
            self.assertEqual(stream.head()[0], 200)
            self.assertEqual([stream.event() for _ in range(3)], ["0", "1", "2"])
            stream.close()


class PreStop(unittest.TestCase):
    """The manifest's command, run against a live Foretell whose engine is in the middle of a
    stream."""

    def command(self, objects, live, token=None):
        interpreter, flag, script = kit.pre_stop(objects)
        self.assertEqual((interpreter, flag), ("python3", "-c"))
        self.assertIn('"127.0.0.1", 9464,', script)
        script = script.replace("9464", str(live.admin[1])).replace(TOKEN_IN_THE_POD, str(token or "/nowhere"))
        return [sys.executable, flag, script]

    def drained(self, objects, token=None):
        engine = kit.Engine()
        with kit.foretell(objects, engine.port, token=token) as live:
            kit.until(lambda: kit.status(live.metrics, "/readyz")[0] == 200, "/readyz")
            stream = kit.Stream(live.listen)
            self.assertEqual(stream.head()[0], 200)
            self.assertEqual(stream.event(), "0")
            # A proxy for outside traffic, which many images set, must not be used.
            hook = subprocess.Popen(self.command(objects, live, token), env={"http_proxy": "http://127.0.0.1:9"})
            kit.until(lambda: kit.status(live.metrics, "/readyz")[0] == 503, "the drain")
            # The engine is not stopped while a stream runs through Foretell, however long it takes.
            self.assertIsNone(hook.poll())
            for number in range(1, engine.events):
                engine.read.put(number - 1)
                self.assertEqual(stream.event(), str(number))
            self.assertIsNone(hook.poll())
            engine.read.put(engine.events - 1)
            stream.rest()
            stream.close()
            self.assertEqual(hook.wait(kit.PATIENCE), 0)
            self.assertEqual(live.child.wait(kit.PATIENCE), 0, live.log_text())
            self.assertIn("drained", live.log_text())

    def test_it_waits_for_the_streams_under_way(self):
        for shape in ("sidecar-vllm", "sidecar-sglang"):
            with self.subTest(shape):
                self.drained(kit.rendered(shape))

    def test_it_gives_the_token_where_there_is_one(self):
        with tempfile.NamedTemporaryFile("w") as token:
            token.write("planted-token\n")
            token.flush()
            self.drained(kit.rendered("sidecar-vllm"), token=token.name)

    def test_it_fails_where_it_is_refused_or_nobody_is_there(self):
        objects, engine = kit.rendered("sidecar-vllm"), kit.Engine()
        with tempfile.NamedTemporaryFile("w") as token, kit.foretell(objects, engine.port) as live:
            token.write("planted-token\n")
            token.flush()
            live.end()
            said = kit.run(*self.command(objects, live), code=1)
            self.assertIn("ConnectionRefusedError", said)
            with kit.foretell(objects, engine.port, token=token.name) as guarded:
                said = kit.run(*self.command(objects, guarded), code=1)
                self.assertIn("drain: 401", said)
                self.assertEqual(kit.status(guarded.metrics, "/healthz")[0], 200)


class Tokenizer(unittest.TestCase):
    """The command of the init container, with a hub that redirects to a store, as the real one
    does."""

    def fetch(self, hub, folder, code=0, **environment):
        interpreter, flag, script = kit.containers(kit.pod(kit.rendered("gateway")))["tokenizer"]["command"]
        self.assertEqual((interpreter, flag), ("python3", "-c"))
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_address[1]}"
        return kit.run(sys.executable, flag, script.replace('"/tokenizer"', repr(str(folder))), env=environment, code=code)

    def test_the_file_is_fetched_whole_and_the_key_stays_with_the_hub(self):
        asked = []

        class Hub(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append((self.path, self.headers["authorization"]))
                self.send_response(302 if "/resolve/" in self.path else 200)
                self.send_header("location", "/store/1")
                self.end_headers()
                self.wfile.write(b'{"model":{}}')

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub, tempfile.TemporaryDirectory() as folder:
            threading.Thread(target=hub.serve_forever, daemon=True).start()
            self.fetch(hub, folder, HF_TOKEN="planted")
            self.assertEqual([path.name for path in pathlib.Path(folder).iterdir()], ["tokenizer.json"])
            self.assertEqual(pathlib.Path(folder, "tokenizer.json").read_text(), '{"model":{}}')
            self.assertEqual(asked, [("/Qwen/Qwen2.5-Coder-7B-Instruct/resolve/main/tokenizer.json", "Bearer planted"), ("/store/1", None)])
            hub.shutdown()

    def test_it_fails_where_there_is_none(self):
        engine = kit.Engine()
        with tempfile.TemporaryDirectory() as folder:
            self.assertIn("404", self.fetch(engine, folder, code=1))
            self.assertEqual(list(pathlib.Path(folder).iterdir()), [])


class HealthCheck(unittest.TestCase):
    def test_it_says_what_the_pages_say(self):
        script = kit.DEPLOY / "healthcheck"
        nobody = kit.free_port()
        with kit.foretell(kit.rendered("sidecar-vllm"), nobody) as live:
            self.assertEqual(kit.run(script, "healthz", live.admin[1]), "")
            self.assertEqual(kit.run(script, "healthz", live.metrics[1]), "")
            self.assertIn("waiting for backend engine", kit.run(script, "readyz", live.admin[1], code=1))
        kit.run(script, "healthz", nobody, code=1)


if __name__ == "__main__":
    unittest.main()
