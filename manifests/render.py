"""Render the chart into kustomize's base and overlays: `python -m manifests.render [HELM]`, default helm on PATH.

The base is the chart's defaults. An overlay is a values file. Objects that the base does not have go into `added.yaml`,
objects that differ from the base's into `replaced.yaml`, and those for Prometheus and Grafana into a component.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CHART = HERE.parent / "charts" / "warmroute"
NAME = "warmroute"
KUBE_VERSION = "1.35.0"
HEAD = "# Rendered from charts/warmroute by `make manifests`.\n"
DEADLINE_S = 60
MONITORING = ("ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap")
# helm makes a password when it installs; plain manifests cannot.
FLAGS = ("--set", f"redis.auth.existingSecret={NAME}-redis")

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Overlay:
    """A folder of `overlays`, and the values file from which it is rendered."""

    name: str
    values: str


OVERLAYS = (Overlay("demo", "values-demo.yaml"), Overlay("production", "values-production.yaml"))


def render(helm: str) -> Iterator[tuple[Path, str]]:
    """Yield every file and its content. Raises CalledProcessError, TimeoutExpired."""
    base = template(helm)
    yield HERE / "base" / "warmroute.yaml", _text(base)
    for overlay in OVERLAYS:
        objects = template(helm, f"--values={CHART / overlay.values}")
        missing = [_key(thing) for thing in base if _key(thing) not in map(_key, objects)]
        if missing:
            raise ValueError(f"{overlay.values} lacks objects that the base has: {missing}")
        monitoring = [thing for thing in objects if _is_monitoring(thing)]
        rest = [thing for thing in objects if not _is_monitoring(thing)]
        in_base = {_key(thing): thing for thing in base}
        folder = HERE / "overlays" / overlay.name
        yield folder / "added.yaml", _text(thing for thing in rest if _key(thing) not in in_base)
        replaced = [thing for thing in rest if in_base.get(_key(thing), thing) != thing]
        yield folder / "replaced.yaml", _text(_replacing(thing, in_base[_key(thing)]) for thing in replaced)
        if monitoring:
            yield HERE / "components" / "monitoring" / "monitoring.yaml", _text(monitoring)


def template(helm: str, *flags: str) -> list[Object]:
    """Return the chart's objects without its hooks, with kustomize's labels. Raises as `render` does."""
    command = [helm, "template", NAME, str(CHART), "--namespace", NAME, "--kube-version", KUBE_VERSION, "--no-hooks"]
    done = subprocess.run([*command, *FLAGS, *flags], check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    objects = [thing for thing in yaml.load_all(done.stdout, yaml.CSafeLoader) if thing]
    for thing in objects:
        labels = thing["metadata"]["labels"]
        labels.pop("helm.sh/chart")
        labels["app.kubernetes.io/managed-by"] = "kustomize"
    return sorted(objects, key=_key)


def _replacing(thing: Object, base: Object) -> Object:
    """Return a patch that replaces the whole spec.

    If it were merged, lists such as a container's `args` would keep what the base has.
    """
    if {**base, "spec": None} != {**thing, "spec": None}:
        raise ValueError(f"{_key(thing)} differs from the base in more than its spec")
    return {**thing, "spec": {"$patch": "replace", **thing["spec"]}}


def _is_monitoring(thing: Object) -> bool:
    """Return whether only Prometheus or Grafana needs the object. A Service for Prometheus is such an object."""
    return thing["kind"] in MONITORING or thing["metadata"]["name"].endswith("-metrics")


def _key(thing: Object) -> tuple[str, str]:
    return thing["kind"], thing["metadata"]["name"]


def _text(objects: Iterable[Object]) -> str:
    return HEAD + yaml.safe_dump_all(objects, sort_keys=False, width=120)


def main() -> None:
    """Write all files. Exits with the reason if helm cannot be run, or fails."""
    try:
        files = list(render(sys.argv[1] if len(sys.argv) > 1 else "helm"))
    except FileNotFoundError as error:
        sys.exit(f"no {error.filename}: name one with `make manifests HELM=...`; .ci/fetch_helm.py fetches one")
    except subprocess.CalledProcessError:
        sys.exit("helm could not render the chart; its reason is above")
    for path, text in files:
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(HERE.parent))


if __name__ == "__main__":
    main()
