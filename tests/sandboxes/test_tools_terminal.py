"""terminal: state from call to call, and what ends it."""

import pytest

from tests.sandboxes.conftest import Call


async def test_output_and_exit_code(call: Call) -> None:
    result = await call("terminal", command="echo out; echo err >&2; exit 3")
    assert (result.content, result.is_error) == ("out\nerr\n[exit code 3]", False)
    assert (await call("terminal", command="printf 'no line end'")).content == "no line end\n[exit code 0]"
    assert (await call("terminal", command="true")).content == "[exit code 0]"
    assert (await call("terminal", command="echo 1\nnosuch\n")).content == (
        "1\nbash: line 2: nosuch: command not found\n[exit code 127]"
    )
    assert (await call("terminal", command="kill -9 $$")).content == "[exit code 137]"


async def test_folder_and_exported_variables_stay(call: Call) -> None:
    await call("terminal", command="mkdir -p 'a b'; cd 'a b'; export COLOUR=$'red\\nblue' HIDDEN=1; plain=1; false")
    await call("terminal", command="unset HIDDEN; exit 2")
    shown = await call("terminal", command='pwd; echo "$COLOUR" [$HIDDEN] [$plain]')
    assert shown.content == "/work/a b\nred\nblue [] []\n[exit code 0]"


async def test_a_folder_that_is_gone_is_left(call: Call) -> None:
    await call("terminal", command="mkdir gone; cd gone; rm -r /work/gone")
    result = await call("terminal", command="pwd")
    assert result.content == "error: the working directory /work/gone is gone; the next command starts in /work"
    assert (await call("terminal", command="pwd")).content == "/work\n[exit code 0]"


async def test_timeout_kills_the_whole_group_and_keeps_the_state(call: Call) -> None:
    await call("terminal", command="cd /tmp")
    command = "cd /; export LOST=1; echo begun; sleep 4711 & sleep 4711 | cat"
    result = await call("terminal", command=command, timeout_seconds=3)
    assert result.error_kind == "agent"
    assert result.content.startswith("error: stopped after 3 s. The working directory and variables are as before.")
    assert result.content.endswith("begun\n")
    assert (await call("terminal", command="pwd; echo [$LOST]; pgrep -f 'sleep 471[1]'")).content == (
        "/tmp\n[]\n[exit code 1]"
    )


async def test_what_runs_in_the_background_keeps_nobody_waiting(call: Call) -> None:
    assert (await call("terminal", command="sleep 4711 & echo begun")).content == "begun\n[exit code 0]"
    assert (await call("terminal", command="pgrep -c -f 'sleep 471[1]'")).content == "1\n[exit code 0]"


async def test_the_dead_do_not_count_as_processes(call: Call) -> None:
    for _ in range(40):  # each leaves two that outlive their parent: together more than may live at the same time
        assert (await call("terminal", command="(sleep 0.02 &); (sleep 0.02 &)")).content == "[exit code 0]"


async def test_long_output_is_cut_in_the_middle(call: Call) -> None:
    content = (await call("terminal", command="seq 100000 199999")).content
    assert content.startswith("100000\n100001\n")
    assert content.endswith("\n199999\n[exit code 0]")
    assert (
        "[… 688000 of 700000 bytes are left out here: send the output to a file and read the part you need …]"
        in content
    )
    assert len(content) < 12_300


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ({"command": "true", "timeout_seconds": 0}, "timeout_seconds is from 1 to 120"),
        ({"command": "true", "timeout_seconds": 121}, "timeout_seconds is from 1 to 120"),
        ({"command": "a\0b"}, "a command cannot hold the character NUL"),
        (
            {"command": "true " + "x" * 200_000},
            "the command or the exported variables are too long: write the command into a file and run that",
        ),
    ],
)
async def test_errors_help(call: Call, arguments: dict[str, object], content: str) -> None:
    result = await call("terminal", **arguments)
    assert (result.content, result.error_kind) == (f"error: {content}", "agent")


async def test_nothing_can_be_typed(call: Call) -> None:
    assert (await call("terminal", command="cat; read x; echo [$x]")).content == "[]\n[exit code 0]"


async def test_programs_see_the_libraries(call: Call) -> None:
    assert (await call("terminal", command="python3 -c 'import openpyxl; print(1)'")).content == "1\n[exit code 0]"


async def test_output_that_is_not_utf8_does_not_hide_the_exit_code(call: Call) -> None:
    for size in (4_001, 12_000, 100_000):
        shown = (await call("terminal", command=f"head -c {size} /dev/zero | tr '\\0' '\\377'; exit 7")).content
        assert shown.endswith("[exit code 7]")
        assert "bytes are left out here" in shown
    mixed = (await call("terminal", command="seq 1 1300; head -c 9000 /dev/urandom; exit 3")).content
    assert mixed.startswith("1\n2\n")
    assert mixed.endswith("[exit code 3]")
