"""manifests/ is what the chart renders, and the examples for GitOps fit the chart."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from manifests import render
from tests.charts.chart import CHART, NEWEST, ROOT, Helm, Object
from tests.charts.test_chart_values import SCHEMA, merged

MANIFESTS = ROOT / "manifests"


def documents(path: Path) -> list[Object]:
    """Return the objects in a file."""
    return [thing for thing in yaml.safe_load_all(path.read_text()) if thing]


def key(thing: Object) -> tuple[str, str]:
    """Return what identifies an object."""
    return thing["kind"], thing["metadata"]["name"]


def test_manifests_are_rendered_from_the_chart(any_helm: Helm) -> None:
    """After a change of the chart, run `make manifests`."""
    written = dict(render.render(str(any_helm.program)))
    by_hand = {"namespace.yaml", "kustomization.yaml"}
    there = {path for path in MANIFESTS.rglob("*.yaml") if path.name not in by_hand and path.parent.name != "gitops"}
    assert there == written.keys()
    for path, text in written.items():
        assert path.read_text() == text, path


@pytest.mark.parametrize("overlay", [overlay.name for overlay in render.OVERLAYS])
def test_base_and_overlay_give_what_the_chart_gives(overlay: str, any_helm: Helm) -> None:
    folder = MANIFESTS / "overlays" / overlay
    objects = {key(thing): thing for thing in documents(MANIFESTS / "base" / "warmroute.yaml")}
    for thing in documents(folder / "replaced.yaml"):
        assert thing["spec"].pop("$patch") == "replace"
        assert key(thing) in objects
        objects[key(thing)] = thing
    for name in ["added.yaml", *(["../../components/monitoring/monitoring.yaml"] if overlay == "production" else [])]:
        for thing in documents(folder / name):
            assert key(thing) not in objects
            objects[key(thing)] = thing
    wanted = render.template(str(any_helm.program), f"--values={CHART}/values-{overlay}.yaml")
    assert objects == {key(thing): thing for thing in wanted}


def test_kustomizations_name_the_files_that_are_there() -> None:
    for path in MANIFESTS.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(path.read_text())
        named = kustomization.get("resources", []) + kustomization.get("components", [])
        named += [patch["path"] for patch in kustomization.get("patches", [])]
        assert all((path.parent / name).exists() for name in named)
        beside = {file.name for file in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert beside == {name for name in named if name.endswith(".yaml")}


@pytest.mark.parametrize("overlay", [overlay.name for overlay in render.OVERLAYS])
def test_kustomize_builds_what_the_chart_renders(overlay: str, kubectl: Path, any_helm: Helm) -> None:
    done = subprocess.run(
        [str(kubectl), "kustomize", str(MANIFESTS / "overlays" / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    objects = [thing for thing in yaml.safe_load_all(done.stdout) if thing]
    assert {"Namespace", "Deployment", "StatefulSet"} <= {thing["kind"] for thing in objects}
    for thing in objects:
        if not thing["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(thing, NEWEST, strict=True)
    values = f"--values={CHART}/values-{overlay}.yaml"
    wanted = {key(thing): thing for thing in render.template(str(any_helm.program), values)}
    built = {key(thing): thing for thing in objects if thing["kind"] not in ("Namespace", "Secret")}
    assert built == wanted


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """Return this machine's kubectl, which contains kustomize."""
    found = shutil.which("kubectl") or shutil.which("kubectl", path=os.environ.get("KUBERNETES_BIN", ""))
    if found is None:
        pytest.skip("no kubectl on PATH or in $KUBERNETES_BIN")
    return Path(found)


def given_values(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the values and the names of the values files of a GitOps object."""
    for thing in documents(path):
        if thing["kind"] == "Application":
            helm = thing["spec"]["source"]["helm"]
            assert (ROOT / thing["spec"]["source"]["path"]) == CHART
            return helm["valuesObject"], helm["valueFiles"]
        if thing["kind"] == "HelmRelease":
            chart = thing["spec"]["chart"]["spec"]
            assert (ROOT / chart["chart"]) == CHART
            return thing["spec"]["values"], [Path(name).name for name in chart["valuesFiles"]]
    raise AssertionError(f"{path} has neither an Application nor a HelmRelease")


@pytest.mark.parametrize("name", ["argocd-application.yaml", "flux-helmrelease.yaml"])
def test_gitops_examples_fit_the_chart(name: str, any_helm: Helm, tmp_path: Path) -> None:
    values, files = given_values(MANIFESTS / "gitops" / name)
    both = values
    for file in reversed(files):
        both = merged(yaml.safe_load((CHART / file).read_text()), both)
    jsonschema.validate(both, SCHEMA, cls=jsonschema.Draft7Validator)
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(both))
    secrets = [thing for thing in any_helm.render(tmp_path / "values.yaml") if thing["kind"] == "Secret"]
    assert not secrets, "a tool that renders again and again would change a password made up by the chart"
