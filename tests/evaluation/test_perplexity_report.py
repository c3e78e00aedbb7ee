"""Perplexity reports as tables, as JSON and as plots."""

import dataclasses
import math

import pytest
from evaluation.reports import LINEAR, SOFTMAX, sums, values

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.perplexity_report import differences, figure, perplexity_report
from lmlong.evaluation.results import AtLength, PerplexityReport

SECOND = dataclasses.replace(SOFTMAX, context=[AtLength(256, sums(2.0, 2.1), 1.0), AtLength(1024, sums(1.7, 1.8), 1.0)])

EXPECTED = """\
linear: 0.7033 ± 0.0180 bits/byte at 1k, gain over 256: 0.0541 ± 0.0180

softmax minus linear: no targets in common. Give --lengths.

linear
  1,234,567 parameters, trained on 2,560,000 tokens, at length 1k
  state of 49,921 numbers, 195 KiB; precision 32
  left out: 4k, which too few documents reach;
  a longer text (--data) or fewer --min-documents reach them
  123,456 tokens read in 12.3 s (10,037 a second), 457 MB at most

by context: the same 2,000 tokens of 2 documents each time;
change is from the row above, in nats/token
   length  nats/token       ±   perplexity  bits/byte       ±    change       ±
     256       2.1000  0.1000         8.17     0.7574  0.0361         -       -
      1k*      1.9500  0.0500         7.03     0.7033  0.0180   -0.1500  0.0500

by position: each document read once, from its beginning
    tokens before  nats/token       ±  bits/byte       ±       tokens  documents
                1      4.0000  1.0000     1.4427  0.3607        2,000          2
   1,024 to 2,047      1.5000  0.5000     0.5410  0.1803        2,000          2

the state, over all layers and heads, while the longest document is read
      tokens read    norm of S    features in use    smallest denominator
                1         12.5         31.5 of 40                    20.4
            2,048         6834         38.0 of 40                 0.00123

softmax
  1,000 parameters, at length 512
  state of 577 numbers, 2.3 KiB in float32, and 514 more a token; precision 32
  weights in int4
  text: one.txt, two.txt, three three three three three three three three
  three three three three .txt, four.txt
  1,000 tokens read in 0.5 s (2,000 a second), 1 MB at most

by context: the same 1,000 tokens of 1 document each time;
change is from the row above, in nats/token
   length  nats/token       ±   perplexity  bits/byte       ±    change       ±
     16k    1000.0000       -    1.01e+304          -       -         -       -

* the length it was trained at"""


def test_the_table() -> None:
    assert perplexity_report([LINEAR, SOFTMAX]).text() == EXPECTED
    assert max(map(len, EXPECTED.splitlines())) <= 80


@pytest.mark.parametrize(
    ("context", "verdict"),
    [
        (
            [(256, (1.9, 2.1)), (4096, (1.8, 2.1))],
            "linear: 0.7033 ± 0.0541 bits/byte at 4k, gain over 256: 0.0180 ± 0.0180, unclear",
        ),
        (
            [(256, (1.9, 2.0)), (512, (9.0, 9.0)), (4096, (2.0, 2.1))],
            "linear: 0.7394 ± 0.0180 bits/byte at 4k, gain over 256: -0.0361 ± 0.0000",
        ),
        ([(1024, (2.0,))], "linear: 0.7213 bits/byte at 1k"),
        ([], None),
    ],
)
def test_the_first_line_is_the_verdict(context: list[tuple[int, tuple[float, ...]]], verdict: str | None) -> None:
    at = [AtLength(length, sums(*nats), 1.0) for length, nats in context]
    first = perplexity_report([dataclasses.replace(LINEAR, context=at)]).text().splitlines()[0]
    assert first == (verdict or "linear")
    assert len(first) <= 80


def test_json_holds_sums_counts_and_their_ratios() -> None:
    first, second = values(LINEAR, SOFTMAX)["runs"]
    numbers = ("run", "parameters", "trained_length", "left_out", "state_numbers", "state_bytes", "tokens_read")
    assert [first[name] for name in numbers] == ["linear", 1_234_567, 1024, [4096], 49_921, 199_688, 123_456]
    assert first["context"][0] == {
        "length": 256,
        "nats": 4200.0,
        "tokens": 2000,
        "bytes": 8000,
        "documents": 2,
        "nats_per_token": 2.1,
        "nats_error": pytest.approx(0.1),
        "perplexity": math.exp(2.1),
        "bits_per_byte": 4200 / math.log(2) / 8000,
        "bits_error": pytest.approx(0.1 / 4 / math.log(2)),
        "seconds": 1.25,
        "change": None,
        "change_error": None,
    }
    assert first["context"][1]["change"] == pytest.approx(-0.15)
    assert first["position"][1]["last"] == 2047
    assert first["state"][1] == {"position": 2048, "norm": 6834.0, "features": 38.0, "of": 40, "smallest": 0.00123}
    assert second["context"][0]["bits_per_byte"] is None and second["carried"] is None
    assert (second["weights"], second["data"]) == ("int4", SOFTMAX.data)


def test_each_view_is_a_panel_with_a_line_and_a_band_of_two_errors_for_each_run() -> None:
    context, position = figure([LINEAR, SECOND]).panels
    assert (context.ticks, position.ticks) == ([256, 1024], [1, 1024])
    for line, report in zip(context.lines, (LINEAR, SECOND), strict=True):
        assert (line.label, line.x) == (report.name, [256, 1024])
        assert line.y == [point.sums.totals.bits_per_byte for point in report.context]
    assert len({line.style for line in context.lines}) == 2
    first, last = context.lines[0].y
    band = (0.2 - 0.1) / 4 / math.log(2)  # two errors of the differences of two documents, in bits per byte
    assert context.lines[0].low == pytest.approx([first, last - band])
    assert context.lines[0].high == pytest.approx([first, last + band])
    at = LINEAR.position[0].sums
    assert position.lines[0].low and position.lines[0].low[0] == at.totals.bits_per_byte - 2 * at.bits_error
    assert [(mark.x, mark.text) for mark in context.marks] == [(512, "trained at 512"), (1024, "trained at 1k")]
    (alone,) = figure([SOFTMAX]).panels
    assert not alone.marks


def scored(name: str, nats: list[float], sizes: list[int], text: str = "same") -> PerplexityReport:
    """Return a report on documents of these bytes, with a loss in bits."""
    documents = Sums(len(nats))
    for document, (lost, size) in enumerate(zip(nats, sizes, strict=True)):
        documents.add(document, lost * math.log(2), size // 2, size)
    context = [AtLength(256, documents, 1.0)]
    return dataclasses.replace(LINEAR, name=name, text=text, context=context, carried=documents)


BASE = scored("a", [300.0, 100.0, 800.0], [200, 100, 400])


def test_a_difference_has_the_error_of_the_differences() -> None:
    (found,) = differences([BASE, scored("b", [280.0, 90.0, 760.0], [200, 100, 400])])
    assert [row.length for row in found.rows] == [256, None]
    for row in found.rows:
        assert row.bits == (pytest.approx(-0.1), pytest.approx(0, abs=1e-9))
        assert row.sums.bits_error > 0.1  # of each run
    by_context, on_all = found.tables  # which are of other targets
    assert str(on_all).splitlines()[0].endswith("on all bytes of 3 documents:")
    assert str(by_context).splitlines()[3].split() == ["256", "-0.1000", "0.0000", "1.6143", "1.7143"]


def test_runs_on_other_targets_are_not_subtracted() -> None:
    for sizes, text, why in (
        ([200, 100, 400], "another", "measured on another text. Name one by --data."),
        ([200, 100, 402], "same", "no targets in common. Give --lengths."),
    ):
        (found,) = differences([BASE, scored("b", [300.0, 100.0, 800.0], sizes, text)])
        assert found.tables == [f"b minus a: {why}"]
        other = dataclasses.replace(found.run, tokenizer="another", data=["a.txt"])
        (found,) = differences([dataclasses.replace(BASE, data=["a.txt"]), other])
        assert "Measure them by lmlong eval with --by position --min-documents 1" in str(found.tables[0])
