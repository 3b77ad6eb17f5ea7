"""[[optimizer.groups]]: which parameters a group has, and what is refused, at its place."""

from __future__ import annotations

import pytest
from jobs import GOOD, load, problems

LORA = ("model.lora.rank=4", "model.lora.alpha=16")


def with_groups(*groups: str) -> str:
    tables = "".join(f"[[optimizer.groups]]\n{group}\n" for group in groups)
    return GOOD.replace("[checkpoint]", f"{tables}\n[checkpoint]")


NORMS = 'match = "*norm.weight"\nweight_decay = 0.0'
FIRST_LAYER = 'match = "model.layers.0.*"\nlr_factor = 0.5'


def test_the_first_group_that_matches_has_a_parameter() -> None:
    optimizer = load(with_groups(NORMS, FIRST_LAYER)).optimizer
    norms, first = optimizer.groups
    assert (norms.lr_factor, norms.weight_decay) == (1.0, 0.0)
    assert (first.lr_factor, first.weight_decay) == (0.5, None)
    assert optimizer.group_of("model.layers.0.input_layernorm.weight") is norms
    assert optimizer.group_of("model.norm.weight") is norms
    assert optimizer.group_of("model.layers.0.mlp.up_proj.weight") is first
    assert optimizer.group_of("model.layers.1.mlp.up_proj.weight") is None


@pytest.mark.parametrize(
    ("groups", "at", "message", "hint"),
    [
        (('match = "embed"\nlr_factor = 0.5',), '"embed"', 'no parameter is named "embed"', 'did you mean "*embed*"?'),
        (('match = "*.mlp.upproj.weight"\nlr_factor = 0.5',), '"*.mlp.upproj.weight"', "no parameter is named", "did you mean `model.layers.*.mlp.up_proj.weight`?"),
        (('match = "model.layers.4.*"\nlr_factor = 0.5',), '"model.layers.4.*"', "no parameter is named", "model.layers.*"),
        ((FIRST_LAYER, 'match = "*.0.mlp.*"\nlr_factor = 2.0'), '"*.0.mlp.*"', 'earlier groups have all parameters that are named "*.0.mlp.*"', "put it before them"),
        (('match = "*"',), '"*"', "a group without lr_factor and weight_decay has no effect", "lr_factor = 1.0"),
        ((NORMS, 'match = "*.mlp.*"\nlr_factor = -1'), "-1", "optimizer.groups[1].lr_factor must be at least 0, not -1", ""),
        (('match = "*"\nweight_decay = -0.1',), "-0.1", "optimizer.groups[0].weight_decay must be at least 0, not -0.1", ""),
        (('match = "*"\nlr_factor = 10.0\nweight_decay = 99.5',), "99.5", "lr 0.003 x lr_factor 10 x weight_decay 99.5 = 2.985 must be less than 1", "weight_decay = 0.1"),
        (('match = "*"\nlr_scale = 0.5\nlr_factor = 1.0',), "lr_scale", "unknown key `lr_scale` in [[optimizer.groups]]", "known keys: match, lr_factor, weight_decay"),
        (('match = ""\nlr_factor = 1.0',), '""', "optimizer.groups[0].match is empty", "remove the key"),
        ((NORMS, "weight_decay = 0.2"), "optimizer.groups]]\nweight_decay = 0.2", "[[optimizer.groups]] is missing the key `match`", 'match = "*norm.weight"'),
    ],
)  # fmt: skip
def test_a_group_is_refused_at_its_place(groups: tuple[str, ...], at: str, message: str, hint: str) -> None:
    text = with_groups(*groups)
    (found,) = problems(text)
    place = text.index(at)
    if at.startswith("optimizer."):
        place += len("optimizer.")
    assert (found.line, found.column) == (text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place))
    assert message in found.message
    assert hint in (found.hint or "")


def test_a_single_table_is_refused() -> None:
    (found,) = problems(with_groups(NORMS).replace("[[optimizer.groups]]", "[optimizer.groups]"))
    assert found.message == "optimizer.groups: expected an array, found a table"
    assert found.hint == "write [[optimizer.groups]] above each"


def test_with_lora_groups_are_of_adapters() -> None:
    load(with_groups('match = "*.lora_B.weight"\nlr_factor = 16.0'), *LORA)
    (found,) = problems(with_groups(NORMS), *LORA)
    assert found.message == '[model.lora] trains only adapters, and none is named "*norm.weight"'


def test_all_problems_come_at_once() -> None:
    text = with_groups('match = "embed"\nlr_factor = -1.0', FIRST_LAYER, 'match = "head"\nlr_factor = "2"')
    found = problems(text.replace("lr = 3e-3", "lr = 3e-3\nwarmup = 5"))
    assert [p.message.split(":")[0] for p in found] == [
        "unknown key `warmup` in [optimizer]",
        'no parameter is named "embed"',
        "optimizer.groups[0].lr_factor must be at least 0, not -1.0",
        'no parameter is named "head"',
        "optimizer.groups[2].lr_factor",
    ]


def test_an_override_replaces_all_groups() -> None:
    text = with_groups(NORMS)
    given = 'optimizer.groups=[{match = "*.mlp.*", lr_factor = 2.0}]'
    assert [g.match for g in load(text, given).optimizer.groups] == ["*.mlp.*"]
    (found,) = problems(text, given.replace("mlp", "mpl"))
    assert found.file == f"--set {given.replace('mlp', 'mpl')}"
