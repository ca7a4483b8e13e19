"""Settings of the fleet: where engines are found, and which models they serve."""

from __future__ import annotations

from typing import Any, Self
from urllib.parse import urlsplit

import orjson
from pydantic import Field, field_validator, model_validator

from engine.common.settings import Settings, check_unique, check_url, flag_of, group
from router.fleet.targets import KubeTarget, check_namespace, check_pool, check_port, numbered, parse_targets

DNS_PORT = 8000
"""Port of --dns-name without one: that of vLLM and of the bundled engine."""
WAYS = ("engines", "dns_name", "kube_selector", "kube_targets", "inference_pool")
"""Settings that each say where engines are; exactly one is given."""
KUBERNETES = WAYS[2:]


@group(
    "Where engines are",
    common=("engines", "dns_name", "kube_selector", "kube_namespace", "kube_port", "inference_pool"),
)
class DiscoverySettings(Settings):
    """Where engines are found."""

    engines: list[str] = Field(
        [], description="fixed addresses: base URLs, e.g. http://10.0.0.7:8000,http://10.0.0.8:8000"
    )
    dns_name: str | None = Field(
        None,
        description="outside Kubernetes, or for a headless Service: NAME:PORT whose A or AAAA records are the engines; "
        "without :PORT: 8000",
    )
    kube_selector: str | None = Field(
        None, description="in Kubernetes: label selector of the engines' pods, e.g. app=vllm,tier!=test"
    )
    kube_namespace: str | None = Field(
        None, description="their namespace; none: the gateway's own, or that of $KUBECONFIG's context"
    )
    kube_port: str = Field(
        "http",
        coerce_numbers_to_str=True,
        description="their port, a number or a containerPort's name; a pod's annotation warmroute.io/port overrides it",
    )
    kube_targets: str | None = Field(
        None,
        description="for several sets of pods, in place of these three: YAML or JSON such as [{selector: app=vllm, "
        "namespace: llm, port: 8000, model: org/name, api_key_file: /keys/vllm, kv_events_port: 5557, "
        "kv_events_replay_port: 5657, ranks: 2, tls: true}]; a pod's annotations override an entry",
    )
    inference_pool: str | None = Field(
        None,
        description="InferencePool (inference.networking.k8s.io/v1) to follow in --kube-namespace, in place of "
        "--kube-selector and --kube-port",
    )
    inference_objectives: bool = Field(
        False,
        description="with a pool and --ext-proc-port: requests have the priority of the InferenceObjective that they "
        "name in x-gateway-inference-objective; below 0: refused if they would wait",
    )

    @field_validator("engines")
    @classmethod
    def _check_engines(cls, urls: list[str]) -> list[str]:
        cleaned = [url.strip().rstrip("/") for url in urls]
        for url in cleaned:
            check_url(url, ("http", "https"))
            if "@" in urlsplit(url).netloc:
                raise ValueError(
                    f"{url!r} must not hold a user or a password: answers, metrics and logs show where engines are. "
                    "--engine-api-key-file gives the key for engines"
                )
        check_unique(cleaned)
        return cleaned

    @field_validator("kube_port")
    @classmethod
    def _check_kube_port(cls, port: str) -> str:
        return check_port(port)

    @field_validator("kube_targets", mode="before")
    @classmethod
    def _check_kube_targets(cls, targets: Any) -> Any:
        text = orjson.dumps(targets).decode() if isinstance(targets, list) else targets
        if isinstance(text, str):
            parse_targets(text)
        return text

    @field_validator("kube_namespace")
    @classmethod
    def _check_kube_namespace(cls, name: str | None) -> str | None:
        return None if name is None else check_namespace(name)

    @field_validator("inference_pool")
    @classmethod
    def _check_inference_pool(cls, name: str | None) -> str | None:
        return None if name is None else check_pool(name)

    @field_validator("dns_name")
    @classmethod
    def _check_dns_name(cls, name: str | None) -> str | None:
        if name is not None:
            dns_address(name)
        return name

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        ways = [name for name in WAYS if getattr(self, name)]
        flags = ", ".join(map(flag_of, WAYS))
        if not ways:
            raise ValueError(f"one of {flags} is required: it says where engines are")
        if len(ways) > 1:
            raise ValueError(f"{flag_of(ways[0])} and {flag_of(ways[1])} are both given: give one of {flags}")
        way, given = ways[0], self.model_fields_set
        needs = {"kube_selector": ("kube_namespace", "kube_port"), "inference_pool": ("kube_namespace",)}
        wrong = [name for name in ("kube_namespace", "kube_port") if name in given and name not in needs.get(way, ())]
        if wrong and way in KUBERNETES:
            raise ValueError(f"{flag_of(wrong[0])} and {flag_of(way)} are both given: {flag_of(way)} sets it already")
        if wrong:
            raise ValueError(f"{flag_of(wrong[0])} needs --kube-selector, not {flag_of(way)}")
        if self.inference_objectives and self.pool is None:
            raise ValueError("--inference-objectives needs --inference-pool: objectives belong to a pool")
        return self

    @property
    def targets(self) -> tuple[KubeTarget, ...]:
        """Return the pods to follow, from --kube-targets or the three settings in its place; none without
        Kubernetes."""
        if self.kube_targets is not None:
            return parse_targets(self.kube_targets)
        if self.inference_pool is not None:
            return (KubeTarget("", self.kube_namespace, pool=self.inference_pool),)
        if self.kube_selector is None:
            return ()
        return (KubeTarget(self.kube_selector, self.kube_namespace, numbered(self.kube_port)),)

    @property
    def pool(self) -> KubeTarget | None:
        """Return the target that is an InferencePool; None: there is none."""
        return next((target for target in self.targets if target.pool), None)

    @property
    def engine_key_files(self) -> tuple[str, ...]:
        """Return the key files of targets that have their own key, each once."""
        return tuple(dict.fromkeys(target.key_file for target in self.targets if target.key_file))


def dns_address(text: str) -> tuple[str, int]:
    """Return name and port of NAME or NAME:PORT. Raises ValueError."""
    name, _, port = text.partition(":")
    if not name or (port and not (port.isdecimal() and 0 < int(port) < 65536)) or text.endswith(":"):
        raise ValueError(f"{text!r} must be NAME or NAME:PORT, as in engines.llm.svc:8000")
    return name, int(port) if port else DNS_PORT
