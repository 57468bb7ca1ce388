"""Decoding: the values of `w4q repack --to hf-f32`, by DLPack."""

from __future__ import annotations

import numpy
import pytest
import w4q
from conftest import VARIANTS


@pytest.mark.parametrize("variant", VARIANTS)
def test_decodes_what_repack_decodes(variant, make, tmp_path):
    folder = make(variant)
    w4q.repack(folder, tmp_path / "decoded", to="hf-f32")
    packed, decoded = w4q.open(folder), w4q.open(tmp_path / "decoded")
    assert packed.names and not decoded.names
    for name in packed.names:
        values = packed.decode(name).numpy()
        assert values.dtype == numpy.float32
        assert (values == decoded.tensor(name + ".weight").numpy()).all(), name


def test_layouts_decode_alike(make):
    canonical, laid_out = w4q.open(make("kbit4")), w4q.open(make("kbit4", "sm89"))
    name = canonical.names[0]
    assert canonical.linear(name).layouts == ["canonical"] and laid_out.linear(name).layouts != ["canonical"]
    assert (canonical.decode(name).numpy() == laid_out.decode(name).numpy()).all()


def test_sixteen_bits_are_rounded_once(make):
    torch = pytest.importorskip("torch")
    opened = w4q.open(make("kbit4"))
    name = opened.names[0]
    exact = opened.decode(name).torch()
    assert opened.decode(name, "bfloat16").torch().equal(exact.bfloat16())
    assert opened.decode(name, "float16").torch().equal(exact.half())


def test_arrays_outlive_their_checkpoint(make):
    opened = w4q.open(make("kbit4"))
    name = opened.names[0]
    array = opened.decode(name)
    values = array.numpy()
    copy = values.copy()
    del array, opened
    assert (values == copy).all()


def test_schemes_and_sizes(make):
    opened = w4q.open(make("residual"))
    linear = opened.linear("model.layers.0.mlp.up_proj")
    assert [scheme.split("-")[0] for scheme in linear.schemes] == ["rotated4", "rotated2"]
    assert (linear.out_features, linear.in_features) == opened.decode(linear.name).shape
    assert 0 < linear.nbytes < linear.out_features * linear.in_features
    assert w4q.open(make("residual"), residual=False).schemes(linear.name) == linear.schemes[:1]


def test_what_is_not_there(make, tmp_path):
    opened = w4q.open(make("kbit4"))
    with pytest.raises(w4q.Error, match="no packed linear"):
        opened.decode("model.layers.0.mlp.nothing")
    with pytest.raises(w4q.Error, match="float64"):
        opened.decode(opened.names[0], "float64")
    with pytest.raises(w4q.Error) as raised:
        w4q.open(tmp_path / "nothing")
    assert raised.value.code == "bad_file"
