"""Chooses the next token of each sequence of a step.

Order of operations, as in vLLM's V1 sampler: logit_bias, repetition penalty, frequency and presence penalty, the
constraint's mask, temperature, min_p, top_k, top_p; then one draw. (transformers applies min_p after top_p; if both are
set, the sets can differ.) Ties are broken by token id, lowest first, so exactly `top_k` tokens stay, and top_k=1 is
greedy.

Randomness: the n-th output token of a request is the inverse of the cumulative distribution at a uniform number hashed
from (seed, n). No generator has state, so neither batch, nor order, nor preemption can change it.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from engine.sched.plan import SampledToken
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams

_UNIFORM_BITS = 48
"""Few enough that the largest uniform times a float64 sum stays below the sum after rounding."""


def sample(logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
    """logits [R, vocab] float32, row i for requests[i] -> the next token of each. `logits` is not changed."""
    params = [request.sampling for request in requests]
    followed, masks = masks_of(requests, [len(request.output_tokens) for request in requests])
    adjusted = _adjust(logits, requests)
    if followed:
        places = torch.tensor(followed, device=logits.device)
        adjusted = masked(adjusted, places, torch.from_numpy(masks).to(logits.device))
    tokens = _argmax(adjusted)
    drawn = [i for i, p in enumerate(params) if p.draws]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        uniforms = [uniform(params[i].seed, len(requests[i].output_tokens)) for i in drawn]
        tokens[rows] = _draw(adjusted[rows], [params[i] for i in drawn], uniforms)
    chosen = tokens.tolist()
    reports = _logprobs(logits, tokens, params)
    return [SampledToken(token, *reports.get(i, ())) for i, token in enumerate(chosen)]


def masks_of(requests: Sequence[Request], indices: Sequence[int]) -> tuple[list[int], NDArray[np.int32]]:
    """Wait for the masks of these requests' next tokens, at these output indices.

    Return the rows that have one, and the masks, [rows, words] (`TokenMasks.mask`).
    """
    found = [
        (row, mask)
        for row, (request, index) in enumerate(zip(requests, indices, strict=True))
        if request.masks is not None and (mask := request.masks.mask(index)) is not None
    ]
    return [row for row, _ in found], np.stack([mask for _, mask in found]) if found else np.empty((0, 0), np.int32)


def masked(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """logits [R, vocab], rows int64 [n], masks int32 [n, words] -> logits with -inf for tokens that a mask excludes."""
    if masks.device.type == "cpu":  # numpy does it 10 times as fast
        bits = torch.from_numpy(np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little"))
    else:
        bits = bits_of(masks)
    allowed = bits[:, : logits.shape[1]] != 0
    out = logits.clone()
    out[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return out


def bits_of(words: Tensor) -> Tensor:
    """words int32 [n, w] -> their bits, lowest first, int32 [n, 32 w]."""
    return ((words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1).flatten(1)


def _argmax(logits: Tensor) -> Tensor:
    """Return the most probable token of each row, the lowest id in a tie. On the CPU numpy finds it, 8 times as fast as
    torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def uniform(seed: int, index: int) -> float:
    """Return a number in (0, 1), a fixed function of the request's seed and the output token's index."""
    digest = xxh3_64_intdigest(struct.pack("<QQ", seed % 2**64, index))
    return float(((digest >> (64 - _UNIFORM_BITS)) + 0.5) / 2**_UNIFORM_BITS)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """logits [R, vocab] after bias and penalties -> the probabilities of the draw: float32 [R, vocab], filtered and
    renormalised.

    All rows must draw.
    """
    temperature = _column(logits, [p.temperature for p in params])
    # The largest logit becomes 0 first: dividing by a tiny temperature then gives -inf, never inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    filtered = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if filtered:
        rows = torch.tensor(filtered, device=logits.device)
        scaled[rows] = _filter(scaled[rows], [params[i] for i in filtered])
    return scaled.softmax(dim=-1)


def _draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Return a token for each row, [R]: the first whose cumulative probability exceeds the row's uniform."""
    cumulative = probabilities(logits, params).to(torch.float64).cumsum(dim=-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_max_(logits.shape[1] - 1)


def _filter(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """scaled [R, vocab], maximum 0 -> the same with -inf for tokens that min_p, top_k or top_p exclude."""
    min_p = _column(scaled, [p.min_p for p in params])
    scaled = scaled.masked_fill(scaled < min_p.log(), -torch.inf)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = _column(scaled, [p.top_k or scaled.shape[1] for p in params])
    ordered.masked_fill_(torch.arange(scaled.shape[1], device=scaled.device) >= top_k, -torch.inf)
    chances = ordered.softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    top_p = _column(scaled, [p.top_p if p.top_p < 1 else torch.inf for p in params])
    before[:, 0] = -torch.inf  # the most probable token stays for any top_p
    ordered.masked_fill_(before >= top_p, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, ids, ordered)


@dataclass(slots=True)
class LogitEdits:
    """Changes of logits of one kind at distinct coordinates, so that each kind is one operation for the whole batch."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def extend(self, row: int, tokens: Sequence[int], values: Sequence[float]) -> None:
        """Change these tokens' logits of a row."""
        self.rows += [row] * len(tokens)
        self.tokens += tokens
        self.values += values

    def at(self, logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the changed places, as an index into `logits`, and the values."""
        device = logits.device
        index = (torch.tensor(self.rows, device=device), torch.tensor(self.tokens, device=device))
        return index, torch.tensor(self.values, dtype=logits.dtype, device=device)


def logit_edits(
    requests: Sequence[Request], outputs: Sequence[Sequence[int]], vocab_size: int
) -> tuple[LogitEdits, LogitEdits, LogitEdits]:
    """Return the bias to add, the repetition penalties to scale by, and the frequency and presence penalties to
    subtract.

    Row i is for requests[i] with the output tokens outputs[i]. Biased ids outside the vocabulary are left out. Before
    `min_tokens` the bias of stop tokens is -infinity; masks have that rule in themselves.
    """
    bias, repetition, subtract = LogitEdits(), LogitEdits(), LogitEdits()
    for row, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        p = request.sampling
        biased = dict(p.logit_bias)
        if len(output) < p.min_tokens and request.masks is None:
            biased |= dict.fromkeys(request.stop_token_ids, -math.inf)
        if biased:
            inside = {token: value for token, value in biased.items() if 0 <= token < vocab_size}
            bias.extend(row, list(inside), list(inside.values()))
        if p.repetition_penalty != 1:
            seen = list({*request.prompt_tokens, *output})
            repetition.extend(row, seen, [p.repetition_penalty] * len(seen))
        if p.presence_penalty or p.frequency_penalty:
            counts = Counter(output)
            costs = [p.presence_penalty + p.frequency_penalty * count for count in counts.values()]
            subtract.extend(row, list(counts), costs)
    return bias, repetition, subtract


def _adjust(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Return logits with bias and penalties; `logits` itself if no request has any."""
    outputs = [request.output_tokens for request in requests]
    bias, repetition, subtract = logit_edits(requests, outputs, logits.shape[1])
    if not (bias.rows or repetition.rows or subtract.rows):
        return logits
    logits = logits.clone()
    if bias.rows:
        index, values = bias.at(logits)
        logits[index] += values
    if repetition.rows:
        index, values = repetition.at(logits)
        old = logits[index]
        logits[index] = torch.where(old > 0, old / values, old * values)
    if subtract.rows:
        index, values = subtract.at(logits)
        logits[index] -= values
    return logits


Report = tuple[float, tuple[tuple[int, float], ...]]


def _logprobs(logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> dict[int, Report]:
    """Return row -> (log-probability of the chosen token, alternatives) in the model's own distribution, for the rows
    that ask for it."""
    wanted = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    if not wanted:
        return {}
    rows = torch.tensor(list(wanted), device=logits.device)
    logprobs = logits[rows].log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[rows][:, None]).squeeze(1).tolist()
    best, ids = logprobs.topk(min(max(wanted.values()), logits.shape[1]), dim=-1)
    tops = [list(zip(i, b, strict=True)) for i, b in zip(ids.tolist(), best.tolist(), strict=True)]
    return {
        row: (logprob, tuple(top[:count])) for (row, count), logprob, top in zip(wanted.items(), own, tops, strict=True)
    }


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
