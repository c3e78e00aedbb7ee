"""Options of earlier versions. Runs were saved with every option, so a removed one is dropped at its default."""

from typing import Any, NamedTuple

from lmlong.recipe.yaml import KeyPath, at


class Removed(NamedTuple):
    """An option that no longer exists."""

    path: KeyPath
    default: Any
    remedy: str
    """What to do in a recipe that sets another value."""


REMOVED = (
    Removed(("training", "keep_predictions"), None, "The teacher predicts in each step. Leave it out."),
    Removed(("conversion", "keep_predictions"), None, "The teacher predicts in each step. Leave it out."),
)


def drop_removed(values: Any, as_trained: bool) -> dict[KeyPath, str]:
    """Drop removed options at their defaults from the values of a recipe, and return a message for each other one. The
    weights of a recipe `as_trained` are read as they are, whatever removed options of its training were."""
    messages = {}
    for path, default, remedy in REMOVED:
        section = at(values, path[:-1])
        if not isinstance(section, dict) or path[-1] not in section:
            continue
        if section[path[-1]] == default or (as_trained and path[0] != "model"):
            del section[path[-1]]
        else:
            messages[path] = f"no longer an option. {remedy}"
    return messages
