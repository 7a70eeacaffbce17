"""Views: each augmentation against a plain way of doing it, on images small enough to think about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flyby.data.views import PLAIN, SALT, STANDARD, ViewSettings, augment
from flyby.models import ModelSpec
from flyby.rng import generator

LUMA = torch.tensor([0.299, 0.587, 0.114])
ALL = [
    PLAIN,
    STANDARD,
    SALT,
    ViewSettings(crop="resized"),
    ViewSettings(grey=0.5),
    ViewSettings(jitter=(0.4, 0.4, 0.4, 0.1), views=3),
]


def noise(count: int = 6, size: tuple[int, int] = (8, 8), channels: int = 3, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, (count, *size, channels), generator=generator(0, "images"), dtype=torch.uint8)


def seen(images: Tensor, seed: int = 0, **settings: Any) -> Tensor:
    """Views in 0..1 units, ``[N, C, H, W]``: normalised with mean 0 and standard deviation 1."""
    channels = images.shape[3]
    return augment(
        images, ViewSettings(**settings), torch.zeros(channels), torch.ones(channels), generator(seed, "views")
    )


def plain(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float() / 255


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-5)


# -- nothing to do


@pytest.mark.parametrize("channels", [1, 3])
def test_no_augmentation_is_the_models_own_normalisation_exactly(channels: int) -> None:
    spec = ModelSpec(
        name="mlp",
        classes=2,
        channels=channels,
        size=(8, 6),
        mean=(0.3, 0.4, 0.5)[:channels],
        std=(0.2, 0.25, 0.3)[:channels],
    )
    images = noise(size=(8, 6), channels=channels)
    mean, std = spec.statistics()
    assert torch.equal(augment(images, PLAIN, mean, std, generator(0)), spec.prepare(images))
    by_hand = (images[2, 5, 1, 0].item() / 255 - 0.3) / 0.2
    assert augment(images, PLAIN, mean, std, generator(0))[2, 0, 5, 1].item() == pytest.approx(by_hand, abs=1e-6)


WHOLE = {"crop": "resized", "scale": (1, 1), "ratio": (1, 1)}  # of a square image
UNMOVED = {"crop": "pad", "pad": 0}


@pytest.mark.parametrize(
    ("settings", "size"), [(UNMOVED, (8, 8)), (UNMOVED, (7, 12)), (UNMOVED, (1, 1)), (WHOLE, (1, 1)), (WHOLE, (32, 32))]
)
def test_a_resampling_that_moves_nothing_changes_nothing(settings: dict[str, Any], size: tuple[int, int]) -> None:
    images = noise(size=size)
    assert close(seen(images, **settings), plain(images))


@pytest.mark.parametrize("size", [(8, 8), (7, 12), (32, 32)])
def test_flip(size: tuple[int, int]) -> None:
    images = noise(size=size)
    assert close(seen(images, flip=1.0), plain(images).flip(3))


def test_flip_takes_its_share_of_the_samples() -> None:
    images = noise(2000, (2, 4), 1)
    flipped = (seen(images, flip=0.3) - plain(images).flip(3)).abs().amax((1, 2, 3)) < 1e-5
    kept = (seen(images, flip=0.3) - plain(images)).abs().amax((1, 2, 3)) < 1e-5
    assert bool((flipped | kept).all())
    assert flipped.float().mean().item() == pytest.approx(0.3, abs=0.05)


# -- crops


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_a_padded_crop_is_one_of_the_81_shifts(flip: float) -> None:
    images = noise(40, (10, 12))
    found = seen(images, crop="pad", pad=4, flip=flip)
    padded = F.pad(plain(images), (4, 4, 4, 4))
    shifts = torch.stack([padded[:, :, y : y + 10, x : x + 12] for y in range(9) for x in range(9)])
    shifts = shifts.flip(4) if flip else shifts
    matches = (shifts - found).abs().amax((2, 3, 4)) < 1e-5  # [81, samples]
    assert bool((matches.sum(0) == 1).all())
    assert len(set(matches.int().argmax(0).tolist())) > 20, "each sample draws its own shift"


def test_every_shift_of_a_padded_crop_is_as_likely() -> None:
    images = torch.zeros((9000, 3, 3, 1), dtype=torch.uint8)
    images[:, 1, 1] = 255
    where = seen(images, crop="pad", pad=1)[:, 0].flatten(1)  # the white pixel moves to each of nine places
    assert torch.allclose(where.mean(0), torch.full((9,), 1 / 9), atol=0.02)
    assert close(where.sum(1), torch.ones(9000))


@pytest.mark.parametrize("axis", ["across", "down"])
def test_a_resized_crop_of_a_ramp_is_a_ramp(axis: str) -> None:
    size = 32
    ramp = torch.arange(size, dtype=torch.uint8) * 8
    image = ramp[None, :].expand(size, size) if axis == "across" else ramp[:, None].expand(size, size)
    found = (
        seen(image[None, :, :, None].repeat(200, 1, 1, 1), crop="resized", scale=(0.25, 0.64), ratio=(1, 1))[:, 0]
        * 255
        / 8
    )
    lines = found[:, 5, 2:-2] if axis == "across" else found[:, 2:-2, 5]  # the outermost pixels lean on the border
    slopes = lines.diff(dim=1)
    assert close(slopes, slopes[:, :1].expand_as(slopes))
    # A crop of area share s has sides sqrt(s): between .5 and .8 of a pixel a pixel.
    assert slopes.min() >= 0.5 - 1e-4
    assert slopes.max() <= 0.8 + 1e-4
    assert slopes[:, 0].std() > 0.05, "the scale is drawn per sample"
    assert found.min() >= 0
    assert found.max() <= size - 1 + 1e-4


def test_a_resized_crop_keeps_its_ratio_and_its_area() -> None:
    size = 64
    across = (torch.arange(size) * 4).to(torch.uint8)
    images = torch.stack(
        (across[None, :].expand(size, size), across[:, None].expand(size, size), across[:, None].expand(size, size)), -1
    )
    found = seen(images[None].repeat(300, 1, 1, 1), crop="resized", scale=(0.1, 0.3), ratio=(0.5, 2.0)) * 255 / 4
    wide = found[:, 0, 30, 20:40].diff(dim=1).mean(1) * size
    tall = found[:, 1, 20:40, 30].diff(dim=1).mean(1) * size
    assert (wide / tall).min() >= 0.5 - 1e-3
    assert (wide / tall).max() <= 2.0 + 1e-3
    assert (wide / tall).log().mean().abs() < 0.1, "wide and tall are equally likely"
    area = wide * tall / size**2
    assert area.min() >= 0.1 - 1e-3
    assert area.max() <= 0.3 + 1e-3


@pytest.mark.parametrize("settings", [STANDARD, SALT, ViewSettings(crop="resized")])
def test_samples_and_views_draw_on_their_own(settings: ViewSettings) -> None:
    same = noise(1, (16, 16)).repeat(4, 1, 1, 1)
    two = settings.model_copy(update={"views": 2})
    found = augment(same, two, torch.zeros(3), torch.ones(3), generator(1))
    assert found.shape == (8, 3, 16, 16)
    assert len({row.numpy().tobytes() for row in found}) > 6, "eight views of one image"


def test_view_v_of_sample_i_is_row_v_times_b_plus_i() -> None:
    levels = torch.tensor([10, 60, 110], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 4, 4, 3)
    found = seen(levels, crop="resized", flip=0.5, views=3)
    assert (found[:, 0, 2, 2] * 255).round().tolist() == [10, 60, 110] * 3


# -- colours


def test_brightness_multiplies_each_sample_by_a_factor_in_range() -> None:
    images = noise(200, low=1, high=160)  # 160/255 * 1.5 < 1: nothing is clamped
    factors = seen(images, jitter=(0.5, 0, 0, 0), jitter_p=1.0) / plain(images)
    each = factors[:, 0, 0, 0]
    assert torch.allclose(factors, each.view(-1, 1, 1, 1).expand_as(factors), atol=1e-4)
    assert 0.5 <= each.min() < 0.55
    assert 1.45 < each.max() <= 1.5


def test_jitter_leaves_its_share_alone() -> None:
    images = noise(2000, (2, 2), low=20, high=150)
    touched = (seen(images, jitter=(0.5, 0.5, 0.5, 0.2), jitter_p=0.7) - plain(images)).abs().amax((1, 2, 3)) > 1e-4
    assert touched.float().mean().item() == pytest.approx(0.7, abs=0.05)


def test_greyscale_is_the_luma_in_every_channel() -> None:
    images = noise()
    luma = (plain(images) * LUMA.view(1, 3, 1, 1)).sum(1, keepdim=True)
    assert close(seen(images, grey=1.0), luma.expand(-1, 3, -1, -1))
    assert seen(images, grey=1.0)[0, 1, 0, 0].item() == pytest.approx(
        sum(w * v / 255 for w, v in zip((0.299, 0.587, 0.114), images[0, 0, 0].tolist(), strict=True)), abs=1e-5
    )


def test_greyscale_takes_its_share() -> None:
    found = seen(noise(2000, (2, 2)), grey=0.25)
    assert ((found[:, 0] - found[:, 2]).abs().amax((1, 2)) < 1e-4).float().mean().item() == pytest.approx(
        0.25, abs=0.05
    )


def test_saturation_and_hue_leave_grey_images_alone() -> None:
    grey = noise(channels=1).repeat(1, 1, 1, 3)
    assert close(seen(grey, jitter=(0, 0, 0.9, 0.5), jitter_p=1.0), plain(grey))


def test_hue_and_saturation_keep_the_luma() -> None:
    images = noise(100, low=90, high=165)  # near grey: a turn stays inside the cube
    before, after = (
        torch.einsum("nchw,c->nhw", x, LUMA)
        for x in (plain(images), seen(images, jitter=(0, 0, 0.3, 0.5), jitter_p=1.0))
    )
    assert torch.allclose(before, after, atol=1e-4)
    assert not close(plain(images), seen(images, jitter=(0, 0, 0.3, 0.5), jitter_p=1.0))


def test_saturation_moves_along_the_line_to_grey() -> None:
    images = noise(100, low=100, high=155)
    grey = torch.einsum("nchw,c->nhw", plain(images), LUMA)[:, None]
    before, after = plain(images) - grey, seen(images, jitter=(0, 0, 0.6, 0), jitter_p=1.0) - grey
    factors = (before * after).sum((1, 2, 3)) / (before * before).sum((1, 2, 3))
    assert torch.allclose(after, before * factors.view(-1, 1, 1, 1), atol=1e-4)
    assert 0.4 <= factors.min() < 0.5 < 1.5 < factors.max() <= 1.6


@pytest.mark.parametrize("channels", [1, 3])
def test_contrast_keeps_the_mean_and_scales_the_distance_from_it(channels: int) -> None:
    images = noise(100, channels=channels, low=100, high=155)
    weights = LUMA if channels == 3 else torch.ones(1)
    mean = torch.einsum("nchw,c->n", plain(images), weights) / 64
    found = seen(images, jitter=(0, 0.8, 0, 0), jitter_p=1.0)
    assert torch.allclose(torch.einsum("nchw,c->n", found, weights) / 64, mean, atol=1e-5)
    before, after = (x - mean.view(-1, 1, 1, 1) for x in (plain(images), found))
    factors = (before * after).sum((1, 2, 3)) / (before * before).sum((1, 2, 3))
    assert torch.allclose(after, before * factors.view(-1, 1, 1, 1), atol=1e-4)
    assert 0.2 <= factors.min() < 0.3 < 1.7 < factors.max() <= 1.8


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", ALL)
def test_views_stay_in_the_range_of_images(settings: ViewSettings, channels: int) -> None:
    mean, std = torch.full((channels,), 0.4), torch.full((channels,), 0.2)
    found = augment(noise(16, channels=channels), settings, mean, std, generator(3))
    assert found.shape == (16 * settings.views, channels, 8, 8)
    assert found.dtype == torch.float32
    assert found.min() >= (0 - 0.4) / 0.2 - 1e-5
    assert found.max() <= (1 - 0.4) / 0.2 + 1e-5


# -- the contract


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("settings", ALL)
def test_same_generator_same_bytes_and_the_input_is_left_alone(settings: ViewSettings, channels: int) -> None:
    images = noise(channels=channels)
    before = images.clone()
    mean, std = torch.full((channels,), 0.5), torch.full((channels,), 0.25)
    one, two = (augment(images, settings, mean, std, generator(0, "site-3", "views", 7)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(images, before)
    assert one.is_contiguous(memory_format=torch.channels_last)
    state = torch.get_rng_state()
    augment(images, settings, mean, std, generator(1))
    assert torch.equal(torch.get_rng_state(), state), "torch's global randomness is not touched"
    if settings != PLAIN and channels == 3:
        assert not torch.equal(one, augment(images, settings, mean, std, generator(0, "site-4", "views", 7)))


@pytest.mark.parametrize(
    "settings",
    [
        {"scale": (0.0, 1.0)},
        {"scale": (0.9, 0.2)},
        {"scale": (0.5, 1.5)},
        {"ratio": (0.0, 1.0)},
        {"ratio": (2.0, 1.0)},
        {"flip": 1.1},
        {"jitter": (-0.1, 0, 0, 0)},
        {"jitter": (1.5, 0, 0, 0)},
        {"jitter": (0, 0, 0, 0.6)},
        {"jitter_p": 2},
        {"grey": -1},
        {"pad": -1},
        {"views": 0},
        {"crop": "centre"},
        {"zoom": 1},
        {"scale": (float("nan"), 1.0)},
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        ViewSettings(**settings)


# -- images that have no up


def squares(size: tuple[int, int]) -> Tensor:
    """Images whose eight turned and mirrored forms are all different."""
    return noise(256, size, channels=2)


@pytest.mark.parametrize("size", [(6, 6), (6, 4)])
def test_quarter_turns_are_exact_and_all_alike(size: tuple[int, int]) -> None:
    images = squares(size)
    turned, flat = seen(images, turns=True), plain(images)
    forms = range(4) if size[0] == size[1] else (0, 2)
    found = torch.stack([(turned == torch.rot90(flat, k, (2, 3))).flatten(1).all(1) for k in forms], 1)
    assert (found.sum(1) == 1).all()
    assert ((found.float().mean(0) - 1 / len(forms)).abs() < 0.1).all()


def test_up_down_flips_and_turns_together_give_all_eight_forms() -> None:
    images = squares((6, 6))
    both, flat = seen(images, turns=True, vertical=0.5), plain(images)
    forms = [torch.rot90(x, k, (2, 3)) for x in (flat, flat.flip(2)) for k in range(4)]
    found = torch.stack([(both == form).flatten(1).all(1) for form in forms], 1)
    assert (found.sum(1) == 1).all()
    assert (found.float().mean(0) > 0.05).all()
    assert torch.equal(seen(images, vertical=1.0), flat.flip(2))


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_noise_is_in_units_of_the_normalised_image(channels: int) -> None:
    images = noise(64, channels=channels)
    mean, std = torch.full((channels,), 0.4), torch.full((channels,), 0.1)
    clean, noisy = (augment(images, ViewSettings(noise=n), mean, std, generator(1)) for n in (0.0, 0.25))
    apart = noisy - clean
    assert abs(float(apart.mean())) < 0.01
    assert float(apart.std()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(noisy, augment(images, ViewSettings(noise=0.25), mean, std, generator(1)))
    assert noisy.is_contiguous(memory_format=torch.channels_last)


def test_what_is_off_changes_no_draw_and_no_description() -> None:
    images, given = noise(), {"crop": "pad", "flip": 0.5, "jitter": (0.4, 0.4, 0.4, 0.1), "grey": 0.2}
    assert torch.equal(seen(images, **given), seen(images, **given, turns=False, vertical=0.0, noise=0.0))
    assert not {"turns", "vertical", "noise"} & set(SALT.model_dump())
    told = ViewSettings(turns=True, noise=0.5).model_dump(mode="json")
    assert (told["turns"], told["noise"], ViewSettings(**told).noise) == (True, 0.5, 0.5)
