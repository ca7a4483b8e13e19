"""The endpoint picker protocol of the Gateway API Inference Extension: its names, and how messages carry them.

https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/004-endpoint-picker-protocol
(1.0.0) on Envoy's external processing (envoy.service.ext_proc.v3). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.struct_pb2 import Struct, Value
from multidict import CIMultiDict

from engine.common.http.target import Target
from router.picker.wire import picker_pb2 as wire

DESTINATION = "x-gateway-destination-endpoint"
"""Request header and metadata: the endpoint, `ip:port`, to which the proxy sends the request, then others to try if it
fails, separated by commas."""
ENDPOINTS = "envoy.lb"
"""Namespace of the metadata in which proxy and picker tell each other endpoints."""
SERVED = "x-gateway-destination-endpoint-served"
"""Metadata of the proxy: the endpoint that gave the answer."""
HINT = "envoy.lb.subset_hint"
"""Namespace of the metadata in which the proxy limits the choice."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Metadata of the proxy: the endpoints of which one must be picked, as a list of `ip:port` or a text with commas."""
TEST_SELECTION = "test-epp-endpoint-selection"
"""Request header of the conformance tests: like SUBSET, if the operator allows it. A port may be left out."""
TEST_SERVED = "x-conformance-test-served-endpoint"
"""Response header for the conformance tests: SERVED, as the proxy gave it."""

OBJECTIVE = "x-gateway-inference-objective"
"""Request header: the name of an InferenceObjective, which has the request's priority."""
FAIRNESS_ID = "x-gateway-inference-fairness-id"
"""Request header: requests with the same value share a line of the queue."""

BODY_CHUNK_BYTES = 60 * 1024
"""Bytes of a chunk of a body sent back to Envoy in FULL_DUPLEX_STREAMED: it fits Envoy's buffers of 64 KiB."""


class ProtocolError(Exception):
    """The proxy sent something out of place. The text is for the proxy's log."""


def fields_of(headers: wire.HeaderMap) -> CIMultiDict[str]:
    """Return the headers of a message, including pseudo-headers (`:path`). Bytes beyond ASCII become surrogates."""
    fields = [(field.key, field.raw_value or field.value.encode()) for field in headers.headers]
    return CIMultiDict([(name, value.decode("utf-8", "surrogateescape")) for name, value in fields])


def endpoint_of(target: Target) -> str:
    """Return the server as the protocol names it: `ip:port`, an IPv6 address in brackets."""
    return f"[{target.host}]:{target.port}" if ":" in target.host else f"{target.host}:{target.port}"


def subset_of(metadata: wire.Metadata) -> frozenset[str] | None:
    """Return the endpoints that the proxy allows; None if it allows all."""
    entry = _entry(metadata, HINT, SUBSET)
    if entry is None:
        return None
    if entry.HasField("list_value"):
        return frozenset(value.string_value for value in entry.list_value.values)
    return _split(entry.string_value)


def selection_of(fields: Mapping[str, str]) -> frozenset[str] | None:
    """Return the endpoints that a conformance test asks for; None if it asks for none."""
    asked = fields.get(TEST_SELECTION)
    return _split(asked) if asked else None


def served_of(metadata: wire.Metadata) -> str | None:
    """Return the endpoint that gave the answer; None if the proxy does not say."""
    entry = _entry(metadata, ENDPOINTS, SERVED)
    return entry.string_value or None if entry is not None else None


def names(endpoints: frozenset[str], endpoint: str) -> bool:
    """Return whether `endpoints` has `endpoint`, with its port or as an address alone."""
    return endpoint in endpoints or endpoint.rpartition(":")[0].strip("[]") in endpoints


def destination(endpoints: Iterable[str]) -> Struct:
    """Return the metadata that tells the proxy where to send the request."""
    entry = Struct(fields={DESTINATION: Value(string_value=",".join(endpoints))})
    return Struct(fields={ENDPOINTS: Value(struct_value=entry)})


def mutation(fields: Iterable[tuple[str, str]], removed: Iterable[str] = ()) -> wire.HeaderMutation:
    """Return a mutation that sets some headers and removes others."""
    return wire.HeaderMutation(
        set_headers=[
            wire.HeaderValueOption(
                header=wire.HeaderValue(key=name, raw_value=value.encode("utf-8", "surrogateescape")),
                append_action=wire.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in fields
        ],
        remove_headers=removed,
    )


def streamed(body: bytes, *, is_end: bool) -> wire.BodyResponse:
    """Return a chunk for Envoy to send on, in FULL_DUPLEX_STREAMED."""
    chunk = wire.StreamedBodyResponse(body=body, end_of_stream=is_end)
    return wire.BodyResponse(response=wire.CommonResponse(body_mutation=wire.BodyMutation(streamed_response=chunk)))


def chunks(body: bytes, *, is_end: bool) -> list[wire.ProcessingResponse]:
    """Return a request's body for Envoy to send on, in FULL_DUPLEX_STREAMED. `is_end`: no trailers follow."""
    starts = range(0, len(body), BODY_CHUNK_BYTES) or range(1)
    return [
        wire.ProcessingResponse(
            request_body=streamed(body[start : start + BODY_CHUNK_BYTES], is_end=is_end and start == starts[-1])
        )
        for start in starts
    ]


def _entry(metadata: wire.Metadata, namespace: str, key: str) -> Value | None:
    if namespace not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[namespace].fields
    return fields.get(key)


def _split(endpoints: str) -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, endpoints.split(","))))
