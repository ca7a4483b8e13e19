"""Credentials for the API server: the pod's service account, or a kubeconfig, as the `kubernetes` client reads them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import yaml

from router.kubernetes.api import CONNECT_TIMEOUT_S, ApiError, Cluster, ObjectApi, Trouble
from router.kubernetes.objects import Object, ObjectKind
from router.kubernetes.pods import PODS, Pod

if TYPE_CHECKING:
    from kubernetes.client import Configuration

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOGIN_TIMEOUT_S = 30.0
"""Seconds; a kubeconfig may name a program that fetches a token."""

Login = Callable[[], Awaitable[Cluster]]


def connect(login: Login, selector: str) -> AbstractAsyncContextManager[ObjectApi[Pod]]:
    """Return the API of the pods with the labels `selector`."""
    return connect_to(login, PODS, {"labelSelector": selector})


@contextlib.asynccontextmanager
async def connect_to(
    login: Login, kind: ObjectKind[Object], selected: Mapping[str, str]
) -> AsyncIterator[ObjectApi[Object]]:
    """Yield the API of a kind, with credentials read now: tokens and CAs are rotated under a running process."""
    cluster = await login()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield ObjectApi(session, cluster, kind, selected)


async def login(
    namespace: str | None,
    *,
    environ: Mapping[str, str],
    service_account: Path = SERVICE_ACCOUNT,
) -> Cluster:
    """Return the credentials in the file that the variable KUBECONFIG names, or the pod's own without it. They name
    the namespace if `namespace` is None.

    Raises ApiError. Runs in a thread, because it reads files and may start a program.
    """
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT_S):
            kubeconfig = environ.get("KUBECONFIG")
            if not kubeconfig:
                return await _in_thread(partial(_from_service_account, namespace, environ, service_account))
            return await _in_thread(partial(_from_kubeconfig, kubeconfig, namespace))
    except TimeoutError:
        raise ApiError(Trouble.LOGIN, f"credentials were not available within {LOGIN_TIMEOUT_S:g} s") from None


async def _in_thread(read: Callable[[], Cluster]) -> Cluster:
    """Return `read()`, run in a separate thread that nobody waits for at the end.

    A program that a kubeconfig names may hang. In the loop's executor it would keep the process from ending. Several
    such programs would occupy all threads that resolve host names.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Cluster] = loop.create_future()

    def settle(cluster: Cluster | None, error: Exception | None) -> None:
        if outcome.done():  # given up
            return
        if cluster is not None:
            outcome.set_result(cluster)
        else:
            outcome.set_exception(error or RuntimeError("no credentials"))

    def run() -> None:
        cluster, failure = None, None
        try:
            cluster = read()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, cluster, failure)

    threading.Thread(target=run, name="credentials", daemon=True).start()
    return await outcome


# The client takes 0.2 s and 38 MB to import, so it is imported only when needed.


def _from_service_account(namespace: str | None, environ: Mapping[str, str], directory: Path) -> Cluster:
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException
    from kubernetes.config.incluster_config import InClusterConfigLoader

    configuration = Configuration()
    loader = InClusterConfigLoader(
        token_filename=str(directory / "token"),
        cert_filename=str(directory / "ca.crt"),
        try_refresh_token=False,
        environ=environ,
    )
    try:
        loader.load_and_set(configuration)
        return _cluster(configuration, namespace or (directory / "namespace").read_text().strip())
    except (ConfigException, OSError, ValueError) as error:
        raise ApiError(
            Trouble.LOGIN,
            f"no usable service account ({error}); it needs automountServiceAccountToken, "
            "and a gateway outside the cluster needs the variable KUBECONFIG",
        ) from None


def _from_kubeconfig(path: str, namespace: str | None) -> Cluster:
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config

    configuration = Configuration()
    try:
        load_kube_config(path, client_configuration=configuration, persist_config=False)
        _, active = list_kube_config_contexts(path)
        return _cluster(configuration, namespace or active["context"].get("namespace") or "default")
    except (ConfigException, OSError, ValueError, yaml.YAMLError) as error:
        raise ApiError(Trouble.LOGIN, f"KUBECONFIG {path} is not usable: {error}") from None
    except (
        AttributeError,
        KeyError,
        TypeError,
    ) as error:  # the YAML is valid, but something in it is missing or of a wrong kind
        why = f"{type(error).__name__}: {error}"
        raise ApiError(Trouble.LOGIN, f"KUBECONFIG {path} is not usable: it is no kubeconfig ({why})") from None


def _cluster(configuration: Configuration, namespace: str) -> Cluster:
    tls = None
    if configuration.host.startswith("https:"):
        tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        tls.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13's default refuses the CAs of many clusters
        if configuration.cert_file:
            tls.load_cert_chain(configuration.cert_file, configuration.key_file)
        if not configuration.verify_ssl:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    token = configuration.auth_settings().get("BearerToken")
    headers = {"Authorization": token["value"].strip()} if token and token["value"] else {}
    return Cluster(configuration.host, namespace, headers, tls, configuration.tls_server_name)
