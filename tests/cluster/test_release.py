"""The installed release fulfils its purpose."""

from __future__ import annotations

import json

import pytest

from tests.cluster.cluster import NAMESPACE, RELEASE, command, helm, install, kubectl, settle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.usefixtures("release")]
GATEWAY = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-gateway"


def test_helm_test_passes() -> None:
    helm("test", RELEASE, "--logs", timeout_s=200)


@pytest.mark.parametrize(
    ("verb", "resource", "is_allowed"),
    [
        ("list", "pods", True),
        ("watch", "pods", True),
        ("get", "pods", False),
        ("patch", "pods", False),
        ("delete", "pods", False),
        ("list", "secrets", False),
        ("list", "services", False),
    ],
)
def test_the_gateway_may_list_and_watch_pods_and_nothing_else(verb: str, resource: str, is_allowed: bool) -> None:
    asked = ("auth", "can-i", verb, resource, "--as", GATEWAY)
    if is_allowed:
        assert kubectl(*asked).strip() == "yes"
    else:
        with pytest.raises(AssertionError, match=r"ended with 1:\s+no"):
            kubectl(*asked)


def test_the_gateway_sees_no_other_namespace() -> None:
    with pytest.raises(AssertionError, match=r"ended with 1:\s+no"):
        command("kubectl", "--namespace", "kube-system", "auth", "can-i", "list", "pods", "--as", GATEWAY)


def test_engines_have_no_token() -> None:
    pod = kubectl("get", "pods", "--selector", "app.kubernetes.io/component=engine", "--output", "name").split()[0]
    listing = kubectl("exec", pod, "--", "sh", "-c", "ls /var/run/secrets 2>&1 || true")
    assert "kubernetes.io" not in listing


@pytest.mark.parametrize("component", ["gateway", "engine", "redis"])
def test_containers_run_without_root_and_cannot_write_their_image(component: str) -> None:
    pods = kubectl("get", "pods", "--selector", f"app.kubernetes.io/component={component}", "--output", "name").split()
    said = kubectl("exec", pods[0], "--", "sh", "-c", "id -u; touch /usr/x 2>&1 || true; grep CapEff /proc/self/status")
    uid, touched, capabilities = said.splitlines()
    assert int(uid) >= 999
    assert "Read-only file system" in touched
    assert int(capabilities.split()[1], 16) == 0


def test_the_load_generators_report_shows_what_affinity_gains() -> None:
    settle()
    install("loadgen.enabled=true")
    selector = "app.kubernetes.io/component=loadgen"
    kubectl("wait", "job", "--selector", selector, "--for=condition=complete", "--timeout=240s", timeout_s=250)
    result = json.loads(kubectl("logs", "--selector", selector, "--container", "result", "--tail=-1"))
    plain, grouped = result["arms"]["round_robin"], result["arms"]["affinity_groups"]
    print(
        json.dumps(
            {name: {k: arm[k] for k in ("cached_token_rate", "mean_ttft_ms")} for name, arm in result["arms"].items()}
        )
    )
    for arm in (plain, grouped):
        assert arm["completed"] == arm["planned"] > 100
        assert arm["failed"] == 0
    used = {name for name, pod in plain["pods"].items() if pod["requests"]}
    assert len(used) == 3, "round robin uses exactly the engines of the model"
    assert grouped["cached_token_rate"] > plain["cached_token_rate"] + 0.1
    assert grouped["mean_ttft_ms"] < plain["mean_ttft_ms"]
    install()
