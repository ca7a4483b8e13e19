"""TLS and keys: each Secret reaches the programs that need it, and both ends of each connection agree."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.chart import CHART, Helm, Object, RenderError, container, named, of_kind, pod_templates
from tests.charts.test_chart_settings import environment, load

LOADGEN = CHART / "ci" / "loadgen-values.yaml"
SIM = {"models.a": {"source": "random://", "device": "sim"}}


def template_of(objects: list[Object], kind: str, name: str) -> Object:
    thing = named(objects, kind, f"rel-warmroute-{name}")
    return thing if kind == "Pod" else thing["spec"]["template"]


def files(template: Object, name: str) -> dict[str, tuple[str, str]]:
    """Return a container's files: path -> Secret and entry. The entry * stands for all entries of the Secret."""
    volumes = {volume["name"]: volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume}
    found = {}
    for mount in container(template, name)["volumeMounts"]:
        if mount["name"] in volumes:
            assert mount["readOnly"]
            secret = volumes[mount["name"]]
            for item in secret.get("items", [{"key": "*", "path": "*"}]):
                found[f"{mount['mountPath']}/{item['path']}"] = (secret["secretName"], item["key"])
    return found


def test_gateways_and_their_clients_speak_https(any_helm: Helm) -> None:
    values = {"gateway.tls.existingSecret": "web", "loadgen.enabled": True, **SIM}
    objects = any_helm.render({**values, "gateway.settings.allow_policy_header": True})
    template = template_of(objects, "Deployment", "gateway")
    settings, one = load(container(template, "gateway")), container(template, "gateway")
    assert files(template, "gateway") == {"/etc/warmroute/tls/*": ("web", "*")}
    assert settings.tls_cert_file == "/etc/warmroute/tls/tls.crt"
    assert settings.tls_key_file == "/etc/warmroute/tls/tls.key"
    assert {one[f"{probe}Probe"]["httpGet"]["scheme"] for probe in ("startup", "readiness", "liveness")} == {"HTTPS"}
    (port,) = named(objects, "Service", "rel-warmroute-gateway")["spec"]["ports"]
    assert port["appProtocol"] == "https"
    (job,) = of_kind(objects, "Job")
    test = template_of(objects, "Pod", "test")
    for clients, name in (
        (job["spec"]["template"], "wait"),
        (job["spec"]["template"], "compare"),
        (test, "completion"),
    ):
        assert environment(container(clients, name))["SSL_CERT_FILE"] == "/etc/warmroute/gateway-ca/ca.crt"
        assert files(clients, name) == {"/etc/warmroute/gateway-ca/ca.crt": ("web", "ca.crt")}, "and no private key"
    compare = load(container(job["spec"]["template"], "compare"))
    assert compare.url == "https://rel-warmroute-gateway.ns:80"
    assert compare.admin_url == ["http://rel-warmroute-gateway-admin.ns.svc:8081"]
    known = any_helm.render({**values, "gateway.settings.allow_policy_header": True, "gateway.tls.caKey": ""})
    assert files(template_of(known, "Pod", "test"), "completion") == {}


def test_plain_http_is_what_it_was(any_helm: Helm) -> None:
    objects = any_helm.render(LOADGEN)
    one = container(template_of(objects, "Deployment", "gateway"), "gateway")
    assert "scheme" not in one["readinessProbe"]["httpGet"]
    (port,) = named(objects, "Service", "rel-warmroute-gateway")["spec"]["ports"]
    assert "appProtocol" not in port
    assert files(template_of(objects, "Pod", "test"), "completion") == {}


@pytest.mark.parametrize(("accepted", "entry"), [("", "api-key"), ("all", "all")])
def test_engines_ask_for_the_key_that_gateways_show(any_helm: Helm, accepted: str, entry: str) -> None:
    objects = any_helm.render({"engines.apiKey": {"existingSecret": "engines", "acceptedKey": accepted}, **SIM})
    gateway, engine = (template_of(objects, "Deployment", name) for name in ("gateway", "engine-a"))
    shown = load(container(gateway, "gateway")).engine_api_key_file
    settings = load(container(engine, "engine"))
    assert files(gateway, "gateway") == {shown: ("engines", "api-key")}
    assert files(engine, "engine") == {str(settings.api_key_file): ("engines", entry)}
    assert settings.admin_address == ("127.0.0.1", 8081)


def test_without_a_key_a_reset_reaches_engines_at_the_one_port(any_helm: Helm) -> None:
    settings = load(container(template_of(any_helm.render(SIM), "Deployment", "engine-a"), "engine"))
    assert (settings.api_key_file, settings.admin_port, settings.metrics_port) == (None, None, 9090)


def test_redis_speaks_tls_to_both_roles(any_helm: Helm) -> None:
    objects = any_helm.render({"redis.tls.existingSecret": "redis-tls", **SIM})
    for name, program in (("gateway", "gateway"), ("engine-a", "engine")):
        template = template_of(objects, "Deployment", name)
        url = environment(container(template, program))["WARMROUTE_REDIS_URL"]
        where = "/etc/warmroute/redis-ca/ca.crt"
        assert url == f"rediss://{program}:from-elsewhere@rel-warmroute-redis.ns:6379/0?ssl_ca_certs={where}"
        assert files(template, program)[where] == ("redis-tls", "ca.crt")
        load(container(template, program))
    server = template_of(objects, "StatefulSet", "redis")
    arguments = container(server, "redis")["args"]
    assert arguments[arguments.index("--port") + 1] == "0"
    assert arguments[arguments.index("--tls-port") + 1] == "6379"
    assert "--tls" in container(server, "redis")["readinessProbe"]["exec"]["command"][-1]
    assert files(server, "redis") == {"/etc/redis/tls/*": ("redis-tls", "*")}


def test_each_role_has_credentials_of_its_own(any_helm: Helm) -> None:
    external = {"existingSecret": "registry", "gatewayKey": "for-gateways", "engineKey": "for-engines"}
    for values, secret, entries, variable in (
        ({}, "rel-warmroute-redis", ("gateway-password", "engine-password"), "REDIS_PASSWORD"),
        ({"redis.auth.users": False}, "rel-warmroute-redis", ("password", "password"), "REDIS_PASSWORD"),
        (
            {"redis.enabled": False, "externalRedis": external},
            "registry",
            ("for-gateways", "for-engines"),
            "WARMROUTE_REDIS_URL",
        ),
        (
            {"redis.enabled": False, "externalRedis.existingSecret": "registry"},
            "registry",
            ("url", "url"),
            "WARMROUTE_REDIS_URL",
        ),
    ):
        objects = any_helm.render({**values, **SIM})
        for name, program, entry in zip(("gateway", "engine-a"), ("gateway", "engine"), entries, strict=True):
            one = container(template_of(objects, "Deployment", name), program)
            (found,) = (v["valueFrom"]["secretKeyRef"] for v in one["env"] if v["name"] == variable)
            assert found == {"name": secret, "key": entry}
    (secret_made,) = of_kind(any_helm.render({"redis.auth.password": "pw"}), "Secret")
    assert secret_made["data"].keys() == {"password", "gateway-password", "engine-password"}
    assert len(set(secret_made["data"].values())) == 3


@pytest.mark.parametrize(
    ("url", "has_ca", "found"),
    [
        ("rediss://r:6379", True, "rediss://r:6379?ssl_ca_certs=/etc/warmroute/redis-ca/ca.crt"),
        ("rediss://r:6379?protocol=3", True, "rediss://r:6379?protocol=3&ssl_ca_certs=/etc/warmroute/redis-ca/ca.crt"),
        ("rediss://r:6379", False, "rediss://r:6379"),
        ("redis+sentinel://a:26379,b:26379/main", False, "redis+sentinel://a:26379,b:26379/main"),
    ],
)
def test_an_external_redis_by_url(any_helm: Helm, url: str, has_ca: bool, found: str) -> None:
    values: dict[str, Any] = {"redis.enabled": False, "externalRedis": {"url": url, "caSecret": "ca" if has_ca else ""}}
    objects = any_helm.render({**values, "networkPolicy.externalRedisPorts": [6379, 26379], **SIM})
    for name, program in (("gateway", "gateway"), ("engine-a", "engine")):
        template = template_of(objects, "Deployment", name)
        assert load(container(template, program)).redis_url == found
        assert ("/etc/warmroute/redis-ca/ca.crt" in files(template, program)) == has_ca


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"redis.enabled": False, "externalRedis.url": "redis+sentinel://a,b:26380/m"}, "has port 26379, which"),
        ({"externalRedis.gatewayKey": "x"}, "entries of externalRedis.existingSecret, which is empty"),
        ({"externalRedis.caSecret": "x"}, "use redis.tls.existingSecret"),
        (
            {"engines.apiKey.existingSecret": "x", "engines.existing.selector": {"app": "vllm"}},
            r"use engines\.existing\[\]\.apiKeySecret",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(any_helm: Helm, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RenderError, match=complaint):
        any_helm.render(values)


def test_every_pod_that_the_secrets_are_for_renders_with_all_of_them(helm: Helm) -> None:
    secrets = {"gateway.tls": "a", "engines.apiKey": "b", "redis.tls": "c"}
    values = {f"{path}.existingSecret": name for path, name in secrets.items()}
    for _, template in pod_templates(helm.render({**values, **SIM})):
        names = [volume["name"] for volume in template["spec"].get("volumes", [])]
        assert len(names) == len(set(names))
