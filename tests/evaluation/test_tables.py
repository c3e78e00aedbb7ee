"""Curves as text and as plain values."""

import json
import math

from lmlong.evaluation.perplexity import AtLength, Curve
from lmlong.evaluation.tables import plain, table
from lmlong.inference.state_size import Size, StateSize
from lmlong.model.scoring import Totals

LINEAR = Curve(
    name="linear",
    checkpoint="/runs/linear/checkpoints/step-00002000",
    parameters=1_234_567,
    state=StateSize(Size(49_921, 199_688), Size(0, 0)),
    trained_length=1024,
    points=[
        AtLength(256, Totals(nats=400_000.0, tokens=200_000, bytes=640_000), 1.25),
        AtLength(1024, Totals(nats=300_000.0, tokens=200_000, bytes=640_000), 12.5),
    ],
    left_out=[4096],
)
SOFTMAX = Curve(
    name="softmax",
    checkpoint="/runs/softmax/checkpoints/step-00002000",
    parameters=1_000,
    state=StateSize(Size(577, 2308), Size(514, 2050)),
    trained_length=512,
    points=[AtLength(16_384, Totals(nats=1e9, tokens=1_000_000, bytes=0), 123_456.78)],
    left_out=[],
)


def test_the_table() -> None:
    assert table([LINEAR, SOFTMAX]) == (
        "linear\n"
        "  1,234,567 parameters, state of 49,921 numbers\n"
        "   length   nats/token   perplexity   bits/byte         tokens   seconds\n"
        "     256        2.0000         7.39      0.9017        200,000       1.2\n"
        "      1k*       1.5000         4.48      0.6763        200,000      12.5\n"
        "\n"
        "softmax\n"
        "  1,000 parameters, state of 577 numbers and 514 more a token\n"
        "   length   nats/token   perplexity   bits/byte         tokens   seconds\n"
        "     16k     1000.0000    1.01e+304         nan      1,000,000  123456.8\n"
        "\n"
        "* the length it was trained at"
    )


def test_no_note_where_the_trained_length_was_not_measured() -> None:
    assert "*" not in table([SOFTMAX])


def test_plain_values_hold_sums_counts_and_their_ratios() -> None:
    values = plain([LINEAR, SOFTMAX])
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    first, second = values["runs"]
    assert first | {"lengths": None} == {
        "run": "linear",
        "checkpoint": "/runs/linear/checkpoints/step-00002000",
        "parameters": 1_234_567,
        "trained_length": 1024,
        "state_numbers": 49_921,
        "state_numbers_per_token": 0,
        "lengths": None,
        "left_out": [4096],
    }
    assert first["lengths"][0] == {
        "length": 256,
        "nats": 400_000.0,
        "tokens": 200_000,
        "bytes": 640_000,
        "nats_per_token": 2.0,
        "perplexity": math.exp(2),
        "bits_per_byte": 400_000 / math.log(2) / 640_000,
        "seconds": 1.25,
    }
    assert second["lengths"][0]["bits_per_byte"] is None
