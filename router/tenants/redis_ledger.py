"""The ledger of all gateways together, in Redis: one hash for each tenant, changed by one script.

Fields of the hash: `sN` -> "REQUESTS TOKENS", the use reported in slot N; `gID` -> "EXPIRY REQUESTS TOKENS AT_ONCE
WANTED", what a gateway holds until EXPIRY (in milliseconds), and how many requests at once it wants. The time is
Redis's, because the gateways' clocks do not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import InvalidResponse, NoScriptError

from engine.common.redis_client import drop_connections
from engine.contract.redis_keys import quota_key
from router.tenants.ledger import HOLD_S, SLOT_S, SLOTS, Grant, Report, Slot

SCRIPT = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local slots, slot_ms, hold_ms, id = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local limit = {tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])}
local used = {tonumber(ARGV[9]), tonumber(ARGV[10])}
local wanted = {tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[14])}
local in_flight = tonumber(ARGV[13])
local this = math.floor(now / slot_ms)
local taken, gateways, wants = {0, 0, 0}, 1, {wanted[3]}
local found, gone = {}, {}

local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local field, value = all[i], all[i + 1]
  local kind, name = string.sub(field, 1, 1), string.sub(field, 2)
  if kind == 's' then
    local number = tonumber(name)
    if number <= this - slots - 1 or number > this + slots then
      gone[#gone + 1] = field
    else
      local requests, tokens = string.match(value, '(%S+) (%S+)')
      found[number] = {tonumber(requests), tonumber(tokens)}
    end
  elseif name ~= id then
    local expiry, requests, tokens, at_once, want = string.match(value, '(%S+) (%S+) (%S+) (%S+) (%S+)')
    expiry = tonumber(expiry)
    if expiry <= now or expiry > now + hold_ms * 2 then
      gone[#gone + 1] = field
    else
      gateways = gateways + 1
      taken[1] = taken[1] + tonumber(requests)
      taken[2] = taken[2] + tonumber(tokens)
      taken[3] = taken[3] + tonumber(at_once)
      wants[#wants + 1] = tonumber(want)
    end
  end
end
if #gone > 0 then redis.call('HDEL', KEYS[1], unpack(gone)) end

if used[1] ~= 0 or used[2] ~= 0 then
  local own = found[this] or {0, 0}
  found[this] = {own[1] + used[1], own[2] + used[2]}
  redis.call('HSET', KEYS[1], 's' .. string.format('%.0f', this), string.format('%.0f %.0f', unpack(found[this])))
end
local numbers = {}
for number, slot in pairs(found) do
  numbers[#numbers + 1] = number
  taken[1] = taken[1] + slot[1]
  taken[2] = taken[2] + slot[2]
end
table.sort(numbers)

local granted, left = {}, {}
for kind = 1, 2 do
  granted[kind], left[kind] = wanted[kind], 0
  if limit[kind] >= 0 then
    granted[kind] = math.max(0, math.min(wanted[kind], limit[kind] - taken[kind]))
    left[kind] = math.max(0, limit[kind] - taken[kind] - granted[kind])
  end
end
granted[3] = wanted[3]
if limit[3] >= 0 then
  table.sort(wants)
  local rest = limit[3]
  for place, want in ipairs(wants) do
    local equal = rest / (#wants - place + 1)
    if want > equal then
      granted[3] = math.min(granted[3], math.ceil(equal))
      break
    end
    rest = rest - want
  end
  granted[3] = math.max(0, math.min(granted[3], limit[3] - taken[3]))
end

if granted[1] == 0 and granted[2] == 0 and granted[3] == 0 and wanted[3] == 0 and in_flight == 0 then
  redis.call('HDEL', KEYS[1], 'g' .. id)
else
  redis.call('HSET', KEYS[1], 'g' .. id, string.format('%.0f %.0f %.0f %.0f %.0f',
    now + hold_ms, granted[1], granted[2], math.max(granted[3], in_flight), wanted[3]))
end
redis.call('PEXPIRE', KEYS[1], 2 * slots * slot_ms)

local reply = {granted[1], granted[2], granted[3], left[1], left[2], gateways}
for _, number in ipairs(numbers) do
  reply[#reply + 1] = (number + slots + 1) * slot_ms - now
  reply[#reply + 1] = found[number][1]
  reply[#reply + 1] = found[number][2]
end
return reply
"""
"""Fair shares of requests at once: `ledger.fair_share`. Times far in the future come from another clock of Redis."""

_HEAD = 6
_PER_SLOT = 3


class RedisLedger:
    """One gateway's access to the shared account. See Ledger."""

    def __init__(self, redis: Redis, gateway_id: str, clock: Callable[[], float] | None = None) -> None:
        """`clock`: milliseconds, the same for all gateways; None: Redis's own."""
        self._redis = redis
        self._gateway_id = gateway_id
        self._clock = clock
        self._sha = ""

    async def settle(self, reports: Sequence[Report]) -> list[Grant]:
        """See Ledger."""
        if not self._sha:
            self._sha = await self._redis.script_load(SCRIPT)
        try:
            return await self._run(reports)
        except NoScriptError:  # Redis restarted, or is another one: nothing has run
            self._sha = await self._redis.script_load(SCRIPT)
            return await self._run(reports)

    async def begin_anew(self) -> None:
        """See SharedLedger."""
        await drop_connections(self._redis)
        self._sha = await self._redis.script_load(SCRIPT)

    async def _run(self, reports: Sequence[Report]) -> list[Grant]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for report in reports:
                pipe.evalsha(self._sha, 1, quota_key(report.tenant), *self.arguments(report))
            replies = await pipe.execute()
        return [read_grant(reply) for reply in replies]

    def arguments(self, report: Report) -> list[str | int]:
        """Return the script's arguments for a report."""
        limits = report.limits
        return [
            "" if self._clock is None else int(self._clock()),
            *(SLOTS, round(1000 * SLOT_S), round(1000 * HOLD_S), self._gateway_id),
            *(_number(limits.requests_per_minute), _number(limits.tokens_per_minute), _number(limits.requests_at_once)),
            *(report.requests_used, report.tokens_used, report.requests_wanted, report.tokens_wanted),
            *(report.in_flight, report.at_once_wanted),
        ]


def read_grant(reply: Sequence[Any]) -> Grant:
    """Return the grant in the script's reply. Raises InvalidResponse, which is one of REDIS_ERRORS."""
    try:
        return _read(reply)
    except (TypeError, ValueError) as error:
        raise InvalidResponse(f"the account of a limit cannot be read: {error}") from None


def _read(reply: Sequence[Any]) -> Grant:
    requests, tokens, at_once, requests_left, tokens_left, gateways = map(int, reply[:_HEAD])
    rest = [int(number) for number in reply[_HEAD:]]
    slots = tuple(Slot(rest[at] / 1000, rest[at + 1], rest[at + 2]) for at in range(0, len(rest), _PER_SLOT))
    return Grant(requests, tokens, at_once, requests_left, tokens_left, gateways, slots)


def _number(limit: int | None) -> int:
    return -1 if limit is None else limit
