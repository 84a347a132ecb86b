"""Presets of torch's own modules: the papers' parameters, a chain of blocks, and no other library."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch

import holdall
from holdall import models

COUNTS = {"vgg-16": 138_357_544, "resnet-50": 25_557_032, "inception-v3": 27_161_264, "bert-base-plain": 109_514_298}
WITHOUT_TRANSFORMERS = """
import sys

sys.modules["transformers"] = None
from holdall.cli import main

sys.argv = ["holdall", "plan", "tiny-vgg", "--batch", "4", "--planner", "nop", "--json"]
main()
"""


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_exactly_those_of_the_papers(name):
    assert count(models.build(models.describe(name))) == COUNTS[name]


def test_the_auxiliary_head_of_inception_can_be_left_out():
    source = models.describe("inception-v3")
    assert count(models.build(source, overrides={"auxiliary": []})) == 23_834_568


def test_the_bert_of_torch_has_the_shape_of_the_other():
    pytest.importorskip("transformers")
    assert count(models.build(models.describe("bert-base-plain"))) == count(models.build(models.describe("bert-base")))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("vgg-16", {"ConvReLU": 13, "MaxPool2d": 5, "Dense": 2, "Linear": 1}),
        ("resnet-50", {"ResNetStem": 1, "Bottleneck": 16, "Linear": 1}),
        (
            "inception-v3",
            {"ConvNorm": 5, "MaxPool2d": 2, "Mixed": 11, "AuxiliaryHead": 1, "Dropout": 1, "Linear": 1},
        ),
        ("bert-base-plain", {"BertEmbeddings": 1, "BertLayer": 12, "MaskedWordsHead": 1}),
    ],
)
def test_blocks_are_the_layers_and_forks_stay_inside(name, kinds):
    source = models.describe(name)
    trace = holdall.trace(models.build(source), models.sample_batch(source, batch=2, seq=16))
    found = {}
    for block in trace.blocks:
        found[block.kind] = found.get(block.kind, 0) + 1
    assert found == kinds
    trunk = [b for b in trace.blocks if b.kind not in ("AuxiliaryHead", "Linear", "Dropout", "Dense", "MaskedWordsHead")]
    for before, after in pairwise(trunk):
        assert set(before.outputs) & set(after.inputs), (before.name, after.name)  # a chain


@pytest.mark.parametrize("name", ["tiny-vgg", "tiny-resnet", "tiny-inception", "tiny-bert-plain"])
def test_evaluation_gives_logits_and_no_loss(name):
    source = models.describe(name)
    model = models.build(source, device="cpu").eval()
    batch = models.sample_batch(source, batch=2, seq=8)
    batch.pop("labels")
    out = model(**batch)
    assert out.loss is None and torch.isfinite(out.logits).all()


def test_a_masked_word_is_not_attended_to():
    source = models.describe("tiny-bert-plain")
    model = models.build(source, device="cpu").eval()
    batch = models.sample_batch(source, batch=1, seq=8)
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[0, -1] = 0
    other = batch["input_ids"].clone()
    other[0, -1] = (other[0, -1] + 1) % 512
    ones, zero = (
        [model(input_ids=ids, attention_mask=m).logits[:7] for ids in (batch["input_ids"], other)]
        for m in (torch.ones_like(mask), mask)
    )
    assert not torch.equal(*ones)
    assert torch.equal(*zero)


def test_the_command_line_needs_torch_alone():
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert '"planner": "nop"' in run.stdout
