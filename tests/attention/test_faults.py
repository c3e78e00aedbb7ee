"""Likely mistakes in the native code of recurrences, planted one by one: the laws find each of them."""

from pathlib import Path
from types import ModuleType

import pytest
from attention.cases import build
from grids import every_nth
from machine import needs_compiler

from lmlong import recipe
from lmlong.attention.delta import native as delta
from lmlong.attention.linear import native as linear
from lmlong.native import build as native_build
from lmlong.native.source import SHARED_HEADERS
from lmlong.testing import examine_attention

CHANNEL = recipe.Attention(kind="linear", decay="channel")
FAVOR = recipe.Attention(kind="linear", decay="channel", feature_map="favor")
DELTA = recipe.Attention(kind="delta")


@needs_compiler
@every_nth(
    4,
    pytest.mark.parametrize(
        ("form", "native", "right", "wrong"),
        [
            (CHANNEL, linear, "state[F * V + f] *= left[f];", ""),
            (CHANNEL, linear, "left[v] * gates[(s + 1) * F + f]", "left[v] * gates[s * F + f]"),
            (CHANNEL, linear, "after += lanes(gates + s * F + f);", "after += lanes(gates + f);"),
            (CHANNEL, linear, "rows[t * F + f] = sum +=", "rows[t * F + f] ="),
            (FAVOR, linear, "grad[i] - share * normed[i]", "grad[i]"),
            (FAVOR, linear, "scale * scale * squares[t] / 2", "scale * squares[t] / 2"),
            (FAVOR, linear, "std::fill(row + (t < tokens ? job.features : 0), row + F, -INFINITY);", ""),
            (FAVOR, linear, "key_features + begin * F);", "key_features);"),
            (DELTA, delta, "for (Int s = 0; s < t; s++) subtract", "for (Int s = 0; s < t - 1; s++) subtract"),
            (DELTA, delta, "std::fill_n(weights + s * TILE, s + 1,", "std::fill_n(weights + s * TILE, s + 2,"),
            (DELTA, delta, "scale_rows(k, F, decay.to_end)", "scale_rows(k, F, decay.from_state)"),
            (
                DELTA,
                delta,
                "document_t == documents ? clamped_exp2(log2_decay - total_t) : zero",
                "clamped_exp2(log2_decay - total_t)",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    ),
)
def test_a_mistake_in_native_code_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: recipe.Attention, native: ModuleType, right: str, wrong: str
) -> None:
    """Compiled in a separate folder, with `wrong` in the one place that has `right`."""
    count = 0
    for path in (*native.CODE.glob("*.h"), *native.CODE.glob("*.cpp"), SHARED_HEADERS / "decay.h"):
        text = path.read_text()
        count += text.count(right)
        (tmp_path / path.name).write_text(text.replace(right, wrong))
    assert count == 1
    monkeypatch.setattr(native, "CODE", tmp_path)
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build, "FLAGS", [flag.replace("-O3", "-O1") for flag in native_build.FLAGS])
    native.library.cache_clear()
    kept = examine_attention(build(form)).kept
    native.library.cache_clear()
    assert not kept
