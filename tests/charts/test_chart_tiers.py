"""Tiers below the KV pool: flags, volumes, and values that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.chart import CHART, Helm, RenderError, container
from tests.charts.test_chart_settings import load

VALUES = CHART / "ci" / "tiers-values.yaml"
BASE = {"models.m.source": "random://", "models.m.device": "cpu"}


def pod_of(objects: list[Any], model: str) -> Any:
    found = [one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"].endswith(f"-{model}")]
    return found[0]["spec"]["template"]


@pytest.mark.parametrize("model", ["host", "node-disk", "own-volume", "shared"])
def test_each_tier_has_its_flags_and_its_place(any_helm: Helm, model: str) -> None:
    template = pod_of(any_helm.render(VALUES), f"engine-{model}")
    engine = container(template, "engine")
    settings = load(engine)
    assert settings.host_cache_bytes == 8_000_000_000
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["name"]: mount for mount in engine["volumeMounts"]}
    assert (settings.disk_cache_bytes > 0) == ("kv-disk" in volumes) == ("kv-disk" in mounts) == (model != "host")
    assert (settings.shared_cache_bytes > 0) == ("kv-shared" in volumes) == ("kv-shared" in mounts)
    if settings.disk_cache_bytes:
        assert str(settings.disk_cache_path) == mounts["kv-disk"]["mountPath"]
        if model == "node-disk":
            size = volumes["kv-disk"]["emptyDir"]["sizeLimit"]
        else:
            spec = volumes["kv-disk"]["ephemeral"]["volumeClaimTemplate"]["spec"]
            size = spec["resources"]["requests"]["storage"]
            assert spec.get("storageClassName") == ("fast" if model == "own-volume" else None)
        room = int(size.removesuffix("Mi")) * 2**20 / settings.disk_cache_bytes
        assert 1.05 <= room <= 1.06, "the volume has room for the tier and for the file system's own data"
    if model == "shared":
        assert volumes["kv-shared"]["persistentVolumeClaim"] == {"claimName": "kv"}
        assert mounts["kv-shared"]["subPath"] == "kv"
        assert str(settings.shared_cache_path) == mounts["kv-shared"]["mountPath"]
        assert settings.shared_cache_bytes == 2_000_000_000_000


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"disk.bytes": 10**9}, "tiers.disk.bytes needs models.m.tiers.hostBytes"),
        ({"shared.bytes": 10**9, "shared.claim": "kv"}, "tiers.shared.bytes needs models.m.tiers.hostBytes"),
        ({"hostBytes": 10**9, "shared.bytes": 10**9}, "tiers.shared.bytes needs models.m.tiers.shared.claim"),
        ({"shared.claim": "kv"}, "tiers.shared.bytes is 0"),
        ({"disk.storageClassName": "fast"}, "storageClassName is only for volume ephemeral"),
    ],
)
def test_tiers_that_contradict_themselves_are_refused(any_helm: Helm, values: dict[str, Any], text: str) -> None:
    with pytest.raises(RenderError, match=text):
        any_helm.render({**BASE, **{f"models.m.tiers.{key}": value for key, value in values.items()}})


def test_tiers_are_of_the_bundled_engine(any_helm: Helm) -> None:
    foreign = {"models.m.source": "hf://a/b", "models.m.engine": "vllm", "models.m.tiers.hostBytes": 10**9}
    with pytest.raises(RenderError, match=r"models\.m\.tiers is only for the bundled engine"):
        any_helm.render(foreign)
