"""Device code written in Python (Triton), installed as `deepinfer.kernels`.

Kernels take tensors and integers and know neither settings nor the model. This version ships
none: every operation runs on the torch back end.
"""
