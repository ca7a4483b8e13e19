"""Write the chart's README.md and values.schema.json from values.yaml, and files/*.acl: `python -m charts.generate`."""

from __future__ import annotations

import json
from collections.abc import Iterable

from charts.schema import build_schema
from charts.values_doc import CHART, Value, read_values
from engine.contract.redis_roles import ENGINE_RULES, GATEWAY_RULES

TABLE = ("| value | default | |", "|---|---|---|")
HEAD = CHART.parent / "README.head.md"
GENERATED = "<!-- generated -->"
END_OF_GENERATED = "<!-- end of generated -->"
"""The text between these marks is generated, so `tests/test_pages.py` bounds neither its words nor its columns."""


def readme(values: Iterable[Value]) -> str:
    """Return README.md: the text of README.head.md, then a table of values for each top-level key."""
    lines = [HEAD.read_text(encoding="utf-8").rstrip(), "", "## Values", "", GENERATED, "", *TABLE]
    for value in values:
        name = ".".join(value.path)
        if len(value.path) == 1 and value.is_section:
            lines += ["", f"### {name}", "", value.about or "For all of the chart.", "", *TABLE]
        elif value.is_section:
            lines += [f"| **{name}** | | {_cell(value.about)} |"] if value.about else []
        else:
            lines.append(f"| `{name}` | {_code(value.default)} | {_cell(value.about)} |")
    return "\n".join([*lines, "", END_OF_GENERATED]) + "\n"


def _code(default: object) -> str:
    text = json.dumps(default)
    return "" if default is None else f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def schema() -> str:
    """Return values.schema.json."""
    return json.dumps(build_schema(read_values()), indent=2) + "\n"


def redis_rules() -> dict[str, str]:
    """Return the rights of each user of Redis, by the name of the file from which the chart reads them."""
    return {"redis-gateway.acl": f"{GATEWAY_RULES}\n", "redis-engine.acl": f"{ENGINE_RULES}\n"}


def main() -> None:
    """Write README.md, values.schema.json and files/*.acl."""
    for name, text in redis_rules().items():
        (CHART / "files" / name).write_text(text, encoding="utf-8")
    (CHART / "README.md").write_text(readme(read_values()), encoding="utf-8")
    (CHART / "values.schema.json").write_text(schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
