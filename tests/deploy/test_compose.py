"""compose.yaml: valid, confined, consistent with config file, Prometheus and Grafana's folders."""

import os
import pathlib
import re
import shutil
import tempfile
import unittest

import compose_spec
import yaml

import kit

FOLDER = kit.DEPLOY / "compose"
# A variable with a default that may contain a variable; compose fills them in before it reads the
# file.
VARIABLE = re.compile(r"\$\{(\w+)(?::-((?:[^${}]|\$\{[^{}]*\})*))?\}")


def filled(text, given):
    while VARIABLE.search(text):
        text = VARIABLE.sub(lambda found: given.get(found[1], found[2] if found[2] is not None else ""), text)
    return text


def composed():
    text = filled((FOLDER / "compose.yaml").read_text(), {"HOME": "/home/operator"})
    return text, yaml.safe_load(text)


class Compose(unittest.TestCase):
    def test_it_follows_the_specification(self):
        text, _ = composed()
        file = compose_spec.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text)))
        file.validate()
        self.assertEqual(set(file.service_names()), {"vllm-cpu", "vllm-gpu", "foretell", "prometheus", "grafana"})
        with self.assertRaises(ValueError):
            compose_spec.PyCompose.from_yaml(text.replace("cap_drop:", "cap_drops:"))

    def test_nobody_is_root_or_can_become_it(self):
        for name, service in composed()[1]["services"].items():
            self.assertGreater(int(service["user"].split(":")[0]), 0, name)
            self.assertIs(service["read_only"], True, name)
            self.assertEqual((service["cap_drop"], service["security_opt"]), (["ALL"], ["no-new-privileges:true"]), name)

    def test_every_port_is_open_to_this_machine_only_and_the_admin_interface_to_none(self):
        process = yaml.safe_load((FOLDER / "foretell/foretell.yaml").read_text())
        for name, service in composed()[1]["services"].items():
            for published in service["ports"]:
                host, _, inside = published.split(":")
                self.assertEqual(host, "127.0.0.1", name)
                self.assertNotEqual(int(inside), kit.port(process["admin"]["address"]))
        self.assertEqual(process["mode"], "observe")
        (published,) = composed()[1]["services"]["foretell"]["ports"]
        self.assertEqual(int(published.split(":")[2]), kit.port(process["listen"][0]["address"]))
        self.assertTrue(process["admin"]["address"].startswith("127.0.0.1:"))

    def test_both_engines_answer_where_foretell_asks(self):
        process = yaml.safe_load((FOLDER / "foretell/foretell.yaml").read_text())
        (replica,) = process["backends"][0]["replicas"]
        for name in ("vllm-cpu", "vllm-gpu"):
            service = composed()[1]["services"][name]
            (alias,) = service["networks"]["default"]["aliases"]
            (listens,) = [word.removeprefix("--port=") for word in service["command"] if word.startswith("--port=")]
            self.assertEqual(replica, f"http://{alias}:{listens}")

    def test_there_is_time_to_drain(self):
        services, process = composed()[1]["services"], yaml.safe_load((FOLDER / "foretell/foretell.yaml").read_text())
        drain = kit.seconds(process["drain"]["delay"]) + kit.seconds(process["drain"]["grace"])
        self.assertGreater(kit.seconds(services["foretell"]["stop_grace_period"]), drain)
        for name in ("vllm-cpu", "vllm-gpu"):
            self.assertGreater(kit.seconds(services[name]["stop_grace_period"]), kit.seconds(services["foretell"]["stop_grace_period"]))

    def test_folders_that_are_mounted_are_there_and_configuration_is_a_folder(self):
        for name, service in composed()[1]["services"].items():
            for volume in service.get("volumes", []):
                source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
                if source.startswith("."):
                    self.assertTrue(os.path.normpath(FOLDER / source).startswith(str(kit.ROOT)))
                    if not source.startswith("../../grafana/"):
                        self.assertTrue((FOLDER / source).exists(), f"{name}: {source}")
        (configuration,) = composed()[1]["services"]["foretell"]["volumes"]
        self.assertEqual(configuration, "./foretell:/etc/foretell:ro")

    def test_what_it_takes_from_grafanas_folder_is_there(self):
        """Dashboards, provisioning and rules are kept in grafana/."""
        for source in ("provisioning/datasources", "provisioning/dashboards"):
            self.assertTrue(list((kit.ROOT / "grafana" / source).glob("*.y*ml")), source)
        self.assertTrue(list((kit.ROOT / "grafana/dashboards").glob("*.json")))
        self.assertTrue((kit.ROOT / "grafana/rules/foretell.rules.yaml").is_file())
        # The dashboards must be mounted where the provider looks.
        mounted = [each.split(":")[1] for each in composed()[1]["services"]["grafana"]["volumes"] if "grafana/dashboards" in each]
        paths = [provider["options"]["path"] for path in (kit.ROOT / "grafana/provisioning/dashboards").glob("*.y*ml")
                 for provider in yaml.safe_load(path.read_text())["providers"]]
        self.assertEqual(paths, mounted)
        (source,) = [source for path in (kit.ROOT / "grafana/provisioning/datasources").glob("*.y*ml")
                     for source in yaml.safe_load(path.read_text())["datasources"] if source["type"] == "prometheus"]
        self.assertIn(source["url"], ("http://prometheus:9090", "${PROMETHEUS_URL}"))


class Prometheus(unittest.TestCase):
    def test_its_configuration_is_valid_with_the_rules(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "rules").mkdir()
            for rules in (kit.ROOT / "grafana/rules").glob("*.rules.yaml"):
                shutil.copy(rules, folder / "rules")
            text = (FOLDER / "prometheus.yaml").read_text().replace("/etc/prometheus", str(folder))
            (folder / "prometheus.yaml").write_text(text)
            kit.run(kit.tool("promtool"), "check", "config", folder / "prometheus.yaml")

    def test_it_scrapes_what_compose_runs(self):
        process = yaml.safe_load((FOLDER / "foretell/foretell.yaml").read_text())
        jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]}
        self.assertEqual(jobs, {"foretell": [f"foretell:{kit.port(process['metrics']['address'])}"],
                                "engine": [process["backends"][0]["replicas"][0].removeprefix("http://")]})


if __name__ == "__main__":
    unittest.main()
