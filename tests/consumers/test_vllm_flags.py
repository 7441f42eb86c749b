"""Every flag and variable that the profiles for CPU and GPU make is known to the installed vLLM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replayground.consumers.config import VllmSettings
from replayground.consumers.vllm_server import command, environment
from replayground.deploy.config import DEFAULT_CONFIG, parse_config, read_toml

PROFILES = {name: DEFAULT_CONFIG.with_name(f"{name}.toml") for name in ("stockroom", "gpu")}
# By vLLM's own parser; the program itself would go on to look for a device.
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
import vllm.envs
found = []
for line in sys.stdin:
    flags, variables = json.loads(line)
    parsed = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(flags))
    unknown = [name for name in variables if name.startswith("VLLM_") and name not in vllm.envs.environment_variables]
    names = ("dtype", "tensor_parallel_size", "enforce_eager", "gpu_memory_utilization", "max_num_seqs", "async_scheduling")
    found.append([{name: parsed[name] for name in names}, unknown])
print(json.dumps(found))
"""


def settings_of(profile: str) -> VllmSettings:
    return parse_config(read_toml(PROFILES[profile]), PROFILES[profile]).vllm


def test_vllm_knows_every_flag_and_variable_of_the_profiles() -> None:
    lines: list[str] = []
    for profile in PROFILES:
        settings = settings_of(profile)
        flags = command(Path("/model"), settings)
        lines.append(json.dumps([flags[flags.index("serve") + 2 :], list(environment(settings))]))
    done = subprocess.run([sys.executable, "-c", PARSE], input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (cpu, cpu_unknown), (gpu, gpu_unknown) = json.loads(done.stdout.splitlines()[-1])
    assert (cpu_unknown, gpu_unknown) == ([], [])
    assert (cpu["dtype"], cpu["enforce_eager"], cpu["tensor_parallel_size"]) == ("float32", True, 1)
    assert (gpu["dtype"], gpu["enforce_eager"], gpu["tensor_parallel_size"]) == ("bfloat16", False, 2)
    assert (gpu["gpu_memory_utilization"], gpu["max_num_seqs"], gpu["async_scheduling"]) == (0.9, 256, True)


@pytest.mark.parametrize("word", ["VLLM_CPU", "TORCHDYNAMO", "OMP_NUM_THREADS", "enforce-eager", "UniProc"])
def test_what_is_for_cpus_alone_is_not_in_the_gpu_profile(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = {name: [*command(Path("/m"), settings_of(name)), *environment(settings_of(name))] for name in PROFILES}
    assert any(word in part for part in made["stockroom"])
    assert not any(word in part for part in made["gpu"])
