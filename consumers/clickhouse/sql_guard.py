"""Checks the SQL of a user before it reaches the store: one SELECT over our own tables with known functions.

ClickHouse's read-only mode is no security boundary (docs/parts.md): functions read files, table functions open
connections, and settings lift limits. So the statement is parsed, everything in it must be on an allow list, and
ClickHouse gets text that is generated from the parse tree, never the text of the user.
"""

from collections.abc import Iterator
from itertools import pairwise

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType
from sqlglot.tokens import Tokenizer

from replayground.consumers.clickhouse.migrations import TABLES
from replayground.schemas.errors import BadInput

# Bounds the time that parsing can take.
CHARACTERS_MAX = 20_000

# An allow list: a function that ClickHouse adds later stays refused. None of these reads files, opens connections,
# sleeps, or reveals settings of the server.
_AGGREGATES = (
    "count countif sum sumif avg avgif min max minif maxif any anylast argmin argmax uniq uniqexact uniqif uniqcombined "
    "median quantile quantiles quantileexact stddevpop stddevsamp varpop varsamp corr covarpop covarsamp grouparray "
    "groupuniqarray grouparrayif topk summap minmap maxmap avgweighted entropy skewpop kurtpop simplelinearregression "
    "any_value stddev stddev_pop stddev_samp var_pop var_samp variance variance_pop array_agg first_value last_value "
    "row_number rank dense_rank lag lead laginframe leadinframe ntile percent_rank cume_dist nth_value"
)
_SCALARS = (
    "abs ceil ceiling floor round trunc truncate sqrt exp log ln log2 log10 pow power sign greatest least intdiv modulo mod "
    "plus minus multiply divide negate isnan isfinite isinfinite "
    "if multiif case coalesce ifnull nullif isnull isnotnull assumenotnull tonullable and or not xor equals notequals less "
    "greater lessorequals greaterorequals like ilike notlike match "
    "length lengthutf8 char_length lower upper lowerutf8 upperutf8 substring substr left right trim ltrim rtrim trimboth "
    "trimleft trimright concat concatwithseparator replace replaceall replaceone replaceregexpall replaceregexpone position "
    "positioncaseinsensitive extract extractall splitbychar splitbystring startswith endswith reverse repeat empty notempty "
    "countsubstrings format leftpad rightpad base64decode base64encode hex unhex reinterpretasint32 reinterpretasfloat32 "
    "toint8 toint16 toint32 toint64 touint8 touint16 touint32 touint64 tofloat32 tofloat64 tostring todate todatetime "
    "todatetime64 cast touuid toint64ornull tofloat64ornull toint64orzero tofloat64orzero "
    "now today toyear tomonth tohour tominute tosecond tostartofminute tostartofhour tostartofday tostartofinterval "
    "tostartofsecond tounixtimestamp tounixtimestamp64micro fromunixtimestamp64micro datediff date_diff dateadd datesub "
    "date_add date_sub adddays addhours addminutes addseconds formatdatetime interval tointervalsecond tointervalminute "
    "tointervalhour tointervalday timestampdiff timestampadd datetrunc date_trunc current_timestamp "
    "array arraymap arrayfilter arraysum arrayavg arraymin arraymax arraycount arrayexists arrayall arraysort arrayreverse "
    "arrayreversesort arraydistinct arrayuniq arrayelement arrayslice arrayconcat arrayzip arrayjoin arrayenumerate "
    "arraystringconcat has hasany hasall indexof range arraycumsum arraydifference arrayfirst arrayflatten "
    "tuple tupleelement map mapkeys mapvalues mapcontains mapcontainskey mapfromarrays mapapply mapfilter "
    "jsonextract jsonextractstring jsonextractint jsonextractuint jsonextractfloat jsonextractbool jsonextractraw "
    "jsonextractarrayraw jsonextractkeysandvalues jsonextractkeysandvaluesraw jsonextractkeys jsonlength jsonhas jsontype "
    "isvalidjson cityhash64 bar formatreadablesize formatreadablequantity formatreadabletimedelta neighbor runningdifference "
    "in notin"
)
FUNCTIONS = frozenset((_AGGREGATES + " " + _SCALARS).split())
"names in lower case; anything else is refused"

# Keywords and types may precede an opening bracket without being a function call.
_WORDS = (
    "select from where in and or not on by as using over join having then when else between like ilike exists distinct with "
    "union all except intersect limit any global case any left inner full cross asof semi anti prewhere is array filter"
)
_TYPES = (
    "nullable lowcardinality array map tuple datetime64 datetime decimal fixedstring int8 int16 int32 int64 uint8 uint16 "
    "uint32 uint64 float32 float64 string date bool uuid"
)
_BEFORE_BRACKETS = FUNCTIONS | frozenset(f"{_WORDS} {_TYPES}".split())
# Clauses by the names of sqlglot. SETTINGS is not among them, since it would lift our limits, and FORMAT neither.
_SELECT_PARTS = (
    "expressions from_ from joins where group having order limit offset distinct with_ with windows qualify prewhere limit_by "
    "operation_modifiers"
)
_NEVER = (exp.Into, exp.Lock, exp.Command, exp.Parameter, exp.Placeholder, exp.SessionParameter, exp.Hint, exp.Pivot)


def check_sql(sql: str) -> str:
    """The statement to run, generated from what was parsed. Raises BadInput with the reason for what is not allowed."""
    tree = _parse(sql)
    for node in tree.walk():
        _check(node)
    _check_tables(tree)
    # Without comments, whose text nobody checked.
    rewritten = tree.sql(dialect="clickhouse", comments=False)
    # On the text and not on the tree: sqlglot has a node class for each function that it knows, and a name before a
    # bracket is a call whatever it was parsed as.
    _check_calls(rewritten)
    return rewritten


def _parse(sql: str) -> exp.Expr:
    if len(sql) > CHARACTERS_MAX:
        raise BadInput(f"the statement is longer than {CHARACTERS_MAX} characters")
    try:
        statements = [tree for tree in sqlglot.parse(sql, dialect="clickhouse") if tree is not None]
    # RecursionError: thousands of nested brackets.
    except (SqlglotError, RecursionError) as error:
        raise BadInput(f"the SQL cannot be parsed: {str(error).splitlines()[0]}") from error
    # ClickHouse (chDB) runs all statements of a text.
    if len(statements) != 1:
        raise BadInput("send one statement at a time")
    tree = statements[0]
    if not isinstance(tree, exp.Select | exp.SetOperation):
        raise BadInput(f"only SELECT is allowed here, not {tree.key.upper()}")
    return tree


def _check(node: exp.Expr) -> None:
    if isinstance(node, _NEVER):
        raise BadInput(f"{node.key.upper()} is not allowed here")
    if isinstance(node, exp.Select | exp.SetOperation):
        parts = {name for name, value in node.args.items() if value}
        unknown = parts - set(_SELECT_PARTS.split()) - {"this", "expression", "by_name", "side", "kind", "on"}
        # These two belong to set operations (UNION …) only.
        if isinstance(node, exp.Select):
            unknown |= parts & {"kind", "on"}
        if unknown:
            raise BadInput(f"{', '.join(sorted(unknown)).upper()} is not allowed here")
    # ClickHouse reads `IN name` as a table, and sqlglot parses it as a column, so _check_tables would not see it.
    if isinstance(node, exp.In) and (node.args.get("field") or any(map(_is_column, node.expressions))):
        raise BadInput("IN takes values or a SELECT in brackets, not the name of a table")
    # ClickHouse and sqlglot may unescape such a name differently and then disagree about where it ends.
    if isinstance(node, exp.Identifier) and any(mark in node.name for mark in "\\`'\""):
        raise BadInput("names must not contain quotes or backslashes")
    if isinstance(node, exp.Column) and (node.args.get("db") or node.args.get("catalog")):
        raise BadInput(f"{node.sql()} names another database")


def _is_column(node: exp.Expr) -> bool:
    return isinstance(node.unnest(), exp.Column)


def _check_tables(tree: exp.Expr) -> None:
    """Every table must be one of ours or a WITH name of this statement; table functions are never allowed."""
    own_names = {common.alias_or_name.lower() for common in tree.find_all(exp.CTE)}
    allowed = set(TABLES) | own_names
    for table in tree.find_all(exp.Table):
        if table.args.get("db") or table.args.get("catalog"):
            raise BadInput(f"{table.sql(dialect='clickhouse')} is in another database")
        if not isinstance(table.this, exp.Identifier):
            raise BadInput(f"{table.sql(dialect='clickhouse')} is a table function, which is not allowed here")
        if not _is_array_join(table) and table.name.lower() not in allowed:
            raise BadInput(f"there is no table {table.name}; there are {', '.join(TABLES)}")


def _is_array_join(table: exp.Table) -> bool:
    """Whether a table is the column of an ARRAY JOIN. The locked sqlglot parses it as a column and never comes here."""
    return isinstance(table.parent, exp.Join) and table.parent.kind.upper() == "ARRAY"


def _check_calls(sql: str) -> None:
    """Every word before an opening bracket must be a keyword, a type or a function of the allow list."""
    for name in _called_functions(Tokenizer(dialect="clickhouse").tokenize(sql)):
        if name.lower() not in _BEFORE_BRACKETS:
            raise BadInput(f"the function {name} is not allowed here")


def _called_functions(tokens: list[Token]) -> Iterator[str]:
    for token, following in pairwise(tokens):
        # Quoted names can be called too: `file`('/etc/passwd').
        is_word = token.text[:1].isalpha() or token.text[:1] in '_`"'
        is_value = token.token_type in (TokenType.STRING, TokenType.NUMBER)
        if is_word and not is_value and following.token_type == TokenType.L_PAREN:
            yield token.text.strip('`"')
