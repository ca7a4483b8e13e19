"""What the images and their scripts promise, as far as their text shows. `make cluster-test` runs them."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.charts.chart import CI_VALUES, PROFILES, Helm, containers, pod_templates

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = ("router/Dockerfile", "engine/Dockerfile.cpu", "engine/Dockerfile.cuda", "loadgen/Dockerfile")
SCRIPTS = (".ci/run", ".ci/images.sh", ".ci/kind-up.sh", "tests/cluster/run.sh")
EXTRAS = {"router/Dockerfile": ["otel-grpc"], "loadgen/Dockerfile": ["loadgen"]}
NAMES = {"gateway": "router/Dockerfile", "engine-cpu": "engine/Dockerfile.cpu", "loadgen": "loadgen/Dockerfile"}


def instructions(path: str) -> list[tuple[str, str]]:
    """Return (INSTRUCTION, rest) of each instruction, with continued lines joined and without comments."""
    lines = [line for line in (ROOT / path).read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def stages(path: str) -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage, from its FROM on."""
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions(path):
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def of(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for word, rest in stage if word == name]


@pytest.mark.parametrize("path", DOCKERFILES)
def test_the_final_stage_only_copies_and_runs_without_root(path: str) -> None:
    build, final = stages(path)
    assert of(build, "FROM") == ["${BASE} AS build"]
    assert of(final, "FROM") == ["${BASE}"]
    assert not of(final, "RUN"), "nothing is installed where it is run"
    assert of(final, "COPY") == ["--from=build /opt/warmroute /opt/warmroute"]
    (user,) = of(final, "USER")
    assert all(int(number) >= 1000 for number in user.split(":")), "Kubernetes' runAsNonRoot wants a number"


@pytest.mark.parametrize("path", DOCKERFILES)
def test_the_base_has_a_version_and_can_be_replaced(path: str) -> None:
    (base,) = [rest for word, rest in instructions(path) if word == "ARG" and rest.startswith("BASE=")]
    image, _, tag = base.removeprefix("BASE=").rpartition(":")
    assert image == "docker.io/library/python"
    assert re.match(r"3\.\d+-", tag)


@pytest.mark.parametrize("path", DOCKERFILES)
def test_signals_reach_the_program(path: str) -> None:
    """As process 1, a program without a handler never sees a SIGTERM. Below a shell, no program ever sees one."""
    _, final = stages(path)
    (entry,) = of(final, "ENTRYPOINT")
    words = yaml.safe_load(entry)
    assert words[:3] == ["dumb-init", "--single-child", "--"]
    scripts = re.findall(r"^(warmroute-\w+) =", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert words[3] in scripts


@pytest.mark.parametrize("path", DOCKERFILES)
def test_every_installation_is_pinned(path: str) -> None:
    build, _ = stages(path)
    installs = [part for run in of(build, "RUN") for part in run.split("&&") if "pip install" in part]
    assert len(installs) == 2
    for install in installs:
        assert "-c constraints.txt" in install or "--no-deps" in install, install
    pins = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    assert all("==" in pin for pin in pins)
    assert any(pin.startswith("dumb-init==") for pin in pins)


@pytest.mark.parametrize("path", DOCKERFILES)
def test_what_is_copied_exists_and_may_be_seen(path: str) -> None:
    build, _ = stages(path)
    seen = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [source for copy in of(build, "COPY") for source in copy.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == name or source.startswith(f"{name}/") for name in seen), f".dockerignore hides {source}"


def environment(path: str) -> dict[str, str]:
    """Return the variables that the final stage sets."""
    return dict(pair.split("=", 1) for rest in of(stages(path)[-1], "ENV") for pair in rest.split())


def test_the_driver_is_found_where_clouds_mount_it() -> None:
    """GKE mounts the driver without telling the linker.

    An empty part of the path would mean the working directory, such as a /tmp that anybody writes to.
    """
    parts = environment("engine/Dockerfile.cuda")["LD_LIBRARY_PATH"].split(":")
    assert "/usr/local/nvidia/lib64" in parts
    assert all(part.startswith("/") for part in parts)


def test_an_image_that_could_not_compile_kernels_is_not_built(tmp_path: Path) -> None:
    """The build runs the script last, and the script names everything that is missing."""
    build, _ = stages("engine/Dockerfile.cuda")
    assert of(build, "RUN")[-1] == "python cuda_image.py"
    lacks = runpy.run_path(str(ROOT / ".ci" / "cuda_image.py"))["lacks"]
    (without, with_headers) = (tmp_path / "without", tmp_path / "with")
    with_headers.mkdir()
    (with_headers / "Python.h").touch()
    assert lacks("13.0", "/usr/bin/gcc", with_headers) == []
    assert "CUDA" in " ".join(lacks(None, "/usr/bin/gcc", with_headers))
    assert "compiler" in " ".join(lacks("13.0", None, with_headers))
    assert "headers" in " ".join(lacks("13.0", "/usr/bin/gcc", without))
    assert len(lacks(None, None, without)) == 3


def test_a_torch_for_cpus_is_no_engine_for_cards() -> None:
    """Run the script as the build does, in this environment, whose torch may or may not have CUDA."""
    ran = subprocess.run(
        [sys.executable, ".ci/cuda_image.py"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    has_cuda = torch.version.cuda is not None
    assert ("without CUDA" in ran.stderr) is not has_cuda, ran.stderr


def test_kernels_are_compiled_on_a_volume(any_helm: Helm) -> None:
    """Triton keeps compiled kernels below HOME and loads them from there. HOME is a volume: the root is read-only."""
    seen = 0
    for values in (*CI_VALUES, *PROFILES):
        for where, template in pod_templates(any_helm.render(values)):
            volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
            for one in containers(template):
                if one["name"] == "engine" and "--device=cuda" in one["args"]:
                    home = environment("engine/Dockerfile.cuda")["HOME"]
                    (mount,) = (m for m in one["volumeMounts"] if m["mountPath"] == home)
                    assert not mount.get("readOnly"), where
                    assert "emptyDir" in volumes[mount["name"]], where
                    seen += 1
    assert seen >= 4


def test_the_gateways_image_has_nothing_of_the_engine_but_what_it_shares() -> None:
    build, _ = stages("router/Dockerfile")
    sources = [source for copy in of(build, "COPY") for source in copy.split()[:-1]]
    engine = [source for source in sources if source.startswith("engine") or source == "."]
    assert engine == ["engine/__init__.py", "engine/contract", "engine/common"]


@pytest.mark.parametrize("path", DOCKERFILES)
def test_images_install_the_extras_of_their_program(path: str) -> None:
    build, _ = stages(path)
    (command,) = re.findall(r"python requirements.py ([^>]*)>", "\n".join(of(build, "RUN")))
    extras = command.split()
    assert extras == EXTRAS.get(path, ["engine", "otel-grpc"])
    listed = subprocess.run(
        [sys.executable, ".ci/requirements.py", *extras], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "aiohttp>=" in listed
    assert ("torch>=" in listed) == ("engine" in extras)


def test_an_unknown_extra_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, ".ci/requirements.py", "enigne"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "enigne" in done.stderr


def test_scripts_build_the_images_that_the_chart_names() -> None:
    values = yaml.safe_load((ROOT / "charts/warmroute/values.yaml").read_text())
    chart = yaml.safe_load((ROOT / "charts/warmroute/Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert chart["appVersion"] == version[1], "the tag that the scripts give the images"
    named = [values["gateway"]["image"]["repository"], values["loadgen"]["image"]["repository"]]
    named += re.findall(r'"(warmroute/engine-cpu)"', (ROOT / "charts/warmroute/templates/_models.tpl").read_text())
    assert sorted(named) == sorted(f"warmroute/{name}" for name in NAMES)
    for script in (".ci/images.sh", ".ci/kind-up.sh"):
        text = (ROOT / script).read_text()
        for name, dockerfile in NAMES.items():
            assert re.search(rf"\b{name}\b.*\b{re.escape(dockerfile)}", text), f"{script} does not build {name}"
    redis = values["redis"]["image"]
    assert f"docker.io/{redis['repository']}:{redis['tag']}" in (ROOT / ".ci/kind-up.sh").read_text()


@pytest.mark.parametrize("path", SCRIPTS)
def test_shellcheck_finds_nothing(path: str) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_script_is_checked() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in (".ci", "tests", "router", "engine", "loadgen", "charts")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in ("", ".sh") and path.read_bytes()[:2] == b"#!"
    }
    assert found == set(SCRIPTS)


class StandIns:
    """A tree with run.sh. The scripts that run.sh calls are replaced by scripts that note each call in `log`."""

    def __init__(self, folder: Path, pytest_does: str) -> None:
        self.log = folder / "log"
        self.log.touch()
        self.tree = folder / "tree"
        up = f"mkdir -p $1/logs; echo hello > $1/logs/x.log; echo up $1 >> {self.log}"
        self._write(self.tree / ".ci/images.sh", "exit 0")
        self._write(self.tree / ".venv/bin/python", f"echo tests >> {self.log}; {pytest_does}")
        self._write(folder / "up", f"{up}; echo export CLUSTER_IS_UP=1")
        self._write(folder / "down", f"echo down $1 >> {self.log}")
        self._write(self.tree / "tests/cluster/run.sh", (ROOT / "tests/cluster/run.sh").read_text())
        self.environ = {
            "PATH": "/usr/bin:/bin",
            "TMPDIR": str(folder),
            "CLUSTER_UP": str(folder / "up"),
            "CLUSTER_DOWN": str(folder / "down"),
        }

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.tree / "tests/cluster/run.sh"],
            env=self.environ,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell cannot trap a signal that was ignored when the shell began, and pytest may ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    def assert_given_back(self) -> None:
        up, tests, down = self.calls()
        node = up.removeprefix("up ")
        assert (tests, down) == ("tests", f"down {node}")
        assert not Path(node).exists()
        assert (self.tree / "build/cluster/node/x.log").read_text() == "hello\n"


def test_a_cluster_is_given_back_when_tests_fail(tmp_path: Path) -> None:
    stands = StandIns(tmp_path, "exit 3")
    with stands.start() as run:
        _, stderr = run.communicate(timeout=30)
    assert run.returncode == 3, stderr
    stands.assert_given_back()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_is_given_back_when_the_run_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    # exec: a shell blocks signals while it forks, so a child forked then would miss the signal to the group.
    stands = StandIns(tmp_path, "exec sleep 60")
    with stands.start() as run:
        give_up_at = time.monotonic() + 20
        while "tests" not in stands.calls():
            assert time.monotonic() < give_up_at
            time.sleep(0.02)
        os.killpg(run.pid, number)
        run.communicate(timeout=30)
    assert run.returncode == 128 + number
    stands.assert_given_back()


def test_no_cluster_is_made_that_cannot_be_given_back(tmp_path: Path) -> None:
    stands = StandIns(tmp_path, "exit 0")
    del stands.environ["CLUSTER_DOWN"]
    with stands.start() as run:
        _, stderr = run.communicate(timeout=30)
    assert run.returncode != 0
    assert "CLUSTER_DOWN" in stderr
    assert not stands.calls()
