"""Token files with changed numbers and a manifest that is right: read, or written again.

What a number stands for, and many more of them: `tools/fuzz.py crafted-tokens --cases 1 --seed NUMBER`.
"""

from pathlib import Path

from data.crafted_tokens import prepare_place, try_tokens

USUAL = 60


def test_the_first_crafted_token_files(tmp_path: Path) -> None:
    place = prepare_place(tmp_path)
    tried = {number: try_tokens(number, place) for number in range(USUAL)}
    assert {number: complaints for number, (_, complaints) in tried.items() if complaints} == {}
    assert {what for what, _ in tried.values()} == {"read"}
