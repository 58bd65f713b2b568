"""``key=value`` command lines: values taken as they stand, and every mistake named at once."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field

from cards.errors import UserError
from fastvideo_train.cli import Int64, Options, parse_options, pick_device, run_program, usage


class Example(Options):
    prompt: str = Field(description="text")
    steps: Int64 | None = Field(None, description="count")
    scale: float = Field(1.5, gt=0, description="factor")
    mode: Literal["a", "b"] = Field("a", description="way")
    fast: bool = Field(False, description="haste")


@pytest.mark.parametrize(
    "text", ["a red: blue, {x}", "${env:HOME}", "yes", "007", "a=b=c", "", "'quoted'", "null", "[1]"]
)
def test_text_is_taken_as_it_stands(text: str) -> None:
    assert parse_options(Example, [f"prompt={text}"]).prompt == text


def test_numbers_are_converted_and_zero_is_kept() -> None:
    options = parse_options(Example, ["prompt=p", "steps=0", "scale=2e-3", "mode=b"])
    assert (options.steps, options.scale, options.mode) == (0, 0.002, "b")


def test_defaults() -> None:
    options = parse_options(Example, ["prompt=p"])
    assert (options.steps, options.scale, options.mode) == (None, 1.5, "a")


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_options(Example, ["step=3", "steps=many", "scale=0", "mode=c", "--mode", "b", "scale=1"])
    message = str(caught.value)
    assert "unknown option 'step'" in message and "Did you mean 'steps'" in message
    assert "expected one of: fast, mode, prompt, scale, steps" in message
    assert "steps: got 'many'" in message
    assert "scale: got '0'" in message and "greater than 0" in message
    assert "mode: got 'c'" in message and "'a' or 'b'" in message
    assert "got '--mode'" in message and "mode=..." in message
    assert "scale is given twice" in message
    assert "prompt= is missing" in message


def test_an_integer_too_large_for_the_libraries_is_refused() -> None:
    with pytest.raises(UserError, match="steps: got"):
        parse_options(Example, ["prompt=p", f"steps={10**30}"])


def test_usage_lists_every_option_with_its_default() -> None:
    text = usage(Example, "prog", "Does it.", "prog prompt=x")
    for part in (
        "prompt=TEXT",
        "(required)",
        "steps=INT",
        "scale=NUMBER",
        "(default: 1.5)",
        "mode=a|b",
        "fast=true|false",
        "prog prompt=x",
    ):
        assert part in text


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(argv: object) -> int:
        raise UserError("got x, expected y")

    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    assert run_program(fails, lambda: "help", []) == 2
    assert capsys.readouterr().err == "error: got x, expected y\n"
    assert run_program(fails, lambda: "the help", ["--help"]) == 0
    assert capsys.readouterr().out == "the help\n"
    assert run_program(interrupted, lambda: "", []) == 130
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        run_program(lambda argv: 1 // 0, lambda: "", [])


def test_devices() -> None:
    assert str(pick_device("cpu")) == "cpu"
    assert pick_device("auto").type
    for name in ("gpu", "cuda:99", "", "meta"):
        with pytest.raises(UserError, match="this machine has cpu"):
            pick_device(name)
