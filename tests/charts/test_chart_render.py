"""Every values file lints, both helms render it alike, and Kubernetes of every version accepts the result."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from kubernetes_validate.utils import schema_contents  # type: ignore[import-untyped]

from tests.charts.chart import CHART, CI_VALUES, NEWEST, OLDEST, PROFILES, Helm, Object, kube_version

GOLDEN = Path(__file__).parent / "golden_default.yaml"
CRDS = (
    "HTTPRoute",
    "ServiceMonitor",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "InferencePool",
    "InferenceObjective",
)
ALL_VALUES = [*CI_VALUES, *PROFILES]
by_file = pytest.mark.parametrize("values", ALL_VALUES, ids=lambda path: path.stem)


def without_made_password(objects: list[Object]) -> list[Object]:
    """Return the objects without the password, which differs each time that helm renders without a cluster."""
    copy: list[Object] = json.loads(json.dumps(objects))
    for thing in copy:
        if thing["kind"] == "Secret" and "password" in thing["data"]:
            thing["data"] = dict.fromkeys(thing["data"], "made at install")
    return copy


def golden(objects: list[Object]) -> list[Object]:
    """Return what the golden file has: the objects, sorted, without made passwords and the text of scripts."""
    kept = without_made_password(objects)
    for thing in kept:
        if thing["kind"] == "Pod":
            thing["spec"]["containers"][0]["args"] = ["(files/test_completion.py)"]
    return sorted(kept, key=lambda thing: (thing["kind"], thing["metadata"]["name"]))


@pytest.fixture(autouse=True, scope="module")
def _schemas_read_once() -> Iterator[None]:
    """Read schemas once: the package would read a megabyte of JSON for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", functools.cache(schema_contents))
        yield


def test_there_is_a_values_file_for_every_branch() -> None:
    assert {path.stem for path in CI_VALUES} >= {"default-values", "gpu-values", "existing-values", "hooks-values"}


def test_lint_is_strict_and_silent(helm: Helm) -> None:
    for values in ALL_VALUES:
        said = helm.run("lint", "--strict", f"--kube-version={kube_version(values)}", f"--values={values}", str(CHART))
        assert "0 chart(s) failed" in said
        assert "WARNING" not in said


@by_file
def test_both_helms_render_the_same(values: Path, helm: Helm, any_helm: Helm) -> None:
    by_name = [
        {
            f"{o['kind']} {o['metadata'].get('namespace', '-')}/{o['metadata']['name']}": o
            for o in without_made_password(h.render(values))
        }
        for h in (helm, any_helm)
    ]
    assert by_name[0] == by_name[1]
    assert len(by_name[0]) == len(helm.render(values)), "two objects have one kind and name"


@by_file
def test_kubernetes_accepts_every_object(values: Path, any_helm: Helm) -> None:
    """The check is strict: an unknown field is an error."""
    oldest, newest = (int(version.split(".")[1]) for version in (kube_version(values), NEWEST))
    for version in (f"1.{minor}" for minor in range(oldest, newest + 1)):
        for thing in any_helm.render(values):
            if thing["kind"] not in CRDS:
                kubernetes_validate.validate(thing, version, strict=True)


def test_the_validation_finds_a_misspelt_field(any_helm: Helm) -> None:
    (deployment,) = (o for o in any_helm.render() if o["kind"] == "Deployment")
    broken = json.loads(json.dumps(deployment))
    broken["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError, match="enableServiceLink"):
        kubernetes_validate.validate(broken, OLDEST, strict=True)


def test_the_newest_kubernetes_known_is_tested() -> None:
    assert kubernetes_validate.latest_version().startswith(f"{NEWEST}.")


def test_defaults_are_as_written_down(any_helm: Helm) -> None:
    """After an intended change, run `python -m tests.charts.write_golden`."""
    assert list(yaml.safe_load_all(GOLDEN.read_text())) == golden(any_helm.render())


def test_names_fit(any_helm: Helm) -> None:
    for values in ALL_VALUES:
        for thing in any_helm.render(values):
            name = thing["metadata"]["name"]
            assert len(name) <= 63, name
            for label, value in thing["metadata"].get("labels", {}).items():
                assert len(value) <= 63, label


def test_objects_are_in_their_namespace(any_helm: Helm) -> None:
    for values in ALL_VALUES:
        elsewhere = {"bare-values": "elsewhere"}.get(values.stem, "ns")
        for thing in any_helm.render(values):
            if thing["kind"] == "ConfigMap" and values.stem == "hooks-values":
                continue  # an object of the user's own
            is_role = thing["kind"] in ("Role", "RoleBinding")
            engines = {
                "existing-values": {"inference", "batch"},
                "foreign-values": {elsewhere, "llm"},
                "both-values": {elsewhere, "inference"},
            }
            wanted = engines.get(values.stem, {elsewhere}) if is_role else {elsewhere}
            assert thing["metadata"]["namespace"] in wanted, thing["metadata"]["name"]


def test_an_upgrade_of_the_chart_alone_restarts_nothing(any_helm: Helm, tmp_path: Path) -> None:
    """The chart's version is in no pod and in no selector. Kubernetes would not let an upgrade change a selector."""
    for thing in any_helm.render(CHART / "values-demo.yaml"):
        spec = thing.get("spec", {})
        inner = json.dumps([spec.get("selector"), spec.get("template", {}).get("metadata")])
        assert "helm.sh/chart" not in inner
        assert "app.kubernetes.io/version" not in inner
