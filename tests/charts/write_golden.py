"""Write golden_default.yaml, the render of the chart's defaults: `python -m tests.charts.write_golden`."""

from __future__ import annotations

import yaml

from tests.charts.chart import Helm, installed_helms
from tests.charts.test_chart_render import GOLDEN, golden


def main() -> None:
    """Write the file with the helm that is installed."""
    helm = Helm(next(iter(installed_helms().values())))
    GOLDEN.write_text(yaml.safe_dump_all(golden(helm.render()), width=120))


if __name__ == "__main__":
    main()
