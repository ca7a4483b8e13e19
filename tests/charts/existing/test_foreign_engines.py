"""vLLM and SGLang in the chart: they accept the flags, their ports and probes fit, and the right pods reach them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.chart import CHART, Helm, Object, container, containers, named, of_kind
from tests.charts.existing.foreign import SGLANG, SGLANG_FLAGS, VLLM, VLLM_FLAGS
from tests.charts.monitoring.exported import mistakes
from tests.charts.monitoring.test_monitoring import EXPORTED
from tests.charts.test_chart_network import PROMETHEUS, STRANGER, Party, may, passes

VALUES = CHART / "ci" / "foreign-values.yaml"
FLAGS = {"vllm": VLLM_FLAGS, "sglang": SGLANG_FLAGS}
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


def rendered(helm: Helm, engine: str, **values: Any) -> tuple[Object, Object]:
    """Return the pod template of a model, and its engine's container."""
    model = {"engine": engine, "source": "/m", **values}
    template = named(helm.render({"models.a": model}), "Deployment", "rel-warmroute-engine-a")["spec"]["template"]
    return template, container(template, "engine")


def flags(one: Object) -> dict[str, str]:
    return {name: value for name, _, value in (arg.partition("=") for arg in one["args"]) if name.startswith("--")}


def variables(one: Object) -> dict[str, Any]:
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in one["env"]}


@pytest.mark.parametrize(
    "values", [VALUES, CHART / "values-vllm.yaml", CHART / "values-sglang.yaml"], ids=lambda p: p.stem
)
def test_flags_are_those_that_the_engine_has(any_helm: Helm, values: Path) -> None:
    kinds = set()
    for thing in of_kind(any_helm.render(values), "Deployment"):
        template = thing["spec"]["template"]
        kind = template["metadata"]["labels"].get("warmroute.io/engine")
        if kind is not None:
            kinds.add(kind)
            one = container(template, "engine")
            assert flags(one).keys() <= FLAGS[kind], thing["metadata"]["name"]
            assert (
                one["command"] == {"vllm": ["vllm", "serve"], "sglang": ["python3", "-m", "sglang.launch_server"]}[kind]
            )
    assert kinds


def test_values_become_flags_of_either_kind(any_helm: Helm) -> None:
    values = {"tensorParallel": 4, "dataParallel": 2, "maxModelLen": 4096, "servedModelName": "org/a"}
    vllm, sglang = (flags(rendered(any_helm, kind, **values)[1]) for kind in ("vllm", "sglang"))
    for given, name in ((vllm, "--tensor-parallel-size"), (sglang, "--tp-size")):
        assert given[name] == "4"
    assert (vllm["--data-parallel-size"], sglang["--dp-size"]) == ("2", "2")
    assert (vllm["--max-model-len"], sglang["--context-length"]) == ("4096", "4096")
    assert vllm["--served-model-name"] == sglang["--served-model-name"] == "org/a"
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-force-include-usage"} <= vllm.keys()
    assert {"--enable-cache-report", "--stream-response-default-include-usage", "--enable-metrics"} <= sglang.keys()
    assert vllm["--shutdown-timeout"] == "900"


def test_own_flags_come_last_in_their_forms(any_helm: Helm) -> None:
    _, one = rendered(
        any_helm,
        "vllm",
        flags={
            "port": 8000,
            "max_num_batched_tokens": 1000000,
            "enforce_eager": True,
            "async_scheduling": False,
            "lora_modules": ["a=/a", "b=/b"],
            "speculative_config": {"method": "ngram"},
            "gpu_memory_utilization": 0.9,
        },
        extraArgs=["--enable-lora"],
    )
    first = one["args"].index("--enforce-eager")
    assert one["args"][first:] == [
        "--enforce-eager",
        "--gpu-memory-utilization=0.9",
        *("--lora-modules", "a=/a", "b=/b"),
        "--max-num-batched-tokens=1000000",
        "--port=8000",
        '--speculative-config={"method":"ngram"}',
        "--enable-lora",
    ]


@KINDS
def test_events_ports_are_on_the_pod_and_told_to_gateways(any_helm: Helm, kind: str) -> None:
    template, one = rendered(any_helm, kind, dataParallel=3, kvEvents={"port": 7000, "replayPort": 7100})
    config = json.loads(flags(one)["--kv-events-config"])
    assert (config["publisher"], config["endpoint"], config["replay_endpoint"]) == (
        *("zmq", "tcp://*:7000", "tcp://*:7100"),
    )
    assert config.get("enable_kv_cache_events") == (True if kind == "vllm" else None)
    ports = {port["containerPort"]: port["name"] for port in one["ports"]}
    assert ports.keys() == {8000, 7000, 7001, 7002, 7100, 7101, 7102}
    assert all(len(name) <= 15 for name in ports.values())
    assert len(set(ports.values())) == len(ports)
    assert template["metadata"]["annotations"] == {
        "warmroute.io/kv-events-port": "7000",
        "warmroute.io/kv-events-replay-port": "7100",
        "warmroute.io/ranks": "3",
    }
    silent, one = rendered(any_helm, kind, kvEvents={"enabled": False})
    assert "--kv-events-config" not in flags(one)
    assert [port["containerPort"] for port in one["ports"]] == [8000]
    assert "annotations" not in silent["metadata"]


def test_a_pod_has_the_gpus_of_its_ranks(any_helm: Helm) -> None:
    for values, gpus in (
        ({}, 1),
        ({"tensorParallel": 4, "dataParallel": 2}, 8),
        ({"tensorParallel": 8, "dataParallel": 8, "gpu": {"count": 8}}, 8),
    ):
        _, one = rendered(any_helm, "vllm", **values)
        assert one["resources"]["limits"] == {"nvidia.com/gpu": gpus}
    template, one = rendered(any_helm, "vllm", device="cpu")
    assert "limits" not in one["resources"]
    assert "tolerations" not in template["spec"]


@pytest.mark.parametrize(
    ("kind", "device", "image"),
    [
        ("vllm", "cuda", "vllm/vllm-openai:v0.32.0"),
        ("vllm", "cpu", "vllm/vllm-openai-cpu:v0.32.0"),
        ("sglang", "cuda", "lmsysorg/sglang:v0.5.23"),
        ("sglang", "cpu", "lmsysorg/sglang:v0.5.23-xeon"),
    ],
)
def test_images(any_helm: Helm, kind: str, device: str, image: str) -> None:
    template, one = rendered(any_helm, kind, device=device, source="hf://a/b")
    assert {other["image"] for other in containers(template)} == {image}, "the same image fetches the checkpoint"
    _, own = rendered(any_helm, kind, device=device, image={"repository": "mine/it", "tag": "x"})
    assert own["image"] == "mine/it:x"
    assert ("--device" in flags(one)) == ((kind, device) == ("sglang", "cpu"))


@KINDS
def test_nothing_is_written_outside_of_volumes_nor_needs_a_name(any_helm: Helm, kind: str) -> None:
    """The root is read-only, and the user is in no image's /etc/passwd, which getpass and expanduser read."""
    template, one = rendered(any_helm, kind)
    assert one["securityContext"]["readOnlyRootFilesystem"] is True
    env = variables(one)
    assert env["USER"] == env["LOGNAME"] == "engine"
    mounts = [mount["mountPath"] for mount in one["volumeMounts"] if not mount.get("readOnly")]
    assert mounts == ["/tmp", "/dev/shm"]
    folders = {name: value for name, value in env.items() if str(value).startswith("/")}
    assert {"HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} <= folders.keys()
    assert all(folder == "/tmp" or folder.startswith("/tmp/") for folder in folders.values())
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "10Gi"}} in template["spec"]["volumes"]
    assert template["spec"]["shareProcessNamespace"] is True, "otherwise SIGTERM is lost until there is a handler"


@KINDS
def test_probes_and_the_end_of_a_pod(any_helm: Helm, kind: str) -> None:
    template, one = rendered(any_helm, kind, loadTimeoutSeconds=1234)
    assert [one[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness")] == [
        {"path": "/health", "port": "http"}
    ] * 2
    assert one["startupProbe"]["failureThreshold"] * one["startupProbe"]["periodSeconds"] == 1234
    liveness = one["livenessProbe"]
    if kind == "vllm":
        assert liveness["httpGet"]["path"] == "/health"
    else:
        assert variables(one)["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false", "/health would take a second"
        assert liveness["httpGet"]["path"] == "/health_generate"
        assert liveness["timeoutSeconds"] > 20, "SGLang says after 20 s that it is unhealthy"
        assert liveness["periodSeconds"] >= liveness["timeoutSeconds"]
    assert one["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert template["spec"]["terminationGracePeriodSeconds"] > 5 + 900


@KINDS
def test_the_key_is_asked_for_and_is_in_no_argument(any_helm: Helm, kind: str) -> None:
    values = {"models.a": {"engine": kind, "source": "/m"}, "engines.apiKey.existingSecret": "keys"}
    objects = any_helm.render(values)
    template = named(objects, "Deployment", "rel-warmroute-engine-a")["spec"]["template"]
    one = container(template, "engine")
    name = {"vllm": "VLLM_API_KEY", "sglang": "WARMROUTE_ENGINE_KEY"}[kind]
    assert variables(one)[name] == {"secretKeyRef": {"name": "keys", "key": "api-key"}}
    assert flags(one).get("--api-key") == (None if kind == "vllm" else f"$({name})")
    assert [volume["name"] for volume in template["spec"]["volumes"]] == ["model", "tmp", "shm"]
    gateway = container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway")
    assert "--engine-api-key-file=/etc/warmroute/engine-api-key/api-key" in gateway["args"]


def party(objects: list[Object], model: str) -> Party:
    template = named(objects, "Deployment", f"rel-warmroute-{model}")["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for one in containers(template) for port in one.get("ports", [])}
    return Party("ns", template["metadata"]["labels"], ports)


def test_policies_say_which_pods_reach_which(any_helm: Helm) -> None:
    objects = any_helm.render(VALUES)
    gateway, bundled, llama, qwen, tiny = (
        party(objects, name) for name in ("gateway", "engine-bundled", "engine-llama", "engine-qwen", "engine-tiny")
    )
    redis = Party("ns", of_kind(objects, "StatefulSet")[0]["spec"]["template"]["metadata"]["labels"], {"redis": 6379})
    allowed = [
        *((gateway, one, 8000) for one in (bundled, llama, qwen, tiny)),
        *((gateway, llama, port) for port in (5557, 5558, 5857, 5858)),
        *((gateway, qwen, port) for port in (5557, 5857)),
        (PROMETHEUS, bundled, 9090),
        *((PROMETHEUS, one, 8000) for one in (llama, qwen, tiny)),
        *((one, redis, 6379) for one in (gateway, bundled)),
    ]
    forbidden = [
        *((STRANGER, one, port) for one in (bundled, llama, qwen) for port in (8000, 5557, 5857)),
        *((one, redis, 6379) for one in (llama, qwen, tiny)),
        *((PROMETHEUS, one, 5557) for one in (llama, qwen)),
        (PROMETHEUS, bundled, 8000),
        (gateway, llama, 5559),
        (llama, qwen, 8000),
    ]
    for sender, receiver, port in allowed:
        assert may(objects, sender, receiver, port), (sender.labels, receiver.labels, port)
    for sender, receiver, port in forbidden:
        assert not may(objects, sender, receiver, port), (sender.labels, receiver.labels, port)
    policies = of_kind(objects, "NetworkPolicy")
    assert passes(policies, llama, None, 443, "egress"), "its checkpoint comes from the hub"
    assert not passes(policies, qwen, None, 443, "egress")


def test_each_kind_is_scaled_by_what_it_exports(any_helm: Helm) -> None:
    objects = any_helm.render(VALUES)
    for name, exported, metric in (
        ("llama", VLLM, "vllm:num_requests_waiting"),
        ("qwen", SGLANG, "sglang:num_queue_reqs"),
    ):
        (scaled,) = [o for o in of_kind(objects, "ScaledObject") if o["metadata"]["name"].endswith(f"engine-{name}")]
        first, _, *running = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
        assert first["query"].startswith(f"sum({metric}{{")
        assert first["threshold"] == "5"
        assert bool(running) == (name == "qwen"), "only one model may go to zero"
        for metadata in (first, *running):
            assert mistakes(metadata["query"], {**EXPORTED, **exported}) == []


def test_the_bundled_engine_is_as_it_was_beside_them(any_helm: Helm) -> None:
    """If another kind of engine joins the release, bundled engines keep their Deployment, so they do not restart."""
    alone = {"models.bundled": {"source": "pvc://models/qwen3-8b"}}
    beside = {**alone, "models.a": {"engine": "vllm", "source": "/m"}}
    one, other = (
        named(any_helm.render(values), "Deployment", "rel-warmroute-engine-bundled") for values in (alone, beside)
    )
    assert one == other


def test_the_example_values_say_how_to_install_them() -> None:
    for kind in ("vllm", "sglang"):
        text = (CHART / f"values-{kind}.yaml").read_text()
        assert f"helm install warmroute charts/warmroute -f charts/warmroute/values-{kind}.yaml" in text
        assert {model["engine"] for model in yaml.safe_load(text)["models"].values()} == {kind}
