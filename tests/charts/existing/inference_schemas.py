"""What the definitions of the Gateway API Inference Extension 1.x require of the objects that the chart makes.

The schemas are written from the reference (https://gateway-api-inference-extension.sigs.k8s.io/reference/spec), because
kubernetes-validate only has the kinds of Kubernetes itself.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 253}
GROUP: Schema = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
KIND: Schema = {"type": "string", "pattern": "^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$", "maxLength": 63}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def closed(required: tuple[str, ...], **properties: Schema) -> Schema:
    """Return the schema of an object without other fields: the API server would drop unknown fields."""
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


def thing(api: str, kind: str, spec: Schema) -> Schema:
    """Return the schema of a whole object."""
    return closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api},
        kind={"const": kind},
        metadata={"type": "object", "required": ["name", "namespace"]},
        spec=spec,
    )


SCHEMAS: dict[str, Schema] = {
    "InferencePool": thing(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        closed(
            ("selector", "targetPorts"),
            selector=closed(
                ("matchLabels",),
                matchLabels={
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 64,
                    "additionalProperties": {
                        "type": "string",
                        "maxLength": 63,
                        "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
                    },
                },
            ),
            targetPorts={
                "type": "array",
                "minItems": 1,
                "maxItems": 8,
                "uniqueItems": True,
                "items": closed(("number",), number=PORT),
            },
            appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
            endpointPickerRef=closed(
                ("name", "port"),  # for a Service, the port is required
                group=GROUP,
                kind=KIND,
                name=NAME,
                port=closed(("number",), number=PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "InferenceObjective": thing(
        "inference.networking.x-k8s.io/v1alpha2",
        "InferenceObjective",
        closed(
            ("poolRef",),
            poolRef=closed(("name",), group=GROUP, kind=KIND, name=NAME),
            priority={"type": "integer"},
        ),
    ),
}


def definition(kind: str) -> dict[str, Any]:
    """Return a CustomResourceDefinition of the kind and its spec, for a cluster that does not have the kind."""
    schema = SCHEMAS[kind]["properties"]
    group, _, version = schema["apiVersion"]["const"].partition("/")
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # The API server requires this annotation in Kubernetes' own groups.
            "annotations": {"api-approved.kubernetes.io": "unapproved, of a test of warmroute"},
        },
        "spec": {
            "group": group,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {"spec": _structural(schema["spec"])},
                            "required": ["spec"],
                        }
                    },
                }
            ],
        },
    }


def _structural(schema: Any) -> Any:
    """Return the schema in the form that definitions require, which have no `additionalProperties: false` and no
    `uniqueItems`."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "uniqueItems"}
    if kept.get("additionalProperties") is False:
        del kept["additionalProperties"]
    if "enum" in kept:
        kept["type"] = "string"
    return {
        key: {name: _structural(one) for name, one in value.items()} if key == "properties" else _structural(value)
        for key, value in kept.items()
    }
