"""Settings of the fleet: where engines are found, and which models they serve."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import urlsplit

import orjson
from pydantic import Field, field_validator, model_validator

from engine.common.settings import Settings, check_unique, check_url, flag_of
from router.fleet.targets import KubeTarget, check_namespace, check_pool, check_port, numbered, parse_targets


class DiscoverySettings(Settings):
    """Models and engines."""

    models: list[str] = Field(
        [],
        description="models, comma-separated, that exist even while no engine serves them: requests for them are then "
        "answered 503, not 404; models of engines that answered once are known anyway",
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
        "a pod's annotation warmroute.io/port overrides it",
    )
    kube_targets: str | None = Field(
        None,
        description="kubernetes: several sets of pods, in place of --kube-selector, --kube-namespace and --kube-port: "
        "a YAML or JSON list such as [{selector: app=vllm, namespace: llm, port: 8000, model: org/name, api_key_file: "
        "/keys/vllm, kv_events_port: 5557, kv_events_replay_port: 5657, ranks: 2, tls: true}]. "
        "selector is required, or pool, which names the one InferencePool to follow as --inference-pool does; "
        "a pod's annotations (warmroute.io/model and so on) override the entry",
    )
    inference_pool: str | None = Field(
        None,
        description="kubernetes: InferencePool (inference.networking.k8s.io/v1) in --kube-namespace whose selector and "
        "targetPorts say which pods are engines, in place of --kube-selector and --kube-port; changes to it are "
        "followed",
    )
    inference_objectives: bool = Field(
        False,
        description="kubernetes: the endpoint picker uses the priority of the pool's InferenceObjective "
        "(inference.networking.x-k8s.io/v1alpha2) that a request names in the header x-gateway-inference-objective; "
        "a request with a priority below 0 is refused if it would have to wait. Needs an InferencePool",
    )
    kube_config: str | None = Field(
        None, description="kubernetes: kubeconfig file whose current context is used; none: the pod's service account"
    )
    dns_name: str | None = Field(
        None, description="dns: name whose A or AAAA records are the engines, e.g. a headless Service's; required"
    )
    dns_port: int = Field(8000, ge=1, le=65535, description="dns: TCP port of the engines")
    dns_max_ttl_s: float = Field(
        5.0, ge=1, description="dns: seconds after which the name is resolved again; sooner if its TTL is shorter"
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

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        required = {"static": "engines", "kubernetes": "kube_selector", "dns": "dns_name"}
        prefixes = {"static": ("engines",), "kubernetes": ("inference_", "kube_"), "dns": ("dns_",)}
        for kind, prefix in prefixes.items():
            given = sorted(name for name in self.model_fields_set if name.startswith(prefix))
            if kind != self.discovery and given:
                raise ValueError(f"{flag_of(given[0])} needs --discovery {kind}, not {self.discovery}")
        name = required[self.discovery]
        if self.kube_targets is not None:
            others = sorted(self.model_fields_set & {"inference_pool", "kube_selector", "kube_namespace", "kube_port"})
            if others:
                raise ValueError(
                    f"{flag_of(others[0])} and --kube-targets are both given: an entry of --kube-targets has its own "
                    f"{others[0].removeprefix('kube_').removeprefix('inference_')}; leave one of them out"
                )
        if self.inference_pool is not None and (
            others := sorted(self.model_fields_set & {"kube_selector", "kube_port"})
        ):
            raise ValueError(
                f"{flag_of(others[0])} and --inference-pool are both given: the pool sets it; leave "
                f"{flag_of(others[0])} out"
            )
        if self.inference_objectives and self.pool is None:
            raise ValueError("--inference-objectives needs --inference-pool: objectives belong to a pool")
        if self.kube_targets is not None or self.inference_pool is not None:
            return self
        if not getattr(self, name):
            about = type(self).model_fields[name].description
            raise ValueError(f"{flag_of(name)} is required with --discovery {self.discovery} ({about})")
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
