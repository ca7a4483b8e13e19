"""Names of the HTTP headers between client, gateway and engine."""

from __future__ import annotations

POD = "x-warmroute-pod"
"""Response: the pod that served the request. An engine also sends it on `/v1/models`, so a gateway learns its id."""

EPOCH = "x-warmroute-epoch"
"""Response of an engine's `/v1/models`: the life of the engine process, a decimal u64."""

POLICY = "x-warmroute-policy"
"""Request (where the gateway allows it): route by this policy. Response: the policy that decided."""

PRIORITY = "x-warmroute-priority"
"""Request: which go first where not all can: an integer, higher is sooner, 0 without."""

TTFT_SLO = "x-warmroute-ttft-slo-ms"
"""Request: milliseconds in which the first token must come; if it cannot, the gateway refuses the request at once."""

PREDICTED_CACHED = "x-warmroute-cached-tokens-predicted"
"""Response of the gateway: cached tokens it expected on that pod."""

CACHED = "x-warmroute-cached-tokens"
"""Response of an engine: prompt tokens whose KV was reused (with n > 1: of the first choice)."""

PROMPT_TOKENS = "x-warmroute-prompt-tokens"
"""Response of an engine: prompt tokens of the request."""

REQUEST_ID = "x-request-id"
"""Request and response: the client's id for a request; made by the gateway where absent."""

MESSAGE_REQUEST_ID = "request-id"
"""Response to `/v1/messages`: the same, where that API's clients look for it."""

API_KEY = "x-api-key"
"""Request: the key, where that API's clients show it. `Authorization: Bearer KEY` counts where both are given."""

SESSION = "x-session-id"
"""Request to an engine: what it calls the request in its KV events (vLLM). A client's own is kept by the gateway."""

PODS = "x-warmroute-pods"
"""Request of a gateway's probe (`/v1/models`): how many engines it follows, a decimal number. An engine that publishes
does so the less often, the larger that fleet is."""

DATA_PARALLEL_RANK = "x-data-parallel-rank"
"""Request of the gateway to vLLM and SGLang: the data-parallel rank that is to compute it, a decimal number."""
