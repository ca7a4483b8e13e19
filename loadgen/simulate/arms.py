"""Every router that a simulation can run with, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from loadgen.simulate.fleet import Simulation
from loadgen.simulate.gateway import Gateway
from loadgen.simulate.omniscient import Omniscient
from loadgen.simulate.peers.aibrix import AibrixPrefixCache
from loadgen.simulate.peers.base import Peer
from loadgen.simulate.peers.dynamo import DynamoKv
from loadgen.simulate.peers.hashing import KubeAi, PowerOfTwo
from loadgen.simulate.peers.llmd import LlmDApproximate, LlmDPrecise
from loadgen.simulate.peers.preble import PrebleE2
from loadgen.simulate.peers.sglang import SglangCacheAware, SmgLeastLoad
from loadgen.simulate.pods.routing import Router
from router.routing.policies import POLICY_NAMES

PEERS: Mapping[str, Callable[[int], Peer]] = MappingProxyType(
    {
        peer.name: peer
        for peer in (
            SglangCacheAware,
            DynamoKv,
            LlmDApproximate,
            LlmDPrecise,
            KubeAi,
            AibrixPrefixCache,
            SmgLeastLoad,
            PrebleE2,
            PowerOfTwo,
        )
    }
)
ARM_NAMES = (*POLICY_NAMES, *PEERS, "omniscient")


def make_router(name: str, simulation: Simulation, seed: int, stride: int) -> Router:
    """Return a gateway of the arm. Raises ValueError, which lists the known arms."""
    if name in PEERS:
        return PEERS[name](seed)
    if name == "omniscient":
        return Omniscient(lambda: simulation.pods)
    if name not in POLICY_NAMES:
        raise ValueError(f"unknown router {name!r}; known are {', '.join(ARM_NAMES)}")
    spec = simulation.spec
    return Gateway(
        name,
        simulation.timeline,
        stride=stride,
        publishes=spec.publishes,
        capacity=simulation.told_capacity,
        life=seed + 1 if spec.shares and not spec.publishes else 0,
        number=seed,
    )
