"""Products of layers (linear, convolution) whose operands are rounded to a few bits.

`formats.py` holds the formats, `product.py` the product and its gradients, `kernels.py` the GPU's own, `casts.py` casts to FP8
in one pass each, `layers.py` what puts them on a model and takes them off again, `delayed.py` FP8 with scales from steps
before, `counting.py` what FP8 loses. Precision recipes of this kind are a `Formats`: one format for every operand of the three
products of a layer. Apart from these, `nf4.py` is a format that frozen weights are stored in, `packed_layers.py` the layers
that expand them.
"""
