"""Loops in generated text: where a model repeats a unit over and over."""

TIMES, CHARACTERS = 4, 40
"""A loop repeats its unit at least so many times, over at least so many characters; real text hardly has any."""

RULE = 120
"""The same character over fewer is indentation or a rule, as real text has it."""


def find_loop(text: str) -> str | None:
    """Return the first loop in a text, of the shortest unit and up to where it is known to be one; None without any."""
    for size in range(1, len(text) // TIMES + 1):
        needed, same = max((TIMES - 1) * size, (RULE if size == 1 else CHARACTERS) - size), 0
        for place in range(size, len(text)):
            same = same + 1 if text[place] == text[place - size] else 0
            if same >= needed:
                found = text[place + 1 - size - same : place + 1]
                if size == 1 or len(set(found)) > 1:
                    return found
    return None
