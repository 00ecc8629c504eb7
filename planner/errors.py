"""Why a plan is refused.

PlanError               the recipe cannot run there as asked; its text is one sentence for the user
├── DoesNotFit          the model's states and activations are larger than the memory of an accelerator
├── DoesNotDivide       the global batch does not split evenly over ranks and micro batches
├── NoProfile           the machine lacks a figure the planner needs
└── BadTable            a table of measurements cannot be read
"""


class PlanError(Exception):
    """The recipe cannot run there as asked; the text is one sentence that says what is wrong and what to change."""


class DoesNotFit(PlanError):
    """Too big for the accelerator's memory; the text names by how much and the smallest change that helps."""


class DoesNotDivide(PlanError):
    """The global batch does not split evenly; the text names the nearest values that do."""


class NoProfile(PlanError):
    """A figure of the machine is missing, so that any estimate would be invented."""


class BadTable(PlanError):
    """A table of measured steps cannot be read; the text names its line and column."""
