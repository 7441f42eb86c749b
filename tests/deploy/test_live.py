"""What a person sees of a run, with and without a target."""

import io

from rich.console import Console

from replayground.deploy.live import PlainView, TerminalView, step_line, steps_text
from replayground.deploy.traces_client import Overview


def shown(overview: Overview) -> str:
    screen = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with TerminalView(screen, "a run", "http://page") as view:
        view.show(overview, {}, {})
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_a_run_that_trains_until_stopped_has_no_target() -> None:
    overview = Overview(phase="training", steps=7, steps_target=0)
    assert steps_text(7, 0) == "7"
    assert step_line(overview).startswith("step 7 reward")
    assert "until stopped" in shown(overview)


def test_a_run_with_a_target_shows_how_far_it_is() -> None:
    overview = Overview(phase="training", steps=7, steps_target=9)
    assert step_line(overview).startswith("step 7/9 reward")
    assert "7 of 9" in shown(overview)


def test_a_rising_share_of_infra_errors_is_shown() -> None:
    overview = Overview(phase="training", steps=7, infra_error_alarm=0.3)
    told = "infra errors rise: 30% of the newest version's rollouts"
    assert step_line(overview).endswith(told)
    assert told in shown(overview)
    assert "infra errors" not in shown(Overview(phase="training", steps=7))


def test_before_the_first_look_nothing_is_known() -> None:
    assert "until stopped" in shown(Overview())


def test_elsewhere_a_line_is_printed_for_each_step() -> None:
    output = io.StringIO()
    with PlainView(Console(file=output, width=200), "http://page") as view:
        for steps in (0, 1, 1, 2):
            view.show(Overview(phase="training", steps=steps), {}, {})
    assert [line.split(" reward")[0] for line in output.getvalue().splitlines()[2:]] == ["step 1", "step 2"]
