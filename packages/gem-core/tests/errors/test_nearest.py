"""A hint names what is really near, else what is valid."""

from __future__ import annotations

import pytest

from gem_core.errors import nearest

NEAR = [
    ("clik", "click"), ("trian", "train"), ("cvs", "csv"), ("prize", "price"), ("Lr", "lr"), ("row", "rows"),
    ("user", "user_id"), ("clicked", "click"), ("lerning_rate", "learning_rate"), ("hiden", "hidden"),
]  # fmt: skip
FAR = [("bid", "uid"), ("fp16", "bf16"), ("fp16", "fp32"), ("bye", "buy"), ("ad", "adset_id"), ("", "user"), ("t", "u")]


@pytest.mark.light
@pytest.mark.parametrize(("name", "other"), NEAR)
def test_near(name: str, other: str) -> None:
    assert nearest(name, [other, "unlike"]) == f'; did you mean "{other}"?'


@pytest.mark.light
@pytest.mark.parametrize(("name", "other"), FAR)
def test_far(name: str, other: str) -> None:
    assert nearest(name, [other]) == f"; valid: {other}"


@pytest.mark.light
def test_long_lists_are_cut() -> None:
    assert nearest("x", []) == ""
    assert nearest("x", [f"name{i:02}" for i in range(25)]).endswith("name19 and 5 more")
    assert nearest("clickz", ["clicks", "clack", "click"]) == '; did you mean "click"?'
