"""What the train stage does with float8 head products where no GPU can make them."""

from pathlib import Path

import pytest
import torch
from tiny_pipeline import make_inputs, train

from eagle3.config import Params
from eagle3.errors import ParamsError
from eagle3.progress import ConsoleReporter


class StopAtOnce(ConsoleReporter):
    """Ends training after its first step."""

    def progress(self, label: str, done: int, total: int, unit: str) -> None:
        super().progress(label, done, total, unit)
        if label == "training":
            raise KeyboardInterrupt


def test_float8_head_products_are_refused_without_a_gpu_and_leave_another_runs_work_alone(
    tiny_params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    inputs = make_inputs(tiny_params, 128)
    with pytest.raises(KeyboardInterrupt):
        train(inputs, tiny_params, StopAtOnce())
    (work,) = Path(".work").glob("train*")
    before = {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}

    changes = {"head_products": "float8", "dtype": "bfloat16", "device": "auto"}
    how = tiny_params.train.model_copy(update=changes)
    with pytest.raises(ParamsError, match=r"trains on a CPU: .* set train\.head_products to dtype"):
        train(inputs, tiny_params.model_copy(update={"train": how}))
    # A state is gone on from by the same params alone: these have a folder of their own.
    (other,) = set(Path(".work").glob("train*")) - {work}
    assert not (other / "training").exists()
    assert {path: path.read_bytes() for path in work.rglob("*") if path.is_file()} == before
