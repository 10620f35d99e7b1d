import pytest
from pydantic import ValidationError

from eagle3.serve_params import ServeParams

GOOD = {
    "draft_tokens": [1, 3, 5, 7],
    "temperatures": [0.0, 1.0],
    "batch_sizes": [1, 8],
    "prompts": 4,
    "seed": 0,
    "dtype": "float32",
}


def test_losslessness_needs_greedy_answers():
    with pytest.raises(ValidationError, match=r"add 0\.0: greedy text must be equal"):
        ServeParams.model_validate({**GOOD, "temperatures": [1.0]})


def test_speedup_needs_a_single_stream():
    with pytest.raises(ValidationError, match=r"serve\.batch_sizes is \[8\]; add 1"):
        ServeParams.model_validate({**GOOD, "batch_sizes": [8]})
