"""Credentials: a pod's service account and kubeconfig files, as they are on disk."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from pathlib import Path
from typing import Any

import certifi
import pytest
import yaml

from router.kubernetes import login as kubernetes_login
from router.kubernetes.api import ApiError, Cluster, Trouble
from router.kubernetes.login import login

POD_ENVIRON = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture(scope="module")
def ca() -> bytes:
    """Return CA certificates as PEM, from a package that the client depends on."""
    return certifi.contents().encode()


@pytest.fixture
def account(tmp_path: Path, ca: bytes) -> Path:
    """Yield the folder that Kubernetes mounts into a pod."""
    (tmp_path / "token").write_text("secret-1\n")
    (tmp_path / "ca.crt").write_bytes(ca)
    (tmp_path / "namespace").write_text("own")
    return tmp_path


async def test_service_account_and_its_rotation(account: Path) -> None:
    first = await login(None, environ=POD_ENVIRON, service_account=account)
    assert (first.url, first.namespace) == ("https://10.96.0.1:443", "own")
    assert first.headers == {"Authorization": "bearer secret-1"}
    assert first.tls is not None
    assert first.tls.verify_mode is ssl.CERT_REQUIRED
    assert "secret-1" not in repr(first), "tokens are not logged"
    (account / "token").write_text("two")
    second = await login("other", environ=POD_ENVIRON, service_account=account)
    assert second.headers == {"Authorization": "bearer two"}
    assert second.namespace == "other"


async def test_ipv6_api_server(account: Path) -> None:
    environ = {**POD_ENVIRON, "KUBERNETES_SERVICE_HOST": "fd00::1"}
    assert (await login(None, environ=environ, service_account=account)).url == "https://[fd00::1]:443"


@pytest.mark.parametrize("missing", ["token", "ca.crt", "namespace", "environ"])
async def test_no_service_account_says_what_to_do(account: Path, missing: str) -> None:
    environ = POD_ENVIRON if missing != "environ" else {}
    (account / missing).unlink(missing_ok=True)
    with pytest.raises(ApiError, match=r"automountServiceAccountToken.*KUBECONFIG") as caught:
        await login(None, environ=environ, service_account=account)
    assert caught.value.trouble is Trouble.LOGIN


async def test_a_broken_ca_is_a_login_failure(account: Path) -> None:
    (account / "ca.crt").write_text("nonsense")
    with pytest.raises(ApiError, match="no usable service account"):
        await login(None, environ=POD_ENVIRON, service_account=account)


def kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any], namespace: str | None = None) -> str:
    context = {"cluster": "c", "user": "u", **({"namespace": namespace} if namespace else {})}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "now",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "now", "context": context}],
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)


async def test_kubeconfig(tmp_path: Path, ca: bytes) -> None:
    data = base64.b64encode(ca).decode()
    server = {"server": "https://host:6443", "certificate-authority-data": data, "tls-server-name": "kube"}
    path = kubeconfig(tmp_path / "config", server, {"token": "t"}, "theirs")
    cluster = await login(None, environ={"KUBECONFIG": path})
    assert (cluster.url, cluster.namespace, cluster.server_name) == ("https://host:6443", "theirs", "kube")
    assert cluster.headers["Authorization"].lower() == "bearer t"
    assert (await login("mine", environ={"KUBECONFIG": path})).namespace == "mine"


async def test_kubeconfig_without_verification_or_namespace(tmp_path: Path) -> None:
    server = {"server": "https://host", "insecure-skip-tls-verify": True}
    cluster = await login(None, environ={"KUBECONFIG": kubeconfig(tmp_path / "config", server, {})})
    assert cluster.tls is not None
    assert cluster.tls.verify_mode is ssl.CERT_NONE
    assert (cluster.namespace, cluster.headers) == ("default", {})


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "a: [",
        "clusters: []",
        "- a",
        "contexts: 7\ncurrent-context: now",
        "contexts: [{}]\ncurrent-context: now",
    ],
    ids=["absent", "empty", "not YAML", "no context", "a list", "contexts of a wrong kind", "a context without a name"],
)
async def test_an_unusable_kubeconfig_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ApiError, match=f"KUBECONFIG {path} is not usable"):
        await login(None, environ={"KUBECONFIG": str(path)})


def test_a_login_that_hangs_keeps_nobody_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a kubeconfig names may hang in this way while the process is told to stop."""
    let_go, ended = threading.Event(), threading.Event()

    def hang(path: str, namespace: str | None) -> Cluster:
        let_go.wait(4)
        ended.set()
        raise ApiError(Trouble.LOGIN, path)

    monkeypatch.setattr(kubernetes_login, "LOGIN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(kubernetes_login, "_from_kubeconfig", hang)
    with pytest.raises(ApiError, match="not available"):
        asyncio.run(login(None, environ={"KUBECONFIG": "file"}))
    assert not ended.is_set(), "the loop has ended before the login did"
    let_go.set()
    assert ended.wait(10)
