from ctypes.util import find_library

import numpy as np
import pytest

from agentic_ring.data.domains import load_environment, parse_task
from evals.report_page.filmstrip import HEIGHT, WIDTH, RenderingError, data_uri, evenly_spaced, render

TASK = parse_task("cartpole_swingup")


@pytest.mark.skipif(find_library("OSMesa") is None, reason="MuJoCo needs OSMesa to draw in software")
def test_a_state_is_drawn_where_the_cart_stands(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    physics = load_environment(TASK, seed=0).physics
    states = []
    for place in (-1.2, 1.2):
        with physics.reset_context():
            physics.named.data.qpos["slider"] = place
        states.append(physics.get_state())
    left, right = render(TASK, np.array(states))
    assert left.shape == (HEIGHT, WIDTH, 3)
    assert left.dtype == np.uint8
    moved = np.abs(left.astype(int) - right).sum(axis=-1)
    columns = moved.sum(axis=0)
    assert columns[: WIDTH // 2].sum() > 0.2 * columns.sum()
    assert columns[WIDTH // 2 :].sum() > 0.2 * columns.sum()
    # The cart is the warmest thing in the picture.
    warmth = [(frame[..., 0].astype(int) - frame[..., 2]).clip(0).sum(axis=0) for frame in (left, right)]
    centres = [np.average(np.arange(WIDTH), weights=row) for row in warmth]
    assert centres[0] < WIDTH / 2 < centres[1]


def test_without_graphics_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disabled")
    with pytest.raises(RenderingError, match=r"MUJOCO_GL=disabled: .*libosmesa6"):
        render(TASK, np.zeros((1, TASK.domain.physics_dim)))


def test_a_frame_becomes_a_jpeg_within_an_address():
    assert data_uri(np.zeros((4, 4, 3), np.uint8)).startswith("data:image/jpeg;base64,/9j/")


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (3, [0, 1, 2]), (9, [0, 2, 4, 6, 8])])
def test_places_hold_the_first_and_the_last(count, places):
    assert evenly_spaced(count, 5).tolist() == places
