"""Write the chart's README.md and values.schema.json from values.yaml, and files/*.acl: `python -m charts.generate`."""

from __future__ import annotations

import json
from collections.abc import Iterable

from charts.schema import build_schema
from charts.values_doc import CHART, Value, read_values
from engine.contract.redis_roles import ENGINE_RULES_7, GATEWAY_RULES

README = CHART / "README.md"
GENERATED = "<!-- generated -->"
END_OF_GENERATED = "<!-- end of generated -->"
"""The text between these marks is generated, so `tests/test_pages.py` bounds neither its words nor its columns."""


def readme(values: Iterable[Value]) -> str:
    """Return README.md: its text as it is, then a list of values for each top-level key."""
    written = README.read_text(encoding="utf-8").partition(GENERATED)[0]
    lines = [written.rstrip(), "", GENERATED, ""]
    for value in values:
        name = ".".join(value.path)
        if len(value.path) == 1 and value.is_section:
            lines += ["", f"### {name}", "", value.about or "For all of the chart.", ""]
        elif value.is_section:
            lines += [f"* **{name}**: {value.about}"] if value.about else []
        else:
            lines.append(f"* `{name}`{_default(value.default)}: {value.about}")
    return "\n".join([*lines, "", END_OF_GENERATED]) + "\n"


def _default(default: object) -> str:
    return "" if default in (None, "", [], {}) else f" (`{json.dumps(default)}`)"


def schema() -> str:
    """Return values.schema.json."""
    return json.dumps(build_schema(read_values()), indent=2) + "\n"


def redis_rules() -> dict[str, str]:
    """Return the rights of each user of Redis, by the name of the file from which the chart reads them."""
    return {"redis-gateway.acl": f"{GATEWAY_RULES}\n", "redis-engine.acl": f"{ENGINE_RULES_7}\n"}


def main() -> None:
    """Write README.md, values.schema.json and files/*.acl."""
    for name, text in redis_rules().items():
        (CHART / "files" / name).write_text(text, encoding="utf-8")
    (CHART / "README.md").write_text(readme(read_values()), encoding="utf-8")
    (CHART / "values.schema.json").write_text(schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
