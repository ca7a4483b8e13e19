"""Chooses tokens on the device as `engine.backend.sampler` does, without waiting for the device.

The host lays out each row's sampling parameters; the step's one copy brings them to the device. Draws need no random
numbers from the device: a row's uniform is hashed on the host from its seed and index. The host knows all parameters,
so no size depends on a value on the device.

A row that keeps at most `NARROW` tokens by top_k is cut without sorting the vocabulary; top_p alone needs it sorted.
If a cumulative probability lies within rounding of top_p or of the uniform, this code may choose a neighbour of the
reference's token, because it sums in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backend.cuda.packing import Array
from engine.backend.sampler import LogitEdits, logit_edits, masked, uniform
from engine.sched.plan import SampledToken, SequenceChunk

NARROW = 256
"""Largest top_k that is found by selection. It is fixed, so that a row's bits do not depend on other rows."""


@dataclass(frozen=True, slots=True)
class HostSampling:
    """The sampling parameters of a step's rows, on the host."""

    arrays: tuple[Array, ...]
    """The arrays that `choose` needs on the device."""
    rows: int
    drawn: int
    """Rows that draw; the others take the most probable token."""
    narrow: int
    """Drawn rows that keep at most NARROW tokens."""
    sorted: int
    """Drawn rows that need the vocabulary sorted."""
    edits: tuple[int, int, int]
    """Numbers of logits changed by bias, repetition penalty, frequency and presence penalty."""
    reported: int
    """Rows that report log-probabilities."""
    tops: int
    """The most alternatives that a row reports."""

    @staticmethod
    def of(chunks: Sequence[SequenceChunk], vocab_size: int) -> HostSampling:
        """Return the parameters for logits [len(chunks), vocab_size], row i for chunks[i]."""
        params = [chunk.request.sampling for chunk in chunks]
        drawn = [i for i, p in enumerate(params) if p.draws]
        asked = [params[i] for i in drawn]
        narrow = [j for j, p in enumerate(asked) if 0 < p.top_k <= NARROW]
        wide = [j for j, p in enumerate(asked) if not 0 < p.top_k <= NARROW and (p.top_k or p.top_p < 1)]
        edits = _edits(chunks, vocab_size)
        reported = [i for i, p in enumerate(params) if p.logprobs is not None]
        return HostSampling(
            arrays=(
                np.array(drawn, dtype=np.int64),
                np.array([uniform(params[i].seed, chunks[i].output_index) for i in drawn], dtype=np.float64),
                np.array([p.temperature for p in asked], dtype=np.float32),
                np.array([p.min_p for p in asked], dtype=np.float32),
                np.array([p.top_k or vocab_size for p in asked], dtype=np.int64),
                np.array([p.top_p if p.top_p < 1 else np.inf for p in asked], dtype=np.float32),
                np.array(narrow, dtype=np.int64),
                np.array(wide, dtype=np.int64),
                *(array for edit in edits for array in _arrays(edit)),
                np.array(reported, dtype=np.int64),
            ),
            rows=len(chunks),
            drawn=len(drawn),
            narrow=len(narrow),
            sorted=len(wide),
            edits=(len(edits[0].rows), len(edits[1].rows), len(edits[2].rows)),
            reported=len(reported),
            tops=min(max((p.logprobs or 0 for p in params), default=0), vocab_size),
        )

    def choose(self, logits: Tensor, views: Sequence[Tensor], masks: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """logits float32 [rows, vocab], `arrays` on the device -> (tokens int64 [rows], results as int32 for `read`).

        `masks`: rows and masks as for `masked`, if any row has one. `logits` is not changed.
        """
        drawn, uniforms, temperature, min_p, top_k, top_p, narrow, wide, *edits, reported = views
        adjusted = self._adjusted(logits, edits)
        if masks:
            adjusted = masked(adjusted, *masks)
        tokens = adjusted.argmax(dim=-1)
        if self.drawn:
            scaled = adjusted if self.drawn == self.rows else adjusted[drawn]
            # The largest logit becomes 0 first: dividing by a tiny temperature then gives -inf, never inf.
            scaled = (scaled - scaled.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
            scaled.masked_fill_(scaled < min_p.log()[:, None], -torch.inf)
            if self.narrow:
                scaled[narrow] = _cut_narrow(scaled[narrow], top_k[narrow, None], top_p[narrow, None])
            if self.sorted:
                scaled[wide] = _cut_sorted(scaled[wide], top_k[wide, None], top_p[wide, None])
            tokens[drawn] = _draw(scaled, uniforms)
        results = [tokens.to(torch.int32)]
        if self.reported:
            logprobs = logits[reported].log_softmax(dim=-1)
            best, ids = logprobs.topk(self.tops, dim=-1)
            own = logprobs.gather(1, tokens[reported][:, None])
            results += [own.flatten().view(torch.int32), best.flatten().view(torch.int32)]
            results.append(ids.flatten().to(torch.int32))
        return tokens, torch.cat(results) if len(results) > 1 else results[0]

    def read(self, results: NDArray[np.int32], chunks: Sequence[SequenceChunk]) -> list[SampledToken]:
        """Return the tokens from the results of `choose`, back on the host, for the chunks given to `of`."""
        tokens = results[: self.rows].tolist()
        if not self.reported:
            return [SampledToken(token) for token in tokens]
        count, tops = self.reported, self.reported * self.tops
        own, best, ids = np.split(results[self.rows :], (count, count + tops))
        chances = best.view(np.float32).reshape(count, self.tops).tolist()
        reports = zip(own.view(np.float32).tolist(), ids.reshape(count, self.tops).tolist(), chances, strict=True)
        chosen = []
        for token, chunk in zip(tokens, chunks, strict=True):
            asked = chunk.request.sampling.logprobs
            if asked is None:
                chosen.append(SampledToken(token))
            else:
                logprob, others, theirs = next(reports)
                chosen.append(SampledToken(token, logprob, tuple(zip(others, theirs, strict=True))[:asked]))
        return chosen

    def _adjusted(self, logits: Tensor, edits: Sequence[Tensor]) -> Tensor:
        """Apply bias and penalties in the reference's order. The coordinates of an edit are distinct."""
        if not any(self.edits):
            return logits
        logits = logits.clone()
        for kind, count in enumerate(self.edits):
            if count:
                rows, tokens, values = edits[3 * kind : 3 * kind + 3]
                old = logits[rows, tokens]
                if kind == 1:
                    new = torch.where(old > 0, old / values, old * values)
                else:
                    new = old + values if kind == 0 else old - values
                logits[rows, tokens] = new
        return logits


def _cut_narrow(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """scaled [n, vocab], top_k and top_p [n, 1] -> scaled with -inf for excluded tokens; top_k at most NARROW."""
    kept = min(NARROW, scaled.shape[1])
    # `topk` may take any of equal logits. So it only finds the least kept logit, and ids decide among equals.
    least = scaled.topk(kept, dim=-1).values.gather(1, top_k.clamp(max=kept) - 1)
    above, equal = scaled > least, scaled == least
    room = top_k - above.sum(dim=-1, keepdim=True)
    cut = scaled.masked_fill(~(above | (equal & (equal.cumsum(dim=-1) <= room))), -torch.inf)
    ids = cut.topk(kept, dim=-1).indices.sort(dim=-1).values
    ordered, order = cut.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return torch.full_like(scaled, -torch.inf).scatter_(1, ids.gather(1, order), _nucleus(ordered, top_p))


def _cut_sorted(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Do the same as `_cut_narrow`, for any top_k."""
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    ordered.masked_fill_(torch.arange(scaled.shape[1], device=scaled.device) >= top_k, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, ids, _nucleus(ordered, top_p))


def _nucleus(ordered: Tensor, top_p: Tensor) -> Tensor:
    """ordered [n, k], most probable first -> the same with -inf after the first tokens that reach top_p [n, 1]."""
    chances = ordered.softmax(dim=-1)
    # In float64, because on a card the order of a cumulative sum depends on the number of rows.
    before = chances.cumsum(dim=-1, dtype=torch.float64) - chances
    before[:, 0] = -torch.inf  # the most probable token stays for any top_p
    return ordered.masked_fill_(before >= top_p, -torch.inf)


def _draw(scaled: Tensor, uniforms: Tensor) -> Tensor:
    """scaled [n, vocab], uniforms float64 [n] -> first token whose cumulative probability exceeds the uniform, [n]."""
    cumulative = scaled.softmax(dim=-1).to(torch.float64).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_max_(scaled.shape[1] - 1)


def _edits(chunks: Sequence[SequenceChunk], vocab_size: int) -> tuple[LogitEdits, LogitEdits, LogitEdits]:
    """See `logit_edits`. A request whose penalties read its output is never planned ahead, so its output is known."""
    requests = [chunk.request for chunk in chunks]
    outputs = [c.request.output_tokens[: c.output_index] if c.request.sampling.reads_output else () for c in chunks]
    return logit_edits(requests, outputs, vocab_size)


def _arrays(edits: LogitEdits) -> tuple[Array, Array, Array]:
    """Return rows, tokens, values."""
    return (
        np.array(edits.rows, dtype=np.int64),
        np.array(edits.tokens, dtype=np.int64),
        np.array(edits.values, dtype=np.float32),
    )
