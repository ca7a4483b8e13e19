"""The official clients get objects of the classes that they ask for."""

from __future__ import annotations

from typing import Any, Literal

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.engine.server.conftest import MODEL, Engine


class Address(BaseModel):
    street: str
    number: int


class Person(BaseModel):
    name: str
    kind: Literal["user", "admin"]
    address: Address | None
    tags: list[str]


ASK: list[Any] = [{"role": "user", "content": "Describe a person."}]


async def test_openai(engine: Engine) -> None:
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Person, max_tokens=150, seed=4
        )
        assert isinstance(chat.choices[0].message.parsed, Person)
        response = await client.responses.parse(
            model=MODEL, input="Describe a person.", text_format=Person, max_output_tokens=150
        )
        assert isinstance(response.output_parsed, Person)
        async with client.chat.completions.stream(
            model=MODEL, messages=ASK, response_format=Person, max_tokens=150, seed=4
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == chat.choices[0].message.parsed
        choice = await client.chat.completions.create(
            model=MODEL, messages=ASK, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert choice.choices[0].message.content in ("yes", "no")


async def test_anthropic(engine: Engine) -> None:
    async with AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0) as client:
        answer = await client.messages.parse(model=MODEL, messages=ASK, output_format=Person, max_tokens=150)
        assert isinstance(answer.parsed_output, Person)
        assert answer.stop_reason == "end_turn"
