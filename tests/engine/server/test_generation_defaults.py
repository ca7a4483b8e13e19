"""Sampling that a checkpoint advises: requests that do not give a field get it, at every endpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.requests import Endpoint
from engine.sched.sampling import SamplingParams
from engine.server.message_requests import prepare_messages
from engine.server.requests import GenerationJob, ModelText, prepare
from engine.server.response_requests import prepare_response
from engine.startup.app import load
from engine.startup.loaded import LoadedModel
from engine.startup.settings import EngineSettings

ADVISED: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.6, 2.0]),
    "top_p": st.sampled_from([0.1, 1.0]),
    "top_k": st.sampled_from([-1, 0, 20]),
    "min_p": st.sampled_from([0.0, 0.5]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.5]),
}
FIELDS = st.fixed_dictionaries({}, optional=ADVISED)
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, "max_tokens"),
    "/v1/completions": ({"prompt": "hi"}, "max_tokens"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 4000}, "max_tokens"),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens"),
}


def job_of(model: ModelText, path: str, fields: dict[str, Any]) -> GenerationJob:
    body = json.dumps(BODIES[path][0] | fields).encode()
    if path == "/v1/messages":
        return prepare_messages(model, body)
    if path == "/v1/responses":
        return prepare_response(model, body)
    return prepare(model, Endpoint(path), body)


@given(path=st.sampled_from(sorted(BODIES)), advised=FIELDS, asked=FIELDS)
def test_a_field_is_the_requests_then_the_checkpoints_then_the_apis(
    loaded: LoadedModel, path: str, advised: dict[str, float], asked: dict[str, float]
) -> None:
    if path == "/v1/responses":  # its other fields are tested by that API's own names
        asked = {name: value for name, value in asked.items() if name in ("temperature", "top_p")}
    job = job_of(replace(loaded.text, sampling=advised), path, asked)
    expected: dict[str, Any] = {**advised, **asked}
    expected["top_k"] = max(0, expected.get("top_k", 0))
    assert job.sampling == replace(SamplingParams(seed=job.sampling.seed), **expected)
    if path == "/v1/responses":
        assert job.told["temperature"] == expected.get("temperature", 1.0)


@given(
    path=st.sampled_from(sorted(BODIES)),
    longest=st.none() | st.integers(1, 200),
    asked=st.none() | st.integers(1, 300),
)
def test_an_answer_is_never_longer_than_the_checkpoint_says(
    loaded: LoadedModel, path: str, longest: int | None, asked: int | None
) -> None:
    fields = {} if asked is None else {BODIES[path][1]: asked}
    plain = job_of(loaded.text, path, fields).prompts[0]
    limited = job_of(replace(loaded.text, max_new_tokens=longest), path, fields).prompts[0]
    assert limited.max_tokens == min(plain.max_tokens, longest or plain.max_tokens)


@pytest.mark.parametrize("on", [True, False])
def test_the_checkpoints_files_decide_at_start_unless_switched_off(
    checkpoint: Path, tmp_path: Path, on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    ends = config.pop("eos_token_id")
    (folder / "config.json").write_text(json.dumps({**config, "logit_scale": 0.5}))
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.25, "max_new_tokens": 9, "num_beams": 4, "do_sample": True})
    )
    (folder / "adapter_config.json").write_text("{}")
    caplog.set_level("INFO")
    model = load(EngineSettings(model=folder, device="sim", generation_config=on)).text
    assert (model.sampling, model.max_new_tokens) == (({"temperature": 0.25}, 9) if on else ({}, None))
    assert model.eos_token_ids == {ends[0]}, "the chat's end is only in tokenizer_config.json"
    said = caplog.text
    assert said.count("config.json: not used, although it may change answers: logit_scale (0.5)") == 1
    assert said.count("adapter_config.json: not read") == 1
    assert said.count("num_beams (4)") == on
    assert said.count("temperature is 0.25 where a request gives none, answers end after 9 tokens") == on


def test_the_demos_checkpoint_leaves_nothing_unread(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(EngineSettings(model=checkpoint, device="sim"))
    assert caplog.text == ""
