"""The run of the evaluations' tests, for scripts that take a trained one."""

from tests.evals.conftest import small_run as small_run
