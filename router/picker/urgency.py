"""A request's priority and fairness id, from the headers of the Gateway API Inference Extension."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

from router.forwarding.exchange import Urgency
from router.picker.parts import PickerParts
from router.picker.protocol import FAIRNESS_ID, OBJECTIVE
from router.tenants.tenant import Tenant

LINES = 1024
"""Lines of the queue for fairness ids. Clients invent ids, and the queue looks at every line; two ids may share one."""


def urgency_of(tenant: Tenant, fields: Mapping[str, str], parts: PickerParts) -> Urgency:
    """Return the priority of the InferenceObjective that a request of `tenant` names, and its fairness id.

    If there are tenants, a request is no more urgent than its tenant allows, and a tenant's requests share one line
    whatever id they give. Otherwise clients, who choose the headers, could take others' shares. An objective that the
    pool does not have is ignored.
    """
    has_tenants = parts.limits.has_tenants
    priority, fairness_id = None, ""
    if parts.objectives is not None and (name := fields.get(OBJECTIVE)) is not None:
        priority = parts.objectives.priority(name)
    is_sheddable = priority is not None and priority < 0
    if priority is not None and has_tenants:
        priority = min(priority, tenant.highest_priority)
    if not has_tenants and (given := fields.get(FAIRNESS_ID)):
        fairness_id = str(crc32(given.encode("utf-8", "surrogateescape")) % LINES)
    return Urgency(priority, is_sheddable, fairness_id)
