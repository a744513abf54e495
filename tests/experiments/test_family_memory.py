"""Published models of all families have their published sizes."""

import jax
import pytest

from agentic_ring.errors import UnknownNameError
from agentic_ring.models.llama.families import FAMILIES, OWN
from agentic_ring.models.model import Model
from experiments.family_memory import PUBLISHED, published

PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "phi-3-mini-4k": 3_821_079_552,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-12b": 11_766_034_176,
}
"""Of the published weights; of the last model without its images' part."""


def test_there_is_a_model_of_each_family():
    assert [published(name).family for name in PUBLISHED] == [name for name in FAMILIES if name != OWN.name]
    with pytest.raises(UnknownNameError, match="unknown model 'gpt-oss-20b'; choose one of: llama-3-8b"):
        published("gpt-oss-20b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_as_many_parameters_as_published(name):
    parameters = Model(published(name)).abstract_params()
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == PARAMETERS[name]
