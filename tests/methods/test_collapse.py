"""The collapse watch: figures on known clips, when it warns and when it does not."""

from __future__ import annotations

import warnings

import pytest
import torch

from methods.collapse import CollapseWarning, CollapseWatch, contrast, motion


def test_contrast_is_the_variance_within_a_frame_and_motion_the_change_between_frames() -> None:
    generator = torch.Generator().manual_seed(0)
    still = torch.randn(2, 4, 1, 16, 16, generator=generator).expand(-1, -1, 3, -1, -1)
    assert contrast(still) == pytest.approx(1.0, abs=0.1) and motion(still) == 0.0
    # Solid frames that differ from each other: no contrast, but motion.
    solid = torch.tensor([0.0, 2.0, 5.0]).reshape(1, 1, 3, 1, 1).expand(2, 4, 3, 8, 8)
    assert contrast(solid) == 0.0 and motion(solid) == pytest.approx(2.5)
    assert motion(still[:, :, :1]) == 0.0
    assert contrast(3 * still) == pytest.approx(9 * contrast(still), rel=1e-5)


def watch() -> CollapseWatch:
    return CollapseWatch(baseline=2, floor=0.25, patience=3)


def test_it_warns_once_with_the_step_at_which_it_began() -> None:
    seen = watch()
    values = [1.0, 1.0, 0.3, 0.2, 0.9, 0.2, 0.1, 0.1, 0.1, 0.1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, value in enumerate(values):
            seen.observe(step, "rung 0", {"contrast": value})
            assert bool(caught) == (step >= 7)
    (warning,) = caught
    assert issubclass(warning.category, CollapseWarning)
    assert "since step 5" in str(warning.message) and "contrast is 0.1" in str(warning.message)


def test_each_kind_has_a_baseline_of_its_own() -> None:
    """Samples of an early rung are smoother from the start: no collapse."""
    seen = watch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(40):
            kind = step % 2
            seen.observe(step, f"rung {kind}", {"contrast": (0.05, 1.0)[kind], "motion": 0.5})


def test_a_restored_watch_goes_on_where_it_was() -> None:
    first = watch()
    for step, value in enumerate([1.0, 1.0, 0.1, 0.1]):
        first.observe(step, "rung 0", {"motion": value})
    second = CollapseWatch.restored(first.state())
    assert second == first
    with pytest.warns(CollapseWarning, match="since step 2: motion"):
        second.observe(4, "rung 0", {"motion": 0.1})
