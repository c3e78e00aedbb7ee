"""Which kernel computes an attention."""

import pytest
from attention.cases import build

from lmlong import recipe
from lmlong.attention.delta.chunk import ChunkKernel as DeltaChunks
from lmlong.attention.linear.chunk import ChunkKernel as LinearChunks
from lmlong.attention.ngram.sort import SortKernel


@pytest.mark.parametrize(("kind", "kernel"), [("linear", LinearChunks), ("delta", DeltaChunks), ("ngram", SortKernel)])
def test_an_attention_names_the_kernel_that_it_was_given(kind: str, kernel: type) -> None:
    attention = build(recipe.Attention(kind=kind))  # type: ignore[arg-type]
    assert attention.kernel_name == "native"
    for name in ("torch", "an unknown kernel"):
        attention.use_kernel(name)
        assert attention.kernel_name == "torch" and type(attention.kernel) is kernel
