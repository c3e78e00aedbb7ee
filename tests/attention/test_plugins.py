"""Plug-ins are used like built-in attentions; an error is one message, and nothing is imported unless it is named."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import predict

import lmlong
from lmlong import recipe
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.plugins import LOADED, load_plugin, unload_plugin
from lmlong.attention.registry import CAUSAL
from lmlong.errors import RecipeError, UsageError
from lmlong.model.encoder import Encoder
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import file as recipe_file
from lmlong.recipe.file import MissingPlugin, recipe_class
from lmlong.recipe.kinds import ATTENTION_KINDS
from lmlong.recipe.reference import reference
from lmlong.testing import BrokenLaw, check_attention, check_feature_map, examine_plugin

TWO_GATES = Path(__file__).parents[1] / "plugins" / "two_gates.py"

SQUARE = """
from lmlong import recipe
from lmlong.attention.feature_maps import FeatureMap


class Square(FeatureMap):
    class Options(recipe.Options):
        '''Of feature_map: square.'''

        floor: float = 0.01
        '''What is added.'''

    def __init__(self, heads, head_dim, options=Options()):
        super().__init__(head_dim)
        self.floor = options.floor

    def query(self, q):
        return q * q + self.floor


FEATURE_MAPS = {"square": Square}
"""


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    for name in list(LOADED):
        unload_plugin(name)


@pytest.fixture
def square(tmp_path: Path) -> Path:
    file = tmp_path / "square.py"
    file.write_text(SQUARE)
    return file


def load(text: str, folder: Path, *overrides: str) -> recipe.Recipe:
    file = folder / "mine.yaml"
    file.write_text(f"training: {{steps: 1}}\n{text}")
    return recipe_file.load(str(file), overrides, load_plugin)


def test_a_model_uses_plugins_by_name(square: Path) -> None:
    load_plugin(TWO_GATES)
    lmlong.load_plugin(square)
    options = recipe.Attention(kind=["two_gates", "linear"], feature_map="square")
    model = LanguageModel(recipe.Model(width=16, layers=2, heads=2, attention=options), 50)
    assert [type(attention).__name__ for attention in model.attentions] == ["TwoGates", "LinearAttention"]
    logits, _ = predict(model, torch.zeros(1, 5, dtype=torch.long))
    assert logits.isfinite().all()
    assert Encoder(
        recipe.Model(width=16, layers=1, heads=2, attention=options.model_copy(update={"kind": "linear"})), 9, 8
    )


def test_options_are_typed_documented_and_saved(tmp_path: Path) -> None:
    text = f"""\
plugins: [{TWO_GATES}]
model:
  attention:
    kind: [two_gates, linear]
    two_gates: {{memory: 50}}
"""
    chosen = load(text, tmp_path)
    assert chosen.model.attention.plugin_options("two_gates").model_dump() == {"memory": 50}
    assert chosen.plugins == [str(TWO_GATES)]
    (tmp_path / "resolved.yaml").write_text(recipe_file.dump(chosen))
    assert recipe_file.load(str(tmp_path / "resolved.yaml"), (), load_plugin) == chosen
    listed = {option.key: option for option in reference(recipe_class())}
    assert listed["model.attention.two_gates.memory"].type == "a number, above 1"
    assert listed["model.attention.two_gates.memory"].meaning.startswith("Tokens after which 1/e")
    with pytest.raises(RecipeError) as refused:
        load(text.replace("memory: 50", "memory: 0, memroy: 1").replace("linear]", "two_gats]"), tmp_path)
    assert [mistake.removeprefix(f"{tmp_path}/mine.yaml") for mistake in refused.value.mistakes] == [
        f":5: model.attention.kind.1: 'two_gats' is not one of {', '.join(ATTENTION_KINDS)}. Did you mean 'two_gates'?",
        ":6: model.attention.two_gates.memory: expected a number, above 1, got 0.",
        ":6: model.attention.two_gates.memroy: unknown key. Did you mean 'memory'?",
    ]


def test_a_recipe_names_only_the_plugins_that_it_needs(square: Path) -> None:
    load_plugin(TWO_GATES)
    chosen = load("plugins: [square.py]\nmodel: {attention: {feature_map: square}}\n", square.parent)
    assert chosen.plugins == [str(square)]
    dumped = recipe_file.dump(load("", square.parent))
    assert "plugins: []" in dumped and "two_gates" not in dumped and "square" not in dumped


SHORT = """
from lmlong.attention.window.layer import WindowAttention


class Short(WindowAttention):
    def __init__(self, heads, head_dim, value_dim):
        super().__init__(heads, head_dim, value_dim, 4)


ATTENTIONS = {"short": Short}
"""


def test_recipes_ask_the_class(tmp_path: Path) -> None:
    grows = TWO_GATES.read_text().replace("    class Options", "    state_growth = 'per token'\n    class Options", 1)
    (tmp_path / "grows.py").write_text(grows)
    kind = "plugins: [grows.py]\nmodel: {heads: 5, width: 15, attention: {kind: two_gates}}\n"
    chosen = load(kind, tmp_path)  # an odd head width: it does not rotate
    assert not any(map(chosen.model.uses_rope, chosen.model.kinds))
    with pytest.raises(RecipeError, match=r"training\.segment=64: the state of two_gates attention grows"):
        load(kind, tmp_path, "training.segment=64")
    with pytest.raises(RecipeError, match="two_gates has no encoder form"):
        load(kind, tmp_path, "objective=masked", "model.heads=3", "model.width=12")
    (tmp_path / "short.py").write_text(SHORT)
    load_plugin(tmp_path / "short.py")
    assert chosen.model.uses_rope("short")  # as the window that it extends


def test_a_changed_file_is_read_again(square: Path) -> None:
    first = load_plugin(square)
    assert check_feature_map(first.feature_maps["square"]).kept
    assert load_plugin(square) is first
    square.write_text(SQUARE.replace("0.01", "0.02"))
    load_plugin(square)
    assert FEATURE_MAPS["square"](2, 4, recipe.Attention()).floor == 0.02


def test_a_checkpoint_imports_nothing(tmp_path: Path, square: Path) -> None:
    side_effect = square.parent / "imported"
    square.write_text(f"open({str(side_effect)!r}, 'w').close()\n{SQUARE}")
    file = tmp_path / "recipe.yaml"
    file.write_text(f"training: {{steps: 1}}\nplugins: [{square}]\nmodel: {{attention: {{feature_map: square}}}}\n")
    with pytest.raises(MissingPlugin, match=r"needs the feature map square of the plug-in square\.py: load it"):
        recipe_file.load(str(file))
    file.write_text(f"training: {{steps: 1}}\nplugins: [{square}]\n")
    assert recipe_file.load(str(file)).plugins == []
    assert not side_effect.exists()


BASE = "from lmlong.attention.base import CausalAttention\nfrom lmlong.attention.feature_maps import FeatureMap\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = (\n", r"bad\.py: cannot be imported: SyntaxError: .* \(bad\.py:1\)"),
        ("\nimport no_such_thing\n", r"cannot be imported: ModuleNotFoundError: No module .* \(bad\.py:2\)"),
        ("def f():\n    raise ValueError('no\\nluck')\nf()\n", r"imported: ValueError: no luck \(bad\.py:2\)"),
        ("raise SystemExit(3)", r"cannot be imported: SystemExit: 3"),
        ("x = 1\n", r"bad\.py: declares no plug-in\. Write ATTENTIONS"),
        ("ATTENTIONS = 3\n", r"ATTENTIONS is not a dict"),
        ("ATTENTIONS = {'mine': 3}\n", r"bad\.py: ATTENTIONS\['mine'\]: 3 is not a subclass of .*CausalAttention"),
        (f"{BASE}class Mine(CausalAttention): pass\nATTENTIONS = {{'mine': Mine}}", r"Mine: lacks forward, init_state"),
        (SQUARE.replace('"square"', '"Square"'), r"'Square' is not a name of lower-case letters"),
        (SQUARE.replace('"square"', '"elu"'), r"the name elu is taken, by lmlong itself"),
        (SQUARE.replace('"square"', '"two_gates"'), r"the name two_gates is taken, by .*two_gates\.py"),
        (SQUARE.replace('"square"', '"decay"'), r"the name decay is already an option of model\.attention"),
        (SQUARE.replace('"square"', '"model_dump"'), r"the name model_dump is already an option"),
        (SQUARE.replace("recipe.Options)", "dict)"), r"Square\.Options: not a subclass of lmlong\.recipe\.Options"),
        (
            SQUARE.replace(" = 0.01", "").replace("=Options()", ""),
            "Options: floor has no default",
        ),
        (SQUARE.replace("float = 0.01", "float = 'x'"), "default of floor is refused: Input should be a valid number"),
        (SQUARE.replace("class Options", "uses_rope = 1\n    class Options"), r"Square: uses_rope must be a bool"),
        (SQUARE.replace("float = 0.01", "float = 1.0\n        floors: dict = {}"), r"recipes cannot hold"),
        (SQUARE.replace(", options=Options()", ""), r"cannot be called with \(heads, head_dim, options\)"),
    ],
)
def test_an_invalid_file_is_one_message(tmp_path: Path, source: str, message: str) -> None:
    load_plugin(TWO_GATES)
    before = dict(CAUSAL), dict(FEATURE_MAPS), set(sys.modules)
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(UsageError, match=message) as refused:
        load_plugin(tmp_path / "bad.py")
    assert "\n" not in str(refused.value)
    assert (dict(CAUSAL), dict(FEATURE_MAPS)) == before[:2] and len(LOADED) == 1


def test_a_missing_file_is_reported_with_the_line_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.py: cannot be read: No such file"):
        load_plugin("missing.py")
    with pytest.raises(RecipeError, match=r"mine\.yaml:2: plugins\.0: .*missing\.py: cannot be read"):
        load("plugins: [missing.py]\n", tmp_path)
    with pytest.raises(RecipeError, match=r"mine\.yaml:2: plugins: expected a list, each text, got 'a\.py'\. Write \["):
        load("plugins: a.py\n", tmp_path)
    with pytest.raises(UsageError, match=r"two_gates: no installed package .* write two_gates\.py\."):
        load_plugin("two_gates")


def test_an_entry_point_is_imported_when_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_maps.py").write_text(SQUARE)
    (about := tmp_path / "my_maps-1.2.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-maps\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text("[lmlong.feature_map]\nsquare = my_maps:Square\nbroken = my_maps:Missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "my_maps" not in sys.modules
    chosen = load("plugins: [square]\nmodel: {attention: {feature_map: square, square: {floor: 0.5}}}\n", tmp_path)
    assert chosen.plugins == ["square"]
    assert FEATURE_MAPS["square"](2, 4, chosen.model.attention).floor == 0.5
    assert load_plugin("square").feature_maps["square"].__module__ == "my_maps"
    with pytest.raises(UsageError, match=r"broken of my-maps 1\.2: cannot be imported: AttributeError"):
        load_plugin("broken")
    with pytest.raises(UsageError, match=r"squaer: no installed package .* Did you mean 'square'\?"):
        load_plugin("squaer")
    del sys.modules["my_maps"]


GROWS = "    state_growth = 'per token'\n    class Options"
DIVIDES = "    denominators = lambda self, q, *_: torch.zeros(q.shape[:3])\n    class Options"
IS_SMALL = "    def state_numbers(self, tokens):\n        return 5\n\n    def reference("


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"decay_gate"', '"out_proj"', ": its gate cannot be named 'out_proj'"),
        ("= heads, head_dim, value_dim", "= 0, 0, 0", r"\(2, 8, 8, options\): does not set self.heads"),
        ("(heads, head_dim), options", "(7,), options", r".*inputs\['decay'\] starts as \(7,\)"),
        ("super().__init__()", "super().__init__(); 1 / 0", r".*ZeroDivisionError: division by zero \(two\.py:\d+\)"),
        ("super().__init__()", "super().__init__(); self.uses_rope = True", ".*uses_rope is set on the instance"),
        ("state.S, []", "state.T, []", r": law 1, forward = definition: AttributeError.*\(two\.py:\d+"),
    ],
)
def test_an_attention_that_fails_is_one_message(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"two\.py: TwoGates{message}"):
        check_changed(tmp_path, before, after)


@pytest.mark.parametrize(
    ("before", "after", "law"),
    [
        ("weights * inputs", "1.01 * weights * inputs", "1, "),
        ("S = S * keep", "S = S * (0.9 if q.shape[2] > 1 else 1)\n            S = S * keep", "2, "),
        ("keep, write = ", "q = q + q.mean(2, keepdim=True)\n        keep, write = ", "4, "),
        ("S = S * keep[:, :, t, :, None] +", "S = S.mul_(keep[:, :, t, :, None]) +", "5, "),
        ("S = S * keep", "S = S + S.mean(0) * 0.1\n            S = S * keep", "6, "),
        ("S = S.masked_fill(document_starts[:, t, None, None, None], 0)", "pass", "7, "),
        ("    def reference(", IS_SMALL, "8, "),
        ("    class Options", GROWS, "8, the state is as large as declared: state_growth, float64"),
        ("S, outputs = state.S, []", "S, outputs = state.S / (k.std() < 50), []", "9, "),
        ("    class Options", DIVIDES, "10, 1 / smallest denominator: float64"),
    ],
)
def test_a_broken_law_is_named(tmp_path: Path, before: str, after: str, law: str) -> None:
    with pytest.raises(BrokenLaw, match=rf"two\.py: TwoGates breaks .*law {law}.*: measured .*, allowed "):
        check_changed(tmp_path, before, after)


def check_changed(folder: Path, before: str, after: str) -> None:
    """Build a model with, and check, a copy of the plug-in with one difference."""
    source = TWO_GATES.read_text()
    assert before in source
    (folder / "two.py").write_text(source.replace(before, after, 1))
    load_plugin(folder / "two.py")
    options = recipe.Attention(kind="two_gates")
    LanguageModel(recipe.Model(width=16, layers=1, heads=2, attention=options), 50)
    check_attention(CAUSAL["two_gates"](3, 8, 6, options))


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        ("q - q.amax(2, keepdim=True)", BrokenLaw, "law 4, each token by itself"),
        ("q", BrokenLaw, "law 10, "),
        ("q[..., :3]", UsageError, r"Square: query returns \(2, 3, 100, 3\), not \(2, 3, 100, 8\)"),
    ],
)
def test_a_broken_feature_map_is_named(square: Path, features: str, error: type[Exception], message: str) -> None:
    square.write_text(SQUARE.replace("q * q + self.floor", features))
    with pytest.raises(error, match=message):
        check_feature_map(load_plugin(square).feature_maps["square"])


def test_a_plugin_is_checked_without_memory_too_as_training_builds_it(square: Path) -> None:
    read = "self.floor = torch.tensor(options.floor).item()"
    square.write_text("import torch\n" + SQUARE.replace("self.floor = options.floor", read))
    with pytest.raises(UsageError, match=r"meta tensors \(square\.py:\d+\)\. Models are also built without memory"):
        examine_plugin(load_plugin(square))


def test_a_map_declares_on_its_class_that_features_may_be_negative(tmp_path: Path, square: Path) -> None:
    square.write_text(SQUARE.replace("    class Options", "    signed = True\n\n    class Options", 1))
    text = "plugins: [square.py]\nmodel: {attention: {feature_map: square, decay: channel}}\n"
    with pytest.raises(RecipeError, match="features of square may be negative"):
        load(text, square.parent)
    square.write_text(SQUARE.replace("self.floor = ", "self.signed = True; self.floor = "))
    load_plugin(square)
    with pytest.raises(UsageError, match="signed is set on the instance"):
        FEATURE_MAPS["square"](2, 4, recipe.Attention(kind="linear", feature_map="square"))
