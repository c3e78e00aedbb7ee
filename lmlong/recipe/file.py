"""A whole recipe: its top-level options, loading, and writing as YAML.

    yaml.parse_yaml: Tree -> Tree.override -> pydantic: Recipe -> mistakes.sentences

A tree holds plain values and the line or override of each; pydantic's errors, and the mistakes found before, become
one sentence each.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError

from lmlong.errors import RecipeError, UsageError, other_format
from lmlong.recipe import bounds
from lmlong.recipe.attention import Attention
from lmlong.recipe.find import find_recipe, read_tree, sections_of
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS, attention_words, plugin_sections, plugins_needed
from lmlong.recipe.mistakes import REMOVED, messages, sentences
from lmlong.recipe.model import Model
from lmlong.recipe.objective import (
    ENCODER_DEFAULTS,
    LABEL_DEFAULTS,
    Objective,
    Sections,
    disagreements,
    trains_encoder,
)
from lmlong.recipe.paths import absolute, is_file, with_absolute, without_folders
from lmlong.recipe.section import Options, completed, mistake
from lmlong.recipe.text import Text
from lmlong.recipe.training import Conversion, Training
from lmlong.recipe.yaml import KeyPath, Mistake, Tree, at, dotted, write_yaml

FORMAT: Literal[1] = 1
ATTENTION: KeyPath = ("model", "attention")


class MissingPlugin(RecipeError):
    """A recipe needs a plug-in that is not loaded and that it may not load itself."""


class Recipe(Options):
    """One training run from text to weights, built from its sections or loaded from a file."""

    format: Literal[1] = FORMAT
    """Version of the recipe format; 1 if left out."""
    name: str = Field(default="run", pattern=r"^[\w][\w.-]*$")
    """Name of the run, whose folder is runs/NAME; in a recipe file, the file's name by default."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of all random draws: weights, order of the text, dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to run: cpu, cuda (an NVIDIA GPU) or mps (the GPU of a Mac); auto is a GPU if there is one."""
    devices: int = Field(default=1, gt=0, le=1024)
    """GPUs of a machine to train on together, or CPU processes, up to two per core; each reads its own batches."""
    nodes: int = Field(default=1, gt=0, le=bounds.PROCESSES)
    """Machines to train on together, each with `devices` devices; start `lmlong train` on all of them by torchrun or
    SLURM."""
    objective: Objective = "causal"
    """causal: a language model that predicts the next token from the previous tokens; masked: an encoder that predicts
    masked tokens from both sides; label: a model of either kind that predicts the label of each document."""
    learn: bool = False
    """Whether commands that read text by the trained model let its output layer learn from it, unless --no-learn is
    given."""
    plugins: list[str] = Field(default=[])
    """Plug-ins with attentions and feature maps for the model: Python files, relative to the recipe's folder, or names
    of entry points of installed packages."""
    text: Text = Text()
    model: Model = Model()
    training: Training = Training()
    conversion: Conversion | None = None

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> "Recipe":
        """Load a recipe: a shipped one by its name, a file, or a dict of sections.

        `overrides` replace some of its options. All mistakes are reported in one `RecipeError`.

        >>> recipe = lmlong.Recipe.load("quickstart", {"training.steps": 100, "model.width": 160})
        >>> recipe.training.steps
        100
        """
        return load(source, overrides or {})

    @property
    def processes(self) -> int:
        """Number of processes that train together, one for each device."""
        return self.nodes * self.devices

    @property
    def batches_at_once(self) -> int:
        """Number of batches that all processes together read at the same time, each by the processes of one group."""
        return self.processes // self.training.sequence_parallel

    @property
    def sequences_per_step(self) -> int:
        """Sequences that all processes together read for one optimizer step."""
        return self.batches_at_once * self.training.batch_size * self.training.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all processes together read for one optimizer step."""
        return self.sequences_per_step * self.text.sequence_length

    @property
    def targets_per_sequence(self) -> float:
        """Mean number of targets in a full sequence: all of its tokens, the masked ones, or its label."""
        if self.objective == "label":
            return 1.0
        return self.text.sequence_length * (self.text.masking.share if self.objective == "masked" else 1.0)

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder."""
        return trains_encoder(self.objective, self.model)

    @property
    def label_names(self) -> list[str] | None:
        """The labels that the model chooses from; None if its objective is another."""
        return self.text.labels.names if self.objective == "label" and self.text.labels else None

    @model_validator(mode="before")
    @classmethod
    def complete(cls, values: Any) -> Any:
        """Fill in the defaults of an objective, so that the recipe of an encoder need not switch off causal options."""
        objective = at(values, ("objective",))
        if objective == "label":
            values = completed(values, LABEL_DEFAULTS)
        if objective == "masked" or (objective == "label" and at(values, ("model", "encoder")) is True):
            values = completed(values, ENCODER_DEFAULTS)
        return values

    def disagreements(self) -> Iterator[PydanticCustomError]:
        yield from disagreements(self.objective, Sections(self.text, self.model, self.training))
        if self.learn and self.objective != "causal":
            what = "an encoder reads its text at once" if self.is_encoder else "a model of labels predicts no tokens"
            yield mistake("learn", f"{what}, and learns nothing while it reads. Leave it out.")
        parts, within = self.training.sequence_parallel, min(self.training.sequence_parallel, self.devices)
        if self.devices % within or parts % within or self.processes % parts:
            why = f"{parts} devices cannot read a row together with devices: {self.devices} on nodes: {self.nodes}."
            remedy = "Use a divisor of devices, or all devices of several machines."
            yield mistake("training.sequence_parallel", f"{why} {remedy}")
        for key, length in (self.conversion.lengths() if self.conversion else {}).items():
            if length and self.text.sequence_length % length:
                why = (
                    f"text.sequence_length, {self.text.sequence_length}, is not a multiple of {length}. Use a divisor."
                )
                yield mistake(f"conversion.{key}", why)


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    load_plugin: Callable[[str], object] | None = None,
    as_trained: bool = False,
) -> Recipe:
    """Load a recipe from a file or from a dict of sections, with its paths made absolute.

    `overrides` are words key.path=value, or values by their key.path. Missing values are taken from the run of
    training.init_from, else from the defaults; a recipe `as_trained` is complete. All mistakes are reported in one
    `RecipeError`.

    The plug-ins that the recipe lists are loaded by `load_plugin`. Without it nothing is imported: an untrusted recipe,
    such as a checkpoint's, requires its plug-ins to be loaded already.
    """
    tree = Tree(_plain(source)) if isinstance(source, Mapping) else read_tree(find_recipe(str(source)))
    for override in _plain(overrides).items() if isinstance(overrides, Mapping) else overrides:
        tree.override(override)
    if not as_trained:
        _complete_from_start(tree.values)
    version = tree.values.get("format")
    if type(version) is int and version > FORMAT:
        raise RecipeError([other_format(tree.file or "the recipe", version, FORMAT)])
    if load_plugin:
        _load_plugins(tree, load_plugin)
    else:
        _check_plugins(tree)
    _drop_removed(tree.values, as_trained)
    wrong: dict[KeyPath, str] = {}
    try:
        recipe = recipe_class(plugins_needed(at(tree.values, ATTENTION))).model_validate(tree.values)
    except ValidationError as error:
        wrong = messages(error, tree.values, recipe_class())
    if mistakes := tree.mistakes + [Mistake(path, tree.origin(path), message) for path, message in wrong.items()]:
        raise RecipeError(sentences(tree, mistakes))
    return with_absolute_paths(recipe)


def _plain(values: Any) -> Any:
    """Return a copy of sections built in Python, typed ones as dicts of the options that were set."""
    if isinstance(values, Options):
        return values.model_dump(exclude_unset=True)
    if isinstance(values, Mapping):
        return {str(key): _plain(value) for key, value in values.items()}
    return [_plain(value) for value in values] if isinstance(values, list) else values


def _load_plugins(tree: Tree, load_plugin: Callable[[str], object]) -> None:
    """Load the plug-ins that a recipe lists; files are relative to the recipe's folder."""
    for number, name in _plugins(tree).items():
        origin = tree.origin(("plugins", number))
        folder = tree.file.parent if tree.file and isinstance(origin, int) else Path()
        try:
            load_plugin(absolute(folder / Path(name).expanduser()) if is_file(name) else name)
        except UsageError as error:
            mistake = Mistake(("plugins", number), origin, str(error))
            raise RecipeError(sentences(tree, [mistake])) from None


def _check_plugins(tree: Tree) -> None:
    """Raise `MissingPlugin` if a recipe lists plug-ins and its attention needs one that is not loaded."""
    kinds, maps = attention_words(at(tree.values, ATTENTION))
    missing = [f"the attention {kind}" for kind in kinds if kind not in ATTENTION_KINDS]
    missing += [f"the feature map {name}" for name in maps if name not in FEATURE_MAP_KINDS]
    plugins = " or ".join(dotted((Path(name).name,)) for name in _plugins(tree).values())
    if missing and plugins:
        needs = f"needs {missing[0]} of the plug-in {plugins}"
        raise MissingPlugin(
            [f"{tree.file or 'the recipe'}: {needs}: load it by --plugin FILE, or in Python by lmlong.load_plugin."]
        )


def _plugins(tree: Tree) -> dict[int, str]:
    """Return the plug-ins that a recipe lists, by their index."""
    plugins = tree.values.get("plugins")
    listed = plugins if isinstance(plugins, list) else []
    return {number: name for number, name in enumerate(listed) if isinstance(name, str)}


def _complete_from_start(values: dict[str, Any]) -> None:
    """Add the missing options of `model` and the missing tokenizer to the values of a recipe.

    Options are taken from the run of `training.init_from`, the tokenizer from that run or else from the teacher.
    A run that cannot be read is ignored here and reported when its weights are loaded.
    """
    start, teacher = (sections_of(at(values, ("training", key))) for key in ("init_from", "teacher"))
    tokenizer = at(start or teacher, ("text", "tokenizer"))
    model = at(start, ("model",))
    if values.get("objective") == "label" and at(start, ("objective",)) == "masked" and isinstance(model, dict):
        model = {**model, "encoder": True}
    defaults = {"model": model, "text": None if tokenizer is None else {"tokenizer": tokenizer}}
    for name, section in defaults.items():
        own = values.get(name, {})
        if isinstance(section, dict) and isinstance(own, dict):
            values[name] = section | own
    if isinstance(names := at(values, (*ATTENTION, "kind")), dict):
        values["model"] |= _with_other_kinds(at(start, ("model",)), values["model"]["attention"], names)


def _with_other_kinds(model: Any, attention: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a model whose attention replaces some kinds by others, such as {softmax: window}: all other
    options of its attention and mixers stay. Without a valid model it has only the new kinds."""
    before, own = at(model, ("attention",)), at(model, ("mixers",))
    before = before if isinstance(before, dict) else {"kind": list(names)}
    kinds, _ = attention_words(before)
    mixers = [mixer for mixer in own if isinstance(mixer, dict)] if isinstance(own, list) else []
    mixers = [{**mixer, "kind": names.get(str(mixer.get("kind")), mixer.get("kind"))} for mixer in mixers]
    return {"attention": {**before, **attention, "kind": [names.get(kind, kind) for kind in kinds]}, "mixers": mixers}


def _drop_removed(values: dict[str, Any], as_trained: bool) -> None:
    """Drop options of earlier versions at their defaults, since runs were saved with every option. Those of a recipe
    `as_trained` have had their effect."""
    for path in REMOVED:
        section = at(values, path[:-1])
        if isinstance(section, dict) and (as_trained or not section.get(path[-1])):
            section.pop(path[-1], None)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return a recipe with absolute paths, which can be read in any folder.

    It lists only the plug-ins that its model uses, the only ones that a checkpoint needs.
    """
    values = with_absolute(recipe.model_dump())
    needed = plugins_needed(at(values, ATTENTION))
    return recipe_class(needed).model_validate({**values, "plugins": list(needed)})


def recipe_class(plugins: Collection[str] | None = None) -> type[Recipe]:
    """Return the recipe class with the sections of these plug-ins, or of all, in model.attention."""
    return _recipe_class(tuple(plugin_sections(plugins).items()))


@cache  # recipes are equal only if they are of one class
def _recipe_class(sections: tuple[tuple[str, type[Options]], ...]) -> type[Recipe]:
    if not sections:
        return Recipe
    attention = _extended(Attention, dict(sections))
    return _extended(Recipe, {"model": _extended(Model, {"attention": attention})})


SomeOptions = TypeVar("SomeOptions", bound=Options)


def _extended(section: type[SomeOptions], fields: Mapping[str, type[Options]]) -> type[SomeOptions]:
    """Return a subclass of a section with nested sections added or replaced."""
    declared: dict[str, Any] = {name: (kind, kind()) for name, kind in fields.items()}
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **declared)


def dump(recipe: Recipe) -> str:
    """Return a recipe as YAML with every key, which `load` reads back as the same recipe."""
    return write_yaml(recipe.model_dump())


def dump_without_folders(recipe: Recipe) -> str:
    """Return a recipe as YAML for publication, with files named without their folders."""
    return write_yaml(without_folders(recipe.model_dump()))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one with dotted keys."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flattened
