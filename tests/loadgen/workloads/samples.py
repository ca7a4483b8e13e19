"""One small workload of each kind, and helpers for the tests."""

from __future__ import annotations

from loadgen.workloads.base import Piece, Session, Workload, conversation
from loadgen.workloads.catalog import WorkloadSettings, build_workload
from loadgen.workloads.kinds import KINDS

SYNTHETIC = tuple(name for name, kind in KINDS.items() if not kind.reads_file)
BRANCHING = ("branching",)
SMALL: dict[str, dict[str, object]] = {
    "tenants": {"tenants": 3, "system_tokens": "200-300"},
    "agentic": {"instruction_tokens": 200, "turns": "3-7", "result_tokens": 60},
    "agentic-small": {"instruction_tokens": 200, "turns": "2-6", "result_tokens": 60},
    "rag": {"documents": 6, "document_tokens": 80},
    "few-shot": {"templates": 3, "examples": 2},
    "batch": {"batch_size": 5},
    "code": {"repositories": 2, "repository_tokens": 200},
    "gsp": {"gsp_num_groups": 4, "gsp_prompts_per_group": 10},
    "random": {"random_prefix_len": 50, "random_range_ratio": 0.5},
}


def sample(name: str, seed: int = 1, **flags: object) -> Workload:
    """Return a small workload of this kind."""
    return build_workload(
        WorkloadSettings.model_validate({"workload": name, "seed": seed, **SMALL.get(name, {}), **flags})
    )


def answers(session: Session) -> dict[int, str]:
    """Return the same answer for every turn, so that prompts differ only because of the workload."""
    return dict.fromkeys(range(len(session.turns)), "the same answer")


def pieces(session: Session, turn: int) -> list[Piece]:
    """Return the pieces of a prompt in order; answers are pieces with their own text."""
    out: list[Piece] = []
    for step in conversation(session, turn):
        out += [piece for message in session.turns[step].messages for piece in message.pieces]
        if step != turn:
            out.append(Piece("", 3, text=answers(session)[step]))
    return out
