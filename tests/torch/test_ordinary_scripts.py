"""A sample of the ordinary scripts of ``benchmarks/scripts.py``: each does what is written beside it."""

from __future__ import annotations

import pytest
from benchmarks import scripts_more
from benchmarks.scripts import SHAPES, outcome

SAMPLE = (
    "closure", "clipped_by_norm", "gradient_norms_logged", "accumulated_samples", "cosine_schedule", "lbfgs",
    "parameter_groups", "averaged_weights", "per_layer_clipping", "adaptive_clipping", "subset_sampler",
    "weighted_sampler", "stream_of_public_length", "without_noise", "penalty_in_the_loss",
    *(
        each.__name__
        for each in (
            scripts_more.noise_that_falls, scripts_more.both_schedules_at_an_epsilon, scripts_more.class_weights,
            scripts_more.batch_is_an_object, scripts_more.compiled_in_place, scripts_more.head_first_then_all,
            scripts_more.unfrozen_on_the_way, scripts_more.opacus_paths, scripts_more.samplers_registered_by_hand,
            scripts_more.trained_until_epsilon_is_reached, scripts_more.left_in_the_middle_of_an_epoch,
        )
    ),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_script_does_what_is_written_beside_it(name: str) -> None:
    run, models, expected = SHAPES[name]
    made, said = outcome(run, models[0])
    assert made == expected, said


def test_there_are_a_hundred_scripts() -> None:
    assert sum(len(models) for _, models, _ in SHAPES.values()) >= 100
