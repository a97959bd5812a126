"""Plan, run, resume: the sentence "an algorithm asks a curator for noisy gradients until the steps run out".

:func:`plan` needs no data. :func:`minimize` plans, reserves the whole cost, runs, and says what was proved;
:func:`resume` continues it after an interruption (``minimizing``). ``runs`` keeps a run in a folder and opens it
again. :func:`run` is the loop itself, for any algorithm and any curator.
"""

from quietgrad.plans.schedule import plan
from quietgrad.training.callbacks import Callback
from quietgrad.training.minimizing import minimize, resume, run

__all__ = ["Callback", "minimize", "plan", "resume", "run"]
