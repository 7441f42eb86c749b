"""The tool `python`: a notebook cell in the sandbox."""

from sandboxes.tools.tool import ToolError, tool


@tool(needs=frozenset({"files"}))
def python(code: str) -> str:
    """Run Python code. Names stay defined for later calls; shows what is printed and the value of the last expression.

    code: Python source, one or more lines
    """
    import ast

    namespace = globals().setdefault("cell_namespace", {"__name__": "__main__"})
    try:
        tree = ast.parse(code, "<cell>")
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr):
            exec(compile(tree, "<cell>", "exec"), namespace)
            return ""
        tree.body.pop()
        exec(compile(tree, "<cell>", "exec"), namespace)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
        return "" if value is None else repr(value)
    except BaseException as error:  # SystemExit too: leaving a cell must not end the session
        text = str(error)
        raise ToolError(f"{type(error).__name__}: {text}" if text else type(error).__name__) from None
