"""Encoders of text with a head on top."""

from __future__ import annotations

from typing import Any

import torch

from holdall.testing.families._registry import (
    HEADS,
    INNER,
    LAYERS,
    ROWS,
    VOCABULARY,
    WIDTH,
    Made,
    hugging_face,
    register,
    tokens,
)

USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 130,
    "pad_token_id": 2,
}


def _encoder(name: str, prefix: str, *, task: str = "SequenceClassification", **settings: Any) -> None:
    @register("encoder", name)
    def build() -> Made:
        labels = {"num_labels": 3} if task == "SequenceClassification" else {}
        made = hugging_face(f"{prefix}For{task}", f"{prefix}Config", **{**USUAL, **labels, **settings})
        ids = tokens()
        mask = torch.ones_like(ids)
        mask[0, -8:] = 0
        answers = torch.randint(0, 3, (ROWS,)) if labels else ids.clone()
        return made, {"input_ids": ids, "attention_mask": mask, "labels": answers}


_encoder("bert", "Bert")
_encoder("bert-masked", "Bert", task="MaskedLM")
_encoder("bert-tokens", "Bert", task="TokenClassification", num_labels=VOCABULARY)
_encoder("roberta", "Roberta")
_encoder("albert", "Albert", embedding_size=32)
_encoder("electra", "Electra", embedding_size=32)
_encoder(
    "deberta-v2",
    "DebertaV2",
    relative_attention=True,
    position_buckets=16,
    pos_att_type=["p2c", "c2p"],
    norm_rel_ebd="layer_norm",
    share_att_key=True,
)
_encoder("deberta-v2-absolute", "DebertaV2")
_encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"])
_encoder(
    "modernbert",
    "ModernBert",
    global_attn_every_n_layers=2,
    local_attention=16,
    bos_token_id=0,
    eos_token_id=1,
    cls_token_id=0,
    sep_token_id=1,
)
_encoder("distilbert", "DistilBert", dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=INNER)
_encoder("longformer", "Longformer", attention_window=[8, 8])
_encoder("roformer", "RoFormer")
_encoder("mpnet", "MPNet")
_encoder("squeezebert", "SqueezeBert", embedding_size=WIDTH)
_encoder("camembert", "Camembert")
_encoder("convbert", "ConvBert", embedding_size=WIDTH, head_ratio=2, conv_kernel_size=3)


def _classifier(name: str, prefix: str, **settings: Any) -> None:
    """Without a mask: these have names of their own for sizes, or pool as they go."""

    @register("encoder", name)
    def build() -> Made:
        made = hugging_face(f"{prefix}ForSequenceClassification", f"{prefix}Config", num_labels=3, **settings)
        return made, {"input_ids": tokens(), "labels": torch.randint(0, 3, (ROWS,))}


_OWN = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_head": HEADS, "d_inner": INNER}
_classifier("xlnet", "XLNet", **_OWN, n_layer=LAYERS, pad_token_id=2)
_classifier("funnel", "Funnel", **_OWN, d_head=16, block_sizes=[1, 1])
_classifier(
    "fnet",
    "FNet",
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    intermediate_size=INNER,
    max_position_embeddings=128,
    pad_token_id=2,
)
