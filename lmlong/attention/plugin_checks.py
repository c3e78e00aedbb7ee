"""Checks of a plug-in: its names, classes, options and instances."""

import inspect
import keyword
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.inputs import Gate, LastTokens
from lmlong.errors import UsageError
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS
from lmlong.recipe.reference import reference
from lmlong.recipe.yaml import dotted

NAME = re.compile(r"[a-z][a-z0-9_]*")

WITHOUT_VALUES = (
    ". Models are also built without memory, to learn their size: compute numbers by Python's math, or read values in "
    "forward"
)


def check_name(where: str, dict_name: str, kind: Any, own: set[str]) -> None:
    """Refuse a name that recipes cannot hold, or that is taken, also by the plug-in's `own` names."""
    if not isinstance(kind, str) or not NAME.fullmatch(kind) or keyword.iskeyword(kind):
        raise UsageError(
            f"{where}: {dict_name}: {kind!r} is not a name of lower-case letters, digits and _. Rename it."
        )
    registered = ATTENTION_KINDS.get(kind) or FEATURE_MAP_KINDS.get(kind)
    if registered or kind in own:
        owner = where if kind in own else registered.plugin if registered and registered.plugin else "lmlong itself"
        raise UsageError(f"{where}: {dict_name}: the name {kind} is taken, by {owner}. Give it another name.")
    if hasattr(recipe.Attention, kind) or kind in recipe.Attention.model_fields:
        raise UsageError(
            f"{where}: {dict_name}: the name {kind} is already an option of model.attention. Give it another name."
        )


def check_class(where: str, cls: Any, base: type[CausalAttention] | type[FeatureMap]) -> None:
    """Refuse a class that lmlong cannot build."""
    if not isinstance(cls, type) or not issubclass(cls, base):
        shown = cls.__name__ if isinstance(cls, type) else repr(cls)[:60]
        raise UsageError(f"{where}: {shown} is not a subclass of {base.__module__}.{base.__name__}. Derive from it.")
    where = f"{where}: {cls.__name__}"
    if lacks := sorted(getattr(cls, "__abstractmethods__", ())):
        raise UsageError(f"{where}: lacks {', '.join(lacks)}. Define the missing methods.")
    if not isinstance(cls.uses_rope, bool) or getattr(cls, "state_growth", "constant") not in ("constant", "per token"):
        raise UsageError(f"{where}: uses_rope must be a bool, and state_growth 'constant' or 'per token'.")
    options = options_of(cls)
    if options is not None and not (isinstance(options, type) and issubclass(options, recipe.Options)):
        raise UsageError(f"{where}.Options: not a subclass of lmlong.recipe.Options. Derive from it.")
    for problem in _option_problems(options) if options else ():
        raise UsageError(f"{where}.Options: {problem}")
    sizes = ["heads", "head_dim", *(["value_dim"] if base is CausalAttention else [])]
    arguments = [*sizes, *(["options"] if options else [])]
    try:
        inspect.signature(cls).bind(*arguments)
    except TypeError as error:
        raise UsageError(f"{where}: cannot be called with ({', '.join(arguments)}): {error}.") from None


def _option_problems(options: type[recipe.Options]) -> Iterator[str]:
    for name, field in options.model_fields.items():
        if field.is_required():
            yield f"{name} has no default. Give it one."
    try:
        reference(options)
    except KeyError as error:
        yield f"recipes cannot hold {error}. Use int, float, str, bool, a Literal, a list or another Options."
    try:
        options.model_validate(dict(options()))
    except ValidationError as error:
        (first, *_) = error.errors()
        yield f"the default of {dotted(first['loc'])} is refused: {first['msg']}."


def options_of(cls: type) -> type[recipe.Options] | None:
    """Return the options class of an attention or feature map, or None."""
    return getattr(cls, "Options", None)


def problem_of(made: CausalAttention | FeatureMap, *sizes: int) -> str:
    """Return why an instance cannot be used, or an empty text."""
    for name in ("state_growth", "uses_rope", "signed"):
        if getattr(made, name, None) != getattr(type(made), name, None):
            return f"{name} is set on the instance. Set it on the class, where recipes look."
    if isinstance(made, FeatureMap):
        return ""
    if [getattr(made, name, None) for name in ("heads", "head_dim", "value_dim")] != list(sizes):
        return "does not set self.heads, self.head_dim and self.value_dim to its arguments."
    for name, declared in made.inputs.items():
        if not isinstance(declared, Gate | LastTokens):
            return f"inputs[{name!r}] is neither a Gate nor LastTokens."
        if isinstance(declared, Gate) and (declared.start.ndim not in (1, 2) or declared.start.shape[0] != sizes[0]):
            return f"inputs[{name!r}] starts as {tuple(declared.start.shape)}, not as (heads,) or (heads, channels)."
    return ""


def explain(error: BaseException, file: str | None = None) -> str:
    """Return an error of a plug-in on one line: its type, its text, and the line of `file` that raised it (of any file
    if None)."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    inside = [frame for frame in frames if file is None or frame[0] == file]
    source = inside[-1] if inside else None
    text = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        source, text = (error.filename, error.lineno or 1), error.msg
    at = f" ({os.path.basename(source[0])}:{source[1]})" if source else ""
    remedy = WITHOUT_VALUES if "meta tensor" in text else ""
    return f"{type(error).__name__}: {' '.join(text.split())}{at}{remedy}"


def file_of(cls: type) -> str | None:
    """Return the file that defines a class."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None)
