"""Fixtures for helm 4 and helm 3: this machine's programs, else those that .ci/fetch_helm.py fetches."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.charts.chart import ROOT, Helm, installed_helms


def _fetcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_helm", ROOT / ".ci" / "fetch_helm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helms() -> dict[str, Helm | str]:
    """Return `helm4` and `helm3`: each is the program, or the reason why there is none."""
    found: dict[str, Helm | str] = {name: Helm(path) for name, path in installed_helms().items()}
    fetcher = _fetcher()
    for name in {"helm3", "helm4"} - found.keys():
        try:
            found[name] = Helm(fetcher.fetch(name, ROOT / "build" / "helm"))
        except fetcher.FetchError as error:
            found[name] = f"no {name} on PATH or in $KUBERNETES_BIN, and {error}"
    return found


def _usable(helm: Helm | str) -> Helm:
    if isinstance(helm, str):
        pytest.skip(helm)
    return helm


@pytest.fixture(scope="session", params=["helm4", "helm3"])
def helm(request: pytest.FixtureRequest, helms: dict[str, Helm | str]) -> Helm:
    """Return each helm in turn."""
    return _usable(helms[request.param])


@pytest.fixture(scope="session")
def any_helm(helms: dict[str, Helm | str]) -> Helm:
    """Return one helm, for tests of what both render alike (test_chart_render.py shows that they do)."""
    return next((helm for helm in helms.values() if isinstance(helm, Helm)), None) or _usable(helms["helm4"])
