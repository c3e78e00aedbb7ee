"""The errors of layers against those that hooks see."""

import torch

from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Model
from lmlong.training.distillation import ERROR_EPSILON, layer_errors

TEACHER = Model(width=16, layers=3, heads=2, attention=Attention(kind="softmax"))
STUDENT = TEACHER.model_copy(update={"attention": Attention(kind="linear")})


def test_each_layer_reads_what_the_teacher_has_read() -> None:
    torch.manual_seed(0)
    models = [LanguageModel(options, 30).double() for options in (STUDENT, TEACHER)]
    for model in models:
        for block in model.blocks:  # else what is added begins at 0
            torch.nn.init.normal_(block.mixer.out_proj.weight)
            torch.nn.init.normal_(block.mlp.out_proj.weight)
    student, teacher = models
    tokens = torch.randint(30, (2, 20))
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, [0, 7]] = True
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def remember(_: torch.nn.Module, given: tuple, found: tuple) -> None:
        seen.append((given[0], found[0]))

    hooks = [block.mixer.register_forward_hook(remember) for block in teacher.blocks]
    teacher(tokens, None, starts)
    for hook in hooks:
        hook.remove()
    _, positions = student.embed(tokens, student.init_state(2), starts)
    truth = []
    for block, state, (x, wanted) in zip(student.blocks, student.init_state(2).blocks, seen, strict=True):
        found, _ = block.mixer(x, state, positions)
        truth.append(((found - wanted).square().mean(-1) / (wanted.square().mean(-1) + ERROR_EPSILON)).mean())
    errors = layer_errors(student, teacher, tokens, starts)
    assert torch.allclose(errors, torch.stack(truth), rtol=1e-10)
    (gradient,) = torch.autograd.grad(errors[0], student.blocks[1].mixer.out_proj.weight)
    assert not gradient.any()
    assert torch.equal(layer_errors(teacher, teacher, tokens, starts), torch.zeros(3, dtype=torch.float64))
