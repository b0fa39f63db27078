"""Checks the documentation: links resolve, snippets run, named metrics, routes and reasons exist.

    FORETELL=target/release/foretell python3 -m unittest discover -s tests/docs -t tests/docs

Snippets run in front of the bundled model: stand-ins replace the reader's own server, folders and
files (`Stand.say`). A command that cannot be run here has to be in NOT_RUN, with the reason.
"""

import hashlib
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FORETELL = pathlib.Path(os.environ.get("FORETELL", ROOT / "target/release/foretell")).resolve()
PAGES = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md"), ROOT / "deploy/README.md",
                ROOT / "grafana/README.md"])
PAGES = [page for page in PAGES if page.exists()]
# pages whose links are checked, and nothing else
LINKED = [ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", *(ROOT / "tests").glob("**/README.md"), *(ROOT / "onnx").glob("**/README.md")]
# records of measurements, with commands that take minutes or hours
RECORDS = {"results.md"}

# commands that are not run here, by prefix, with the reason
NOT_RUN = {
    "python3 -m venv export": "fetches several GB of PyTorch",
    "export/bin/": "the same",
    "python onnx/train/head.py": "needs PyTorch; the graphs that it exports are run by tests/python",
    "pip install ./deploy/plugins/vllm": "needs vLLM; tests/engines/inject.py runs it",
    "FORETELL_DRAFTS=": "the same",
    "foretell serve --backend http://127.0.0.1:8000 --tokenizer DIR --drafts": "the same",
    "git clone": "the reader's own copy",
    "docker": "no container engine here; the files are checked by tests/deploy",
    "kubectl": "no cluster here; the manifests are checked by tests/deploy",
    "helm": "rendered by tests/deploy",
    "systemctl": "needs an init system; the unit is run by tests/deploy",
    "sudo": "changes the machine",
    "install -D": "changes the machine",
    "cp deploy/systemd": "changes the machine",
    "journalctl": "needs an init system",
    "prometheus": "run by tests/grafana",
    "promtool": "run by tests/grafana",
    "foretell corpus": "needs a recording; run by tests/unit/train_cli.rs",
    "foretell train": "needs a recording; run by tests/unit/train_cli.rs",
}
# make targets that take long are checked to exist (`make -n`)
DRY = ("make",)


def blocks(page):
    """The fenced blocks of a page: language, text, line."""
    language, lines, begun = None, [], 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.match(r"\s*```(\S*)", line)
        if fence and language is None:
            language, lines, begun = fence.group(1) or "none", [], number
        elif fence:
            yield language, "\n".join(lines), begun
            language = None
        elif language is not None:
            lines.append(line)


def prose(page):
    """A page without its fenced blocks."""
    return re.sub(r"(?ms)^\s*```.*?^\s*```", "", page.read_text())


def anchors(page):
    """The anchors of this page's headings."""
    found, counts = set(), {}
    for line in re.sub(r"(?ms)^\s*```.*?^\s*```", "", page.read_text()).splitlines():
        heading = re.match(r"#+\s+(.*)", line)
        if not heading:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1))
        name = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        found.add(name if name not in counts else f"{name}-{counts[name]}")
        counts[name] = counts.get(name, 0) + 1
    return found


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url, within=60):
    until = time.monotonic() + within
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).read()
        except (urllib.error.URLError, OSError):
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


class Links(unittest.TestCase):
    def test_every_link_within_the_repository_leads_somewhere(self):
        broken = []
        for page in PAGES + LINKED:
            for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, anchor = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                if not file.exists():
                    broken.append(f"{page.relative_to(ROOT)}: {target}: no such file")
                elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                    broken.append(f"{page.relative_to(ROOT)}: {target}: no such heading")
        self.assertEqual(broken, [])

    def test_every_page_of_docs_is_linked_from_another_one(self):
        linked = set()
        for page in PAGES:
            for target in re.findall(r"\]\(([^)\s#]+)", prose(page)):
                linked.add((page.parent / target).resolve())
        lost = [page.name for page in (ROOT / "docs").glob("*.md") if page.resolve() not in linked]
        self.assertEqual(lost, [])


class Pictures(unittest.TestCase):
    def test_the_pictures_show_the_present_page_and_report(self):
        listed = json.loads((ROOT / "docs/images/pictures.json").read_text())
        files = subprocess.run(["git", "ls-files", "-z", "--", *listed["depends_on"]], cwd=ROOT, capture_output=True,
                               text=True, check=True).stdout.split("\0")

        def digest(name):
            lines = [line for line in (ROOT / name).read_text().split("\n") if not re.fullmatch(r"\s*(//.*)?", line)]
            return hashlib.sha256("\n".join(lines).encode()).hexdigest()

        hashes = {name: digest(name) for name in files if name}
        known = listed["sha256"]
        changed = sorted(name for name in hashes.keys() | known.keys() if hashes.get(name) != known.get(name))
        self.assertEqual(changed, [], "files that docs/images/*.png show have changed: run make pictures")


class Names(unittest.TestCase):
    reference = (ROOT / "docs/metrics.md").read_text()

    def test_every_metric_that_is_named_exists(self):
        known = set(re.findall(r"^\| `([a-z_]+)` \|", self.reference, re.M))
        self.assertGreater(len(known), 80)
        wrong = []
        for page in PAGES:
            if page.name in RECORDS | {"metrics.md"}:
                continue
            for name in set(re.findall(r"\b((?:foretell|gen_ai_server|process)_[a-z_]*[a-z])\b", page.read_text())):
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                if name not in known and base not in known and not any(other.startswith(name) for other in known):
                    wrong.append(f"{page.name}: {name}")
        # file and module names that look like metrics
        self.assertEqual([name for name in wrong if not re.search(r"foretell_(fakes|tests|vllm)", name)], [])

    def test_the_runbook_has_every_reason(self):
        page = (ROOT / "docs/runbook.md").read_text()
        label = re.compile(r"^\| `reason` \| [^|]* \| (.*) \|$", re.M)
        reasons = {reason for row in label.findall(self.reference) for reason in re.findall(r"`([a-z_]+)`", row)}
        self.assertGreater(len(reasons), 40)
        self.assertEqual([reason for reason in sorted(reasons) if f"`{reason}`" not in page], [])


class Stand(unittest.TestCase):
    """A target and a proxy in front of it, as a reader has them."""

    @classmethod
    def setUpClass(cls):
        if not FORETELL.exists():
            raise RuntimeError(f"{FORETELL} is not built: make build, or name it by FORETELL")
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        home = cls.home = pathlib.Path(cls.folder.name)
        cls.engine, cls.front, cls.admin = free_port(), free_port(), free_port()
        (home / "bin").mkdir()
        for program in ("foretell", "foretell-lab"):
            (home / "bin" / program).symlink_to(FORETELL.with_name(program))
        (home / "policies").mkdir()
        (home / "policies/all.yaml").write_text("version: 1\nname: all\ndrafters: [{ kind: prompt_lookup }]\n")
        (home / "foretell.yaml").write_text(
            f"version: 1\nlisten: [{{ address: '127.0.0.1:{cls.front}' }}]\nadmin: {{ address: '127.0.0.1:{cls.admin}' }}\n"
            f"backends: [{{ name: here, replicas: ['http://127.0.0.1:{cls.engine}'] }}]\npolicies: {{ dir: policies }}\n"
            "fleet: { store: 'redis://127.0.0.1:9' }\n")
        (home / "body.json").write_text(json.dumps(
            {"model": "foretell-target", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}))
        cls.start("target", "--model", str(ROOT / "onnx/models/target"), "--name", "foretell-target", "--listen",
                  f"127.0.0.1:{cls.engine}")
        wait_for(f"http://127.0.0.1:{cls.engine}/health")
        cls.start("serve", "--config", str(home / "foretell.yaml"))
        wait_for(f"http://127.0.0.1:{cls.admin}/readyz")

    @classmethod
    def start(cls, *arguments):
        log = open(cls.home / f"{arguments[0]}.log", "w")
        process = subprocess.Popen([FORETELL, *arguments], stdout=log, stderr=log, cwd=cls.home)
        cls.addClassCleanup(log.close)
        cls.addClassCleanup(process.wait)
        cls.addClassCleanup(process.kill)

    def say(self, command):
        """A reader's command, adapted to this stand."""
        for said, meant in [
            ("target/release/foretell", "foretell"),
            ("http://127.0.0.1:8000", f"http://127.0.0.1:{self.engine}"),
            ("127.0.0.1:9464", f"127.0.0.1:{self.admin}"),
            ("127.0.0.1:8080", f"127.0.0.1:{self.front}"),
            ("tests/control/", f"{ROOT}/tests/control/"),
            ("MODEL_ID", "foretell-target"),
            ("--tokenizer DIR", f"--tokenizer {ROOT}/onnx/models/target"),
        ]:
            command = command.replace(said, meant)
        return command

    def run_line(self, command):
        environment = {**os.environ, "PATH": f"{self.home}/bin:{os.environ['PATH']}"}
        for name in list(environment):
            if name.startswith("FORETELL_"):
                del environment[name]
        return subprocess.run(["bash", "-euo", "pipefail", "-c", self.say(command)], cwd=self.home, env=environment,
                              capture_output=True, text=True, timeout=300)

    def test_every_command_runs(self):
        ran, failed = 0, []
        for page in PAGES:
            if page.name in RECORDS:
                continue
            for language, text, line in blocks(page):
                if language not in ("sh", "bash", "console"):
                    continue
                for command in commands(text):
                    if any(command.startswith(start) for start in NOT_RUN):
                        continue
                    where = f"{page.relative_to(ROOT)}:{line}: {command}"
                    if command.startswith(DRY):
                        done = dry(command)
                    elif background(command):
                        done = self.begins(command)
                    else:
                        done = self.run_line(command)
                    ran += 1
                    if done.returncode != 0:
                        failed.append(f"{where}\n{done.stdout[-600:]}{done.stderr[-600:]}")
        self.assertEqual(failed, [], "\n".join(failed))
        self.assertGreater(ran, 10)

    def begins(self, command):
        """A long-running server: its settings are checked instead."""
        words = shlex.split(self.say(command).rstrip("& "))
        if "serve" not in words:
            return subprocess.CompletedProcess(words, 0, "", "")
        words = [str(FORETELL) if word.endswith("foretell") else word for word in words]
        words[words.index("serve")] = "check"
        return subprocess.run(words, cwd=self.home, capture_output=True, text=True, timeout=60)

    def test_every_yaml_is_taken(self):
        read, failed = 0, []
        for page in PAGES:
            for language, text, line in blocks(page):
                if language != "yaml" or page.name in RECORDS or "kind: Deployment" in text or "apiVersion" in text:
                    continue
                read += 1
                problem = self.checked(text)
                if problem:
                    failed.append(f"{page.relative_to(ROOT)}:{line}\n{problem}")
        self.assertEqual(failed, [], "\n".join(failed))
        self.assertGreater(read, 10)

    def checked(self, text):
        """The errors of `foretell check` for a file, or a part of one; empty if valid."""
        text = re.sub(r"tokenizer: /models/[^\s},\]]+", f"tokenizer: {ROOT}/onnx/models/target", text)
        # Any JSON object is one.
        text = re.sub(r"generation_config: /models/[^\s},\]]+", f"generation_config: {ROOT}/onnx/models/target/config.json", text)
        text = re.sub(r"(model|path): onnx/models/", rf"\1: {ROOT}/onnx/models/", text)
        text = re.sub(r"path: drafters/(small|ours)", f"path: {ROOT}/onnx/models/draft-same", text)
        text = re.sub(r"(ca|cert|key|token_file|own_token_file|key_file): (/etc/|ca|own|client|token)[\w./]*", r"\1: null", text)
        variables = {name: "127.0.0.1" for name in re.findall(r"\$\{(\w+)\}", text)}
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "policies").mkdir()
            process = "version: 1\nbackends: [{ name: b, replicas: ['http://127.0.0.1:9'] }]\n"
            policy = "version: 1\nname: own\n"
            small = f"drafters: {{ {', '.join(f'{name}: {{ path: {ROOT}/onnx/models/draft-same }}' for name in ('small', 'ours', 'draft-same'))} }}\n"
            if is_policy(text):
                policy = text if "version:" in text else policy + text
                process += small
            else:
                process = text if "version:" in text else ("" if "backends:" in text else process) + text
                process = process if "version:" in process else "version: 1\n" + process
            (folder / "foretell.yaml").write_text(process)
            (folder / "policies/own.yaml").write_text(policy)
            done = subprocess.run([FORETELL, "check", "--config", folder / "foretell.yaml", "--policies",
                                   folder / "policies"], capture_output=True, text=True, timeout=60,
                                  env={**os.environ, **variables})
            return None if done.returncode == 0 else done.stdout + done.stderr

    def test_every_route_of_the_admin_that_is_named_answers(self):
        named = set()
        for page in PAGES:
            named |= set(re.findall(r"`(?:GET |POST )?(/(?:api/[a-z]+|healthz|readyz|metrics))[`?/ ]", page.read_text()))
        self.assertGreater(len(named), 6)
        for route in sorted(named - {"/api/drain", "/api/server"}):
            try:
                status = urllib.request.urlopen(f"http://127.0.0.1:{self.admin}{route}", timeout=10).status
            except urllib.error.HTTPError as error:
                status = error.code
            self.assertIn(status, (200, 405), route)


def is_policy(text):
    """True if a snippet is (a part of) a policy file rather than of the config file."""
    if re.search(r"^corpus: \{ (record|share): true \}", text, re.M):
        return True
    if re.search(r"^(backends|listen|observe|limits|corpus|admin|tenant|timeouts):", text, re.M):
        return False
    if re.search(r"^drafters:\s*$\n\s+\w[\w-]*: \{", text, re.M) or re.search(r"^drafters: \{", text, re.M):
        return False
    return True


def background(command):
    return command.endswith("&") or re.match(r"(\S*foretell) (serve|target|demo)( |$)", command)


def commands(text):
    """The commands of a block: continued lines joined, without comments, prompts and outputs."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        line = re.sub(r"\s{2,}#.*$", "", line.strip())
        if line.startswith("$ "):
            yield line[2:]
        elif line and not line.startswith("#") and not re.search(r"^\$ ", joined, re.M):
            yield line


def dry(command):
    """Checks that the make targets of a line exist; the rest of it must be valid shell."""
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
    for part in re.split(r"&&|;|\|", command):
        words = part.split()
        if done.returncode == 0 and words[:1] == ["make"]:
            done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    return done


if __name__ == "__main__":
    unittest.main()
