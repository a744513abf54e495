"""What a dry run prints: the memory of a train step."""

from evals.compile.machines import NamedMachine
from evals.compile.memory import StepMemory, TrainStep, fits


def print_memory(step: TrainStep, absent: NamedMachine | None) -> None:
    """Compiles a step and prints its bytes a device.

    Args:
      step: its mesh is of an absent machine's devices, or of those that are here.
      absent: the machine that need not be here, if it is not.
    """
    if absent is None:
        print(f"bytes per device    {_in_words(step.memory())}")
        return
    answer = fits(step, absent.describe())
    if answer.memory is not None:
        print(f"bytes per device    {_in_words(answer.memory)}")
        print(f"fits {absent.name}: {answer.limit:,.0f} bytes of each device are there for a program")
    else:
        print(answer.reason)


def _in_words(memory: StepMemory) -> str:
    return (
        f"{memory.total:,} ({memory.state:,} parameters, optimiser and batch, {memory.temporary:,} temporary)"
    )
