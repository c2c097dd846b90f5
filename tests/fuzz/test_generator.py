"""The generator: the same seed gives the same script, each compiles, and every feature comes up."""

from __future__ import annotations

import ast
import random

import pytest

from .draft import Draft
from .generator import generate
from .kills import draw_plan
from .options import AXES, BASIC, OPTIONS
from .test_fuzz import SHORT_RUN

MANY = range(1500)


def test_the_same_seed_gives_the_same_script_and_plan() -> None:
    for seed in range(20):
        first, second = generate(seed), generate(seed)
        assert first == second
        assert draw_plan(seed, dict(first.features)) == draw_plan(seed, dict(second.features))


def test_scripts_of_different_seeds_differ() -> None:
    assert len({generate(seed).text for seed in range(50)}) == 50


def test_every_script_compiles_and_names_its_features() -> None:
    for seed in range(300):
        script = generate(seed)
        docstring = ast.get_docstring(ast.parse(script.text))
        assert docstring is not None
        for name in script.features.values():
            assert name.replace("_", " ") in docstring
        assert "LOOP" not in script.text
        assert "NUMBER" not in script.text


def test_every_feature_comes_up() -> None:
    seen = {(axis, name) for seed in MANY for axis, name in generate(seed).features.items()}
    wanted = {(axis, name) for axis in AXES for name in OPTIONS[axis] if name != "none"}
    assert wanted - seen == set()


def test_every_script_has_what_its_options_need() -> None:
    for seed in MANY:
        features = dict.fromkeys(AXES, "none") | dict(generate(seed).features)
        for axis, name in features.items():
            option = OPTIONS[axis][name]
            needs = {other: BASIC.get(other, "none") for other in option.bars} | dict(option.forces)
            assert needs.items() <= features.items(), f"seed {seed}: {axis} {name}"


def test_options_name_axes_and_options_that_are_there() -> None:
    for axis in AXES:
        for name, option in OPTIONS[axis].items():
            assert all(need in OPTIONS[other] for other, need in option.forces.items()), name
            assert all(BASIC.get(other, "none") in OPTIONS[other] for other in option.bars), name


def test_leaving_a_feature_out_leaves_the_others_as_they_are() -> None:
    seed = next(seed for seed in MANY if "average" in generate(seed).features and not generate(seed).mistake)
    whole, smaller = generate(seed), generate(seed, without=["average"])
    assert smaller.features == {axis: name for axis, name in whole.features.items() if axis != "average"}
    assert set(smaller.text.splitlines()[1:]) - set(whole.text.splitlines()) <= _lines_of_calls(smaller.text)


def _lines_of_calls(text: str) -> set[str]:
    """Those that list everything, and so say what is left out."""
    return {line for line in text.splitlines() if "job.register(" in line or "FINAL" in line}


@pytest.mark.parametrize("mistake", sorted(name for name in OPTIONS["mistake"] if name != "none"))
def test_a_planted_mistake_changes_the_script(mistake: str) -> None:
    planted = generate(1, given={"mistake": mistake})
    sound = generate(1, given={**planted.features, "mistake": "none"})
    assert planted.text.split("class Net")[1] != sound.text.split("class Net")[1]


def test_the_short_run_has_every_kind_of_loop_data_and_kill() -> None:
    scripts = [generate(seed) for seed in SHORT_RUN]
    seen = {(axis, name) for script in scripts for axis, name in script.features.items()}
    assert {name for axis, name in seen if axis == "loop"} == {"steps", "epochs", "attempts"}
    assert {axis for axis, _ in seen} >= set(AXES) - {"whole"}
    plans = [draw_plan(script.seed, dict(script.features)) for script in scripts]
    assert any(plan.faults for plan in plans)
    assert any(plan.power_cut for plan in plans)
    assert {kill.moment for plan in plans for kill in plan.kills} >= {
        "starting", "joined", "step", "generation", "joining", "last"
    }  # fmt: skip


def test_an_option_adds_to_a_draft_only() -> None:
    draft = Draft()
    OPTIONS["net"]["mlp"].make(draft, random.Random(0))
    assert draft.layers
    assert Draft().layers == []
