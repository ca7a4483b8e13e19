"""Every flag and variable that the chart gives a program is read by that program's own settings class."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from charts.schema import PROGRAMS
from engine.common.settings import ConfigError
from engine.model import checkpoint
from router.fleet.targets import KubeTarget
from router.tenants.tenant import TenantLimits
from router.tenants.tenant_file import parse_tenants
from tests.charts.chart import (
    CHART,
    CI_VALUES,
    PROFILES,
    Helm,
    Object,
    container,
    containers,
    named,
    of_kind,
    pod_templates,
)

ALL_VALUES = [*CI_VALUES, *PROFILES]
CONTAINERS = {"gateway": PROGRAMS["gateway"], "engine": PROGRAMS["engine"], "compare": PROGRAMS["loadgen"]}


def environment(one: Object) -> dict[str, str]:
    """Return the program's environment. $(NAME) is expanded as by the kubelet, and values from Secrets are made up."""
    env: dict[str, str] = {}
    for variable in one.get("env", []):
        value = variable.get("value")
        if value is None:
            is_url = variable["name"] == "WARMROUTE_REDIS_URL"
            value = "redis://from-a-secret:6379" if is_url else "from-elsewhere"
        for name, known in env.items():
            value = value.replace(f"$({name})", known)
        env[variable["name"]] = value
    return env


def is_foreign(template: Object) -> bool:
    """Whether the pod is vLLM's or SGLang's (test_foreign_engines.py)."""
    return "warmroute.io/engine" in template["metadata"]["labels"]


def load(one: Object) -> Any:
    """Return the settings of the program in a container. Raises ConfigError."""
    return CONTAINERS[one["name"]].load(one["args"], prog=one["name"], environ=environment(one))


@pytest.mark.parametrize("values", ALL_VALUES, ids=lambda path: path.stem)
def test_programs_accept_all_that_the_chart_gives_them(values: Path, any_helm: Helm) -> None:
    seen = []
    for _, template in pod_templates(any_helm.render(values)):
        for one in containers(template):
            if one["name"] in CONTAINERS and not is_foreign(template):
                load(one)
                seen.append(one["name"])
    assert "gateway" in seen
    assert ("compare" in seen) == (values.stem == "loadgen-values")


def test_the_checkpoint_maker_accepts_its_flags(any_helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, object] = {}
    monkeypatch.setattr(checkpoint, "make_checkpoint", lambda folder, **shape: made.update(shape, folder=str(folder)))
    objects = any_helm.render(CHART / "values-demo.yaml")
    maker = container(named(objects, "Deployment", "rel-warmroute-engine-sim")["spec"]["template"], "model")
    assert maker["command"][-3:] == ["python", "-m", "engine.model.checkpoint"]
    assert checkpoint.main(maker["args"]) == 0
    assert made.items() >= {"folder": "/model", "hidden_size": 128, "layers": 2, "dtype": "float32"}.items()


def test_settings_arrive_with_their_values(any_helm: Helm) -> None:
    objects = any_helm.render(
        {
            "gateway.settings": {
                "policy": "cache_aware",
                "max_in_flight": 10,
                "max_in_flight_body_mib": 64,
                "log_requests": True,
                "shadow_policies": ["predicted_ttft", "round_robin"],
            },
            "models.a": {
                "source": "random://",
                "device": "cpu",
                "settings": {"kv_cache_bytes": 123456789012345, "prefix_cache": False, "kv_pool_tokens": 0},
            },
            "longestAnswerSeconds": 77,
        }
    )
    gateway = load(container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway"))
    assert (gateway.policy, gateway.max_in_flight) == ("cache_aware", 10)
    assert gateway.max_in_flight_body_mib == 64
    assert gateway.shadow_policies == ["predicted_ttft", "round_robin"]
    assert (gateway.log_requests, gateway.total_timeout_s, gateway.models) == (True, 77, ["a"])
    engine = load(container(named(objects, "Deployment", "rel-warmroute-engine-a")["spec"]["template"], "engine"))
    assert (engine.kv_cache_bytes, engine.prefix_cache, engine.drain_s) == (123456789012345, "off", 77)
    assert (engine.pod_id, engine.served_model_name) == ("from-elsewhere", "a")
    assert engine.redis_url == "redis://engine:from-elsewhere@rel-warmroute-redis.ns:6379/0"
    assert gateway.redis_url == "redis://gateway:from-elsewhere@rel-warmroute-redis.ns:6379/0"


@pytest.mark.parametrize("values", ALL_VALUES, ids=lambda path: path.stem)
def test_the_gateways_memory_has_room_for_the_bodies_it_takes(values: Path, any_helm: Helm) -> None:
    ones = [one for _, template in pod_templates(any_helm.render(values)) for one in containers(template)]
    (one,) = [one for one in ones if one["name"] == "gateway"]
    limit = one["resources"]["limits"]["memory"]
    limit_mib = int(limit[:-2]) * {"Mi": 1, "Gi": 1024}[limit[-2:]]
    assert 512 + 4 * load(one).max_in_flight_body_mib <= limit_mib


def test_the_gateway_looks_for_the_pods_that_the_chart_makes(any_helm: Helm) -> None:
    for values in ALL_VALUES:
        objects = any_helm.render(values)
        templates = [template for _, template in pod_templates(objects)]
        engines = [t for t in templates if t["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"]
        (gateway,) = [t for t in templates if t["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"]
        settings = load(container(gateway, "gateway"))
        target = settings.targets[0]
        if target.pool:
            continue  # the InferencePool has the labels (test_endpoint_picker.py)
        selector = dict(term.split("=") for term in target.selector.split(","))
        chosen = [t for t in templates if selector.items() <= t["metadata"]["labels"].items()]
        assert chosen == engines
        for engine in engines:
            one = container(engine, "engine")
            (port,) = (port for port in one["ports"] if port["name"] == target.port)
            if is_foreign(engine):
                assert f"--port={port['containerPort']}" in one["args"]
                continue
            assert load(one).port == port["containerPort"]


def test_existing_engines(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "existing-values.yaml")
    template = named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"]
    settings = load(container(template, "gateway"))
    keys = "/etc/warmroute/engine-api-keys"
    assert settings.targets == (
        KubeTarget("app=vllm,tier=prod", "inference", 8000, f"{keys}/qwen/token", None, 5557, 5657, 2),
        KubeTarget("app=sglang", "batch", "http", f"{keys}/existing-1/api-key", "meta-llama/Llama-3.1-8B-Instruct"),
    )
    assert settings.models == ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"]
    mounted = {
        mount["mountPath"]: volume["secret"]["secretName"]
        for mount in container(template, "gateway")["volumeMounts"]
        for volume in template["spec"]["volumes"]
        if volume["name"] == mount["name"] and "secret" in volume
    }
    assert mounted == {"/etc/warmroute/api-keys": "clients", f"{keys}/qwen": "vllm", f"{keys}/existing-1": "sglang"}
    assert settings.api_keys_file == "/etc/warmroute/api-keys/keys"
    assert settings.engine_api_key_file is None, "other sets do not get the key of one set"


def test_own_and_existing_engines_are_followed_together(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "foreign-values.yaml")
    settings = load(container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway"))
    own, other = settings.targets
    assert (own.namespace, own.port, own.key_file) == ("ns", "http", "/etc/warmroute/engine-api-key/api-key")
    assert other == KubeTarget("app=other", "llm", "api")


def test_a_single_set_of_existing_engines_may_be_a_mapping(any_helm: Helm) -> None:
    """Values of older releases have a mapping. A set without a selector is ignored."""
    one = {"selector": {"app": "vllm"}, "namespace": "", "port": 8000, "model": "m", "apiKeySecret": "s"}
    rendered = [any_helm.render({"engines.existing": form}) for form in (one, [one])]
    assert [thing for thing in rendered[0] if thing["kind"] != "Secret"] == [
        thing for thing in rendered[1] if thing["kind"] != "Secret"
    ]
    gateway = container(named(rendered[0], "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway")
    assert load(gateway).targets == (
        KubeTarget("app=vllm", "ns", 8000, "/etc/warmroute/engine-api-keys/existing-0/api-key"),
    )
    old_default = {"selector": {}, "namespace": "", "port": "http", "model": "", "apiKeySecretKey": "api-key"}
    nones: list[Any] = [old_default, None, []]
    for none in nones:
        objects = any_helm.render({"engines.existing": none})
        gateway = container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway")
        assert load(gateway).kube_targets is None


def test_tenants_are_what_the_gateway_reads(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "tenants-values.yaml")
    template = named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"]
    settings = load(container(template, "gateway"))
    assert settings.tenants_file == "/etc/warmroute/tenants/tenants.yaml"
    assert settings.tenant_secret_file == "/etc/warmroute/tenant-salts/secret"
    assert settings.usage_log == "/var/log/warmroute"
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container(template, "gateway")["volumeMounts"]}
    secret = named(objects, "Secret", mounted["/etc/warmroute/tenants"]["secret"]["secretName"])
    assert mounted["/etc/warmroute/tenant-salts"]["secret"]["secretName"] == "tenant-salts"
    assert mounted["/var/log/warmroute"]["persistentVolumeClaim"]["claimName"] == "usage"
    content = b64decode(secret["data"]["tenants.yaml"])
    search, batch = parse_tenants(Path("tenants.yaml"), content, has_secret=True)
    assert (search.name, search.is_isolated, batch.name) == ("search", True, "batch")
    assert search.limits == TenantLimits(600, 1_000_000, 64)
    assert not of_kind(objects, "Pod"), "helm test has no key to ask with"


def test_probes_and_ports_are_where_the_gateway_listens(any_helm: Helm) -> None:
    objects = any_helm.render()
    one = container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway")
    settings = load(one)
    assert {p["name"]: p["containerPort"] for p in one["ports"]} == {
        "http": settings.port,
        "metrics": settings.metrics_port,
        "admin": settings.admin_address[1],
    }
    paths = [one[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")]
    assert paths == ["/health", "/ready", "/health"]


def test_a_flag_that_no_program_has_is_noticed(any_helm: Helm) -> None:
    objects = any_helm.render({"gateway.extraArgs": ["--no-such-flag"]})
    with pytest.raises(ConfigError, match="no-such-flag"):
        load(container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway"))


def test_sources_from_the_hub_use_flags_that_the_client_has(any_helm: Helm) -> None:
    """The flags are those of `hf download` in huggingface_hub, on which the package tokenizers depends."""
    from click.testing import CliRunner
    from huggingface_hub.cli.hf import app

    said = CliRunner().invoke(app, ["download", "--help"], env={"COLUMNS": "200"}).output
    objects = any_helm.render(CHART / "ci" / "gpu-values.yaml")
    fetch = container(named(objects, "Deployment", "rel-warmroute-engine-hub")["spec"]["template"], "model")
    assert fetch["command"][-2:] == ["hf", "download"]
    flags = {argument.partition("=")[0] for argument in fetch["args"] if argument.startswith("--")}
    assert flags == {"--revision", "--local-dir", "--include", "--exclude"}
    assert all(flag in said for flag in flags)
    assert "meta-llama/Llama-3.1-8B-Instruct" in fetch["args"]


def test_one_copy_of_a_repositorys_weights_is_fetched(any_helm: Helm) -> None:
    from huggingface_hub.utils._paths import filter_repo_objects

    objects = any_helm.render(CHART / "ci" / "gpu-values.yaml")
    fetch = container(named(objects, "Deployment", "rel-warmroute-engine-hub")["spec"]["template"], "model")
    patterns = [argument.partition("=")[::2] for argument in fetch["args"]]
    wanted = ["config.json", "model-00001-of-00003.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    others = ["consolidated.safetensors", "original/consolidated.00.pth", "pytorch_model.bin", "README.md"]
    fetched = filter_repo_objects(
        [*wanted, *others],
        allow_patterns=[pattern for flag, pattern in patterns if flag == "--include"],
        ignore_patterns=[pattern for flag, pattern in patterns if flag == "--exclude"],
    )
    assert list(fetched) == wanted


def test_names_of_models_reach_the_gateway(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "exposed-values.yaml")
    settings = load(container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway"))
    assert settings.names == {
        "gpt-4o": (("sim", 1),),
        "openai/gpt-4.1": (("sim", 1),),
        "chat": (("org/sim-new", 10), ("sim", 90)),
    }
    assert settings.default_model == "chat"
