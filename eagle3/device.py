"""Where tensors live: the device that a params value means on this machine."""

import torch

from eagle3.config import Device, Dtype
from eagle3.errors import ParamsError

TORCH_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(device: Device, key: str) -> torch.device:
    """Resolve `auto`; `key` is the params key to name if the machine lacks the device.

    Raises:
        ParamsError: cuda is asked for and there is none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ParamsError(f"{key} is cuda, but this machine has no CUDA GPU; set it to auto or cpu")
    return torch.device(device)
