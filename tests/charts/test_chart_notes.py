"""What `helm install` prints can be pasted: a curl, and a line for OpenAI's client."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.charts.chart import CHART, Helm


def notes(helms: dict[str, Helm | str], values: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return NOTES.txt as installed with a values file. helm 3 only renders it with a cluster."""
    helm = helms["helm4"]
    if isinstance(helm, str):
        pytest.skip(helm)
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    flags = ["--namespace=ns", "--dry-run=client", f"--values={values}"]
    return helm.run("install", "rel", str(CHART), *flags).partition("NOTES:\n")[2]


def curl(text: str) -> list[str]:
    """Return the words of the curl command that has a body."""
    (command,) = re.findall(r"^ *(curl -sN .*\\\n.*)$", text, re.MULTILINE)
    return shlex.split(command.replace("\\\n", " "))


def test_the_first_request_can_be_pasted(helms: dict[str, Helm | str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = notes(helms, CHART / "values-demo.yaml", monkeypatch)
    words = curl(text)
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "sim"
    assert body["stream"] is True
    assert body["messages"][0].keys() == {"role", "content"}
    assert words[2] == "http://127.0.0.1:8080/v1/chat/completions"
    assert "port-forward service/rel-warmroute-gateway 8080:80" in text
    (line,) = re.findall(r"^ *(OpenAI\(.*)$", text, re.MULTILINE)
    calls = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)]
    given = [{keyword.arg for keyword in call.keywords} for call in calls]
    assert given == [{"model", "messages"}, {"base_url", "api_key"}]
    assert "NO ENGINES" not in text


def test_keys_and_hosts_are_in_it(helms: dict[str, Helm | str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = notes(helms, CHART / "ci" / "exposed-values.yaml", monkeypatch)
    assert "Authorization: Bearer $API_KEY" in " ".join(curl(text))
    assert "https://llm.example.com/v1" in text
    assert "8080:8000" in text


def test_it_says_when_there_are_no_engines(helms: dict[str, Helm | str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = notes(helms, CHART / "ci" / "default-values.yaml", monkeypatch)
    assert "NO ENGINES" in text
    assert "not Ready" not in text, "a gateway without engines is Ready, and tells clients that it has none"
    assert "models.qwen3.source=" in text
