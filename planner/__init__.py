"""How fast, how big, how dear: judge every layout of a recipe on a machine before anything is paid for."""

from planner.errors import DoesNotDivide as DoesNotDivide
from planner.errors import DoesNotFit as DoesNotFit
from planner.errors import NoProfile as NoProfile
from planner.errors import PlanError as PlanError
from planner.estimate import Estimate as Estimate
from planner.estimate import Layout as Layout
from planner.estimate import Plan as Plan
from planner.machine import Machine as Machine
from planner.machine import local_machine as local_machine
from planner.memory import Memory as Memory
from planner.model import flops_per_token as flops_per_token
from planner.model import parameters as parameters
from planner.search import aws_equivalent as aws_equivalent
from planner.search import plan as plan
