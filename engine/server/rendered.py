"""Renders the chat of a request, and refuses what the model's template would leave out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from engine.contract.errors import BadRequest
from engine.contract.messages import without_mark
from engine.server.messages import is_said_elsewhere, template_messages, unread_reasoning

if TYPE_CHECKING:
    from engine.server.requests import ModelText


_OWN = {
    "messages": "the messages are those of the request",
    "tools": "the tools are those of the request",
    "documents": "this engine takes no documents",
    "add_generation_prompt": "give it as a field of the request",
}
"""What `ChatTemplate.render` itself passes to a template."""


class Ending(Enum):
    """How a prompt ends."""

    TURN = auto()
    """With the beginning of the assistant's turn."""
    OPEN = auto()
    """Within the last message, which the answer continues."""
    NOTHING = auto()
    """With the last message."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a chat's prompt."""

    text: str
    ignored: tuple[str, ...]
    """Parts of the request that have no effect on it and are not missed."""


def render_chat(
    model: ModelText,
    messages: Sequence[Any],
    tools: Sequence[Any] | None,
    variables: dict[str, Any] | None = None,
    *,
    places: Sequence[str] = (),
    salt: str | None = None,
    may_call: bool = True,
    ending: Ending = Ending.TURN,
) -> Rendered:
    """Return the prompt. `places`: where each message is in the request; empty: `messages[i]`. `salt`: that of the
    request. `may_call`: whether the model may call the tools.

    Raises BadRequest for a message that is not valid, and for a text of the request that the template leaves out.
    """
    if model.template is None:
        raise BadRequest(
            f"the model {model.name!r} has no chat template: use /v1/completions, or give the checkpoint a "
            "chat_template.jinja",
            param="messages",
        )
    for name in variables or ():
        if name in _OWN:
            raise BadRequest(
                f"chat_template_kwargs.{name} is not a template's own variable: {_OWN[name]}",
                param=f"chat_template_kwargs.{name}",
            )
    tools = [without_mark(tool) if isinstance(tool, dict) else tool for tool in tools or ()]
    checked = template_messages(messages, model.made_calls, salt or "")
    rendered = model.template.render(
        checked,
        tools,
        variables,
        add_generation_prompt=ending is not Ending.NOTHING,
        goes_on=ending is Ending.OPEN,
    )
    ignored = list(unread_reasoning(checked, model.template.template))
    for place in rendered.left_out:
        if place.startswith("tools[") and not may_call:
            ignored.append("tools")
        elif not is_said_elsewhere(place, checked):
            raise _left_out(place, places)
    ignored += [f"chat_template_kwargs.{name}" for name in variables or () if not model.template.reads(name)]
    return Rendered(rendered.text, tuple(dict.fromkeys(ignored)))


def _left_out(place: str, places: Sequence[str]) -> BadRequest:
    """Return the error for a text that the template leaves out."""
    index = re.match(r"messages\[(\d+)\]", place)
    if places and index is not None:
        place = places[int(index[1])] + place[index.end() :].removesuffix(".content")
    return BadRequest(
        f"{place} would be lost: the model's chat template does not render it. Leave it out, or write it into a "
        "message that the template renders",
        param=place,
        code="unsupported_value",
    )
