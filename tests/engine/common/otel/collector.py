"""A collector for tests: a separate process that accepts OTLP over HTTP and gRPC and reports what it got.

`python -m tests.engine.common.otel.collector` prints its two ports. `GET /got` answers with all spans and metrics so
far, as JSON. `POST /mode/take`, `/mode/refuse` and `/mode/hang` decide what it does with later requests."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LONGEST_HANG_S = 60.0


@dataclass(frozen=True)
class Got:
    """A span as it arrived. `resource`: attributes of the sender."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    resource: dict[str, Any]

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])


class Collector:
    """The process, as a test sees it."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self.http = f"http://127.0.0.1:{http_port}"
        self.grpc = f"http://127.0.0.1:{grpc_port}"

    def mode(self, name: str) -> None:
        """Let it `take`, `refuse` or `hang` from now on."""
        request = urllib.request.Request(f"{self.http}/mode/{name}", b"", method="POST")
        with urllib.request.urlopen(request, timeout=10.0):
            pass

    def everything(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.http}/got", timeout=10.0) as answer:
            return dict(json.load(answer))

    def spans(self, trace_id: str) -> list[Got]:
        """Return the spans of one trace."""
        return [Got(**span) for span in self.everything()["spans"] if span["trace_id"] == trace_id]

    def metrics(self, service: str) -> list[dict[str, Any]]:
        """Return the last metrics that a service has sent."""
        sent = [one["metrics"] for one in self.everything()["metrics"] if one["resource"]["service.name"] == service]
        return list(sent[-1]) if sent else []

    def tries(self) -> int:
        """Return how often something was sent, accepted or not."""
        return int(self.everything()["tries"])

    def wait(self, is_there: Callable[[], bool], deadline_s: float = 30.0) -> None:
        give_up_s = time.monotonic() + deadline_s
        while not is_there():
            assert time.monotonic() < give_up_s, self.everything()
            time.sleep(0.02)


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.common.otel.collector"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ports = process.stdout.readline().split()
        assert len(ports) == 2, "the collector did not start"
        yield Collector(int(ports[0]), int(ports[1]))
    finally:
        process.kill()
        process.communicate(timeout=10.0)


class _State:
    """What was sent so far."""

    def __init__(self) -> None:
        self.mode = "take"
        self.spans: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.tries = 0
        self.lock = threading.Lock()

    def meets(self) -> bool:
        """Count a request, and return whether to accept it. Waits while the mode is `hang`."""
        with self.lock:
            self.tries += 1
        give_up_s = time.monotonic() + LONGEST_HANG_S
        while self.mode == "hang" and time.monotonic() < give_up_s:
            time.sleep(0.05)
        return self.mode == "take"

    def take_spans(self, request: Any) -> None:
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                for span in scope.spans:
                    with self.lock:
                        self.spans.append(
                            {
                                "name": span.name,
                                "kind": span.kind,
                                "trace_id": span.trace_id.hex(),
                                "span_id": span.span_id.hex(),
                                "parent_id": span.parent_span_id.hex(),
                                "state": span.trace_state,
                                "start_ns": span.start_time_unix_nano,
                                "end_ns": span.end_time_unix_nano,
                                "attributes": _attributes(span.attributes),
                                "is_error": span.status.code == 2,
                                "resource": resource,
                            }
                        )

    def take_metrics(self, request: Any) -> None:
        for of_resource in request.resource_metrics:
            metrics = [metric for scope in of_resource.scope_metrics for metric in map(_metric, scope.metrics)]
            with self.lock:
                self.metrics.append({"resource": _attributes(of_resource.resource.attributes), "metrics": metrics})


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _metric(metric: Any) -> dict[str, Any]:
    kind = metric.WhichOneof("data")
    points = []
    for point in getattr(metric, kind).data_points:
        said: dict[str, Any] = {"labels": _attributes(point.attributes), "start_ns": point.start_time_unix_nano}
        if kind == "histogram":
            said |= {"sum": point.sum, "count": point.count}
            said |= {"bounds": list(point.explicit_bounds), "buckets": list(point.bucket_counts)}
        else:
            said["value"] = getattr(point, point.WhichOneof("value"))
        points.append(said)
    about = {"name": metric.name, "kind": kind, "text": metric.description, "points": points}
    if kind != "gauge":
        about["temporality"] = getattr(metric, kind).aggregation_temporality
    if kind == "sum":
        about["is_monotonic"] = metric.sum.is_monotonic
    return about


def _http(state: _State) -> type[BaseHTTPRequestHandler]:
    """Return the handler of OTLP over HTTP, and of the tests' questions."""
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with state.lock:
                got = {"spans": state.spans, "metrics": state.metrics, "tries": state.tries}
                self._answer(200, json.dumps(got).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.startswith("/mode/"):
                state.mode = self.path.removeprefix("/mode/")
                self._answer(200, b"")
                return
            if not state.meets():
                self._answer(503, b"")
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                state.take_spans(trace_pb.ExportTraceServiceRequest.FromString(body))
                self._answer(200, trace_pb.ExportTraceServiceResponse().SerializeToString())
            else:
                state.take_metrics(metrics_pb.ExportMetricsServiceRequest.FromString(body))
                self._answer(200, metrics_pb.ExportMetricsServiceResponse().SerializeToString())

        def _answer(self, status: int, body: bytes) -> None:
            with contextlib.suppress(ConnectionError):  # the sender has given up
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    return Handler


def _serve() -> None:
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

    state = _State()

    class Traces(trace_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            if not state.meets():
                context.abort(grpc.StatusCode.UNAVAILABLE, "refused")
            state.take_spans(request)
            return trace_pb.ExportTraceServiceResponse()

    class Metrics(metrics_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            if not state.meets():
                context.abort(grpc.StatusCode.UNAVAILABLE, "refused")
            state.take_metrics(request)
            return metrics_pb.ExportMetricsServiceResponse()

    over_grpc = grpc.server(ThreadPoolExecutor(4))
    trace_grpc.add_TraceServiceServicer_to_server(Traces(), over_grpc)
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), over_grpc)
    grpc_port = over_grpc.add_insecure_port("127.0.0.1:0")
    over_grpc.start()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _http(state))
    http.daemon_threads = True
    print(http.server_address[1], grpc_port, flush=True)
    http.serve_forever()


if __name__ == "__main__":
    _serve()
