"""What engines and gateways may do in Redis, as rules of `ACL SETUSER` (Redis 6.2 or later, Valkey).

    ACL SETUSER engine on >PASSWORD {ENGINE_RULES}
    ACL SETUSER gateway on >PASSWORD {GATEWAY_RULES}

and then `--redis-url redis://engine:PASSWORD@HOST`. An engine publishes and reads nothing of others; it cannot be kept
from publishing under another pod's name, as the stream is one for all pods of a model. A gateway reads, asks pods for
snapshots, exchanges shares and beliefs about pods that publish nothing, tells where conversations are that engines
keep, and keeps account of tenants' limits; with the rules of 6.2 it could also write a pod's snapshot, or an entry in
its name.
"""

from __future__ import annotations

_CONNECTING = "+ping +hello +client|setname +client|setinfo +client|id"

ENGINE_RULES = (
    "resetkeys resetchannels ~warmroute:*:events ~warmroute:*:pod:* ~warmroute:*:resync:* "
    f"-@all {_CONNECTING} +xadd +set +expire +pexpire +getdel +del"
)
GATEWAY_RULES = (
    "resetkeys resetchannels ~warmroute:*:events ~warmroute:*:pod:* ~warmroute:*:resync:* ~warmroute:*:shares "
    "~warmroute:*:quota ~warmroute:*:place ~warmroute:*:beliefs ~warmroute:*:belief:* "
    f"-@all {_CONNECTING} +time +xadd +xread +xrange +xrevrange +mget +set +hset +hgetall +hdel +expire +pexpire "
    "+evalsha +script|load"
)
