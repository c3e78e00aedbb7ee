"""Read and check the configuration of a Llama in transformers' config.json."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from lmlong.io.checked import Checked, checked
from lmlong.recipe import bounds

Size = Annotated[int, Field(gt=0, le=bounds.WIDTH)]
Length = Annotated[int, Field(gt=0, le=bounds.TOKENS)]
Base = Annotated[float, Field(gt=1, le=1e12)]
Factor = Annotated[float, Field(gt=0, le=1e6)]


class RopeParameters(Checked):
    """Rotary positions: `rope_parameters` since transformers 5, `rope_scaling` before."""

    rope_type: str = Field("default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: Base | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Length | None = None


LLAMA3_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}
"""The parameters of rope type llama3, and the equal options of lmlong's recipe.RopeScaling."""


class Architecture(Checked):
    """The kind of a model in its config.json."""

    architectures: list[str] = Field(default_factory=list)
    model_type: str = ""


class LlamaConfig(Checked):
    """The values of a Llama's config.json."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=10_000)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Annotated[int, Field(gt=0, le=bounds.VOCABULARY)] | None = None
    max_position_embeddings: Annotated[int, Field(ge=8, le=bounds.TOKENS)] = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    rope_theta: Base = 10_000.0
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rope(self) -> RopeParameters:
        return self.rope_parameters or self.rope_scaling or RopeParameters()


def llama_config(file: object, values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> LlamaConfig:
    """Return the configuration of a file. `keys` maps names of `LlamaConfig` to the file's names that differ."""
    return checked(LlamaConfig, file, _without_null(values), keys)


def _without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without nulls and empty rope parameters, which count as missing."""
    set_values = {}
    for key, value in values.items():
        if key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            value = _without_null(value) or None
        if value is not None:
            set_values[key] = value
    return set_values
