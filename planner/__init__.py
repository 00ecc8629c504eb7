"""How fast, how big, how dear: judge every layout of a recipe on a machine before anything is paid for."""

import os
import sys

if sys.argv[:1] == ["-m"]:  # `python -m planner`: this runs before __main__, and NumPy reads the setting but once
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small: threads would wait for each other

from planner.errors import DoesNotDivide as DoesNotDivide
from planner.errors import DoesNotFit as DoesNotFit
from planner.errors import NoProfile as NoProfile
from planner.errors import PlanError as PlanError
from planner.estimate import Estimate as Estimate
from planner.estimate import Layout as Layout
from planner.estimate import Memory as Memory
from planner.estimate import Plan as Plan
from planner.interval import checkpoint_steps as checkpoint_steps
from planner.machine import Machine as Machine
from planner.machine import local_machine as local_machine
from planner.model import flops_per_token as flops_per_token
from planner.model import parameters as parameters
from planner.plan import aws_equivalent as aws_equivalent
from planner.plan import plan as plan
from planner.whatif import WhatIf as WhatIf
from planner.whatif import what_if as what_if
