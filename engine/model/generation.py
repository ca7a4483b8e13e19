"""Reads from a checkpoint's `generation_config.json` the sampling that its authors advise.

The keys are those of transformers' GenerationConfig. Those that vLLM applies by default are applied here
(vllm/config/model.py, `get_diff_sampling_param`); `max_new_tokens` limits every answer, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model.fields import Fields, read_fields

GENERATION_FILE = "generation_config.json"
_RANGES = {
    "temperature": (0, 2),
    "top_p": (1e-9, 1),
    "top_k": (-1, 2**31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
}
"""The ranges of the API's fields."""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "assistant_confidence_threshold": (),
    "diversity_penalty": (0,),
    "do_sample": (True,),
    "early_stopping": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "length_penalty": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_assistant_tokens": (),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1,),
}
"""Keys with the values that change no answer; length_penalty and early_stopping act only on beams."""
_HARMLESS = frozenset(
    {
        "_from_model_config",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "decoder_start_token_id",
        "disable_compile",
        "eos_token_id",
        "max_length",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prompt_lookup_num_tokens",
        "return_dict_in_generate",
        "return_legacy_cache",
        "target_lookbehind",
        "transformers_version",
        "trust_remote_code",
        "use_cache",
    }
)
"""Keys that have no effect here: forms of results, other ways to compute the same answer, ids that `ModelConfig` and
the tokenizer read. vLLM leaves `max_length` out too: the context limits an answer."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampling in `generation_config.json`. None: not given."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    """Values of the API's fields `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`, for requests that
    do not give them."""
    max_new_tokens: int | None = None
    """Most tokens of any answer."""
    unread: Mapping[str, Any] = field(default_factory=dict)
    """Entries that are not used although they might change an answer."""

    @property
    def defaults(self) -> str:
        """What requests get from the file, in words; empty if nothing."""
        said = [f"{name} is {value:g} where a request gives none" for name, value in self.sampling.items()]
        if self.max_new_tokens is not None:
            said.append(f"answers end after {self.max_new_tokens} tokens")
        return ", ".join(said)

    @staticmethod
    def from_path(folder: Path) -> Generation:
        """Return the content of the checkpoint's file; nothing if it has none. Raises ModelError naming the field."""
        path = folder / GENERATION_FILE
        return Generation.parse(read_fields(path)) if path.exists() else Generation()

    @staticmethod
    def parse(fields: Fields) -> Generation:
        """Return the content. Raises ModelError naming the field."""
        sampling = {name: fields.number(name, *limits) for name, limits in _RANGES.items()}
        longest = fields.get("max_new_tokens")
        unread = fields.unread()
        if fields.content.get("do_sample") is False and sampling["temperature"] != 0:
            unread["do_sample"] = False  # transformers takes the most probable token, vLLM draws
        return Generation(
            {name: value for name, value in sampling.items() if value is not None},
            None if longest is None else fields.positive_int("max_new_tokens"),
            {name: value for name, value in unread.items() if name not in _HARMLESS and not _is_neutral(name, value)},
        )


def _is_neutral(name: str, value: object) -> bool:
    """Return whether the value changes no answer."""
    if name not in _WITHOUT_EFFECT:
        return False
    neutral = _WITHOUT_EFFECT[name]
    return not neutral or value in neutral
