"""Workloads by name: their flags, and building the chosen one. A flag that the workload does not have is an error."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from engine.common.settings import Settings, group
from loadgen.workloads.base import Workload
from loadgen.workloads.kinds import CONTROLS, KINDS, NAMES, canonical_name, flag_help, kinds_with, range_of
from loadgen.workloads.rag import RagOrder
from loadgen.workloads.wrappers import Sized, with_pressure

__all__ = ["CONTROLS", "NAMES", "WorkloadSettings", "build_workload", "distinct_rounds"]

LARGEST = 100_000_000
"""Limit of any number that shapes a workload: a prompt with this many tokens is 400 MB."""


def workload_help() -> str:
    """Return the text of --workload: all names, then each with what it is."""
    return "; ".join([f"one of {', '.join(NAMES)}", *(f"{name}: {about}" for name, about in NAMES.items())])


def _checked_range(text: str) -> str:
    _, high = range_of(text)
    if high > LARGEST:
        raise ValueError(f"{high} is above {LARGEST:,}")
    return text


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Range = Annotated[str, BeforeValidator(_as_text), AfterValidator(_checked_range)]
"""Whole numbers from the first to the second, such as 20-60; one number alone is both."""


def _flag(name: str, text: str, **limits: Any) -> Any:
    return Field(None, description=flag_help(name, text), **limits)


@group("What is sent", common=("workload", "dataset_path", "seed"))
class WorkloadSettings(Settings):
    """What the requests contain. The same settings and seed give the same sessions in every process."""

    workload: str = Field("tenants", description=workload_help())
    seed: int = Field(1, description="decides prompts and schedule; the same seed sends the same")
    cache_pressure: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="working set / --cluster-kv-tokens: decides how many tenants, documents, ...; none: as given",
    )
    cluster_kv_tokens: int | None = Field(
        None, ge=1, description="KV capacity of all pods in tokens, for --cache-pressure"
    )

    tenants: int | None = _flag("tenants", "system prompts", ge=1, le=100_000)
    zipf: float | None = _flag("zipf", "item i has popularity i ** -zipf; 0: all alike", ge=0, le=5)
    system_tokens: Range | None = _flag("system_tokens", "shortest and longest system prompt, tokens")
    question_tokens: Range | None = _flag("question_tokens", "shortest and longest user turn, tokens")
    prompt_tokens: Range | None = _flag("prompt_tokens", "shortest and longest unique prompt, tokens")
    turns: Range | None = _flag("turns", "fewest and most turns of a session")
    think_s: float | None = _flag(
        "think_s", "mean seconds between an answer and the next turn, as while a tool runs", ge=0
    )
    output_tokens: int | None = _flag("output_tokens", "length of the requested answer, tokens", ge=1)
    regenerate_share: float | None = _flag("regenerate_share", "probability that an answer is regenerated", ge=0, le=1)
    edit_share: float | None = _flag("edit_share", "probability that a question is edited", ge=0, le=1)
    result_tokens: int | None = _flag("result_tokens", "mean length of a tool's result, tokens", ge=1)

    documents: int | None = _flag("documents", "number of documents", ge=1, le=100_000)
    document_tokens: int | None = _flag("document_tokens", "size of a document, tokens", ge=1)
    documents_per_question: int | None = _flag("documents_per_question", "documents in a prompt", ge=1, le=1000)
    rag_order: RagOrder | None = _flag(
        "rag_order", "documents of a prompt: as a fixed list, shuffled, or sorted by number"
    )
    instruction_tokens: int | None = _flag("instruction_tokens", "instructions that all requests share, tokens", ge=1)
    templates: int | None = _flag("templates", "blocks of examples", ge=1, le=100_000)
    examples: int | None = _flag("examples", "examples in a block", ge=1, le=1000)
    batch_size: int | None = _flag("batch_size", "items of a job", ge=1)
    repositories: int | None = _flag("repositories", "repositories with a context each", ge=1, le=100_000)
    repository_tokens: int | None = _flag("repository_tokens", "context of a repository, tokens", ge=1)

    gsp_num_groups: int | None = _flag("gsp_num_groups", "system prompts", ge=1)
    gsp_prompts_per_group: int | None = _flag("gsp_prompts_per_group", "prompts per group", ge=1)
    gsp_system_prompt_len: int | None = _flag("gsp_system_prompt_len", "system prompt, tokens", ge=1)
    gsp_question_len: int | None = _flag("gsp_question_len", "question, tokens", ge=1)
    gsp_output_len: int | None = _flag("gsp_output_len", "answer, tokens", ge=1)
    prefix_repetition_prefix_len: int | None = _flag("prefix_repetition_prefix_len", "prefix, tokens", ge=1)
    prefix_repetition_suffix_len: int | None = _flag("prefix_repetition_suffix_len", "unique suffix, tokens", ge=1)
    prefix_repetition_num_prefixes: int | None = _flag("prefix_repetition_num_prefixes", "prefixes", ge=1)
    prefix_repetition_output_len: int | None = _flag("prefix_repetition_output_len", "answer, tokens", ge=1)
    random_input_len: int | None = _flag("random_input_len", "unique part of the prompt, tokens", ge=1)
    random_output_len: int | None = _flag("random_output_len", "answer, tokens", ge=1)
    random_range_ratio: float | None = _flag(
        "random_range_ratio", "r: lengths are uniform in [len (1 - r), len (1 + r)]", ge=0, lt=1
    )
    random_prefix_len: int | None = _flag("random_prefix_len", "prefix shared by all, tokens", ge=0)

    dataset_path: str | None = _flag("dataset_path", "file to read, plain or gzipped")
    sharegpt_output_len: int | None = _flag("sharegpt_output_len", "length of answers, tokens; 0: as recorded", ge=0)
    jitter_bucket: bool | None = _flag("jitter_bucket", "spread requests with equal times up to the next time")
    speedup: float | None = _flag("speedup", "factor by which the trace is played faster", gt=0)

    @field_validator("workload")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return canonical_name(name)

    @model_validator(mode="after")
    def _check_workload(self) -> Self:
        self._check_foreign()
        self._check_ranges()
        self._check_pressure()
        if KINDS[self.workload].reads_file and self.dataset_path is None:
            raise ValueError(f"--workload {self.workload} needs --dataset-path FILE")
        return self

    def shape(self) -> dict[str, Any]:
        """Return the workload's flags that were given, by name."""
        return {name: value for name in KINDS[self.workload].flags if (value := getattr(self, name)) is not None}

    def _check_foreign(self) -> None:
        own = KINDS[self.workload].flags
        for name in sorted(self.model_fields_set):
            others = kinds_with(name)
            if others and name not in own and getattr(self, name) is not None:
                raise ValueError(f"{_dashed(name)} is a flag of {', '.join(others)}, not of --workload {self.workload}")

    def _check_ranges(self) -> None:
        for name, value in self.shape().items():
            if isinstance(value, int | float) and not value <= LARGEST:
                raise ValueError(f"{_dashed(name)} {value:g} is above {LARGEST:,}")
        values = {**KINDS[self.workload].flags, **self.shape()}
        if values.get("regenerate_share", 0) + values.get("edit_share", 0) > 1:
            raise ValueError("--regenerate-share and --edit-share together are above 1")

    def _check_pressure(self) -> None:
        if (self.cache_pressure is None) != (self.cluster_kv_tokens is None):
            raise ValueError("--cache-pressure and --cluster-kv-tokens go together: give both or none")
        if self.cache_pressure is None:
            return
        kind = KINDS[self.workload]
        if not kind.is_scalable:
            able = ", ".join(name for name, other in KINDS.items() if other.is_scalable)
            raise ValueError(f"--cache-pressure cannot size --workload {self.workload}; it can size {able}")
        units = kind.prefix + getattr(kind.make, "units", "")
        if getattr(self, units) is not None:
            raise ValueError(f"--cache-pressure decides {_dashed(units)}: give one of them")


def build_workload(settings: WorkloadSettings) -> Workload:
    """Return the workload that the settings describe. Raises DatasetError if a file cannot be used."""
    workload: Any = KINDS[settings.workload].build(settings.workload, settings.seed, settings.shape())
    if settings.cache_pressure is not None and settings.cluster_kv_tokens is not None:
        sized = with_pressure(workload, settings.cache_pressure, settings.cluster_kv_tokens)
        workload = Sized(sized, settings.cluster_kv_tokens)
    built: Workload = workload
    return built


def distinct_rounds(settings: WorkloadSettings, workload: Workload, sessions: int) -> int | None:
    """Return how many rounds of `sessions` (0: all) a data set has without repeats; None: no data set."""
    if not KINDS[settings.workload].reads_file:
        return None
    assert workload.length is not None
    return max(1, workload.length // (sessions or workload.length))


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"
