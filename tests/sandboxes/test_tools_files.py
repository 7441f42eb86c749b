"""The files family in a real sandbox."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayground.sandboxes.protocol import Sandbox
from replayground.sandboxes.tools.patch import hunks_of, patched
from tests.sandboxes.conftest import Call

REPORT = b"alpha\nbeta gamma\nvalue = 1\nbeta gamma\n"


@pytest.fixture(autouse=True)
async def tree(equipped_sandbox: Sandbox) -> None:
    await equipped_sandbox.put("notes/report.txt", REPORT)
    await equipped_sandbox.put("src/total.py", b"def order_total(a):\r\n    return a\r\n")
    await equipped_sandbox.put("picture.dat", bytes(range(256)))
    await equipped_sandbox.put("long.txt", b"".join(b"line %d\n" % number for number in range(1, 2001)))


async def test_read_numbers_the_lines(call: Call) -> None:
    assert (await call("read_file", path="notes/report.txt")).content == (
        "     1\talpha\n     2\tbeta gamma\n     3\tvalue = 1\n     4\tbeta gamma"
    )
    assert (await call("read_file", path="/work/long.txt", first_line=1999)).content == (
        "  1999\tline 1999\n  2000\tline 2000"
    )
    assert (
        await call("read_file", path="long.txt", first_line=7, last_line=8)
    ).content == "     7\tline 7\n     8\tline 8"


async def test_read_says_how_to_go_on(call: Call) -> None:
    content = (await call("read_file", path="long.txt")).content
    assert content.endswith("[lines 1 to 500 of 2000 are shown; go on with first_line=501]")
    await call("write_file", path="wide.txt", content="x" * 5000)
    assert (await call("read_file", path="wide.txt")).content.endswith("[4000 more characters in this line]")


async def test_read_is_relative_to_work_wherever_the_agent_is(call: Call) -> None:
    await call("python", code="import os; os.chdir('/tmp')")
    assert not (await call("read_file", path="notes/report.txt")).is_error


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ({"path": "notes/reprot.txt"}, "no file 'notes/reprot.txt'; did you mean 'notes/report.txt'?"),
        ({"path": "report.txt"}, "no file 'report.txt'; did you mean 'notes/report.txt'?"),
        ({"path": "notes"}, "'notes' is a folder, not a file"),
        ({"path": "long.txt", "first_line": 2001}, "long.txt has only 2000 lines"),
        ({"path": "long.txt", "first_line": 0}, "line numbers begin at 1, and last_line is not before first_line"),
        ({"path": ""}, "a path is a name such as notes/report.txt, relative to /work"),
        ({"path": "/dev/zero"}, "'/dev/zero' is not a plain file"),
    ],
)
async def test_read_errors_help(call: Call, arguments: dict[str, object], content: str) -> None:
    result = await call("read_file", **arguments)
    assert (result.content, result.error_kind) == (f"error: {content}", "agent")


async def test_what_is_not_text_names_the_tools_that_can(call: Call) -> None:
    result = await call("read_file", path="picture.dat")
    assert result.content.startswith("error: picture.dat is not a text file (256 bytes); read_document reads pdf")


async def test_unknown_path_lists_what_is_there(call: Call) -> None:
    result = await call("read_file", path="zzz")
    assert "there are 'long.txt', 'notes', 'notes/report.txt', 'picture.dat'" in result.content


async def test_write_makes_folders_and_appends(call: Call, equipped_sandbox: Sandbox) -> None:
    assert (await call("write_file", path="a/b/c.txt", content="é\n")).content == "a/b/c.txt now has 1 lines, 3 bytes"
    await call("write_file", path="a/b/c.txt", content="two", append=True)
    assert await equipped_sandbox.get("a/b/c.txt") == "é\ntwo".encode()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("notes", "error: notes cannot be written: it is a folder"),
        ("/etc/passwd", "error: /etc/passwd cannot be written: Read-only file system"),
        ("/usr/x", "error: /usr/x cannot be written: Read-only file system"),
    ],
)
async def test_write_errors_help(call: Call, equipped_sandbox: Sandbox, path: str, content: str) -> None:
    if (equipped_sandbox.isolation, path) == ("gvisor", "/usr/x"):
        content = "error: /usr/x cannot be written: Permission denied"
    result = await call("write_file", path=path, content="x")
    assert (result.content, result.error_kind) == (content, "agent")


async def test_full_disk_leaves_the_file_as_it_was(call: Call, equipped_sandbox: Sandbox) -> None:
    await call("python", code="open('fill', 'wb').write(bytes(30 << 20))")
    for tool, arguments in (
        ("write_file", {"path": "notes/report.txt", "content": "x" * (4 << 20)}),
        ("edit_file", {"path": "notes/report.txt", "old": "alpha", "new": "x" * (4 << 20)}),
        ("patch_file", {"path": "notes/report.txt", "patch": "@@ @@\n-alpha\n+" + "x" * (4 << 20)}),
    ):
        result = await call(tool, **arguments)
        assert result.content == "error: notes/report.txt cannot be written: No space left on device"
    assert await equipped_sandbox.get("notes/report.txt") == REPORT
    assert "unfinished" not in (await call("list_files")).content


async def test_edit_replaces_an_exact_piece(call: Call, equipped_sandbox: Sandbox) -> None:
    result = await call("edit_file", path="notes/report.txt", old="value = 1\nbeta", new="value = 2\ndelta")
    assert result.content == "replaced at line 3 of notes/report.txt"
    assert await equipped_sandbox.get("notes/report.txt") == b"alpha\nbeta gamma\nvalue = 2\ndelta gamma\n"
    await call("edit_file", path="src/total.py", old="return a", new="return b")
    assert await equipped_sandbox.get("src/total.py") == b"def order_total(a):\r\n    return b\r\n"


async def test_edit_keeps_bytes_that_are_not_utf8(call: Call, equipped_sandbox: Sandbox) -> None:
    await equipped_sandbox.put("latin.txt", b"caf\xe9 = 1\n")
    await call("edit_file", path="latin.txt", old="= 1", new="= 2")
    assert await equipped_sandbox.get("latin.txt") == b"caf\xe9 = 2\n"


async def test_edit_wants_one_place(call: Call) -> None:
    result = await call("edit_file", path="notes/report.txt", old="beta gamma", new="x")
    assert result.content == (
        "error: the piece occurs 2 times in notes/report.txt, at lines 2, 4: "
        "give more of the text around it, or set replace_all"
    )
    result = await call("edit_file", path="notes/report.txt", old="beta gamma", new="x", replace_all=True)
    assert result.content == "replaced at line 2, 4 of notes/report.txt"


@pytest.mark.parametrize(
    ("path", "old", "content"),
    [
        (
            "notes/report.txt",
            "valu = 1\nbeta gama",
            "the piece is not in notes/report.txt. Nearest are these lines:\n     3\tvalue = 1\n     4\tbeta gamma",
        ),
        (
            "notes/report.txt",
            "##########",
            "the piece is not in notes/report.txt: no line is like it; read the file first",
        ),
        ("notes/report.txt", "", "old is empty: give the piece to replace, or use write_file"),
        (
            "src/total.py",
            "def order_total(a):\n    return a",
            r"the piece is not in src/total.py: the lines of the file end in \r\n, those of the piece in \n",
        ),
    ],
)
async def test_edit_errors_help(call: Call, path: str, old: str, content: str) -> None:
    result = await call("edit_file", path=path, old=old, new="x")
    assert (result.content, result.error_kind) == (f"error: {content}", "agent")


async def test_list(call: Call) -> None:
    assert (await call("list_files")).content == (
        "long.txt\t18893\nnotes/\nnotes/report.txt\t38\npicture.dat\t256\nsrc/\nsrc/total.py\t35"
    )
    assert (await call("list_files", pattern="*.py")).content == "src/total.py\t35"
    assert (await call("list_files", folder="notez")).content == "error: no folder 'notez'; did you mean 'notes'?"
    await call("python", code="import os\nfor n in range(400): open(f'src/{n}', 'w').close()")
    assert (await call("list_files", folder="src")).content.endswith(
        "[101 more: name a deeper folder or a narrower pattern]"
    )


async def test_search(call: Call) -> None:
    assert (await call("search_files", pattern=r"def \w+_total")).content == "src/total.py:1: def order_total(a):"
    assert (await call("search_files", pattern="LINE 199[89]", ignore_case=True, files="l*.txt")).content == (
        "long.txt:1998: line 1998\nlong.txt:1999: line 1999"
    )
    assert (await call("search_files", pattern="^value", folder="notes/report.txt")).content == (
        "notes/report.txt:3: value = 1"
    )
    assert (await call("search_files", pattern="nowhere")).content == "[no match in 4 files]"
    assert (await call("search_files", pattern="line")).content.endswith(
        "[the first 100 matches are shown: name a folder or a file, or be narrower]"
    )
    result = await call("search_files", pattern="(")
    assert result.content.startswith(
        "error: not a regular expression: missing ), unterminated subpattern at position 0"
    )


def diff_of(before: str, after: str) -> str:
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "a/file", "b/file"))


async def test_patch_changes_several_places_at_once(call: Call, equipped_sandbox: Sandbox) -> None:
    before = (await equipped_sandbox.get("long.txt")).decode()
    after = before.replace("line 3\n", "").replace("line 900\n", "line 900\nnew\n\n").replace("line 2000", "last")
    result = await call("patch_file", path="long.txt", patch=diff_of(before, after))
    assert result.content == "long.txt: 3 places changed"
    assert (await equipped_sandbox.get("long.txt")).decode() == after


@given(
    before=st.lists(st.sampled_from(["a\n", "b\n", "\n", "}\n"]), max_size=30),
    after=st.lists(st.sampled_from(["a\n", "b\n", "\n", "}\n", "x\n"]), max_size=30),
)
def test_any_diff_leads_from_the_one_to_the_other(before: list[str], after: list[str]) -> None:
    diff = diff_of("".join(before), "".join(after))
    assert before == after or patched(before, hunks_of(diff), "\n", "path") == after


@pytest.mark.parametrize(
    ("patch", "after"),
    [
        ("@@ -1,2 +1,2 @@\n-value = 1\n+value = 2\n beta gamma", b"alpha\nbeta gamma\nvalue = 2\nbeta gamma\n"),
        ("@@ -4 +4 @@\n-beta gamma\n+delta", b"alpha\nbeta gamma\nvalue = 1\ndelta\n"),
        ("@@ -2 +2 @@\n-beta gamma\n+delta\n@@ -4 +4 @@\n-beta gamma", b"alpha\ndelta\nvalue = 1\n"),
        ("--- a\n+++ b\n@@\n alpha\n+\n+new\n", b"alpha\n\nnew\nbeta gamma\nvalue = 1\nbeta gamma\n"),
        ("@@ -4,0 +5 @@\n+the end", b"alpha\nbeta gamma\nvalue = 1\nbeta gamma\nthe end\n"),
    ],
)
async def test_patch_goes_where_its_lines_stand(
    call: Call, equipped_sandbox: Sandbox, patch: str, after: bytes
) -> None:
    result = await call("patch_file", path="notes/report.txt", patch=patch)
    assert (result.is_error, await equipped_sandbox.get("notes/report.txt")) == (False, after)


async def test_patch_keeps_the_ends_of_lines(call: Call, equipped_sandbox: Sandbox) -> None:
    await call("patch_file", path="src/total.py", patch="@@ -2 +2,2 @@\n-    return a\n+    b = a\n+    return b\n")
    assert await equipped_sandbox.get("src/total.py") == b"def order_total(a):\r\n    b = a\r\n    return b\r\n"
    await equipped_sandbox.put("open.txt", b"one\ntwo")
    patch = "@@ -2 +2,2 @@\n-two\n\\ No newline at end of file\n+2\n+3\n\\ No newline at end of file\n"
    await call("patch_file", path="open.txt", patch=patch)
    assert await equipped_sandbox.get("open.txt") == b"one\n2\n3"


@pytest.mark.parametrize(
    ("patch", "content"),
    [
        (
            "@@ -1 +1 @@\n-alpha\n+x\n@@ -3,2 +3 @@\n-valu = 1\n-beta gamma",
            "hunk 2 does not fit notes/report.txt after line 1. Nearest are these lines:\n"
            "     3\tvalue = 1\n     4\tbeta gamma",
        ),
        ("value = 2", "the patch has no hunk: begin each with a line such as @@ -12,3 +12,4 @@"),
        ("@@ -1 +1 @@\nalpha", "a line of a hunk begins with a space, - or +, not 'alpha'"),
    ],
)
async def test_patch_errors_help(call: Call, equipped_sandbox: Sandbox, patch: str, content: str) -> None:
    result = await call("patch_file", path="notes/report.txt", patch=patch)
    assert (result.content, result.error_kind) == (f"error: {content}", "agent")
    assert await equipped_sandbox.get("notes/report.txt") == REPORT
