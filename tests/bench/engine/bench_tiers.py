"""Fetch or recompute: the time to first token if a slower tier holds the prompt, by its length and the bandwidth.

    python -m tests.bench.engine.bench_tiers [--profile h100-8b] [--tokens 256] [--out out/tiers.png]

The bench runs in virtual time, with the engine's own scheduler, tiers and step loop. The bars are at most 1.05 of the
time without tiers, and at most 1.15 of the better of fetching all and computing all. In the second table the tier's
rate falls after the engine has learnt it. There the second bar means nothing, because the engine cannot know the new
rate.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.backend.profiles import PROFILES
from tests.bench.engine.tier_race import Point, in_virtual_time, race

LENGTHS = (256, 1024, 4096, 16_384, 65_536)
GB_S = (0.05, 0.5, 2.0, 4.0, 6.0, 8.0, 12.0, 20.0)
CHANGES = (2, 10, 100)
MAX_OF_COMPUTING, MAX_OF_THE_BETTER = 1.05, 1.15


def main() -> int:
    """Print the table, draw the plot; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=list(PROFILES), default="h100-8b", help="emulated device")
    parser.add_argument("--out", type=Path, default=Path("out/tiers.png"), help="plot to write")
    parser.add_argument("--tokens", type=int, action="append", help="only prompts of this length; repeatable")
    args = parser.parse_args()
    lengths = args.tokens or LENGTHS
    profile = PROFILES[args.profile]
    points, missed = [], 0
    print(f"{args.profile}: seconds to the first token\n")
    print("| tokens | GB/s | computed | fetched | with tiers | fetched share | of computing | of the better |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for tokens in lengths:
        for gb_s in GB_S:
            point = in_virtual_time(race(profile, tokens, gb_s * 1e9))
            points.append(point)
            print(row(point), flush=True)
            missed += point.of_computing > MAX_OF_COMPUTING or point.of_the_better > MAX_OF_THE_BETTER
    print("\nThe rate falls after it was learnt at 20 GB/s:\n")
    for tokens in lengths:
        for factor in CHANGES:
            point = in_virtual_time(race(profile, tokens, 20e9 / factor, believed=20e9))
            print(row(point), flush=True)
            missed += point.of_computing > MAX_OF_COMPUTING
    draw(points, args.out, args.profile)
    print(f"\n{missed} points miss a bar; plot: {args.out}")
    return 1 if missed else 0


def row(point: Point) -> str:
    """Return a line of the table."""
    return (
        f"| {point.tokens:,} | {point.bytes_per_s / 1e9:g} | {point.computed_s:.4f} | {point.fetched_s:.4f} "
        f"| {point.with_tiers_s:.4f} | {point.share:.2f} | {point.of_computing:.3f} | {point.of_the_better:.3f} |"
    )


def draw(points: list[Point], path: Path, name: str) -> None:
    """Draw heat maps over length and bandwidth: relative to computing everything, and to the better of both ways."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths, rates = sorted({p.tokens for p in points}), sorted({p.bytes_per_s for p in points})
    at = {(p.tokens, p.bytes_per_s): p for p in points}
    figure, both = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    for axes, title, bar, name_of in (
        (both[0], "of computing all", MAX_OF_COMPUTING, "of_computing"),
        (both[1], "of the better of fetching and computing all", MAX_OF_THE_BETTER, "of_the_better"),
    ):
        grid = [[getattr(at[tokens, rate], name_of) for rate in rates] for tokens in lengths]
        axes.imshow(grid, cmap="RdYlGn_r", vmin=0, vmax=2, aspect="auto", origin="lower")
        for y, row_of in enumerate(grid):
            for x, value in enumerate(row_of):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", weight="bold" if value > bar else "normal")
        axes.set_xticks(range(len(rates)), [f"{rate / 1e9:g}" for rate in rates])
        axes.set_yticks(range(len(lengths)), [f"{tokens:,}" for tokens in lengths])
        axes.set(xlabel="bandwidth of the tier, GB/s", ylabel="tokens of the prompt", title=f"{title} (bar {bar})")
    figure.suptitle(f"Time to the first token of a prompt that a tier holds, {name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
