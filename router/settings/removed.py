"""Settings that release 0.1.0 had and this one does not, each with what does its work now. The next release drops this
table."""

from __future__ import annotations

from collections.abc import Mapping

_FIXED = "leave it out. It is a constant now (router/settings/constants.py)"

REMOVED: Mapping[str, str] = {
    "admin_host": "give the address in --admin-port, as HOST:PORT",
    "body_min_rate": f"{_FIXED}: 4096 bytes/s",
    "body_timeout_s": f"{_FIXED}: 60 s",
    "connect_timeout_s": f"{_FIXED}: 2 s",
    "discovery": "leave it out. --engines, --dns-name, --kube-selector, --kube-targets or --inference-pool says it",
    "dns_max_ttl_s": f"{_FIXED}: 5 s, or the TTL of the name if that is shorter",
    "dns_port": "give the port in --dns-name, as NAME:PORT",
    "eject_after": f"{_FIXED}: 3 failures",
    "engine_metrics": "leave it out. --engine-metrics-port 0 does what false did",
    "engine_metrics_path": f"{_FIXED}: /metrics",
    "engine_ranks": "leave it out. Engines' metrics show their ranks; the annotation warmroute.io/ranks and `ranks` "
    "of --kube-targets override them",
    "ext_proc_service": "leave it out. There is no check any more that the InferencePool names this Service",
    "ext_proc_test_headers": "give --allow-policy-header, which also allows the headers of conformance tests",
    "ext_proc_tls_cert_file": "give --ext-proc-cert-path: the folder with tls.crt and tls.key",
    "ext_proc_tls_key_file": "give --ext-proc-cert-path: the folder with tls.crt and tls.key",
    "foreign_ttl_s": f"{_FIXED}: 600 s",
    "hash_depth_strides": "leave it out. It is a constant of the policies now: 8",
    "head_timeout_s": f"{_FIXED}: 10 s",
    "kube_config": "set the variable KUBECONFIG",
    "kv_events": "leave it out. KV events are followed wherever engine, pod or --kv-events-port names their port",
    "kv_events_topic": "leave it out. All topics are followed",
    "lease_s": f"{_FIXED}: 15 s",
    "load_bound": "leave it out. It is a constant of the policies now: 1.25",
    "max_connections": f"{_FIXED}: 8192, or half of the file descriptors (ulimit -n)",
    "max_in_flight_answer_mib": f"{_FIXED}: 128 MiB",
    "max_upload_mib": f"{_FIXED}: 512 MiB, since uploads are passed on as they come",
    "named_cache_max_ttl_s": f"{_FIXED}: a week",
    "named_cache_mib": f"{_FIXED}: 64 MiB",
    "probe_interval_s": f"{_FIXED}: 2 s",
    "probe_timeout_s": f"{_FIXED}: 2 s",
    "queue_mib": f"{_FIXED}: 64 MiB; --queue-timeout-s and --max-in-flight-body-mib bound the queue",
    "queue_requests": f"{_FIXED}: 1024; --queue-timeout-s bounds the queue",
    "retries": f"{_FIXED}: 2 further engines",
    "share_beliefs": "leave it out. Gateways with the same --redis-url share what they know",
    "speculation_ttl_s": f"{_FIXED}: 10 s",
    "stride": "leave it out. Prefix keys have 256 bytes everywhere",
    "warm_timeout_s": f"{_FIXED}: 5 s",
}
