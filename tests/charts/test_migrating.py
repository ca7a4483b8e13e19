"""The values in MIGRATING.md render, and its commands and flags are those of the load generator and the engines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.common.settings import Settings
from loadgen.commands.compare import CompareSettings
from router.settings.gateway import GatewaySettings
from tests.charts.chart import ROOT, Helm, container, named
from tests.charts.existing.foreign import VLLM_FLAGS

PAGE = (ROOT / "charts" / "MIGRATING.md").read_text()
BLOCKS = [
    re.sub(r"^ {4}", "", block, flags=re.MULTILINE)
    for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", PAGE, re.MULTILINE)
]
VALUES = [yaml.safe_load(block) for block in BLOCKS if block.startswith("engines:")]
COMMANDS: dict[str, type[Settings]] = {"compare": CompareSettings}


@pytest.mark.parametrize("values", VALUES, ids=lambda values: values["engines"]["existing"][0]["name"])
def test_the_values_are_taken(any_helm: Helm, values: dict[str, Any]) -> None:
    sets = values["engines"]["existing"]
    objects = any_helm.render({"engines.existing": sets})
    gateway = container(named(objects, "Deployment", "rel-warmroute-gateway")["spec"]["template"], "gateway")
    (target,) = GatewaySettings.load(gateway["args"], prog="gateway", environ={}).targets
    assert dict(term.split("=") for term in target.selector.split(",")) == sets[0]["selector"]
    assert target.namespace == sets[0]["namespace"]
    assert target.port == sets[0].get("port", "http")
    assert target.kv_events_port == sets[0].get("kvEventsPort")


def test_each_stack_has_values() -> None:
    assert len(VALUES) == 4
    for title in ("production-stack", "llm-d", "KubeAI", "A plain Service, or an Ingress", "Before and after"):
        assert f"\n## {title}\n" in PAGE


def commands() -> list[list[str]]:
    lines = "\n".join(BLOCKS).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("warmroute-loadgen ")]


def test_the_commands_are_taken() -> None:
    found = commands()
    assert [words[1] for words in found] == ["compare"]
    for _, name, *arguments in found:
        settings = COMMANDS[name].load(arguments, prog=name, environ={})
        assert settings.model_fields_set
    assert "`warmroute-loadgen analyze`" in PAGE
    assert (ROOT / "loadgen" / "commands" / "analyze.py").exists()


def test_the_flags_are_those_of_vllm() -> None:
    said = set(re.findall(r"(--[a-z-]+)", "\n".join(block for block in BLOCKS if block.startswith(("--", "    --")))))
    assert len(said) == 5
    assert said <= VLLM_FLAGS


def test_it_leads_to_what_there_is() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        text = (ROOT / "charts" / path).read_text() if path else PAGE
        if anchor:
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            assert anchor in [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles], target
    for page in ("README.md", "charts/warmroute/README.md"):
        assert "MIGRATING.md" in (ROOT / page).read_text(), page
    assert Path(ROOT / "charts/warmroute/values-vllm.yaml").exists()
