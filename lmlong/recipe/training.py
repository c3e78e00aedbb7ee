"""Options of training (length, devices, optimizer, precision, validation, checkpoints) and of a conversion."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from lmlong.recipe import bounds
from lmlong.recipe.option_types import LENGTH
from lmlong.recipe.section import Options, mistake


def format_name(precision: str) -> str:
    """Return the name of a number format as it is printed, such as float32 for 32."""
    return f"float{precision}" if precision.isdecimal() else precision


class DeepSpeed(Options):
    """Options of strategy: deepspeed: which parts of the training state are divided among the devices, and where they
    are kept."""

    stage: Literal[1, 2, 3] = 2
    """Parts divided among the devices: 1 the moments and the weights that the optimizer updates, 2 also the gradients,
    3 also the weights of the forward pass."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in CPU memory, and update the weights on the CPU."""
    offload_parameters: bool = False
    """stage 3: keep weights in CPU memory until a layer needs them."""
    config: str | None = None
    """A JSON file of further DeepSpeed settings; they override those derived from the recipe."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.offload_parameters and self.stage != 3:
            yield mistake("offload_parameters", f"stage {self.stage} keeps all weights on each device. Set stage: 3.")


LIMITS = ("steps", "tokens", "epochs", "minutes")
"""The options that end training."""


class Budget(Options):
    """How long to train."""

    steps: int | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Optimizer steps to take. If several of `steps`, `tokens`, `epochs` and `minutes` are given, training ends at the
    first limit."""
    tokens: Annotated[int | None, Field(gt=0, le=bounds.COUNT), LENGTH] = None
    """Tokens to train on, instead of or in addition to `steps`."""
    epochs: float | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Times that as many tokens are trained on as the training text has, instead of or in addition to `steps`. A small
    model learns a short text by heart in many."""
    minutes: float | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Minutes to train, instead of or in addition to `steps`; 60 if none of the four is given. Counts the time of
    training steps, over all sessions of a run; not set-up, validation, samples and checkpoints. The learning rate
    follows the number of steps expected to fit, from their mean time so far."""

    @model_validator(mode="before")
    @classmethod
    def end(cls, values: Any) -> Any:
        """End training after an hour if the recipe sets no limit."""
        endless = isinstance(values, dict) and all(values.get(key) is None for key in LIMITS)
        return {**values, "minutes": 60.0} if endless else values


class Training(Budget):
    """Training options."""

    clock: Literal["wall", "process"] = "wall"
    """Time that `minutes` counts. wall: the time that passes. process: the processor time of the training process (the
    first, if there are several) divided by its number of threads, so that other programs on a shared machine take no
    minutes from a run. Meant for CPUs: waiting, as for a GPU or a disk, does not count. On a quiet CPU both are about
    the same, but a thread that is idle while another one works makes minutes longer."""
    strategy: Literal["auto", "ddp", "deepspeed"] = "auto"
    """How several devices train together: ddp (each holds the whole training state) or deepspeed (each holds a part).
    auto is ddp for more than one device."""
    deepspeed: DeepSpeed = DeepSpeed()
    batch_size: int = Field(default=8, gt=0, le=bounds.ROWS)
    """Sequences in one forward pass on one device, or on the devices of `sequence_parallel` together."""
    sequence_parallel: int = Field(default=1, gt=0, le=bounds.PROCESSES)
    """Devices that read each row together, a part of it each, for rows too long for the memory of one device. States
    pass between the parts in each layer, so the results are those of one device. Must divide `devices`, or be the
    number of devices of several machines."""
    accumulate: int = Field(default=1, gt=0, le=bounds.ROWS)
    """Forward passes whose gradients are added up for one optimizer step."""
    optimizer: Literal["auto", "muon", "adamw"] = "auto"
    """muon: orthogonal steps for the matrices of linear layers, AdamW for all other weights. adamw: AdamW for all
    weights. auto: muon; a resumed run keeps its optimizer."""
    learning_rate: float = Field(default=12e-3, gt=0, le=bounds.FACTOR)
    """Peak learning rate. The default suits muon at any width, with batches of about 8,000 tokens."""
    schedule: Literal["cosine", "constant", "warmup-stable-decay"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=100, ge=0, le=bounds.COUNT)
    """Steps over which the learning rate rises from zero, up to half of all steps."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """warmup-stable-decay: share of all steps, at the end, over which the learning rate falls."""
    final_learning_rate: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a share of the peak (cosine and warmup-stable-decay)."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    """Weight decay of the matrices of linear layers and the embedding. Norms, gains, biases, convolutions, gates and
    learned projections inside an attention never decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the running mean of the gradient: AdamW's first moment, and Muon's momentum."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay rate of AdamW's second moment, the running mean of the squared gradient."""
    clip: float = Field(default=1.0, gt=0, le=bounds.FACTOR)
    """Maximum norm of the gradient; larger gradients are scaled down to it."""
    precision: Literal["auto", "32", "bf16", "16"] = "auto"
    """Number format of the forward pass. auto is bf16 if the hardware is faster in it, else 32."""
    compile: bool = False
    """Let torch.compile fuse operations of the blocks and of the loss. Needs Triton on a GPU, else a C++ compiler, and
    the first steps take much longer."""
    kernel: Literal["auto", "torch", "triton", "fla"] = "auto"
    """Implementation of recurrent attention over many tokens. auto is native code on a CPU, compiled at its first use
    or prebuilt. On a GPU, auto takes the kernel that can compute each kind of attention, unless its results or
    gradients differ from torch's on a short text. triton and fla (flash-linear-attention) need an NVIDIA GPU; torch
    computes attentions without the named kernel."""
    segment: Annotated[int | None, Field(ge=16, le=bounds.TOKENS), LENGTH] = None
    """Tokens whose activations are held at once. The others are recomputed from the states between segments, so a
    sequence of any length takes the memory of one segment and has the same gradient."""
    carry_state: bool = False
    """Continue each row of a batch from the state of the same row of the previous batch, without its gradient:
    truncated BPTT, cheaper than `segment`."""
    state_passing: float = Field(default=0.0, ge=0, le=1)
    """Share of rows that begin with the state after a row of the previous batch, a different text, instead of an empty
    state, and without its gradient. The model meets the states of long texts at the cost of short ones. Positions
    continue as in one document."""
    quantize: Literal["int4", "int8"] | None = None
    """Format of `--weights` for which the model is trained: in the last quarter of the steps, and in their validation,
    the matrices have the values to which that format rounds them. Decoding with `--weights` then computes with the
    values that were trained. Checkpoints keep the weights in full precision."""
    activation_checkpointing: bool | Literal["auto"] = False
    """Keep only the input of each block, and recompute its activations in the backward pass. auto does if a step would
    not fit into the device's memory otherwise."""
    validate_every: int | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Steps between validations; left out, a fifth of the run, but at most 500 steps, or ten minutes if only `minutes`
    ends it. The last step is always validated. Each validation saves a checkpoint."""
    validation_tokens: Annotated[int, Field(gt=0, le=bounds.COUNT), LENGTH] = 200_000
    """Tokens of validation text scored at each validation: always the same even sample. It decides which checkpoint is
    the best."""
    final_validation_tokens: Annotated[int | None, Field(ge=0, le=bounds.COUNT), LENGTH] = None
    """Tokens of validation text that the best checkpoint is scored on at the end, if they are more than that sample;
    null for all."""
    sample_tokens: Annotated[int, Field(ge=0, le=bounds.TOKENS), LENGTH] = 0
    """Tokens of text that the model generates at each validation, printed and logged in metrics.jsonl; 0 for none."""
    checkpoint_every: int | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Steps between checkpoints, in addition to those of validations; left out, ten minutes of training steps."""
    keep_last: int = Field(default=1, gt=0, le=bounds.COUNT)
    """Number of newest checkpoints to keep, in addition to the best."""
    keep_every: int | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Keep all checkpoints whose step is a multiple of this."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if a loss or gradient is not finite: stop before the step, or skip the step. On a GPU a run stops up
    to `log_every` steps late, with the weights before the step."""
    skips: int = Field(default=5, gt=0, le=bounds.COUNT)
    """on_nonfinite: skip: maximum number of consecutive skipped steps before training stops."""
    early_stopping: bool = True
    """Whether training ends when validation has not improved for a third of the run, and for 50 steps at least.
    Commands load the best checkpoint."""
    log_every: int = Field(default=10, gt=0, le=bounds.COUNT)
    """Steps between training metrics in metrics.jsonl. On a GPU, losses are fetched only then, and before validations
    and checkpoints: after each fetch the GPU stands idle for a moment."""
    loggers: list[Literal["tensorboard", "csv", "wandb"]] = Field(default=[])
    """Further loggers, in the run folder, besides metrics.jsonl. tensorboard and wandb need their extras (pip install
    -e '.[wandb]'); wandb needs an account, or WANDB_MODE=offline."""
    init_from: str | None = None
    """A run or checkpoint to take the initial weights and the tokenizer from. Its optimizer state and progress are not
    used. Options of `model` that the recipe does not set are taken from it too; the attention may differ."""
    only_ngram: bool = False
    """Train only the n-gram heads of model.add_ngram; all other weights stay as they are."""
    teacher: str | None = None
    """A run or checkpoint to learn from, in addition to the text (distillation). Its tokenizer is used."""
    teacher_of: Literal["predictions", "layers"] = "predictions"
    """teacher: what to learn from it. predictions: its next-token distributions. layers: the output of each of its
    attention layers, projections included, given the same input; only these parts are trained then."""
    teacher_share: float = Field(default=0.5, gt=0, le=1)
    """teacher_of: predictions: weight in the loss of the divergence from the teacher's predictions; the cross-entropy
    of the text has the rest."""
    teacher_temperature: float = Field(default=1.0, ge=0.1, le=100)
    """teacher_of: predictions: softmax temperature of both models; above 1, tokens that the teacher finds unlikely
    count for more."""

    @field_validator("precision", mode="before")
    @classmethod
    def name_of_width(cls, precision: object) -> object:
        """Accept the numbers 32 and 16, which then need no quotes in YAML."""
        return str(precision) if type(precision) is int else precision

    @property
    def clock_note(self) -> str:
        """The words after a time that `clock` measures; empty for the wall clock."""
        return " of processor time" if self.clock == "process" else ""

    @property
    def time_limit(self) -> str:
        """The time limit in words. There must be one."""
        assert self.minutes is not None
        return f"{self.minutes:g} minute{'' if self.minutes == 1 else 's'}{self.clock_note}"

    @property
    def passes_states(self) -> bool:
        """Whether a batch needs the state after the previous batch."""
        return self.carry_state or self.state_passing > 0

    def disagreements(self) -> Iterator[PydanticCustomError]:
        layers, deepspeed = self.teacher_of == "layers", self.strategy == "deepspeed"
        freezing = "only_ngram" if self.only_ngram else "teacher_of: layers" if layers else ""
        if self.carry_state and self.state_passing:
            why = "with carry_state, no row begins with the state of another text. Use one of them."
            yield mistake("state_passing", why)
        if layers and self.teacher is None:
            yield mistake("teacher", "teacher_of: layers needs one. Name a run, or leave out teacher_of.")
        elif layers and self.segment:
            why = "teacher_of: layers compares whole sequences. Leave it out, or leave out teacher_of."
            yield mistake("segment", why)
        if self.teacher and self.carry_state:
            why = "a teacher reads each row from an empty state, unlike a model with carry_state."
            yield mistake("teacher", f"{why} Leave out one of them, or use state_passing.")
        if layers and self.state_passing:
            yield mistake("state_passing", "teacher_of: layers reads each row from an empty state. Leave it out.")
        if layers and self.only_ngram:
            yield mistake("only_ngram", "teacher_of: layers trains the attention of each layer. Leave out one of them.")
        if freezing and deepspeed:
            why = f"deepspeed is not supported with {freezing}, which freezes weights. Use ddp or auto."
            yield mistake("strategy", why)
        if freezing and self.quantize:
            yield mistake("quantize", f"{freezing} trains parts of the model only. Leave out one of them.")
        if self.quantize and self.compile:
            yield mistake("quantize", "not supported with compile. Leave out one of them.")
        if self.sequence_parallel > 1:
            yield from (mistake(key, why) for key, why in UNDIVIDABLE.items() if getattr(self, key))
        if deepspeed and self.precision == "16":
            yield mistake("precision", "16 is not supported with strategy: deepspeed. Use bf16, 32 or auto.")
        if deepspeed and self.deepspeed.stage == 3 and self.compile:
            why = "stage 3 of deepspeed gathers weights by layer, which compile does not support. Use stage 1 or 2."
            yield mistake("compile", why)


UNDIVIDABLE = {
    "segment": "the parts of a row exchange states layer by layer, but segments run through all layers one after the "
    "other. Use activation_checkpointing and more devices instead, or leave out sequence_parallel.",
    "compile": "the exchange between the parts of a row cannot be compiled. Leave out one of them.",
    "teacher": "a teacher reads whole rows. Leave it out, or sequence_parallel.",
}
"""Options that do not go together with several parts of a row, and why."""


class Stage(Budget):
    """Length and learning rate of a stage of a conversion."""

    learning_rate: float | None = Field(default=None, gt=0, le=bounds.FACTOR)
    """Peak learning rate of the stage; left out, training.learning_rate."""
    sequence_length: Annotated[int | None, Field(gt=0, le=bounds.TOKENS), LENGTH] = None
    """Sequence length in the stage, which must divide text.sequence_length; left out, conversion.sequence_length."""


class PredictionStage(Stage):
    """The stage of a conversion that learns predictions."""

    state_passing: float = Field(default=0.0, ge=0, le=1)
    """training.state_passing of the stage. The old model reads each sequence from an empty state."""


class Conversion(Options):
    """Options of `lmlong convert`: the two stages in which a model with new attention learns from the old model. They
    precede `training`, the last stage, in which it learns only from the text."""

    layers: Stage | None = Stage()
    """First stage: each attention layer learns the output of the old one, given the same input. Only attention is
    trained. null leaves it out."""
    predictions: PredictionStage | None = PredictionStage()
    """Second stage: the whole model learns the predictions of the old model. null leaves it out."""
    sequence_length: Annotated[int | None, Field(gt=0, le=bounds.TOKENS), LENGTH] = None
    """Sequence length in both stages, which must divide text.sequence_length; left out, text.sequence_length. A step
    has the same number of tokens in all stages."""

    def lengths(self) -> dict[str, int | None]:
        """Return the sequence lengths of stages, by their keys in the section."""
        keys = {"layers.sequence_length": self.layers, "predictions.sequence_length": self.predictions}
        of_stages = {key: stage.sequence_length for key, stage in keys.items() if stage}
        return {"sequence_length": self.sequence_length, **of_stages}
