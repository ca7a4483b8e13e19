"""Names of the HTTP headers between client, gateway and engine."""

from __future__ import annotations

POD = "x-warmroute-pod"
"""Response: the pod that served the request. An engine also sends it on `/v1/models`, where a gateway learns the id."""

EPOCH = "x-warmroute-epoch"
"""Response of an engine's `/v1/models`: a decimal u64 that identifies this run of the engine process."""

POLICY = "x-warmroute-policy"
"""Request (if the gateway allows it): route by this policy. Response: the policy that decided."""

PRIORITY = "x-warmroute-priority"
"""Request: its priority in an overload, an integer. Higher numbers are served sooner; the default is 0."""

TENANT = "x-warmroute-tenant"
"""Operator's request to `/v1/route/explain`: explain it as a request of the tenant of that name."""

TTFT_SLO = "x-warmroute-ttft-slo-ms"
"""Request: milliseconds in which the first token must come; if it cannot, the gateway refuses the request at once."""

PREDICTED_CACHED = "x-warmroute-cached-tokens-predicted"
"""Response of the gateway: cached tokens that it expected on that pod."""

CACHED = "x-warmroute-cached-tokens"
"""Response of an engine: prompt tokens whose KV was reused (with n > 1: for the first choice)."""

PROMPT_TOKENS = "x-warmroute-prompt-tokens"
"""Response of an engine: prompt tokens of the request."""

WARNING = "warning"
"""Response of an engine: names the fields of the request that it ignores because they cannot change the answer."""

REQUEST_ID = "x-request-id"
"""Request and response: the client's id for a request; the gateway makes one if there is none."""

MESSAGE_REQUEST_ID = "request-id"
"""Response to `/v1/messages`: the same id under the name that Anthropic's clients read."""

API_KEY = "x-api-key"
"""Request: the key under the name that Anthropic's clients use. `Authorization: Bearer KEY`, if given too, takes
precedence."""

SESSION = "x-session-id"
"""Request to an engine: the request's name in the engine's KV events (vLLM). The gateway keeps a client's own name."""

PODS = "x-warmroute-pods"
"""Request of a gateway's probe (`/v1/models`): the number of engines that it follows, decimal. The larger the fleet,
the less often an engine publishes."""

DATA_PARALLEL_RANK = "x-data-parallel-rank"
"""Request of the gateway to vLLM and SGLang: the data-parallel rank that computes it, a decimal number."""
