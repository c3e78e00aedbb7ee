"""Options of training: its length, devices, optimizer, precision, validation and checkpoints; and of a conversion."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from lmlong.recipe import bounds
from lmlong.recipe.option_types import LENGTH
from lmlong.recipe.section import Options, mistake


class DeepSpeed(Options):
    """strategy: deepspeed: the training state that it divides among the devices, and where it is kept."""

    stage: Literal[1, 2, 3] = 2
    """Parts that are divided among the devices: 1 the moments and the weights that the optimizer updates, 2 the
    gradients too, 3 the weights of the forward pass too."""
    offload_optimizer: bool = False
    """Keep the optimizer's part in the memory of the CPU, and let the CPU update the weights."""
    offload_parameters: bool = False
    """stage 3: keep the weights in the memory of the CPU until a layer computes."""
    config: str | None = None
    """A JSON file of further DeepSpeed settings, which take precedence over those made here."""

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.offload_parameters and self.stage != 3:
            yield mistake("offload_parameters", f"stage {self.stage} keeps all weights on each device. Set stage: 3.")


class Budget(Options):
    """How long is trained."""

    steps: int | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Optimizer steps to take; with `tokens` or `minutes` given too, whichever ends first."""
    tokens: Annotated[int | None, Field(gt=0, le=bounds.COUNT), LENGTH] = None
    """Tokens to train on, in place of or beside `steps`."""
    minutes: float | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Minutes to train, in place of or beside `steps`, and an hour where none of the three is given: the time of the
    training steps of all sessions of the run together, without set-up, validation, samples and checkpoints. The
    learning rate follows the steps that are expected to fit, by their mean time so far."""

    @model_validator(mode="before")
    @classmethod
    def end(cls, values: Any) -> Any:
        """Let training end after an hour where the recipe gives it no end."""
        endless = isinstance(values, dict) and all(values.get(key) is None for key in ("steps", "tokens", "minutes"))
        return {**values, "minutes": 60.0} if endless else values


class Training(Budget):
    """How the model is trained."""

    strategy: Literal["auto", "ddp", "deepspeed"] = "auto"
    """How several devices train together: ddp (each holds all of the training state) or deepspeed (each holds a part);
    auto takes ddp for more than one."""
    deepspeed: DeepSpeed = DeepSpeed()
    batch_size: int = Field(default=8, gt=0, le=bounds.ROWS)
    """Sequences in one forward pass on one device."""
    accumulate: int = Field(default=1, gt=0, le=bounds.ROWS)
    """Forward passes whose gradients are added before an optimizer step."""
    optimizer: Literal["auto", "muon", "adamw"] = "auto"
    """muon takes orthogonal steps for the matrices of linear layers, and AdamW's for all other weights; adamw takes
    AdamW's for all. auto is muon, and for a resumed run the one that it began with."""
    learning_rate: float = Field(default=12e-3, gt=0, le=bounds.FACTOR)
    """Peak learning rate; the default suits muon at any width and batches of about 8,000 tokens."""
    schedule: Literal["cosine", "constant", "warmup-stable-decay"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=100, ge=0, le=bounds.COUNT)
    """Steps over which the learning rate rises from zero, at most half of all."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """warmup-stable-decay: share of the steps, at the end, over which the learning rate falls."""
    final_learning_rate: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end as a share of the peak (cosine and warmup-stable-decay)."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    """Decay of the matrices of linear layers and the embedding. Norms, gains, biases, convolutions, gates and learned
    projections inside an attention never decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of AdamW's first moment, a mean of the gradient."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay rate of AdamW's second moment, a mean of its square."""
    clip: float = Field(default=1.0, gt=0, le=bounds.FACTOR)
    """Largest norm of the gradient; longer ones are scaled down to it."""
    precision: Literal["auto", "32", "bf16", "16"] = "auto"
    """Number format of the forward pass; auto takes bf16 where the machine computes in it, else 32."""
    compile: bool = False
    """Let torch.compile fuse the model (needs a C++ compiler; the first step takes minutes)."""
    kernel: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of linear attention over many tokens. auto is native code on a CPU, compiled at its first use if
    there is a C++ compiler, and torch elsewhere. The Triton kernels, for an NVIDIA GPU, give the same numbers in
    Triton's interpreter and have not been measured on a GPU."""
    segment: Annotated[int | None, Field(ge=16, le=bounds.TOKENS), LENGTH] = None
    """Tokens of a sequence whose activations are held at once; the rest is computed again from the states between
    segments, so a sequence of any length takes the memory of one segment, with the same gradient."""
    carry_state: bool = False
    """Let each row of a batch continue that of the batch before, with its state but not its gradient: truncated BPTT,
    cheaper than `segment`."""
    state_passing: float = Field(default=0.0, ge=0, le=1)
    """Share of the rows that begin with the state after a row of the batch before, another text, in place of an empty
    one, without its gradient: the model meets the states of long texts at the cost of short ones. Positions continue
    from that state's, as in one document."""
    activation_checkpointing: bool = False
    """Keep only the input of each block and compute the rest again in the backward pass."""
    validate_every: int = Field(default=500, gt=0, le=bounds.COUNT)
    """Steps between validations; one more follows the last step."""
    validation_tokens: Annotated[int, Field(gt=0, le=bounds.COUNT), LENGTH] = 200_000
    """Tokens of validation text that each validation scores: an even sample, always the same, by which the best
    checkpoint is chosen."""
    final_validation_tokens: Annotated[int | None, Field(ge=0, le=bounds.COUNT), LENGTH] = None
    """Tokens of validation text scored once more after the last step, beside that sample: null for all of them, 0 for
    none."""
    sample_tokens: Annotated[int, Field(ge=0, le=bounds.TOKENS), LENGTH] = 0
    """Tokens that the model writes at each validation, printed and kept in metrics.jsonl; 0 for no sample."""
    checkpoint_every: int = Field(default=500, gt=0, le=bounds.COUNT)
    """Steps between checkpoints."""
    keep_last: int = Field(default=1, gt=0, le=bounds.COUNT)
    """How many of the newest checkpoints are kept, beside the best."""
    keep_every: int | None = Field(default=None, gt=0, le=bounds.COUNT)
    """Checkpoints whose step is a multiple of this are never removed."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or gradient is not finite: stop before the step, or skip that step."""
    skips: int = Field(default=5, gt=0, le=bounds.COUNT)
    """on_nonfinite: skip: how many steps in a row may be skipped before training stops."""
    log_every: int = Field(default=10, gt=0, le=bounds.COUNT)
    """Steps between lines of metrics.jsonl."""
    loggers: list[Literal["tensorboard", "csv", "wandb"]] = Field(default=[])
    """Where metrics go besides metrics.jsonl, in the run folder. tensorboard and wandb need their extras (pip install
    'lmlong[wandb]'), and wandb an account, or WANDB_MODE=offline."""
    init_from: str | None = None
    """A run or checkpoint whose weights are the start, where the attention may be another one; its optimizer and
    progress are not taken over. Its tokenizer is kept, and of `model` what the recipe does not set."""
    teacher: str | None = None
    """A run or checkpoint whose predictions are learned beside the text (distillation); its tokenizer is taken."""
    teacher_of: Literal["predictions", "layers"] = "predictions"
    """teacher: what is learned of it: its predictions, or of each layer, given what the teacher's has read, the output
    of the attention and its projections, which alone are trained then."""
    teacher_share: float = Field(default=0.5, gt=0, le=1)
    """teacher_of: predictions: weight of the divergence from them in the loss; the rest is that of the text's own
    tokens."""
    teacher_temperature: float = Field(default=1.0, ge=0.1, le=100)
    """teacher_of: predictions: the temperature at which both predict; above 1, what the teacher holds unlikely counts
    for more."""

    @field_validator("precision", mode="before")
    @classmethod
    def name_of_width(cls, precision: object) -> object:
        """Accept the numbers 32 and 16, so that they need no quotes in YAML."""
        return str(precision) if type(precision) is int else precision

    @property
    def passes_states(self) -> bool:
        """Whether a batch needs the state after the one before."""
        return self.carry_state or self.state_passing > 0

    def disagreements(self) -> Iterator[PydanticCustomError]:
        if self.carry_state and self.state_passing:
            yield mistake("state_passing", "carry_state begins no row with the state of another text. Use one of them.")
        if self.teacher_of == "layers" and (self.teacher is None or self.segment):
            why = "there is no teacher. Name a run" if self.teacher is None else "layers are compared all at once"
            yield mistake("teacher" if self.teacher is None else "segment", f"{why}, or leave out teacher_of.")
        if self.teacher_of == "layers" and self.strategy == "deepspeed":
            yield mistake("strategy", "layers are learned with all other weights as they are. Use ddp or auto.")
        if self.teacher and self.passes_states:
            yield mistake(
                "teacher",
                "it reads each row from an empty state, and the model from that of another. Leave this out, or "
                "carry_state and state_passing.",
            )
        if self.strategy == "deepspeed" and self.precision == "16":
            yield mistake("precision", "16 is not offered with strategy: deepspeed. Use bf16, 32 or auto.")
        if self.strategy == "deepspeed" and self.deepspeed.stage == 3 and self.compile:
            yield mistake(
                "compile", "deepspeed's stage 3 gathers weights layer by layer. Use stage 1 or 2, or no compile."
            )


class Stage(Budget):
    """A stage of a conversion: how long, and how fast."""

    learning_rate: float | None = Field(default=None, gt=0, le=bounds.FACTOR)
    """Peak learning rate of the stage; left out, training.learning_rate."""


class Conversion(Options):
    """`lmlong convert`: the two stages in which a model with new attention learns from the old one, before `training`,
    the last stage, in which it learns from the text alone."""

    layers: Stage = Stage()
    """Each layer learns the output of the old one's, given what that has read; nothing but attention is trained."""
    predictions: Stage = Stage()
    """The whole model learns the predictions of the old one."""
    sequence_length: Annotated[int | None, Field(gt=0, le=bounds.TOKENS), LENGTH] = None
    """Tokens of a sequence in both, of which text.sequence_length is a multiple; left out, as many. A step has as many
    tokens in all stages."""
