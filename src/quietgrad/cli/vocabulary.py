"""Errors in the words of the command line: Python's arguments become the flags that say the same.

Messages are written once, where the mistake is found, in Python's words; here, on their way to a terminal, they are
turned into this place's.
"""

from __future__ import annotations

import re

FLAGS = (
    "epsilon", "delta", "relation", "steps", "batch_size", "learning_rate", "clip", "gamma", "sampling",
    "algorithm", "oracle", "landscape", "objective", "regularizer", "row_bound", "rows", "label", "classes", "task",
    "n_features", "n_public", "schema", "account", "noise_multiplier", "rate", "accountant", "cap_epsilon", "head",
)  # fmt: skip
_PHRASES = {
    "For a non-private run pass budget=None.": "For a run without noise pass --non-private to `quietgrad train`.",
    "OutputPerturbation(mechanism='pure')": "--algorithm output-perturbation --set mechanism=pure",
    "pass budget=None, or use its private form": "pass --non-private, or use its private form",
    "budget=None": "--non-private",
    "Budget(..., relation='replace-one')": "relation='replace-one'",
}
_ARGUMENT = re.compile(rf"(?<![\w.])({'|'.join(FLAGS)})=('[^']*'|\"[^\"]*\"|\([^)]*\)|[-+\w.]+)?")


def in_flags(text: str) -> str:
    """``text`` with arguments of Python as flags.

    >>> in_flags("epsilon=-1.0: must be > 0 and finite. For a non-private run pass budget=None.")
    '--epsilon -1.0: must be > 0 and finite. For a run without noise pass --non-private to `quietgrad train`.'
    >>> in_flags("relation='add-remove': not proved; pass Budget(..., relation='replace-one').")
    '--relation add-remove: not proved; pass --relation replace-one.'
    >>> in_flags("say what they are: classes=(1, 2, 3), or task='regression'; batch_size=9: must be ≤ n=4.")
    'say what they are: --classes 1,2,3, or --task regression; --batch-size 9: must be ≤ n=4.'
    """
    for python, here in _PHRASES.items():
        text = text.replace(python, here)
    return _ARGUMENT.sub(_flag, text)


def _flag(found: re.Match[str]) -> str:
    flag, value = f"--{found[1].replace('_', '-')}", found[2] or ""
    if value.startswith("("):
        value = ",".join(part.strip().strip("'\"") for part in value[1:-1].split(",") if part.strip())
    return f"{flag} {value.strip(chr(39) + chr(34))}".rstrip()
