"""Builds values.schema.json from types and descriptions in values.yaml, the programs' settings, and the rules here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from charts.values_doc import Value
from engine.common.settings import REMOVED_IN, Settings
from engine.model.checkpoint import CheckpointShape
from engine.model.config import DTYPES
from engine.startup.settings import EngineSettings
from loadgen.commands.compare import CompareSettings
from router.settings.gateway import GatewaySettings
from router.settings.names import MAX_WEIGHT

Schema = dict[str, Any]

STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
KUBERNETES_LIST: Schema = {"type": "array", "items": {"type": "object"}}
"""Lists that are passed on unchanged: the API server checks what is in them."""
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
PORT: Schema = {**POSITIVE, "maximum": 65535}
PORTS: Schema = {"type": "array", "items": PORT}
NAMESPACE: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"}
SHARE: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
PROBE: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": dict.fromkeys(("periodSeconds", "timeoutSeconds", "failureThreshold"), POSITIVE),
}
RESOURCE_LIST: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
LABELS: Schema = {
    "type": "object",
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$",
    },
}
PORT_OR_NAME: Schema = {
    "type": ["string", "integer"],
    "minimum": 1,
    "maximum": 65535,
    "pattern": "^([1-9][0-9]{0,4}|[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?)$",
}
EXISTING: Schema = {
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?$"},
        "namespace": NAMESPACE,
        "selector": LABELS,
        "port": PORT_OR_NAME,
        "metricsPort": PORT_OR_NAME,
        "model": {"type": "string"},
        "onlyModel": {"type": "boolean"},
        "apiKeySecret": {"type": "string"},
        "apiKeySecretKey": {"type": "string"},
        "kvEventsPort": PORT,
        "kvEventsReplayPort": PORT,
        "ranks": {**POSITIVE, "maximum": 256},
        "tls": {"type": "boolean"},
    },
}
"""A set of pods in engines.existing."""

DNS_NAME = "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"

NAMED: Schema = {"type": "string", "pattern": "^[^\\s,=]+$"}
"""A model, or a name that stands for one."""

BY_KEY: dict[str, Schema] = {
    "affinity": {"type": "object"},
    "podSecurityContext": {"type": "object"},
    "securityContext": {"type": "object"},
    "strategy": {"type": "object"},
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"requests": RESOURCE_LIST, "limits": RESOURCE_LIST, "claims": KUBERNETES_LIST},
    },
    "extraArgs": {"type": "array", "items": {"type": "string"}},
    "extraEnv": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    "hosts": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "hostnames": {"type": "array", "items": {"type": "string", "minLength": 1}},
    **dict.fromkeys(("apiServerPorts", "externalRedisPorts"), PORTS),
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "tag": {"type": "string", "pattern": "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$"},
    "replicas": COUNT,
    "minReplicas": POSITIVE,
    "maxReplicas": POSITIVE,
    "maxUnavailable": {"type": ["integer", "string"], "minimum": 1, "pattern": "^[1-9][0-9]?%$|^100%$"},
    "terminationGracePeriodSeconds": {"type": ["integer", "null"], "minimum": 1},
    "ttlSecondsAfterFinished": {"type": ["integer", "null"], "minimum": 0},
    "nodePort": {"type": ["integer", "null"], "minimum": 1, "maximum": 65535},
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    **dict.fromkeys(("errorRatio", "refusedRatio", "brokenStreamRatio", "hitRateDrop"), SHARE),
    **dict.fromkeys(("noEngineMinutes", "discoveryStaleSeconds", "queuedTokensPerEngine"), POSITIVE),
    "queuedRequestsPerEngine": POSITIVE,
}
BY_PATH: dict[str, Schema] = {
    "namespaceOverride": NAMESPACE,
    "longestAnswerSeconds": {"type": "integer", "minimum": 1, "maximum": 3600},
    "gateway.modelAliases": {"type": "object", "propertyNames": NAMED, "additionalProperties": NAMED},
    "gateway.modelSplits": {
        "type": "object",
        "propertyNames": NAMED,
        "additionalProperties": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": NAMED,
            "additionalProperties": {**COUNT, "maximum": MAX_WEIGHT},
        },
    },
    "gateway.defaultModel": {"type": "string"},
    "gateway.apiKeys.keys": {"type": "array", "items": {"type": "string", "pattern": "^[^\\s]+$"}},
    "gateway.tenants.list": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    "gateway.autoscaling.metric": {"enum": ["in_flight", "cpu"]},
    "gateway.autoscaling.targetInFlight": POSITIVE,
    "gateway.autoscaling.targetCPUPercent": POSITIVE,
    "gateway.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "gateway.service.port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "endpointPicker.port": PORT,
    "endpointPicker.fallbacks": {**COUNT, "maximum": 8},
    "endpointPicker.pool.name": {"type": "string", "maxLength": 253, "pattern": f"^({DNS_NAME})?$"},
    "endpointPicker.pool.selector": {**LABELS, "maxProperties": 64},
    "endpointPicker.pool.targetPorts": {**PORTS, "maxItems": 8, "uniqueItems": True},
    "endpointPicker.pool.failureMode": {"enum": ["FailClose", "FailOpen"]},
    "endpointPicker.objectives.priorities": {
        "type": "object",
        "propertyNames": {"pattern": f"^{DNS_NAME}$"},
        "additionalProperties": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    },
    "engines.defaults.device": {"enum": ["cuda", "cpu", "sim"]},
    "engines.defaults.shmSize": {"type": "string", "pattern": "^([0-9]+(Ki|Mi|Gi|Ti))?$"},
    "engines.defaults.huggingFace.cacheSize": {"type": "string", "pattern": "^[0-9]+(Ki|Mi|Gi|Ti)$"},
    # Kubernetes replaces a failureThreshold of 0 by its default, 3: a pod would be restarted after 3 seconds.
    "engines.defaults.loadTimeoutSeconds": POSITIVE,
    "engines.defaults.tiers.disk.volume": {"enum": ["emptyDir", "ephemeral"]},
    "engines.defaults.autoscaling.queuedTokens": POSITIVE,
    "engines.defaults.autoscaling.waitingRequests": POSITIVE,
    "engines.defaults.autoscaling.minReplicas": {"type": "integer", "minimum": 0},
    "engines.defaults.autoscaling.idleSeconds": POSITIVE,
    "engines.defaults.engine": {"enum": ["warmroute", "vllm", "sglang"]},
    "engines.defaults.flags": {"type": "object", "propertyNames": {"pattern": "^[a-z][a-z0-9_]*$"}},
    "engines.defaults.tensorParallel": POSITIVE,
    "engines.defaults.dataParallel": {**POSITIVE, "maximum": 256},
    "engines.defaults.maxModelLen": {"type": ["integer", "null"], "minimum": 1},
    "engines.defaults.kvEvents.port": PORT,
    "engines.defaults.kvEvents.replayPort": PORT,
    "engines.defaults.gpu.count": {"type": ["integer", "null"], "minimum": 1},
    "engines.defaults.autoscaling.queuedRequests": POSITIVE,
    "engines.existing": {"type": ["array", "object", "null"], **EXISTING, "items": {"type": "object", **EXISTING}},
    "externalRedis.url": {"type": "string", "pattern": "^(rediss?([+]sentinel)?://[^/]+.*|unix://.+)?$"},
    "redis.auth.password": {"type": "string", "pattern": "^[A-Za-z0-9._~-]*$"},
    "redis.maxMemory": {"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"},
    "openTelemetry.endpoint": {"type": "string", "pattern": "^(https?://[^\\s/?#]+(/[^\\s?#]*)?)?$"},
    "openTelemetry.protocol": {"enum": ["http/protobuf", "grpc"]},
    "openTelemetry.samplingRatio": {"type": "number", "minimum": 0, "maximum": 1},
    # Only characters that OTEL_RESOURCE_ATTRIBUTES has without percent-encoding, and that the kubelet does not expand.
    "openTelemetry.resourceAttributes": {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z0-9._-]+$"},
        "additionalProperties": {"type": "string", "pattern": "^[A-Za-z0-9._:/@-]+$"},
    },
    "loadgen.activeDeadlineSeconds": POSITIVE,
    "tests.timeoutSeconds": POSITIVE,
}
REMOVED_VALUES = {
    "strideBytes": "leave it out. Prefix keys have 256 bytes everywhere",
}
"""Values of the chart that the release before had, each with what does its work now."""
STRING_MAPS = ("commonLabels", "labels", "annotations", "nodeSelector", "podAnnotations", "podLabels")
PROGRAMS: dict[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "engine": EngineSettings,
    "loadgen": CompareSettings,
}
"""The settings class behind each `settings` of the chart."""
OWNED = {
    "gateway": {
        *("config", "host", "port", "engines", "dns_name", "kube_selector", "kube_namespace", "kube_port"),
        *("kube_targets", "inference_pool", "inference_objectives"),
        *("ext_proc_port", "ext_proc_fallbacks", "ext_proc_cert_path", "redis_url", "total_timeout_s"),
        *("drain_delay_s", "drain_timeout_s", "api_keys_file", "engine_api_key_file", "metrics_port", "models"),
        *("tenants_file", "tenant_secret_file", "usage_log"),
        "admin_port",
        *("tls_cert_file", "tls_key_file"),
        *("model_alias", "model_split", "default_model"),
    },
    "engine": {
        *("config", "model", "served_model_name", "device", "host", "port", "redis_url", "pod_id"),
        *("drain_s", "api_key_file", "metrics_port", "admin_port"),
        *("host_cache_bytes", "disk_cache_bytes", "disk_cache_path", "shared_cache_bytes", "shared_cache_path"),
    },
    "loadgen": {"config", "url", "admin_url", "out"},
}
"""Settings that the chart derives from other values, and that `settings` therefore refuses."""
BY_SETTING: dict[str, Schema] = {
    "block_size": {"enum": [16, 32, 64]},
    "prefix_cache": {
        "enum": ["hash", "radix", "off", True, False],
        "type": ["string", "boolean"],
    },  # YAML reads `off` as false
}
"""Settings for which the program's own check is stricter than the type."""
MODEL_NAME = "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"


def build_schema(values: Iterable[Value]) -> Schema:
    """Return the whole schema, draft-07, without references to other files."""
    root: Schema = _section("Values of the warmroute chart.")
    for value in values:
        parent = root
        for key in value.path[:-1]:
            parent = parent["properties"][key]
        parent["properties"][value.path[-1]] = _schema_of(value)
    model = root["properties"]["engines"]["properties"]["defaults"]
    root["properties"]["engines"]["properties"]["defaults"] = {"$ref": "#/definitions/model"}
    root["properties"]["models"] = {
        "description": root["properties"]["models"]["description"],
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {MODEL_NAME: {"$ref": "#/definitions/model"}},
    }
    for path, instead in REMOVED_VALUES.items():
        *parents, name = path.split(".")
        parent = root
        for key in parents:
            parent = parent["properties"][key]
        parent["properties"][name] = _removed(instead)
    # Helm adds keys of its own here if the chart is part of another.
    root["properties"]["global"]["additionalProperties"] = True
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "Written by `python -m charts.generate` from values.yaml and the programs' settings.",
        **root,
        "definitions": {
            "model": model,
            **{f"{name}Settings": settings_schema(settings, OWNED[name]) for name, settings in PROGRAMS.items()},
            "checkpoint": _checkpoint_schema(),
        },
    }


def _section(about: str) -> Schema:
    section: Schema = {"description": about} if about else {}
    return {**section, "type": "object", "additionalProperties": False, "properties": {}}


def _schema_of(value: Value) -> Schema:
    path, key = ".".join(value.path), value.path[-1]
    if value.is_section and key not in STRING_MAPS:
        return _section(value.about)
    about: Schema = {"description": value.about}
    if path in BY_PATH or key in BY_KEY:
        return {**about, **BY_PATH.get(path, BY_KEY.get(key, {}))}
    if key in STRING_MAPS:
        return {**about, **STRINGS}
    if key == "settings":
        program = {"defaults": "engine"}.get(value.path[-2], value.path[-2])
        return {**about, "allOf": [{"$ref": f"#/definitions/{program}Settings"}]}
    if key == "probes":
        section = _section(value.about)
        return {**section, "properties": dict.fromkeys(value.default, PROBE)}
    if key == "checkpoint":
        return {**about, "allOf": [{"$ref": "#/definitions/checkpoint"}]}
    match value.default:
        case bool():
            return {**about, "type": "boolean"}
        case int():
            return {**about, **COUNT}
        case float():
            return {**about, "type": "number", "minimum": 0}
        case str():
            return {**about, "type": "string"}
        case list():
            return {**about, **KUBERNETES_LIST}
        case dict():
            return _section(value.about)
    raise ValueError(f"charts/schema.py does not know the type of {path}: name it in BY_PATH")


def settings_schema(settings: type[Settings], owned: Iterable[str]) -> Schema:
    """Return the schema of a program's settings, without those that the chart gives itself."""
    properties = settings.model_json_schema()["properties"]
    kept = {
        name: {**_clean(properties[name]), **BY_SETTING.get(name, {})} for name in properties if name not in set(owned)
    }
    removed = {name: _removed(instead) for name, instead in settings.removed.items() if name not in kept}
    return {"type": "object", "additionalProperties": False, "properties": {**kept, **removed}}


def _removed(instead: str) -> Schema:
    """Return the schema of a value of the release before: any value fails, and Helm's error shows what to do."""
    return {"enum": [f"removed in {REMOVED_IN}: {instead}"]}


def _clean(field: Schema) -> Schema:
    """Return the schema without pydantic's titles and defaults, and without null: a value may be left out instead."""
    variants = [variant for variant in field.get("anyOf", []) if variant != {"type": "null"}]
    merged = {**field, **(variants[0] if len(variants) == 1 else {})}
    dropped = ("title", "default", "anyOf") if len(variants) <= 1 else ("title", "default")
    return {name: part for name, part in merged.items() if name not in dropped}


def _checkpoint_schema() -> Schema:
    numbers = {f.name: {"type": "integer"} for f in fields(CheckpointShape) if f.name != "dtype"}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {**numbers, "dtype": {"enum": list(DTYPES)}},
    }
