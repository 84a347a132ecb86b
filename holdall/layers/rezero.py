"""ReZero: residual layers without norms, x + a F(x), with one trained number a per layer that starts at zero.

Bachlechner et al., "ReZero is All You Need: Fast Convergence at Large Depth", UAI 2021, arXiv 2003.04887. A change of the
model, for training from scratch: no planner applies it, and it does not suit pretrained weights. At initialisation every block
is the identity, so deep stacks train without warm-up; the tensors that a norm would save for backward are not saved.

The gate must not undo that: a product a * y would save y for the gradient of a. Here the gate is part of the block's last
linear layer, a (h W^T + b), where the gradient of a is <g W, h> + <g, b>; g W is needed anyway, so nothing more is saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from holdall.errors import InvalidInput, Unsupported


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight, bias, gate)
        out = F.linear(h, weight, bias)
        return out.mul_(gate.to(out.dtype))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, bias, gate = ctx.saved_tensors
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1])
        inner = h.reshape(-1, h.shape[-1]).to(rows.dtype)
        back = rows @ weight.to(rows.dtype)
        total = rows.sum(0)
        wide = torch.promote_types(rows.dtype, torch.float32)
        slope = (back * inner).sum(dtype=wide)
        if bias is not None:
            slope = slope + (total * bias).sum(dtype=wide)
        factor = gate.to(rows.dtype)
        return (
            back.mul_(factor).view(h.shape) if ctx.needs_input_grad[0] else None,
            (rows.t() @ inner).mul_(factor) if ctx.needs_input_grad[1] else None,
            total * factor if bias is not None and ctx.needs_input_grad[2] else None,
            slope.to(gate.dtype) if ctx.needs_input_grad[3] else None,
        )


def gated_linear(h: Tensor, layer: nn.Linear, gate: Tensor) -> Tensor:
    """gate * layer(h); saves only h for backward."""
    out: Tensor = _GatedLinear.apply(h, layer.weight, layer.bias, gate)
    return out


class ReZero(nn.Module):
    """x + gate * block(x). A block that ends in a linear layer saves nothing for its gate; any other saves its output."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        like = next(block.parameters(), torch.empty(0))
        self.gate = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.block) if isinstance(self.block, nn.Sequential) else [self.block]
        if type(parts[-1]) is not nn.Linear:
            gated: Tensor = self.gate * self.block(x)
            return x + gated
        h = x
        for part in parts[:-1]:
            h = part(h)
        return x + gated_linear(h, parts[-1], self.gate)


class ReZeroEncoderLayer(nn.Module):
    """An `nn.TransformerEncoderLayer` without its norms, with one gate for its attention and its feed-forward.

    As in the authors' code (majumderb/rezero). With `per_sublayer` each of the two has a gate of its own. It consists of the
    layer's own parts, under their names: its state dict is the layer's without the norms, plus the gates. It replaces the layer
    in an `nn.TransformerEncoder`.
    """

    def __init__(self, layer: nn.TransformerEncoderLayer, *, per_sublayer: bool = False) -> None:
        super().__init__()
        if layer.self_attn.in_proj_weight is None or layer.self_attn.bias_k is not None or layer.self_attn.add_zero_attn:
            raise Unsupported(
                "ReZero supports no attention with separate key and value widths or added keys",
                hint="use `torch.nn.TransformerEncoderLayer` with its default attention",
            )
        self.self_attn, self.linear1, self.linear2 = layer.self_attn, layer.linear1, layer.linear2
        self.dropout, self.dropout1, self.dropout2 = layer.dropout, layer.dropout1, layer.dropout2
        self.activation, self.per_sublayer = layer.activation, per_sublayer
        like = layer.linear1.weight
        for name in ("attention_gate", "feedforward_gate") if per_sublayer else ("gate",):
            self.register_parameter(name, nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device)))

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if src.dim() not in (2, 3):
            raise InvalidInput(
                f"the input has {src.dim()} dimensions; expected 2 or 3", hint="pass (batch, length, width) or (length, width)"
            )
        x: Tensor = src + self.dropout1(self._attend(src, src_mask, src_key_padding_mask, is_causal))
        hidden = self.dropout(self.activation(self.linear1(x)))
        out: Tensor = self.dropout2(gated_linear(hidden, self.linear2, self._gate("feedforward_gate")))
        return x + out

    def _gate(self, name: str) -> Tensor:
        """The sublayer's own gate, or the layer's."""
        gate: Tensor = getattr(self, name if self.per_sublayer else "gate")
        return gate

    def _attend(self, x: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool) -> Tensor:
        own = self.self_attn
        batched = x if x.dim() == 3 else x.unsqueeze(0)
        length_first = x.dim() == 3 and not own.batch_first
        packed = F.linear(batched, own.in_proj_weight, own.in_proj_bias).unflatten(-1, (3, own.num_heads, own.head_dim))
        # (3, batch, heads, length, head)
        q, k, v = packed.permute(2, 1, 3, 0, 4) if length_first else packed.permute(2, 0, 3, 1, 4)
        merged = _merge(mask, padding, q)
        drop = own.dropout if self.training else 0.0
        causal = is_causal and padding is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if causal else merged, dropout_p=drop, is_causal=causal)
        heads = out.permute(2, 0, 1, 3) if length_first else out.permute(0, 2, 1, 3)
        return gated_linear(heads.flatten(2), own.out_proj, self._gate("attention_gate")).view(x.shape)


def _merge(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """One additive mask that broadcasts to (batch, heads, length, length); True in a boolean mask excludes, as in `nn`."""
    parts = []
    if mask is not None:
        parts.append(mask if mask.dim() == 2 else mask.view(-1, q.shape[1], *mask.shape[-2:]))
    if padding is not None:
        parts.append(padding.view(q.shape[0], 1, 1, -1))
    added = [torch.zeros_like(m, dtype=q.dtype).masked_fill_(m, float("-inf")) if m.dtype == torch.bool else m for m in parts]
    return None if not added else added[0] if len(added) == 1 else added[0] + added[1]


def rezero_(model: nn.Module, *, final_norm: bool = False, per_sublayer: bool = False) -> nn.Module:
    """Replace every `nn.TransformerEncoderLayer` inside the model by its ReZero form, in place, and return the model.

    `final_norm`: keep the norm at the end of an `nn.TransformerEncoder`; without it the stack is the identity at first.
    `per_sublayer`: a gate for attention and one for the feed-forward, instead of one per layer as in the authors' code.
    The norms' parameters disappear, so make the optimizer afterwards. A layer by itself is returned in its new form.
    """
    if isinstance(model, nn.TransformerEncoderLayer):
        return ReZeroEncoderLayer(model, per_sublayer=per_sublayer)
    places = [(parent, name) for parent in model.modules() for name, child in parent.named_children() if _is_layer(child)]
    if not places:
        raise Unsupported(
            "the model has no `nn.TransformerEncoderLayer`",
            hint="wrap its residual blocks in `holdall.layers.rezero.ReZero`",
        )
    for parent, name in places:
        setattr(parent, name, ReZeroEncoderLayer(getattr(parent, name), per_sublayer=per_sublayer))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its fast path reads the norms
            if not final_norm:
                module.norm = None
    return model


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, nn.TransformerDecoderLayer):
        raise Unsupported(
            "ReZero supports no decoder layers with cross-attention",
            hint="wrap their residual blocks in `holdall.layers.rezero.ReZero`",
        )
    return isinstance(module, nn.TransformerEncoderLayer)


def gate_groups(model: nn.Module, *, lr: float, gate_lr: float, **options: Any) -> list[dict[str, Any]]:
    """Parameter groups with a learning rate of their own for the gates, without weight decay."""
    gates = {id(p) for name, p in model.named_parameters() if name.rpartition(".")[2].endswith("gate") and p.dim() == 0}
    rest = {"params": [p for p in model.parameters() if id(p) not in gates], "lr": lr, **options}
    return [rest, {"params": [p for p in model.parameters() if id(p) in gates], **options, "lr": gate_lr, "weight_decay": 0.0}]
