"""A result as text and as JSON."""

import json
import math

from lmlong.report.report import Report, Table
from lmlong.report.table import Column

COLUMNS = [Column("name", 6, align="<"), Column("loss", 6, ".2f")]


def test_parts_are_apart_and_a_table_follows_its_title() -> None:
    table = Table("two runs\nin nats", COLUMNS, [["a", 1.0], ["b", math.nan]])
    report = Report(["verdict", table, Table("", COLUMNS, [])], {"loss": [1.0, math.nan], "runs": COLUMNS[0]._asdict()})
    assert report.text() == "verdict\n\ntwo runs\nin nats\nname    loss\na       1.00\nb          -\n\nname    loss"
    assert json.loads(report.json())["loss"] == [1.0, None]
