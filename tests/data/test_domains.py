import logging

import numpy as np
import pytest

from agentic_ring.data.domains import (
    DOMAINS,
    domain_named,
    flatten_observation,
    load_environment,
    parse_task,
    task_named,
)
from agentic_ring.errors import UnknownNameError


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)
def test_domain_describes_its_environments(domain):
    for name in domain.tasks:
        environment = load_environment(task_named(domain, name), seed=0)
        observed = flatten_observation(environment.reset().observation)
        assert (observed.shape, observed.dtype) == ((domain.observation_dim,), np.float32)
        action = environment.action_spec()
        assert action.shape == (domain.action_dim,)
        assert (action.minimum == -1).all()
        assert (action.maximum == 1).all()
        assert environment.physics.get_state().shape == (domain.physics_dim,)
        assert environment.physics.model.ntexdata < 1e6, "bytes of images that nothing draws"
        assert environment.control_timestep() == pytest.approx(domain.control_timestep_seconds)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"'humanoid'.*cheetah"):
        domain_named("humanoid")
    with pytest.raises(UnknownNameError, match=r"task of cheetah 'stand'.*run"):
        task_named(DOMAINS["cheetah"], "stand")


def test_what_dm_control_says_of_itself_is_not_repeated(caplog):
    load_environment(parse_task("cheetah_run"), seed=0)
    logging.getLogger("absl").warning("Failed to converge after %d steps: err_norm=%g", 99, 0.3)
    logging.getLogger("absl").warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
