"""The CUDA engine on this card. Decode, prefill, cached prompts and promotion are compared with the card's measured
rates, and whole workloads with transformers' continuous batching, with dummy weights in the shape of Llama-3-8B.

    python -m tests.bench.gpu [--quick] [--device cuda:0] [--sections decode,prefill] [--limit-s 540] [--out FOLDER]
    python -m tests.bench.gpu --tiny --device cpu        # the same code with a tiny model in Triton's interpreter

It needs torch 2.11 or later with Triton, numpy, safetensors and xxhash, and transformers for the comparison; it needs
no network and no installation of this project. The report in the folder is rewritten with every figure, so a killed run
leaves its measurements. Exit status: 0 if all measured bounds are kept, 1 if one is missed or a section failed, 2 if
nothing could be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.gpu import SECTIONS
from tests.bench.gpu.command import device_name, names_of, write

if TYPE_CHECKING:
    import torch


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu needs --tiny: an 8B model is too slow there")
    if arguments.device == "cpu":
        from tests.interpreted import set_up_interpreter

        set_up_interpreter()  # before the imports below, which import Triton
    import torch

    from tests.bench.gpu.checks import exit_status
    from tests.bench.gpu.models import LLAMA_8B, TINY, Model
    from tests.bench.gpu.report import Results, as_json, as_markdown, checks
    from tests.bench.gpu.sections import Bench
    from tests.bench.gpu.sizes import FULL, QUICK
    from tests.bench.gpu.sizes import TINY as TINY_SIZES

    device = torch.device(arguments.device if arguments.device != "cuda" else "cuda:0")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            print(f"gpu-bench: torch sees no device {device}; without a GPU: --tiny --device cpu", file=sys.stderr)
            return 2
        torch.cuda.set_device(device)
    tiny = arguments.tiny
    model = Model(TINY if tiny else LLAMA_8B, getattr(torch, arguments.dtype or _dtype(tiny, device.type)), device)
    sizes = TINY_SIZES if tiny else QUICK if arguments.quick else FULL
    results = Results(_machine(device))
    arguments.out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        write(arguments.out / "report.json", json.dumps(as_json(results, sizes), indent=2) + "\n")
        write(arguments.out / "report.md", as_markdown(results, sizes))

    keep()  # shows at once if the folder cannot be written
    asyncio.run(
        Bench(model, sizes, results, keep=keep, limit_s=arguments.limit_s).measure(frozenset(arguments.sections))
    )
    keep()
    found = checks(results, sizes)
    print("\n".join(map(str, found)))
    for section, reason in results.failures.items():
        print(f"{'failed':12} {section}: {reason}")
    print(f"written: {arguments.out / 'report.json'}, {arguments.out / 'report.md'}")
    return 1 if results.failures else exit_status(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=device_name, default="cuda", help="cuda, cuda:N or (with --tiny) cpu")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer sizes, some bounds stay unmeasured")
    size.add_argument("--tiny", action="store_true", help="a model of two layers: tests the benchmark, not the card")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, float32 on cpu")
    parser.add_argument("--sections", type=names_of(SECTIONS), default=SECTIONS, help=",".join(SECTIONS))
    parser.add_argument(
        "--limit-s",
        type=float,
        default=math.inf,
        help="seconds for the whole run: no section begins later, and transformers' missing answers are given up",
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu-bench"), help="folder for report.json and report.md")
    return parser


def _dtype(tiny: bool, device: str) -> str:
    return "float32" if tiny and device == "cpu" else "bfloat16"


def _show_the_engines_log() -> None:
    """Show what the engine logs about memory and graphs at its start."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("  %(message)s"))
    logger = logging.getLogger("engine")
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]


def _machine(device: torch.device) -> dict[str, str]:
    import torch

    about = {"device": f"{device}, {platform.machine()}", "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "numpy"):
        about[package] = version(package) if find_spec(package) else "not installed"
    about["CUDA"] = torch.version.cuda or "none"
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        about["device"] = (
            f"{device}, {card.name}, {card.multi_processor_count} multiprocessors, {card.total_memory / 2**30:.0f} GiB"
        )
    return about


if __name__ == "__main__":
    _show_the_engines_log()
    sys.exit(main())
