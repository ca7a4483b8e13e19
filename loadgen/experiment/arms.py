"""The arms of a comparison: policies of one gateway, deployments, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

DEFAULT_POLICIES = ("round_robin", "least_loaded", "affinity_groups", "predicted_ttft")


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One side of the comparison."""

    name: str
    url: str
    policy: str = ""
    """Sent in the policy header; empty: no header."""
    metrics_urls: tuple[str, ...] = ()
    """Addresses at which the arm's pods are scraped and reset, one per pod; empty: the gateway lists its pods."""
    admin_url: str = ""
    """Address at which the gateway lists and resets its pods; empty: the address that takes requests."""


def arms_of(
    url: str,
    policies: Sequence[str],
    arms: Sequence[str],
    metrics_urls: Sequence[str],
    admin_urls: Sequence[str] = (),
) -> tuple[ArmSpec, ...]:
    """Return the arms from flags: `--url` with `--policies`, then each `--arm NAME=URL[;POLICY]`. Raises ValueError."""
    if not url and not arms:
        raise ValueError("--url GATEWAY or at least two --arm NAME=URL are needed for a comparison")
    if policies and not url:
        raise ValueError("--policies needs --url; the policy of an --arm follows its address: NAME=URL;POLICY")
    specs = [ArmSpec(policy, _url(url, "--url"), policy) for policy in (policies or DEFAULT_POLICIES if url else ())]
    specs += [_arm(text) for text in arms]
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"arm {', '.join(twice)} is listed twice: each --policies entry and --arm needs its own name")
    return tuple(_with_ways(spec, metrics_urls, admin_urls, names) for spec in specs)


def baseline_of(arms: Sequence[ArmSpec], wanted: str) -> str:
    """Return the arm that others are compared with: `wanted`, else round_robin, else the first. Raises ValueError."""
    names = [arm.name for arm in arms]
    if wanted and wanted not in names:
        raise ValueError(f"--baseline {wanted} is not an arm; arms are {', '.join(names)}")
    return wanted or ("round_robin" if "round_robin" in names else names[0])


def block_order(arms: Sequence[ArmSpec], number: int) -> tuple[ArmSpec, ...]:
    """Return the arms of round `number` (from 0) in alternating order: a steady drift cancels (ABBA)."""
    return tuple(arms) if number % 2 == 0 else tuple(reversed(arms))


def _arm(text: str) -> ArmSpec:
    name, has_url, rest = text.partition("=")
    url, _, policy = rest.partition(";")
    if not (name and has_url and url) or "/" in name:
        raise ValueError(f"--arm {text!r} must be NAME=URL or NAME=URL;POLICY, such as plain=http://vllm:8000")
    return ArmSpec(name, _url(url, f"--arm {name}"), policy)


def _url(url: str, flag: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{flag}: got {url!r}; the address must begin with http:// or https://")
    return url.rstrip("/")


def _with_ways(spec: ArmSpec, metrics_urls: Sequence[str], admin_urls: Sequence[str], names: Sequence[str]) -> ArmSpec:
    admin = _of_arm(spec.name, admin_urls, "--admin-url", names)
    if len(admin) > 1:
        raise ValueError(f"--admin-url gives {spec.name} {len(admin)} addresses: one is enough")
    metrics = _of_arm(spec.name, metrics_urls, "--metrics-urls", names)
    return replace(spec, metrics_urls=tuple(metrics), admin_url="".join(admin))


def _of_arm(name: str, texts: Sequence[str], flag: str, names: Sequence[str]) -> list[str]:
    """Return the URLs that apply to the arm, from texts `URL` and `ARM=URL`. Raises ValueError."""
    mine = []
    for text in texts:
        arm, has_arm, url = text.partition("=")
        if not has_arm or "/" in arm:
            arm, url = "", text
        if arm and arm not in names:
            raise ValueError(f"{flag} {text!r}: {arm} is not an arm; arms are {', '.join(names)}")
        if not arm or arm == name:
            mine.append(_url(url, flag))
    return mine
