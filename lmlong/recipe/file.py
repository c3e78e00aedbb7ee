"""A whole recipe: its options outside the sections, how it is loaded, and how it is written as YAML."""

import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML

from lmlong.errors import RecipeError
from lmlong.recipe import bounds
from lmlong.recipe.attention import Attention
from lmlong.recipe.kinds import plugin_sections, plugins_needed
from lmlong.recipe.mistakes import mistakes
from lmlong.recipe.model import Model
from lmlong.recipe.objective import ENCODER_DEFAULTS, Sections, disagreements
from lmlong.recipe.parsed import ATTENTION, FORMAT, parse_recipe
from lmlong.recipe.paths import with_absolute, without_folders
from lmlong.recipe.section import Options, completed, mistake
from lmlong.recipe.text import Text
from lmlong.recipe.training import Conversion, Training
from lmlong.recipe.yaml import KeyPath, at


class Recipe(Options):
    """One training run from text to weights, built from its sections, or loaded from a file."""

    is_recipe = True

    format: Literal[1] = FORMAT
    """Version of the recipe's format; a recipe without it is of this one."""
    name: str = Field(default="run", pattern=r"^[\w][\w.-]*$")
    """Name of the run, whose folder is runs/NAME; a recipe file without it takes the file's name."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Start of every random draw: weights, order of the text, dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to run: cpu, cuda (an NVIDIA GPU) or mps (the GPU of a Mac); auto takes a GPU when there is one."""
    devices: int = Field(default=1, gt=0, le=1024)
    """GPUs of a machine to train on together, or processes where there is none; each has a batch of its own."""
    nodes: int = Field(default=1, gt=0, le=bounds.PROCESSES)
    """Machines to train on together, each with as many devices; start `lmlong train` on all by torchrun or SLURM."""
    objective: Literal["causal", "masked"] = "causal"
    """causal: a language model that predicts the next token from those before; masked: an encoder that predicts masked
    tokens from those on both sides."""
    plugins: list[str] = Field(default=[])
    """Plug-ins whose attentions and feature maps the model may use: Python files, relative to the recipe's folder, or
    names of entry points of installed packages."""
    text: Text = Text()
    model: Model = Model()
    training: Training = Training()
    conversion: Conversion | None = None

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> "Recipe":
        """Load a shipped recipe by its name, one from a file, or one from a dict of sections; `overrides` are other
        values for some of its options. All mistakes are one `RecipeError`.

        >>> recipe = lmlong.Recipe.load("quickstart", {"training.steps": 100, "model.width": 160})
        >>> recipe.training.steps
        100
        """
        return load(source, overrides or {})

    @property
    def processes(self) -> int:
        """Number of processes that train together, each on a device of its own."""
        return self.nodes * self.devices

    @property
    def sequences_per_step(self) -> int:
        """Sequences that all processes together read for one optimizer step."""
        return self.processes * self.training.batch_size * self.training.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all processes together read for one optimizer step."""
        return self.sequences_per_step * self.text.sequence_length

    @property
    def targets_per_sequence(self) -> float:
        """Mean number of targets of a full sequence: all of its tokens, or those that are masked."""
        return self.text.sequence_length * (self.text.masking.share if self.objective == "masked" else 1.0)

    @model_validator(mode="before")
    @classmethod
    def complete(cls, values: Any) -> Any:
        """Fill in the defaults of an encoder, so that its recipe need not switch off causal options."""
        masked = isinstance(values, dict) and values.get("objective") == "masked"
        return completed(values, ENCODER_DEFAULTS) if masked else values

    def disagreements(self) -> Iterator[PydanticCustomError]:
        yield from disagreements(self.objective, Sections(self.text, self.model, self.training))
        length = self.conversion and self.conversion.sequence_length
        if length and self.text.sequence_length % length:
            yield mistake(
                "conversion.sequence_length",
                f"text.sequence_length, {self.text.sequence_length}, is no multiple of {length}. Use a divisor.",
            )


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    load_plugin: Callable[[str], object] | None = None,
    as_trained: bool = False,
) -> Recipe:
    """Load a recipe from a file or from a dict of sections, with its paths made absolute.

    `overrides` are words key.path=value, or values by their key.path. Missing values are taken from the run of
    training.init_from, or are defaults; a recipe `as_trained` is complete. All mistakes are one `RecipeError`.

    The plug-ins that the recipe lists are loaded by `load_plugin`. Without it nothing is imported: an untrusted recipe,
    such as that of a checkpoint, then needs its plug-ins to be loaded already.
    """
    parsed = parse_recipe(source, overrides, as_trained)
    if load_plugin:
        parsed.load_plugins(load_plugin)
    else:
        parsed.check_plugins()
    wrong: dict[KeyPath, str] = {}
    try:
        recipe = recipe_class(plugins_needed(at(parsed.values, ATTENTION))).model_validate(parsed.values)
    except ValidationError as error:
        wrong = mistakes(error, parsed.values, recipe_class(), suggest_paths=True)
    if messages := parsed.messages(wrong):
        raise RecipeError(messages)
    return with_absolute_paths(recipe)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return a recipe whose paths mean the same when it is read in another folder.

    Of its plug-ins, it lists only those that the model uses: a checkpoint needs no others.
    """
    values = with_absolute(recipe.model_dump())
    needed = plugins_needed(at(values, ATTENTION))
    return recipe_class(needed).model_validate({**values, "plugins": list(needed)})


def recipe_class(plugins: Collection[str] | None = None) -> type[Recipe]:
    """Return the recipe class that has the sections of these plug-ins, or of all, in model.attention."""
    return _recipe_class(tuple(plugin_sections(plugins).items()))


@cache  # recipes are equal only if they are of one class
def _recipe_class(sections: tuple[tuple[str, type[Options]], ...]) -> type[Recipe]:
    if not sections:
        return Recipe
    attention = _extended(Attention, dict(sections))
    return _extended(Recipe, {"model": _extended(Model, {"attention": attention})})


SomeOptions = TypeVar("SomeOptions", bound=Options)


def _extended(section: type[SomeOptions], fields: Mapping[str, type[Options]]) -> type[SomeOptions]:
    """Return a subclass of a section with nested sections added, or replaced where the names are the same."""
    declared: dict[str, Any] = {name: (kind, kind()) for name, kind in fields.items()}
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **declared)


def dump(recipe: Recipe) -> str:
    """Return a recipe as YAML with every key, which `load` reads back as the same recipe."""
    return _yaml(recipe.model_dump())


def dump_without_folders(recipe: Recipe) -> str:
    """Return a recipe as YAML that names files without their folders, to be published."""
    return _yaml(without_folders(recipe.model_dump()))


def _yaml(values: dict[str, Any]) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
    # ruamel writes this line break unescaped, and reads it back as a different one.
    yaml.allow_unicode = "\x85" not in json.dumps(values, ensure_ascii=False, default=str)
    yaml.width = 4096  # folded lines would make long paths hard to read and to search
    text = io.StringIO()
    yaml.dump(values, text)
    return text.getvalue()
