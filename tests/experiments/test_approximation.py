"""The approximation study against closed forms, and what it reports."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lmlong.cli.bench import bench
from lmlong.experiments.approximation import (
    FeatureError,
    FeatureSetting,
    Form,
    approximation_cases,
    measure_error,
    study_approximation,
    table,
)


@pytest.mark.parametrize("form", ["positive", "hyperbolic", "trig"])
def test_the_error_falls_as_features_are_added(form: Form) -> None:
    few, many = (measure_error(FeatureSetting(4, 0.25, m, form, True, "chi"), seeds=5).median for m in (16, 1600))
    assert 6 < few / many < 16  # as one over the square root of their number
    assert many < 0.02


def test_orthogonal_rows_help_and_trig_fails_on_large_inputs() -> None:
    def error(form: Form, deviation: float, orthogonal: bool = True) -> float:
        return measure_error(FeatureSetting(16, deviation, 64, form, orthogonal, "chi"), seeds=20).median

    assert error("positive", 0.25) < 0.97 * error("positive", 0.25, orthogonal=False)
    assert error("trig", 0.25) < 0.5 * error("positive", 0.25)
    assert error("positive", 1.0) < 0.2 * error("trig", 1.0)


def results() -> list[FeatureError]:
    """Made up: trig wins at 0.25, positive at 1; orthogonal rows halve the error."""
    found = []
    for setting in [
        FeatureSetting(8, deviation, features, form, orthogonal, norms)
        for deviation in (0.25, 1.0)
        for features in (4, 8)
        for form in ("positive", "hyperbolic", "trig")
        for orthogonal in (True, False)
        for norms in ("chi", "fixed", "quantile")
    ]:
        size = {"positive": 1.0, "hyperbolic": 2.0, "trig": 0.5 if setting.deviation < 1 else 5e6}[setting.form]
        error = size / setting.features * (1 if setting.orthogonal else 2)
        found.append(FeatureError(setting, error, error / 2, error * 2))
    return found


def test_cases_name_the_winner_and_the_gain() -> None:
    small, large = approximation_cases(results())
    assert (small.winner, large.winner) == ("trig", "positive")
    assert small.forms == {"positive": 0.125, "hyperbolic": 0.25, "trig": 0.0625}
    assert small.gain == large.gain == 2.0


def test_the_table_fits_a_terminal() -> None:
    lines = table(results()).splitlines()
    assert max(map(len, lines)) <= 80
    assert "trig" in lines[4] and "6e+05" in lines[5]


def test_the_command_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_approximation, "__defaults__", (2, (8,), (0.5, 1.0), (4, 8)))
    numbers, plot = tmp_path / "a.json", tmp_path / "a.png"
    words = ["approximation", "--seeds", "3", "--json", str(numbers), "--plot", str(plot)]
    done = CliRunner().invoke(bench, words, catch_exceptions=False)
    assert done.exit_code == 0
    written = json.loads(numbers.read_text())
    assert len(written) == 2 * 2 * 3 * 2 * 3
    again = {(*r.setting, r.median) for r in study_approximation(3, (8,), (0.5, 1.0), (4, 8))}
    assert {tuple(list(line.values())[:7]) for line in written} == again
    assert plot.read_bytes().startswith(b"\x89PNG")
