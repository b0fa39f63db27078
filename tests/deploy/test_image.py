"""The Dockerfile: read by Docker's own parser, linted, script run; it copies all build inputs."""

import fnmatch
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
import unittest

import dockerfile

import kit

FILE = kit.DEPLOY / "Dockerfile"
LABELS = ["title", "description", "source", "licenses", "version", "revision"]


def stages():
    """The commands of each stage by its name, and the arguments before the first one."""
    found, arguments, at = {}, {}, None
    for command in dockerfile.parse_file(str(FILE)):
        if command.cmd.upper() == "FROM":
            at = found.setdefault(command.value[2], [command])
        elif at is None:
            name, value = command.value[0].split("=", 1)
            arguments[name] = value
        else:
            at.append(command)
    return found, arguments


def of(stage, word):
    return [command for command in stage if command.cmd.upper() == word]


def context():
    """Files of the repository that .dockerignore leaves; the last matching rule decides."""
    rules = [line for line in (kit.ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    listed = kit.run("git", "-C", kit.ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()

    def left(path):
        keep = True
        for rule in rules:
            pattern = rule.removeprefix("!").removeprefix("**/")
            parents = [path, *(str(parent) for parent in pathlib.PurePath(path).parents)]
            names = parents if not rule.startswith("**/") else path.split("/")
            if any(fnmatch.fnmatchcase(name, pattern) for name in names if name != "."):
                keep = rule.startswith("!")
        return keep

    return [path for path in listed if left(path)]


class Structure(unittest.TestCase):
    def test_it_passes_the_linters(self):
        kit.run(kit.tool("hadolint"), FILE)
        kit.run(kit.tool("shellcheck"), kit.DEPLOY / "healthcheck", kit.DEPLOY / "render.sh", kit.ROOT / "onnx/fetch.sh",
                kit.ROOT / "tests/deploy/fetch.sh")

    def test_bases_have_versions_and_the_last_stage_is_the_plain_image(self):
        found, arguments = stages()
        self.assertEqual(list(found)[-1], "cpu")
        for name, stage in found.items():
            image, tag = stage[0].value[0].split(":")
            version = arguments[tag.removeprefix("${").removesuffix("}")]
            self.assertRegex(version, r"^\d+\.\d+", f"{name}: {image}:{version}")

    def test_the_compiler_is_the_one_that_ci_checks_with(self):
        found, arguments = stages()
        channel = tomllib.loads((kit.ROOT / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
        self.assertTrue(arguments["RUST"].startswith(f"{channel}-"))
        self.assertIn(("RUSTUP_TOOLCHAIN", channel), [command.value[:2] for command in of(found["build"], "ENV")])

    def test_both_images_run_a_user_without_rights_and_nothing_needs_a_shell_that_is_missing(self):
        found, _ = stages()
        for name in ("cpu", "cuda"):
            image = found[name]
            self.assertEqual([command.value for command in of(image, "USER")], [("65532:65532",)])
            self.assertFalse(of(image, "RUN"), "it would run as root, or write into the image")
            for word in ("HEALTHCHECK", "ENTRYPOINT", "CMD"):
                (command,) = of(image, word)
                self.assertTrue(command.json, f"{word} would go through a shell")
            targets = {command.value[-1] for command in of(image, "COPY")}
            self.assertIn(of(image, "HEALTHCHECK")[0].value[1], targets)
            self.assertIn(of(image, "ENTRYPOINT")[0].value[0], targets)
            self.assertTrue((kit.DEPLOY / "healthcheck").read_text().startswith("#!/bin/bash\n"), "both bases have it")

    def test_labels_name_the_commit_that_was_built(self):
        found, _ = stages()
        version = tomllib.loads((kit.ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
        for name in ("cpu", "cuda"):
            words = of(found[name], "LABEL")[0].value
            labels = {key: value.strip('"') for key, value in zip(words[::2], words[1::2])}
            self.assertEqual(list(labels), [f"org.opencontainers.image.{label}" for label in LABELS])
            self.assertEqual(labels["org.opencontainers.image.revision"], "${REVISION}")
            self.assertEqual(labels["org.opencontainers.image.version"], version)
            self.assertIn("REVISION=unknown", [command.value[0] for command in of(found[name], "ARG")])

    def test_ports_are_those_of_the_manifests(self):
        found, _ = stages()
        for name in ("cpu", "cuda"):
            (exposed,) = of(found[name], "EXPOSE")
            process = kit.process(kit.rendered("gateway"))
            self.assertEqual([int(port) for port in exposed.value], [kit.port(process["listen"][0]["address"]), kit.port(process["metrics"]["address"])])

    def test_manifests_and_compose_name_the_image_that_the_head_of_the_file_builds(self):
        image = kit.containers(kit.pod(kit.rendered("gateway")))["foretell"]["image"]
        self.assertIn(f"-t {image} .", FILE.read_text())
        self.assertIn(f"image: {image}\n", (kit.DEPLOY / "compose/compose.yaml").read_text())


class Commands(unittest.TestCase):
    def test_every_run_line_is_a_shell_command(self):
        for name, stage in stages()[0].items():
            for command in of(stage, "RUN"):
                subprocess.run(["bash", "-n"], input=command.value[0], text=True, check=True)

    def test_the_runtime_stage_leaves_the_library_that_the_image_names(self):
        found, _ = stages()
        (command,) = of(found["runtime"], "RUN")
        with tempfile.TemporaryDirectory() as folder:
            # As in the stage, under another root. The wheel comes from the cache of `make` if it is
            # there.
            folder = pathlib.Path(folder)
            (folder / "fetch/onnx").mkdir(parents=True)
            (copied,) = of(found["runtime"], "COPY")
            self.assertEqual(copied.value, ("onnx/fetch.sh", "/fetch/onnx/fetch.sh"))
            shutil.copy(kit.ROOT / "onnx/fetch.sh", folder / "fetch/onnx/fetch.sh")
            here = re.sub(r"(?<=[ =])/(?=fetch|cache|onnxruntime)", f"{folder}/", f" {command.value[0]}")
            subprocess.run(["bash", "-euo", "pipefail", "-c", here], check=True, stdout=subprocess.DEVNULL)
            (named,) = [command.value[1] for command in of(found["cpu"], "ENV") if command.value[0] == "ORT_DYLIB_PATH"]
            copies = {command.value[0]: command.value[1] for command in of(found["cpu"], "COPY")}
            inside = pathlib.PurePath(named).relative_to(copies["/onnxruntime"])
            self.assertTrue((folder / "onnxruntime" / inside).is_file())
            self.assertTrue((folder / "onnxruntime/ThirdPartyNotices.txt").is_file())

    def test_the_cuda_stage_asks_for_a_pinned_package(self):
        (command,) = of(stages()[0]["runtime-cuda"], "RUN")
        package = shlex.split(command.value[0])[0].removeprefix("ORT_PACKAGE=")
        self.assertRegex((kit.ROOT / "onnx/fetch.sh").read_text(), rf"\n +{package}-Linux-x86_64\) arch=x86_64 hash=[0-9a-f]{{64}} ;;\n")
        outside = kit.run("env", "ORT_PACKAGE=other", "FORETELL_CACHE=/nowhere", kit.ROOT / "onnx/fetch.sh", code=1)
        self.assertIn("no pinned other", outside)

    def test_the_build_has_all_that_it_reads(self):
        paths = context()
        for copied in (command for stage in stages()[0].values() for command in of(stage, "COPY") if not command.flags or "--from" not in command.flags[0]):
            source = copied.value[0]
            self.assertTrue(source == "." or source in paths, source)
        self.assertFalse([path for path in paths if path.startswith((".git/", "target/", ".cache/", "docs/", "onnx/models/"))])
        # Files that the code includes by a path; code after `#[cfg(test)]` is not built here.
        for path in (path for path in paths if path.startswith("src/") and path.endswith(".rs") and not path.endswith("/tests.rs")):
            built = (kit.ROOT / path).read_text().split("#[cfg(test)]")[0]
            for taken in re.findall(r'include_(?:str|bytes)!\("([^"]+)"\)', built):
                self.assertTrue(os.path.normpath(os.path.join(os.path.dirname(path), taken)) in paths, f"{path} takes in {taken}")
        with tempfile.TemporaryDirectory() as folder:
            for path in paths:
                target = pathlib.Path(folder, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(kit.ROOT / path, target)
            (build,) = of(stages()[0]["build"], "RUN")
            words = shlex.split(build.value[0].split("&&")[0])
            self.assertEqual(words[:2], ["cargo", "build"])
            chosen = dict(zip(words[2:], words[3:]))
            metadata = kit.run("cargo", "metadata", "--locked", "--offline", "--no-deps", "--format-version=1", "--manifest-path", f"{folder}/Cargo.toml")
            self.assertIn(f'"kind":["bin"],"crate_types":["bin"],"name":"{chosen["--bin"]}"', metadata)
            self.assertIn(chosen["--profile"], tomllib.loads((kit.ROOT / "Cargo.toml").read_text())["profile"])
            self.assertIn(f"target/{chosen['--profile']}/{chosen['--bin']} ", build.value[0])


if __name__ == "__main__":
    unittest.main()
