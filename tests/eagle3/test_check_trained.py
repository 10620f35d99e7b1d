from pathlib import Path

import pytest
from toys import SHAPES, toy_drafter, toy_maps

from eagle3.check import check_drafter
from eagle3.checkpoint import save_drafter


@pytest.mark.parametrize("norms", SHAPES)
def test_what_training_writes_keeps_the_contract_but_for_a_toys_random_head(
    norms: str, tmp_path: Path
) -> None:
    save_drafter(toy_drafter(SHAPES[norms]), toy_maps(), (2, 4, 5), tmp_path)

    faults = check_drafter(tmp_path, None)

    assert [fault.what[:12] for fault in faults] == ["looks random"]
