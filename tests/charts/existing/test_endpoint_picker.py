"""With the endpoint picker on, the chart makes objects that the program, the proxies and Kubernetes accept."""

from __future__ import annotations

import base64
import datetime
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cryptography import x509

from tests.charts.chart import CHART, CI_VALUES, Helm, Object, RenderError, container, containers, named, of_kind
from tests.charts.existing.inference_schemas import SCHEMAS, definition
from tests.charts.test_chart_network import INGRESS, STRANGER, Party, may, parties
from tests.charts.test_chart_secrets import files, template_of
from tests.charts.test_chart_settings import load

PICKER = CHART / "ci" / "picker-values.yaml"
EXISTING = CHART / "ci" / "picker-existing-values.yaml"
SWITCHED_ON: dict[str, Any] = {
    "endpointPicker.enabled": True,
    "endpointPicker.httpRoute.parentRefs": [{"name": "inference"}],
    "networkPolicy.proxiesFrom": [{"podSelector": {}}],
}
MODEL = {"models.a": {"source": "random://", "device": "sim"}}
SET = {"selector": {"app": "vllm"}, "port": 8000}


def gateway(objects: list[Object]) -> Any:
    """Return the settings in the gateway's command line."""
    return load(container(template_of(objects, "Deployment", "gateway"), "gateway"))


def of_extension(objects: list[Object]) -> list[Object]:
    return [thing for thing in objects if thing["apiVersion"].startswith("inference.networking.")]


def test_without_the_picker_nothing_of_it_is_made(any_helm: Helm) -> None:
    words = ("ext-proc", "--inference", "inference.networking", "picker", '"pool"')
    for values in CI_VALUES:
        objects = [thing for thing in any_helm.render(values) if thing["kind"] not in ("PrometheusRule", "ConfigMap")]
        text = json.dumps(objects)
        found = [word for word in words if word in text]
        assert bool(found) == (values in (PICKER, EXISTING)), found


@pytest.mark.parametrize("values", [PICKER, EXISTING], ids=lambda path: path.stem)
def test_the_extensions_definitions_accept_its_objects(values: Path, any_helm: Helm) -> None:
    objects = of_extension(any_helm.render(values))
    assert objects
    for thing in objects:
        jsonschema.validate(thing, SCHEMAS[thing["kind"]])
    broken = json.loads(json.dumps(objects[0]))
    broken["spec"]["selectors"] = {}
    with pytest.raises(jsonschema.ValidationError, match="selectors"):
        jsonschema.validate(broken, SCHEMAS[broken["kind"]])


def test_a_definition_of_the_tests_says_what_the_schema_says() -> None:
    for kind in SCHEMAS:
        (version,) = definition(kind)["spec"]["versions"]
        text = json.dumps(version["schema"])
        assert '"additionalProperties": false' not in text
        assert '"uniqueItems"' not in text
        assert version["schema"]["openAPIV3Schema"]["properties"]["spec"]["required"]


def test_pool_service_and_program_name_each_other(any_helm: Helm) -> None:
    for values in (PICKER, EXISTING):
        objects = any_helm.render(values)
        settings, (pool,) = gateway(objects), of_kind(objects, "InferencePool")
        ref = pool["spec"]["endpointPickerRef"]
        service = named(objects, "Service", ref["name"])
        (port,) = service["spec"]["ports"]
        template = template_of(objects, "Deployment", "gateway")
        (opened,) = [p for p in container(template, "gateway")["ports"] if p["name"] == port["targetPort"]]
        assert opened["containerPort"] == settings.ext_proc_port == port["port"] == ref["port"]["number"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert settings.pool.pool == pool["metadata"]["name"]
        assert pool["metadata"]["namespace"] == settings.pool.namespace == service["metadata"]["namespace"]
    assert (
        named(any_helm.render(PICKER), "Service", "rel-warmroute-picker")["spec"]["ports"][0]["appProtocol"] == "http2"
    )
    assert "appProtocol" not in service["spec"]["ports"][0]


def test_the_pool_selects_the_engines_of_the_chart_at_their_port(any_helm: Helm) -> None:
    objects = any_helm.render(PICKER)
    (pool,) = of_kind(objects, "InferencePool")
    engines = [
        thing["spec"]["template"] for thing in of_kind(objects, "Deployment") if "-engine-" in thing["metadata"]["name"]
    ]
    assert len(engines) == 2
    for template in engines:
        assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ports = {p["name"]: p["containerPort"] for one in containers(template) for p in one.get("ports", [])}
        assert [port["number"] for port in pool["spec"]["targetPorts"]] == [ports["http"]]
    labels = template_of(objects, "Deployment", "gateway")["metadata"]["labels"]
    assert not pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    settings = gateway(objects)
    assert (settings.ext_proc_fallbacks, settings.inference_objectives) == (2, True)
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
    assert settings.engine_api_key_file == "/etc/warmroute/engine-api-key/api-key"
    assert settings.pool.key_file is None


def test_the_pool_selects_engines_that_run_already(any_helm: Helm) -> None:
    objects = any_helm.render(EXISTING)
    (pool,) = of_kind(objects, "InferencePool")
    assert pool["spec"]["selector"] == {"matchLabels": {"app": "vllm"}}
    assert pool["spec"]["targetPorts"] == [{"number": 8000}, {"number": 8001}]
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    target = gateway(objects).pool
    assert (target.model, target.kv_events_port, target.tls) == ("Qwen/Qwen3-8B", 5557, True)
    assert target.key_file == "/etc/warmroute/engine-api-keys/qwen/api-key"
    mounted = files(template_of(objects, "Deployment", "gateway"), "gateway")
    assert mounted[target.key_file] == ("vllm", "api-key")
    values = {**SWITCHED_ON, "engines.existing": [SET]}
    assert of_kind(any_helm.render(values), "InferencePool")[0]["spec"]["targetPorts"] == [{"number": 8000}]


def test_a_pool_that_is_there_is_followed_and_not_made(any_helm: Helm) -> None:
    values = {**SWITCHED_ON, **MODEL, "endpointPicker.pool.create": False, "endpointPicker.pool.name": "theirs"}
    objects = any_helm.render(values)
    assert not of_kind(objects, "InferencePool")
    assert gateway(objects).pool.pool == "theirs"
    (route,) = of_kind(objects, "HTTPRoute")
    assert {ref["name"] for rule in route["spec"]["rules"] for ref in rule["backendRefs"]} == {"theirs"}
    (role,) = of_kind(objects, "Role")
    assert role["rules"][1]["resourceNames"] == ["theirs"]


def test_the_route_leads_to_the_pool_and_has_the_paths_of_clients(any_helm: Helm) -> None:
    objects = any_helm.render(
        {**SWITCHED_ON, **MODEL, "gateway.httpRoute.enabled": True, "gateway.httpRoute.parentRefs": [{"name": "a"}]}
    )
    routes = {
        thing["metadata"]["name"]: {
            match["path"]["value"] for rule in thing["spec"]["rules"] for match in rule["matches"]
        }
        for thing in of_kind(objects, "HTTPRoute")
    }
    assert routes["rel-warmroute-gateway"] - routes["rel-warmroute-pool"] == {"/v1/caches"}
    assert not routes["rel-warmroute-pool"] - routes["rel-warmroute-gateway"]
    route = named(objects, "HTTPRoute", "rel-warmroute-pool")
    assert all(len(rule["matches"]) <= 8 for rule in route["spec"]["rules"])
    assert {json.dumps(rule["backendRefs"]) for rule in route["spec"]["rules"]} == {
        json.dumps([{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "rel-warmroute-pool"}])
    }
    assert {rule["timeouts"]["request"] for rule in route["spec"]["rules"]} == {"905s"}


def test_rights_are_those_of_what_is_read(any_helm: Helm) -> None:
    def rules(**values: Any) -> dict[str, Any]:
        (role,) = of_kind(any_helm.render({**SWITCHED_ON, **MODEL, **values}), "Role")
        return {rule["resources"][0]: (rule["apiGroups"], rule.get("resourceNames")) for rule in role["rules"]}

    without = {"pods": ([""], None), "inferencepools": (["inference.networking.k8s.io"], ["rel-warmroute-pool"])}
    assert rules() == without
    objectives = {"inferenceobjectives": (["inference.networking.x-k8s.io"], None)}
    assert rules(**{"endpointPicker.objectives.enabled": True}) == without | objectives


def test_proxies_reach_picker_and_engines_and_nobody_else_does(any_helm: Helm) -> None:
    objects = any_helm.render(PICKER)
    chart = parties(objects)
    for receiver, port in ((chart["gateway"], 9002), (chart["engine"], 8000)):
        assert may(objects, INGRESS, receiver, port)
        for other in (STRANGER, Party("tenant", {"app": "nginx"})):
            assert not may(objects, other, receiver, port)
    assert may(objects, chart["gateway"], chart["engine"], 8000)
    names = {thing["metadata"]["name"] for thing in of_kind(objects, "NetworkPolicy")}
    assert "rel-warmroute-engine-vllm" in names, "engines of either kind have a policy"
    for name in ("rel-warmroute-engine", "rel-warmroute-engine-vllm"):
        rule = named(objects, "NetworkPolicy", name)["spec"]["ingress"][1]
        assert rule == {
            "ports": [{"port": "http", "protocol": "TCP"}],
            "from": [{"namespaceSelector": {"matchLabels": {"ingress": "true"}}}],
        }


def test_a_certificate_of_yours_or_one_made_at_install(any_helm: Helm) -> None:
    objects = any_helm.render(PICKER)
    settings, mounted = gateway(objects), files(template_of(objects, "Deployment", "gateway"), "gateway")
    assert settings.ext_proc_cert_path == "/etc/warmroute/picker-tls"
    assert mounted["/etc/warmroute/picker-tls/*"] == ("picker", "*")
    made = any_helm.render({**SWITCHED_ON, **MODEL, "endpointPicker.tls.selfSigned": True})
    mounted = files(template_of(made, "Deployment", "gateway"), "gateway")
    secret = named(made, "Secret", mounted["/etc/warmroute/picker-tls/*"][0])
    assert secret["type"] == "kubernetes.io/tls"
    certificate = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.DNSName
    )
    assert "rel-warmroute-picker.ns.svc" in names
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc > datetime.timedelta(days=3600)
    plain = gateway(any_helm.render({**SWITCHED_ON, **MODEL}))
    assert plain.ext_proc_cert_path is None


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"endpointPicker.httpRoute.parentRefs": []},
        "endpointPicker.httpRoute.enabled needs endpointPicker.httpRoute.parentRefs",
    ),
    ({"networkPolicy.proxiesFrom": []}, "endpointPicker.enabled needs networkPolicy.proxiesFrom"),
    ({"endpointPicker.tls": {"existingSecret": "a", "selfSigned": True}}, "tls.selfSigned are both set"),
    ({"endpointPicker.pool.create": False}, "endpointPicker.pool.name is empty: name the InferencePool"),
    ({"endpointPicker.objectives.priorities": {"a": 1}}, "priorities needs endpointPicker.objectives.enabled"),
    ({"engines.existing": [SET]}, "an InferencePool has one selector"),
    (
        {"models.a": None, "engines.existing": [{**SET, "namespace": "far"}]},
        "selects only pods of its own namespace, ns",
    ),
    (
        {"models.a": None, "engines.existing": [{**SET, "port": "api", "name": "x"}]},
        'existing x is "api": give its number',
    ),
    (
        {
            "engines.existing": [{**SET, "apiKeySecret": "b"}],
            "engines.apiKey.existingSecret": "a",
            "endpointPicker.pool.selector": {"pool": "a"},
        },
        "the engines of an InferencePool have one key",
    ),
    ({"endpointPicker.pool.failureMode": "Open"}, "failureMode"),
    ({"endpointPicker.pool.targetPorts": ["http"]}, "targetPorts"),
    ({"endpointPicker.pool.targetPorts": list(range(1, 10))}, "targetPorts"),
    ({"endpointPicker.objectives": {"enabled": True, "priorities": {"Chat": 1}}}, "[-a-z0-9.]{0,251}"),
]


@pytest.mark.parametrize(("values", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_cannot_be_is_refused_with_the_remedy(values: dict[str, Any], said: str, any_helm: Helm) -> None:
    with pytest.raises(RenderError) as caught:
        any_helm.render({key: value for key, value in {**SWITCHED_ON, **MODEL, **values}.items() if value is not None})
    assert said in str(caught.value)


def test_several_sets_are_one_pool_by_a_label_that_all_have(any_helm: Helm) -> None:
    values = {
        **SWITCHED_ON,
        **MODEL,
        "engines.existing": [{**SET, "apiKeySecret": "b"}],
        "endpointPicker.pool.selector": {"pool": "a"},
    }
    objects = any_helm.render(values)
    (pool,) = of_kind(objects, "InferencePool")
    assert pool["spec"]["selector"]["matchLabels"] == {"pool": "a"}
    assert gateway(objects).pool.key_file == "/etc/warmroute/engine-api-keys/existing-0/api-key"
