"""The tool `calculator`: exact arithmetic where possible. It evaluates a syntax tree and never runs code.

Numbers are fractions, so 0.1 + 0.2 is 0.3. A value without exact form (sqrt(2), sin(1)) becomes a float, and so does
everything computed from it; it is shown after ≈. Results of more than BITS_MAX bits are refused.
"""

import ast
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from replayground.sandboxes.tools.tool import ToolError, tool

EXPRESSION_CHARACTERS_MAX = 2_000
BITS_MAX = 13_000
"""About 3,900 digits: below the 4,300 that Python refuses to convert to text."""
DIGITS_MAX = 3_900
TOO_LARGE = "the result is too large: at most 3,900 digits, and 1e308 for what is rounded"
# Signs that models copy from texts.
SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"}
EXACT_FUNCTIONS = (
    "abs",
    "ceil",
    "comb",
    "factorial",
    "floor",
    "gcd",
    "lcm",
    "max",
    "min",
    "perm",
    "round",
    "sqrt",
    "sum",
)
ROUNDED_FUNCTIONS = (
    *("acos", "asin", "atan", "atan2", "cbrt", "cos", "cosh", "degrees", "exp", "hypot", "log", "log10", "log2"),
    *("radians", "sin", "sinh", "tan", "tanh"),
)


@tool(needs=frozenset())
def calculator(expression: str) -> str:
    """Work out an arithmetic expression exactly. Operators + - * / // % **, parentheses, pi, e, tau, and functions such as
    sqrt, round, floor, min, max, sum, factorial, comb, gcd, log, exp, sin. A rounded result comes after ≈.

    expression: for example (3/4 + 1.25) * sqrt(16)
    """
    import ast

    for sign, operator in SIGNS.items():
        expression = expression.replace(sign, operator)
    # Bounds the size of the tree; its depth is bounded by the RecursionError below.
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise ToolError(f"an expression has at most {EXPRESSION_CHARACTERS_MAX} characters")
    try:
        return shown(evaluate(ast.parse(expression.strip(), mode="eval").body, expression.strip()))
    except SyntaxError as error:
        raise ToolError(f"this is no expression: {error.msg} at character {error.offset}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError(TOO_LARGE) from None
    except (ValueError, TypeError) as error:
        raise ToolError(f"a function was given what it has no value for: {error}") from None
    except (RecursionError, MemoryError):
        raise ToolError("the expression is nested too deeply") from None


def evaluate(node: ast.expr, text: str) -> Fraction | float:
    """The value of a part of the expression: a Fraction while it is exact, otherwise a float. ToolError for anything
    but numbers, operators and known functions."""
    import ast

    # An allow-list of node types: attributes, subscripts and names of Python are never evaluated.
    if isinstance(node, ast.Constant):
        return literal(node, text)
    if isinstance(node, ast.Name):
        return constant(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = evaluate(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return within_bounds(operate(node.op, evaluate(node.left, text), evaluate(node.right, text)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        # sum([1, 2]) means the same as sum(1, 2).
        arguments = node.args[0].elts if len(node.args) == 1 and isinstance(node.args[0], ast.List) else node.args
        return within_bounds(call(node.func.id, [evaluate(argument, text) for argument in arguments]))
    # 1,000 parses as a tuple.
    if isinstance(node, ast.Tuple):
        raise ToolError("a comma only separates the arguments of a function: write 1000, not 1,000")
    written = (ast.get_source_segment(text, node) or "")[:80]
    raise ToolError(f"{written!r} is not arithmetic: only numbers, operators and functions can be used")


def literal(node: ast.Constant, text: str) -> Fraction:
    """The exact value of a number as it is written, not as a float would round it."""
    import ast
    from decimal import Decimal
    from fractions import Fraction

    # bool is a subclass of int.
    if isinstance(node.value, bool) or not isinstance(node.value, int | float):
        raise ToolError(f"{str(node.value)[:80]!r} is not a number")
    if isinstance(node.value, int):
        return Fraction(node.value)
    # From the source text: node.value is a float and has been rounded already.
    written = Decimal((ast.get_source_segment(text, node) or "").replace("_", ""))
    # Fraction(Decimal("1e999999999")) would compute an integer of that size. A decimal digit is more than 3 bits.
    if abs(written.adjusted()) > BITS_MAX // 4:
        raise OverflowError
    return Fraction(written)


def constant(name: str) -> float:
    import math

    if name not in ("pi", "e", "tau"):
        raise ToolError(f"there is no {name!r}{similar(name)}")
    return float(getattr(math, name))


def operate(operator: ast.operator, left: Fraction | float, right: Fraction | float) -> Fraction | float:
    """Two fractions give a fraction; if one operand is a float, the result is a float."""
    import ast
    import operator as operators

    table: dict[type[ast.operator], Callable[[Any, Any], Fraction | float]] = {
        ast.Add: operators.add,
        ast.Sub: operators.sub,
        ast.Mult: operators.mul,
        ast.Div: operators.truediv,
        ast.FloorDiv: operators.floordiv,
        ast.Mod: operators.mod,
    }
    if isinstance(operator, ast.Pow):
        return power(left, right)
    if isinstance(operator, ast.BitXor):
        raise ToolError("^ is not an operator here: write ** for a power")
    if type(operator) not in table:
        raise ToolError(f"there is no operator {type(operator).__name__}: use + - * / // % **")
    return table[type(operator)](left, right)


def power(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    """Exact where possible. OverflowError before anything is computed when the result would be too large."""
    from fractions import Fraction

    if isinstance(base, Fraction) and exponent == Fraction(1, 2):
        return call("sqrt", [base])
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if bits * abs(exponent) > BITS_MAX:
            raise OverflowError
        # 1 and -1 have no bits to multiply, so they pass the check with any exponent; only its parity matters.
        return base ** int(exponent) if abs(base) != 1 else Fraction(base ** (int(exponent) % 2))
    result: Any = float(base) ** float(exponent)
    # Python returns a complex number for a negative base.
    if isinstance(result, complex):
        raise ToolError("the root of a negative number is not real")
    return float(result)


def call(name: str, arguments: list[Fraction | float]) -> Fraction | float:
    """Call a function by its name. ToolError for an unknown one, OverflowError for arguments that are too large."""
    import math
    from fractions import Fraction

    if name not in EXACT_FUNCTIONS and name not in ROUNDED_FUNCTIONS:
        raise ToolError(f"there is no function {name!r}{similar(name)}")
    if name in ROUNDED_FUNCTIONS:
        return float(getattr(math, name)(*map(float, arguments)))
    if name == "sqrt":
        return square_root(*arguments)
    # comb, gcd and the like take only integers.
    whole = [int(a) if isinstance(a, Fraction) and a.denominator == 1 else a for a in arguments]
    # Before the call, which could otherwise compute for minutes.
    if name in ("factorial", "comb", "perm") and max(whole, default=0) > 10_000:
        raise OverflowError
    # round(x, n) computes 10**n.
    if name == "round" and len(arguments) > 1 and not -DIGITS_MAX <= arguments[1] <= DIGITS_MAX:
        raise OverflowError
    if name == "sum":
        return sum(arguments, Fraction(0))
    table: dict[str, Callable[..., Any]] = {"abs": abs, "max": max, "min": min, "round": round}
    result = (table.get(name) or getattr(math, name))(*whole)
    return result if isinstance(result, float) else Fraction(result)


def square_root(value: Fraction | float) -> Fraction | float:
    import math
    from fractions import Fraction

    if value < 0:
        raise ToolError("the root of a negative number is not real")
    if isinstance(value, Fraction):
        # Exact if numerator and denominator are squares.
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    return math.sqrt(value)


def within_bounds(value: Fraction | float) -> Fraction | float:
    import math

    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
    elif max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS_MAX:
        raise OverflowError
    return value


def similar(name: str) -> str:
    import difflib

    known = ["pi", "e", "tau", *EXACT_FUNCTIONS, *ROUNDED_FUNCTIONS]
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def shown(value: Fraction | float) -> str:
    """Whole numbers and finite decimals in full; other fractions as a ratio and rounded; floats after ≈."""
    from decimal import Decimal, localcontext

    if isinstance(value, float):
        return f"≈ {value!r}"
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        # A fraction with a finite decimal of up to 50 digits is found by the comparison below.
        context.prec = 50
        decimal = Decimal(value.numerator) / Decimal(value.denominator)
    if decimal == value:
        return f"{decimal:f}" if abs(decimal.adjusted()) < 50 else str(decimal)
    ratio = f"{value.numerator}/{value.denominator}"
    rounded = f"≈ {decimal:.17g}"
    return f"{ratio} {rounded}" if len(ratio) <= 100 else rounded
