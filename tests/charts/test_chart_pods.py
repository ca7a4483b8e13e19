"""Every pod of every values file is hardened, ends in time, and is selected by labels that never change."""

from __future__ import annotations

import pytest

from engine.contract.requests import Endpoint
from router.reading.by_load import BY_LOAD, UPLOADS
from tests.charts.chart import CHART, CI_VALUES, PROFILES, Helm, container, containers, named, of_kind, pod_templates

ALL_VALUES = [*CI_VALUES, *PROFILES]
DEMO = CHART / "values-demo.yaml"


def test_every_container_is_hardened(any_helm: Helm) -> None:
    seen = 0
    for values in ALL_VALUES:
        for where, template in pod_templates(any_helm.render(values)):
            spec = template["spec"]
            assert spec["enableServiceLinks"] is False, where
            assert spec["securityContext"]["runAsNonRoot"] is True, where
            assert spec["securityContext"]["runAsUser"] > 0, where
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
            assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, where
            for one in containers(template):
                context = one["securityContext"]
                assert context["allowPrivilegeEscalation"] is False, (where, one["name"])
                assert context["readOnlyRootFilesystem"] is True, (where, one["name"])
                assert context["capabilities"] == {"drop": ["ALL"]}, (where, one["name"])
                seen += 1
    assert seen > 50


def test_the_gateway_alone_has_a_token(any_helm: Helm) -> None:
    for values in ALL_VALUES:
        objects = any_helm.render(values)
        for where, template in pod_templates(objects):
            is_gateway = template["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"
            assert template["spec"]["automountServiceAccountToken"] is is_gateway, where
        assert all(account["automountServiceAccountToken"] is False for account in of_kind(objects, "ServiceAccount"))


def test_the_gateway_may_list_and_watch_pods_and_its_pool_and_nothing_else(any_helm: Helm) -> None:
    pods = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    pickers = 0
    for values in ALL_VALUES:
        objects = any_helm.render(values)
        assert not of_kind(objects, "ClusterRole")
        assert not of_kind(objects, "ClusterRoleBinding")
        for role in of_kind(objects, "Role"):
            of_pods, *more = role["rules"]
            assert [of_pods] == pods
            for rule in more:
                assert rule["verbs"] == ["list", "watch"]
                assert set(rule["apiGroups"]) <= {"inference.networking.k8s.io", "inference.networking.x-k8s.io"}
                assert rule["resources"] in (["inferencepools"], ["inferenceobjectives"])
                assert rule.get("resourceNames") or rule["resources"] == ["inferenceobjectives"], (
                    "one pool, by its name"
                )
            assert bool(more) is bool(of_kind(objects, "InferencePool"))
            pickers += bool(more)
        for binding in of_kind(objects, "RoleBinding"):
            (gateway,) = (d for d in of_kind(objects, "Deployment") if d["metadata"]["name"].endswith("-gateway"))
            account = gateway["spec"]["template"]["spec"]["serviceAccountName"]
            assert binding["subjects"] == [
                {"kind": "ServiceAccount", "name": account, "namespace": gateway["metadata"]["namespace"]}
            ]
    assert pickers


def test_no_variable_is_given_twice_and_the_users_wins(any_helm: Helm) -> None:
    for values in ALL_VALUES:
        for where, template in pod_templates(any_helm.render(values)):
            for one in containers(template):
                names = [variable["name"] for variable in one.get("env", [])]
                assert len(names) == len(set(names)), (where, names)
    hooks = any_helm.render(CHART / "ci" / "hooks-values.yaml")
    for deployment in of_kind(hooks, "Deployment"):
        if deployment["metadata"]["name"].endswith("-other"):
            continue
        env = {v["name"]: v.get("value") for v in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert env["WARMROUTE_REDIS_URL"] == "redis://elsewhere:6379"
        assert env["WARMROUTE_LOG_FORMAT"] == "json"


def test_a_variable_comes_after_those_it_refers_to(any_helm: Helm) -> None:
    """Kubernetes expands $(NAME) only for variables that are listed earlier."""
    for _, template in pod_templates(any_helm.render(DEMO)):
        for one in containers(template):
            names = [variable["name"] for variable in one.get("env", [])]
            if "WARMROUTE_REDIS_URL" in names:
                assert names.index("REDIS_PASSWORD") < names.index("WARMROUTE_REDIS_URL")


def test_pods_match_their_selectors_and_no_other(any_helm: Helm) -> None:
    for values in ALL_VALUES:
        objects = any_helm.render(values)
        templates = [(w, t["metadata"]["labels"]) for w, t in pod_templates(objects)]
        for thing in of_kind(objects, "Deployment") + of_kind(objects, "StatefulSet"):
            selector = thing["spec"]["selector"]["matchLabels"].items()
            matching = [where for where, labels in templates if selector <= labels.items()]
            assert matching == [f"{thing['kind']} {thing['metadata']['name']}"]
            assert thing["metadata"]["labels"].items() >= selector


@pytest.mark.parametrize("longest", [1, 300, 3600])
@pytest.mark.parametrize("delay", [0, 7])
def test_pods_live_until_their_longest_answer_ends(any_helm: Helm, longest: int, delay: int) -> None:
    values = {
        "longestAnswerSeconds": longest,
        "gateway.drain.delaySeconds": delay,
        "engines.defaults.drain": {"delaySeconds": delay + 1, "marginSeconds": 20},
        "models.a": {"source": "random://", "device": "sim"},
    }
    objects = any_helm.render(values)
    gateway = named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"]["spec"]
    engine = named(objects, "Deployment", "rel-warmroute-engine-a")["spec"]["template"]["spec"]
    assert gateway["terminationGracePeriodSeconds"] == delay + longest + 15
    assert engine["terminationGracePeriodSeconds"] == delay + 1 + longest + 20
    assert f"--drain-delay-s={delay}" in gateway["containers"][0]["args"]
    assert {f"--drain-timeout-s={longest}", f"--total-timeout-s={longest}"} <= set(gateway["containers"][0]["args"])
    assert f"--drain-s={longest}" in engine["containers"][0]["args"]
    assert engine["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(delay + 1)]


def test_an_upgrade_may_wait_for_the_answers_of_the_pod_it_replaces(any_helm: Helm) -> None:
    """On GPUs the new pod has to wait. The Deployment makes no progress meanwhile, and helm and GitOps tools give up at
    its deadline."""
    model = {"source": "pvc://models", "loadTimeoutSeconds": 1200}
    spec = named(
        any_helm.render({"longestAnswerSeconds": 3600, "models.a": model}), "Deployment", "rel-warmroute-engine-a"
    )["spec"]
    grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 3600
    assert spec["progressDeadlineSeconds"] >= grace + 1200 + 600


def test_what_fetches_a_checkpoint_ends_when_told(any_helm: Helm) -> None:
    """A program without a handler never sees a SIGTERM as process 1, and its pod keeps the GPU for the grace period."""
    programs = set()
    for values in ALL_VALUES:
        for _, template in pod_templates(any_helm.render(values)):
            for one in template["spec"].get("initContainers", []):
                if one["name"] == "model" and template["spec"].get("shareProcessNamespace"):
                    assert one["command"] == ["hf", "download"]
                elif one["name"] == "model":
                    assert one["command"][:3] == ["dumb-init", "--single-child", "--"]
                    programs.add(one["command"][3])
    assert programs == {"hf", "python"}


def test_what_fetches_from_the_hub_gets_the_models_variables(any_helm: Helm) -> None:
    """The variables may name a cluster's proxy. The chart's own variables stay."""
    model = {
        "source": "hf://Qwen/Qwen3-8B",
        "huggingFace": {"endpoint": "https://hub", "tokenSecret": "hub"},
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    }
    template = named(any_helm.render({"models.a": model}), "Deployment", "rel-warmroute-engine-a")["spec"]["template"]
    assert container(template, "model")["env"] == [
        {"name": "HF_HOME", "value": "/models/.hub"},
        {"name": "HF_ENDPOINT", "value": "https://hub"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
    ]


def test_a_disruption_budget_is_made_only_if_a_pod_may_go(any_helm: Helm) -> None:
    def budgets(values: dict[str, object]) -> set[str]:
        return {b["metadata"]["name"] for b in of_kind(any_helm.render(values), "PodDisruptionBudget")}

    model = {"source": "random://", "device": "sim"}
    assert budgets({"gateway.replicas": 1, "models.a": model}) == set()
    assert budgets({"gateway.replicas": 2, "models.a": {**model, "replicas": 2}}) == {
        "rel-warmroute-gateway",
        "rel-warmroute-engine-a",
    }


def test_gpu_pools_need_no_spare_gpu_to_roll(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "gpu-values.yaml")
    roll = named(objects, "Deployment", "rel-warmroute-engine-cached")["spec"]
    assert roll["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert roll["progressDeadlineSeconds"] > 600
    (engine,) = roll["template"]["spec"]["containers"]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert engine["startupProbe"]["failureThreshold"] * engine["startupProbe"]["periodSeconds"] == 600
    assert named(objects, "Deployment", "rel-warmroute-engine-claim")["spec"]["strategy"] == {"type": "Recreate"}


def test_a_model_may_take_back_what_the_defaults_give(any_helm: Helm) -> None:
    """`false` and an empty list override defaults, too."""
    objects = any_helm.render(CHART / "ci" / "gpu-values.yaml")
    cached, claim, node = (
        named(objects, "Deployment", f"rel-warmroute-engine-{name}")["spec"]["template"]["spec"]
        for name in ("cached", "claim", "node-url")
    )
    assert cached["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert cached["runtimeClassName"] == "nvidia"
    assert not claim.keys() & {"tolerations", "runtimeClassName"}
    assert claim["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": 1}
    assert [c["topologyKey"] for c in cached["topologySpreadConstraints"]] == ["kubernetes.io/hostname"]
    assert [c["topologyKey"] for c in node["topologySpreadConstraints"]] == ["topology.kubernetes.io/zone"]
    assert "rel-warmroute-engine-off" not in {thing["metadata"]["name"] for thing in objects}


def test_what_server_side_apply_merges_by_is_unique(any_helm: Helm) -> None:
    for values in ALL_VALUES:
        for where, template in pod_templates(any_helm.render(values)):
            keys = [volume["name"] for volume in template["spec"].get("volumes", [])]
            assert len(keys) == len(set(keys)), where
            for one in containers(template):
                for field, key in (("ports", "containerPort"), ("volumeMounts", "mountPath")):
                    keys = [item[key] for item in one.get(field, [])]
                    assert len(keys) == len(set(keys)), (where, one["name"], field)


def test_volumes_that_are_mounted_are_there(any_helm: Helm) -> None:
    for values in ALL_VALUES:
        for where, template in pod_templates(any_helm.render(values)):
            volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
            mounted = {mount["name"] for one in containers(template) for mount in one.get("volumeMounts", [])}
            assert mounted <= volumes, where


def test_a_deployment_that_is_scaled_has_no_replicas(any_helm: Helm) -> None:
    gpu = any_helm.render(CHART / "ci" / "gpu-values.yaml")
    assert "replicas" not in named(gpu, "Deployment", "rel-warmroute-engine-hub")["spec"]
    assert named(gpu, "Deployment", "rel-warmroute-engine-node-url")["spec"]["replicas"] == 2
    exposed = any_helm.render(CHART / "ci" / "exposed-values.yaml")
    assert "replicas" not in named(exposed, "Deployment", "rel-warmroute-gateway")["spec"]


@pytest.mark.parametrize(
    ("model", "volume", "folder"),
    [
        ("cached", {"emptyDir": {"sizeLimit": "100Gi"}}, "/models/Qwen--Qwen3-8B--main"),
        ("claim", {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}, "/model/qwen/3-8b"),
        ("node", {"hostPath": {"path": "/var/models/qwen3", "type": "Directory"}}, "/model"),
        ("node-url", {"hostPath": {"path": "/var/models/qwen3", "type": "Directory"}}, "/model"),
    ],
)
def test_sources(any_helm: Helm, model: str, volume: dict[str, object], folder: str) -> None:
    objects = any_helm.render(CHART / "ci" / "gpu-values.yaml")
    spec = named(objects, "Deployment", f"rel-warmroute-engine-{model}")["spec"]["template"]["spec"]
    (engine,) = spec["containers"]
    assert {"name": "model", **volume} in spec["volumes"]
    assert f"--model={folder}" in engine["args"]
    (mount,) = (m for m in engine["volumeMounts"] if m["name"] == "model")
    assert folder.startswith(mount["mountPath"])
    assert mount["readOnly"] is True


def test_an_image_as_source(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "oci-values.yaml")
    spec = named(objects, "Deployment", "rel-warmroute-engine-image")["spec"]["template"]["spec"]
    reference = "registry.example.com:5000/models/qwen3:8b"
    assert spec["volumes"][0] == {"name": "model", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    assert "--model=/model/weights" in spec["containers"][0]["args"]


def test_images(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "exposed-values.yaml")
    images = {c["name"]: c["image"] for _, template in pod_templates(objects) for c in containers(template)}
    assert images["gateway"] == f"registry.example.com:5000/warmroute/gateway@sha256:{'0' * 64}"
    assert images["engine"] == "registry.example.com:5000/warmroute/engine-cpu:0.3.0.dev0"
    assert images["redis"] == "registry.example.com:5000/library/redis:7.4"


def test_only_the_api_is_exposed(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "exposed-values.yaml")
    wanted = {*map(str, Endpoint), *BY_LOAD, *UPLOADS, "/v1/models"} - {"/v1/responses"}
    below = ("/v1/caches", "/v1/responses")
    (ingress,) = of_kind(objects, "Ingress")
    paths = ingress["spec"]["rules"][0]["http"]["paths"]
    exact = {(path, "Exact") for path in wanted}
    assert {(p["path"], p["pathType"]) for p in paths} == {*exact, *((path, "Prefix") for path in below)}
    (route,) = of_kind(objects, "HTTPRoute")
    rules = route["spec"]["rules"]
    assert max(len(rule["matches"]) for rule in rules) <= 8
    assert len({str({**rule, "matches": []}) for rule in rules}) == 1
    matches = [match for rule in rules for match in rule["matches"]]
    told = [{"type": "Exact", "value": path} for path in sorted(wanted)]
    assert [m["path"] for m in matches] == [*told, *({"type": "PathPrefix", "value": path} for path in below)]
    services = [s for s in of_kind(objects, "Service") if s["spec"].get("type") == "LoadBalancer"]
    assert [port["targetPort"] for port in services[0]["spec"]["ports"]] == ["http"]


def test_other_paths_are_exposed_if_the_gateway_passes_them(any_helm: Helm) -> None:
    objects = any_helm.render(CHART / "ci" / "exposed-values.yaml", "--set", "gateway.settings.pass_through=true")
    (ingress,), (route,) = of_kind(objects, "Ingress"), of_kind(objects, "HTTPRoute")
    last = ingress["spec"]["rules"][0]["http"]["paths"][-1]
    assert (last["path"], last["pathType"]) == ("/v1", "Prefix")
    assert route["spec"]["rules"][-1]["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]


def test_a_route_waits_for_the_longest_answer(any_helm: Helm) -> None:
    """Envoy's own limit is 15 seconds."""
    exposed = CHART / "ci" / "exposed-values.yaml"
    (route,) = of_kind(any_helm.render(exposed, "--set", "longestAnswerSeconds=1200"), "HTTPRoute")
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "1205s"}
    (route,) = of_kind(any_helm.render(exposed, "--set", "gateway.httpRoute.timeout=false"), "HTTPRoute")
    assert "timeouts" not in route["spec"]["rules"][0]


def test_an_upgrade_with_the_same_comparison_keeps_its_job(any_helm: Helm) -> None:
    values = CHART / "ci" / "loadgen-values.yaml"

    def job(*flags: str) -> str:
        (found,) = of_kind(any_helm.render(values, *flags), "Job")
        return str(found["metadata"]["name"])

    assert job() == job("--set", "gateway.replicas=5")
    assert len({job(), job("--set", "loadgen.run=2"), job("--set", "loadgen.settings.sessions=11")}) == 3
