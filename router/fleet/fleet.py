"""The current set of pods: follows discovery, probes each engine, admits the ones that answer, ejects the dead."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from engine.contract.load import LoadReport
from router.fleet.discovery import Discovery, EngineAddress
from router.fleet.faults import Fault
from router.fleet.pod import Lease, Pod
from router.fleet.probe import PodIdentity, Probe, ProbeFailed, ServedModel, named_by_discovery
from router.routing.types import PodId

log = logging.getLogger(__name__)

JITTER = 0.2
MAX_SEEN_MODELS = 1024
"""Each is a time series, and a name that is answered 503 rather than 404; the oldest are forgotten."""
MOST_EJECTED = 0.5
"""Share of a model's pods that may be out for failing requests. Where more seem broken it is likelier the requests, or
something that all pods need, and the load of the pods that are left has a bound. Clients lose nothing by it: a pod that
stays and is in doubt costs a request that begins there a second attempt."""


@dataclass(frozen=True, slots=True)
class FleetChange:
    """What listeners hear: every identified pod with its model, ejected ones included, and the lives that ended."""

    pods: Mapping[PodId, str]
    ended: frozenset[PodId] = frozenset()


class Member:
    """One engine of discovery, with what is known of it."""

    __slots__ = ("address", "admitted", "failures", "last_error", "pod", "probed", "task", "wake")

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.pod: Pod | None = None
        self.admitted = False
        """The probe says that it answers. Requests need discovery's word too: `answers`."""
        self.failures = 0
        self.last_error: str | None = None
        self.probed = False
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The engine's base URL."""
        return self.address.url

    @property
    def answers(self) -> bool:
        """Whether both the probe and discovery say so."""
        return self.admitted and self.address.is_ready

    @property
    def takes_requests(self) -> bool:
        """Whether it answers, and is not ejected for failing requests."""
        return self.answers and self.pod is not None and not self.pod.faults.is_ejected


@dataclass(slots=True)
class _Table:
    """What requests read; replaced whole on every change."""

    by_model: dict[str, tuple[Pod, ...]] = field(default_factory=dict)
    """Pods to choose among, in order of pod id."""
    answering: dict[str, list[Pod]] = field(default_factory=dict)
    """By model too; those that are ejected for failing requests as well."""
    cards: dict[str, ServedModel] = field(default_factory=dict)
    """Every model of an identified pod, admitted or not."""
    by_id: dict[PodId, Pod] = field(default_factory=dict)


class Fleet:
    """The pods behind the gateway. Looking at it never waits; `run` keeps it current until cancelled."""

    def __init__(
        self,
        discovery: Discovery,
        probe: Probe,
        *,
        interval_s: float,
        eject_after: int,
        expected: Iterable[str] = (),
        rng: random.Random | None = None,
    ) -> None:
        """`expected`: models that exist even while no engine serves them."""
        self._discovery = discovery
        self._probe = probe
        self._interval_s = interval_s
        self._eject_after = eject_after
        self._rng = rng or random.Random()
        self._members: dict[str, Member] = {}
        self._table = _Table()
        self._listeners: list[Callable[[FleetChange], None]] = []
        self._probed = asyncio.Event()
        self._numbers = itertools.count()
        self.ejections = 0
        """Times that a pod was ejected for failing requests."""
        self._seen_models = dict.fromkeys(expected)
        """The names alone, in the order in which they became known."""

    # -- what a request needs ---------------------------------------------------------------------------------

    def pods(self, model: str) -> tuple[Pod, ...]:
        """Pods that take requests for `model`, in order of pod id."""
        return self._table.by_model.get(model, ())

    def models(self) -> Mapping[str, ServedModel]:
        """Every known model by name; one whose pods are all down is still known."""
        return self._table.cards

    def is_known(self, model: str) -> bool:
        """Whether the model is expected, or was ever served: it may have been scaled to zero."""
        return model in self._seen_models

    def engines_by_model(self) -> Mapping[str, int]:
        """How many pods take requests for each model that is known; 0 for one that none does."""
        return {model: len(self.pods(model)) for model in self._seen_models}

    def members(self) -> tuple[Member, ...]:
        """Every URL of discovery, in order."""
        return tuple(self._members[url] for url in sorted(self._members))

    def admitted(self) -> tuple[Pod, ...]:
        """Every pod that takes requests, in order of URL."""
        return tuple(member.pod for member in self.members() if member.pod and member.takes_requests)

    def answering(self) -> tuple[Pod, ...]:
        """Every pod that answers, in order of URL; those that are ejected for failing requests too."""
        return tuple(member.pod for member in self.members() if member.pod and member.answers)

    def doubtful(self, model: str) -> frozenset[PodId]:
        """Pods for `model` that have failed a request since they last answered one."""
        return frozenset(pod.pod_id for pod in self.pods(model) if pod.faults.is_suspect or pod.faults.is_ejected)

    def lease(self, pod: Pod, *, prompt_tokens: int, uncached_tokens: int, output_tokens: int, streams: bool) -> Lease:
        """A context manager that counts one request on `pod` while it lasts. `streams`: its first byte is a token."""
        is_trial = pod.faults.is_on_trial
        if is_trial:  # with this request, and with no other before its end and the next probe
            pod.faults.is_on_trial, pod.faults.is_tried = False, True
            self._changed()
        return Lease(
            pod,
            str(next(self._numbers)),
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached_tokens,
            output_tokens=output_tokens,
            streams=streams,
            clock=asyncio.get_running_loop().time,
            is_trial=is_trial,
        )

    # -- what others tell the fleet ---------------------------------------------------------------------------

    def listen(self, listener: Callable[[FleetChange], None]) -> None:
        """Call `listener` after every change of the set of identified pods."""
        self._listeners.append(listener)

    def report(self, pod_id: PodId, load: LoadReport) -> None:
        """A load report of a pod, from the registry. Of an unknown pod it is ignored."""
        pod = self._table.by_id.get(pod_id)
        if pod is not None:
            pod.state.report(load, now_s=asyncio.get_running_loop().time())

    def failed(self, pod: Pod, reason: str) -> None:
        """A request could not reach `pod`: counts as a failed probe, and has it probed at once."""
        member = self._members.get(pod.url)
        if member is not None and member.pod is pod:
            self._failure(member, ProbeFailed(reason))
            member.wake.set()

    def served(self, pod: Pod, *, sent_s: float) -> None:
        """A request, sent at `sent_s` of the loop's clock, got all of its answer."""
        if pod.faults.ended(sent_s=sent_s, now_s=asyncio.get_running_loop().time()):
            log.info("fleet: pod %s at %s takes requests again", pod.pod_id, pod.url)
            self._changed()

    def blame(self, pod: Pod, fault: Fault, *, is_begun: bool) -> None:
        """A request failed by the pod's fault, after its first byte (`is_begun`) or before: enough of them eject it."""
        faults = pod.faults
        faults.failed(fault, is_begun=is_begun)
        if self._table.by_id.get(pod.pod_id) is not pod or not faults.may_be_ejected(fault, self._eject_after):
            return
        if not (faults.is_ejected or self._can_spare(pod, is_begun=is_begun)):
            return
        pause_s = faults.eject(asyncio.get_running_loop().time())
        self.ejections += 1
        log.warning(
            "fleet: pod %s at %s is ejected for %g s: it failed its last requests (%d), though its probes go well",
            *(pod.pod_id, pod.url, pause_s, faults.count),
        )
        self._changed()

    def _can_spare(self, pod: Pod, *, is_begun: bool) -> bool:
        """Whether enough pods are left for each of its models when it is ejected.

        Nobody gives a second opinion of a stream that breaks (`is_begun`), so other streams do: pods that broke some
        lately count as lost already. Something on the way may cut every stream at some age.
        """
        now_s = asyncio.get_running_loop().time()
        for model in pod.identity.models:
            others = [other for other in self._table.answering.get(model.name, ()) if other is not pod]
            lost = sum(other.faults.is_ejected or (is_begun and other.faults.has_broken(now_s)) for other in others)
            if 1 + lost > MOST_EJECTED * (1 + len(others)):
                return False
        return True

    async def wait_probed(self) -> None:
        """Until every engine of the first complete set has answered, or failed to, once."""
        await self._probed.wait()

    @property
    def is_probed(self) -> bool:
        """Whether every engine of the first complete set has answered, or failed to, once."""
        return self._probed.is_set()

    # -- following --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow discovery and probe until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for addresses in self._discovery.watch():
                self._set(addresses, group)
            await asyncio.Event().wait()

    def _set(self, addresses: frozenset[EngineAddress], group: asyncio.TaskGroup) -> None:
        wanted = {address.url: address for address in addresses}
        gone = []
        for url, member in list(self._members.items()):
            address = wanted.get(url)
            if address is not None and address.life == member.address.life:
                became_ready = address.is_ready and not member.address.is_ready
                if became_ready or address.model != member.address.model:
                    member.wake.set()  # what its last probe said is not true any more
                member.address = address
                if member.pod is not None:
                    member.pod.weight = address.weight
                continue
            gone.append(self._members.pop(url))
            if member.task is not None:
                member.task.cancel()
        for url in wanted.keys() - self._members.keys():
            member = self._members[url] = Member(wanted[url])
            member.task = group.create_task(self._watch(member))
        self._changed(ended=frozenset(member.pod.pod_id for member in gone if member.pod))
        self._note_probed()

    async def _watch(self, member: Member) -> None:
        while True:
            member.wake.clear()
            try:
                self._success(member, await self._identify(member))
            except ProbeFailed as error:
                self._failure(member, error)
            except Exception as error:  # outermost loop: one odd answer must not end the probing
                log.exception("probe of %s", member.url)
                self._failure(member, ProbeFailed(repr(error)))
            member.probed = True
            self._note_probed()
            pause_s = self._interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
            try:
                async with asyncio.timeout(pause_s):
                    await member.wake.wait()
            except TimeoutError:
                pass

    async def _identify(self, member: Member) -> PodIdentity:
        """Who answers there: by its own word, or by discovery's where it wants a key for it. Raises ProbeFailed."""
        model = member.address.model
        try:
            return _restricted(await self._probe.identify(member.url), model)
        except ProbeFailed as error:
            if not error.protected or model is None:
                raise
            return named_by_discovery(member.url, model)

    def _note_probed(self) -> None:
        if all(member.probed for member in self._members.values()):
            self._probed.set()

    # -- admission and ejection -------------------------------------------------------------------------------

    def _success(self, member: Member, identity: PodIdentity) -> None:
        owner = self._owner(identity.pod_id)
        if owner is not None and owner is not member and owner.admitted:
            self._failure(member, ProbeFailed(f"pod id {identity.pod_id} is already in use at {owner.url}"))
            return
        member.failures, member.last_error = 0, None
        ended = set()
        if owner is not None and owner is not member:  # the pod came back at another address
            owner.pod = None
            ended.add(identity.pod_id)
        pod = member.pod
        if pod is not None and self._goes_on(member, pod, identity):
            may_be_tried = pod.faults.try_again(asyncio.get_running_loop().time())
            if member.admitted and pod.identity == identity:
                if may_be_tried:
                    self._changed()
                return
            pod.identity = identity
        else:
            if pod is not None:
                ended.add(pod.pod_id)
            member.pod = Pod(member.url, identity, member.address.weight)
        if not member.admitted or ended:
            log.info("fleet: pod %s at %s is up", identity.pod_id, member.url)
        member.admitted = True
        self._changed(frozenset(ended))

    def _owner(self, pod_id: PodId) -> Member | None:
        return next((m for m in self._members.values() if m.pod is not None and m.pod.pod_id == pod_id), None)

    @staticmethod
    def _goes_on(member: Member, pod: Pod, identity: PodIdentity) -> bool:
        """Whether the answer comes from the life that is known, with its cache.

        An engine without epochs that was away may have restarted, so its cache counts as lost.
        """
        return pod.is_same_life(identity) and (member.admitted or pod.epoch is not None)

    def _failure(self, member: Member, error: ProbeFailed) -> None:
        if member.last_error is None:
            log.warning("fleet: %s: %s", member.url, error)
        member.last_error = str(error)
        now_s = asyncio.get_running_loop().time()
        if error.silent and member.pod is not None and member.pod.faults.was_heard(now_s):
            member.failures = 0  # the answer to a request is as good a sign of life as that to a probe
            return
        member.failures += 1
        if member.admitted and (error.refused or member.failures >= self._eject_after):
            log.warning("fleet: %s is ejected after %d failures: %s", member.url, member.failures, error)
            member.admitted = False
            self._changed()

    def _changed(self, ended: frozenset[PodId] = frozenset()) -> None:
        table = _Table()
        pods: dict[PodId, str] = {}
        known = [(m.pod, m.answers) for m in self._members.values() if m.pod is not None]
        for pod, answers in sorted(known, key=lambda item: item[0].pod_id):
            pods[pod.pod_id] = pod.model
            table.by_id[pod.pod_id] = pod
            for model in pod.identity.models:
                table.cards.setdefault(model.name, model)
                if answers:
                    table.answering.setdefault(model.name, []).append(pod)
        for name, answering in table.answering.items():  # where every pod that answers is ejected, all are used
            table.by_model[name] = tuple(pod for pod in answering if not pod.faults.is_out) or tuple(answering)
        self._table = table
        for name in table.cards:
            self._seen_models.setdefault(name)
        for name in list(self._seen_models)[: max(0, len(self._seen_models) - MAX_SEEN_MODELS)]:
            del self._seen_models[name]
        for listener in self._listeners:
            listener(FleetChange(pods, ended))


def _restricted(identity: PodIdentity, model: str | None) -> PodIdentity:
    """`identity` with the one model that discovery names, where it names one. Raises ProbeFailed."""
    if model is None:
        return identity
    chosen = tuple(served for served in identity.models if served.name == model)
    if not chosen:
        listed = ", ".join(served.name for served in identity.models)
        raise ProbeFailed(f"discovery says that it serves {model}, GET /v1/models lists {listed}")
    return replace(identity, models=chosen)
