import pytest
import torch

from p3net.errors import InputError
from p3net.methods.views import PATCH, strong_view


def test_a_view_keeps_shape_and_range_and_differs_between_images() -> None:
    image = torch.rand(1, 3, 64, 96)
    view = strong_view(image.repeat(3, 1, 1, 1), (1, 2, 1), 1.0)
    assert view.shape == (3, 3, 64, 96)
    assert float(view.min()) >= 0
    assert float(view.max()) <= 1
    assert not torch.equal(view[0], view[1])
    assert torch.equal(view[0], view[2])


def test_strength_zero_leaves_the_light_alone() -> None:
    image = torch.rand(2, 3, 32, 32).clamp(0.01, 1)
    torch.testing.assert_close(strong_view(image, (1, 2), 0.0), image, rtol=1e-5, atol=1e-6)


def test_places_stay_where_they_are() -> None:
    """A bright square on black is still the brightest there, whatever the light."""
    image = torch.full((8, 3, 64, 64), 0.1)
    image[:, :, 20:30, 40:50] = 0.9
    view = strong_view(image, range(8), 1.0).mean(1)
    inside = view[:, 20:30, 40:50].mean((1, 2))
    assert bool((inside > view[:, :16].mean((1, 2)) + 0.1).all())


def test_hidden_squares_have_one_colour_and_about_the_share_asked_for() -> None:
    view = strong_view(torch.rand(4, 3, 8 * PATCH, 8 * PATCH), range(4), 0.0, hidden=0.25)
    squares = view.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    flat = squares.flatten(4).std(-1).amax(1) < 1e-6
    assert 0.15 < float(flat.float().mean()) < 0.35


def test_half_of_the_soft_views_lose_up_to_the_share_of_detail_asked_for() -> None:
    waves = torch.linspace(0, 64 * torch.pi, 257)[:256].cos() * 0.4 + 0.5  # 8 px long
    images = waves.expand(400, 3, 32, 256)
    view = strong_view(images, range(400), 0.0, soft=0.8)
    torch.testing.assert_close(view.mean((1, 2, 3)), images.mean((1, 2, 3)), atol=2e-3, rtol=0)
    height = view.std((1, 2, 3)) / images.std((1, 2, 3))
    same = (view - images).abs().amax((1, 2, 3)) < 1e-5
    assert 0.42 < float(same.float().mean()) < 0.58
    assert float(height.max()) < 1 + 1e-5
    assert float(height.min()) < 0.2  # a fifth of the size: waves of 1.6 px are all but gone
    mild = strong_view(images, range(400), 0.0, soft=0.2).std((1, 2, 3)) / images.std((1, 2, 3))
    assert float(mild.min()) > 0.75


def test_sharpness_leaves_the_other_draws_alone_where_it_is_not_asked_for() -> None:
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(strong_view(images, (1, 2), 0.7), strong_view(images, (1, 2), 0.7, soft=0.0))


def test_a_batch_equals_its_images() -> None:
    images = torch.rand(3, 3, 32, 32)
    together = strong_view(images, (7, 8, 9), 0.5, 0.2, 0.5)
    for index in range(3):
        alone = strong_view(images[index : index + 1], (7 + index,), 0.5, 0.2, 0.5)
        assert torch.equal(together[index], alone[0])


def test_every_image_needs_a_seed() -> None:
    with pytest.raises(InputError, match="as many seeds"):
        strong_view(torch.rand(2, 3, 32, 32), (1,), 0.5)
