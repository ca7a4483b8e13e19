"""The permissions of engines and gateways in Redis, as rules of `ACL SETUSER` (Redis 7.2 or later, Valkey). Redis 6.2
knows no selectors, the parts in parentheses: there the engine has ENGINE_RULES, with which one engine can replace the
stream of all engines of a model by a string. Gateways remove such a string again.

    ACL SETUSER engine on >PASSWORD {ENGINE_RULES_7}
    ACL SETUSER gateway on >PASSWORD {GATEWAY_RULES}

The engine then gets `--redis-url redis://engine:PASSWORD@HOST`. An engine publishes and cannot read other engines'
data. The rules cannot stop it from publishing under another pod's name, because all pods of a model share one stream. A
gateway reads, asks pods for snapshots, exchanges shares and what it assumes about pods that publish nothing, records
the pods of stored conversations, and counts the use of tenants' limits. The rules of Redis 6.2 cannot stop it from
writing a pod's snapshot, or an entry in the pod's name.
"""

from __future__ import annotations

_CONNECTING = "+ping +hello +client|setname +client|id"

ENGINE_RULES = (
    "resetkeys resetchannels ~warmroute:*:events ~warmroute:*:pod:* ~warmroute:*:resync:* "
    f"-@all {_CONNECTING} +xadd +set +expire +pexpire +getdel +del"
)
ENGINE_RULES_7 = (
    f"resetkeys resetchannels clearselectors -@all {_CONNECTING} (~warmroute:*:events +xadd +expire) "
    "(~warmroute:*:pod:* +set +pexpire +del) (~warmroute:*:resync:* +getdel +del)"
)
GATEWAY_RULES = (
    "resetkeys resetchannels ~warmroute:*:events ~warmroute:*:pod:* ~warmroute:*:resync:* ~warmroute:*:shares "
    "~warmroute:*:quota ~warmroute:*:place ~warmroute:*:beliefs ~warmroute:*:belief:* "
    f"-@all {_CONNECTING} +time +xadd +xread +xrange +xrevrange +mget +set +hset +hgetall +hdel +expire +pexpire "
    "+info +evalsha +script|load"
)
