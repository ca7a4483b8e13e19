"""The current set of pods: follows discovery, probes each engine, admits the ones that answer, ejects the dead."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engine.contract.load import LoadReport
from engine.contract.periods import SMALL_FLEET
from router.fleet.discovery import Discovery, EngineAddress
from router.fleet.facts import EngineFacts
from router.fleet.faults import Fault
from router.fleet.member import Member, Ranks
from router.fleet.pod import Clock, Pod, TrackedRequest
from router.fleet.probe import PodIdentity, Probe, ProbeFailed, ServedModel, named_by_discovery, restricted
from router.fleet.roster import Roster
from router.views.speeds import Speeds
from router.views.types import PodId

log = logging.getLogger(__name__)

JITTER = 0.2
EARLY_S = 1e-6
"""An event loop may run a timer this much too early. A wait that ends so early is over all the same."""
LONGEST_UNPROBED_S = 60.0
"""Every pod is probed this often, whatever else shows that it runs: only a probe shows which models it serves."""
MAX_SEEN_MODELS = 1024
"""Models that are remembered: each has a time series, and requests for it are answered 503, not 404. Beyond this
number, the oldest models that are neither served nor expected are forgotten."""
MOST_EJECTED = 0.5
"""Share of a model's pods that may be out for failing requests. If more seem broken, the fault more likely lies with
the requests, or with something that all pods need. The limit also bounds the load of the other pods. Clients lose
nothing: a request that begins on a doubtful pod gets a second attempt."""


@dataclass(frozen=True, slots=True)
class FleetChange:
    """What listeners get: every identified pod with its model, ejected ones included, and the pods that ended."""

    pods: Mapping[PodId, str]
    ended: frozenset[PodId] = frozenset()


class Fleet:
    """The pods behind the gateway. Reading it never waits; `run` keeps it current until cancelled."""

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
        self._owners: dict[PodId, Member] = {}
        """Pod id -> its member."""
        self._named: dict[str, Member] = {}
        """Discovery's name -> its member."""
        self._roster = Roster()
        self.speeds = Speeds()
        self._clock: Clock | None = None
        self._ended: set[PodId] = set()
        self._is_telling = False
        self._listeners: list[Callable[[FleetChange], None]] = []
        self._sleep_listeners: list[Callable[[Pod], None]] = []
        self._probed = asyncio.Event()
        self._unprobed: set[Member] = set()
        self._numbers = itertools.count()
        self.ejections = 0
        """Times that a pod was ejected because it failed requests."""
        self._expected = frozenset(expected)
        self._seen_models = dict.fromkeys(sorted(self._expected))
        """Names of models, in the order in which they became known."""

    # -- what a request needs ---------------------------------------------------------------------------------

    def pods(self, model: str) -> tuple[Pod, ...]:
        """Return the pods that take requests for `model`, in order of pod id."""
        return self._roster.pods(model)

    def pod(self, pod_id: PodId) -> Pod | None:
        """Return the identified pod with that id, ejected or not."""
        return self._roster.get(pod_id)

    def models(self) -> Mapping[str, ServedModel]:
        """Return every known model by name; a model whose pods are all down is still known."""
        return self._roster.cards()

    def is_known(self, model: str) -> bool:
        """Return whether the model is expected, or was ever served: it may have been scaled to zero."""
        return model in self._seen_models

    def engines_by_model(self) -> Mapping[str, int]:
        """Return how many pods take requests for each known model, 0 included."""
        return {model: len(self.pods(model)) for model in self._seen_models}

    @property
    def size(self) -> int:
        """How many engines discovery knows."""
        return len(self._members)

    def members(self) -> tuple[Member, ...]:
        """Return the members for all URLs of discovery, in order."""
        return tuple(self._members[url] for url in sorted(self._members))

    def key_of(self, url: str) -> str:
        """Return which key the engine at that URL gets, as `EngineAddress.key`."""
        member = self._members.get(url)
        return "" if member is None else member.address.key

    def admitted(self) -> tuple[Pod, ...]:
        """Return every pod that takes requests, in order of URL."""
        return tuple(member.pod for member in self.members() if member.pod and member.takes_requests)

    def answering(self) -> tuple[Pod, ...]:
        """Return every pod that answers, in order of URL, including those ejected for failing requests."""
        return tuple(member.pod for member in self.members() if member.pod and member.answers)

    def ranks_of(self, pod: Pod) -> tuple[Pod, ...]:
        """Return every pod of the same engine: `pod` itself, or all of its data-parallel ranks."""
        member = self._members.get(pod.url)
        return member.pods if member is not None and pod in member.pods else (pod,)

    def doubtful(self, model: str) -> frozenset[PodId]:
        """Return the pods for `model` that have failed a request since they last answered one."""
        return frozenset(pod.pod_id for pod in self.pods(model) if pod.faults.is_doubtful)

    def track(
        self, pod: Pod, *, prompt_tokens: int, uncached_tokens: int, output_tokens: int, streams: bool
    ) -> TrackedRequest:
        """Return a context manager that counts one request on `pod`. `streams`: the first byte is a token."""
        is_trial = pod.faults.begin_trial()
        if is_trial:
            self._refresh(pod)
        return TrackedRequest(
            pod,
            str(next(self._numbers)),
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached_tokens,
            output_tokens=output_tokens,
            streams=streams,
            clock=self._clock_of_loop(),
            is_trial=is_trial,
        )

    # -- what others report to the fleet ----------------------------------------------------------------------

    def listen(self, listener: Callable[[FleetChange], None]) -> None:
        """Call `listener` after changes of the set of identified pods, in the loop's next turn."""
        self._listeners.append(listener)

    def listen_for_sleep(self, listener: Callable[[Pod], None]) -> None:
        """Call `listener` when a pod has gone to sleep: its requests hang, and it gets no more."""
        self._sleep_listeners.append(listener)

    def report(self, pod_id: PodId, load: LoadReport) -> None:
        """Take a pod's load report from the registry. It is ignored for an unknown pod."""
        pod = self._roster.get(pod_id)
        if pod is not None:
            pod.report(load, now_s=self._now_s())

    def heard(self, pod_id: PodId, epoch: int) -> None:
        """Note that a pod has just published. If it has not restarted, this is as good as an answer to a probe."""
        pod = self._roster.get(pod_id)
        if pod is not None and pod.epoch == epoch:
            pod.heard_at_s = self._now_s()

    def learnt(self, pod: Pod, facts: EngineFacts) -> None:
        """Note that `pod.facts` has changed; listeners get that as a change of the fleet."""
        if facts != pod.facts:
            pod.facts = facts
            if self._roster.get(pod.pod_id) is pod:
                self._tell()

    def has_ranks(self, pod: Pod, ranks: Ranks) -> None:
        """Note the data-parallel ranks found on the engine of `pod`. They count unless its ranks are given."""
        member = self._members.get(pod.url)
        if member is not None and pod in member.pods:
            member.found_ranks = ranks
            self._use_ranks(member, member.wanted_ranks())

    def has_given_ranks(self, member: Member) -> bool:
        """Return whether discovery gives the engine's data-parallel ranks, so that nobody looks for them."""
        return member.address.ranks is not None

    def failed(self, pod: Pod, reason: str) -> None:
        """Note that a request could not reach `pod`. It counts as a failed probe, and the engine is probed at once."""
        if pod.rank is not None:
            pod.faults.doubt()  # its other ranks do not answer either
        member = self._members.get(pod.url)
        if member is not None and pod in member.pods:
            self._failure(member, ProbeFailed(reason))
            member.ask()

    def leaves(self, pod: Pod, why: str) -> None:
        """Note that `pod` said that it leaves: it gets no more requests, those it has go on, and no failure is
        counted."""
        if self._roster.get(pod.pod_id) is pod and pod.faults.leave(asyncio.get_running_loop().time()):
            log.info("fleet: pod %s at %s says that it leaves: %s", pod.pod_id, pod.url, why)
            self._refresh(pod)

    def look_at(self, pod: Pod) -> None:
        """Probe the engine of `pod` at once, because something suggests that it has changed."""
        member = self._owners.get(pod.identity.pod_id)
        if member is not None and pod in member.pods:
            member.ask()

    def served(self, pod: Pod, *, sent_s: float) -> None:
        """Note that a request sent at `sent_s` of the loop's clock got its whole answer."""
        if pod.faults.ended(sent_s=sent_s, now_s=self._now_s()):
            log.info("fleet: pod %s at %s takes requests again", pod.pod_id, pod.url)
            self._refresh(pod)

    def blame(self, pod: Pod, fault: Fault, *, is_begun: bool) -> None:
        """Count a request that failed through the pod's fault, after its first byte (`is_begun`) or before. May eject
        the pod."""
        faults = pod.faults
        if faults.is_leaving and faults.is_out:
            return  # it leaves anyway
        faults.failed(fault, is_begun=is_begun)
        if self._roster.get(pod.pod_id) is not pod or not faults.may_be_ejected(fault, self._eject_after):
            return
        if not (faults.is_ejected or self._can_spare(pod, is_begun=is_begun)):
            return
        pause_s = faults.eject(asyncio.get_running_loop().time())
        self.ejections += 1
        log.warning(
            "fleet: pod %s at %s is ejected for %g s: it failed its last requests (%d), though its probes go well",
            pod.pod_id,
            pod.url,
            pause_s,
            faults.count,
        )
        self._refresh(pod)

    def _can_spare(self, pod: Pod, *, is_begun: bool) -> bool:
        """Return whether enough pods are left for each of the pod's models if the pod is ejected.

        Something between the gateway and the pods may cut every stream at some age, and not all streams can be resumed.
        So after a broken stream (`is_begun`), other pods that recently broke one count as lost already.
        """
        now_s = asyncio.get_running_loop().time()
        for model in pod.identity.models:
            others = {other.faults for other in self._roster.answering(model.name)} - {pod.faults}
            others = {other for other in others if not other.is_leaving}
            lost = sum(other.is_ejected or (is_begun and other.has_broken(now_s)) for other in others)
            if 1 + lost > MOST_EJECTED * (1 + len(others)):
                return False
        return True

    async def wait_probed(self) -> None:
        """Wait until every engine of the first complete set has answered, or failed to, once."""
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
        gone: list[Pod] = []
        for url, member in list(self._members.items()):
            address = wanted.get(url)
            if address is not None and address.life == member.address.life:
                became_ready = address.is_ready and not member.address.is_ready
                if became_ready or address.model != member.address.model:
                    member.ask()  # its last probe is out of date
                member.address = address
                for pod in member.pods:
                    pod.weight = address.weight
                    self._roster.put(pod, answers=member.answers)
                self._use_ranks(member, member.wanted_ranks())
                continue
            del self._members[url]
            self._unprobed.discard(member)
            gone += member.pods
            self._disown(member)
            if member.task is not None:
                member.task.cancel()
        for url in wanted.keys() - self._members.keys():
            member = self._members[url] = Member(wanted[url], self.speeds)
            self._unprobed.add(member)
            member.task = group.create_task(self._watch(member))
        self._named = {member.address.name: member for member in self._members.values() if member.address.name}
        self._tell(ended=frozenset(pod.pod_id for pod in gone))
        self._note_probed()

    async def _watch(self, member: Member) -> None:
        while True:
            member.asked = False
            member.wake.clear()
            try:
                self._success(member, await self._identify(member))
            except ProbeFailed as error:
                self._failure(member, error)
            except Exception as error:  # outermost loop: one bad answer must not end the probing
                log.exception("probe of %s", member.url)
                self._failure(member, ProbeFailed(repr(error)))
            self._unprobed.discard(member)
            self._note_probed()
            member.probed_at_s = self._now_s()
            await self._pause(member)

    async def _pause(self, member: Member) -> None:
        """Wait until the next probe is due: an interval after the pod was last heard, or when a probe is requested."""
        pause_s = self._interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
        loop = asyncio.get_running_loop()
        due_s = member.probed_at_s + pause_s
        while due_s - loop.time() > EARLY_S:
            timer = loop.call_at(due_s, member.wake.set)
            try:
                await member.wake.wait()
            finally:
                timer.cancel()
            if member.asked:
                return
            member.wake.clear()
            due_s = min(self._life_s(member) + pause_s, member.probed_at_s + self._longest_pause_s(pause_s))

    def _longest_pause_s(self, pause_s: float) -> float:
        """Return how long a pod that was heard may go without a probe. This bounds the probes of a large fleet."""
        return max(pause_s, min(LONGEST_UNPROBED_S, pause_s * len(self._members) / SMALL_FLEET))

    @staticmethod
    def _life_s(member: Member) -> float:
        """Return when the pod last showed, other than by a probe, that it takes requests; -inf if only a probe can show
        it."""
        pod = member.pod
        if pod is None or not member.takes_requests or member.last_error is not None or pod.faults.is_doubtful:
            return -math.inf
        return max(pod.heard_at_s, pod.faults.began_s)

    async def _identify(self, member: Member) -> PodIdentity:
        """Return the identity of the engine: what it says itself, or what discovery says if it needs a key. Raises
        ProbeFailed."""
        model = member.address.model
        try:
            return restricted(await self._probe.identify(member.url), model)
        except ProbeFailed as error:
            if not error.protected or model is None:
                raise
            return named_by_discovery(member.url, model)

    def _note_probed(self) -> None:
        if not self._unprobed:
            self._probed.set()

    # -- admission and ejection -------------------------------------------------------------------------------

    def _success(self, member: Member, identity: PodIdentity) -> None:
        named = self._named.get(identity.pod_id, member)
        if named is not member:
            self._failure(
                member, ProbeFailed(f"it says that it is {identity.pod_id}, but discovery has that pod at {named.url}")
            )
            return
        owner = self._owners.get(identity.pod_id)
        if owner is not None and owner is not member and owner.admitted:
            self._failure(member, ProbeFailed(f"pod id {identity.pod_id} is already in use at {owner.url}"))
            return
        member.failures, member.last_error = 0, None
        ended: set[PodId] = set()
        if owner is not None and owner is not member:  # the pod came back at another address
            ended.update(pod.pod_id for pod in owner.pods)
            self._disown(owner)
        pod = member.pod
        if pod is not None and self._goes_on(member, pod, identity):
            may_be_tried = pod.faults.try_again(asyncio.get_running_loop().time())
            if member.admitted and pod.identity == identity:
                if may_be_tried:
                    self._refresh(pod)
                return
            member.use_identity(identity)
        else:
            ended.update(each.pod_id for each in member.pods)
            self._disown(member)
            pod = member.begin_life(identity, member.wanted_ranks())
            self._owners[identity.pod_id] = member
        if not member.admitted or ended:
            log.info("fleet: pod %s at %s is up", identity.pod_id, member.url)
        member.admitted = True
        self._put(member)
        self._tell(frozenset(ended))

    def _disown(self, member: Member) -> None:
        """Forget the pod of a member."""
        pods = member.end_life()
        if pods:
            del self._owners[pods[0].identity.pod_id]
        for pod in pods:
            self._roster.drop(pod.pod_id)

    def _put(self, member: Member) -> None:
        for pod in member.pods:
            self._roster.put(pod, answers=member.answers)

    def _use_ranks(self, member: Member, ranks: Ranks) -> None:
        """Send the engine's requests to these ranks from now on; requests under way end where they are."""
        ended = member.use_ranks(ranks)
        if ended is not None:
            for pod in ended:
                self._roster.drop(pod.pod_id)
            self._put(member)
            names = ", ".join(str(pod.pod_id) for pod in member.pods)
            log.info("fleet: %s has the data-parallel ranks %s", member.url, names)
            self._tell(frozenset(pod.pod_id for pod in ended))

    @staticmethod
    def _goes_on(member: Member, pod: Pod, identity: PodIdentity) -> bool:
        """Return whether the engine that answers has not restarted and still has its cache.

        An engine without epochs that was down may have restarted, so its cache counts as lost.
        """
        return pod.is_same_life(identity) and (member.admitted or pod.epoch is not None)

    def _failure(self, member: Member, error: ProbeFailed) -> None:
        if member.last_error is None:
            log.warning("fleet: %s: %s", member.url, error)
        member.last_error = str(error)
        if error.untried:
            return
        now_s = asyncio.get_running_loop().time()
        if error.silent and member.pod is not None and member.pod.faults.was_heard(now_s):
            member.failures = 0  # an answer to a request is as good as one to a probe
            return
        member.failures += 1
        has_left = member.pod is not None and member.pod.faults.is_leaving and not error.silent
        if member.admitted and (error.refused or has_left or member.failures >= self._eject_after):
            if has_left:
                log.info("fleet: %s has left: %s", member.url, error)
            else:
                log.warning("fleet: %s is ejected after %d failures: %s", member.url, member.failures, error)
            member.admitted = False
            if member.pod is not None:
                self._refresh(member.pod)
                if error.asleep:
                    for listener in self._sleep_listeners:
                        listener(member.pod)

    def _refresh(self, pod: Pod) -> None:
        """Update whether the pod, with all ranks, may be chosen; its identity stays."""
        member = self._owners.get(pod.identity.pod_id)
        if member is not None and pod in member.pods:
            self._put(member)

    def _tell(self, ended: frozenset[PodId] = frozenset()) -> None:
        """Note that the pods, or what they serve, have changed."""
        cards = self._roster.cards()
        for name in cards:
            self._seen_models.setdefault(name)
        if len(self._seen_models) > MAX_SEEN_MODELS:
            past = [name for name in self._seen_models if name not in cards and name not in self._expected]
            for name in past[: len(self._seen_models) - MAX_SEEN_MODELS]:
                del self._seen_models[name]
        self._ended |= ended
        if not self._is_telling:
            self._is_telling = True
            asyncio.get_running_loop().call_soon(self._tell_listeners)

    def _tell_listeners(self) -> None:
        """Tell all changes of one turn of the loop at once: at the start, thousands of pods come at once."""
        change = FleetChange(self._roster.models(), frozenset(self._ended))
        self._is_telling = False
        self._ended.clear()
        for listener in self._listeners:
            listener(change)

    def _now_s(self) -> float:
        """Return the time of the loop's clock."""
        return self._clock_of_loop()()

    def _clock_of_loop(self) -> Clock:
        """Return the loop's clock. It is kept because asking for the loop is a system call on Python 3.11."""
        if self._clock is None:
            self._clock = asyncio.get_running_loop().time
        return self._clock
