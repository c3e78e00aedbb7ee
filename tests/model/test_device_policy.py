"""A model by the policy of a GPU waits for no value, reads long texts in longer pieces, and can be compiled; see also
test_same_gradients.py."""

import pytest
import torch
from machine import needs_compiler
from model.parts import KINDS, build, text
from model.test_same_gradients import assert_same, computed
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlong import recipe
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.model.language_model import LanguageModel
from lmlong.model.metrics import text_nll
from lmlong.model.segments import text_loss
from lmlong.model.stretch import any_phase

SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    "downsampled": ("linear", {"layers": 3, "downsample": recipe.Downsample(factor=3)}),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
LIKE_OTHERS = ("no decay", "fixed decay", "window", "parallel window", "mixed")


def test_a_gpu_reads_a_long_text_in_longer_pieces() -> None:
    model = LanguageModel(recipe.Model(width=16, layers=1, heads=2), 20)
    assert [model.piece(rows) for rows in (1, 100)] == [4096, 4096]
    use_policy(model, GPU_POLICY)
    assert [model.piece(rows) for rows in (1, 4, 100)] == [65536, 16384, 4096]


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[pytest.mark.slow] * (shape in LIKE_OTHERS)) for shape in SHAPES]
)
def test_nothing_waits_for_a_value(shape: str) -> None:
    """Tensors without values raise where a value is read, in training, in scoring, in a prompt and in a decode step."""
    kind, options = SHAPES[shape]
    model = build(kind, policy=GPU_POLICY, **options).float()
    model.use_kernel("torch")
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, starts = torch.zeros(2, 100, dtype=torch.long), torch.zeros(2, 100, dtype=torch.bool)
        first, state = text_loss(model, tokens, tokens, starts)
        second, state = text_loss(model, tokens, tokens, starts, state)
        torch.autograd.grad(first + second, list(model.parameters()), allow_unused=True)
        text_nll(model, tokens, tokens, starts, state)
        with torch.inference_mode():
            _, state = model(tokens, None, starts)
            phase = None if model.hourglass is None else any_phase(3, 1)
            model.decode_step(tokens[:, 0], state, phase)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@every_shape
def test_compiled_blocks_have_the_same_gradients(shape: str, recompute: bool) -> None:
    kind, options = SHAPES[shape]
    model = build(kind, **options)

    def compiled(*batch_and_state: object) -> object:
        torch._dynamo.reset()
        model.compile_blocks()
        return computed(*batch_and_state, policy=GPU_POLICY, recompute=recompute)  # type: ignore[arg-type]

    assert_same(model, compiled, text([3, 120]))  # type: ignore[arg-type]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # of a block and of the loss
