from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from steadytorch.kernels import stem
from steadytorch.kernels.stem import (
    CONFIGS,
    MOST_CHANNELS,
    SHORTEST_PRODUCT,
    Config,
    busy_cores,
    config_for,
    geometry_of,
    layouts,
    shared_bytes,
)

CPU = torch.device("cpu")
LAST = torch.channels_last


def like(*shape, dtype=torch.float16, layout=LAST):
    return torch.empty(shape, dtype=dtype, device="meta", memory_format=layout)


def resnet(batch=64, size=224, dtype=torch.float16, layout=LAST):
    x = like(batch, 3, size, size, dtype=dtype, layout=layout)
    weight = like(64, 3, 7, 7, dtype=dtype, layout=layout)
    return geometry_of(x, weight, (2, 2), (3, 3), 1, False, "ieee", True)


def test_the_sizes_of_resnets_stem():
    g = resnet()
    assert (g.conv_height, g.conv_width, g.out_height, g.out_width) == (112, 112, 56, 56)
    assert (g.planes, g.inner, g.taps, g.apart, g.out_inner) == (1, 3, 7, 2, 64)
    assert g.columns(64) == 64 * 56


def test_lines_of_taps_of_two_columns_fit_what_is_read():
    # Seven pixels of three channels, two pixels further on again: 27, begun at a multiple of four.
    assert (resnet().lead, resnet().wide) == (3, 32)
    assert resnet(layout=torch.contiguous_format).wide == SHORTEST_PRODUCT


@pytest.mark.parametrize("channels", range(1, MOST_CHANNELS + 1))
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("pool_padding", [0, 1])
def test_loads_begin_where_they_may_be_as_wide_as_the_distance_of_pairs(
    channels, stride, padding, pool_padding
):
    x, weight = like(2, channels, 32, 32), like(8, channels, 5, 5)
    g = geometry_of(x, weight, (stride,) * 2, (padding,) * 2, pool_padding, False, "ieee", False)
    first = ((1 - pool_padding) * stride - padding) * g.inner - g.lead
    step = 2 * stride * g.inner
    assert first % min(8, step & -step) == 0
    assert g.lead + (5 + stride) * g.inner <= g.wide


def test_a_window_without_padding_needs_a_pair_of_columns_to_its_left():
    x, weight = like(2, 3, 32, 32), like(8, 3, 3, 3)
    g = geometry_of(x, weight, (2, 2), (1, 1), 0, False, "ieee", False)
    assert (g.out_width, g.columns(2)) == (7, 2 * 8)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (like(2, 3, 4, 6)[..., ::2], like(8, 3, 3, 3)),
        (like(2, 3, 8, 8), like(8, 3, 3, 6)[..., ::2]),
        (like(2, 3, 1, 1), like(8, 3, 5, 5)),
        (like(2**20, 3, 64, 64), like(8, 3, 3, 3)),
        (like(9, 9, 1, layout=torch.contiguous_format).permute(2, 0, 1)[None], like(8, 1, 3, 3)),
    ],
    ids=["gaps", "gaps in the weight", "too small", "too large a result", "a grey picture"],
)
def test_what_is_not_taken(x, weight):
    assert geometry_of(x, weight, (2, 2), (1, 1), 1, False, "ieee", True) is None


ORDINARY = (9, 9, 3, 1)


@pytest.mark.parametrize(
    ("shape", "strides", "weight_strides", "expected"),
    [
        ((2, 1, 4, 5), (20, 20, 5, 1), ORDINARY, (False, False)),
        ((2, 1, 4, 5), (20, 1, 5, 1), ORDINARY, (False, True)),
        ((2, 1, 4, 5), (20, 20, 5, 1), (9, 1, 3, 1), (False, True)),
        ((1, 1, 4, 5), (20, 1, 5, 1), ORDINARY, (False, True)),
        ((1, 1, 4, 5), (1, 1, 5, 1), ORDINARY, None),
        ((2, 1, 4, 5), (20, 20, 5, 1), (9, 4, 3, 1), None),
        ((2, 1, 1, 5), (5, 1, 5, 1), ORDINARY, (False, True)),
        ((2, 3, 1, 1), (3, 1, 1, 1), (27, 9, 3, 1), (False, False)),
        ((2, 3, 1, 1), (3, 1, 3, 3), (27, 9, 3, 1), (False, True)),
        ((2, 1, 1, 1), (1, 1, 1, 1), ORDINARY, (False, False)),
    ],
    ids=[
        *("one channel", "one channel, last", "weight last", "one image", "a grey picture"),
        *("an odd weight", "one line", "one pixel", "one pixel, last", "one element"),
    ],
)
def test_where_sizes_leave_it_open_the_result_lies_as_strides_say(
    shape, strides, weight_strides, expected
):
    x = torch.empty_strided(shape, strides)
    weight = torch.empty_strided((8, shape[1], 3, 3), weight_strides)
    assert layouts(x, weight) == expected
    if expected is not None:
        assert (F.conv2d(x, weight, padding=2).stride(1) == 1) is expected[1]


def test_work_is_cut_into_pieces_that_overlap_by_one_pair():
    g = resnet().cut_up(Config(64, 32, 14, 4, 1, 168))
    assert g.grid(64) == (57, 4, 2)
    assert 57 * 63 >= g.columns(64) > 56 * 63


def test_names_tell_configurations_apart():
    assert all(CONFIGS[name].name == name for name in CONFIGS)


def test_less_work_is_cut_into_shorter_strips():
    chosen = [config_for("", resnet(b), b, torch.float16, CPU) for b in (256, 64, 8, 1)]
    strips = [config.strip for config in chosen]
    assert strips == sorted(strips, reverse=True)
    assert strips[0] > strips[-1] == 1
    assert busy_cores(resnet().cut_up(chosen[0]), 256, CPU) == stem.CORES


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_is_named_is_the_one_used(name):
    assert config_for(name, resnet(), 64, torch.float16, CPU) is CONFIGS[name]


def test_what_does_not_fit_on_the_chip_is_not_used(monkeypatch):
    needed = {name: shared_bytes(resnet(), c, torch.float16) for name, c in CONFIGS.items()}
    most = max(needed, key=needed.__getitem__)
    monkeypatch.setattr(stem, "resources_of", lambda device: (needed[most] - 1, 132))
    assert config_for(most, resnet(), 64, torch.float16, CPU) is None
    assert config_for("", resnet(), 64, torch.float16, CPU) is not None
    monkeypatch.setattr(stem, "resources_of", lambda device: (1 << 10, 132))
    assert config_for("", resnet(), 64, torch.float16, CPU) is None
