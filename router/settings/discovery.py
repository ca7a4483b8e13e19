"""Settings of the fleet: which engines there are, and where they are found."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import urlsplit

import orjson
from pydantic import Field, field_validator, model_validator

from engine.contract.settings import Settings, check_unique, check_url, flag_of
from router.kube_targets import KubeTarget, check_namespace, check_port, numbered, parse_targets


class DiscoverySettings(Settings):
    """Models and engines."""

    models: list[str] = Field(
        [],
        description="models that exist even while no engine serves them, comma-separated: then 503, not 404; "
        "those of engines that answered once are known without",
    )
    discovery: Literal["static", "kubernetes", "dns"] = Field(
        "static",
        description="where engines are found: in --engines, among the pods of a Kubernetes namespace, or in DNS",
    )
    engines: list[str] = Field(
        [],
        description="static: base URLs of the engines, comma-separated, e.g. http://10.0.0.7:8000; required",
    )
    kube_selector: str | None = Field(
        None, description="kubernetes: label selector of the engines' pods, e.g. app=engine,tier!=test; required"
    )
    kube_namespace: str | None = Field(
        None, description="kubernetes: namespace of the engines' pods; none: the gateway's own, or the kubeconfig's"
    )
    kube_port: str = Field(
        "http",
        coerce_numbers_to_str=True,
        description="kubernetes: TCP port of the engines, as a number or a containerPort's name; "
        "a pod's annotation warmroute.io/port goes first",
    )
    kube_targets: str | None = Field(
        None,
        description="kubernetes: several sets of pods, in place of --kube-selector, --kube-namespace and --kube-port: "
        "a YAML or JSON list such as [{selector: app=vllm, namespace: llm, port: 8000, model: org/name, api_key_file: "
        "/keys/vllm, kv_events_port: 5557, kv_events_replay_port: 5657, ranks: 2}]. selector is required; "
        "what a pod's annotations say (warmroute.io/model and so on) goes first",
    )
    kube_config: str | None = Field(
        None, description="kubernetes: kubeconfig file whose current context is used; none: the pod's service account"
    )
    dns_name: str | None = Field(
        None, description="dns: name whose A or AAAA records are the engines, e.g. a headless Service's; required"
    )
    dns_port: int = Field(8000, ge=1, le=65535, description="dns: TCP port of the engines")
    dns_max_ttl_s: float = Field(
        5.0, ge=1, description="dns: seconds after which the name is asked for again; sooner where its TTL is shorter"
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
                    "--engine-api-key-file gives the key that engines want"
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

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        required = {"static": "engines", "kubernetes": "kube_selector", "dns": "dns_name"}
        prefixes = {"static": "engines", "kubernetes": "kube_", "dns": "dns_"}
        for kind, prefix in prefixes.items():
            given = sorted(name for name in self.model_fields_set if name.startswith(prefix))
            if kind != self.discovery and given:
                raise ValueError(f"{flag_of(given[0])} needs --discovery {kind}, which is {self.discovery}")
        name = required[self.discovery]
        if self.kube_targets is not None:
            others = sorted(self.model_fields_set & {"kube_selector", "kube_namespace", "kube_port"})
            if others:
                raise ValueError(
                    f"{flag_of(others[0])} and --kube-targets are both given: an entry of --kube-targets has its own "
                    f"{others[0].removeprefix('kube_')}; leave one of them out"
                )
            return self
        if not getattr(self, name):
            about = type(self).model_fields[name].description
            raise ValueError(f"{flag_of(name)} is required with --discovery {self.discovery} ({about})")
        return self

    @property
    def targets(self) -> tuple[KubeTarget, ...]:
        """The pods to follow, of --kube-targets or of the three settings in its place; none without Kubernetes."""
        if self.kube_targets is not None:
            return parse_targets(self.kube_targets)
        if self.kube_selector is None:
            return ()
        return (KubeTarget(self.kube_selector, self.kube_namespace, numbered(self.kube_port)),)

    @property
    def engine_key_files(self) -> tuple[str, ...]:
        """The files of targets that have a key of their own, each once."""
        return tuple(dict.fromkeys(target.key_file for target in self.targets if target.key_file))
