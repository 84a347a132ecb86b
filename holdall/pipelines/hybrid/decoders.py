"""Layers of a decoder by closed forms (Megatron-LM, SC 2021; Korthikanti et al., MLSys 2023), for models that are not traced.

a layer     24 s h^2 + 4 s^2 h operations forward, twice as many backward; 12 h^2 parameters;
            s h (10 + 24/t + 5 a s/(h t)) bytes held (without the last term where attention keeps no matrix)
head        2 s h v operations forward; v h parameters, as in the embedding; logits of s v float32 numbers for a while
"""

from __future__ import annotations

from holdall.pipelines.hybrid.layers import HybridLayer, HybridModel, StateBytes, Work
from holdall.pipelines.meshes import DecoderShape

MIXED = StateBytes(held=12, gradient=4, copy=2)  # float32 parameters and AdamW, bf16 or fp16 to compute with


def decoder_model(
    shape: DecoderShape,
    *,
    rate: float,
    bandwidth: float,
    vocabulary: int = 0,
    states: StateBytes = MIXED,
    flash: bool = False,
    width: int = 2,
) -> HybridModel:
    """A decoder for devices that reach `rate` operations and move `bandwidth` bytes a second; activations of `width` bytes.

    `flash`: attention keeps no matrix of scores. `vocabulary`: 0 leaves embedding and head out.
    """
    s, h, a = shape.seq, shape.hidden, shape.heads
    sent = width * s * h
    operations = 24 * s * h**2 + 4 * s**2 * h
    parameters = 12 * h**2
    shared = (24 + (0 if flash else 5 * a * s / h)) * s * h * width / 2
    whole = 10 * s * h * width / 2
    weights = width * parameters / bandwidth
    ahead = Work(arithmetic=operations / rate, weights=weights)
    back = Work(arithmetic=2 * operations / rate, weights=2 * weights)
    layer = HybridLayer(
        forward=(ahead, Work(moving=2 * whole / bandwidth, divided=False)),
        backward=(back, Work(moving=3 * whole / bandwidth, divided=False)),
        parameters=parameters,
        output=sent,
        activations=int(whole + shared),
        divided=int(shared),
        most_tensor=a,
    )
    layers = [layer] * shape.layers
    if vocabulary:
        words = vocabulary * h
        logits = 2 * s * h * vocabulary / rate
        near = 2 ** ((vocabulary & -vocabulary).bit_length() - 1)
        embedding = HybridLayer(
            forward=(Work(moving=2 * sent / bandwidth, divided=False),),
            backward=(Work(moving=3 * sent / bandwidth, divided=False),),
            parameters=words,
            output=sent,
            most_tensor=near,
            reduces=1,
        )
        head = HybridLayer(
            forward=(Work(arithmetic=logits), Work(moving=8 * s * vocabulary / bandwidth)),
            backward=(Work(arithmetic=2 * logits), Work(moving=8 * s * vocabulary / bandwidth)),
            parameters=words,
            output=sent,
            activations=2 * sent + width * s * vocabulary,
            divided=width * s * vocabulary,
            working=4 * s * vocabulary,
            most_tensor=near,
            reduces=1,
        )
        layers = [embedding, *layers, head]
    per_parameter = 2 * (states.held + states.gradient) / bandwidth
    return HybridModel(layers=tuple(layers), batch=shape.batch, states=states, update=per_parameter, moving=1 / bandwidth)
