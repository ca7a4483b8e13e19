"""warmroute's gateway in the simulation: the production chooser, index, policies and load accounting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.contract.errors import Unavailable
from engine.contract.requests import Endpoint
from loadgen.simulate.pods.pod import Report
from loadgen.simulate.pods.routing import Offered, Scrape
from loadgen.simulate.pods.timeline import Timeline
from router.choosing.chooser import Choice, Chooser, Knowledge
from router.choosing.peer_reports import PeerReports
from router.engines.usage import Usage
from router.fleet.facts import EngineFacts
from router.fleet.pod import Pod, TrackedRequest
from router.fleet.probe import PodIdentity, ServedModel
from router.fleet.scrape_pace import PERIOD_S
from router.peer_sync.messages import Life, PeerMessage
from router.peer_sync.outbox import Outbox
from router.peer_sync.pace import Pace
from router.peer_sync.peers import Peers
from router.peer_sync.sent_reports import SentReport, SentReports
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.index import PrefixIndex
from router.registry.reader import RegistryStatus
from router.routing.policies import make_policy
from router.routing.prefill_shares import ModelShares
from router.settings.constants import CONSTANTS, Constants
from router.telemetry.metrics import Metrics
from router.views.reported import Counts
from router.views.sent import Mark
from router.views.speeds import Speeds
from router.views.table import Policy
from router.views.types import PodId

MODEL = "simulated"
MAX_ATTEMPTS = 1 + CONSTANTS.retries
"""Maximum number of pods that a request is tried on."""


@dataclass(slots=True)
class _Open:
    inbound: Inbound
    choice: Choice
    tracked: TrackedRequest
    told: SentReport | None
    cached_tokens: int | None = None


@dataclass(slots=True)
class _Registry:
    """Either all pods publish, or none does."""

    publishes: bool
    expired: bool = False

    def reports(self, pod: PodId) -> bool:
        return self.publishes

    def status(self) -> RegistryStatus:
        return RegistryStatus(True, 0, 0, self.expired, 0, 0, None)


@dataclass(slots=True)
class _Serving:
    by_name: dict[PodId, Pod] = field(default_factory=dict)
    listed: list[Pod] = field(default_factory=list)

    def pods(self, model: str) -> Sequence[Pod]:
        return self.listed


class Gateway:
    """A `Router` that decides as `warmroute-gateway --policy POLICY` does."""

    def __init__(
        self,
        policy: str,
        timeline: Timeline,
        *,
        stride: int,
        publishes: bool = True,
        made: Policy | None = None,
        capacity: Callable[[str], tuple[int, int] | None] = lambda name: None,
        life: int = 0,
        number: int = 0,
    ) -> None:
        """`publishes`: the engines report to the registry, as ours do; otherwise the gateway knows only what it passed
        on. `made`: the policy, if it is not the one named `policy`. `capacity`: returns, for a pod's name, how many
        tokens fit its cache and one block, or None if the pod does not tell. `life`: if above 0, the gateway tells
        other gateways what it sends to pods that publish nothing. `number`: different for each gateway."""
        self.name = policy
        self.takes_reports = publishes
        self.scrape_s = 0.0 if publishes else PERIOD_S
        self._marks: dict[PodId, Mark] = {}
        """State at the last scrape of the pods' metrics."""
        self._outbox = Outbox(Life(life), f"gateway-{life}", stride) if life else None
        self._pace = Pace()
        self._clock = timeline.clock
        self._capacity = capacity
        self._stride = stride
        self._serving = _Serving()
        self._speeds = Speeds()
        self._index = PrefixIndex()
        self._estimates = Estimates()
        self._open: dict[int, _Open] = {}
        self._policy: Policy = make_policy(policy) if made is None else made
        self._sent_reports = SentReports(lambda pod: publishes, self._outbox, self._clock)
        self._chooser = Chooser(
            Knowledge(self._serving, self._index, _Registry(publishes), self._estimates),
            lambda: {policy: self._policy},
            Metrics(),
            Constants(stride_bytes=stride),
            clock=self._clock,
            sent_reports=self._sent_reports,
            name=f"{number:08}",
        )
        pod_of = self._serving.by_name.get
        self._peers = Peers(PeerReports(pod_of, self._chooser, self._sent_reports, clock=self._clock), Life(life))

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        serving = self._serving
        gone = serving.by_name.keys() - set(pods)
        for pod_id in gone:
            self._index.drop(pod_id)
            del serving.by_name[pod_id]
        self._peers.drop(gone)
        for name in pods:
            if PodId(name) not in serving.by_name:
                pod = Pod(
                    f"http://{name}", PodIdentity(PodId(name), None, (ServedModel(MODEL, b"{}"),)), speeds=self._speeds
                )
                if (told := self._capacity(name)) is not None:
                    pod.facts = EngineFacts("vllm", None, *told)
                serving.by_name[PodId(name)] = pod
        serving.listed = [serving.by_name[PodId(name)] for name in sorted(pods)]

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        """See `Router`."""
        inbound = self._inbound(request)
        try:
            choice = self._chooser.choose(inbound, [PodId(name) for name in excluded])
        except Unavailable:
            return None
        tracked = TrackedRequest(
            choice.pod,
            str(request.number),
            prompt_tokens=inbound.prompt_tokens,
            uncached_tokens=max(0, inbound.prompt_tokens - choice.cached_tokens),
            output_tokens=inbound.output_tokens,
            streams=True,
            clock=self._clock,
        )
        tracked.__enter__()
        told = self._chooser.report_of(inbound, choice, str(request.number))
        if told is not None:
            told.sent()
        self._open[request.number] = _Open(inbound, choice, tracked, told)
        return choice.pod.pod_id

    def first_token(self, request: Offered, pod: str, cached_tokens: int, now_s: float) -> None:
        """See `Router`."""
        opened = self._open[request.number]
        opened.cached_tokens = cached_tokens
        told = cached_tokens if self.takes_reports else None  # other engines report this count at an answer's end
        opened.tracked.first_token(told)
        if opened.told is not None:
            opened.told.began(told)

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        """See `Router`."""
        opened = self._open.pop(request.number)
        if opened.cached_tokens is not None:
            opened.tracked.computed_tokens = len(request.tokens) - opened.cached_tokens
        opened.tracked.__exit__()
        if opened.told is not None:
            opened.told.ended()
        if completed:
            usage = Usage(len(request.tokens), request.output_tokens, opened.cached_tokens)
            self._chooser.learn(opened.inbound, opened.choice, usage)
        elif opened.cached_tokens is None:
            undone = self._chooser.undo(opened.inbound, opened.choice)
            if opened.told is not None:
                opened.told.undone(undone)

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """See `Router`."""
        known = self._serving.by_name.get(PodId(pod))
        if known is not None:
            self._index.apply(PodId(pod), report.removed, (report.stored, *report.below))
            known.report(report.load, now_s=now_s)

    def tell_with(self, on_first: Callable[[], None]) -> None:
        """Set the function that is called when `told_at_s` becomes earlier; ignored if this gateway tells others
        nothing."""
        if self._outbox is not None:
            self._outbox.on_first = on_first

    def told_at_s(self, gateways: int) -> float:
        """Return when this gateway next sends messages to the others, if there are `gateways`; infinite: it has nothing
        to tell."""
        if self._outbox is None:
            return math.inf
        return self._pace.due_s(self._outbox.oldest_s, self._outbox.oldest_routed_s, gateways)

    def told(self, now_s: float, gateways: int) -> Iterator[PeerMessage]:
        """Yield the messages for the other gateways."""
        while self._outbox is not None and len(self._outbox):
            self._pace.sent(now_s, gateways, has_routed=self._outbox.oldest_routed_s is not None)
            yield self._outbox.take(now_s)

    def heard(self, message: PeerMessage, sent_at_s: float) -> None:
        """Take another gateway's message about pods that publish nothing."""
        self._peers.apply(message, sent_at_s, self._clock())

    def scrapes(self) -> None:
        """Note that the pods are scraped now."""
        self._marks = {pod_id: pod.state.mark for pod_id, pod in self._serving.by_name.items()}

    def scraped(self, pod: str, scrape: Scrape, now_s: float) -> None:
        """See `Router`."""
        known, mark = self._serving.by_name.get(PodId(pod)), self._marks.get(PodId(pod))
        if known is not None and mark is not None:
            known.counted(Counts(scrape.running, scrape.waiting, scrape.kv_usage), mark, now_s=now_s)

    def sweep(self, keys: int) -> bool:
        """Forget a few keys of pods that left; False if no key is left to forget."""
        return self._index.sweep(keys) > 0

    @property
    def chooser_name(self) -> str:
        """Return the name under which others know this gateway's shares."""
        return self._chooser.name

    def shares(self) -> Mapping[str, ModelShares]:
        """Return the shares that gateways exchange through Redis."""
        return self._chooser.shares()

    def _inbound(self, request: Offered) -> Inbound:
        prompt_tokens = len(request.tokens)
        expected = round(self._estimates.of(MODEL).output_tokens)
        return Inbound(
            endpoint=Endpoint.COMPLETIONS,
            model=MODEL,
            stream=True,
            policy=self.name,
            keys=request.keys,
            prompt_bytes=4 * prompt_tokens,
            prompt_tokens=prompt_tokens,
            tokens_per_stride=self._stride / 4,
            output_tokens=max(1, min(expected, request.output_tokens)),
            teaches_tokens=False,
            body=b"",
        )
