"""The tools `excel_read`, `excel_write` and `excel_chart`: workbooks in .xlsx and .xlsm, by openpyxl.

Not covered: formulas are written and read but not computed, so a formula has a value only after a spreadsheet program
has saved the file; .xls; shapes and text boxes, which are lost when a workbook is written; making pivot tables.
"""

from collections.abc import Iterator
from typing import Any, Literal

from replayground.sandboxes.tools.paths import existing_file, replace_file, work_path
from replayground.sandboxes.tools.tool import ToolError, tool

CELLS_MAX = 3_000
COLUMNS_MAX = 100
CHARACTERS_MAX = 12_000
type Bounds = tuple[int, int, int, int]
"""First column, first row, last column, last row."""
NOT_COMPUTED = "formulas are not computed here: work their values out with python when you need them"


@tool(needs=frozenset({"files"}), call_timeout_seconds=60.0)
def excel_read(path: str, sheet: str | None = None, cells: str | None = None) -> str:
    """Read cells of an Excel workbook: one row a line, columns separated by tabs. A formula is shown after its value; ? is a
    value that no spreadsheet program has computed yet.

    path: an .xlsx file, relative to /work
    sheet: the name of the sheet; the default is the first one
    cells: a range such as B2:D20, a column such as C:C or a cell; the default is all that is used
    """
    import contextlib

    with contextlib.closing(opened(path, read_only=True)) as book:
        found = sheet_named(book, sheet)
        bounds = boundaries(cells, found)
        rows = rows_with_content(found, bounds)
    title = f"sheet {found.title}, {range_text(bounds)}; sheets: {', '.join(book.sheetnames)}"
    if not rows:
        return f"{title}\n[all cells are empty]"
    # openpyxl loads either formulas or values, so a sheet with formulas is opened a second time for the values.
    computed = rows
    if any(is_formula(value) for row in rows.values() for value in row):
        with contextlib.closing(opened(path, read_only=True, data_only=True)) as values:
            computed = rows_with_content(values[found.title], bounds)
    return "\n".join([title, "\t" + "\t".join(letters(bounds)), *shown_rows(rows, computed, bounds)])


@tool(needs=frozenset({"files"}), call_timeout_seconds=60.0)
def excel_write(path: str, cells: dict[str, Any], sheet: str | None = None) -> str:
    """Write cells of an Excel workbook. The workbook and the sheet are made when they do not exist.

    path: an .xlsx file, relative to /work
    cells: values by cell, {"A1": "total", "B1": "=SUM(B2:B9)"}; a list of rows fills a block from that cell on,
        {"A2": [["a", 1], ["b", 2]]}
    sheet: the name of the sheet; the default is the first one
    """
    import os

    book = opened(path) if os.path.exists(work_path(path)) else new_workbook(path, sheet)
    found = book.create_sheet(sheet) if sheet and sheet not in book.sheetnames else sheet_named(book, sheet)
    written = formulas = 0
    for place, value in placed(cells):
        set_cell(found, place, value)
        written += 1
        formulas += is_formula(value)
    save(book, path)
    note = f"; {NOT_COMPUTED}" if formulas else ""
    return f"wrote {written} cells to sheet {found.title} of {path}, which now uses {found.dimensions}{note}"


@tool(needs=frozenset({"files"}), call_timeout_seconds=60.0)
def excel_chart(
    path: str,
    kind: Literal["bar", "line", "pie"],
    values: str,
    labels: str | None = None,
    title: str = "",
    sheet: str | None = None,
    at: str | None = None,
) -> str:
    """Add a chart to a sheet of an Excel workbook.

    path: an .xlsx file, relative to /work
    kind: what to draw
    values: the range of numbers, one column a series, with its name in the first row, for example B1:C10
    labels: the range of the labels, without a name, for example A2:A10
    title: shown above the chart
    sheet: where the numbers are and the chart goes; the default is the first sheet
    at: the cell of the upper left corner; the default is beside the used cells
    """
    from openpyxl.chart import BarChart, LineChart, PieChart, Reference
    from openpyxl.utils import get_column_letter

    book = opened(path)
    found = sheet_named(book, sheet)
    left, top, right, bottom = boundaries(values, found)
    if top == bottom:
        raise ToolError(f"{values} is one row: give the name of the series and below it the numbers, such as B1:B10")
    chart = {"bar": BarChart, "line": LineChart, "pie": PieChart}[kind]()
    chart.add_data(Reference(found, left, top, right, bottom), titles_from_data=True)
    if labels is not None:
        chart.set_categories(Reference(found, *boundaries(labels, found)))
    chart.title = title or None
    # Below the charts that the sheet has already.
    corner = at or f"{get_column_letter(found.max_column + 2)}{2 + 16 * len(found._charts)}"
    # Raises ToolError for a cell that does not exist.
    boundaries(corner, found)
    found.add_chart(chart, corner)
    save(book, path)
    return f"added a {kind} chart of {right - left + 1} series at {corner} of sheet {found.title} of {path}"


def opened(path: str, **options: bool) -> Any:
    """Open a workbook. ToolError when the file is missing or not a workbook."""
    import warnings

    import openpyxl

    absolute = existing_file(path)
    # Warnings about parts that openpyxl drops would go into the output; the agent can do nothing about them.
    warnings.filterwarnings("ignore", module="openpyxl")
    try:
        return openpyxl.load_workbook(absolute, keep_vba=absolute.endswith(".xlsm"), **options)
    except MemoryError:
        raise
    except Exception as error:
        # openpyxl raises many types for a damaged archive or another format.
        hint = "excel tools read .xlsx and .xlsm; read_document reads .csv"
        raise ToolError(f"{path} is not an Excel workbook ({type(error).__name__}: {error}); {hint}") from None


def new_workbook(path: str, sheet: str | None) -> Any:
    import openpyxl

    if not path.endswith((".xlsx", ".xlsm")):
        raise ToolError(f"{path!r} must end in .xlsx")
    book = openpyxl.Workbook()
    book.active.title = sheet or "Sheet1"
    return book


def sheet_named(book: Any, name: str | None) -> Any:
    """The sheet of this name, the first one for None. ToolError with a similar name when there is none."""
    import difflib

    if name is None:
        return book.worksheets[0]
    if name not in book.sheetnames:
        close = difflib.get_close_matches(name, book.sheetnames, 1, 0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ToolError(f"no sheet {name!r}; {hint}sheets: {', '.join(book.sheetnames)}")
    return book[name]


def boundaries(cells: str | None, sheet: Any) -> Bounds:
    """The bounds of a range; an open side, as in C:C, ends where the used cells end. ToolError when it is no range."""
    from openpyxl.utils.cell import range_boundaries

    try:
        left, top, right, bottom = range_boundaries((cells or "A:A").strip().replace("$", ""))
    except (ValueError, TypeError):
        raise ToolError(f"{cells!r} is no range of cells: write B2, B2:D20 or C:C") from None
    if cells is None:
        return (1, 1, *used_size(sheet))
    if right is None or bottom is None:
        last_column, last_row = used_size(sheet)
        return left or 1, top or 1, right or last_column, bottom or last_row
    return left, top, right, bottom


def used_size(sheet: Any) -> tuple[int, int]:
    """The last used column and row."""
    # Some programs leave the size out of the file, or write A1 whatever there is: then all rows must be counted.
    is_unknown = not sheet.max_row or (sheet.max_row, sheet.max_column) == (1, 1)
    # Only a sheet in read-only mode has this method.
    if is_unknown and hasattr(sheet, "reset_dimensions"):
        sheet.reset_dimensions()
        sheet.calculate_dimension(force=True)
    return sheet.max_column or 1, sheet.max_row or 1


def rows_with_content(sheet: Any, bounds: Bounds) -> dict[int, tuple[Any, ...]]:
    """The non-empty rows by number, at most COLUMNS_MAX columns wide, until there are more than CELLS_MAX cells."""
    left, top, right, bottom = bounds
    area = {"min_col": left, "min_row": top, "max_col": min(right, left + COLUMNS_MAX - 1), "max_row": bottom}
    rows: dict[int, tuple[Any, ...]] = {}
    for number, row in enumerate(sheet.iter_rows(**area, values_only=True), top):
        # Empty rows are skipped: one cell at XFD1048576 makes a million of them.
        if any(value is not None for value in row):
            rows[number] = row
            if len(rows) * len(row) > CELLS_MAX:
                break
    return rows


def shown_rows(rows: dict[int, tuple[Any, ...]], computed: dict[int, tuple[Any, ...]], bounds: Bounds) -> Iterator[str]:
    """Rows with their numbers, as many as fit into one result, then a note on how to read the rest."""
    characters = cells = 0
    for number, row in rows.items():
        values = computed.get(number) or (None,) * len(row)
        line = f"{number}\t" + "\t".join(map(cell_text, row, values))
        characters, cells = characters + len(line), cells + len(row)
        if (characters > CHARACTERS_MAX or cells > CELLS_MAX) and number != next(iter(rows)):
            yield f"[cut: go on with cells={range_text((bounds[0], number, bounds[2], bounds[3]))}, or with fewer columns]"
            return
        yield line[:CHARACTERS_MAX]
    if bounds[2] - bounds[0] >= COLUMNS_MAX:
        following = range_text((bounds[0] + COLUMNS_MAX, *bounds[1:]))
        yield f"[{COLUMNS_MAX} columns are shown: go on with cells={following}]"


def is_formula(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("=")


def cell_text(formula: Any, value: Any) -> str:
    """A value on one line; for a formula its value, if known, and the formula."""
    if is_formula(formula):
        return f"{'?' if value is None else value} ({formula})"
    return "" if value is None else str(value).replace("\t", " ").replace("\n", " ")


def letters(bounds: Bounds) -> list[str]:
    from openpyxl.utils import get_column_letter

    return [get_column_letter(column) for column in range(bounds[0], min(bounds[2], bounds[0] + COLUMNS_MAX - 1) + 1)]


def range_text(bounds: Bounds) -> str:
    from openpyxl.utils import get_column_letter

    return f"{get_column_letter(bounds[0])}{bounds[1]}:{get_column_letter(bounds[2])}{bounds[3]}"


def placed(cells: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The single cells to write. A list of rows fills a block, a flat list a row. ToolError for a wrong cell name."""
    from openpyxl.utils.cell import column_index_from_string, coordinate_from_string, get_column_letter

    if not cells:
        raise ToolError('cells is empty: give values by cell, such as {"A1": "total"}')
    for place, value in cells.items():
        try:
            letter, row = coordinate_from_string(place.strip().upper())
            column = column_index_from_string(letter)
        # coordinate_from_string raises CellCoordinatesException, column_index_from_string ValueError.
        except Exception:
            raise ToolError(f"{place!r} is no cell: write a letter and a number such as B2") from None
        rows = value if isinstance(value, list) else [[value]]
        for down, line in enumerate(rows if all(isinstance(row, list) for row in rows) else [rows]):
            for along, single in enumerate(line):
                yield f"{get_column_letter(column + along)}{row + down}", single


def set_cell(sheet: Any, place: str, value: Any) -> None:
    from openpyxl.utils.exceptions import IllegalCharacterError

    if isinstance(value, dict | list):
        raise ToolError(f"{place}: a cell holds a text, a number, true, false or null, not {type(value).__name__}")
    try:
        sheet[place] = value
    # openpyxl: the cells of a merge other than the first are read-only objects.
    except AttributeError:
        raise ToolError(f"{place} is part of merged cells: write to the first cell of them") from None
    except (ValueError, IllegalCharacterError) as error:
        raise ToolError(f"{place} cannot be written: {error}") from None


def save(book: Any, path: str) -> None:
    """Write the workbook. The file is complete or unchanged."""
    import io

    # Saved into memory first: an error of openpyxl half way must not damage the file.
    data = io.BytesIO()
    book.save(data)
    replace_file(work_path(path), data.getvalue())
