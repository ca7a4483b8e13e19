"""A request's priority and fairness id, from the headers of the Gateway API Inference Extension."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

from router.forwarding.exchange import Exchange
from router.picker.parts import PickerParts
from router.picker.protocol import FAIRNESS_ID, OBJECTIVE

LINES = 1024
"""Lines of the queue for fairness ids. Clients invent ids, and the queue looks at every line; two ids may share one."""


def urgency(exchange: Exchange, fields: Mapping[str, str], parts: PickerParts) -> None:
    """Note the priority of the InferenceObjective that a request names, and its fairness id.

    If there are tenants, a request is no more urgent than its tenant allows, and a tenant's requests share one line
    whatever id they give. Otherwise clients, who choose the headers, could take others' shares. An objective that the
    pool does not have is ignored.
    """
    has_tenants = parts.limits.has_tenants
    if parts.objectives is not None and (name := fields.get(OBJECTIVE)) is not None:
        priority = parts.objectives.priority(name)
        if priority is not None:
            exchange.is_sheddable = priority < 0
            exchange.priority = min(priority, exchange.tenant.highest_priority) if has_tenants else priority
    if not has_tenants and (fairness_id := fields.get(FAIRNESS_ID)):
        exchange.fairness_id = str(crc32(fairness_id.encode("utf-8", "surrogateescape")) % LINES)
