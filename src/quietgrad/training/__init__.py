"""Plan, run, resume: the sentence "an algorithm asks a curator for noisy gradients until the steps run out".

:func:`plan` needs no data (``planning``). :func:`minimize` plans, reserves the whole cost, runs, and says what was
proved; :func:`resume` continues it after an interruption (``minimizing``). ``runs`` keeps a run in a folder and
opens it again.
:func:`stream` trains on people as they arrive, each once (``streaming``).
:func:`run` is the loop itself, for any algorithm and any curator (``running``, which ends in a ``statement``).
"""

from quietgrad.plans.schedule import plan
from quietgrad.training.callbacks import Callback
from quietgrad.training.minimizing import minimize, resume, run
from quietgrad.training.streaming import stream

__all__ = ["Callback", "minimize", "plan", "resume", "run", "stream"]
