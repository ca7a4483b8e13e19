"""The result of one load on one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from loadgen.experiment.cautions import cautions
from loadgen.experiment.contrasts import Contrasts
from loadgen.load.player import RunSpec
from loadgen.load.target import ServerUnusable
from loadgen.measure.definitions import DEFINITIONS
from loadgen.result.model import Arm, Result
from loadgen.single.arm import OpenArm, Played, cut_short
from loadgen.workloads.base import Workload

_NOT_EMPTIED = "The prefix caches were left as they were."
_EMPTIED = "The prefix caches of all pods were emptied before the load."


async def one_result(
    command: Literal["bench", "replay"],
    opened: OpenArm,
    workload: Workload,
    spec: RunSpec,
    planned: int,
    configuration: Mapping[str, Any],
    percentiles: Sequence[float] = (),
    *,
    flush: bool,
) -> tuple[Result, Played]:
    """Play the workload and sum up. Raises ServerUnusable, also if caches must be emptied but cannot be emptied."""
    opened.announce()
    if flush and (refusal := await opened.deployment.reset()):
        raise ServerUnusable(f"--flush-cache: the caches cannot be emptied: {refusal}")
    played = await opened.play(workload, spec, planned)
    arm = Arm(
        name=opened.spec.name,
        url=opened.spec.url,
        policy=opened.spec.policy,
        summary=opened.summary(played, percentiles),
    )
    result = Result(
        command=command,
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        model=opened.model,
        seed=spec.seed,
        configuration=dict(configuration),
        workload={"name": workload.name, **workload.about()},
        facts={"arrivals": spec.arrivals.about(), "tokens per word": f"{opened.tokens_per_word:g}"},
        isolation=_EMPTIED if flush else _NOT_EMPTIED,
        arms=(arm,),
        partial=played.run.is_partial,
        cautions=(*cut_short(played.run), *cautions([arm], Contrasts(()), arm.name, 1), *opened.notes),
        definitions=dict(DEFINITIONS),
    )
    return result, played
