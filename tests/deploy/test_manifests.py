"""The chart renders, the plain manifests equal its output, both are valid and fit the config file."""

import re
import tempfile
import unittest

import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

import kit

OF_THE_CLUSTER = ["1.29", "1.33", "1.37"]
SECRETS = ("secrets.adminToken=admin", "secrets.engineKey=engine")


def variants():
    """Every example, plain and with every Secret, by name."""
    for shape in kit.SHAPES:
        yield shape, kit.rendered(shape)
        yield f"{shape} with secrets", kit.rendered(shape, *SECRETS)
        yield f"{shape}, rolled back", kit.rendered(shape, "service.to=engine")


class Rendering(unittest.TestCase):
    def test_the_plain_manifests_are_what_the_chart_renders(self):
        with tempfile.TemporaryDirectory() as folder:
            kit.run(kit.DEPLOY / "render.sh", folder, env={"HELM": kit.tool("helm"), "PATH": "/usr/bin:/bin", "HOME": folder})
            for shape in kit.SHAPES:
                again = kit.pathlib.Path(folder, shape, "foretell.yaml").read_text()
                self.assertEqual((kit.KUBERNETES / shape / "foretell.yaml").read_text(), again, f"{shape}: run deploy/render.sh")

    def test_kustomize_renders_them(self):
        for shape in kit.SHAPES:
            text = kit.run(kit.tool("kubectl"), "kustomize", kit.KUBERNETES / shape)
            objects = {(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(text)}
            self.assertEqual(objects, {(each["kind"], each["metadata"]["name"]) for each in kit.rendered(shape)})

    def test_the_chart_is_well_formed(self):
        for shape in kit.SHAPES:
            kit.run(kit.tool("helm"), "lint", "--strict", kit.CHART, "--values", kit.CHART / f"examples/{shape}.yaml")

    def test_what_the_chart_refuses(self):
        values = ["--values", kit.CHART / "examples/gateway.yaml"]
        for setting, why in [("shape=proxy", "shape"), ("service.to=nowhere", "service"), ("gateways.replicas=2", "gateways"),
                             ("process.admin.address=0.0.0.0:9464", "address"), ("process.mode=on", "mode"),
                             ("process.backends[0].name=x", "process"), ("policies.notes=x", "notes")]:
            said = kit.run(kit.tool("helm"), "template", "llm", kit.CHART, *values, "--set", setting, code=1)
            self.assertIn(why, said)
        self.assertIn("engine.image", kit.run(kit.tool("helm"), "template", "llm", kit.CHART, code=1))

    def test_the_notes_name_the_rollback_that_is_tested(self):
        for shape, patch in [("sidecar-vllm", "sidecar"), ("gateway", "gateway")]:
            said = kit.run(kit.tool("helm"), "install", "llm", kit.CHART, "--dry-run=client", "--values", kit.CHART / f"examples/{shape}.yaml")
            (inline,) = re.findall(r"patch service llm -p '(.*)'", said)
            written = yaml.safe_load((kit.KUBERNETES / f"rollback/{patch}.yaml").read_text())
            self.assertEqual(yaml.safe_load(inline), written)


class Schemas(unittest.TestCase):
    def test_every_object_is_valid_in_every_version_it_is_for(self):
        for name, objects in variants():
            for each in objects:
                if each["kind"] == "PodMonitor":
                    continue
                for version in OF_THE_CLUSTER:
                    with self.subTest(name, kind=each["kind"], version=version):
                        kubernetes_validate.validate(each, version, strict=True)

    def test_the_pod_monitor_is_valid(self):
        for name, objects in variants():
            given = kit.the(objects, "PodMonitor")
            with self.subTest(name):
                model = prometheus_operator.PodMonitor.model_validate(given)
                # The model drops unknown fields, so the output holds the known ones.
                self.assertEqual(model.model_dump(by_alias=True, exclude_unset=True), given)

    def test_it_would_be_seen(self):
        deployment = yaml.safe_load(yaml.safe_dump(kit.the(kit.rendered("gateway"), "Deployment")))
        deployment["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(deployment, OF_THE_CLUSTER[-1], strict=True)


class Agreement(unittest.TestCase):
    def each(self):
        for name, objects in variants():
            with self.subTest(name):
                yield name, objects, kit.process(objects), kit.pod(objects)

    def test_the_mode_is_observe(self):
        for _, _, process, _ in self.each():
            self.assertEqual(process["mode"], "observe")

    def test_probes_and_scrapes_are_on_the_metrics_listener_and_the_admin_is_on_loopback(self):
        for _, objects, process, pod in self.each():
            container = kit.containers(pod)["foretell"]
            ports = {each["name"]: each["containerPort"] for each in container["ports"]}
            self.assertEqual(ports, {"http": kit.port(process["listen"][0]["address"]), "metrics": kit.port(process["metrics"]["address"])})
            self.assertTrue(process["metrics"]["address"].startswith("0.0.0.0:"))
            self.assertTrue(process["admin"]["address"].startswith("127.0.0.1:"))
            probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
            self.assertEqual(probes, {"startup": {"path": "/healthz", "port": "metrics"}, "liveness": {"path": "/healthz", "port": "metrics"},
                                      "readiness": {"path": "/readyz", "port": "metrics"}})
            (endpoint,) = kit.the(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
            self.assertEqual((endpoint["port"], endpoint["path"]), ("metrics", "/metrics"))

    def test_selectors_find_the_pods(self):
        for name, objects, _, _ in self.each():
            labels = kit.the(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
            selectors = [kit.the(objects, "Deployment")["spec"]["selector"]["matchLabels"],
                         kit.the(objects, "PodMonitor")["spec"]["selector"]["matchLabels"],
                         kit.the(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]]
            if not (name.startswith("gateway") and name.endswith("rolled back")):
                selectors.append(kit.the(objects, "Service", "llm")["spec"]["selector"])
            if name.startswith("gateway"):
                selectors.append(kit.the(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"])
            for selector in selectors:
                self.assertLessEqual(selector.items(), labels.items())

    def test_nobody_is_root_or_can_become_it(self):
        for _, _, _, pod in self.each():
            self.assertIs(pod["automountServiceAccountToken"], False)
            for name, container in kit.containers(pod).items():
                context = container["securityContext"]
                self.assertGreater(context["runAsUser"], 0, name)
                self.assertEqual({**context, "runAsUser": 0, "runAsGroup": 0}, {
                    "runAsNonRoot": True, "runAsUser": 0, "runAsGroup": 0, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}}, name)

    def test_configuration_is_mounted_as_folders(self):
        for _, objects, process, pod in self.each():
            mounts = {each["name"]: each for each in kit.containers(pod)["foretell"]["volumeMounts"]}
            volumes = {each["name"]: each for each in pod["volumes"]}
            self.assertFalse([each for each in mounts.values() if "subPath" in each])
            self.assertEqual(process["policies"]["dir"], mounts["policies"]["mountPath"])
            self.assertIn(f"{mounts['process']['mountPath']}/foretell.yaml", kit.containers(pod)["foretell"]["args"])
            for volume in ("process", "policies"):
                kit.the(objects, "ConfigMap", volumes[volume]["configMap"]["name"])

    def test_the_tokenizer_is_where_the_config_file_looks_for_it(self):
        for shape in kit.SHAPES:
            for settings in ((), ("tokenizer.volume.persistentVolumeClaim.claimName=models",)):
                objects = kit.rendered(shape, *settings)
                pod = kit.pod(objects)
                ((model,),) = [backend["models"] for backend in kit.process(objects)["backends"]]
                mounts = {each["name"]: each["mountPath"] for each in kit.containers(pod)["foretell"]["volumeMounts"]}
                self.assertEqual(model, {"id": "*", "tokenizer": mounts["tokenizer"]})
                self.assertEqual("tokenizer" in kit.containers(pod), not settings)
                (volume,) = [each for each in pod["volumes"] if each["name"] == "tokenizer"]
                self.assertEqual(set(volume), {"name", "persistentVolumeClaim" if settings else "emptyDir"})
            without = kit.rendered(shape, "tokenizer.model=")
            self.assertNotIn("models", kit.process(without)["backends"][0])
            self.assertNotIn("tokenizer", kit.containers(kit.pod(without)))
            if shape == "gateway":
                self.assertEqual(len(kit.the(without, "NetworkPolicy")["spec"]["egress"]), 2)

    def test_secrets_are_files_where_the_config_file_and_the_hook_look_for_them(self):
        for shape in kit.SHAPES:
            objects = kit.rendered(shape, *SECRETS)
            process, pod = kit.process(objects), kit.pod(objects)
            (volume,) = [each for each in pod["volumes"] if each["name"] == "secrets"]
            files = {item["path"]: source["secret"]["name"] for source in volume["projected"]["sources"] for item in source["secret"]["items"]}
            self.assertEqual(files, {"admin-token": "admin", "engine-key": "engine"})
            self.assertEqual(process["admin"]["token_file"], "/run/secrets/foretell/admin-token")
            self.assertEqual(process["backends"][0]["connect"]["auth"]["own_token_file"], "/run/secrets/foretell/engine-key")
            for name in {"foretell", "engine"} & kit.containers(pod).keys():
                container = kit.containers(pod)[name]
                self.assertIn({"name": "secrets", "mountPath": "/run/secrets/foretell", "readOnly": True}, container["volumeMounts"], name)
            if shape != "gateway":
                self.assertIn(process["admin"]["token_file"], kit.pre_stop(objects)[2])

    def test_memory_has_room_for_what_the_process_may_take(self):
        size = {"Gi": 1 << 30, "Mi": 1 << 20, "GiB": 1 << 30, "MiB": 1 << 20}
        in_bytes = lambda text: int(re.match(r"\d+", text)[0]) * size[re.sub(r"\d+", "", text)]
        for _, _, process, pod in self.each():
            may_take = in_bytes(process.get("limits", {}).get("memory", "512MiB"))
            self.assertGreater(in_bytes(kit.containers(pod)["foretell"]["resources"]["limits"]["memory"]), 2 * may_take)

    def test_the_pod_has_time_to_drain(self):
        for name, objects, process, pod in self.each():
            drain = kit.seconds(process["drain"]["delay"]) + kit.seconds(process["drain"]["grace"])
            self.assertGreater(kit.seconds(process["drain"]["delay"]), 0)
            self.assertGreater(pod["terminationGracePeriodSeconds"], drain)
            if not name.startswith("gateway"):
                (waits,) = re.findall(r"timeout=(\d+)", kit.pre_stop(objects)[2])
                self.assertGreater(int(waits), drain)
                self.assertLess(int(waits), pod["terminationGracePeriodSeconds"])

    def test_network_policies_open_what_is_used_and_nothing_else(self):
        for name, objects, process, _ in self.each():
            policy = kit.the(objects, "NetworkPolicy")["spec"]
            clients, scrapers = ({each["port"] for each in rule["ports"]} for rule in policy["ingress"])
            (backend,) = process["backends"]
            engine = set() if name.startswith("gateway") else {kit.port(backend["replicas"][0])}
            self.assertEqual(clients, {kit.port(process["listen"][0]["address"])} | engine)
            self.assertEqual(scrapers, {kit.port(process["metrics"]["address"])} | engine)
            if name.startswith("gateway"):
                engines, names, hub = policy["egress"]
                self.assertEqual(hub, {"ports": [{"port": 443}]})
                self.assertEqual([each["port"] for each in engines["ports"]], [kit.port(backend["replicas"]["dns"])])
                self.assertEqual({(each["port"], each["protocol"]) for each in names["ports"]}, {(53, "UDP"), (53, "TCP")})


class Sidecar(unittest.TestCase):
    def test_foretell_starts_before_the_engine_and_does_not_wait_for_it(self):
        for shape in ("sidecar-vllm", "sidecar-sglang"):
            pod = kit.pod(kit.rendered(shape))
            tokenizer, sidecar = pod["initContainers"]
            self.assertNotIn("restartPolicy", tokenizer)
            self.assertEqual((sidecar["name"], sidecar["restartPolicy"]), ("foretell", "Always"))
            # /readyz waits for the engine, which is started after this probe passes.
            self.assertEqual(sidecar["startupProbe"]["httpGet"]["path"], "/healthz")

    def test_foretell_asks_the_engine_of_its_pod(self):
        for shape in ("sidecar-vllm", "sidecar-sglang"):
            objects = kit.rendered(shape)
            engine = kit.containers(kit.pod(objects))["engine"]
            (listens,) = [each["containerPort"] for each in engine["ports"]]
            self.assertEqual(kit.process(objects)["backends"][0]["replicas"], [f"http://127.0.0.1:{listens}"])
            words = engine["command"] + engine["args"]
            self.assertIn(f"--port={listens}", words)
            self.assertIn("--host=0.0.0.0", words, "the rollback sends clients to the pod's address")

    def test_an_edit_of_the_config_file_restarts_no_engine(self):
        template = lambda *settings: kit.the(kit.rendered("sidecar-vllm", *settings), "Deployment")["spec"]["template"]
        self.assertEqual(template(), template("process.mode=auto"))
        self.assertEqual(template(), template("process.drain.grace=200s"))


class Gateway(unittest.TestCase):
    def test_replicas_are_the_addresses_behind_a_headless_service(self):
        objects = kit.rendered("gateway")
        headless = kit.the(objects, "Service", "llm-engines")["spec"]
        self.assertEqual(headless["clusterIP"], "None")
        (port,) = headless["ports"]
        self.assertEqual(kit.process(objects)["backends"][0]["replicas"], {"dns": f"llm-engines:{port['port']}", "every": "5s"})

    def test_an_edit_restarts_it_but_for_the_mode(self):
        of_template = lambda *settings: kit.the(kit.rendered("gateway", *settings), "Deployment")["spec"]["template"]["metadata"]
        self.assertEqual(of_template(), of_template("process.mode=auto"))
        self.assertNotEqual(of_template(), of_template("process.drain.grace=200s"))
        self.assertNotEqual(of_template(), of_template("backend.name=other"))

    def test_one_is_always_there(self):
        objects = kit.rendered("gateway")
        budget, replicas = kit.the(objects, "PodDisruptionBudget")["spec"], kit.the(objects, "Deployment")["spec"]["replicas"]
        self.assertGreater(replicas, budget["maxUnavailable"])


class Rollback(unittest.TestCase):
    def patched(self, shape, patch):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as service:
            yaml.safe_dump(kit.the(kit.rendered(shape), "Service", "llm"), service)
            service.flush()
            return yaml.safe_load(kit.run(kit.tool("kubectl"), "patch", "--local", "--filename", service.name, "--patch-file",
                                          kit.KUBERNETES / f"rollback/{patch}.yaml", "--output", "yaml"))["spec"]

    def test_the_patched_service_points_to_the_engine_of_the_pod(self):
        for shape in ("sidecar-vllm", "sidecar-sglang"):
            objects, service = kit.rendered(shape), self.patched(shape, "sidecar")
            (engine,) = kit.containers(kit.pod(objects))["engine"]["ports"]
            (port,) = service["ports"]
            self.assertEqual((port["port"], port["targetPort"]), (80, engine["containerPort"]))
            self.assertEqual(service["selector"], kit.the(objects, "Service", "llm")["spec"]["selector"])
            down = self.patched(shape, "sidecar-down")
            self.assertEqual(down, {**service, "publishNotReadyAddresses": True})

    def test_the_patched_service_points_to_the_engines_behind_the_gateway(self):
        service, engines = self.patched("gateway", "gateway"), kit.the(kit.rendered("gateway"), "Service", "llm-engines")["spec"]
        self.assertEqual(service["selector"], engines["selector"])
        self.assertEqual(service["ports"][0]["targetPort"], engines["ports"][0]["port"])

    def test_the_chart_renders_the_same(self):
        for shape, patch in [("sidecar-vllm", "sidecar"), ("gateway", "gateway")]:
            by_chart = kit.the(kit.rendered(shape, "service.to=engine"), "Service", "llm")["spec"]
            self.assertEqual(self.patched(shape, patch), by_chart)
            before = kit.the(kit.rendered(shape), "Service", "llm")["spec"]
            self.assertEqual(before["ports"][0]["targetPort"], kit.port(kit.process(kit.rendered(shape))["listen"][0]["address"]))


if __name__ == "__main__":
    unittest.main()
