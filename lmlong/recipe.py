"""Every option a recipe can hold, with its type, its default and its meaning. Imports no torch.

The reference page, the error messages and `--help` are made from these declarations.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError


class Options(BaseModel):
    """A section of a recipe: unknown keys are refused, values are never converted in silence."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def mistake(key: str, message: str) -> PydanticCustomError:
    """A mistake that only several keys together show; `key`, dotted and within the section, is where it is reported."""
    return PydanticCustomError("mistake", "{message}", {"key": key, "message": message})


# ---- text


class PythonStdlib(Options):
    """The standard library of the running Python, without tests: a corpus every machine holds."""

    kind: Literal["python-stdlib"]
    weight: float = Field(1.0, gt=0)
    """Share of the training tokens, relative to the other sources."""


class Files(Options):
    """Files on disk: plain text as one document a file, .jsonl and .parquet as one document a record."""

    kind: Literal["files"]
    paths: list[str] = Field(min_length=1)
    """Files, folders or globs (** crosses folders); relative ones start at the current folder. .gz and .zst too."""
    column: str = "text"
    """Field of a .jsonl or .parquet record that holds the text."""
    weight: float = Field(1.0, gt=0)
    """Share of the training tokens, relative to the other sources."""


class Hub(Options):
    """A data set of the Hugging Face hub, read through `datasets`."""

    kind: Literal["hub"]
    dataset: str
    """Name of the data set, such as allenai/c4, or a local folder in the same format."""
    config: str | None = None
    """Configuration of the data set, where it has several."""
    split: str = "train"
    """Split to read."""
    column: str = "text"
    """Field of a record that holds the text."""
    streaming: bool = True
    """Read records as they arrive instead of downloading the data set first."""
    weight: float = Field(1.0, gt=0)
    """Share of the training tokens, relative to the other sources."""


Source = Annotated[PythonStdlib | Files | Hub, Field(discriminator="kind")]


class Validation(Options):
    """Text the model never trains on."""

    fraction: float = Field(0.05, gt=0, lt=1)
    """Share of the documents held out, chosen by a hash of their content; with fewer than 20, the end of each."""
    sources: list[Source] = []
    """Sources of their own for validation; with these, nothing is held out of training."""


class Tokenizer(Options):
    """How text becomes numbers, losslessly."""

    kind: Literal["sentencepiece", "bytes"] = "sentencepiece"
    """sentencepiece (subwords, trained on the corpus) or bytes (256 symbols, nothing to train)."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """How sentencepiece finds its pieces."""
    vocabulary: int = Field(4096, ge=300)
    """Number of pieces sentencepiece may use."""
    sample_bytes: int = Field(16_000_000, gt=0)
    """How much of the training text the sentencepiece trainer reads, spread over the corpus."""
    path: str | None = None
    """An existing sentencepiece .model, used as it is instead of training one."""


class Text(Options):
    """What is read, and how it is cut."""

    sources: list[Source] = Field([PythonStdlib(kind="python-stdlib")], min_length=1)
    """Where documents come from; several are mixed by weight."""
    validation: Validation = Validation()
    tokenizer: Tokenizer = Tokenizer()
    sequence_length: int = Field(2048, ge=8)
    """Tokens in one training sequence."""
    rows: Literal["windows", "documents"] = "windows"
    """What a training sequence is: windows of the text, cut anywhere, or whole documents packed one after the other,
    cut only where longer than a sequence."""
    errors: Literal["strict", "replace"] = "strict"
    """What to do with bytes that are not UTF-8: strict names the file and stops, replace puts U+FFFD, counted."""


# ---- model

AttentionKind = Literal["linear", "window", "softmax"]


class Taylor(Options):
    """The second-order features of feature_map: taylor."""

    width: int = Field(16, gt=0)
    """Width r of the projection of queries and keys; it makes 1 + r + r (r + 1) / 2 features."""


class Favor(Options):
    """The random features of feature_map: favor."""

    features: int | None = Field(None, gt=0)
    """Features of a head; left out, twice the head width."""
    form: Literal["positive", "hyperbolic"] = "positive"
    """positive, or hyperbolic: each random row used with both signs, so half as many are drawn."""
    norms: Literal["chi", "fixed", "quantile"] = "chi"
    """Lengths of the random rows: chi as sampled (unbiased), fixed at sqrt(width), or spread over the quantiles."""
    redraw_every: int | None = Field(None, gt=0)
    """Training steps between new draws; left out, the first draw stays."""

    @model_validator(mode="after")
    def check(self) -> "Favor":
        if self.form == "hyperbolic" and (self.features or 0) % 2:
            raise mistake("features", f"{self.features} is odd; hyperbolic features come in pairs.")
        return self


class Attention(Options):
    """How tokens look at the past. Options that a kind does not have are left unread by it."""

    kind: AttentionKind | Annotated[list[AttentionKind], Field(min_length=1)] = "linear"
    """linear (constant state), window (exact over the last tokens, constant state) or softmax (exact, growing state);
    a list is a pattern repeated over the layers."""
    feature_map: Literal["elu", "relu", "cosine", "softmax", "taylor", "favor"] = "elu"
    """linear: the map that replaces softmax's exponential, kept non-negative."""
    decay: Literal["none", "fixed", "learned"] = "learned"
    """linear: forget nothing, at a fixed rate a head, or by a gate learned from the token."""
    window: int = Field(256, gt=0)
    """window: how many tokens are seen, the token itself among them."""
    taylor: Taylor = Taylor()
    favor: Favor = Favor()


class Model(Options):
    """The language model: embedding, blocks, tied output."""

    width: int = Field(256, gt=0)
    """Size of the vector that stands for a token between blocks."""
    layers: int = Field(6, gt=0)
    """Number of blocks."""
    heads: int = Field(4, gt=0)
    """Attention heads in each block; they share the width."""
    attention: Attention = Attention()
    convolution: int = Field(4, ge=0, le=64)
    """Tokens seen by the causal convolution over queries, keys and values; 0 leaves it out."""
    positions: Literal["auto", "none", "rotary"] = "auto"
    """rotary turns queries and keys by their place in the document; auto does so for softmax, window, cosine, favor."""
    mlp_ratio: float = Field(2.7, gt=0)
    """Inner width of the SwiGLU as a multiple of the width (rounded up to a multiple of 32)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the activations dropped on the way into the residual stream while training."""

    @model_validator(mode="after")
    def check(self) -> "Model":
        if self.width % self.heads:
            raise mistake("heads", f"{self.heads} heads do not divide a width of {self.width}.")
        if (self.width // self.heads) % 2 and self.positions != "none":
            raise mistake(
                "heads", f"a head width of {self.width // self.heads} is odd; rotary positions need an even one."
            )
        return self


# ---- training


class DeepSpeed(Options):
    """What strategy: deepspeed divides among the devices, and where it keeps it."""

    stage: Literal[1, 2, 3] = 2
    """What each device holds a part of: 1 AdamW's means and the weights it updates, 2 the gradients too, 3 the weights
    of the forward pass too."""
    offload_optimizer: bool = False
    """Keep AdamW's part in the memory of the CPU, and let the CPU update the weights."""
    offload_parameters: bool = False
    """stage 3: keep the weights in the memory of the CPU until a layer is at work."""
    config: str | None = None
    """A JSON file of further DeepSpeed settings, which go before those made here."""

    @model_validator(mode="after")
    def check(self) -> "DeepSpeed":
        if self.offload_parameters and self.stage != 3:
            raise mistake("offload_parameters", f"stage {self.stage} keeps all weights on each device. Set stage: 3.")
        return self


class Training(Options):
    """How the weights are found."""

    steps: int | None = Field(None, gt=0)
    """Optimizer steps to take; with `tokens` given too, whichever ends first."""
    tokens: int | None = Field(None, gt=0)
    """Tokens to train on, in place of or beside `steps`."""
    strategy: Literal["auto", "ddp", "deepspeed"] = "auto"
    """How several devices train together: ddp (each holds all of the training state) or deepspeed (each holds a part);
    auto takes ddp for more than one."""
    deepspeed: DeepSpeed = DeepSpeed()
    batch_size: int = Field(8, gt=0)
    """Sequences in one forward pass on one device."""
    accumulate: int = Field(1, gt=0)
    """Forward passes whose gradients are added before an optimizer step."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["cosine", "constant", "warmup-stable-decay"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = Field(100, ge=0)
    """Steps over which the learning rate rises from zero, at most half of all."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """warmup-stable-decay: share of the steps, at the end, over which the learning rate falls."""
    final_learning_rate: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end as a share of the peak (cosine and warmup-stable-decay)."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of the weight matrices; norms, gains and biases never decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's memory of the gradient."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW's memory of the squared gradient."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient; longer ones are scaled down to it."""
    precision: Literal["auto", "32", "bf16", "16"] = "auto"
    """Number format of the forward pass; auto takes bf16 where the machine computes in it, else 32."""
    compile: bool = False
    """Let torch.compile fuse the model (needs a C++ compiler; the first step takes minutes)."""
    segment: int | None = Field(None, ge=16)
    """Tokens of a sequence whose activations are held at once; the rest is computed again from the states between
    segments, so a sequence of any length takes the memory of one segment, with the same gradient."""
    carry_state: bool = False
    """Let each row of a batch go on where it ended in the batch before, its state too, without its gradient: the cheap
    and truncated cousin of `segment`."""
    activation_checkpointing: bool = False
    """Keep only the input of each block and compute the rest again in the backward pass."""
    validate_every: int = Field(500, gt=0)
    """Steps between validations; one more follows the last step, over the whole validation text."""
    validation_tokens: int = Field(200_000, gt=0)
    """Tokens of validation text read by the validations on the way."""
    checkpoint_every: int = Field(500, gt=0)
    """Steps between checkpoints."""
    keep_last: int = Field(1, gt=0)
    """How many of the newest checkpoints are kept, beside the best."""
    keep_every: int | None = Field(None, gt=0)
    """Checkpoints whose step is a multiple of this are never removed."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or gradient is not finite: stop before the step, or leave out that step."""
    skips: int = Field(5, gt=0)
    """on_nonfinite: skip: how many steps in a row may be left out before training stops."""
    log_every: int = Field(10, gt=0)
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder too (needs the extra: pip install 'lmlong[tensorboard]')."""
    init_from: str | None = None
    """A run or checkpoint whose weights are the start, where the attention may be another one; its optimizer and
    progress are not taken over."""

    @field_validator("precision", mode="before")
    @classmethod
    def name_of_width(cls, precision: object) -> object:
        """32 and 16 read as numbers in YAML; quotes around them would be a trap."""
        return str(precision) if type(precision) is int else precision

    @model_validator(mode="after")
    def check(self) -> "Training":
        if self.steps is None and self.tokens is None:
            raise mistake("steps", "neither steps nor tokens is given, so training has no end. Set one of them.")
        if self.strategy == "deepspeed" and self.precision == "16":
            raise mistake("precision", "16 is not offered with strategy: deepspeed. Use bf16, 32 or auto.")
        if self.strategy == "deepspeed" and self.deepspeed.stage == 3 and self.compile:
            raise mistake(
                "compile", "deepspeed's stage 3 gathers weights layer by layer. Use stage 1 or 2, or no compile."
            )
        return self


class Recipe(Options):
    """One training run from text to weights."""

    name: str = Field("run", pattern=r"^[\w][\w.-]*$")
    """Name of the run, whose folder is runs/NAME; a recipe file without it takes the file's name."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Start of every random draw: weights, order of the text, dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU when there is one."""
    devices: int = Field(1, gt=0)
    """GPUs of a machine to train on together, or processes where there is none; each has a batch of its own."""
    nodes: int = Field(1, gt=0)
    """Machines to train on together, each with as many devices; start `lmlong train` on all by torchrun or SLURM."""
    text: Text = Text()
    model: Model = Model()
    training: Training

    @property
    def processes(self) -> int:
        """How many processes train together, each on a device of its own."""
        return self.nodes * self.devices

    @property
    def sequences_per_step(self) -> int:
        """Sequences that all processes together read before the weights change."""
        return self.processes * self.training.batch_size * self.training.accumulate

    @model_validator(mode="after")
    def check(self) -> "Recipe":
        kinds = self.model.attention.kind
        grows = "softmax" in ([kinds] if isinstance(kinds, str) else kinds)
        for key in ("segment", "carry_state"):
            if grows and getattr(self.training, key):
                raise mistake(
                    f"training.{key}",
                    "the state of softmax attention grows with each token, so it cannot be handed on for ever. Leave "
                    "this out, or let all layers be linear or window attention.",
                )
        if self.training.carry_state and self.text.rows == "documents":
            raise mistake("training.carry_state", "whole documents need nothing from the batch before. Leave it out.")
        if self.training.carry_state and self.model.attention.favor.redraw_every:
            raise mistake(
                "training.carry_state",
                "features drawn anew make the states of the old ones meaningless. Leave this out, or redraw_every.",
            )
        return self
