"""Plug-ins: a user's own attentions and feature maps, from a Python file or an installed package.

A file declares them by name, ATTENTIONS = {"two_gates": TwoGates} or FEATURE_MAPS = {"square": Square}. A package
declares entry points in the groups lmlong.attention and lmlong.feature_map. Only plug-ins that the user names are
imported.
"""

import hashlib
import linecache
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from lmlong.attention import feature_map_registry, registry
from lmlong.attention.base import CausalAttention
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.plugin_checks import check_class, check_name, explain, file_of, options_of, problem_of
from lmlong.errors import LmlongError, UsageError, nearest
from lmlong.io.files import read_ordinary
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS, AttentionInfo, FeatureMapInfo
from lmlong.recipe.paths import is_file

ATTENTIONS, FEATURE_MAPS = "ATTENTIONS", "FEATURE_MAPS"
GROUPS = {ATTENTIONS: "lmlong.attention", FEATURE_MAPS: "lmlong.feature_map"}
"""The dicts of a file, and the matching groups of entry points."""

BASES: dict[str, type[CausalAttention] | type[FeatureMap]] = {ATTENTIONS: CausalAttention, FEATURE_MAPS: FeatureMap}


class Plugin(NamedTuple):
    """A loaded plug-in."""

    name: str  # an absolute path, or the name of an entry point
    sha256: str  # of the file's bytes, or of the package's name and version
    attentions: Mapping[str, type[CausalAttention]]
    feature_maps: Mapping[str, type[FeatureMap]]


LOADED: dict[str, Plugin] = {}
"""The loaded plug-ins, by name."""


def load_plugin(name: str | Path) -> Plugin:
    """Import a plug-in, a Python file or the name of an entry point, so that recipes and runs can use its names.

    A file that has changed is imported again; models that are already built keep their classes.
    """
    word = str(name)
    return _load_file(word) if is_file(word) or isinstance(name, Path) else _load_entry_point(word)


def unload_plugin(name: str | Path) -> None:
    """Unload a plug-in and free its names."""
    word = str(name)
    plugin = LOADED.pop(word if word in LOADED else _absolute(word))
    for kind in plugin.attentions:
        del ATTENTION_KINDS[kind], registry.CAUSAL[kind]
    for feature_map in plugin.feature_maps:
        del FEATURE_MAP_KINDS[feature_map], feature_map_registry.FEATURE_MAPS[feature_map]


def _load_file(word: str) -> Plugin:
    path = _absolute(word)
    try:
        source = read_ordinary(Path(path))
    except OSError as error:
        raise UsageError(f"{word}: cannot be read: {error.strerror}. Name the Python file of a plug-in.") from None
    digest = hashlib.sha256(source).hexdigest()
    if path in LOADED:
        if LOADED[path].sha256 == digest:
            return LOADED[path]
        unload_plugin(path)
    module = _run_file(word, path, source)
    declared = {dict_name: getattr(module, dict_name, {}) for dict_name in GROUPS}
    for dict_name, classes in declared.items():
        if not isinstance(classes, Mapping):
            raise UsageError(f'{word}: {dict_name} is not a dict. Write {dict_name} = {{"name": Class}}.')
    if not any(declared.values()):
        raise UsageError(f'{word}: declares no plug-in. Write ATTENTIONS = {{"name": Class}}, or FEATURE_MAPS.')
    return _register(word, path, digest, declared)


def _run_file(word: str, path: str, source: bytes) -> ModuleType:
    """Return the module of a file. It runs the hashed bytes and leaves no cache beside the file."""
    module = ModuleType(f"lmlong_plugin_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # type hints and docstrings of classes are looked up there
    linecache.checkcache(path)
    try:
        exec(compile(source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UsageError(f"{word}: cannot be imported: {explain(error, path)}") from error
    return module


def _load_entry_point(word: str) -> Plugin:
    every = [point for group in GROUPS.values() for point in metadata.entry_points(group=group)]
    points = [point for point in every if point.name == word]
    if not points:
        hint = nearest(word, [point.name for point in every]) or f" For a file, write {word}.py."
        raise UsageError(f"{word}: no installed package has an entry point of this name for lmlong.{hint}")
    packages = [f"{point.dist.name} {point.dist.version}" if point.dist else point.value for point in points]
    if len(points) > 1:
        raise UsageError(f"{word}: declared more than once, by {' and '.join(packages)}. Remove one of them.")
    if word in LOADED:
        return LOADED[word]
    try:
        value = points[0].load()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{word} of {packages[0]}: cannot be imported: {explain(error)}") from error
    dict_name = next(name for name, group in GROUPS.items() if group == points[0].group)
    digest = hashlib.sha256(packages[0].encode()).hexdigest()
    return _register(f"{word} of {packages[0]}", word, digest, {dict_name: {word: value}})


def _register(where: str, name: str, digest: str, declared: Mapping[str, Mapping[Any, Any]]) -> Plugin:
    """Register everything that a plug-in declares beside the built-in attentions and feature maps, or nothing."""
    plugin = Plugin(name, digest, dict(declared.get(ATTENTIONS, {})), dict(declared.get(FEATURE_MAPS, {})))
    names: set[str] = set()
    for dict_name, classes in declared.items():
        for kind, cls in classes.items():
            check_name(where, dict_name, kind, names)
            check_class(f"{where}: {dict_name}[{kind!r}]", cls, BASES[dict_name])
            names.add(kind)
    for kind, attention in plugin.attentions.items():
        ATTENTION_KINDS[kind] = AttentionInfo(
            layer=attention.__name__,
            state_growth=attention.state_growth,
            has_keys=attention.has_keys,
            uses_rope=attention.uses_rope,
            options=options_of(attention),
            plugin=name,
        )
        registry.CAUSAL[kind] = _factory(where, kind, attention)
    for kind, feature_map in plugin.feature_maps.items():
        FEATURE_MAP_KINDS[kind] = FeatureMapInfo(
            uses_rope=feature_map.uses_rope, signed=feature_map.signed, options=options_of(feature_map), plugin=name
        )
        feature_map_registry.FEATURE_MAPS[kind] = _factory(where, kind, feature_map)
    LOADED[name] = plugin
    return plugin


def _factory(where: str, kind: str, cls: type[Any]) -> Callable[..., Any]:
    """Return the registry's factory: (heads, head dim, value dim (attentions only), options of model.attention) -> an
    instance."""

    def make(*sizes_and_options: Any) -> Any:
        *sizes, options = sizes_and_options
        own = [options.plugin_options(kind)] if options_of(cls) else []
        called = f"{where}: {cls.__name__}({', '.join([*map(str, sizes), *(['options'] if own else [])])})"
        try:
            made = cls(*sizes, *own)
        except LmlongError:
            raise
        except Exception as error:
            raise UsageError(f"{called}: {explain(error, file_of(cls))}") from error
        if problem := problem_of(made, *sizes):
            raise UsageError(f"{called}: {problem}")
        return made

    return make


def in_words(made: nn.Module) -> str:
    """Return the class of an attention or feature map for a message, with its file if it is from a plug-in."""
    cls, file = type(made), file_of(type(made))
    if file is None or file not in LOADED:
        return cls.__name__
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}: {cls.__name__}"


def _absolute(word: str) -> str:
    return os.path.abspath(os.path.expanduser(word))
