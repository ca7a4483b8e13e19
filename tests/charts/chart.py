"""Renders the chart with helm 3 and helm 4, with each combination of values once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "warmroute"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
PROFILES = sorted(CHART.glob("values-*.yaml"))
OLDEST, NEWEST = "1.27", "1.37"
DEADLINE_S = 60

Object = dict[str, Any]


class RenderError(Exception):
    """helm failed. The text is what it wrote to stderr."""


def kube_version(values: Path | None) -> str:
    """Return the oldest Kubernetes version for a values file: from its line `# kube-version: X`, else the chart's."""
    match = re.search(r"^# kube-version: (\S+)$", values.read_text(), re.MULTILINE) if values else None
    return match[1] if match else f"{OLDEST}.0"


@dataclass(slots=True)
class Helm:
    """One helm program. What it rendered is kept: a render takes a quarter of a second."""

    program: Path
    _rendered: dict[str, list[Object]] = field(default_factory=dict)

    def run(self, *arguments: str) -> str:
        """Run helm and return its standard output. Raises RenderError."""
        done = subprocess.run(
            [str(self.program), *arguments], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT
        )
        if done.returncode:
            raise RenderError(done.stderr)
        return done.stdout

    def text(self, values: Path | Mapping[str, Any] | None = None, *flags: str, kube: str | None = None) -> str:
        """`helm template` of the chart with a values file, or with values. Raises RenderError."""
        if isinstance(values, Path):
            given, version = [f"--values={values}"], kube_version(values)
        else:
            given = [f"--set-json={key}={json.dumps(value)}" for key, value in (values or {}).items()]
            version = kube_version(None)
        version = kube or version
        return self.run("template", "rel", str(CHART), "--namespace=ns", f"--kube-version={version}", *given, *flags)

    def render(
        self, values: Path | Mapping[str, Any] | None = None, *flags: str, kube: str | None = None
    ) -> list[Object]:
        """Return the rendered objects. Raises RenderError."""
        key = json.dumps([str(values) if isinstance(values, Path) else values, flags, kube])
        if key not in self._rendered:
            documents = yaml.load_all(self.text(values, *flags, kube=kube), yaml.CSafeLoader)
            self._rendered[key] = [document for document in documents if document]
        return self._rendered[key]


def installed_helms() -> dict[str, Path]:
    """Return this machine's helms by major version, `helm3` and `helm4`: from PATH, else from $KUBERNETES_BIN."""
    found: dict[str, Path] = {}
    for folder in (None, os.environ.get("KUBERNETES_BIN")):
        for name in ("helm", "helm3", "helm4"):
            path = shutil.which(name, path=folder) if folder or folder is None else None
            if path is None:
                continue
            said = subprocess.run([path, "version", "--short"], capture_output=True, text=True, timeout=DEADLINE_S)
            if match := re.match(r"v([34])\.", said.stdout):
                found.setdefault(f"helm{match[1]}", Path(path))
    return found


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """Return the objects of a kind."""
    return [thing for thing in objects if thing["kind"] == kind]


def named(objects: list[Object], kind: str, name: str) -> Object:
    """Return the one object of that kind and name."""
    (found,) = [thing for thing in of_kind(objects, kind) if thing["metadata"]["name"] == name]
    return found


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield (kind and name, pod template) of everything that makes pods."""
    for thing in objects:
        where = f"{thing['kind']} {thing['metadata']['name']}"
        if thing["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield where, thing["spec"]["template"]
        elif thing["kind"] == "Pod":
            yield where, thing


def containers(template: Object) -> list[Object]:
    """Return every container of a pod, including init containers."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def container(template: Object, name: str) -> Object:
    """Return the container called `name`."""
    (found,) = [one for one in containers(template) if one["name"] == name]
    return found
