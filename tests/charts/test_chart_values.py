"""Values that are wrong are refused, by the schema or by a message that names the remedy."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from charts import generate
from charts.schema import OWNED, PROGRAMS
from charts.values_doc import read_values
from tests.charts.chart import CHART, Helm, RenderError

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
SIM = {"source": "random://", "device": "sim"}


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that a reference names."""
    reference = schema.get("$ref") or next((part["$ref"] for part in schema.get("allOf", [])), None)
    return SCHEMA["definitions"][reference.rsplit("/", 1)[1]] if reference else schema


def closed_levels(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the mappings whose keys the chart defines. Kubernetes' own objects and maps of strings take any key."""
    schema = resolved(schema)
    if schema.get("additionalProperties") is False:
        yield path
    for key, inner in schema.get("properties", {}).items():
        yield from closed_levels(inner, (*path, key))
    for inner in schema.get("patternProperties", {}).values():
        yield from closed_levels(inner, (*path, "any"))


LEVELS = list(closed_levels(SCHEMA))


def with_typo(path: tuple[str, ...], key: str = "tyop") -> dict[str, Any]:
    """Return values with only an unknown key at a path."""
    values: dict[str, Any] = {key: 1}
    for part in reversed(path):
        values = {part: values}
    return values


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return both merged; the second takes precedence."""
    out = copy.deepcopy(one)
    for key, value in other.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def test_nearly_every_level_is_closed() -> None:
    """Only these levels take any key: Kubernetes' objects, maps of labels and annotations, `global`."""
    assert len(LEVELS) > 60
    for path in [(), ("gateway",), ("gateway", "settings"), ("models", "any", "settings"), ("monitoring",)]:
        assert path in LEVELS


@pytest.mark.parametrize("path", LEVELS, ids=lambda path: ".".join(path) or "top")
def test_the_schema_refuses_a_typo_at_every_level(path: tuple[str, ...]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="tyop"):
        jsonschema.validate(with_typo(path), SCHEMA, cls=jsonschema.Draft7Validator)


def test_helm_refuses_typos(helm: Helm, tmp_path: Path) -> None:
    """One values file has an unknown key at each level, and helm names each of them."""
    values: dict[str, Any] = {}
    for i, path in enumerate(LEVELS):
        values = merged(values, with_typo(path, f"tyop{i}x"))
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(RenderError) as caught:
        helm.text(file)
    missing = [path for i, path in enumerate(LEVELS) if f"tyop{i}x" not in str(caught.value)]
    assert not missing


def test_the_schema_needs_nothing_from_elsewhere() -> None:
    text = json.dumps(SCHEMA)
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert text.count('"$ref": "#/') == text.count('"$ref":')


def test_defaults_fit_the_schema() -> None:
    jsonschema.validate(yaml.safe_load((CHART / "values.yaml").read_text()), SCHEMA, cls=jsonschema.Draft7Validator)


def test_readme_and_schema_are_generated() -> None:
    """`make chart` writes both files."""
    assert (CHART / "README.md").read_text() == generate.readme(read_values())
    assert (CHART / "values.schema.json").read_text() == generate.schema()
    assert {path.name: path.read_text() for path in (CHART / "files").glob("*.acl")} == generate.redis_rules()


@pytest.mark.parametrize("program", PROGRAMS)
def test_settings_are_those_of_the_programs(program: str) -> None:
    properties = SCHEMA["definitions"][f"{program}Settings"]["properties"]
    fields = set(PROGRAMS[program].model_fields)
    removed = set(PROGRAMS[program].removed)
    assert set(properties) == fields - OWNED[program] | removed
    assert not removed & fields
    assert OWNED[program] <= fields


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models.a": {"device": "sim"}}, r"models\.a\.source is empty: say where"),
        (
            {"models.a": {"source": "s3://a/b"}},
            r'models\.a\.source "s3://a/b" is not of a known kind: it must begin with',
        ),
        ({"models.a": {"source": "hf://only"}}, r"hf://ORG/REPO"),
        ({"models.a": {"source": "pvc://"}}, r"pvc://CLAIM"),
        ({"models.a": {"source": "relative/path"}}, r"hostPath:///PATH"),
        ({"models.a": {"source": "/m", "checkpoint": {"layers": 1}}}, r"models\.a\.checkpoint is only for random://"),
        ({"models.a": {"source": "oci://a/b"}}, r"1\.35 on \(this is v1\.27\.0\).*imageVolumes=true"),
        ({"models.a": {**SIM, "terminationGracePeriodSeconds": 905}}, r"models\.a\.terminationGrace.*longestAnswerSec"),
        (
            {"models.a": {**SIM, "autoscaling": {"enabled": True}}},
            r"models\.a\.autoscaling\.enabled needs models\.a\.autoscaling\.prometheusUrl",
        ),
        (
            {"models.a": {**SIM, "autoscaling": {"enabled": True, "minReplicas": 9, "prometheusUrl": "http://p"}}},
            r"minReplicas \(9\) is above maxReplicas \(4\)",
        ),
        ({"gateway.terminationGracePeriodSeconds": 30}, r"gateway\.terminationGracePeriodSeconds \(30\) would cut off"),
        (
            {"gateway.autoscaling": {"enabled": True, "minReplicas": 11}},
            r"gateway\.autoscaling\.minReplicas \(11\) is above gateway\.autoscaling\.maxReplicas \(10\)",
        ),
        ({"gateway.ingress.enabled": True}, r"needs gateway\.ingress\.hosts"),
        ({"gateway.httpRoute.enabled": True}, r"needs gateway\.httpRoute\.parentRefs"),
        ({"gateway.service.nodePort": 30000}, r"needs gateway\.service\.type NodePort"),
        ({"gateway.serviceAccount.create": False}, r"gateway\.serviceAccount\.name is empty"),
        ({"gateway.apiKeys": {"keys": ["a"], "existingSecret": "b"}}, r"gateway\.apiKeys.*remove one"),
        ({"gateway.tenants": {"list": [{"name": "a"}], "existingSecret": "b"}}, r"gateway\.tenants.*remove one"),
        (
            {"gateway.tenants": {"list": [{"name": "a", "isolation": "tenant"}]}},
            r"tenant a has isolation: tenant, which needs gateway\.tenants\.saltSecret",
        ),
        (
            {"gateway.tenants": {"list": [{"name": "a"}]}, "loadgen.enabled": True},
            r"loadgen\.enabled with gateway\.tenants needs a key",
        ),
        ({"engines.serviceAccount.create": False}, r"engines\.serviceAccount\.name is empty"),
        ({"engines.existing.port": 8000}, r"without engines\.existing\.selector"),
        ({"engines.existing": [{"port": 8000}]}, r"engines\.existing\[0\]\.selector is empty"),
        (
            {"engines.existing": [{"selector": {"a": "b"}, "onlyModel": True}]},
            r"existing\[0\]\.onlyModel needs engines\.existing\[0\]\.model",
        ),
        (
            {"engines.existing": [{"selector": {"a": "b"}, "kvEventsReplayPort": 1}]},
            r"kvEventsReplayPort needs engines\.existing\[0\]\.kvEventsPort",
        ),
        (
            {"engines.existing": [{"selector": {"a": "b"}, "name": "x"}, {"selector": {"a": "c"}, "name": "x"}]},
            r'engines\.existing\[1\]\.name "x" is the name of another set',
        ),
        ({"models.a": {**SIM, "engine": "vllm"}}, r"models\.a\.device is sim.*give cuda or cpu"),
        ({"models.a": {"source": "random://", "engine": "sglang"}}, r"models\.a\.source is random://.*give hf://"),
        (
            {"models.a": {"source": "/m", "engine": "vllm", "settings": {"max_running": 1}}},
            r"models\.a\.settings is only for the bundled engine.*models\.a\.flags",
        ),
        (
            {"models.a": {**SIM, "flags": {"x": 1}}},
            r"models\.a\.flags is only for vLLM and SGLang.*use models\.a\.settings",
        ),
        ({"models.a": {**SIM, "tensorParallel": 2}}, r"models\.a\.tensorParallel is only for vLLM and SGLang"),
        (
            {"models.a": {"source": "/m", "gpu": {"count": 2}}},
            r"models\.a\.gpu\.count is 2, and the bundled engine uses one",
        ),
        (
            {"models.a": {"source": "/m", "engine": "vllm", "dataParallel": 3, "kvEvents": {"replayPort": 5558}}},
            r"models\.a\.kvEvents: port 5558 of rank 1 is taken",
        ),
        (
            {"models.a": {"source": "/m", "engine": "vllm", "kvEvents": {"port": 8000}}},
            r"models\.a\.kvEvents: port 8000 of rank 0 is taken",
        ),
        ({"externalRedis.url": "redis://a:1"}, r"set redis\.enabled=false"),
        (
            {"redis.enabled": False, "externalRedis": {"url": "redis://a:1", "existingSecret": "b"}},
            r"externalRedis\.url and externalRedis\.existingSecret",
        ),
        (
            {"redis.enabled": False, "externalRedis.url": "redis://:pw@a:1"},
            r"holds credentials.*externalRedis\.existingSecret",
        ),
        (
            {"redis.enabled": False, "externalRedis.url": "rediss://[fd00::1]:6380/3"},
            r"port 6380, which networkPolicy\.externalRedisPorts \[6379\] does not",
        ),
        (
            {"redis.enabled": False, "externalRedis.url": "redis://a", "networkPolicy.externalRedisPorts": [1]},
            r"port 6379, which",
        ),
        ({"redis.auth": {"password": "a", "existingSecret": "b"}}, r"redis\.auth\.password and"),
        ({"loadgen.enabled": True}, r"set gateway\.settings\.allow_policy_header=true"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_name_value_and_remedy(any_helm: Helm, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RenderError, match=message):
        any_helm.text(values)


@pytest.mark.parametrize(
    "values",
    [
        {"gateway.settings": {"policy": "nearest"}},
        {"gateway.settings": {"shadow_policies": ["nearest"]}},
        {"gateway.settings": {"shadow_policies": ["cache_aware", "cache_aware"]}},
        {"gateway.settings": {"drain_timeout_s": 5}},
        {"gateway.settings": {"max_in_flight": 0}},
        {"models.a": {**SIM, "device": "tpu"}},
        {"models.a": {**SIM, "settings": {"block_size": "16"}}},
        {"models.Upper": SIM},
        {"redis.auth.password": "with@sign"},
        {"strideBytes": 255},
        {"longestAnswerSeconds": 0},
        {"gateway.image.digest": "sha256:short"},
        {"engines.defaults.autoscaling.minReplicas": -1},
        {"engines.defaults.autoscaling.waitingRequests": 0},
        {"engines.defaults.autoscaling.queuedTokens": 0},
        {"engines.defaults.loadTimeoutSeconds": 0},
        {"gateway.autoscaling.targetInFlight": 0},
        {"gateway.autoscaling.targetCPUPercent": 0},
        {"networkPolicy.apiServerPorts": [70000]},
        {"namespaceOverride": "Upper"},
        {"engines.existing": {"selector": {"app": "a"}, "namespace": "Upper"}},
        {"engines.existing": {"selector": {"app": "a"}, "port": "Upper"}},
        {"engines.existing": {"selector": {"app": "a,b"}}},
        {"models.a": {**SIM, "settings": {"block_size": 17}}},
        {"engines.existing": [{"selector": {"app": "a"}, "selectr": {}}]},
        {"engines.existing": [{"selector": {"app": "a"}, "ranks": 0}]},
        {"engines.existing": [{"selector": {"app": "a"}, "kvEventsPort": 70000}]},
        {"models.a": {"source": "/m", "engine": "trt"}},
        {"models.a": {"source": "/m", "engine": "vllm", "flags": {"max-model-len": 1}}},
        {"models.a": {"source": "/m", "engine": "vllm", "dataParallel": 0}},
        {"redis.enabled": False, "externalRedis.url": "redis.example.com:6379"},
    ],
    ids=str,
)
def test_the_schema_refuses_wrong_values(any_helm: Helm, values: dict[str, Any]) -> None:
    with pytest.raises(RenderError, match="don't meet the specifications"):
        any_helm.text(values)
