"""The door of people's SQL: says in one sentence why a statement is not a question about the traces.

It is not the wall (sql_wall). It reads the syntax tree that ClickHouse itself made of the statement (EXPLAIN AST), so no
second parser can read something else, and it never changes the statement: what passes runs as it was written. Only what
would not be about the traces is refused; any function that ClickHouse has for computing is welcome. The tree leaves out
some names (APPLY, SHOW) and prints others as they are, line breaks included: for these the text that ClickHouse's
formatter makes of the statement is read, too.

Runs inside the walled process too, beside nothing but Python: standard library alone.
"""

import re
from collections.abc import Iterator

CHARACTERS_MAX = 100_000
"bounds the time that parsing can take"

_STATEMENTS = (
    "SelectWithUnionQuery SelectIntersectExceptQuery SelectQuery Explain DescribeQuery ShowTables ShowColumns ShowIndexes "
    "ShowFunctions ShowCreateTableQuery ShowCreateViewQuery ExistsTableQuery ExistsViewQuery"
)
_QUESTIONS = frozenset(_STATEMENTS.split())
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
# What reads something other than the traces, waits, or tells about the process. In lower case, since ClickHouse ignores
# case in some names.
_REFUSED = (
    "file sleep sleepeachrow catboostevaluate getsetting getsettingordefault getclienthttpheader getserverport "
    "getserversetting getmergetreesetting getmacro joinget joingetornull hasjoin queryid initialqueryid showcertificate "
    "filesystemavailable filesystemcapacity filesystemunreserved filesystemcacheuuid addresstoline "
    "addresstolinewithinlines addresstosymbol demangle logtrace hascolumnintable reversednsquery hostname fqdn displayname "
    "serveruuid uptime getoskernelversion tcpport"
)
_FUNCTIONS_REFUSED = frozenset(_REFUSED.split())
_PREFIXES_REFUSED = ("dict", "ai")
# Table functions that compute their rows.
_COMPUTED = (
    "numbers numbers_mt zeros zeros_mt generateseries generate_series generaterandom values view viewexplain format"
)
_TABLE_FUNCTIONS = frozenset(_COMPUTED.split())
_TAKE_FUNCTIONS = ("array", "map")
_SYSTEM = ("system", "information_schema")
_EXPLANATIONS_REFUSED = ("EXPLAIN CURRENT TRANSACTION", "EXPLAIN TABLE OVERRIDE")
_STRING = re.compile(r"'(?:[^'\\]|\\.|'')*'", re.DOTALL)
_WORD = re.compile(r"\w+")
_SHOW_TABLES = re.compile(r"SHOW (FULL |TEMPORARY )*TABLES( (NOT )?I?LIKE '')?( WHERE .*)?( LIMIT \d+)?")
_NODE = re.compile(r"( *)(\S+)(?: (.*?))?(?: \(alias .*)?(?: \(children \d+\))?")

type _Node = tuple[int, str, str]
"depth, kind and name"


def too_long(sql: str) -> str | None:
    """The reason to refuse a text before it is parsed; None to go on."""
    if len(sql) > CHARACTERS_MAX:
        return f"the statement is longer than {CHARACTERS_MAX:,} characters"
    return None if sql.strip() else "the statement is empty"


def refusal(tree: str, formatted: str) -> str | None:
    """The reason to refuse a statement, given its tree, as EXPLAIN AST prints it, and its text, as formatQuerySingleLine
    does; None when it may run."""
    nodes = list(_nodes(tree))
    if not nodes:
        return "the statement is empty"
    if nodes[0][1] not in _QUESTIONS:
        return _not_a_question(nodes[0][1])
    reasons = (_reason(nodes, at) for at in range(len(nodes)))
    return _about_text(nodes, _STRING.sub("''", formatted)) or next(filter(None, reasons), None)


def _about_text(nodes: list[_Node], text: str) -> str | None:
    """`text` is the statement without what its strings say."""
    # A name of several lines looks like nodes of the tree. The formatter escapes line breaks.
    if "\\" in text or "\n" in text:
        return "names with line breaks or backslashes are not allowed here"
    kind, name = nodes[0][1:]
    words = _WORD.findall(text)
    if kind == "ShowTables" and not _SHOW_TABLES.fullmatch(text):
        return "of SHOW there are TABLES, COLUMNS, INDEXES, CREATE TABLE and FUNCTIONS"
    if kind.startswith("Show") and any(word.lower() in _SYSTEM for word in words):
        return "only the traces are shown: SHOW TABLES lists what there is"
    if name.startswith(_EXPLANATIONS_REFUSED):
        return f"{name} is not about the traces"
    if any(node[1] == "ColumnsApplyTransformer" for node in nodes):
        return next(filter(None, (_about_function(word, is_table=False) for word in words)), None)
    return None


def _nodes(tree: str) -> Iterator[_Node]:
    for line in tree.splitlines():
        found = _NODE.fullmatch(line)
        if found is not None:
            yield len(found[1]), found[2], found[3] or ""


def _reason(nodes: list[_Node], at: int) -> str | None:
    depth, kind, name = nodes[at]
    # Settings of EXPLAIN itself (indexes = 1) are right below it.
    if kind == "Set" and not (depth == 1 and nodes[0][1] == "Explain"):
        return "SETTINGS is not allowed here: the limits are those of [traces]"
    if kind.endswith("Query") and kind not in _QUESTIONS and kind != "TablesInSelectQuery":
        return _not_a_question(kind)
    if kind == "Function":
        return _about_function(name, is_table=at > 0 and nodes[at - 1][:2] == (depth - 1, "TableExpression"))
    if kind in ("Identifier", "TableIdentifier"):
        return _about_name(nodes, at) or _about_output(nodes, at)
    return _about_output(nodes, at) if kind == "Literal" else None


def _about_output(nodes: list[_Node], at: int) -> str | None:
    """FORMAT and INTO OUTFILE stand beside the list of SELECTs, right below the statement."""
    if nodes[at][0] == 1 and nodes[0][1] in ("SelectWithUnionQuery", "SelectIntersectExceptQuery", "Explain"):
        return "FORMAT and INTO OUTFILE are not allowed here: the rows are what is returned"
    return None


def _about_function(name: str, is_table: bool) -> str | None:
    lowered = name.lower()
    if is_table and lowered not in _TABLE_FUNCTIONS:
        return f"the table function {name} reads something other than the traces"
    if not is_table and (lowered in _FUNCTIONS_REFUSED or lowered.startswith(_PREFIXES_REFUSED)):
        return f"the function {name} is not about the traces"
    return None


def _about_name(nodes: list[_Node], at: int) -> str | None:
    """A table can be handed on by its name, as in in(x, system.users), and a function too, as in arrayMap(file, …)."""
    depth, _, name = nodes[at]
    first, dot, _ = name.partition(".")
    if dot and first.lower() in _SYSTEM:
        return f"{name} is not about the traces: SHOW TABLES lists what there is"
    called = nodes[at - 2] if at >= 2 else nodes[0]
    if called[:2] == (depth - 2, "Function") and called[2].lower().startswith(_TAKE_FUNCTIONS):
        return _about_function(name, is_table=False)
    return None


def _not_a_question(kind: str) -> str:
    verb = _WORDS.split(kind.removesuffix("Query"))[0].upper()
    return f"only questions are answered here (SELECT, WITH, EXPLAIN, DESCRIBE, SHOW TABLES), not {verb}"
