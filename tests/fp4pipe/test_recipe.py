"""Recipes: every shipped one is valid, and every mistake gets one line that says where and what."""

import inspect
from dataclasses import asdict, fields

import pytest
from pydantic import ValidationError

from fp4pipe.errors import UsageError
from fp4pipe.recipe import Recipe
from fp4pipe.recipe_file import SHIPPED, find_recipe, load_recipe, shipped_recipes

MINIMAL = "description: a test\nsource: some/model\n"


@pytest.fixture
def recipe_file(tmp_path):
    def write(text: str):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("*.y*ml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_is_valid_and_findable(path):
    recipe = load_recipe(str(path))
    assert path.suffix == ".yaml"
    assert path == find_recipe(path.stem)
    assert recipe.name == path.stem
    assert path.read_text().startswith("#"), "a recipe opens with what it needs and how it is run"
    assert f"fp4pipe run {path.stem}" in path.read_text()


def test_the_promised_recipes_ship():
    assert {"smollm2-135m", "llama-3.1-8b-instruct", "qwen3-8b", "tiny-random"} <= set(shipped_recipes())


def test_defaults_fill_what_a_recipe_leaves_out(recipe_file):
    recipe = load_recipe(recipe_file(MINIMAL))
    assert recipe == Recipe(name="mine", description="a test", source=("some/model",))
    with pytest.raises(ValidationError, match="frozen"):
        recipe.name = "other"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("quantize.calibration.samples=64", lambda r: r.quantize.calibration.samples == 64),
        ("quantize.exclude=[lm_head, '*.mlp.*']", lambda r: r.quantize.exclude == ("lm_head", "*.mlp.*")),
        ("validate.gsm8k.questions=5", lambda r: r.checks.gsm8k.questions == 5),
        ("validate.gsm8k=null", lambda r: r.checks.gsm8k is None),
        ("validate.gsm8k.margin=1e-3", lambda r: r.checks.gsm8k.margin == 1e-3),
        ("source=[a, b]", lambda r: r.source == ("a", "b")),
        ("ask=What is 2+2=?", lambda r: r.ask == "What is 2+2=?"),
        ("validate.ops=no", lambda r: r.checks.ops is False),
    ],
)
def test_overrides_are_yaml_and_win_over_the_file(recipe_file, override, read):
    assert read(load_recipe(recipe_file(MINIMAL + "quantize: {exclude: [x]}\nask: hi\n"), [override]))


def test_off_is_a_word(recipe_file):
    path = recipe_file(MINIMAL + "load: {graphs: off}\nvalidate: {ops: no}\n")
    recipe = load_recipe(path)
    assert (recipe.load.graphs, recipe.checks.ops) == ("off", False)
    assert load_recipe(path, ["load.graphs=off", "validate.ops=yes", "validate.graphs=true"]).checks.ops is True


@pytest.mark.parametrize("name", ["../up", "a/b", ".", "..", "/abs"])
def test_a_name_is_no_path(recipe_file, name):
    with pytest.raises(UsageError, match="name: String should match pattern"):
        load_recipe(recipe_file(MINIMAL), [f"name={name}"])


def test_a_large_wrong_value_is_cut_short(recipe_file):
    nested = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9))
    with pytest.raises(UsageError) as caught:
        load_recipe(recipe_file(MINIMAL + nested + "name: *x8\n"))
    assert len(str(caught.value)) < 10_000


def test_the_last_override_of_a_key_wins(recipe_file):
    assert load_recipe(recipe_file(MINIMAL), ["load.mode=w4a4", "load.mode=w4a16"]).load.mode == "w4a16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quantize: {calibration: {sampels: 3}}", "quantize.calibration.sampels: unknown key; did you mean 'samples'?"),
        ("valdate: {}", "valdate: unknown key; did you mean 'validate'?"),
        ("validate: {gsm8k: {shot: 1}}", "validate.gsm8k.shot: unknown key; did you mean 'shots'?"),
        (
            "load: {zzz: 1}",
            "load.zzz: unknown key; known: mode, device, dtype, graphs, compiler, ",
        ),
        ("load: {mode: fp4}", "load.mode: Input should be 'auto', 'w4a4' or 'w4a16' (got 'fp4')"),
        ("validate: {gsm8k: {margin: 1e-4x}}", "(got '1e-4x')"),
        ("load: {load_threads: 0}", "load.load_threads: Input should be greater than 0 (got 0)"),
        ("ask: a\nask: b", "key 'ask' is written twice"),
        ("ask: [", "is not YAML"),
    ],
)
def test_mistakes_are_named_with_the_nearest_key_or_the_value_received(recipe_file, text, said):
    with pytest.raises(UsageError) as error:
        load_recipe(recipe_file(MINIMAL + text))
    assert said in str(error.value)
    assert "mine.yaml" in str(error.value)


def test_all_mistakes_are_reported_at_once(recipe_file):
    with pytest.raises(UsageError) as error:
        load_recipe(recipe_file("sauce: x\nload: {mode: 4}\n"))
    assert [line.split(":")[0].split()[-1] for line in error.value.what.split("\n  ")[1:]] == [
        "source",
        "load.mode",
        "sauce",
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mode", "is not key=value"),
        ("=3", "is not key=value"),
        ("a..b=3", "is not key=value"),
        ("ask=[", "is not a YAML value"),
        ("description.x=3", "description holds a value, not keys"),
        ("load.treads=3", "load.treads: unknown key; did you mean 'load_threads'?"),
    ],
)
def test_a_bad_override_is_named(recipe_file, override, said):
    with pytest.raises(UsageError) as error:
        load_recipe(recipe_file(MINIMAL), [override])
    assert said in str(error.value)


def test_a_recipe_that_is_not_there():
    with pytest.raises(UsageError, match="no recipe named 'smollm2-135'; did you mean 'smollm2-135m'"):
        find_recipe("smollm2-135")
    with pytest.raises(UsageError, match=r"recipe file nowhere\.yaml does not exist"):
        find_recipe("nowhere.yaml")


def test_a_recipe_must_be_a_mapping(recipe_file):
    with pytest.raises(UsageError, match="must be a mapping of keys"):
        load_recipe(recipe_file("- a\n"))


def test_gates_may_be_nested_or_dotted_and_overridden_or_taken_away(recipe_file):
    path = recipe_file(MINIMAL + 'gates: {parity.top1: ">=0.99", perplexity: {ratio: "<=1.1"}}\n')
    assert load_recipe(path).gates == {"parity.top1": ">=0.99", "perplexity.ratio": "<=1.1"}
    overridden = load_recipe(
        path, ["gates.parity.top1=>=0.9", "gates.perplexity.ratio=null", "gates.gsm8k.verdict=pass"]
    )
    assert overridden.gates == {"parity.top1": ">=0.9", "gsm8k.verdict": "pass"}


def test_recipes_fit_what_the_rooms_take():
    """Every key of a section is an option of what it is handed to, with the same default."""
    from fp4pipe.convert.options import CalibrationOptions, QuantizeOptions
    from fp4pipe.recipe import Calibration, Checks, Gsm8k, Load, Quantize
    from fp4pipe.runtime.engine import Engine
    from fp4pipe.runtime.validate import Gsm8kOptions, ValidateOptions

    assert Calibration().model_dump() == asdict(CalibrationOptions())
    quantize = asdict(QuantizeOptions()) | {"calibration": Calibration().model_dump()}
    assert Quantize().model_dump().items() <= quantize.items()
    assert Checks.model_fields.keys() <= {field.name for field in fields(ValidateOptions)}
    assert Gsm8k.model_fields.keys() <= {field.name for field in fields(Gsm8kOptions)}
    parameters = inspect.signature(Engine.load).parameters
    assert all(parameters[name].default == value for name, value in Load().model_dump().items())
