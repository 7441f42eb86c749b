"""calculator: exact where that is possible, bounded always, no code run ever."""

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayground.sandboxes.tools.calculator import within_bounds
from tests.sandboxes.conftest import Call


@pytest.mark.parametrize(
    ("expression", "content"),
    [
        ("1 + 2 * 3", "7"),
        ("0.1 + 0.2", "0.3"),
        ("1.50 * 2", "3"),
        ("1/3", "1/3 ≈ 0.33333333333333333"),
        ("1/8", "0.125"),
        ("-7 // 2", "-4"),
        ("10 % 3", "1"),
        ("2**100", "1267650600228229401496703205376"),
        ("4**0.5", "2"),
        ("sqrt(2.25)", "1.5"),
        ("sqrt(2)", "≈ 1.4142135623730951"),
        ("round(2.675, 2)", "2.68"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("max(1, 2, 3.5)", "3.5"),
        ("sum([1, 2, 3])", "6"),
        ("factorial(20)", "2432902008176640000"),
        ("comb(52, 5)", "2598960"),
        ("gcd(12, 18)", "6"),
        ("sin(pi / 2)", "≈ 1.0"),
        ("(-1)**1000000001", "-1"),
        ("1_000.5 * 2", "2001"),
    ],
)
async def test_values(call: Call, expression: str, content: str) -> None:
    result = await call("calculator", expression=expression)
    assert (result.content, result.is_error) == (content, False)


@pytest.mark.parametrize(
    ("expression", "content"),
    [
        ("9**9**9", "the result is too large"),
        ("round(1/3, 10**9)", "the result is too large"),
        ("round(1/3, -10**9)", "the result is too large"),
        ("factorial(10001)", "the result is too large"),
        ("1e99999", "the result is too large"),
        ("exp(1000)", "the result is too large"),
        ("2**6500 * 2**6501", "the result is too large"),
        ("2^3", "^ is not an operator here: write ** for a power"),
        ("1,000 + 5", "a comma only separates the arguments of a function: write 1000, not 1,000"),
        ("sqr(4)", "there is no function 'sqr'; did you mean 'sqrt'?"),
        ("x + 1", "there is no 'x'; there are pi, e, tau, abs"),
        ("5 apples", "this is no expression: invalid syntax at character 3"),
        ("", "this is no expression"),
        ("1/0", "division by zero"),
        ("sqrt(-1)", "the root of a negative number is not real"),
        ("(-8)**(1/3)", "the root of a negative number is not real"),
        ("log(0)", "a function was given what it has no value for: math domain error"),
        ("gcd(1.5, 2)", "a function was given what it has no value for"),
        ("__import__('os').system('id')", "\"__import__('os').system('id')\" is not arithmetic"),
        ("(1).__class__ + 1", "'(1).__class__' is not arithmetic"),
        ("[x for x in (1,)]", "'[x for x in (1,)]' is not arithmetic"),
        ("'a' * 3", "'a' is not a number"),
        ("True + 1", "'True' is not a number"),
        ("1 if 1 else 2", "'1 if 1 else 2' is not arithmetic"),
        ("1 + " * 600 + "1", "an expression has at most 2000 characters"),
        ("-" * 1999 + "1", "the expression is nested too deeply"),
    ],
)
async def test_refusals_help(call: Call, expression: str, content: str) -> None:
    result = await call("calculator", expression=expression)
    assert result.content.startswith(f"error: {content}")
    assert result.error_kind == "agent"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fractions(-(10**9), 10**9, max_denominator=10**4), st.fractions(-(10**9), 10**9, max_denominator=10**4))
async def test_arithmetic_is_that_of_fractions(call: Call, left: Fraction, right: Fraction) -> None:
    text = (await call("calculator", expression=f"({left}) * ({right}) - ({right})")).content.partition(" ≈ ")[0]
    assert Fraction(text) == left * right - right


def test_bounds_are_checked_before_and_after() -> None:
    with pytest.raises(OverflowError):
        within_bounds(Fraction(1, 2**13_001))
    with pytest.raises(OverflowError):
        within_bounds(float("inf"))
