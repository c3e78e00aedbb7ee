"""Context mixing is a probability distribution over texts that is learned from the text before alone."""

import numpy as np
import pytest
from machine import needs_native

from lmlong.data.context_mixing import code_lengths

from .conftest import sentences

pytestmark = needs_native
TEXT = "".join(sentences(40)).encode()


def bits(primer: bytes, text: bytes, mixed: int = 1 << 20) -> np.ndarray:
    found = code_lengths(primer, text, mixed)
    assert found is not None and found.shape == (len(text),) and np.isfinite(found).all() and (found > 0).all()
    return found.astype(np.float64)


@pytest.mark.parametrize(
    ("primer", "text"),
    [(b"", b""), (TEXT[:2000] + b"\xff\0\xff", b"\n    de")],
    ids=["nothing", "primed"],
)
def test_the_probabilities_of_all_next_bytes_sum_to_1(primer: bytes, text: bytes) -> None:
    each = [bits(primer, text + bytes([byte]))[-1] for byte in range(256)]
    assert np.exp2(-np.array(each)).sum() == pytest.approx(1, abs=1e-5)


def test_no_byte_depends_on_what_follows_it() -> None:
    found = bits(TEXT[:3000], TEXT[3000:9000])
    assert (bits(TEXT[:3000], TEXT[3000:5000]) == found[:2000]).all()
    other = bits(TEXT[:3000], TEXT[3000:5000] + TEXT[40_000:44_000])
    assert (other[:2000] == found[:2000]).all() and (other[2000:] != found[2000:]).any()


def test_it_learns_from_the_primer_and_from_the_text() -> None:
    once = bits(b"", TEXT[:20_000])
    assert once[-2000:].sum() < 0.8 * once[:2000].sum()
    known = bits(TEXT[:20_000], TEXT[20_000:30_000]).sum()
    assert known < 0.9 * bits(b"", TEXT[20_000:30_000]).sum()
    assert bits(TEXT[:20_000], TEXT[5000:10_000]).sum() < 0.2 * known


def test_what_is_read_before_the_weights_are_learned_is_known_too() -> None:
    primer, text = TEXT[:60_000], TEXT[60_000:]
    all_mixed, last_mixed = bits(primer, text).sum(), bits(primer, text, 5000).sum()
    assert last_mixed == pytest.approx(all_mixed, rel=0.05)
    assert bits(primer, primer[:5000], 5000).sum() < 0.2 * bits(primer[30_000:], primer[:5000], 5000).sum()


@pytest.mark.parametrize("size", [0, 1, 5, 19, 400, 70_000])
def test_texts_of_any_bytes_are_measured(size: int) -> None:
    noise = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert bits(noise, noise[: size // 2]).sum() < 8.5 * (size // 2) + 20
    assert bits(b"", bytes(size)).sum() < 60 + 0.01 * size
