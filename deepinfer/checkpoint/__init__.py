"""Model folders on disk: what must be in them, what is in them, reading and writing the weights.

`names` and `layout` need no torch and check a folder without reading a weight; `load` turns it into
tensors and `synth` writes folders. Nothing here may know what a tensor does in the model.
"""
