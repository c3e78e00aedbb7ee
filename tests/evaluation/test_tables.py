"""Reports as text and as plain values."""

import json
import math

import pytest
from evaluation.reports import LINEAR, SOFTMAX

from lmlong.evaluation.plain import plain
from lmlong.evaluation.tables import table

EXPECTED = """\
linear
  1,234,567 parameters, trained on 2,560,000 tokens, at length 1k
  state of 49,921 numbers, 200 KB
  123,456 tokens read in 12.3 s (10,037 a second), 457 MB at most

by context: the same 2,000 tokens of 2 documents each time
   length  nats/token       ±   perplexity  bits/byte       ±    change       ±
     256       2.1000  0.1000         8.17     0.7574  0.0361         -       -
      1k*      1.9500  0.0500         7.03     0.7033  0.0180   -0.1500  0.0500

by position: each document read once, from its beginning
    tokens before  nats/token       ±  bits/byte       ±       tokens  documents
                1      4.0000  1.0000     1.4427  0.3607        2,000          2
   1,024 to 2,047      1.5000  0.5000     0.5410  0.1803        2,000          2

by protocol: all 2,000 tokens of 2 documents, in nats/token;
carried from the beginning 2.0000 ± 0.5000; in windows so much more
   window       reset      more       ±     sliding      more       ±
      256      2.2000   +0.2000  0.1000      2.1000   +0.1000  0.0000
       1k      2.0500   +0.0500  0.0500      2.0000   +0.0000  0.0000

the state, over all layers and heads, while the longest document is read
      tokens read    norm of S    features in use    smallest denominator
                1         12.5         31.5 of 40                    20.4
            2,048         6834         38.0 of 40                 0.00123

softmax
  1,000 parameters, at length 512
  state of 577 numbers, 2 KB, and 514 more a token
  1,000 tokens read in 0.5 s (2,000 a second), 1 MB at most

by context: the same 1,000 tokens of 1 document each time
   length  nats/token       ±   perplexity  bits/byte       ±    change       ±
     16k    1000.0000       -    1.01e+304          -       -         -       -

* the length it was trained at"""


def test_the_table() -> None:
    assert table([LINEAR, SOFTMAX]) == EXPECTED
    assert max(map(len, EXPECTED.splitlines())) <= 80


def test_no_note_where_the_trained_length_was_not_measured() -> None:
    assert "*" not in table([SOFTMAX])


def test_plain_values_hold_sums_counts_and_their_ratios() -> None:
    values = plain([LINEAR, SOFTMAX])
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    first, second = values["runs"]
    assert {name: first[name] for name in ("run", "parameters", "trained_length", "left_out", "documents")} == {
        "run": "linear",
        "parameters": 1_234_567,
        "trained_length": 1024,
        "left_out": [4096],
        "documents": 2,
    }
    assert (first["state_numbers"], first["state_bytes"], first["state_numbers_per_token"]) == (49_921, 199_688, 0)
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
    assert first["windows"][0]["sliding"]["change"] == pytest.approx(0.1)
    assert first["position"][1]["last"] == 2047
    assert first["state"][1] == {"position": 2048, "norm": 6834.0, "features": 38.0, "of": 40, "smallest": 0.00123}
    assert (first["tokens_read"], first["seconds"], first["peak_bytes"]) == (123_456, 12.3, 456_700_000)
    assert second["context"][0]["bits_per_byte"] is None
    assert second["carried"] is None
