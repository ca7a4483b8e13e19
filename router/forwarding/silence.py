"""Decide whether to wait on for a pod that is silent: it may be full, or hold text back, or hang."""

from __future__ import annotations

import asyncio

from router.fleet.pod import Pod
from router.fleet.vital_signs import Vitals, VitalSigns

FRESH_SHARE = 0.5
"""A token of another stream proves for this share of the idle timeout that the pod works. Streams note their tokens
every quarter of it."""


class Silence:
    """Judges the silence of all pods."""

    def __init__(self, vital_signs: VitalSigns, idle_s: float) -> None:
        """`idle_s`: seconds of silence after which a stream is judged."""
        self._vital_signs = vital_signs
        self._fresh_s = FRESH_SHARE * idle_s
        self._clock = asyncio.get_running_loop().time

    def is_at_work(self, pod: Pod) -> bool:
        """Whether other requests of this gateway show that the pod works."""
        return self._clock() - max(pod.token_s, pod.faults.began_s) < self._fresh_s

    async def is_worked_on(self, pod: Pod, silences: int) -> bool:
        """Whether a stream that was silent for the idle timeout may still go on. `silences`: how often it was before.

        A pod that says only that it is well is believed once.
        """
        if self.is_at_work(pod):
            return True
        vitals = await self._vital_signs.look(pod)
        return vitals is Vitals.WORKS or (vitals is Vitals.UNKNOWN and not silences)


class StreamWatch:
    """Tells how one stream at one pod is doing."""

    __slots__ = ("_pod", "_silence", "_silences")

    def __init__(self, pod: Pod, silence: Silence) -> None:
        self._pod = pod
        self._silence = silence
        self._silences = 0

    def saw_token(self, now_s: float) -> None:
        """Note that the pod works on this stream."""
        self._pod.token_s = now_s

    async def goes_on(self) -> bool:
        """Whether to wait on for a stream that was silent for the idle timeout."""
        goes_on = await self._silence.is_worked_on(self._pod, self._silences)
        self._silences += 1
        return goes_on
