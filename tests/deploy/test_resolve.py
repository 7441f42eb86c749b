"""Which run a start belongs to, and what its programs are told."""

import socket
from pathlib import Path

import pytest

from deploy.local.folder import RunFolder, write_whole
from deploy.resolve import Asked, ask, choose_folder, load, resolve, save
from schemas.errors import BadInput


def asked_for(folder: Path, text: str = "", seed: int = 0) -> Asked:
    path = folder / "job.toml"
    path.write_text(text)
    return ask(path, seed)


def started(runs: Path, asked: Asked) -> RunFolder:
    folder, _ = choose_folder(runs, asked, resume=False)
    save(folder, resolve(folder, asked), is_new=True)
    return folder


def test_the_same_asked_again_goes_on_with_the_unfinished_run(tmp_path: Path) -> None:
    asked = asked_for(tmp_path)
    folder = started(tmp_path / "runs", asked)
    assert choose_folder(tmp_path / "runs", asked, resume=None) == (folder, True)


def test_other_ports_are_the_same_run(tmp_path: Path) -> None:
    folder = started(tmp_path / "runs", asked_for(tmp_path))
    other = asked_for(tmp_path, "[local]\nrestarts_max = 1\n")
    assert choose_folder(tmp_path / "runs", other, resume=True) == (folder, True)


@pytest.mark.parametrize(("text", "seed"), [("[job]\nsteps = 3\n", 0), ("", 1)])
def test_something_else_is_a_new_run(tmp_path: Path, text: str, seed: int) -> None:
    started(tmp_path / "runs", asked_for(tmp_path))
    other = asked_for(tmp_path, text, seed)
    with pytest.raises(BadInput, match="no unfinished run of"):
        choose_folder(tmp_path / "runs", other, resume=True)


def test_a_finished_run_is_not_gone_on_with(tmp_path: Path) -> None:
    asked = asked_for(tmp_path)
    folder = started(tmp_path / "runs", asked)
    write_whole(folder.summary, "{}")
    with pytest.raises(BadInput, match="no unfinished run of"):
        choose_folder(tmp_path / "runs", asked, resume=True)


def test_an_unfinished_run_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    asked = asked_for(tmp_path)
    folder = started(tmp_path / "runs", asked)
    (folder.path / "version").write_text("0\n")
    with pytest.raises(BadInput, match="start a new run with --new"):
        choose_folder(tmp_path / "runs", asked, resume=None)
    assert (folder.path / "version").read_text() == "0\n"


def test_addresses_are_filled_in_and_what_was_set_stays(tmp_path: Path) -> None:
    asked = asked_for(tmp_path, '[rollouts]\nservers = ["http://elsewhere:1"]\n')
    folder, _ = choose_folder(tmp_path / "runs", asked, resume=None)
    resolved = resolve(folder, asked)
    save(folder, resolved, is_new=True)
    assert list(resolved.config.rollouts.servers) == ["http://elsewhere:1"]
    assert list(resolved.config.reloader.servers) == [f"http://127.0.0.1:{resolved.config.vllm.port}"]
    assert resolved.config.traces.dsn == f"chdb://{folder.path}/traces"
    assert resolved.page_url == f"http://127.0.0.1:{resolved.ports['traces.port']}"
    assert load(folder) == resolved


def test_a_busy_port_of_a_program_is_refused(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        asked = asked_for(tmp_path, f"[traces]\nport = {listener.getsockname()[1]}\n")
        folder, _ = choose_folder(tmp_path / "runs", asked, resume=None)
        with pytest.raises(BadInput, match=r"traces\.port = \d+ is in use"):
            resolve(folder, asked)
        assert not folder.path.exists()


def test_a_start_that_broke_off_before_it_began_is_passed_over(tmp_path: Path) -> None:
    asked = asked_for(tmp_path)
    folder = started(tmp_path / "runs", asked)
    (folder.path / "version").unlink()
    assert choose_folder(tmp_path / "runs", asked, resume=None)[1] is False
