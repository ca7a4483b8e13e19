"""Fetch or recompute: the first token of a prompt that a slower tier holds, by its length and the tier's bandwidth.

    python -m tests.bench.bench_tiers [--profile h100-8b] [--out out/tiers.png]

In virtual time, with the engine's own scheduler, tiers and step loop. The bars: at most 1.05 of what it takes without
tiers, and at most 1.15 of the better of fetching all and computing all. In the second table the tier's rate falls after
it was learnt: there the second bar means nothing, as nobody could know.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.backend.profiles import PROFILES
from tests.bench.tier_race import Point, in_virtual_time, race

LENGTHS = (256, 1024, 4096, 16_384, 65_536)
GB_S = (0.05, 0.5, 2.0, 4.0, 6.0, 8.0, 12.0, 20.0)
CHANGES = (2, 10, 100)
MAX_OF_COMPUTING, MAX_OF_THE_BETTER = 1.05, 1.15


def main() -> int:
    """Print the table, draw the plot; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=list(PROFILES), default="h100-8b", help="emulated device")
    parser.add_argument("--out", type=Path, default=Path("out/tiers.png"), help="plot to write")
    args = parser.parse_args()
    profile = PROFILES[args.profile]
    points, missed = [], 0
    print(f"{args.profile}: seconds to the first token\n")
    print("| tokens | GB/s | computed | fetched | with tiers | fetched share | of computing | of the better |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for tokens in LENGTHS:
        for gb_s in GB_S:
            point = in_virtual_time(race(profile, tokens, gb_s * 1e9))
            points.append(point)
            print(row(point), flush=True)
            missed += point.of_computing > MAX_OF_COMPUTING or point.of_the_better > MAX_OF_THE_BETTER
    print("\nThe rate falls after it was learnt at 20 GB/s:\n")
    for tokens in LENGTHS:
        for factor in CHANGES:
            point = in_virtual_time(race(profile, tokens, 20e9 / factor, believed=20e9))
            print(row(point), flush=True)
            missed += point.of_computing > MAX_OF_COMPUTING
    draw(points, args.out, args.profile)
    print(f"\n{missed} points miss a bar; plot: {args.out}")
    return 1 if missed else 0


def row(point: Point) -> str:
    """A line of the table."""
    return (
        f"| {point.tokens:,} | {point.bytes_per_s / 1e9:g} | {point.computed_s:.4f} | {point.fetched_s:.4f} "
        f"| {point.with_tiers_s:.4f} | {point.share:.2f} | {point.of_computing:.3f} | {point.of_the_better:.3f} |"
    )


def draw(points: list[Point], path: Path, name: str) -> None:
    """One line for each length: with tiers against computing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for tokens in LENGTHS:
        mine = [point for point in points if point.tokens == tokens]
        axes.plot(
            [p.bytes_per_s / 1e9 for p in mine], [p.of_computing for p in mine], marker="o", label=f"{tokens:,} tokens"
        )
        axes.plot(
            [p.bytes_per_s / 1e9 for p in mine], [min(p.fetched_s / p.computed_s, 1.6) for p in mine], ":", color="grey"
        )
    axes.axhline(MAX_OF_COMPUTING, color="black", linewidth=0.8)
    axes.set(
        xscale="log",
        ylim=(0, 1.6),
        xlabel="bandwidth of the tier, GB/s",
        ylabel="time to first token, of computing all (grey: fetching all)",
        title=f"Fetch or recompute, {name}",
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
