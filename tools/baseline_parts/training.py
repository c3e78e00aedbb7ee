"""Metrics and weights of short runs: of every kind of attention, and of every way to train."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from baseline_parts.digests import Case, of_run, parts
from baseline_parts.variants import ENCODERS, KINDS, attention, linear, model
from baseline_parts.workspace import RECIPE, Options, Workspace

MIXED = attention(["linear", "window"], feature_map="hedgehog", window=24) | model(convolution=4)

WAYS: dict[str, dict[str, Any]] = {
    "adamw": {"training.optimizer": "adamw"},
    "muon": {"training.optimizer": "muon", "training.steps": 6},
    "accumulate": {"training.accumulate": 3, "training.batch_size": 2},
    "clip": {"training.clip": 0.05, "training.schedule": "constant"},
    "warmup-stable-decay": {"training.schedule": "warmup-stable-decay", "training.steps": 6},
    "bf16": {"training.precision": "bf16"},
    "kernel torch": {"training.kernel": "torch"},
    "dropout": {"model.dropout": 0.1},
    "segment": {"training.segment": 32},
    "segment favor": linear("favor") | {"training.segment": 32, "training.activation_checkpointing": True},
    "segment ngram": attention(["linear", "ngram"]) | {"training.segment": 32},
    "carry-state": MIXED | {"training.carry_state": True},
    "carry-state delta": attention("delta") | {"training.carry_state": True, "training.segment": 32},
    "state-passing": MIXED | {"training.state_passing": 0.5},
    "activation-checkpointing": MIXED | {"training.activation_checkpointing": True},
    "favor resampled": linear("favor", favor={"resample_every": 2}) | {"training.steps": 6},
    "documents": {"text.rows": "documents"},
    "documents segment": {"text.rows": "documents", "training.segment": 32},
    "sentencepiece": {"text.tokenizer": {"kind": "sentencepiece", "vocabulary": 300}},
    "final validation": {"training.validate_every": 2, "training.final_validation_tokens": None},
    "sample": {"training.sample_tokens": 20},
    "encoder documents": {"objective": "masked", "text.rows": "documents"},
    "encoder plain masks": {"objective": "masked", "text.masking": {"kind": "plain", "share": 0.3}},
}

TEACHER = "softmax"
"""The kind of the run that others learn from."""

TAUGHT: dict[str, dict[str, Any]] = {
    "predictions": linear("hedgehog"),
    "predictions segment": linear("hedgehog")
    | {"training.segment": 32, "training.teacher_share": 1.0, "training.teacher_temperature": 2.0},
    "layers": linear("hedgehog", parallel_window=16) | {"training.teacher_of": "layers"},
    "layers favor": linear("favor") | {"training.teacher_of": "layers", "training.activation_checkpointing": True},
}

STAGES = {"layers": {"steps": 3}, "predictions": {"steps": 3}, "sequence_length": 48}

RESUMED: dict[str, dict[str, Any]] = {
    "muon state-passing": MIXED | {"training.state_passing": 0.5, "model.dropout": 0.1},
    "adamw favor": linear("favor", favor={"resample_every": 3}) | {"training.optimizer": "adamw"},
}

ACCUMULATE, STOPPED_AT = 3, 11
"""Forward passes of a step, and the one, within step 4, in which a run is stopped."""


Values = Callable[[str, Options, Workspace], Mapping[str, Any]]
"""(name, options, workspace) -> the values of a case."""


class Crash(BaseException):
    """What ends a run without a word, as a lack of power does."""


def of_kind(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    return of_run(workspace.run_of(name, options))


def of_way(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    return of_run(workspace.train(f"way {name}", options))


def taught(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    """Train beside a teacher, from its weights where its layers are learned."""
    teacher = str(workspace.run_of(TEACHER, KINDS[TEACHER]))
    start = {"training.init_from": teacher} if "training.teacher_of" in options else {}
    return of_run(workspace.train(f"taught {name}", {**options, **start, "training.teacher": teacher}))


def converted(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    """Convert the teacher by `lmlong convert`: the values of each stage's run."""
    teacher = str(workspace.run_of(TEACHER, KINDS[TEACHER]))
    words = workspace.words({**options, "conversion": STAGES})
    workspace.command("convert", teacher, "--to", str(RECIPE), *words, "--out", name)
    return {stage: of_run(workspace.folder / f"{name}{stage}") for stage in ("-layers", "-predictions", "")}


def resumed(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    """Train whole, stopped by a signal and resumed, and crashed and resumed: all three must be the same."""
    chosen = {
        **options,
        "training.steps": 6,
        "training.accumulate": ACCUMULATE,
        "training.batch_size": 2,
        "training.checkpoint_every": 2,
    }
    values = {"whole": of_run(workspace.train(f"{name} whole", chosen))}
    for how, end in (("stopped", interrupt), ("crashed", crash)):
        run = f"{name} {how}"
        with suppress(KeyboardInterrupt, Crash), during_forward(STOPPED_AT, end):
            workspace.train(run, chosen)
        taken = of_run(workspace.folder / run)["metrics"]
        assert 0 < len(taken) < len(values["whole"]["metrics"]), f"{run}: was not stopped"
        values[how] = of_run(workspace.train(run, chosen, resume="auto"))
        assert parts(values[how]) == parts(values["whole"]), f"{run}: not the same as the whole run"
    return values


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def crash() -> NoReturn:
    raise Crash


@contextmanager
def during_forward(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Act in the forward pass of this number, counted by lookups of token embeddings."""
    passed = 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal passed
        if isinstance(module, nn.Embedding):
            passed += 1
            if passed == number:
                act()

    hook = register_module_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def table(prefix: str, lines: Mapping[str, Options], values: Values) -> list[Case]:
    """Return a case for each line of a table."""
    return [Case(f"{prefix} {name}", partial(values, name, options)) for name, options in lines.items()]


CASES = [
    *table("train", KINDS | ENCODERS, of_kind),
    *table("train", WAYS, of_way),
    *table("teacher", TAUGHT, taught),
    *table("resume", RESUMED, resumed),
    *table("convert", {"hedgehog parallel-window": linear("hedgehog", parallel_window=16)}, converted),
]
