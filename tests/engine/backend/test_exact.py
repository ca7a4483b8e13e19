"""`exact`: a request's logits are equal bit for bit with any cache, any cut of its prompt, and any other requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backend import torch_exact
from engine.backend.torch_backend import TorchBackend
from engine.backend.torch_exact import KEYS
from engine.cache.index import IndexKind
from engine.model.config import ARCHITECTURES
from engine.model.decoder import Decoder, load_decoder
from engine.model.exact import HEIGHTS, NotExact, agreeing_classes, agreeing_heights, cancelling, check_exp
from engine.sched.request import Request
from tests.engine.backend.exact_serving import BLOCK_SIZE, Answer, empty, serve
from tests.engine.model.helpers import GREEDY, VOCAB, hf_model, save, tokens
from tests.engine.model.test_transformers_oracle import CASES

OUTPUTS = 3


def request(number: int, prompt: list[int], outputs: int = OUTPUTS, salt: str = "") -> Request:
    return Request(number, prompt, outputs, GREEDY, salt=salt)


def beside(count: int) -> list[Request]:
    """Return requests to run in the same batch, each of another length."""
    return [request(100 + i, tokens(5 + 9 * i, seed=50 + i), OUTPUTS + i) for i in range(count)]


def loaded(kind: str, folder: Path, dtype: str = "float32", **config: Any) -> Decoder:
    return load_decoder(save(hf_model(kind, **config), folder), dtype=dtype)


@pytest.mark.parametrize("case", CASES)
def test_warm_at_every_split_and_in_any_batch_is_cold_alone(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    backend = TorchBackend(loaded(kind, tmp_path, **config), block_count=80, block_size=BLOCK_SIZE, exact=True)
    prompt = tokens(22, seed=1)
    (cold,) = serve(backend, empty(backend), [request(1, prompt)], 64)
    for split in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE):
        cache = empty(backend)
        serve(backend, cache, [request(2, [*prompt[:split], *tokens(split % 3 + 1, seed=2)])], 64)
        warm, *_ = serve(backend, cache, [request(1, prompt), *beside(split % 3)], (64, 7, 11)[split % 3 - 1] + 8)
        assert warm.cached_tokens == split > 0
        assert torch.equal(warm.bits(), cold.bits()), split


def test_the_cases_are_of_every_architecture() -> None:
    assert {f"{kind}ForCausalLM" for kind, _ in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("bfloat16", 150), ("float16", None)])
def test_prompts_of_several_tiles(dtype: str, window: int | None, tmp_path: Path) -> None:
    """Chunks and hits end next to edges of tiles and blocks. Decoding crosses an edge, and its blocks are reused."""
    model = loaded("Mistral", tmp_path, dtype, sliding_window=window, max_position_embeddings=512)
    backend = TorchBackend(model, block_count=400, block_size=BLOCK_SIZE, exact=True)
    prompt = tokens(2 * KEYS + 40, seed=3)
    (cold,) = serve(backend, empty(backend), [request(1, prompt)], 512)
    for cached, step_tokens in ((KEYS - BLOCK_SIZE, 33), (KEYS, 512), (KEYS + BLOCK_SIZE, 97), (2 * KEYS + 36, 20)):
        cache = empty(backend)
        serve(backend, cache, [request(2, [*prompt[:cached], 5])], 512)
        warm, *_ = serve(backend, cache, [request(1, prompt), *beside(2)], step_tokens)
        assert warm.cached_tokens == cached
        assert torch.equal(warm.bits(), cold.bits())
    asked = prompt[: KEYS - 3]
    cache = empty(backend)
    first = request(1, asked, 8)
    serve(backend, cache, [first, *beside(1)], 512)
    turn = [*asked, *first.output_tokens, *tokens(9, seed=4)]
    warm, *_ = serve(backend, cache, [request(2, turn)], 512)
    (cold,) = serve(backend, empty(backend), [request(2, turn)], 512)
    assert warm.cached_tokens >= KEYS, "blocks that decode steps have written are among those reused"
    assert torch.equal(warm.bits(), cold.bits())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    """All six query heads share one KV head. So a decode multiplies six rows, more than the least of `HEIGHTS`."""
    model = loaded("Qwen3", tmp_path_factory.mktemp("wide"), head_dim=16, num_key_value_heads=1)
    return TorchBackend(model, block_count=200, block_size=BLOCK_SIZE, exact=True)


@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    shared=st.integers(0, 40),
    step_tokens=st.integers(8, 90),
)
def test_no_batch_changes_a_request(wide: TorchBackend, lengths: list[int], shared: int, step_tokens: int) -> None:
    """Prompts with a common prefix run in steps of any size: each gets the same logits as when it runs alone."""
    common = tokens(shared, seed=9)
    prompts = [[*common, *tokens(length, seed=20 + i)] for i, length in enumerate(lengths)]
    together = serve(wide, empty(wide), [request(i, p) for i, p in enumerate(prompts)], step_tokens)
    for i, prompt in enumerate(prompts):
        (alone,) = serve(wide, empty(wide), [request(i, prompt)], 128)
        assert torch.equal(together[i].bits(), alone.bits())


@pytest.mark.parametrize("split", range(BLOCK_SIZE, 3 * BLOCK_SIZE + 2))
def test_a_hit_that_ends_within_a_block_changes_no_bit(wide: TorchBackend, split: int) -> None:
    """The radix index reuses the first rows of a block by copying them."""
    prompt = tokens(3 * BLOCK_SIZE + 2, seed=31)
    (cold,) = serve(wide, empty(wide), [request(1, prompt)], 64)
    cache = empty(wide, IndexKind.RADIX)
    serve(wide, cache, [request(2, [*prompt[:split], (prompt[split] + 1) % VOCAB, 3, 3])], 64)
    warm, *_ = serve(wide, cache, [request(1, prompt), *beside(split % 3)], 19)
    assert warm.cached_tokens == split > 0
    assert torch.equal(warm.bits(), cold.bits())


def test_equal_prompts_of_two_salts_share_nothing(wide: TorchBackend) -> None:
    for index in (IndexKind.HASH, IndexKind.RADIX):
        cache, prompt = empty(wide, index), tokens(30, seed=8)
        for salt, cached in (
            ("red", False),
            ("blue", False),
            ("", False),
            ("red", True),
            ("blue", True),
            ("re", False),
        ):
            (answer,) = serve(wide, cache, [request(1, prompt, salt=salt)], 64)
            assert (answer.cached_tokens > 0) == cached, (index, salt)


BOUND = 1e-5
"""Without `exact`, greedy tokens may differ if the two best logits are closer than this share of the largest logit."""


def with_near_logits(folder: Path) -> TorchBackend:
    """Return a backend without `exact`. Half of the vocabulary is nearly equal to the other half, so that there are
    gaps on both sides of the bound."""
    theirs = hf_model("Llama")
    with torch.no_grad():
        head = theirs.lm_head.weight
        factor = 1 + torch.logspace(-9, -2, len(head[1::2]))[:, None]
        head[1::2] = head[0:-1:2] * factor
    return TorchBackend(load_decoder(save(theirs, folder)), block_count=80, block_size=BLOCK_SIZE)


def near_and_far(warm: Answer, cold: Answer) -> tuple[int, int]:
    """Count positions up to the first greedy token that differs: those whose two best logits are closer than the bound,
    and the others. Fails if the position that differs is not close."""
    near = far = 0
    for ours, theirs in zip(warm.logits, cold.logits, strict=True):
        best, second = theirs.topk(2).values.tolist()
        is_near = best - second < BOUND * float(theirs.abs().max())
        near, far = near + is_near, far + (not is_near)
        if int(ours.argmax()) != int(theirs.argmax()):
            assert is_near, (best, second)
            break  # after this token the two texts differ
    return near, far


def test_if_exact_is_off_greedy_tokens_differ_only_at_near_logits(tmp_path: Path) -> None:
    backend = with_near_logits(tmp_path)
    seen = []
    for seed in range(6):
        prompt = tokens(22, seed=seed)
        (cold,) = serve(backend, empty(backend), [request(1, prompt)], 64)
        for split in (4, 12, 20):
            cache = empty(backend)
            serve(backend, cache, [request(2, [*prompt[:split], 1])], 64)
            warm, *_ = serve(backend, cache, [request(1, prompt), *beside(2)], 23)
            assert warm.cached_tokens == split
            seen.append(near_and_far(warm, cold))
    near, far = map(sum, zip(*seen, strict=True))
    assert near, "no gap is under the bound, so the bound is not tested"
    assert far


def in_order(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute rows @ w, term after term."""
    total = torch.zeros(len(rows), w.shape[1])
    for column, weights in zip(rows.t(), w, strict=True):
        total = total + column[:, None] * weights
    return total


@pytest.mark.parametrize("terms", [7, 48, 128, 1000])
def test_the_trial_sum_cancels_up_to_rounding(terms: int) -> None:
    x, w = cancelling(terms, 40, torch.float32)
    exactly = x.double() @ w.double()
    assert float(exactly.abs().max()) < 1e-12
    differs = in_order(x[None], w) != in_order(x.flip(0)[None], w.flip(0))
    assert differs.float().mean() > 0.3, "a sum in another order has other bits"


def test_heights_that_sum_in_another_order_are_left_out() -> None:
    x, w = cancelling(64, 8, torch.float32)

    def one_order(rows: torch.Tensor) -> torch.Tensor:
        return in_order(rows, w)

    def other(rows: torch.Tensor) -> torch.Tensor:
        return in_order(rows.flip(1), w.flip(0))

    heights = (4, 8, 16)
    assert agreeing_heights(one_order, x, heights) == heights
    assert agreeing_heights(lambda rows: (other if len(rows) == 8 else one_order)(rows), x, heights) == (4, 16)
    last_differs = lambda rows: torch.cat((one_order(rows[:-1]), other(rows[-1:])))  # noqa: E731
    assert agreeing_heights(last_differs, x, heights) == (1,)
    lowest_differs = lambda rows: (other if len(rows) == 4 else one_order)(rows)  # noqa: E731
    assert agreeing_classes(lowest_differs, x, heights) == [(4,), (8, 16)]
    assert agreeing_heights(lowest_differs, x, heights) == (8, 16), "the higher ones agree, although the lowest differs"


@pytest.mark.parametrize("agreed", [(1,), (4,), (16, 64)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_library_that_agrees_with_itself_at_few_rows_alone(
    agreed: tuple[int, ...], kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV head has a group of six or three query heads. If the library agrees only at fewer rows, the group is cut."""
    model = loaded("Qwen3", tmp_path, head_dim=16, num_key_value_heads=kv_heads)
    plain = TorchBackend(model, block_count=80, block_size=BLOCK_SIZE)
    prompt = tokens(KEYS + 22, seed=1)
    (expected,) = serve(plain, empty(plain), [request(1, prompt)], 64)
    monkeypatch.setattr(
        torch_exact, "agreeing_classes", lambda _multiply, _x, heights: [tuple(h for h in heights if h in agreed)]
    )
    backend = TorchBackend(model, block_count=160, block_size=BLOCK_SIZE, exact=True)
    (cold,) = serve(backend, empty(backend), [request(1, prompt)], 256)
    cache = empty(backend)
    serve(backend, cache, [request(2, prompt[:60])], 64)
    warm, *_ = serve(backend, cache, [request(1, prompt), *beside(2)], 19)
    assert warm.cached_tokens > 0
    assert torch.equal(warm.bits(), cold.bits())
    for ours, theirs in zip(cold.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_library_that_never_agrees_with_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("Llama", tmp_path)
    monkeypatch.setattr(torch_exact, "agreeing_classes", lambda *_: [])
    with pytest.raises(NotExact, match="batched products"):
        TorchBackend(model, block_count=8, block_size=BLOCK_SIZE, exact=True)


def test_a_projection_with_no_agreeing_height_is_multiplied_row_by_row(tmp_path: Path) -> None:
    model = loaded("Llama", tmp_path)
    projection = model.weights.layers[0].down
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((8, projection.inputs), np.float32))
    with torch.inference_mode():
        by_row = projection.tiled((1,))(x)
        assert torch.equal(by_row, torch.cat([projection(row[None]) for row in x]))
        torch.testing.assert_close(by_row, projection(x))
        tiled = projection.tiled(HEIGHTS[:2])
        assert tiled(torch.cat((x, x, x))).shape == (24, projection.outputs)
        with pytest.raises(ValueError, match="not a multiple of 4"):
            tiled(x[:6])


def test_an_exp_that_depends_on_the_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check_exp()
    real = np.exp

    def tail_differs(values: Any) -> Any:
        out = real(values)
        out[-1:] = np.nextafter(out[-1:], np.float32(9))
        out[:1] = np.nextafter(out[:1], np.float32(9))
        return out

    monkeypatch.setattr(np, "exp", tail_differs)
    with pytest.raises(NotExact, match="NumPy's exp"):
        check_exp()


def test_exact_is_refused_off_the_cpu(tmp_path: Path) -> None:
    model = loaded("Llama", tmp_path)
    model.device = torch.device("meta")
    with pytest.raises(ValueError, match="only on cpu"):
        TorchBackend(model, block_count=8, block_size=BLOCK_SIZE, exact=True)
