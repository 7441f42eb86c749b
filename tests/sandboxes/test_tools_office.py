"""Workbooks and documents, made in the sandbox by the libraries themselves or, for pdf, by Chromium outside."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from replayground.sandboxes.protocol import Sandbox
from tests.sandboxes.conftest import Call

TABLE = [["name", "price"], ["panel", 685], ["valve", 12.5]]


@pytest.fixture
async def book(call: Call) -> None:
    result = await call("excel_write", path="prices.xlsx", sheet="Orders", cells={"A1": TABLE, "B4": "=SUM(B2:B3)"})
    assert not result.is_error


async def test_written_cells_are_read_by_openpyxl_itself(call: Call, book: None) -> None:
    code = "import openpyxl\nsheet = openpyxl.load_workbook('prices.xlsx')['Orders']\n[[c.value for c in r] for r in sheet]"
    assert (await call("python", code=code)).content == (
        "[['name', 'price'], ['panel', 685], ['valve', 12.5], [None, '=SUM(B2:B3)']]"
    )


async def test_excel_write_says_what_it_did(call: Call, book: None) -> None:
    result = await call("excel_write", path="prices.xlsx", cells={"a6": "total", "B6": "=B4*2", "C6": [1, True, None]})
    assert result.content == (
        "wrote 5 cells to sheet Orders of prices.xlsx, which now uses A1:E6; "
        "formulas are not computed here: work their values out with python when you need them"
    )
    result = await call("excel_write", path="prices.xlsx", sheet="Second", cells={"A1": 1})
    assert result.content == "wrote 1 cells to sheet Second of prices.xlsx, which now uses A1:A1"


async def test_excel_read_shows_values_and_formulas(call: Call, book: None) -> None:
    assert (await call("excel_read", path="prices.xlsx")).content == (
        "sheet Orders, A1:B4; sheets: Orders\n\tA\tB\n1\tname\tprice\n2\tpanel\t685\n3\tvalve\t12.5\n4\t\t? (=SUM(B2:B3))"
    )
    assert (await call("excel_read", path="prices.xlsx", cells="B2:B3")).content == (
        "sheet Orders, B2:B3; sheets: Orders\n\tB\n2\t685\n3\t12.5"
    )
    assert "A1:A4" in (await call("excel_read", path="prices.xlsx", cells="A:A")).content


async def test_excel_read_shows_what_a_spreadsheet_program_computed(call: Call, book: None) -> None:
    """Such a program stores the value beside the formula, in <v>."""
    put_value = (
        "import zipfile, re\n"
        "with zipfile.ZipFile('prices.xlsx') as old, zipfile.ZipFile('saved.xlsx', 'w') as new:\n"
        "    for name in old.namelist():\n"
        "        data = old.read(name)\n"
        "        if name.endswith('sheet1.xml'):\n"
        "            data = re.sub(rb'</f><v ?/>|</f><v></v>', b'</f><v>697.5</v>', data)\n"
        "        new.writestr(name, data)\n"
    )
    await call("python", code=put_value)
    assert "697.5 (=SUM(B2:B3))" in (await call("excel_read", path="saved.xlsx")).content


async def test_excel_read_of_a_long_sheet_goes_on(call: Call) -> None:
    """A workbook that is written row after row says nothing of its size."""
    code = (
        "import openpyxl\nbook = openpyxl.Workbook(write_only=True)\nsheet = book.create_sheet('Long')\n"
        "for number in range(1, 2001): sheet.append([number, 'text'])\nbook.save('long.xlsx')"
    )
    await call("python", code=code)
    content = (await call("excel_read", path="long.xlsx")).content
    assert content.startswith("sheet Long, A1:B2000;")
    following = content.rpartition("cells=")[2].partition(",")[0]
    first = int(following.removeprefix("A").partition(":")[0])
    assert f"\n{first - 1}\t{first - 1}\ttext\n[cut: go on with" in content
    assert f"\n{first}\t{first}\ttext\n" in (await call("excel_read", path="long.xlsx", cells=following)).content


async def test_a_far_cell_costs_nothing(call: Call) -> None:
    await call("excel_write", path="far.xlsx", cells={"A1": "near", "XFD1048576": "far"})
    content = (await call("excel_read", path="far.xlsx", cells="A1:XFD9")).content
    assert content.endswith("[100 columns are shown: go on with cells=CW1:XFD9]")


@pytest.mark.parametrize("kind", ["bar", "line", "pie"])
async def test_excel_chart(call: Call, book: None, kind: str) -> None:
    for _ in range(2):
        result = await call(
            "excel_chart", path="prices.xlsx", kind=kind, values="B1:B3", labels="A2:A3", title="Prices"
        )
    assert result.content == f"added a {kind} chart of 1 series at D18 of sheet Orders of prices.xlsx"
    code = (
        "import openpyxl\nchart = openpyxl.load_workbook('prices.xlsx')['Orders']._charts[1]\nseries = chart.series[0]\n"
        "type(chart).__name__, series.val.numRef.f, series.cat.numRef.f, series.tx.strRef.f, chart.title is not None"
    )
    name = {"bar": "BarChart", "line": "LineChart", "pie": "PieChart"}[kind]
    assert (await call("python", code=code)).content == (
        f"""('{name}', "'Orders'!$B$2:$B$3", "'Orders'!$A$2:$A$3", "'Orders'!B1", True)"""
    )


@pytest.mark.parametrize(
    ("tool", "arguments", "content"),
    [
        ("excel_read", {"path": "price.xlsx"}, "no file 'price.xlsx'; did you mean 'prices.xlsx'?"),
        (
            "excel_read",
            {"path": "prices.xlsx", "sheet": "Order"},
            "no sheet 'Order'; did you mean 'Orders'? sheets: Orders",
        ),
        ("excel_read", {"path": "prices.xlsx", "cells": "B 2"}, "'B 2' is no range of cells: write B2, B2:D20 or C:C"),
        ("excel_read", {"path": "broken.xlsx"}, "broken.xlsx is not an Excel workbook (BadZipFile"),
        (
            "excel_write",
            {"path": "prices.xlsx", "cells": {"total": 1}},
            "'total' is no cell: write a letter and a number",
        ),
        ("excel_write", {"path": "prices.xlsx", "cells": {}}, "cells is empty: give values by cell"),
        ("excel_write", {"path": "prices.xlsx", "cells": {"A1": {"b": 1}}}, "A1: a cell holds a text, a number, true"),
        ("excel_write", {"path": "prices.xlsx", "cells": {"A1": "\x01"}}, "A1 cannot be written: "),
        ("excel_write", {"path": "new.txt", "cells": {"A1": 1}}, "'new.txt' must end in .xlsx"),
        (
            "excel_chart",
            {"path": "prices.xlsx", "kind": "bar", "values": "B1"},
            "B1 is one row: give the name of the series",
        ),
    ],
)
async def test_excel_errors_help(call: Call, book: None, tool: str, arguments: dict[str, object], content: str) -> None:
    await call("write_file", path="broken.xlsx", content="no workbook")
    result = await call(tool, **arguments)
    assert result.content.startswith(f"error: {content}")
    assert result.error_kind == "agent"


async def test_docx(call: Call) -> None:
    code = (
        "import docx\nd = docx.Document()\nd.add_heading('Plan', 1)\nd.add_paragraph('First we read.')\n"
        "t = d.add_table(1, 2)\nt.rows[0].cells[0].text = 'a'\nt.rows[0].cells[1].text = 'b'\n"
        "d.add_heading('Costs', 2)\nd.add_paragraph('Ten euros.')\nd.save('plan.docx')"
    )
    await call("python", code=code)
    assert (await call("read_document", path="plan.docx")).content == (
        "plan.docx: 2 sections\n--- section 1 ---\n# Plan\nFirst we read.\na | b\n--- section 2 ---\n# Costs\nTen euros."
    )
    assert (await call("read_document", path="plan.docx", first=2)).content == (
        "plan.docx: 2 sections\n--- section 2 ---\n# Costs\nTen euros."
    )
    assert (await call("read_document", path="plan.docx", first=3)).content == "error: plan.docx has only 2 sections"


async def test_pptx(call: Call) -> None:
    code = (
        "import pptx\np = pptx.Presentation()\nfor title in ('One', 'Two'):\n"
        "    s = p.slides.add_slide(p.slide_layouts[1])\n    s.shapes.title.text = title\n"
        "    s.placeholders[1].text = 'first\\nsecond'\ns.notes_slide.notes_text_frame.text = 'smile'\n"
        "t = s.shapes.add_table(1, 2, 0, 0, 9144000, 914400).table\nt.cell(0, 0).text = 'x'\nt.cell(0, 1).text = 'y'\n"
        "p.save('talk.pptx')"
    )
    await call("python", code=code)
    assert (await call("read_document", path="talk.pptx", first=2)).content == (
        "talk.pptx: 2 slides\n--- slide 2 ---\nTwo\nfirst\nsecond\nx | y\nNotes: smile"
    )


async def test_csv(call: Call) -> None:
    await call("write_file", path="list.csv", content='name;price\n"a;b";5\n"two\nlines";6\n')
    assert (
        await call("read_document", path="list.csv", first=2)
    ).content == "list.csv: 3 rows\n2: a;b | 5\n3: two lines | 6"


async def test_html(call: Call) -> None:
    page = (
        "<html><head><title>T</title><style>x{}</style></head><body><script>no()</script><h1>Top</h1>"
        '<p>Hi <b>you</b>, <a href="/more">more</a></p><ul><li>one<li>two</ul>'
        "<h2>Data</h2><table><tr><th>a<th>b<tr><td>1<td>2</table></body></html>"
    )
    await call("write_file", path="page.html", content=page)
    assert (await call("read_document", path="page.html")).content == (
        "page.html: 2 sections\n--- section 1 ---\n# Top\n\nHi **you**, [more](/more)\n\n- one\n- two\n"
        "--- section 2 ---\n## Data\n\n| a | b |\n| --- | --- |\n| 1 | 2 |"
    )


async def test_pdf(call: Call, equipped_sandbox: Sandbox, tmp_path: Path) -> None:
    """Printed by a real browser, with its own fonts."""
    pages = "".join(f'<p style="page-break-after:always">Page {n}: revenue was {n}4,711 euros.</p>' for n in (1, 2, 3))
    (tmp_path / "report.html").write_text(f"<html><body>{pages}</body></html>")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-pdf-header-footer",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command = ["chromium", *options, f"--print-to-pdf={tmp_path}/report.pdf", f"file://{tmp_path}/report.html"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=120)
    await equipped_sandbox.put("report.pdf", (tmp_path / "report.pdf").read_bytes())
    assert (await call("read_document", path="report.pdf", first=2, last=2)).content == (
        "report.pdf: 3 pages\n--- page 2 ---\nPage 2: revenue was 24,711 euros."
    )
    result = await call("read_document", path="report.pdf", save_as="report.txt")
    assert result.content == "wrote 3 pages of report.pdf to report.txt"
    assert (await call("search_files", pattern="34,711")).content == "report.txt:6: Page 3: revenue was 34,711 euros."


async def test_long_documents_go_on(call: Call) -> None:
    paragraphs = "".join(f"<h2>Part {n}</h2><p>{'word ' * 1000}</p>" for n in range(1, 6))
    await call("write_file", path="long.html", content=paragraphs)
    content = (await call("read_document", path="long.html")).content
    assert content.endswith("[cut: go on with first=3, or use save_as and search_files]")
    await call("write_file", path="wide.html", content=f"<p>{'word ' * 5000}</p>")
    assert (await call("read_document", path="wide.html")).content.endswith(
        "[cut: section 1 has 25017 characters: use save_as and read_file, or first=2]"
    )


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("broken.pdf", "broken.pdf cannot be read as pdf: PdfStreamError"),
        ("broken.docx", "broken.docx cannot be read as docx: "),
        ("broken.pptx", "broken.pptx cannot be read as pptx: "),
        (
            "broken.xyz",
            "broken.xyz is not one of .pdf, .docx, .pptx, .csv, .tsv, .html, .htm; excel_read reads workbooks",
        ),
        ("broken.pdx", "no file 'broken.pdx'; did you mean 'broken.pd"),
    ],
)
async def test_document_errors_help(call: Call, path: str, content: str) -> None:
    if path != "broken.pdx":
        await call("write_file", path=path, content="nothing of the kind")
    else:
        await call("write_file", path="broken.pdf", content="")
    result = await call("read_document", path=path)
    assert result.content.startswith(f"error: {content}")
    assert result.error_kind == "agent"
