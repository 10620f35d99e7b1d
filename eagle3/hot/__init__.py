"""The training step on a GPU: the same loss and gradient as `ttt` and `loss`, in far less time.

`step.py` is the way through. Everything here also runs on a CPU in any dtype, where the tests hold
it against the slow reference; on a GPU, `core.py` and `fused.py` choose kernels instead.
"""
