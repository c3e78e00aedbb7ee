"""The fastest engine of a model, native code on a CPU and a CUDA graph on a GPU, compared with torch before it is used.
`TrainedLanguageModel.use_fast_engine` decides whether it is."""

import copy

import torch
from torch import Tensor, nn

from lmlong.decode import native
from lmlong.decode.engine import Engine, rows_of
from lmlong.decode.graph import GraphEngine
from lmlong.decode.native import NativeEngine
from lmlong.decode.packed_model import PackedModel
from lmlong.errors import LmlongError
from lmlong.model.base import LMHead
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.layers import GroupedLinear
from lmlong.model.state import concat_states
from lmlong.native.build import find_compiler, missing_code
from lmlong.native.decode.packer import NoNativeForm, pack_in_huge_pages
from lmlong.native.state import map_state, state_tensors

TRIAL_PROMPT, TRIAL_STEPS = 16, 3
TRIAL_SCALES = (1.0, 1e-2, 1e-3)
"""Scales of the embeddings in a trial, down to a scale at which the epsilon of a norm dominates."""

TRIAL_ERROR = 1e-3
"""Largest relative difference between native code and torch: some hundred times float32's rounding."""

TRIAL_ERROR_IN_INT8 = 0.1
"""The same if activations are rounded to int8: float32's rounding may move some to the next integer, in every layer."""

NARROW_TRIAL_ERROR = 2.0**-6
"""The same for caches in bfloat16, where a key may be rounded up by one and down by the other: some times bfloat16's
rounding."""


class EngineMismatch(LmlongError):
    """A fast engine and torch compute different results."""


def fast_engine(model: LanguageModel, tried: bool = True) -> Engine:
    """Return the fastest engine for a model that has one (`why_no_fast_engine`) and whose weights are final. With
    `tried`, it is first compared with torch."""
    trials = _trial_caches(model) if tried else ()
    if not _on_cpu(model):
        for wide in trials:
            compare_with_torch(GraphEngine(model), wide)  # one that is then discarded, with its state of two rows
        return GraphEngine(model)
    for trial in (model, _small_trial(model)) if tried else ():
        engine = NativeEngine(trial)
        for wide in trials:
            compare_with_torch(engine, wide)
    pack_in_huge_pages(PackedModel(model).matrices)  # in the order of their use
    return NativeEngine(model)


def why_no_fast_engine(model: LanguageModel) -> str | None:
    """Return why a model has no fast engine, or None if it has one."""
    if not _on_cpu(model):
        device = model.embedding.weight.device.type
        if not model.constant_state:
            return "the state of softmax attention grows, so its step cannot be one graph."
        return None if device == "cuda" else f"{device} is not supported."
    try:
        PackedModel(model)
    except NoNativeForm as unknown:
        name = next((name for name, module in model.named_modules() if module is unknown.module), "")
        return f"{name or 'the model'}: {unknown.why}."
    if native.library() is not None:
        return None
    return "its native code could not be compiled on this machine." if find_compiler() else missing_code()


def describe_engine(model: LanguageModel) -> str:
    """Return the fastest engine of a model in words: native code and its origin, a CUDA graph, or torch and why."""
    if why := why_no_fast_engine(model):
        return f"torch ({why.rstrip('.')})"
    library = native.library() if _on_cpu(model) else None
    return f"native code, {library.origin}" if library is not None else "a CUDA graph"


def _trial_caches(model: LanguageModel) -> tuple[bool, ...]:
    """Return whether to widen caches to float32 in each trial: a rounding to bfloat16 that differs would hide what else
    does, so a model that caches in bfloat16 is tried in both formats."""
    return (True, False) if _narrow(model.init_state(1)) else (True,)


def _narrow(state: ModelState) -> bool:
    return any(x.dtype == torch.bfloat16 for x in state_tensors(state))


def compare_with_torch(engine: Engine, wide: bool = True) -> None:
    """Raise EngineMismatch if an engine differs from torch beyond rounding, on random rows of two tokens. With `wide`,
    keys and values are cached in float32."""
    model = engine.model
    steps = model.hourglass.factor if model.hourglass else TRIAL_STEPS  # so that each row completes a block
    draw = torch.Generator().manual_seed(0)
    alphabet = torch.randint(model.embedding.num_embeddings, (2, 1), generator=draw)  # small, so that n-grams repeat
    tokens = alphabet[torch.randint(2, (2, TRIAL_PROMPT + steps), generator=draw), 0]
    tokens = tokens.to(model.embedding.weight.device)
    with torch.inference_mode():
        _, state = model(tokens[:, :TRIAL_PROMPT])
        if wide:
            state = map_state(lambda x: x.float() if x.dtype == torch.bfloat16 else x, state)
        allowed, rows = _allowed_error(model, state), rows_of(engine, state)
        for token in tokens.mT[TRIAL_PROMPT:]:
            *expected, after = model.decode_step(token, state)
            read = engine.read(rows, token[:, None].tolist())
            for row in rows:
                engine.advance(row, 1)
            state = concat_states([engine.save(row) for row in rows])
            outputs = (read.logits[:, 0], read.hidden[:, 0], *state_tensors(state))
            pairs = zip(outputs, (*expected, *state_tensors(after)), strict=True)
            worst = max(_difference(*pair) for pair in pairs)
            if worst > allowed:
                how = "native code" if _on_cpu(model) else "a CUDA graph"
                raise EngineMismatch(
                    f"{how} differs from torch by {worst:.1e}, which is a bug in lmlong. Decode with torch "
                    "(--no-fast-decode), and report this model's recipe."
                )


def _allowed_error(model: LanguageModel, state: ModelState) -> float:
    if any(isinstance(module, GroupedLinear) for module in model.modules()):
        return TRIAL_ERROR_IN_INT8
    return NARROW_TRIAL_ERROR if _narrow(state) else TRIAL_ERROR


def _difference(x: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest value; infinity if different entries are finite."""
    if x.dtype == expected.dtype and torch.equal(x, expected):  # fast for large tables that steps do not write to
        return 0.0
    finite = expected.isfinite()
    if not torch.equal(finite, x.isfinite()):
        return float("inf")
    x, expected = x[finite].double(), expected[finite].double()
    return float((x - expected).abs().max() / expected.abs().max().clamp_min(1e-30)) if len(x) else 0.0


def _small_trial(model: LanguageModel) -> LanguageModel:
    """Return the model with an embedding of a few short vectors. With the embedding of a trained model, a wrong epsilon
    would have little effect."""
    rows = torch.cat([model.embedding.weight[: len(TRIAL_SCALES)] * scale for scale in TRIAL_SCALES])
    shared = (*model.parameters(), *model.buffers(), model.embedding, model.lm_head)
    small = copy.deepcopy(model, {id(part): part for part in shared})
    small.embedding = nn.Embedding.from_pretrained(rows.detach())
    small.lm_head = LMHead(small.embedding)
    return small


def _on_cpu(model: LanguageModel) -> bool:
    return model.embedding.weight.device.type == "cpu"
