"""The table of workloads: what each is, which flags it has, and how it is built from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loadgen.workloads.agentic import Agentic
from loadgen.workloads.base import Workload
from loadgen.workloads.chat import Chat
from loadgen.workloads.code import CodeCompletion
from loadgen.workloads.datasets import load_custom, load_sharegpt
from loadgen.workloads.published import GeneratedSharedPrefix, PrefixRepetition, RandomLengths
from loadgen.workloads.rag import Rag
from loadgen.workloads.single import Batch, Diverse, FewShot
from loadgen.workloads.traces import load_azure, load_bailian, load_burstgpt, load_mooncake

Value = str | int | float | bool


def range_text(low: int, high: int) -> str:
    """Return a range as flags give it: `20-60`, or `20` if both ends are equal."""
    return str(low) if low == high else f"{low}-{high}"


def range_of(text: str) -> tuple[int, int]:
    """Return the ends of a range. Raises ValueError."""
    low, dash, high = text.partition("-")
    if not (low.isdecimal() and (high.isdecimal() or not dash)):
        raise ValueError("must be a whole number, or two with a hyphen between them, such as 20-60")
    ends = int(low), int(high or low)
    if not 1 <= ends[0] <= ends[1]:
        raise ValueError("must begin with at least 1 and end with at least that")
    return ends


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """One entry of the catalog."""

    about: str
    """One line for `--help`."""
    make: Callable[..., Workload]
    """A dataclass or a loader; its parameters are the workload's flags, with their defaults."""
    preset: Mapping[str, Value] = field(default_factory=dict)
    """Defaults that differ from those of `make`."""
    prefix: str = ""
    """Prefix of the flag for each parameter, such as 'gsp_'."""

    flags: Mapping[str, Any] = field(init=False)
    """Names of the flags, with underscores, and their defaults; without `seed`, which all workloads have, and without
    the `constants` of `make`. The parameters `x_min` and `x_max` are one flag `x`, a range."""

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.make).parameters
        defaults = {name: self.preset.get(name, parameter.default) for name, parameter in parameters.items()}
        left_out = ("name", "seed", *getattr(self.make, "constants", ()))
        flags: dict[str, Any] = {}
        for name, default in defaults.items():
            if name.endswith("_min"):
                shared = name.removesuffix("_min")
                flags[shared] = range_text(default, defaults[f"{shared}_max"])
            elif name not in left_out and not name.endswith("_max"):
                flags[name if name.startswith("dataset_") else self.prefix + name] = default
        object.__setattr__(self, "flags", MappingProxyType(flags))

    @property
    def is_scalable(self) -> bool:
        """Return whether the working set can be sized."""
        return hasattr(self.make, "units")

    @property
    def reads_file(self) -> bool:
        """Return whether the workload needs `--dataset-path`."""
        return "dataset_path" in self.flags

    def build(self, name: str, seed: int, given: Mapping[str, Value]) -> Workload:
        """Return the workload built from the given flags. Raises DatasetError."""
        known = inspect.signature(self.make).parameters
        values: dict[str, Any] = dict(self.preset)
        for flag, value in given.items():
            if f"{flag}_min" in known:
                values[f"{flag}_min"], values[f"{flag}_max"] = range_of(str(value))
            else:
                values[flag if flag in known else flag.removeprefix(self.prefix)] = value
        if "dataset_path" in values:
            values["dataset_path"] = Path(values["dataset_path"])
        values |= {key: value for key, value in (("name", name), ("seed", seed)) if key in known}
        return self.make(**values)


CONTROLS: Mapping[str, WorkloadKind] = MappingProxyType(
    {
        "zero-sharing": WorkloadKind("control: nothing is shared, so routing by cache cannot help", Diverse),
        "one-hot-prefix": WorkloadKind(
            "control: one long prompt for all, so routing by prefix alone overloads a pod",
            Chat,
            {"tenants": 1, "system_tokens_min": 4000, "system_tokens_max": 4000, "turns_min": 1, "turns_max": 1},
        ),
        "short-prompts": WorkloadKind(
            "control: prompts of a few dozen tokens, too short for a cache to matter",
            Chat,
            {
                "system_tokens_min": 16,
                "system_tokens_max": 32,
                "question_tokens_min": 16,
                "question_tokens_max": 32,
                "turns_min": 1,
                "turns_max": 1,
            },
        ),
        "decode-heavy": WorkloadKind(
            "control: short prompts and long answers, so that prefill hardly counts",
            Chat,
            {
                "system_tokens_min": 200,
                "system_tokens_max": 300,
                "turns_min": 1,
                "turns_max": 1,
                "output_tokens": 1000,
            },
        ),
        "large-cache": WorkloadKind(
            "control: two small tenants, which every pod's cache soon holds, wherever requests go",
            Chat,
            {"tenants": 2, "system_tokens_min": 500, "system_tokens_max": 500, "turns_min": 1, "turns_max": 1},
        ),
    }
)
"""Negative controls: workloads for which routing by cache should gain nothing, or may lose."""

KINDS: Mapping[str, WorkloadKind] = MappingProxyType(
    {
        "shared-prompt": WorkloadKind(
            "one system prompt for all, a unique question each",
            Chat,
            {"tenants": 1, "zipf": 0.0, "turns_min": 1, "turns_max": 1},
        ),
        "tenants": WorkloadKind(
            "chats of several tenants with a system prompt each, some more popular (the demo's)", Chat
        ),
        "multi-turn": WorkloadKind(
            "long conversations that continue from real answers, under one short system prompt",
            Chat,
            {
                "tenants": 1,
                "system_tokens_min": 100,
                "system_tokens_max": 100,
                "question_tokens_min": 40,
                "question_tokens_max": 200,
                "turns_min": 5,
                "turns_max": 10,
                "output_tokens": 128,
            },
        ),
        "branching": WorkloadKind(
            "chats in which answers are regenerated and questions edited",
            Chat,
            {"turns_min": 3, "turns_max": 6, "regenerate_share": 0.2, "edit_share": 0.1},
        ),
        "agentic": WorkloadKind(
            "agents: 3k shared tokens, growing to 140k by results of tools that take seconds", Agentic
        ),
        "agentic-small": WorkloadKind(
            "the same for laptops: growing to about 3k tokens",
            Agentic,
            {
                "instruction_tokens": 600,
                "task_tokens": 60,
                "turns_min": 6,
                "turns_max": 18,
                "result_tokens": 160,
                "think_s": 1.0,
                "output_tokens": 24,
            },
        ),
        "rag": WorkloadKind("questions over documents of Zipf popularity, in a chosen order", Rag),
        "few-shot": WorkloadKind("a block of examples per template, a unique question each", FewShot),
        "code": WorkloadKind("completions in a growing file after a repository's shared context", CodeCompletion),
        "batch": WorkloadKind("jobs: the same instructions for every item", Batch),
        "diverse": WorkloadKind("unique prompts of mixed lengths, nothing shared", Diverse),
        "gsp": WorkloadKind("SGLang's generated-shared-prefix", GeneratedSharedPrefix, prefix="gsp_"),
        "prefix-repetition": WorkloadKind("vLLM's prefix_repetition", PrefixRepetition, prefix="prefix_repetition_"),
        "random": WorkloadKind("vLLM's random", RandomLengths, prefix="random_"),
        "sharegpt": WorkloadKind("a ShareGPT file: conversations with real answers", load_sharegpt),
        "custom": WorkloadKind("JSON lines with prompt or messages, and maybe output_tokens", load_custom),
        "mooncake": WorkloadKind("a Mooncake trace: lengths, times, 512-token blocks", load_mooncake),
        "bailian": WorkloadKind("a Qwen-Bailian trace: lengths, times, 16-token blocks", load_bailian),
        "burstgpt": WorkloadKind("a BurstGPT CSV: lengths and times, nothing shared", load_burstgpt),
        "azure": WorkloadKind("an Azure LLM inference CSV: lengths and times, nothing shared", load_azure),
        **CONTROLS,
    }
)
NAMES: Mapping[str, str] = MappingProxyType({name: kind.about for name, kind in KINDS.items()})
"""Each name with one line about it, as in `--help`."""
_ALIASES = MappingProxyType({"generated-shared-prefix": "gsp"})


def canonical_name(name: str) -> str:
    """Return the catalog's name for a name that another tool uses. Raises ValueError, which lists the known names."""
    dashed = name.replace("_", "-")
    dashed = _ALIASES.get(dashed, dashed)
    if dashed not in KINDS:
        raise ValueError(f"{name!r} is unknown; workloads are {', '.join(KINDS)}")
    return dashed


def kinds_with(flag: str) -> list[str]:
    """Return the names of the workloads that have this flag."""
    return [name for name, kind in KINDS.items() if flag in kind.flags]


def flag_help(flag: str, text: str) -> str:
    """Return a flag's text for `--help`, with the default of each workload that has the flag."""
    by_default: dict[Any, list[str]] = {}
    for name in kinds_with(flag):
        by_default.setdefault(KINDS[name].flags[flag], []).append(name)
    if list(by_default) == [inspect.Parameter.empty]:
        return f"{text} ({', '.join(kinds_with(flag))})"
    values = (f"{_shown(value)} ({', '.join(names)})" for value, names in by_default.items())
    return f"{text}; none: {', '.join(values)}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
